"""What a run's steps took, without a profiler beside with one and by lines of source; and what limits a step."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profkit.analysis.step_replay.limits import Cause, Limit, LimitPart, LineLimit, StepLimits, sum_parts
from profkit.analysis.time_account import is_step, is_warmup
from profkit.analysis.tree import join_path, split_path
from profkit.names import STEP, phase_of
from profkit.report import shortest_end
from profkit.report.document import UNKNOWN, Column, Document, Lines, Row, Table
from profkit.report.units import NS, SHARE, TEXT, Unit, format_change, format_count, format_ns, format_share
from profkit.run.lines import LineTime, name_count

# What limits a step is shown of traces alone too: these do not wait for what only runs have.
if TYPE_CHECKING:
    from profkit.analysis.causes.evidence import SourceLine
    from profkit.analysis.efficiency.summary import EfficiencyRow
    from profkit.analysis.lines import LinesResult
    from profkit.analysis.step_replay.calibrate import Fit
    from profkit.analysis.step_replay.predict import TimeAnswer
    from profkit.analysis.step_replay.replay import Proof
    from profkit.analysis.time_account.step_times import PhaseTimes, StepTimes
    from profkit.run.manifest import Manifest

_TIME_COLUMNS = (
    Column("phase", "time of", TEXT),
    Column("clean_ns", "unprofiled", NS),
    Column("clean_mad_ns", "MAD", NS),
    Column("clean_p10_ns", "p10", NS),
    Column("clean_p90_ns", "p90", NS),
    Column("profiled_ns", "profiled", NS),
    Column("cost", "cost", Unit(format_change)),
)

_WHERE = {"clean": "unprofiled, own process: {}", "attached": "unprofiled, same process: {} before the recording"}


def clean_times_parts(manifest: Manifest) -> list[Table | Lines]:
    """Return the tables of unprofiled beside profiled times per phase, and what they mean; none without both times."""
    from profkit.analysis.time_account.step_times import summarize_step_times

    times = summarize_step_times(manifest)
    if times is None or not any(phase.profiled for phase in times.phases):
        return []
    parts: list[Table | Lines] = []
    for context in dict.fromkeys(phase.context for phase in times.phases):
        phases = [phase for phase in times.phases if phase.context == context]
        title = "" if context is None else f"context {context}"
        parts += [Table(_TIME_COLUMNS, [_time_row(phase) for phase in phases], title), Lines([_spread(phases)])]
    return [*parts, Lines([*_time_notes(times), *_drain_note(manifest)])]


def _time_row(times: PhaseTimes) -> dict[str, Any]:
    return {
        "phase": times.phase,
        "clean_ns": times.clean_ns,
        "clean_mad_ns": times.usual.median_absolute_deviation,
        "clean_p10_ns": times.usual.p10,
        "clean_p90_ns": times.usual.p90,
        "profiled_ns": times.profiled_ns,
        "cost": times.cost,
    }


def _spread(phases: list[PhaseTimes]) -> str:
    step = next((phase for phase in phases if phase.phase == STEP), phases[-1])
    text = f"{step.phase}: mean {format_ns(step.clean.mean)}"
    if step.clean.standard_deviation is not None and step.clean.relative_deviation is not None:
        deviation = format_ns(step.clean.standard_deviation)
        text += f" ± {deviation} (standard deviation, {format_share(step.clean.relative_deviation)})"
    return text


def _drain_note(manifest: Manifest) -> list[str]:
    loading = manifest.loading
    if loading is None or not loading.drained_steps:
        return []
    steps, held = format_count(loading.drained_steps, "recorded step"), format_ns(loading.start_ns)
    return [
        f"left out: {steps} before these, as many as the data loader's queue holds batches,"
        f" which filled while the program was held up (the recorder started in {held})"
    ]


def _time_notes(times: StepTimes) -> list[str]:
    # A phase of some steps alone, as evaluation, has fewer samples than there are steps.
    clean = max(phase.clean.count for phase in times.phases)
    profiled = max(phase.profiled.count for phase in times.phases if phase.profiled)
    lines = [
        _WHERE[times.twin].format(format_count(clean, "step")),
        f"profiled: {format_count(profiled, 'recorded step')}",
    ]
    waits = any(phase.unprofiled.waits for phase in times.phases)
    lines.append(
        "times are medians" + ("; of data the mean wait, of the step this and the median of the rest" if waits else "")
    )
    if times.waited_ns is not None:
        lines.append("waits for data: as the recorded steps had them; a full queue hid them from the unprofiled ones")
    if any(phase.clock == "cuda-events" for phase in times.phases):
        lines.append("phases: by CUDA events around them; the step: by the host's clock")
    return [*lines, *_rare_notes(times)]


def _rare_notes(times: StepTimes) -> Iterator[str]:
    for step in (phase for phase in times.phases if phase.phase == STEP):
        where = "" if step.context is None else f" at context {step.context}"
        if step.rare_count:
            yield f"left out{where}: {format_count(step.rare_count, 'rare step')}, which the mean alone has"
        for phase in times.phases:
            if phase.context == step.context and phase.clean_ns and not phase.typical_ns:
                few = f"{phase.clean.count} of {step.clean.count} steps"
                yield f"{phase.name} is in {few}, and no part of the typical one"


_WAITS = Unit(lambda value: name_count(value) if value else UNKNOWN)
_TIME = Unit(lambda value: NS.show(value) if value else UNKNOWN)
_WORTH = 0.05
"""The share of a step from which the time in which Python was done is worth a sentence."""


def build_lines_document(result: LinesResult) -> Document:
    files = {Path(row.file).parts for row in result.lines if row.file is not None}
    rows: list[dict[str, Any]] = [
        {
            **vars(row),
            "place": f"{Path(*shortest_end(Path(row.file or '').parts, files))}:{row.line}",
            "called": row.called or "",
            "where": "loader worker" if row.thread == "worker" else row.phase or UNKNOWN,
        }
        for row in result.lines
    ]
    head = f"Lines of source in {format_count(result.steps, 'step')} of {NS.show(result.step_ns)}"
    columns: tuple[Column, ...] = (
        Column("place", "line", TEXT, flexible=True),
        Column("function", "function", TEXT, flexible=True),
        Column("called", "calls", TEXT, flexible=True),
        Column("where", "phase", TEXT),
        Column("time_ns", "per step", _TIME),
        Column("error_ns", "±", _TIME),
    )
    if result.knows_waits:
        columns += (Column("waiting_ns", "waiting", _TIME), Column("waits", "waits", _WAITS))
    table = Table(columns, rows, exact=tuple(LineTime.__dataclass_fields__))
    return Document("lines", result.to_dict(), (Lines([head], "head"), table, Lines(_notes(result))), table)


def _notes(result: LinesResult) -> Iterator[str]:
    if result.is_scaled:
        yield f"times are scaled, phase by phase, to the unprofiled steps{_unscaled(result)}; ± is the standard error"
    else:
        yield "times are as sampled: no unprofiled step is near enough to scale them to; ± is the standard error"
    if result.unnamed_ns:
        yield f"{NS.show(result.unnamed_ns)} a step with no line of your own, or too few samples to name one"
    if result.ahead_ns >= _WORTH * result.step_ns:
        yield f"{NS.show(result.ahead_ns)} a step Python was done, and waited at the step's end for the GPU"
    own_ns = sum(line.time_ns for line in result.lines if line.thread != "worker")
    left_ns = result.step_ns - own_ns - result.unnamed_ns - result.ahead_ns
    if result.is_scaled and left_ns >= _WORTH * result.step_ns:
        yield f"{NS.show(left_ns)} a step in no line: the steps in which lines were looked for were shorter"
    if result.batch_ns is not None:
        yield f"workers of data loaders: per batch, of which one takes {NS.show(result.batch_ns)}"
    if result.no_waits is not None:
        yield f"calls that wait for the GPU are not known: {result.no_waits}"
    else:
        yield "waits: calls that wait for the GPU, per step; torch does not see torch.cuda.synchronize() and NCCL"
    if result.knows_waits:
        yield "waiting for the GPU is not work: removing a wait helps only if the GPU is idle meanwhile"

    for line in result.rare:
        where, mean = f" in {line.phase}" if line.phase else " outside of phases", NS.show(line.time_ns)
        yield f"left out: {name_line(line)}, which rare steps alone ran{where}; on average {mean} a step"


def _unscaled(result: LinesResult) -> str:
    if not result.unscaled:
        return ""
    names = " and ".join(phase or "time outside of phases" for phase in result.unscaled)
    how = "scaled as the whole step" if result.is_step_scaled else "as sampled"
    return f" ({names} {how}: too far from their times)"


def name_source(line: SourceLine | LineLimit | LineTime) -> str:
    """Return a line of source as ``train.py:30 main``."""
    return f"{Path(line.file or '').name}:{line.line} {line.function}"


def name_line(line: LineLimit | LineTime) -> str:
    """Return a line of source with what it calls: ``train.py:30 main: torch.randn``."""
    return f"{name_source(line)}: {line.called}" if line.called else name_source(line)


def describe_line(line: LineTime) -> str:
    waits = f", of it {NS.show(line.waiting_ns)} waiting for the GPU" if line.waiting_ns else ""
    shown = _WAITS.show(line.waits)
    times = f" ({shown} {'wait' if shown == '1' else 'waits'})" if line.waits else ""
    return f"{name_line(line)} {NS.show(line.time_ns)}{waits}{times}"


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
WAITING = "waiting for other ranks"
"""Who they wait for may be chance, or the profiler's doing."""

_CAUSES_NAMED = 3
_MOST_ROWS = 10


def limit_parts(limits: StepLimits) -> Iterator[Table | Lines]:
    """Yield what limits the step: the sentence with its proof, and the longest shares by phase."""
    if limits.refusal is not None:
        yield Lines([f"What limits the step: {describe_limits(limits)}"])
        return
    rows: list[Row] = [
        {"phase": phase, "cause": _name_cause(cause), "time_ns": time_ns, "share": time_ns / limits.step_ns}
        for phase, causes in limits.by_phase.items()
        for cause, time_ns in causes.items()
    ]
    rows.sort(key=lambda row: -row["time_ns"])
    left_ns = sum(row["time_ns"] for row in rows[_MOST_ROWS:])
    rest: Row = {"phase": "", "cause": f"{len(rows) - _MOST_ROWS} more", "time_ns": left_ns}
    shown = [*rows[:_MOST_ROWS], *([{**rest, "share": left_ns / limits.step_ns}] if left_ns else [])]
    assert limits.proof is not None
    proof = _describe_proof(limits.proof, limits.fit, is_unprofiled=limits.unprofiled_ns is not None)
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


def _name_cause(cause: str) -> str:
    return _CAUSES.get(cause, f"{cause} kernels")


def describe_limits(limits: StepLimits, late_rank: int | None = None) -> str:
    """Return what limits the step, the largest shares first, or why that is unknown.

    Of several ranks that make it together, how much of it a late one does is said too. (Of the others none is: which
    host the profiler slows most sets the pace in the recording.)
    """
    if limits.refusal is not None:
        return f"unknown: {limits.refusal}"
    on_rank = 0 if late_rank is None else limits.by_rank.get(late_rank, 0)
    late = f"; {format_share(on_rank / limits.step_ns)} of it on rank {late_rank}, which is late" if on_rank else ""
    return _describe_shares(limits.limited_by) + late


def _describe_shares(limited_by: Mapping[str, int]) -> str:
    whole = sum(limited_by.values()) or 1
    named = dict(islice(limited_by.items(), _CAUSES_NAMED))
    words = [f"{_name_cause(cause)} {format_share(time_ns / whole)}" for cause, time_ns in named.items()]
    rest = sum(limited_by.values()) - sum(named.values())
    return ", ".join([*words, *([f"others {format_share(rest / whole)}"] if rest else [])])


def _describe_proof(proof: Proof, fit: Fit, *, is_unprofiled: bool) -> str:
    lengths = (
        f"{format_ns(proof.replayed_ns)} replayed for {format_ns(proof.recorded_ns)} recorded ({proof.error:+.2%}),"
        " from first call to last kernel"
    )
    ends = f"{format_ns(proof.operations_p50_ns)} (p50), {format_ns(proof.operations_p95_ns)} (p95)"
    text = f"Step replay: {lengths}, ends on the GPU off by {ends}"
    if not is_unprofiled:
        return f"{text}; the step is as recorded"
    speed = f"{fit.least:.2f} to {fit.most:.2f}"
    known = "" if fit.is_identified else "; all of these fit, because the GPU sets the pace"
    return f"{text}; Python's time × {speed} as in unprofiled steps{known}"


def limit_words(row: EfficiencyRow, late_rank: int | None = None) -> str | None:
    """Return what limits a range; None if it launched nothing. Which peak limits what computes may be unknown.

    A rank that is waited for has its name here only if it is ``late_rank``, which `profkit ranks` calls late.
    """
    if row.verdict == "communication-bound" and row.waiting_for is not None:
        return f"waiting for rank {late_rank}" if row.waiting_for == late_rank else WAITING
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


def name_limits(
    rows: Sequence[EfficiencyRow], limits: StepLimits | None, late_rank: int | None = None
) -> dict[str, str | None]:
    """Return by path what limits each range: by the replay of the step where there is one, else as `limit_words` says.

    Of what the GPU computes, the range's own FLOPs and kernels tell which of its peaks is in the way.
    """
    words = {row.path: limit_words(row, late_rank) for row in rows}
    if limits is None or not limits.stand_for_step:
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
    names: dict[str, set[str]] = {row.path: set() for row in rows}
    for row in rows:
        parts = split_path(row.path)
        for depth in range(1, len(parts) + 1):
            names.get(join_path(parts[:depth]), set()).add(row.name)
    return names


def _parts_under(row: EfficiencyRow, names: Container[str], parts: Sequence[LimitPart]) -> list[LimitPart]:
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
    if answer.batch_factor != 1:
        yield Lines([_describe_samples(answer)])
    yield Lines(_rests_on(answer))


def _describe_samples(answer: TimeAnswer) -> str:
    """Say how many samples the predicted step has, and the time of as many as a step has now: a Try states that one."""
    times = {name: UNKNOWN if time_ns is None else format_ns(time_ns) for name, time_ns in answer.as_many_ns.items()}
    return (
        f"The step after has {answer.batch_factor:g} times as many samples. For as many as now: least {times['low']},"
        f" expected {times['expected']}, most {times['high']}"
    )


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
    from profkit.run.edits import parse_edits

    if answer.limited_by is not None:
        yield f"The step would be limited by {_describe_shares(answer.limited_by)}"
    assert answer.proof is not None
    yield _describe_proof(answer.proof, answer.fit, is_unprofiled=answer.unprofiled_ns is not None)
    widths = answer.widths_ns or {}
    if any(widths.values()):
        cause, width_ns = next(iter(widths.items()))
        yield f"Most of the width: {cause} ({format_ns(width_ns)})"
    yield from (f"Assumed: {assumption}" for assumption in answer.assumptions)
    for edit in parse_edits(answer.edits):
        if edit.spec.numbers.change:
            yield f"{edit.text} changes what is computed: {edit.spec.numbers.change}"
