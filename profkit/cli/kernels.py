"""``profkit kernels``, ``ranges`` and ``efficiency``: which kernels took the time, under which ranges, and how well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from profkit.analysis.kernels.summary import Grouping, KernelsResult
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.tree import KernelFilter
from profkit.cli.options import (
    FILE,
    POSITIVE,
    capture_argument,
    obey_strict,
    plot_option,
    range_option,
    rank_option,
    trace_options,
)
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second, write_warnings
from profkit.errors import UsageError
from profkit.names import STEP, context_range
from profkit.reading import open_capture, open_trace
from profkit.report.commands.kernels import SORTS, build_kernels_document
from profkit.run.directory import Run, choose_run, find_run

if TYPE_CHECKING:
    from profkit.analysis.ranks.comparison import RanksResult

_DEFAULT_TOP = 20


@click.command()
@capture_argument("trace")
@range_option("A range's name, a glob ('layer *') or a path (forward/ffn).")
@click.option("--exclude", metavar="RANGE", help="Leave out what ran under this range, such as warmup.")
@click.option("--instance", type=int, metavar="N", help="Only the N-th instance of the range, counted from 0.")
@click.option(
    "--per-instance", is_flag=True, help="Also show one line per instance of the range (CSV holds only these)."
)
@rank_option
@click.option("--process", type=int, metavar="PID", help="Only this process.")
@click.option("--device", type=int, metavar="N", help="Only this GPU.")
@click.option(
    "--by", type=click.Choice(get_args(Grouping)), default="kernel", show_default=True, help="What one line stands for."
)
@click.option("--sort", type=click.Choice(SORTS), default="total", show_default=True, help="The order of the lines.")
@click.option("--top", type=POSITIVE, metavar="N", help=f"Show at most N lines (default {_DEFAULT_TOP}).")
@click.option("--explain", is_flag=True, help="Show the rule behind each category, and what compiled kernels compute.")
@plot_option("Draw the table as a bar chart.")
@trace_options
@output_options
def kernels(
    trace: Path,
    name: str | None,
    rank: int | None,
    by: Grouping,
    sort: str,
    top: int | None,
    explain: bool,
    thread_only: bool,
    totals: bool,
    plot: Path | None,
    strict: bool,
    output: Output,
    **part: Any,
) -> None:
    """Show which kernels took the GPU's time, in the capture or inside a range.

    TRACE is an nsys export (.sqlite), an nsys report (.nsys-rep), a torch.profiler trace (.json, .json.gz) or a run
    directory. Without --range: the phases and the whole capture, and of a run what its steps took unprofiled.

    A kernel belongs to the ranges that were open when it was launched, on the launching thread or, for PyTorch's
    autograd threads, on the thread that waited for them. Figures are averages per step if the capture has steps;
    JSON and CSV hold the exact sums.
    """
    if explain and by != "kernel":
        raise UsageError(f"--explain: rules are for kernels, not --by {by}")
    refuse_overwriting([trace], [output.path, plot])
    with shown_after_a_second(f"reading {trace.name}"):
        opened = open_trace(trace, rank=rank, thread_only=thread_only)
        result = opened.kernels(name, by=by, explain=explain, **part)
        check = opened.self_check
    if top is None and output.is_for_people:
        top = _DEFAULT_TOP
    # Next to a part of the capture the phases of the whole would mislead.
    whole = result.filters == KernelFilter(rank=opened.rank) and result.by == "kernel"
    is_shown = whole and output.is_for_people
    document = build_kernels_document(
        result,
        check.findings,
        sort=sort,
        top=top,
        totals=totals,
        full_names=output.full_names,
        explain=explain,
        phases=_phases(opened) if is_shown else None,
        compared=_compare_ranks(opened) if len(result.ranks) > 1 else None,
    )
    if is_shown and opened.run is not None and trace.is_dir():
        from profkit.report.commands.steps import clean_times_parts

        manifest = opened.run.manifest
        times = clean_times_parts(manifest if rank is None else manifest.of_rank(rank))
        document = replace(document, parts=[*document.parts, *times])
    if plot is not None:
        from profkit.report.plots import plot_kernels

        with shown_after_a_second(f"drawing {plot.name}"):
            plot_kernels(opened, result, plot, top=top or _DEFAULT_TOP, sort=sort, totals=totals)
    if output.style == "csv" and not part["per_instance"] and top is not None and top < len(result.kernels):
        write_warnings([f"--top {top}: the CSV holds {top} of {len(result.kernels):,} lines"])
    output.print(document)
    obey_strict(trace, check, strict=strict)


def _compare_ranks(opened: OpenedTrace) -> RanksResult | None:
    from profkit.analysis.ranks.comparison import compare_opened  # few captures are of several ranks

    return compare_opened(opened, opened.run)


def _phases(opened: OpenedTrace) -> dict[str, list[KernelsResult]] | None:
    contexts = () if opened.run is None else opened.run.manifest.workload.contexts
    within = {context_range(context): f"{context_range(context)}/{STEP} */" for context in contexts} or {"": ""}
    phases = {title: opened.phases(path) for title, path in within.items()}
    return {title: results for title, results in phases.items() if results} or None


_DTYPES = ("fp32", "tf32", "bf16", "fp16")


@click.command()
@capture_argument("trace")
@rank_option
@click.option(
    "--numbered", is_flag=True, help="Show 'layer 0' and 'layer 1' on separate lines (JSON and CSV always do)."
)
@trace_options
@output_options
def ranges(
    trace: Path,
    rank: int | None,
    numbered: bool,
    totals: bool,
    thread_only: bool,
    strict: bool,
    output: Output,
) -> None:
    """Show the tree of ranges: how often each was open, its Python time, kernel time, GPU busy time and share.

    TRACE is an nsys export (.sqlite), an nsys report (.nsys-rep), a torch.profiler trace or a run directory.
    """
    refuse_overwriting([trace], [output.path])
    with shown_after_a_second(f"reading {trace.name}"):
        opened = open_trace(trace, rank=rank, thread_only=thread_only)
        numbered = numbered or not output.is_for_people
        result = opened.ranges(numbered=numbered)
        check = opened.self_check
    from profkit.report.commands.efficiency import build_ranges_document

    output.print(build_ranges_document(result, check.findings, numbered=numbered, totals=totals))
    obey_strict(trace, check, strict=strict)


@click.command()
@capture_argument("trace")
@range_option("Only these ranges and those within: a name, glob or path.")
@rank_option
@click.option("--numbered", is_flag=True, help="Show 'layer 0' and 'layer 1' on separate lines.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Type of matrix products, if the run does not record it.")
@click.option("--ceilings", type=FILE, metavar="FILE", help="Peaks measured by profkit ceilings.")
@click.option("--by", type=click.Choice(["range", "line"]), default="range", help="What to show (default: range).")
@plot_option("Draw the ranges on a roofline.")
@trace_options
@output_options
def efficiency(
    trace: Path,
    name: str | None,
    rank: int | None,
    numbered: bool,
    totals: bool,
    dtype: str | None,
    ceilings: Path | None,
    by: str,
    plot: Path | None,
    thread_only: bool,
    strict: bool,
    output: Output,
) -> None:
    """Show how well the GPUs' time was used under each range, and what limits it.

    TRACE is an nsys export (.sqlite), an nsys report (.nsys-rep), a torch.profiler trace or a run directory; only a run
    directory knows FLOPs, bytes and unprofiled times.

    The largest part of a range's time on the GPU decides what limits it: idle while the host launches kernels (kernel
    launches), idle while it does anything else (Python), communication that nothing hides (communication), or
    computing. Computing is limited by the peak that it would reach first: arithmetic or memory bandwidth. Where the
    recorded step can be run again (step replay), it says instead what most of the range's part of the step waits for.
    """
    refuse_overwriting([trace, ceilings], [output.path, plot])
    if by == "line":
        from profkit.analysis.lines import find_lines
        from profkit.report.commands.steps import build_lines_document

        output.print(build_lines_document(find_lines(_run_of(trace, rank), rank or 0)))
        return
    with shown_after_a_second(f"reading {trace.name}"):
        is_run = trace.is_dir() and rank is None and not thread_only
        capture = open_capture(trace) if is_run else None
        if capture is None or capture.trace is None:
            opened, answer = open_trace(trace, rank=rank, thread_only=thread_only), ""
        else:
            # It asks all of the house, which a trace alone need not load; nor does it the room of several ranks.
            from profkit.report.commands.answer import answer_capture

            opened, answer = capture.trace, answer_capture(capture)
        compared = _compare_ranks(opened) if len(opened.ranks.members) > 1 else None
        from profkit.report.commands.efficiency import build_efficiency_document

        check = opened.self_check
        result = opened.efficiency(name, numbered=numbered, ceilings=ceilings, dtype=dtype)
        document = build_efficiency_document(
            result,
            check.findings,
            totals=totals,
            compared=compared,
            limits=opened.step_limits,
            answer=answer,
        )
        if plot is not None:
            from profkit.report.plots import plot_roofline

            # A picture with a point for each layer and step would be unreadable.
            folded = opened.efficiency(name, ceilings=ceilings, dtype=dtype) if numbered else result
            late_rank = None if compared is None else compared.late_rank
            plot_roofline(folded, plot, limits=opened.step_limits, late_rank=late_rank, untrusted=check.failed)
    output.print(document)
    obey_strict(trace, check, strict=strict)


def _run_of(path: Path, rank: int | None) -> Run:
    run = find_run(choose_run(path, rank))
    if run is None:
        raise UsageError(f"{path}: lines of source stand in a run directory; make one with `profkit run`")
    return run
