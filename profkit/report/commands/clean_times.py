"""What the steps of a run took without a profiler, and what profiling cost them: the two are never mixed."""

from __future__ import annotations

from typing import Any

from profkit.analysis.time_account.step_times import PhaseTimes, StepTimes, summarize_step_times
from profkit.names import STEP
from profkit.report.document import Column, Lines, Table
from profkit.report.units import NS, TEXT, Unit, format_change, format_count, format_ns, format_share
from profkit.run.manifest import Manifest

_COLUMNS = (
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
        parts += [Table(_COLUMNS, [_row(phase) for phase in phases], title), Lines([_spread(phases)])]
    return [*parts, Lines([*_notes(times), *_drain_note(manifest)])]


def _row(times: PhaseTimes) -> dict[str, Any]:
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


def _notes(times: StepTimes) -> list[str]:
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
