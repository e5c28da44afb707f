"""What collectives cost by group and kind: bytes, time at the wire, bandwidth as nccl-tests counts it, and waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from profkit.analysis.collectives.matching import Matched
from profkit.run.links import MeasuredLinks, bus_factor


@dataclass(frozen=True)
class GroupRow:
    """One kind of collective in the groups of one name; times are sums over all of them.

    ``count`` counts each collective once, not once a rank. ``byte_count`` and the bandwidths (bytes per second) are
    None where sizes are unknown, ``wire_ns`` where nobody need wait, so that the last arrival is unknown. Hidden,
    exposed and waiting time are those of the mean rank; ``hidden_ns`` and ``exposed_ns`` are None where a rank does not
    say.

    ``measured_ns`` is how long collectives of these sizes took when the links were measured, ``measured_share`` what
    share of the measured bandwidth the row reaches, and ``limited_by`` says whether most of ``measured_ns`` passes
    whatever the size. All are None where nobody measured, or where the group has ranks on several machines.
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
    measured_ns: int | None = None
    measured_share: float | None = None
    limited_by: Literal["latency", "bandwidth"] | None = None


def group_label(one: Matched, world_size: int) -> str:
    """Return what people call a group: its mesh dimension, else all ranks, else its size."""
    if one.group.dimension:
        return one.group.dimension
    size = len(one.group.ranks)
    return "all ranks" if size == world_size else f"groups of {size}"


def sum_groups(
    matched: Sequence[Matched],
    world_size: int,
    links: MeasuredLinks | None = None,
    nodes: Mapping[int, int] | None = None,
) -> list[GroupRow]:
    """Return a row for each name of groups, kind and dtype; the longest first.

    Args:
        matched: the collectives of each group.
        world_size: how many ranks there are.
        links: what was measured of the links within one machine.
        nodes: rank → its machine; without it all ranks are on one.
    """
    found: dict[tuple[str, int, str, str | None], list[tuple[Matched, list[int]]]] = {}
    for one in matched:
        label = group_label(one, world_size)
        kinds = list(zip(one.kind, one.dtype, strict=True))
        for kind, dtype in dict.fromkeys(kinds):
            which = [at for at, pair in enumerate(kinds) if pair == (kind, dtype)]
            found.setdefault((label, len(one.group.ranks), kind, dtype), []).append((one, which))
    rows = []
    for key, parts in found.items():
        machines = max(len({(nodes or {}).get(rank, 0) for rank in one.group.ranks}) for one, _ in parts)
        row = _sum_one(*key, parts)
        rows.append(row if links is None or machines > 1 else _against(links, row, parts))
    return sorted(rows, key=lambda row: (-(row.wire_ns or 0) - row.waiting_ns, row.group, row.kind, row.dtype or ""))


def _sum_one(
    label: str,
    size: int,
    kind: str,
    dtype: str | None,
    parts: list[tuple[Matched, list[int]]],
) -> GroupRow:
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


def _against(links: MeasuredLinks, row: GroupRow, parts: list[tuple[Matched, list[int]]]) -> GroupRow:
    """Return the row with how long its collectives took when the links were measured, and what most of that depends on.

    Of another number of ranks than were measured the bus bandwidth is held to be the same, as nccl-tests defines it.
    """
    least = links.time_of(row.kind, 0)
    if least is None or row.byte_count is None or not row.wire_ns:
        return row
    sizes, counts = np.unique(np.concatenate([one.byte_count[which] for one, which in parts]), return_counts=True)
    scale = bus_factor(row.kind, row.rank_count) / bus_factor(row.kind, links.ranks)
    alone = [max(least, (links.time_of(row.kind, size) or 0.0) * scale) for size in sizes.tolist()]
    total = float(np.dot(alone, counts))
    return replace(
        row,
        measured_ns=round(total),
        measured_share=total / row.wire_ns,
        limited_by="latency" if 2 * least * row.count >= total else "bandwidth",
    )
