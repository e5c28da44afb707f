"""The document of ``profkit ranks``; in sentences who is late, why and what that costs; the ranks of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from profkit.analysis.ranks.comparison import GroupRow, Pipeline, RanksResult, RankSummary, outliers_first
from profkit.analysis.ranks.costs import HOSTS_VARY, LEAST_SHARE
from profkit.analysis.ranks.culprit import Culprit, Doubt
from profkit.errors import Finding
from profkit.report.document import Column, Document, Lines, Table
from profkit.report.units import (
    BYTES,
    COUNT,
    GIGABYTES,
    NS,
    NUMBER,
    PLAIN,
    TEXT,
    count_over,
    format_count,
    format_ns,
    format_share,
    ns_over,
)
from profkit.run.light_record import P2P, Group

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

_MOST_TURNS = 3

_CAUSES = {
    "data": "waiting for data",
    "python": "running Python",
    "launch": "idle while Python prepared kernels",
    "kernels": "in kernels",
    "copy": "copying",
    "clock": "in kernels, on a lower clock",
}
_DOUBTS: dict[Doubt, str] = {
    "varies": "but that varies too much from step to step to be told from chance",
    "few": "but that may be chance in so few steps; record more of them",
    "unexplained": "what it does longer than the others explains too little of that; it may have been late once "
    "and be behind since then",
    "launches": "it launches later, which may be the profiler's doing; without a profiler that often goes away",
    "profiler": "but only in the steps that a profiler recorded: in the others its host takes no longer",
}
_UNTIMED = (
    "how long ranks wait in collectives within a phase is known only with TORCH_NCCL_ENABLE_TIMING=1, or where all "
    "ranks are recorded in full"
)
_UNRECORDED = (
    "These times are of steps without a profiler; figures below are of those with one, whose hosts are too slow to show"
    " this"
)


def build_ranks_document(result: RanksResult, run: str, *, top: int | None = _MOST_RANKS_SHOWN) -> Document:
    ranks = _rank_table(result, top)
    parts: list[Table | Lines] = [
        Lines(describe_ranks(result), "head"),
        *([_group_table(result)] if result.groups else []),
        Lines(line for pipeline in result.pipelines for line in _describe_pipeline(pipeline)),
        *([] if result.verdict.most_rank is None else [_wait_table(result)]),
        ranks,
        Lines(_notes(result)),
    ]
    return Document("ranks", {"run": run, **_to_json(result)}, parts, ranks, [*_find_lost(result)])


def _to_json(result: RanksResult) -> dict[str, Any]:
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
        },
        "groups": [asdict(row) for row in result.groups],
        "ranks": [_rank_data(rank) for rank in result.ranks],
        "waits": result.waits_ns.tolist(),
        "pipelines": [
            {
                "group": _group_data(pipeline.group, pipeline.ranks),
                "between_ns": list(pipeline.between_ns),
                "own_ns": list(pipeline.own_ns),
                "longest_rank": pipeline.ranks[pipeline.longest],
                "bubble_ns": pipeline.bubble_ns,
            }
            for pipeline in result.pipelines
        ],
        "lost": [{"rank": rank, "reason": reason} for rank, reason in sorted(result.lost.items())],
    }


def _wait_table(result: RanksResult) -> Table:
    steps = max(result.step_count, 1)
    numbers = [rank.rank for rank in result.ranks]
    waits = result.waits_ns
    title = f"Waiting in collectives{', per step' * bool(result.recorded_step_count)}"
    if len(numbers) <= _WIDEST_MATRIX:
        columns = [Column("rank", "rank", PLAIN), *(Column(f"for_{n}_ns", f"for rank {n}", NS) for n in numbers)]
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
        Column("rank", "rank", PLAIN),
        Column("caused_ns", "others wait for it (mean)", NS),
        Column("most_for", "longest: rank", PLAIN),
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


def _group_table(result: RanksResult) -> Table:
    steps = result.step_count or None
    columns = (
        Column("group", "group", TEXT),
        Column("kind", "collective", TEXT),
        Column("dtype", "dtype", TEXT, wide=True),
        Column("count", "times", count_over(steps)),
        Column("each_bytes", "size each", BYTES),
        Column("wire_ns", "at the wire", ns_over(steps)),
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
        Column("rank", "rank", PLAIN),
        *([Column("node", "node", PLAIN)] if nodes else []),
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
    group = _group_data(culprit.group.group, culprit.group.ranks)
    return {**{key: getattr(culprit, key) for key in _OF_CULPRIT}, "group": group}


def _group_data(group: Group, ranks: Sequence[int]) -> dict[str, Any]:
    return {"name": group.name, "dimension": group.dimension, "ranks": list(ranks)}


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
            'ranks with a dash under "not hidden" left a light record. data, launching and Python: each phase\'s median'
            " on the host from the collective before a step's first long wait, often one of the step before, to that"
            " wait; they do not sum up to the step, and may be longer. computing: what phases took on the GPU beyond"
            " their Python time"
        )
    mean = " (mean over steps)" if result.recorded_step_count and not result.is_exact else ""
    lines.append(f"waiting{mean}: from a rank's own arrival to that of the last rank, hidden behind computing or not")
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


def describe_ranks(result: RanksResult) -> list[str]:
    """Return what the ranks say together, in sentences: the step, who is late, why, and what it costs."""
    steps = format_count(result.step_count, "step")
    kind = "(median rank)" if result.recorded_step_ns is None else "as recorded"
    step = f"{result.world_size:,} ranks, {steps} of {format_ns(result.step_ns)} {kind}"
    if not result.recorded_step_count:
        step = f"{result.world_size:,} ranks, no recorded steps: times are those of the whole recording"
    if result.exposed_ns is not None and result.recorded_step_count:
        full = sum(rank.exposed_ns is not None for rank in result.ranks)
        of = "" if result.is_exact else f" (of {format_count(full, 'rank')} recorded in full)"
        step += (
            f"; on average over ranks, communication not hidden behind computing: {format_ns(result.exposed_ns)}{of}"
        )
    waiting = f"{format_ns(result.waiting_ns)} (hidden or not)"
    if result.is_untimed:
        waiting = f"at least {format_ns(result.waiting_ns)} (not all were timed)" if result.waiting_ns else "not timed"
    clocks = (
        "These waits are only as accurate as the machines' clocks: without a profiler, gloo's collectives have the time"
        " of the call alone, and a rank whose clock is ahead looks late"
    )
    return [f"{step}; waiting in collectives: {waiting}", *describe_verdict(result), *[clocks] * result.by_clocks]


def verdict_beside(answer: str, result: RanksResult) -> list[str]:
    """Return the verdict in one sentence, or nothing where the answer to the run says so already."""
    verdict = describe_verdict(result)[0]
    return [] if verdict[1:] in answer else [verdict]


def describe_verdict(result: RanksResult) -> list[str]:
    """Return who is late, why and what it costs; else the figure that shows that nobody is."""
    verdict = result.verdict
    if verdict.culprit is not None:
        return _accuse(verdict.culprit, result)
    if verdict.most_rank is None:
        return [f"Who is late is unknown: {result.why_unknown}"]
    share = verdict.most_ns / result.step_ns if result.step_ns else 0.0
    if verdict.doubt == "untimed":
        hosts = "no host kept its GPU waiting"
        if share >= LEAST_SHARE:
            count = f"{verdict.turns.get(verdict.most_rank, 0):,} of the steps, which may be chance"
            hosts = f"rank {verdict.most_rank}'s host was late by {format_ns(verdict.most_ns)} in {count}"
        return [f"Whether a rank is late is not known: {hosts}, and {_UNTIMED}"]
    cost = f"{format_ns(verdict.most_ns)} in the median step ({format_share(share)} of it)"
    why = (
        f"a rank is called late from {format_share(LEAST_SHARE)} on"
        if verdict.doubt is None
        else _DOUBTS[verdict.doubt]
    )
    is_open = verdict.doubt in ("varies", "few", "launches")
    judged = "Whether a rank is late cannot be told" if is_open else "No rank is late"
    lines = [f"{judged}: rank {verdict.most_rank} costs the others most, {cost}; {why}"]
    if verdict.doubt == "unexplained":
        lines = [f"Rank {verdict.most_rank} is late by {cost}, and why is not known: {why}"]
    elif not verdict.most_ns and verdict.doubt is None:
        lines = [f"No rank is late: none costs the others any time in the median step; {why}"]
    if sum(verdict.turns.values()) > 1:
        often = sorted(verdict.turns, key=lambda rank: (-verdict.turns[rank], rank))
        turns = ", ".join(f"{verdict.turns[rank]:,} for rank {rank}" for rank in often[:_MOST_TURNS])
        more = f", and for {len(often) - _MOST_TURNS:,} more ranks" if len(often) > _MOST_TURNS else ""
        least = format_share(LEAST_SHARE)
        lines.append(f"Steps in which the others wait at least {least} of a step for one rank: {turns}{more}")
    return lines


def _accuse(culprit: Culprit, result: RanksResult) -> list[str]:
    group, late = culprit.group.group.dimension, format_ns(culprit.late_ns)
    arrives = (
        f"its host is at least {late} a step behind those of the others, which wait for it in collectives"
        if not culprit.share
        else f"it arrives last in {format_share(culprit.share)} of its collectives in which anybody waits, by {late} a"
        f" step{f'; the others wait for it longest in group {group}' if group else ''}"
    )
    is_unrecorded = culprit.unrecorded_ns is not None
    step_ns = culprit.unrecorded_ns or result.step_ns
    without = max(step_ns - culprit.gain_ns, 0)
    hidden = culprit.extra_ns - culprit.idle_ns
    shown = f" ({format_ns(culprit.idle_ns)} of it while its GPU was idle)" if hidden > culprit.extra_ns // 50 else ""
    compared = f"than rank {culprit.compared_with} (the median rank) {_CAUSES[culprit.cause]}{_place(culprit)}{shown}"
    if not culprit.is_always:
        share = format_share(culprit.late_steps / culprit.steps)
        return [
            f"Rank {culprit.rank} is late in {culprit.late_steps:,} of {culprit.steps:,} steps ({share}),"
            f" by {format_ns(culprit.late_ns)} each",
            f"Its extra time in these steps: {format_ns(culprit.extra_ns)} more {compared}",
            f"Without it steps would take about {format_ns(culprit.gain_ns)} less on average"
            " (estimate: each collective starts when the median rank is there)",
        ]
    may_pass = culprit.cause == "python" and not culprit.module and culprit.gain_ns < HOSTS_VARY * result.step_ns
    passing = "; hosts may be that slow for tens of steps at a time: record longer to see whether it lasts"
    return [
        f"Rank {culprit.rank} is late: {arrives}",
        f"Its extra time: {format_ns(culprit.extra_ns)} a step more {compared}{passing * may_pass}",
        f"Without it a step would take about {format_ns(without)} instead of {format_ns(step_ns)}"
        " (estimate: each collective starts when the median rank is there)",
        *[_UNRECORDED] * is_unrecorded,
    ]


def _place(culprit: Culprit) -> str:
    before = "" if culprit.phase.startswith("before ") else "in "
    place = f", {before}{culprit.phase}" if culprit.phase and culprit.cause != "data" else ""
    return place + (f" ({culprit.module})" if culprit.module else "")


def _find_lost(result: RanksResult) -> Iterator[Finding]:
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(result.lost.items()):
        by_reason.setdefault(reason, []).append(rank)
    for reason, ranks in by_reason.items():
        yield Finding("lost-rank", f"{_name_ranks(ranks)}: {reason}")
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(result.short.items()):
        by_count.setdefault(count, []).append(rank)
    for count, ranks in by_count.items():
        held = f"the record holds {format_count(count, 'step')}, others up to {result.recorded_step_count:,}"
        lost = {rank.rank for rank in result.ranks if rank.waiting_ns is None}
        left_out = "; too few to compare" if lost.issuperset(ranks) else ""
        yield Finding("short-record", f"{_name_ranks(ranks)}: {held}{left_out}")


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks, those in a row as their first and last: ``ranks 3, 8-63``."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1][1:] = [rank]
        else:
            rows.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join('-'.join(map(str, row)) for row in rows)}"
