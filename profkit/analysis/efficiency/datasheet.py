"""GPUs' peaks from NVIDIA's datasheets, for a capture from a GPU that was not measured."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("datasheet.toml")


@dataclass(frozen=True)
class Datasheet:
    """Dense peaks of a GPU: FLOP/s by type ("fp32", "tf32", "bf16", "fp16", those that it has), and memory bytes/s."""

    name: str
    flops_per_s: dict[str, float]
    bytes_per_s: float


def find_datasheet(gpu: str | None) -> Datasheet | None:
    """Return the datasheet of a GPU by the name that torch and nsys give it; None if the table lacks it.

    Names are compared whole: an "RTX 4090 D" is not an "RTX 4090".
    """
    return None if gpu is None else _datasheets().get(gpu.removeprefix("NVIDIA ").strip())


@cache
def _datasheets() -> dict[str, Datasheet]:
    """Return the table by name; it is in TFLOP/s and GB/s."""
    found = {}
    for row in tomllib.loads(_TABLE.read_text(encoding="utf-8"))["gpu"]:
        peaks = {dtype: value * 1e12 for dtype, value in row["tflops_per_s"].items()}
        for name in row["names"]:
            found[name] = Datasheet(name, peaks, row["gigabytes_per_s"] * 1e9)
    return found
