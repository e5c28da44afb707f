"""What collectives cost by group and kind: bytes, time at the wire, bandwidth as nccl-tests counts it, and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profkit.analysis.collectives.matching import Matched

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


@dataclass(frozen=True)
class GroupRow:
    """One kind of collective in the groups of one name; times are sums over all of them.

    ``count`` counts each collective once, not once a rank. ``byte_count`` and the bandwidths (bytes per second) are
    None where sizes are unknown, ``wire_ns`` where nobody need wait, so that the last arrival is unknown. Hidden,
    exposed and waiting time are those of the mean rank; ``hidden_ns`` and ``exposed_ns`` are None where a rank does not
    say.
    """

    group: str
    group_count: int
    rank_count: int
    kind: str
    dtype: str | None
    count: int
    byte_count: int | None
    wire_ns: int | None
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    hidden_ns: int | None
    exposed_ns: int | None
    waiting_ns: int


def group_label(one: Matched, world_size: int) -> str:
    """Return what people call a group: its mesh dimension, else all ranks, else its size."""
    if one.group.dimension:
        return one.group.dimension
    size = len(one.group.ranks)
    return "all ranks" if size == world_size else f"groups of {size}"


def sum_groups(matched: Sequence[Matched], world_size: int) -> list[GroupRow]:
    """Return a row for each name of groups, kind and dtype; the longest first."""
    found: dict[tuple[str, int, str, str | None], list[tuple[Matched, list[int]]]] = {}
    for one in matched:
        label = group_label(one, world_size)
        kinds = list(zip(one.kind, one.dtype, strict=True))
        for kind, dtype in dict.fromkeys(kinds):
            which = [at for at, pair in enumerate(kinds) if pair == (kind, dtype)]
            found.setdefault((label, len(one.group.ranks), kind, dtype), []).append((one, which))
    rows = [_sum_one(*key, parts) for key, parts in found.items()]
    return sorted(rows, key=lambda row: (-(row.wire_ns or 0) - row.waiting_ns, row.group, row.kind, row.dtype or ""))


def _sum_one(label: str, size: int, kind: str, dtype: str | None, parts: list[tuple[Matched, list[int]]]) -> GroupRow:
    count = sum(len(which) for _, which in parts)
    sizes = np.concatenate([one.byte_count[which] for one, which in parts])
    wires = np.concatenate([one.wire_ns[which] for one, which in parts])
    hidden = [one.hidden_ns[:, which] for one, which in parts]
    durations = [one.duration_ns[:, which] for one, which in parts]
    total_bytes = int(sizes.sum()) if (sizes >= 0).all() else None
    wire_ns = int(wires.sum()) if (wires >= 0).all() else None
    rate = total_bytes / wire_ns * 1e9 if total_bytes is not None and wire_ns else None
    is_hidden_known = all((some >= 0).all() for some in hidden)
    hidden_ns = round(sum(float(some.sum()) / len(some) for some in hidden)) if is_hidden_known else None
    whole_ns = round(sum(float(some.sum()) / len(some) for some in durations))
    return GroupRow(
        group=label,
        group_count=len(parts),
        rank_count=size,
        kind=kind,
        dtype=dtype,
        count=count,
        byte_count=total_bytes,
        wire_ns=wire_ns,
        algorithm_bandwidth=rate,
        bus_bandwidth=None if rate is None else rate * bus_factor(kind, size),
        hidden_ns=hidden_ns,
        exposed_ns=None if hidden_ns is None else whole_ns - hidden_ns,
        waiting_ns=round(sum(float(one.wait_ns[:, which].sum()) / len(one.ranks) for one, which in parts)),
    )
