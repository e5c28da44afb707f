"""``profkit memory``: who held the memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
@click.option(
    "--min-size", "min_bytes", type=SIZE, default=0, help="Show only allocations of at least this size, such as 10MiB."
)
@click.option("--phase", "phases", multiple=True, metavar="NAME=GLOB", help="Treat annotations matching GLOB as NAME.")
@click.option("--capacity", "capacity_bytes", type=SIZE, help="The GPU's memory, to explain an out-of-memory error.")
@click.option("--timeline", type=FILE, metavar="FILE", help="Draw memory over time: FILE.html or FILE.png.")
@click.option("--leaks", is_flag=True, help="Also show what each step left behind, and from which lines.")
@click.option(
    "--top",
    type=POSITIVE,
    metavar="N",
    help=f"Show at most N stacks (default {TOP_STACKS}) or modules (default {TOP_MODULES}).",
)
@output_options
def memory(
    snapshot: Path,
    by: By | None,
    rank: int | None,
    phases: tuple[str, ...],
    timeline: Path | None,
    leaks: bool,
    top: int | None,
    output: Output,
    **asked: Any,
) -> None:
    """Say how much memory was allocated, when it peaked, what the peak was made of and which lines asked for it.

    SNAPSHOT is a file by torch.cuda.memory._dump_snapshot (.pickle, .pickle.gz; nothing in it is executed), or a run
    directory. profkit replays the allocator from the recorded events, so the peak equals max_memory_allocated() to
    the byte; if the history does not prove that, a bound is printed.
    """
    if timeline is not None and timeline.suffix.lower() not in (".html", ".png"):
        raise UsageError(f"--timeline {timeline}: name a page FILE.html or a picture FILE.png")
    refuse_overwriting([snapshot], [output.path, timeline])
    opened = _open(snapshot, phases, rank)
    keep_to_the_end(opened)
    with shown_after_a_second(f"analysing {snapshot.name}"):
        result = opened.memory(**asked)
    if timeline is not None:
        with shown_after_a_second(f"drawing {timeline.name}"):
            _draw(timeline, _capture(snapshot, opened), result, Filter(asked["stack"], asked["min_bytes"]))
    output.print(build_memory_document(result, by=by, top=top, leaks=leaks))


def _draw(path: Path, capture: OpenedCapture, result: MemoryResult, wanted: Filter) -> None:
    assert capture.snapshot is not None
    memory = capture.snapshot.device(result.totals.device)
    if path.suffix.lower() == ".png":
        from profkit.report.plots import plot_timeline  # loads Matplotlib

        plot_timeline(path, memory, result, wanted)
        return
    from profkit.report.page.page import render_memory_page, write_page  # loads Jinja2

    write_page(path, render_memory_page(capture, memory, result, wanted))


def _capture(path: Path, opened: OpenedSnapshot) -> OpenedCapture:
    from profkit.analysis.opened import OpenedCapture

    run = find_run(Path(opened.snapshot.path))
    return OpenedCapture(path if run is None else run.path, run, None, opened)


def _open(path: Path, phases: tuple[str, ...], rank: int | None) -> OpenedSnapshot:
    named = {}
    for phase in phases:
        name, equals, glob = phase.partition("=")
        if not (name and equals and glob):
            raise UsageError(f"--phase {phase}: write a name and a glob, such as --phase forward='model.*'")
        named[name] = glob
    with shown_after_a_second(f"replaying {path.name}"):
        opened = open_snapshot(path, phases=named, rank=rank)
    ranks = Run(path).snapshots if rank is None and path.is_dir() else {}
    if len(ranks) > 1:
        chosen = next(number for number, file in ranks.items() if str(file) == opened.snapshot.path)
        click.echo(f"rank {chosen} of {len(ranks)}, the one with the highest peak; --rank for another", err=True)
    return opened
