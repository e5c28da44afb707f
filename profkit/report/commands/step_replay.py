"""What limits a step, by its replay: the sentence, the proof, and the shares by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from profkit.analysis.step_replay.calibrate import Fit
from profkit.analysis.step_replay.limits import Cause, StepLimits
from profkit.analysis.step_replay.predict import TimeAnswer
from profkit.analysis.step_replay.replay import Proof
from profkit.report.document import Column, Lines, Row, Table
from profkit.report.units import NS, SHARE, TEXT, format_ns, format_share
from profkit.run.edits import parse_edits

_CAUSES = {
    Cause.PYTHON.value: "Python between CUDA calls",
    Cause.CALL.value: "CUDA calls",
    Cause.ALLOCATING.value: "allocations from CUDA",
    Cause.LATENCY.value: "launch latency",
    Cause.BETWEEN.value: "gaps between kernels",
    Cause.WAKING.value: "waits waking up",
    Cause.EARLIER.value: "work of earlier steps",
    "communication": "communication",
    "copy": "memory copies",
    "fill": "memory fills",
}
_CAUSES_NAMED = 3
_MOST_ROWS = 10


def limit_parts(limits: StepLimits) -> Iterator[Table | Lines]:
    """Yield what limits the step: the sentence with its proof, and the longest shares by phase."""
    if limits.refusal is not None:
        yield Lines([f"What limits the step: {describe_limits(limits)}"])
        return
    rows: list[Row] = [
        {"phase": phase, "cause": name_cause(cause), "time_ns": time_ns, "share": time_ns / limits.step_ns}
        for phase, causes in limits.by_phase.items()
        for cause, time_ns in causes.items()
    ]
    rows.sort(key=lambda row: -row["time_ns"])
    left_ns = sum(row["time_ns"] for row in rows[_MOST_ROWS:])
    rest: Row = {"phase": "", "cause": f"{len(rows) - _MOST_ROWS} more", "time_ns": left_ns}
    shown = [*rows[:_MOST_ROWS], *([{**rest, "share": left_ns / limits.step_ns}] if left_ns else [])]
    assert limits.proof is not None
    proof = describe_proof(limits.proof, limits.fit, is_unprofiled=limits.unprofiled_ns is not None)
    yield Lines([f"The step is limited by {describe_limits(limits)}", proof])
    yield Table(
        (
            Column("cause", "the step is limited by", TEXT, flexible=True),
            Column("phase", "in", TEXT),
            Column("time_ns", "time", NS),
            Column("share", "% of step", SHARE),
        ),
        shown,
    )


def name_cause(cause: str) -> str:
    """Return a cause as people read it: a category of kernels is named as such."""
    return _CAUSES.get(cause, f"{cause} kernels")


def describe_limits(limits: StepLimits) -> str:
    """Return what limits the step, the largest shares first, or why that is unknown."""
    if limits.refusal is not None:
        return f"unknown: {limits.refusal}"
    return describe_shares(limits.limited_by)


def describe_shares(limited_by: Mapping[str, int]) -> str:
    """Return the largest shares of a step by cause."""
    whole = sum(limited_by.values()) or 1
    named = dict(islice(limited_by.items(), _CAUSES_NAMED))
    words = [f"{name_cause(cause)} {format_share(time_ns / whole)}" for cause, time_ns in named.items()]
    rest = sum(limited_by.values()) - sum(named.values())
    return ", ".join([*words, *([f"others {format_share(rest / whole)}"] if rest else [])])


def describe_proof(proof: Proof, fit: Fit, *, is_unprofiled: bool) -> str:
    """Return how well the replay reproduces the recording, and the host's speed in it."""
    lengths = (
        f"{format_ns(proof.replayed_ns)} replayed for {format_ns(proof.recorded_ns)} recorded ({proof.error:+.2%})"
    )
    ends = f"{format_ns(proof.operations_p50_ns)} (p50), {format_ns(proof.operations_p95_ns)} (p95)"
    text = f"Step replay: {lengths}, ends on the GPU off by {ends}"
    if not is_unprofiled:
        return f"{text}; the step is as recorded"
    speed = f"{fit.least:.2f} to {fit.most:.2f}"
    known = "" if fit.is_identified else "; all of these fit, because the GPU sets the pace"
    return f"{text}; Python's time × {speed} as in unprofiled steps{known}"


def time_parts(answer: TimeAnswer) -> Iterator[Table | Lines]:
    """Yield the step now and after edits, what limits it then, and what the prediction rests on."""
    if answer.refusal is not None:
        yield Lines([f"Time: not predicted: {answer.refusal}"], "head")
        return
    yield Lines([f"{', '.join(answer.edits)}: the step now and after, by its replay"], "head")
    yield time_table(answer)
    yield Lines(_rests_on(answer))


def time_table(answer: TimeAnswer | None) -> Table:
    """Return the one row of a prediction; none without a prediction."""
    columns = (
        Column("edits", "program", TEXT, flexible=True),
        Column("now_ns", "step now", NS),
        Column("low_ns", "least", NS),
        Column("expected_ns", "expected", NS),
        Column("high_ns", "most", NS),
    )
    is_known = answer is not None and answer.refusal is None
    rows: list[Row] = [{**vars(answer), "edits": " ".join(answer.edits)}] if answer is not None and is_known else []
    return Table(columns, rows, exact=tuple(column.key for column in columns))


def _rests_on(answer: TimeAnswer) -> Iterator[str]:
    if answer.limited_by is not None:
        yield f"The step would be limited by {describe_shares(answer.limited_by)}"
    assert answer.proof is not None
    yield describe_proof(answer.proof, answer.fit, is_unprofiled=answer.unprofiled_ns is not None)
    widths = answer.widths_ns or {}
    if any(widths.values()):
        cause, width_ns = next(iter(widths.items()))
        yield f"Most of the width: {cause} ({format_ns(width_ns)})"
    yield from (f"Assumed: {assumption}" for assumption in answer.assumptions)
    for edit in parse_edits(answer.edits):
        if edit.spec.numbers:
            yield f"{edit.text} changes what is computed: {edit.spec.numbers}"
