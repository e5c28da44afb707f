"""What a device can do at most, as `profkit ceilings` measured it: the reader of ``ceilings.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profkit.errors import RunError
from profkit.run_directory import CEILINGS, read_json

VERSION = 1


@dataclass(frozen=True)
class Device:
    """What was measured. ``clock_mhz`` is the SMs' clock seen under load and ``clock_max_mhz`` what the device allows;
    None where it does not tell."""

    name: str
    uuid: str | None
    clock_mhz: int | None
    clock_max_mhz: int | None


@dataclass(frozen=True)
class Gemm:
    """Products of ``(m, k)`` by ``(k, n)`` in ``dtype``: "fp32", "tf32", "bf16" or "fp16"."""

    dtype: str
    m: int
    n: int
    k: int
    best_flops_per_s: float
    median_flops_per_s: float


@dataclass(frozen=True)
class Copy:
    """A copy on the device of ``bytes``; its rates count each byte twice, read and written."""

    bytes: int
    best_bytes_per_s: float
    median_bytes_per_s: float


@dataclass(frozen=True)
class Ceilings:
    """The content of ``ceilings.json``."""

    device: Device
    torch: str
    driver: str | None
    measured_utc: str
    gemm: tuple[Gemm, ...]
    copy: Copy

    def find(self, dtype: str) -> Gemm | None:
        """Return the products in ``dtype``, or None if they were not measured."""
        return next((one for one in self.gemm if one.dtype == dtype), None)


def read_ceilings(path: Path) -> Ceilings | None:
    """Return the ceilings in a file, or in a run directory; None if a directory has none.

    Raises:
        RunError: the file cannot be read, or is of another version or form.
    """
    file = path / CEILINGS if path.is_dir() else path
    try:
        content = read_json(file, "not JSON; measure again with `profkit ceilings`")
    except FileNotFoundError:
        if path.is_dir():
            return None
        raise RunError(f"{file}: there is no such file; measure with `profkit ceilings -o {file}`") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise RunError(f"{file}: no ceilings of version {VERSION}; measure again with `profkit ceilings`")
    try:
        return build_ceilings(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{file}: damaged ({type(error).__name__}: {error}); measure again") from None


def build_ceilings(content: dict[str, Any]) -> Ceilings:
    """Return the ceilings in the content of a ``ceilings.json``.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: a part is missing or is no number.
    """
    device, copy = content["device"], content["copy"]
    return Ceilings(
        device=Device(str(device["name"]), device.get("uuid"), device.get("clock_mhz"), device.get("clock_max_mhz")),
        torch=str(content["torch"]),
        driver=content["driver"],
        measured_utc=str(content["measured_utc"]),
        gemm=tuple(map(_gemm, content["gemm"])),
        copy=Copy(int(copy["bytes"]), _rate(copy["best_bytes_per_s"]), _rate(copy["median_bytes_per_s"])),
    )


def _gemm(one: dict[str, Any]) -> Gemm:
    rates = _rate(one["best_flops_per_s"]), _rate(one["median_flops_per_s"])
    return Gemm(str(one["dtype"]), int(one["m"]), int(one["n"]), int(one["k"]), *rates)


def _rate(value: Any) -> float:
    rate = float(value)
    if not 0 < rate < float("inf"):
        raise ValueError(f"{value!r} is no rate")
    return rate
