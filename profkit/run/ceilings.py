"""``ceilings.json``: what a device can do at most, as ``profkit ceilings`` measured it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

from profkit.errors import RunError
from profkit.files import write_json
from profkit.run.records import read_record
from profkit.text_kinds import GpuName, Message, Moment, Version, Word

VERSION = 1


@dataclass(frozen=True)
class MeasuredDevice:
    """What was measured. ``clock_mhz`` is the SMs' clock seen under load and ``clock_max_mhz`` what the device allows;
    None where the device does not report it."""

    name: GpuName
    uuid: Message | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None


@dataclass(frozen=True)
class Gemm:
    """Products of ``(m, k)`` by ``(k, n)`` in ``dtype``: "fp32", "tf32", "bf16" or "fp16"."""

    dtype: Word
    m: int
    n: int
    k: int
    best_flops_per_s: float
    median_flops_per_s: float

    def __post_init__(self) -> None:
        _refuse_impossible(self.best_flops_per_s, self.median_flops_per_s)


@dataclass(frozen=True)
class Copy:
    """A copy on the device of ``bytes``; its rates count each byte twice, read and written."""

    bytes: int
    best_bytes_per_s: float
    median_bytes_per_s: float

    def __post_init__(self) -> None:
        _refuse_impossible(self.best_bytes_per_s, self.median_bytes_per_s)


@dataclass(frozen=True)
class Ceilings:
    """The content of ``ceilings.json``."""

    version: int
    device: MeasuredDevice
    torch: Version
    driver: Version | None
    measured_utc: Moment
    gemm: tuple[Gemm, ...]
    copy: Copy


def read_ceilings(path: Path) -> Ceilings:
    """Return the ceilings in a file.

    Raises:
        RunError: there is no such file, it cannot be read, or it is of another version or form.
    """
    try:
        return read_record(Ceilings, path, VERSION)
    except FileNotFoundError:
        raise RunError(f"{path}: no such file; measure with `profkit ceilings -o {path}`") from None


def write_ceilings(path: Path, ceilings: Ceilings) -> None:
    """Write the ceilings to a file.

    Raises:
        OSError: it cannot be written.
    """
    write_json(path, asdict(ceilings))


def _refuse_impossible(*rates: float) -> None:
    for rate in rates:
        if not (isfinite(rate) and rate > 0):
            raise ValueError(f"{rate!r} is not a rate")
