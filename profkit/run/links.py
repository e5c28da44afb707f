"""How two GPUs of one machine reach each other, as NVML says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Way = Literal["nvlink", "board", "switch", "switches", "bridge", "node", "system"]

_WAYS: dict[Way, str] = {
    "board": "PCIe on one board",
    "switch": "one PCIe switch",
    "switches": "several PCIe switches",
    "bridge": "the PCIe host bridge of one CPU",
    "node": "several PCIe host bridges of one CPU",
    "system": "PCIe and the link between two CPUs",
}


@dataclass(frozen=True)
class GpuLink:
    """How two GPUs reach each other: by NVLink, else where their PCIe paths meet (NVML's levels of topology).

    ``gpus`` are their numbers in NVML. ``count`` NVLinks of ``version`` carry ``bytes_per_s`` each way together; of a
    PCIe path ``version`` is the generation, ``count`` the lanes. None for what NVML does not say.
    """

    gpus: tuple[int, ...]
    way: Way
    count: int | None = None
    version: int | None = None
    bytes_per_s: int | None = None

    @property
    def is_nvlink(self) -> bool:
        """Whether this is NVLink."""
        return self.way == "nvlink"

    def __str__(self) -> str:
        rate = "" if self.bytes_per_s is None else f" ({self.bytes_per_s / 1e9:.0f} GB/s each way)"
        if self.is_nvlink:
            name = "NVLink" if self.version is None else f"NVLink {self.version}"
            return (name if self.count is None else f"{self.count} × {name}") + rate
        lanes = "" if None in (self.version, self.count) else f", PCIe {self.version}.0 x{self.count}"
        return f"{_WAYS[self.way]}{lanes}{rate}"


def describe_links(links: Iterable[GpuLink]) -> str:
    """Return what the links are, in words; where they differ, between which GPUs each kind is."""
    pairs: dict[str, list[str]] = {}
    for link in links:
        pairs.setdefault(str(link), []).append("–".join(map(str, link.gpus)))
    if len(pairs) <= 1:
        return next(iter(pairs), "")
    return "; ".join(f"{', '.join(gpus)}: {kind}" for kind, gpus in pairs.items())
