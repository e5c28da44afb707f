"""``profkit memory``: who held the memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from profkit.analysis.memory.bins import STACKINGS, Stacking
from profkit.analysis.memory.device import Filter
from profkit.analysis.memory.opened_snapshot import PEAK, MemoryResult, OpenedSnapshot
from profkit.cli.options import FILE, POSITIVE, SIZE, capture_argument, peak_options
from profkit.cli.outputs import Output, keep_to_the_end, output_options, refuse_overwriting, shown_after_a_second
from profkit.errors import UsageError
from profkit.reading import open_snapshot
from profkit.report.commands.memory import BY, TOP_MODULES, TOP_STACKS, By, build_memory_document
from profkit.run.directory import Run, find_run

if TYPE_CHECKING:
    from profkit.analysis.opened import OpenedCapture

_OF_ONE_SNAPSHOT = ("at", "by", "stack", "min_size", "capacity", "timeline", "timeline_by", "leaks")


@click.command()
@capture_argument("snapshot")
@click.option(
    "--at",
    default=PEAK,
    show_default=True,
    metavar="MOMENT",
    help="Moment to explain: peak, oom (the last allocation that failed), phase:backward, or 2.5s after the first "
    "event.",
)
@click.option("--by", type=click.Choice(BY), help="Show one table: what each module, category, line or phase held.")
@peak_options
@click.option("--stack", metavar="TEXT", help="Show only allocations with TEXT in their stack or their tensor's name.")
@click.option("--min-size", type=SIZE, default=0, help="Show only allocations of at least this size, such as 10MiB.")
@click.option("--phase", "phases", multiple=True, metavar="NAME=GLOB", help="Treat annotations matching GLOB as NAME.")
@click.option("--capacity", type=SIZE, help="The GPU's memory, to explain an out-of-memory error.")
@click.option("--timeline", type=FILE, metavar="FILE", help="Draw memory over time: FILE.html or FILE.png.")
@click.option(
    "--timeline-by",
    type=click.Choice(STACKINGS),
    default="category",
    show_default=True,
    help="What a colour of the timeline stands for.",
)
@click.option("--leaks", is_flag=True, help="Also show what each step left behind, and from which lines.")
@click.option(
    "--against",
    type=FILE,
    metavar="AFTER",
    help="Explain how the peak of AFTER, a snapshot or run, differs.",
)
@click.option(
    "--top",
    type=POSITIVE,
    metavar="N",
    help=f"Show at most N stacks (default {TOP_STACKS}) or modules (default {TOP_MODULES}).",
)
@output_options
def memory(
    snapshot: Path,
    at: str,
    by: By | None,
    device: int | None,
    rank: int | None,
    stack: str | None,
    min_size: int,
    phases: tuple[str, ...],
    capacity: int | None,
    timeline: Path | None,
    timeline_by: Stacking,
    leaks: bool,
    against: Path | None,
    top: int | None,
    output: Output,
) -> None:
    """Say how much memory was allocated, when it peaked, what the peak was made of and which lines asked for it.

    SNAPSHOT is a file by torch.cuda.memory._dump_snapshot (.pickle, .pickle.gz; nothing in it is executed), or a run
    directory. profkit replays the allocator from the recorded events, so the peak equals max_memory_allocated() to
    the byte; if the history does not prove that, a bound is printed.
    """
    _check_timeline(timeline, timeline_by)
    refuse_overwriting([snapshot, against], [output.path, timeline])
    opened = _open(snapshot, phases, rank)
    keep_to_the_end(opened)
    if against is not None:
        from profkit.report.commands.memory_compare import TOP_PARTS, build_peaks_document

        _refuse_options_of_one_snapshot(click.get_current_context())
        comparison = opened.against(_open(against, phases, rank if against.is_dir() else None), device=device)
        output.print(build_peaks_document(comparison, top=top or TOP_PARTS))
        return
    with shown_after_a_second(f"analysing {snapshot.name}"):
        result = opened.memory(at=at, device=device, stack=stack, min_bytes=min_size, capacity_bytes=capacity)
    if timeline is not None:
        with shown_after_a_second(f"drawing {timeline.name}"):
            _draw(timeline, _capture(snapshot, opened), result, timeline_by, Filter(stack, min_size))
    output.print(build_memory_document(result, by=by, top=top, leaks=leaks))


def _check_timeline(path: Path | None, by: Stacking) -> None:
    if path is not None and path.suffix.lower() not in (".html", ".png"):
        raise UsageError(f"--timeline {path}: name a page FILE.html or a picture FILE.png")
    if path is not None and path.suffix.lower() == ".png" and by in ("allocation", "module"):
        raise UsageError(f"--timeline-by {by}: only a page (.html) shows this")


def _draw(path: Path, capture: OpenedCapture, result: MemoryResult, by: Stacking, wanted: Filter) -> None:
    assert capture.snapshot is not None
    memory = capture.snapshot.device(result.totals.device)
    if by in ("category", "stack") and path.suffix.lower() == ".png":
        from profkit.report.plots.memory_plots import plot_timeline  # loads Matplotlib

        plot_timeline(path, memory, result, by=by, wanted=wanted)
        return
    from profkit.report.page.page import render_memory_page, write_page  # loads Jinja2

    write_page(path, render_memory_page(capture, memory, result, by=by, wanted=wanted))


def _capture(path: Path, opened: OpenedSnapshot) -> OpenedCapture:
    from profkit.analysis.opened import OpenedCapture

    run = find_run(Path(opened.snapshot.path))
    return OpenedCapture(path if run is None else run.path, run, None, opened)


def _refuse_options_of_one_snapshot(context: click.Context) -> None:
    for name in _OF_ONE_SNAPSHOT:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for one snapshot and --against compares two; leave one of them out")


def _open(path: Path, phases: tuple[str, ...], rank: int | None) -> OpenedSnapshot:
    named = {}
    for phase in phases:
        name, equals, glob = phase.partition("=")
        if not (name and equals and glob):
            raise UsageError(f"--phase {phase}: write a name and a glob, such as --phase forward='model.*'")
        named[name] = glob
    with shown_after_a_second(f"replaying {path.name}"):
        opened = open_snapshot(path, phases=named, rank=rank)
    _show_rank(path, opened, rank)
    return opened


def _show_rank(path: Path, opened: OpenedSnapshot, rank: int | None) -> None:
    if rank is None and path.is_dir():
        ranks = Run(path).snapshots
        if len(ranks) > 1:
            chosen = next(number for number, file in ranks.items() if str(file) == opened.snapshot.path)
            click.echo(f"rank {chosen} of {len(ranks)}, the one with the highest peak; --rank for another", err=True)
