"""Draw a step's lanes, of host and GPU, as it is and as it is expected after edits, one above the other."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from profkit.analysis.step_replay.lanes import StepLanes
from profkit.analysis.step_replay.limits import Limit
from profkit.report.colours import LIMITS, STEP
from profkit.report.commands.answer import NAMES
from profkit.report.plots.pictures import draw_png
from profkit.report.units import format_ns


def plot_lanes(before: StepLanes, after: StepLanes, edits: tuple[str, ...], path: Path) -> None:
    """Write the lanes of both steps, on one scale, to a PNG file.

    Raises:
        OSError: it cannot be written.
    """
    rows = [
        (f"{name}, {lane}", spans)
        for name, step in (("now", before), ("after", after))
        for lane, spans in step.lanes.items()
    ]
    with draw_png(path, 9.0, 1.2 + 0.4 * len(rows)) as (_, axes):
        for number, (_, spans) in enumerate(rows):
            axes.broken_barh(
                [(span.start_ns / 1e6, (span.end_ns - span.start_ns) / 1e6) for span in spans],
                (number - 0.4, 0.8),
                facecolors=[STEP[LIMITS[span.kind]] for span in spans],
            )
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, max(before.step_ns, after.step_ns) / 1e6)
        axes.set_xlabel("ms")
        axes.set_title(
            f"A step: {format_ns(before.step_ns)} now, {format_ns(after.step_ns)} with {', '.join(edits)}",
            fontsize="medium",
        )
        _add_key(axes, [before, after])


def _add_key(axes: Axes, steps: list[StepLanes]) -> None:
    kinds = dict.fromkeys(span.kind for step in steps for spans in step.lanes.values() for span in spans)
    patches = [Patch(color=STEP[LIMITS[kind]], label=NAMES[Limit(kind)]) for kind in kinds]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
