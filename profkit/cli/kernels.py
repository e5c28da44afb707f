"""``profkit kernels``: which kernels spent the time."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from profkit.analysis.kernels import Grouping, KernelsResult
from profkit.analysis.opened_trace import OpenedTrace
from profkit.analysis.selection import KernelFilter
from profkit.cli.options import output_options
from profkit.cli.outputs import refuse_overwriting, require_png, write_result, write_warnings
from profkit.cli.progress import shown_after_a_second
from profkit.errors import CheckError, UsageError
from profkit.reading import open_trace
from profkit.report.document import Format
from profkit.report.kernels import SORTS, render_kernels
from profkit.report.summary import beside_phases, render_phases

_DEFAULT_TOP = 20
_FOR_PEOPLE = ("table", "markdown", "latex")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--range", "name", metavar="RANGE", help="A range's name, a glob ('layer *') or a path (forward/ffn).")
@click.option("--exclude", metavar="RANGE", help="Leave out what lies under this range, such as warmup.")
@click.option("--instance", type=int, metavar="N", help="Only the N-th instance of the range, counted from 0.")
@click.option("--per-instance", is_flag=True, help="Also one line per instance of the range; in CSV that alone.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only this rank of a distributed run.")
@click.option("--process", type=int, metavar="PID", help="Only this process.")
@click.option("--device", type=int, metavar="N", help="Only this GPU.")
@click.option("--by", type=click.Choice(get_args(Grouping)), default="kernel", show_default=True)
@click.option("--sort", type=click.Choice(SORTS), default="total", show_default=True)
@click.option("--top", type=click.IntRange(min=1), help=f"So many lines; a table shows {_DEFAULT_TOP} unless told.")
@click.option("--explain", is_flag=True, help="Show the rule that gave each kernel its category.")
@click.option("--thread-only", is_flag=True, help="Place work by its own thread's ranges alone, as other tools do.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw the table as a bar chart.")
@click.option("--strict", is_flag=True, help="Exit 3 if the capture fails its self-check.")
@output_options
def kernels(
    trace: Path,
    name: str | None,
    exclude: str | None,
    instance: int | None,
    per_instance: bool,
    rank: int | None,
    process: int | None,
    device: int | None,
    by: Grouping,
    sort: str,
    top: int | None,
    explain: bool,
    thread_only: bool,
    plot: Path | None,
    strict: bool,
    style: Format,
    output: Path | None,
    full_names: bool,
) -> None:
    """Say which kernels spent the GPU's time, in the capture or inside a range.

    TRACE is an nsys export (.sqlite), an nsys report (.nsys-rep, if nsys is here to export it), a torch.profiler trace
    (.json, .json.gz) or a run directory. Without --range: the phases and the whole capture.

    A kernel belongs to the ranges that were open when it was launched, on the launching thread (direct) or, for
    PyTorch's autograd threads, on the thread that waits for them (inferred).
    """
    _refuse_misfits(explain, by, style, plot)
    refuse_overwriting([trace], [output, plot])
    with shown_after_a_second(f"reading {trace.name}"):
        opened = open_trace(trace, rank=rank, thread_only=thread_only)
        result = opened.kernels(
            name,
            exclude=exclude,
            instance=instance,
            process=process,
            device=device,
            by=by,
            per_instance=per_instance,
        )
        check = opened.self_check
    if top is None and style in _FOR_PEOPLE:
        top = _DEFAULT_TOP
    text = render_kernels(result, check, style, sort=sort, top=top, full_names=full_names)
    if style == "table":
        text = _with_phases(text, opened, result)
    if explain:
        from profkit.report.categories import render_explanation

        text += "\n\n" + render_explanation(result, style, sort=sort, top=top, full_names=full_names)
    if plot is not None:
        from profkit.report.kernel_plot import plot_kernels

        with shown_after_a_second(f"drawing {plot.name}"):
            plot_kernels(result, check, plot, top=top or _DEFAULT_TOP, sort=sort)
    _warn(opened, result, style, top)
    write_result(text, output)
    if strict and check.failed:
        raise CheckError(f"{trace}: the capture failed its self-check")


def _refuse_misfits(explain: bool, by: Grouping, style: Format, plot: Path | None) -> None:
    """Refuse what could not be answered, before a large capture is read for it."""
    if explain and by != "kernel":
        raise UsageError(f"--explain: rules are for kernels, not --by {by}")
    if explain and style not in ("table", "markdown"):
        raise UsageError(f"--explain: --format {style} holds one table; take table or markdown")
    require_png(plot)


def _with_phases(text: str, opened: OpenedTrace, result: KernelsResult) -> str:
    """Put the table of phases before that of the whole capture; beside a part of it they would mislead."""
    if result.filters != KernelFilter(rank=opened.rank) or result.by != "kernel":
        return text
    return beside_phases(text, render_phases(opened), opened.self_check)


def _warn(opened: OpenedTrace, result: KernelsResult, style: Format, top: int | None) -> None:
    """Warn on stderr; the failures head a table themselves, but a CSV or JSON has no head that a person sees."""
    check = opened.self_check
    findings = [*check.of("failed"), *check.of("warning")] if style in ("csv", "json") else check.of("warning")
    cut = style == "csv" and result.per_instance is None and top is not None and top < len(result.kernels)
    notes = [f"--top {top}: the CSV holds {top} of {len(result.kernels):,} lines"] if cut else []
    write_warnings([*(warning.message for warning in result.warnings), *(f.message for f in findings), *notes])
