"""What the steps of a run took without a profiler, and what profiling cost them: the two are never mixed."""

from __future__ import annotations

from profkit.analysis.step_times import PhaseTimes, SampleStatistics, StepTimes, summarize_step_times
from profkit.names import STEP
from profkit.report.formats import Column, Table, render_table
from profkit.report.units import format_count, format_ns, format_share
from profkit.run.manifest import Manifest

_FIRST = Column("time of", "phase", right=False)
_COLUMNS = (
    Column("median", "clean_median_ns"),
    Column("MAD", "clean_mad_ns"),
    Column("p10", "clean_p10_ns"),
    Column("p90", "clean_p90_ns"),
)
_LAST = (Column("profiled", "profiled_median_ns"), Column("cost", "cost"))

_WHERE = {
    "clean": "unprofiled: {} in a process of their own",
    "attached": "attached, not recording: {} of the same process, before the recording",
}


def render_clean_times(manifest: Manifest) -> str:
    """Return the tables of unprofiled beside profiled times per phase, and what they mean; "" where there are none."""
    times = summarize_step_times(manifest)
    if times is None or not any(one.profiled for one in times.phases):
        return ""
    contexts = dict.fromkeys(one.context for one in times.phases)
    parts = []
    for context in contexts:
        rows = [one for one in times.phases if one.context == context]
        title = "" if context is None else f"context {context}\n"
        parts.append(f"{title}{_render_rows(rows)}\n{_render_spread(rows)}")
    return "\n\n".join([*parts, _explain(times)])


def _render_rows(rows: list[PhaseTimes]) -> str:
    columns = (_FIRST, *_COLUMNS, *_LAST)
    cells = []
    for one in rows:
        clean = one.clean
        figures = [clean.median, clean.median_absolute_deviation, clean.p10, clean.p90]
        cost = "–" if one.cost is None else f"{one.cost:+.0%}"
        cells.append([one.phase, *(format_ns(round(value)) for value in figures), _median(one.profiled), cost])
    return render_table(Table(columns, cells, cells))


def _render_spread(rows: list[PhaseTimes]) -> str:
    """Return the mean and the standard deviation of the whole step, or of the last phase where it was not timed."""
    one = next((row for row in rows if row.phase == STEP), rows[-1])
    text = f"{one.phase}: mean {format_ns(round(one.clean.mean))}"
    if one.clean.standard_deviation is not None and one.clean.relative_deviation is not None:
        deviation = format_ns(round(one.clean.standard_deviation))
        text += f" ± {deviation} (standard deviation, {format_share(one.clean.relative_deviation)})"
    return text


def _explain(times: StepTimes) -> str:
    clean = min(one.clean.count for one in times.phases)
    profiled = min(one.profiled.count for one in times.phases if one.profiled)
    lines = [
        _WHERE[times.twin].format(format_count(clean, "step")),
        f"profiled: the median of {format_count(profiled, 'recorded step')}",
    ]
    if any(one.clock == "cuda-events" for one in times.phases):
        lines.append("phases: by CUDA events around them; the step: by the host's clock")
    return "\n".join(lines)


def _median(statistics: SampleStatistics | None) -> str:
    return "–" if statistics is None else format_ns(round(statistics.median))
