"""What limits a step, by its replay, and each of its ranges: the sentence, the proof, the shares, a word a range."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice

from profkit.analysis.efficiency.summary import EfficiencyRow
from profkit.analysis.step_replay.calibrate import Fit
from profkit.analysis.step_replay.limits import Cause, Limit, LimitPart, StepLimits, sum_parts
from profkit.analysis.step_replay.predict import TimeAnswer
from profkit.analysis.step_replay.replay import Proof
from profkit.analysis.summary import stands_for_step
from profkit.analysis.time_account.steps import is_step, is_warmup
from profkit.analysis.tree.selection import join_path, split_path
from profkit.names import phase_of
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
LIMITS = {
    "compute-bound": "arithmetic",
    "memory-bound": "memory bandwidth",
    "launch-bound": "kernel launches",
    "host-bound": "Python",
    "communication-bound": "communication",
}
"""A verdict as people read it: what the range is limited by."""
DATA = "data loading"
COMPUTING = "GPU computing"

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


def limit_words(row: EfficiencyRow) -> str | None:
    """Return what limits a range; None if it launched nothing. Which peak limits what computes may be unknown."""
    if row.verdict == "communication-bound" and row.waiting_for is not None:
        return f"waiting for rank {row.waiting_for}"
    if row.verdict == "host-bound" and row.loads_data:
        return DATA
    if row.verdict is None:
        return COMPUTING if row.busy_ns else None
    return LIMITS[row.verdict]


_REPLAYED = {
    Limit.PYTHON: LIMITS["host-bound"],
    Limit.PREPARING: LIMITS["launch-bound"],
    Limit.COMMUNICATING: LIMITS["communication-bound"],
    Limit.WAITING: "waits for the GPU",
    Limit.COPYING: "memory copies",
    Limit.ALLOCATING: "allocations",
}


def name_limits(rows: Sequence[EfficiencyRow], limits: StepLimits | None) -> dict[str, str | None]:
    """Return by path what limits each range: by the replay of the step where there is one, else as `limit_words` says.

    Of what the GPU computes, the range's own FLOPs and kernels tell which of its peaks is in the way.
    """
    words = {row.path: limit_words(row) for row in rows}
    if limits is None or not stands_for_step(limits):
        return words
    names = _names_within(rows)
    for row in rows:
        sums = sum_parts(_parts_under(row, names[row.path], limits.parts), "limit")
        limit = next(iter(sums), Limit.COMPUTING)
        if limit == Limit.COMPUTING:
            is_of_work = row.verdict in (None, "compute-bound", "memory-bound")
            words[row.path] = words[row.path] if is_of_work or not sums else COMPUTING
        elif row.waiting_for is None and not (limit == Limit.PYTHON and row.loads_data):
            words[row.path] = _REPLAYED[limit]
    return words


def _names_within(rows: Sequence[EfficiencyRow]) -> dict[str, set[str]]:
    """Return by path the names of a range and of all ranges in it."""
    names: dict[str, set[str]] = {row.path: set() for row in rows}
    for row in rows:
        parts = split_path(row.path)
        for depth in range(1, len(parts) + 1):
            names.get(join_path(parts[:depth]), set()).add(row.name)
    return names


def _parts_under(row: EfficiencyRow, names: Container[str], parts: Sequence[LimitPart]) -> list[LimitPart]:
    """Return the parts of what limits a step that lie in a range of it: a step, a phase or modules in a phase."""
    path = split_path(row.path)
    if not any(map(is_step, path)) or any(map(is_warmup, path)):
        return []
    if is_step(row.name):
        return list(parts)
    phase = next((phase for name in path if (phase := phase_of(name))), None)
    is_whole = phase_of(row.name) is not None
    return [part for part in parts if part.phase == phase and (is_whole or part.module in names)]


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
