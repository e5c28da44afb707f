"""What limits a step, by its replay: the sentence, the proof, and the shares by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from profkit.analysis.step_replay.limits import Cause
from profkit.analysis.step_replay.steps import StepLimits
from profkit.report.document import Column, Lines, Row, Table
from profkit.report.units import NS, SHARE, TEXT, format_ns, format_share

_CAUSES = {
    Cause.PYTHON.value: "Python between CUDA calls",
    Cause.CALL.value: "CUDA calls",
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
    yield Lines([f"The step is limited by {describe_limits(limits)}", describe_proof(limits)])
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


def describe_proof(limits: StepLimits) -> str:
    """Return how well the replay reproduces the recording, and the host's speed in it."""
    proof, fit = limits.proof, limits.fit
    assert proof is not None
    lengths = (
        f"{format_ns(proof.replayed_ns)} replayed for {format_ns(proof.recorded_ns)} recorded ({proof.error:+.2%})"
    )
    ends = f"{format_ns(proof.operations_p50_ns)} (p50), {format_ns(proof.operations_p95_ns)} (p95)"
    text = f"Step replay: {lengths}, ends on the GPU off by {ends}"
    if limits.unprofiled_ns is None:
        return f"{text}; the step is as recorded"
    speed = f"{fit.least:.2f} to {fit.most:.2f}"
    known = "" if fit.is_identified else "; all of these fit, because the GPU sets the pace"
    return f"{text}; Python's time × {speed} as in unprofiled steps{known}"
