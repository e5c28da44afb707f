"""``profkit efficiency``: how well the GPUs' time was used, and what bounds each range."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.analysis.efficiency.evidence import find_evidence
from profkit.cli.options import output_options
from profkit.cli.outputs import refuse_overwriting, require_png, write_result, write_warnings
from profkit.cli.progress import shown_after_a_second
from profkit.errors import CheckError, UsageError
from profkit.findings import Finding
from profkit.reading import open_trace
from profkit.report.attention_parts import render_attention
from profkit.report.efficiency import render_efficiency
from profkit.report.efficiency_explained import render_explanation
from profkit.report.formats import Format

_DTYPES = ("fp32", "tf32", "bf16", "fp16")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--range", "name", metavar="RANGE", help="Only these ranges and those within: a name, glob or path.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only this rank of a distributed run.")
@click.option("--numbered", is_flag=True, help="Keep 'layer 0' and 'layer 1' apart.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="What matrix products were done in, if the run does not say.")
@click.option("--ceilings", type=click.Path(path_type=Path), metavar="FILE", help="Peaks measured by profkit ceilings.")
@click.option("--explain", is_flag=True, help="Show the rule and the numbers behind each verdict, down to raw rows.")
@click.option("--attention", is_flag=True, help="Instead, attention's parts: their times against their FLOPs.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw the ranges on a roofline.")
@click.option("--thread-only", is_flag=True, help="Place work by its own thread's ranges alone, as other tools do.")
@click.option("--strict", is_flag=True, help="Exit 3 if the capture fails its self-check.")
@output_options
def efficiency(
    trace: Path,
    name: str | None,
    rank: int | None,
    numbered: bool,
    dtype: str | None,
    ceilings: Path | None,
    explain: bool,
    attention: bool,
    plot: Path | None,
    thread_only: bool,
    strict: bool,
    style: Format,
    output: Path | None,
    full_names: bool,
) -> None:
    """Say how well the GPUs' time was used under each range, and what bounds it.

    TRACE is an nsys export (.sqlite), an nsys report (.nsys-rep), a torch.profiler trace or a run directory; only the
    last knows FLOPs, bytes and unprofiled times of everything.

    A range is bound by the largest part of its time on the GPU: idle while the host launches (launch) or does something
    else (host), nothing but communication (communication), or work, and then by the peak that it would meet first
    (compute, memory).
    """
    _refuse_misfits(explain, attention, style, plot)
    refuse_overwriting([path for path in (trace, ceilings) if path is not None], [output, plot])
    with shown_after_a_second(f"reading {trace.name}"):
        opened = open_trace(trace, rank=rank, thread_only=thread_only)
        check = opened.self_check
        warnings: tuple[Finding, ...] = ()
        if attention:
            text = render_attention(opened.attention(name), check, style, full_names=full_names)
        else:
            result = opened.efficiency(name, numbered=numbered, ceilings=ceilings, dtype=dtype)
            text, warnings = render_efficiency(result, check, style, full_names=full_names), result.warnings
            if explain:
                evidence = find_evidence(opened.attribution, name, numbered=numbered)
                text += "\n\n" + render_explanation(result, evidence, style, full_names=full_names)
            if plot is not None:
                from profkit.report.roofline import plot_roofline

                # A point for each layer and step would be a picture that nobody reads.
                folded = opened.efficiency(name, ceilings=ceilings, dtype=dtype) if numbered else result
                plot_roofline(folded, check, plot)
    findings = [*check.of("failed"), *check.of("warning")] if style in ("csv", "json") else check.of("warning")
    write_warnings([*(warning.message for warning in warnings), *(f.message for f in findings)])
    write_result(text, output)
    if strict and check.failed:
        raise CheckError(f"{trace}: the capture failed its self-check")


def _refuse_misfits(explain: bool, attention: bool, style: Format, plot: Path | None) -> None:
    """Refuse what could not be answered, before a large capture is read for it."""
    if attention and (explain or plot is not None):
        raise UsageError("--attention is a table of its own; leave --explain and --plot out")
    if explain and style not in ("table", "markdown"):
        raise UsageError(f"--explain: --format {style} holds the rules already; take table or markdown")
    require_png(plot)
