"""Which ranges wait much for the host although something else limits them: there, faster kernels gain less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from profkit.analysis.efficiency.summary import EfficiencyRow

_LIMITED_BY_HOST = ("launch-bound", "host-bound")

MUCH = 0.2
"""The share of a range's time on the GPU from which a wait is worth naming."""


@dataclass(frozen=True)
class HostWait:
    """The idle share of a range for one cause: the host launches, or does anything else, which may be to load data."""

    path: str
    cause: Literal["launch-bound", "host-bound"]
    share: float
    time_ns: float
    loads_data: bool = False


def find_host_waits(rows: Sequence[EfficiencyRow]) -> list[HostWait]:
    """Return the waits of at least `MUCH`, the longest first; ``rows`` are in the table's order, depth first.

    A range within one that is named for the same cause is not named again.
    """
    waits: list[HostWait] = []
    for one in _long_waits(rows):
        if not any(one.cause == above.cause and one.path.startswith(f"{above.path}/") for above in waits):
            waits.append(one)
    return sorted(waits, key=lambda one: -one.time_ns)


def _long_waits(rows: Sequence[EfficiencyRow]) -> Iterator[HostWait]:
    for row in rows:
        if row.gpu is None or row.verdict in _LIMITED_BY_HOST:
            continue
        span_ns = row.gpu.span_ns_at(row.best_idle_factor)
        if row.launching_share is not None and row.launching_share >= MUCH:
            yield HostWait(row.path, "launch-bound", row.launching_share, row.launching_share * span_ns)
        if row.host_share is not None and row.host_share >= MUCH:
            yield HostWait(row.path, "host-bound", row.host_share, row.host_share * span_ns, row.loads_data)
