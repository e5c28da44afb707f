"""The document of ``profkit ranks``, and what changed between the ranks of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from profkit.analysis.ranks.comparison import PeakDifference, RanksResult, RankSummary, outliers_first
from profkit.analysis.ranks.culprit import Culprit
from profkit.analysis.ranks.groups import GroupRow, Pipeline
from profkit.report.commands.late_rank import describe_ranks, find_lost
from profkit.report.document import Column, Document, Lines, Table
from profkit.report.units import (
    BYTES,
    COUNT,
    GIGABYTES,
    NS,
    NUMBER,
    TEXT,
    Unit,
    count_over,
    format_bytes,
    format_ns,
    format_share,
    ns_over,
)
from profkit.run.light_record import P2P
from profkit.run.manifest import describe_links

_PLAIN = Unit(str)
_MOST_RANKS_SHOWN = 16
_WIDEST_MATRIX = 8

_PARTS = ("kernels", "copy", "data", "launch", "python")
_SENTENCES = 3
"""The step, who is late, and why."""
_COMPARED = ("count", "wire_ns", "waiting_ns")
_OF_CULPRIT = (
    *("rank", "cause", "phase", "module", "late_ns", "share", "extra_ns", "idle_ns", "gain_ns"),
    *("late_steps", "steps", "compared_with"),
)
_CHANGE_COLUMNS = (
    Column("group", "group", TEXT),
    Column("kind", "collective", TEXT),
    Column("count_before", "times", NUMBER),
    Column("count_after", "→", NUMBER),
    Column("wire_ns_before", "at the wire", NS),
    Column("wire_ns_after", "→", NS),
    Column("waiting_ns_before", "waiting", NS),
    Column("waiting_ns_after", "→", NS),
)


def build_ranks_document(result: RanksResult, run: str, *, top: int | None = _MOST_RANKS_SHOWN) -> Document:
    """Return the document; ``top`` limits the ranks that people see."""
    ranks = _rank_table(result, top)
    parts: list[Table | Lines] = [
        Lines(describe_ranks(result), "head"),
        *([_group_table(result)] if result.groups else []),
        Lines(
            [
                *([f"the GPUs are linked by {describe_links(result.links)}"] if result.links else []),
                *(line for pipeline in result.pipelines for line in _describe_pipeline(pipeline)),
            ]
        ),
        *([] if result.verdict.most_rank is None else [wait_table(result)]),
        ranks,
        Lines(_notes(result)),
    ]
    return Document("ranks", {"run": run, **ranks_data(result)}, parts, ranks, [*find_lost(result)])


def ranks_data(result: RanksResult) -> dict[str, Any]:
    """Return the result as JSON holds it."""
    verdict = result.verdict
    return {
        "world_size": result.world_size,
        "steps": result.step_count,
        "step_ns": result.step_ns,
        "exposed_communication_ns": result.exposed_ns,
        "waiting_ns": result.waiting_ns,
        "waits_untimed": result.is_untimed,
        "assumed_groups": list(result.assumed_groups),
        "culprit": None if verdict.culprit is None else _culprit_data(verdict.culprit),
        "latest": None
        if verdict.most_rank is None
        else {
            "rank": verdict.most_rank,
            "cost_ns": verdict.most_ns,
            "differences": [{"cause": cause, "time_ns": time} for cause, time in verdict.differences.items()],
        },
        "groups": [asdict(row) for row in result.groups],
        "ranks": [_rank_data(rank) for rank in result.ranks],
        "waits": result.waits_ns.tolist(),
        "links": {"links": [asdict(link) for link in result.links]},
        "pipelines": [
            {
                "group": {
                    "name": pipeline.group.name,
                    "dimension": pipeline.group.dimension,
                    "ranks": list(pipeline.ranks),
                },
                "between_ns": list(pipeline.between_ns),
                "own_ns": list(pipeline.own_ns),
                "longest_rank": pipeline.ranks[pipeline.longest],
                "bubble_ns": pipeline.bubble_ns,
            }
            for pipeline in result.pipelines
        ],
        "peaks": None if result.peaks is None else asdict(result.peaks),
        "lost": [{"rank": rank, "reason": reason} for rank, reason in sorted(result.lost.items())],
    }


def wait_table(result: RanksResult) -> Table:
    """Return who waited for whom, per step; of many ranks, those that were waited for most."""
    steps = max(result.step_count, 1)
    numbers = [rank.rank for rank in result.ranks]
    waits = result.waits_ns
    title = f"Waiting in collectives{', per step' * bool(result.recorded_step_count)}"
    if len(numbers) <= _WIDEST_MATRIX:
        columns = [Column("rank", "rank", _PLAIN), *(Column(f"for_{n}_ns", f"for rank {n}", NS) for n in numbers)]
        rows = [
            {"rank": rank, **{f"for_{n}_ns": round(int(waits[at, to]) / steps) for to, n in enumerate(numbers)}}
            for at, rank in enumerate(numbers)
        ]
        return Table(columns, rows, title=title)
    caused = waits.sum(axis=0)
    order = sorted(range(len(numbers)), key=lambda at: (-int(caused[at]), at))[:_WIDEST_MATRIX]
    order = [at for at in order if caused[at]] or order[:1]
    rows = [
        {
            "rank": numbers[at],
            "caused_ns": round(int(caused[at]) / steps / max(len(numbers) - 1, 1)),
            "most_for": numbers[int(waits[:, at].argmax())],
        }
        for at in order
    ]
    columns = [
        Column("rank", "rank", _PLAIN),
        Column("caused_ns", "others wait for it (mean)", NS),
        Column("most_for", "longest: rank", _PLAIN),
    ]
    return Table(columns, rows, title=title)


def _describe_pipeline(pipeline: Pipeline) -> list[str]:
    name, rank = (
        pipeline.group.dimension or f"of ranks {', '.join(map(str, pipeline.ranks))}",
        pipeline.ranks[pipeline.longest],
    )
    share = f" ({format_share(pipeline.bubble_ns / pipeline.step_ns)})" if pipeline.step_ns else ""
    between = f"{format_ns(min(pipeline.between_ns))} to {format_ns(max(pipeline.between_ns))}"
    return [
        f"pipeline {name}: ranks spend {between} a step in send and recv that nothing hides; rank {rank} (stage"
        f" {pipeline.longest}) works longest, {format_ns(max(pipeline.own_ns))}, so others wait for it, up to"
        f" {format_ns(pipeline.uneven_ns)}",
        f"bubble of pipeline {name}: {format_ns(pipeline.bubble_ns)} a step{share}, what even rank {rank} spends there:"
        " the pipeline fills and drains, and data are sent; more micro-batches shorten it",
    ]


def _describe_peaks(peaks: PeakDifference, pipelines: Sequence[Pipeline]) -> str:
    more = peaks.peak_bytes - peaks.median_bytes
    stage = next(
        (f" (stage {pipeline.ranks.index(peaks.rank)})" for pipeline in pipelines if peaks.rank in pipeline.ranks), ""
    )
    share = f" ({format_share(more / peaks.median_bytes)})" if peaks.median_bytes else ""
    return (
        f"peak memory is highest on rank {peaks.rank}{stage}: {format_bytes(peaks.peak_bytes)},"
        f" {format_bytes(more)}{share}"
        f" more than on rank {peaks.median_rank}, the median"
    )


def _group_table(result: RanksResult) -> Table:
    steps = result.step_count or None
    columns = (
        Column("group", "group", TEXT),
        Column("kind", "collective", TEXT),
        Column("dtype", "dtype", TEXT, wide=True),
        Column("count", "times", count_over(steps)),
        Column("each_bytes", "size", BYTES),
        Column("each_wire_ns", "at the wire", NS),
        Column("algorithm_bandwidth", "alg GB/s", GIGABYTES),
        Column("bus_bandwidth", "bus GB/s", GIGABYTES),
        Column("hidden_ns", "hidden", ns_over(steps), wide=True),
        Column("exposed_ns", "not hidden", ns_over(steps), wide=True),
        Column("waiting_ns", "waiting", ns_over(steps)),
    )
    rows = [
        {
            **asdict(row),
            "each_bytes": None if row.byte_count is None else round(row.byte_count / row.count),
            "each_wire_ns": None if row.wire_ns is None else round(row.wire_ns / row.count),
        }
        for row in result.groups
    ]
    return Table(columns, rows, title="Collectives, per step" if steps else "Collectives")


def _rank_table(result: RanksResult, top: int | None) -> Table:
    ranks = outliers_first(result)
    shown = ranks if top is None else ranks[:top]
    nodes = len({rank.node for rank in ranks}) > 1
    has_clock = any(rank.sm_mhz is not None for rank in ranks)
    has_peak = any(rank.peak_bytes is not None for rank in ranks)
    columns = [
        Column("rank", "rank", _PLAIN),
        *([Column("node", "node", _PLAIN)] if nodes else []),
        Column("step_ns", "step", NS),
        Column("kernels_ns", "computing", NS),
        Column("exposed_ns", "not hidden", NS),
        Column("waiting_ns", "waiting", NS),
        Column("data_ns", "data", NS),
        Column("launch_ns", "launching", NS),
        Column("python_ns", "Python", NS),
        Column("copy_ns", "copying", NS, wide=True),
        *([Column("peak_bytes", "peak", BYTES)] if has_peak else []),
        *([Column("sm_mhz", "MHz", COUNT)] if has_clock else []),
    ]
    rest = f"{len(ranks) - len(shown)} more ranks" if len(shown) < len(ranks) else ""
    per_step = ", per step" * bool(result.recorded_step_count)
    title = f"Ranks{per_step}, the most unusual first{f' ({rest}: --top)' if rest else ''}"
    return Table(columns, [_rank_data(rank) for rank in shown], title=title)


def _rank_data(rank: RankSummary) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": rank.node,
        "device": rank.device,
        "source": rank.source,
        "steps": rank.step_count,
        "step_ns": rank.step_ns,
        **{f"{cause}_ns": rank.parts.get(cause, 0) for cause in _PARTS},  # type: ignore[call-overload]
        "exposed_ns": rank.exposed_ns,
        "waiting_ns": rank.waiting_ns,
        "peak_bytes": rank.peak_bytes,
        "sm_mhz": rank.sm_mhz,
        "throttle": list(rank.throttle),
    }


def _culprit_data(culprit: Culprit) -> dict[str, Any]:
    group = culprit.group
    named = {"name": group.group.name, "dimension": group.group.dimension, "ranks": list(group.ranks)}
    return {**{key: getattr(culprit, key) for key in _OF_CULPRIT}, "group": named}


def _notes(result: RanksResult) -> Sequence[str]:
    lines = []
    if not result.recorded_step_count:
        lines.append("what a rank did by itself is known of steps alone")
    elif result.is_exact:
        sums = (
            "step = computing + copying + data + launching + Python + communication not hidden, for each rank, from"
            " the last collective of a step to that of the next"
        )
        is_first_out = any(rank.step_count < result.recorded_step_count for rank in result.ranks)
        lines.append(f"{sums}{', without the first step' * is_first_out}")
    else:
        lines.append(
            'ranks with a dash under "not hidden": computing is what phases took on the GPU beyond their Python time'
        )
    lines.append("waiting: from a rank's own arrival to that of the last rank, hidden behind computing or not")
    if sum(row.waiting_ns for row in result.groups) > (result.waiting_ns + 1) * max(result.step_count, 1):
        lines.append(
            "waiting in a group is the mean of its ranks, each collective by itself; the first line is the mean of all"
            " ranks, and counts once what is waited in two at once"
        )
    if result.step_count < result.recorded_step_count:
        lines.append(
            f"collectives are those of {result.step_count:,} of {result.recorded_step_count:,} steps: in the others the"
            " record of a rank lacks them"
        )
    if result.assumed_groups:
        lines.append(
            f"which ranks share the collectives of {', '.join(result.assumed_groups)} is not recorded: all"
            f" {result.world_size} are assumed to (the light record that `profkit run` leaves says it)"
        )
    if any(row.kind in P2P for row in result.groups) and not result.pipelines:
        lines.append(
            "no pipeline is judged: that needs a full trace of each stage, and the group in which data are sent"
        )
    if result.peaks is not None:
        lines.append(_describe_peaks(result.peaks, result.pipelines))
    lines.append("--rank N of kernels, efficiency and memory shows one rank")
    return lines


def compare_groups(before: RanksResult, after: RanksResult) -> tuple[Table, Lines, dict[str, Any]]:
    """Return what stands under a comparison of two runs of several ranks, and the same for JSON; per step."""
    sides = [
        {(row.group, row.rank_count, row.kind, row.dtype): row for row in result.groups} for result in (before, after)
    ]
    rows, shown = [], []
    for key in sorted(sides[0].keys() | sides[1].keys(), key=str):
        was, now = (_per_step(side.get(key), result) for side, result in zip(sides, (before, after), strict=True))
        named = dict(zip(("group", "rank_count", "kind", "dtype"), key, strict=True))
        rows.append({**named, "before": was, "after": now})
        cells = {f"{name}_before": (was or {}).get(name) for name in _COMPARED}
        sizes = {size for group, size, *_ in (*sides[0], *sides[1]) if group == key[0]}
        label = f"{key[0]} ({key[1]})" if len(sizes) > 1 else key[0]
        shown.append(
            {**named, "group": label, **cells, **{f"{name}_after": (now or {}).get(name) for name in _COMPARED}}
        )
    table = Table(_CHANGE_COLUMNS, shown, title="Collectives by group, per step")
    lines = [f"before: {line}" for line in describe_ranks(before)[:_SENTENCES]]
    lines += [f"after: {line}" for line in describe_ranks(after)[:_SENTENCES]]
    return table, Lines(lines, title="Ranks"), {"groups": rows}


def _per_step(row: GroupRow | None, ranks: RanksResult) -> dict[str, float | int | None] | None:
    if row is None:
        return None
    steps = max(ranks.step_count, 1)
    return {
        "count": row.count / steps,
        "byte_count": None if row.byte_count is None else round(row.byte_count / steps),
        "wire_ns": None if row.wire_ns is None else round(row.wire_ns / steps),
        "bus_bandwidth": row.bus_bandwidth,
        "exposed_ns": None if row.exposed_ns is None else round(row.exposed_ns / steps),
        "waiting_ns": round(row.waiting_ns / steps),
    }
