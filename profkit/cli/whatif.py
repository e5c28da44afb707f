"""``profkit whatif``: a step's time and the peak of memory after changes, before anyone makes them."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.analysis.step_replay.predict import Prediction
from profkit.analysis.whatif.apply import Cost, cost_of_ranges
from profkit.cli.options import SIZE, capture_argument, peak_options, plot_option
from profkit.cli.outputs import Output, output_options, refuse_overwriting, require_png, shown_after_a_second
from profkit.errors import ProfkitError, UsageError
from profkit.reading import open_capture, open_snapshot, open_trace
from profkit.report.commands.whatif import build_prediction_document
from profkit.run.edits import FORMS, parse_edits


@click.command()
@capture_argument("capture", "RUN")
@click.option(
    "--allocator",
    "allocators",
    multiple=True,
    metavar="SETTINGS",
    help="Settings to try, as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,max_split_size_mb:128.",
)
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="EDIT",
    help="Change the program; several are applied together: "
    + ", ".join(FORMS)
    + ". `profkit help whatif` explains them.",
)
@click.option("--fit", type=SIZE, metavar="SIZE", help="Search for the cheapest edits that fit, such as 24GiB.")
@click.option(
    "--capacity",
    type=SIZE,
    help="Memory that PyTorch may reserve, such as 24GiB (default: that of the recorded GPU).",
)
@plot_option("Draw the step's lanes now and after.")
@peak_options
@output_options
def whatif(
    capture: Path,
    allocators: tuple[str, ...],
    edits: tuple[str, ...],
    fit: int | None,
    capacity: int | None,
    plot: Path | None,
    device: int | None,
    rank: int | None,
    output: Output,
) -> None:
    """Predict a step's time and the peak of memory after changes of the program, or under other allocator settings.

    RUN is a run directory, a trace (time alone) or a memory snapshot (memory alone). Of time, a recorded step is run
    again with the change, once it has reproduced its own recording. Of memory, profkit simulates the allocator on the
    recorded requests; with the recorded settings it must choose every recorded address.
    """
    if fit is not None and (edits or allocators or capacity is not None):
        raise UsageError("--fit searches by itself: leave out --edit, --allocator and --capacity")
    require_png(plot)
    refuse_overwriting([capture], [output.path, plot])
    with shown_after_a_second(f"reading {capture.name}"):
        opened = open_capture(capture, rank=rank) if edits else None
        snapshot = open_snapshot(capture, rank=rank) if opened is None else None
    with shown_after_a_second("replaying the step, simulating the allocator"):
        if opened is not None:
            predicted = opened.whatif(edits, allocators=allocators, device=device, capacity_bytes=capacity)
        else:
            assert snapshot is not None
            memory = snapshot.whatif(
                allocators=allocators,
                fit=fit is not None,
                device=device,
                capacity_bytes=fit or capacity,
                cost=_cost_of(capture) if fit else None,
            )
            predicted = Prediction(None, memory)
    if plot is not None:
        trace = None if opened is None else opened.trace
        lanes = None if trace is None else trace.step_lanes(parse_edits(edits))
        if lanes is None:
            raise UsageError("--plot draws a step's lanes, and its time is not predicted")
        from profkit.report.plots import plot_lanes  # loads Matplotlib

        plot_lanes(*lanes, edits, plot)
    output.print(build_prediction_document(predicted))


def _cost_of(path: Path) -> Cost | None:
    """Return what tells how long ranges take, if the run has a trace that can be read."""
    if not path.is_dir():
        return None
    try:
        return cost_of_ranges(open_trace(path).ranges())
    except ProfkitError:
        return None
