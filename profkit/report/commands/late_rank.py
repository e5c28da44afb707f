"""Who is late, why, and what that costs, in sentences; and which ranks are lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profkit.analysis.ranks.chance import HOSTS_VARY, LEAST_SHARE
from profkit.analysis.ranks.comparison import RanksResult
from profkit.analysis.ranks.culprit import Culprit, Doubt
from profkit.findings import Finding
from profkit.report.units import format_count, format_ns, format_share

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
    judged = "Whether a rank is late cannot be told" if verdict.doubt in ("varies", "few") else "No rank is late"
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
    without = max(result.step_ns - culprit.gain_ns, 0)
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
        f"Without it a step would take about {format_ns(without)} instead of {format_ns(result.step_ns)}"
        " (estimate: each collective starts when the median rank is there)",
    ]


def _place(culprit: Culprit) -> str:
    before = "" if culprit.phase.startswith("before ") else "in "
    place = f", {before}{culprit.phase}" if culprit.phase and culprit.cause != "data" else ""
    return place + (f" ({culprit.module})" if culprit.module else "")


def find_lost(result: RanksResult) -> Iterator[Finding]:
    """Yield which ranks are lost and why, and which have a record that ends before those of the others."""
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
