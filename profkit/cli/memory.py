"""``profkit memory``: who held the memory."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from profkit.analysis.memory.composition import Filter
from profkit.analysis.memory.opened_snapshot import PEAK, OpenedSnapshot, read_snapshot
from profkit.cli.options import output_options
from profkit.cli.outputs import refuse_overwriting, write_result, write_warnings
from profkit.cli.progress import shown_after_a_second
from profkit.cli.quantities import Size
from profkit.errors import UsageError
from profkit.report.formats import Format
from profkit.report.memory import TOP_STACKS, other_warnings, render_memory
from profkit.report.memory_compare import TOP_PARTS, render_comparison
from profkit.report.timeline import STACKINGS, Stacking, write_timeline
from profkit.run.directory import Run
from profkit.snapshot.unpickler import collector_off

_OF_ONE_SNAPSHOT = ("at", "stack", "min_size", "capacity", "timeline", "timeline_by", "leaks")


@click.command()
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.option(
    "--at", default=PEAK, show_default=True, metavar="peak|TIME|phase:NAME", help="Which moment to take apart."
)
@click.option("--device", type=int, metavar="N", help="This GPU; by default the one with the highest peak.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Of a run of several ranks this one; see above.")
@click.option("--stack", metavar="TEXT", help="Only allocations with this text in their stack or owner.")
@click.option("--min-size", type=Size(), default=0, help="Only allocations at least so large, such as 10MiB.")
@click.option("--phase", "phases", multiple=True, metavar="NAME=GLOB", help="Annotations by this glob are phase NAME.")
@click.option("--capacity", type=Size(), help="The GPU's memory, for the verdict on an out-of-memory error.")
@click.option("--timeline", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: FILE.html or FILE.png.")
@click.option("--timeline-by", type=click.Choice(STACKINGS), default="category", show_default=True)
@click.option("--leaks", is_flag=True, help="Also what each step left behind, by stack.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="AFTER",
    help="Explain how the peak of AFTER, a snapshot or run, differs.",
)
@click.option("--top", type=click.IntRange(min=1), help=f"So many stacks; a table shows {TOP_STACKS} unless told.")
@output_options
def memory(
    snapshot: Path,
    at: str,
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
    style: Format,
    output: Path | None,
    full_names: bool,
) -> None:
    """Say how much memory was allocated, when it peaked, what the peak was made of and who asked for it.

    SNAPSHOT is what torch.cuda.memory._dump_snapshot wrote (.pickle, .pickle.gz; nothing in it is executed), or a run
    directory. The allocator is replayed from the recorded events, so that the peak is max_memory_allocated() to the
    byte; where the history does not prove that, a bound is printed.

    Of a run of several ranks the one with the highest peak is taken, unless --rank names another.
    """
    refuse_overwriting([snapshot, *([against] if against is not None else [])], [output, timeline])
    click.get_current_context().with_resource(collector_off())
    opened = _open(snapshot, phases, rank)
    if against is not None:
        _refuse_beside_against(click.get_current_context())
        comparison = opened.against(_open(against, phases, rank if against.is_dir() else None), device=device)
        write_warnings(warning.message for warning in comparison.warnings)
        write_result(render_comparison(comparison, style, top=top or TOP_PARTS, full_names=full_names), output)
        return
    with shown_after_a_second(f"taking apart {snapshot.name}"):
        result = opened.memory(at=at, device=device, stack=stack, min_bytes=min_size, capacity_bytes=capacity)
    if timeline is not None:
        with shown_after_a_second(f"drawing {timeline.name}"):
            chosen = opened.device(device)
            write_timeline(timeline, chosen, result, by=timeline_by, wanted=Filter(stack, min_size))
    write_warnings(other_warnings(result) if style != "json" else [])
    text = render_memory(result, style, top=top or TOP_STACKS, full_names=full_names, leaks=leaks)
    write_result(text, output)


def _refuse_beside_against(context: click.Context) -> None:
    """Refuse what a comparison of two peaks would leave undone.

    Raises:
        UsageError: an option was given that speaks of one snapshot alone.
    """
    for name in _OF_ONE_SNAPSHOT:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--against compares two peaks, and {option} is of one snapshot; give them one by one")


def _open(path: Path, phases: tuple[str, ...], rank: int | None) -> OpenedSnapshot:
    named = {}
    for phase in phases:
        name, equals, glob = phase.partition("=")
        if not (name and equals and glob):
            raise UsageError(f"--phase {phase}: give a name and a glob, such as --phase forward='model.*'")
        named[name] = glob
    with shown_after_a_second(f"replaying {path.name}"):
        opened = read_snapshot(path, phases=named, rank=rank)
    _tell_rank(path, opened, rank)
    return opened


def _tell_rank(path: Path, opened: OpenedSnapshot, rank: int | None) -> None:
    """Say which rank is shown where several are there and none was named."""
    if rank is None and path.is_dir():
        ranks = Run(path).snapshots
        if len(ranks) > 1:
            chosen = next(one for one, file in ranks.items() if str(file) == opened.snapshot.path)
            click.echo(f"rank {chosen} of {len(ranks)}, the one with the highest peak; --rank for another", err=True)
