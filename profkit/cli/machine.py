"""``profkit doctor`` and ``profkit ceilings``: what this machine can record, and the peaks of its GPU."""

from __future__ import annotations

import os
from pathlib import Path

import click

from profkit.cli.options import FILE
from profkit.cli.outputs import Output, format_option, shown_after_a_second
from profkit.errors import CheckError, RunError, ToolError
from profkit.launch.doctor import Machine, can_record, examine
from profkit.launch.gpu_state import measure_ceilings
from profkit.launch.nsys import Nsys, find_nsys
from profkit.launch.record import require_torch
from profkit.report.commands.machine import build_ceilings_document, build_doctor_document
from profkit.report.document import Format
from profkit.run import write_record
from profkit.run.directory import CEILINGS, Run


@click.command()
@format_option
def doctor(style: Format) -> None:
    """Show what this machine can record, and one thing to do for each part that it cannot.

    It looks at nsys, its version against the driver, its importer, nvtx, GPUs, torch and disk, and imports no torch. It
    exits with 3 if nothing can be recorded: there is neither torch nor an nsys that starts, or no room on the disk.
    """
    try:
        nsys: Nsys | str | None = find_nsys(os.environ)
    except ToolError as error:
        nsys = str(error)
    with shown_after_a_second("looking at this machine"):
        findings = examine(Machine(), nsys)
    possible = can_record(findings)
    rows = [vars(check) for check in findings]
    Output(style).print(build_doctor_document(rows, can_record=possible, on_screen=style == "table"))
    if not possible:
        raise CheckError("nothing can be recorded here: profkit needs torch or a working nsys, and free disk space")


@click.command()
@click.option(
    "-o",
    "output",
    type=FILE,
    help=f"Also write to this file, or to {CEILINGS} of this run.",
)
@format_option
def ceilings(output: Path | None, style: Format) -> None:
    """Measure this machine's peaks: matrix products in fp32, TF32, BF16 and FP16, and a memory copy.

    It takes some seconds and needs the GPU for itself. The table also shows what NVIDIA's datasheet says of that GPU.
    """
    require_torch()
    if output is not None and output.is_dir():
        Run(output)
    with shown_after_a_second("measuring what the GPU can do"):
        measured = measure_ceilings()
    if output is not None:
        path = output / CEILINGS if output.is_dir() else output
        try:
            write_record(path, measured)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; name another file with -o") from None
    Output(style).print(build_ceilings_document(measured))
