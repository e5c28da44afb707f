"""``profkit ranges``: the tree of ranges."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import capture_argument, obey_strict, rank_option, trace_options
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second
from profkit.reading import open_trace
from profkit.report.commands.efficiency import build_ranges_document


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
