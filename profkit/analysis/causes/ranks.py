"""Rows of causes of several ranks: one that the others wait for, and exchanges that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from profkit.analysis.causes.changes import NOTHING, remove_operations
from profkit.analysis.causes.evidence import Cause, Evidence, SourceLine, name_ms, source_line
from profkit.analysis.lines import find_lines
from profkit.analysis.ranks.comparison import RankSummary
from profkit.analysis.ranks.culprit import Culprit
from profkit.analysis.ranks.own_time import BEFORE
from profkit.analysis.ranks.own_time import Cause as WhyLate
from profkit.analysis.step_replay.ranks_together import ON_TIME
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import BACKWARD, DATA, FORWARD
from profkit.run.edits import parse_edits

_WHY_LATE: dict[WhyLate, tuple[str, str]] = {
    "data": ("waits for data", "make this rank's batches as fast as the others'"),
    "python": ("runs Python", "do on this rank what the others do, or do it less often"),
    "launch": ("takes longer to launch kernels", "look at what else runs on this rank's CPU"),
    "kernels": ("computes", "give this rank as much work as the others"),
    "copy": ("copies", "copy as much as the others, from pinned memory"),
    "communication": ("communicates", "look at this rank's links"),
    "clock": ("computes on a lower clock", "look at this GPU's power and temperature"),
}
"""What a rank does longer than the others, and what to do about it."""


def _late_rank(evidence: Evidence) -> Iterator[Cause]:
    """A rank that the others wait for in collectives; the steps of all ranks are replayed with it on time."""
    compared, trace = evidence.summary.compared, evidence.capture.trace
    culprit = None if compared is None else compared.verdict.culprit
    if compared is None or culprit is None or trace is None or culprit.rank not in trace.ranks.numbers:
        return
    edit = f"{ON_TIME}:{culprit.rank}"
    line = _find_line(evidence, culprit.rank, culprit.phase) if culprit.cause in ("data", "python") else None
    yield Cause(
        code="late-rank",
        cause=f"all ranks wait for rank {culprit.rank}, which {_say_what_it_does(culprit, compared.ranks)}",
        line=line,
        module=culprit.module or culprit.phase or None,
        change=_WHY_LATE[culprit.cause][1],
        answer=trace.predict_time(parse_edits([edit])),
        edit=edit,
        evidence={"late_ns": culprit.late_ns, "extra_ns": culprit.extra_ns},
        proof="profkit ranks RUN",
    )


def _say_what_it_does(culprit: Culprit, ranks: Sequence[RankSummary]) -> str:
    does = _WHY_LATE[culprit.cause][0]
    kernels_ns = {rank.rank: rank.parts.get("kernels", 0) for rank in ranks if rank.exposed_ns is not None}
    own_ns = kernels_ns.pop(culprit.rank, 0)
    usual_ns = median(kernels_ns.values() or [0])
    if culprit.cause == "kernels" and culprit.is_always and 0 < usual_ns < own_ns:
        times = f"{own_ns / usual_ns:.2g} times what the others do"
        return f"{does} {times}: {name_ms(own_ns)} of kernels for {name_ms(usual_ns)}"
    return f"{does} {name_ms(culprit.extra_ns)} longer"


def _find_line(evidence: Evidence, rank: int, phase: str) -> SourceLine | None:
    """Return the line of a rank in which Python stands longest in a phase, or between phases if it is before one."""
    run = evidence.capture.run
    if run is None or run.lines(rank) is None:
        return None
    inside = "" if phase.startswith(BEFORE) else phase
    lines = [
        line
        for line in find_lines(run, rank).lines
        if line.file and ((line.phase or "") == inside or (phase == DATA and line.thread == "worker"))
    ]
    longest = max(lines, key=lambda line: line.own_ns, default=None)
    return None if longest is None else source_line(longest)


def _needless_exchanges(evidence: Evidence) -> Iterator[Cause]:
    """Gradients are summed over ranks after each backward pass, though the optimizer reads them after the last."""
    if evidence.step is None:
        return

    def find_early(step: ReplayedStep) -> list[int]:
        last = max(step.calls_in({FORWARD}), default=0)
        sums = [one for one in evidence.operations(step) if one.category == "communication" and "AllReduce" in one.name]
        return [one.at for one in sums if one.phase == BACKWARD and one.call < last]

    early = find_early(evidence.step)
    if not early:
        return
    durations = evidence.step.columns.duration_ns
    yield Cause(
        code="no-sync",
        cause="ranks sum gradients after every backward pass of a step",
        detail=f": {len(early)} collectives too many",
        change="with model.no_sync(): around all passes of a step but the last",
        changes=[remove_operations(find_early, NOTHING, "when ranks come to collectives")],
        evidence={"collectives": len(early), "time_ns": sum(durations[at] for at in early)},
        proof="profkit ranks RUN",
    )


RANKS = (_late_rank, _needless_exchanges)
