"""Rows of causes: a rank that the others wait for, and gradients that ranks exchange more often than they need."""

from __future__ import annotations

from collections.abc import Iterator

from profkit.analysis.causes.changes import By, remove_operations
from profkit.analysis.causes.evidence import Cause, Evidence, Operation, SourceLine, source_line
from profkit.analysis.lines import find_lines
from profkit.analysis.ranks.own_time import Cause as WhyLate
from profkit.analysis.step_replay.ranks_together import ON_TIME
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import BACKWARD, DATA, FORWARD
from profkit.run.edits import parse_edits
from profkit.run.lines import LineTime

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
    if culprit is None or trace is None or culprit.rank not in trace.ranks.numbers:
        return
    edit = f"{ON_TIME}:{culprit.rank}"
    does, change = _WHY_LATE[culprit.cause]
    line = _find_line(evidence, culprit.rank, culprit.phase) if culprit.cause in ("data", "python") else None
    yield Cause(
        code="late-rank",
        cause=f"all ranks wait for rank {culprit.rank}, which {does} {culprit.extra_ns / 1e6:.3g} ms longer",
        line=line,
        module=culprit.module or culprit.phase or None,
        change=change,
        answer=trace.predict_time(parse_edits([edit])),
        edit=edit,
        evidence={"late_ns": culprit.late_ns, "extra_ns": culprit.extra_ns},
        proof="profkit ranks RUN",
    )


def _find_line(evidence: Evidence, rank: int, phase: str) -> SourceLine | None:
    """Return the line of a rank in which Python stands longest in a phase."""
    run = evidence.capture.run
    if run is None or run.lines(rank) is None:
        return None
    lines = [line for line in find_lines(run, rank).lines if line.file and _is_in(line, phase)]
    longest = max(lines, key=lambda line: line.time_ns - line.waiting_ns, default=None)
    return None if longest is None else source_line(longest)


def _is_in(line: LineTime, phase: str) -> bool:
    return (line.phase or "") == phase or (phase == DATA and line.thread == "worker")


def _needless_exchanges(evidence: Evidence) -> Iterator[Cause]:
    """Gradients are summed over ranks after each backward pass, though the optimizer reads them after the last."""
    if evidence.step is None:
        return

    def find_early(step: ReplayedStep) -> list[int]:
        last = max(step.calls_in({FORWARD}), default=0)
        return [one.at for one in evidence.operations(step) if _sums_gradients(one) and one.call < last]

    early = find_early(evidence.step)
    if not early:
        return
    nothing: By = {"least": 0, "expected": 0, "most": 0}
    durations = evidence.step.columns.duration_ns
    yield Cause(
        code="no-sync",
        cause="ranks sum gradients after every backward pass of a step",
        detail=f": {len(early)} collectives too many",
        change="with model.no_sync(): around all passes of a step but the last",
        changes=[remove_operations("no-sync", find_early, nothing, "when ranks come to collectives")],
        evidence={"collectives": len(early), "time_ns": sum(durations[at] for at in early)},
        proof="profkit ranks RUN",
    )


def _sums_gradients(operation: Operation) -> bool:
    is_sum = operation.category == "communication" and "AllReduce" in operation.name
    return is_sum and operation.phase == BACKWARD


RANKS = (_late_rank, _needless_exchanges)
