"""Which CUDA a driver and an nsys were made for."""

from __future__ import annotations

import re
from pathlib import Path

CUPTI = "libcupti.so"

# The driver branch that came with each CUDA version, newest first: "CUDA Toolkit and Corresponding Driver Versions" in
# NVIDIA's CUDA Toolkit Release Notes. A driver knows the newest CUDA whose branch it reaches.
_BRANCHES = (
    (590, "13.1"),
    (580, "13.0"),
    (575, "12.9"),
    (570, "12.8"),
    (560, "12.6"),
    (555, "12.5"),
    (550, "12.4"),
    (545, "12.3"),
    (535, "12.2"),
    (530, "12.1"),
    (525, "12.0"),
    (520, "11.8"),
    (515, "11.7"),
    (510, "11.6"),
    (495, "11.5"),
    (470, "11.4"),
    (465, "11.3"),
    (460, "11.2"),
    (455, "11.1"),
    (450, "11.0"),
)


def driver_in(text: str) -> str | None:
    """Return the driver's version from the text of NVIDIA's kernel module, or None."""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def cuda_of_driver(driver: str) -> str | None:
    """Return the newest CUDA version that a driver (``580.159.03``) knows, or None for one before CUDA 11."""
    branch = numbers(driver)[0]
    return next((cuda for first, cuda in _BRANCHES if branch >= first), None)


def cupti_of(nsys: Path) -> str | None:
    """Return the version of the newest CUPTI in an nsys' own folder, or None if there is none.

    Behind a wrapper (``bin/nsys``) the folder is ``target-linux-*`` next to it.
    """
    folder = nsys.resolve().parent
    files = [*folder.glob(f"{CUPTI}.*"), *folder.parent.glob(f"target-linux-*/{CUPTI}.*")]
    versions = [file.name.removeprefix(f"{CUPTI}.") for file in files]
    return max((version for version in versions if re.fullmatch(r"\d+\.\d+", version)), key=numbers, default=None)


def numbers(version: str) -> list[int]:
    """Return the leading numbers of a version: ``2023.4.4.54-23v0`` is [2023, 4, 4, 54]."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return [int(number) for number in found[0].split(".")] if found else [0]


def is_before(version: str, other: str) -> bool:
    """Return whether ``version`` is older than ``other``."""
    return numbers(version) < numbers(other)
