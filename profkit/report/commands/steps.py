"""What a run's steps took: without a profiler beside with one, which are never mixed, and by lines of source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profkit.analysis.lines import LinesResult
from profkit.analysis.time_account.step_times import PhaseTimes, StepTimes, summarize_step_times
from profkit.names import STEP
from profkit.report.document import UNKNOWN, Column, Document, Lines, Row, Table
from profkit.report.units import NS, TEXT, Unit, format_change, format_count, format_ns, format_share
from profkit.run.lines import LineTime
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
        "clean_mad_ns": times.clean.median_absolute_deviation,
        "clean_p10_ns": times.clean.p10,
        "clean_p90_ns": times.clean.p90,
        "profiled_ns": times.profiled_ns,
        "cost": times.cost,
    }


def _spread(phases: list[PhaseTimes]) -> str:
    """Return the mean and the standard deviation of the whole step, or of the last phase where it was not timed."""
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
        f"left out: {steps} before these; they emptied the data loader's queue of {loading.queue_batches:,} batches,"
        f" which had filled while the program was held up (the recorder started in {held})"
    ]


def _time_notes(times: StepTimes) -> list[str]:
    # A phase of some steps alone, as evaluation, has fewer samples than there are steps.
    clean = max(phase.clean.count for phase in times.phases)
    profiled = max(phase.profiled.count for phase in times.phases if phase.profiled)
    lines = [
        _WHERE[times.twin].format(format_count(clean, "step")),
        f"profiled: {format_count(profiled, 'recorded step')}",
    ]
    waits = any(phase.clean_rate_ns is not None for phase in times.phases)
    lines.append(
        "times are medians" + ("; of data the mean wait, of the step this and the median of the rest" if waits else "")
    )
    if any(phase.clock == "cuda-events" for phase in times.phases):
        lines.append("phases: by CUDA events around them; the step: by the host's clock")
    return lines


_WAITS = Unit(lambda value: f"{value:.3g}" if value else UNKNOWN)
_TIME = Unit(lambda value: NS.show(value) if value else UNKNOWN)


def build_lines_document(result: LinesResult) -> Document:
    """Return the lines, the longest first."""
    files = _short_names({row.file for row in result.lines if row.file is not None})
    rows: list[dict[str, Any]] = [
        {**vars(row), "place": f"{files[row.file or '']}:{row.line}", "called": row.called or ""}
        for row in result.lines
    ]
    head = f"Lines of source in {format_count(result.steps, 'step')} of {NS.show(result.step_ns)}"
    columns = (
        Column("place", "line", TEXT, flexible=True),
        Column("function", "function", TEXT, flexible=True),
        Column("called", "calls", TEXT, flexible=True),
        Column("phase", "phase", TEXT, on_screen=_show_phase),
        Column("time_ns", "per step", _TIME),
        Column("error_ns", "±", _TIME),
        Column("waiting_ns", "waiting", _TIME),
        Column("waits", "waits", _WAITS),
    )
    table = Table(columns, rows, exact=tuple(LineTime.__dataclass_fields__))
    return Document("lines", result.to_dict(), (Lines([head], "head"), table, Lines(_notes(result))), table)


def _notes(result: LinesResult) -> Iterator[str]:
    if result.is_scaled:
        yield "times are scaled, phase by phase, to the unprofiled steps; ± is the standard error"
    else:
        yield "times are as sampled: no unprofiled step is near enough to scale them to; ± is the standard error"
    if result.unnamed_ns:
        yield f"{NS.show(result.unnamed_ns)} a step with no line of your own, or too few samples to name one"
    if result.batch_ns is not None:
        yield f"workers of data loaders: per batch, of which one takes {NS.show(result.batch_ns)}"
    if result.no_waits is not None:
        yield f"calls that wait for the GPU are not known: {result.no_waits}"
    else:
        yield "waits: calls that wait for the GPU, per step; torch does not see torch.cuda.synchronize() and NCCL"
    yield "waiting for the GPU is not work: removing a wait helps only if the GPU is idle meanwhile"


def describe_line(line: LineTime) -> str:
    """Return one line of source and what it takes, in a few words."""
    place = f"{Path(line.file or '').name}:{line.line} {line.function}"
    what = f"{place}: {line.called}" if line.called else place
    waits = f", of it {NS.show(line.waiting_ns)} waiting for the GPU" if line.waiting_ns else ""
    shown = _WAITS.show(line.waits)
    times = f" ({shown} {'wait' if shown == '1' else 'waits'})" if line.waits else ""
    return f"{what} {NS.show(line.time_ns)}{waits}{times}"


def _show_phase(row: Row) -> str:
    return "loader worker" if row["thread"] == "worker" else str(row["phase"] or UNKNOWN)


def _short_names(files: set[str]) -> dict[str, str]:
    """Return the shortest ends of paths that tell the files apart."""
    short = {}
    for file in files:
        parts = Path(file).parts
        others = [Path(other).parts for other in files if other != file]
        size = 1
        while size < len(parts) and any(other[-size:] == parts[-size:] for other in others):
            size += 1
        short[file] = str(Path(*parts[-size:]))
    return short
