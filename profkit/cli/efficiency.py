"""``profkit ranges`` and ``profkit efficiency``: the tree of ranges, how each used the GPUs, and what limits it."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import (
    FILE,
    capture_argument,
    obey_strict,
    plot_option,
    range_option,
    rank_option,
    trace_options,
)
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second
from profkit.errors import UsageError
from profkit.reading import open_capture, open_trace
from profkit.report.commands.efficiency import build_efficiency_document, build_ranges_document
from profkit.run.directory import Run, choose_run, find_run

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
    computing. Computing is limited by the peak that it would reach first: arithmetic or memory bandwidth.
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
        compared = None
        if len(opened.ranks.members) > 1:
            from profkit.analysis.ranks.comparison import compare_opened

            compared = compare_opened(opened, opened.run)
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
            plot_roofline(folded, plot, untrusted=check.failed)
    output.print(document)
    obey_strict(trace, check, strict=strict)


def _run_of(path: Path, rank: int | None) -> Run:
    run = find_run(choose_run(path, rank))
    if run is None:
        raise UsageError(f"{path}: lines of source stand in a run directory; make one with `profkit run`")
    return run
