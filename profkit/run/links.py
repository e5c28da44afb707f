"""The links between GPUs: what those of one machine are, and how long collectives over links or a network took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Literal

from profkit.run.light_record import KINDS

_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
}


def bus_factor(kind: str, ranks: int) -> float:
    """Return what nccl-tests multiplies the algorithm bandwidth by to get the bus bandwidth."""
    factor = _FACTORS.get(kind)
    return 1.0 if factor is None else factor(ranks)


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
        """Return whether this is NVLink."""
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
    return "; ".join(f"{', '.join(found)}: {kind}" for kind, found in pairs.items())


@dataclass(frozen=True)
class CollectiveTime:
    """The time of a collective on the slowest rank (see `time_ns`); ``bytes`` is the size as nccl-tests counts it."""

    kind: str
    bytes: int
    time_ns: int
    """The median of a round of collectives; of several rounds, the shortest median."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.bytes <= 0 or self.time_ns <= 0:
            raise ValueError("not the time of a collective")


@dataclass(frozen=True)
class MeasuredLinks:
    """Collectives between ``ranks`` processes on ``machines``, one a GPU, each alone on its GPU; see `time_of`."""

    backend: str
    ranks: int
    times: tuple[CollectiveTime, ...]
    links: tuple[GpuLink, ...] = ()
    machines: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.machines <= self.ranks or self.ranks < 2 or not self.of_kind("all_reduce"):
            raise ValueError("no all-reduce of several ranks")

    @property
    def per_machine(self) -> int:
        """Return how many of the ranks are on one machine, at most."""
        return -(-self.ranks // self.machines)

    def of_kind(self, kind: str) -> list[CollectiveTime]:
        """Return the times of one kind, the smallest size first."""
        return sorted((one for one in self.times if one.kind == kind), key=lambda one: one.bytes)

    def time_of(self, kind: str, byte_count: float) -> float | None:
        """Return how long a collective of a size takes, in ns; None for a kind that was not measured.

        Between two measured sizes time grows in proportion to bytes. A smaller one than the smallest takes as long as
        that, a larger one than the largest goes at the largest's rate.
        """
        times = self.of_kind(kind)
        if not times or not isfinite(byte_count):
            return None
        if byte_count <= times[0].bytes:
            return float(times[0].time_ns)
        for below, above in pairwise(times):
            if byte_count <= above.bytes:
                part = (byte_count - below.bytes) / (above.bytes - below.bytes)
                return below.time_ns + part * (above.time_ns - below.time_ns)
        return times[-1].time_ns * (byte_count / times[-1].bytes)

    def bus_bandwidth(self, one: CollectiveTime) -> float:
        """Return the bus bandwidth of a measured collective, in bytes a second."""
        return one.bytes / one.time_ns * 1e9 * bus_factor(one.kind, self.ranks)

    @property
    def best(self) -> CollectiveTime:
        """Return the all-reduce with the highest bus bandwidth."""
        return max(self.of_kind("all_reduce"), key=self.bus_bandwidth)


def links_used(
    machine_of: Iterable[int], within: MeasuredLinks | None, network: Iterable[MeasuredLinks]
) -> MeasuredLinks | None:
    """Return which measurement a group is held against; None where nobody measured what it uses.

    A group on one machine uses the links there. One on several machines uses the network, and the links too if it has
    several ranks on one of them: it is held against a group that was measured with one rank, or with several, on each.

    Args:
        machine_of: the machine of each of the group's ranks.
        within: what was measured within one machine.
        network: what was measured between machines.
    """
    counts = Counter(machine_of).values()
    if len(counts) < 2:
        return within
    alike = [one for one in network if (one.per_machine > 1) == (max(counts) > 1)]
    return min(
        alike, key=lambda one: (abs(one.per_machine - max(counts)), abs(one.machines - len(counts))), default=None
    )
