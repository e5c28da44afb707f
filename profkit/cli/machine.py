"""``profkit doctor`` and ``profkit ceilings``: what this machine can record, and what its device can do at most."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import click

from profkit.cli.options import FILE
from profkit.cli.outputs import Output, format_option, shown_after_a_second
from profkit.errors import CheckError, RunError, ToolError
from profkit.launch.doctor import Check, Machine, can_record, examine, try_nsys
from profkit.launch.gpu_state import measure_ceilings
from profkit.launch.nsys import Nsys, find_nsys
from profkit.launch.record import require_torch
from profkit.models.options import Device
from profkit.report.commands.machine import build_ceilings_document, build_doctor_document
from profkit.report.document import Format
from profkit.run.directory import CEILINGS, Run
from profkit.run.work import Ceilings, write_ceilings


@click.command()
@click.option(
    "--try", "with_trial", is_flag=True, help="Record a Python process with nsys for one second, and export it."
)
@format_option
def doctor(with_trial: bool, style: Format) -> None:
    """Show what this machine can record, and one thing to do for each part that it cannot.

    It looks at nsys, its version against the driver, its importer, nvtx, GPUs, torch and disk, and imports no torch. It
    exits with 3 if the trial failed or nothing can be recorded: there is neither torch nor an nsys that starts, or no
    room on the disk.
    """
    nsys = _find()
    with shown_after_a_second("looking at this machine"):
        findings = examine(Machine(), nsys)
    possible = can_record(findings)
    if with_trial:
        findings.append(_try(nsys))
    Output(style).print(build_doctor_document(findings, can_record=possible, on_screen=style == "table"))
    if not possible:
        raise CheckError("nothing can be recorded here: profkit needs torch or a working nsys, and free disk space")
    if with_trial and findings[-1].state == "failed":
        raise CheckError("the trial failed: nsys records no ranges here")


def _find() -> Nsys | str | None:
    try:
        return find_nsys(os.environ)
    except ToolError as error:
        return str(error)


def _try(nsys: Nsys | str | None) -> Check:
    if not isinstance(nsys, Nsys):
        return Check("trial", "failed", "there is no nsys to try", "install nsight-systems-cli or name one in $NSYS")
    with shown_after_a_second("recording a second of a Python process"):
        return try_nsys(nsys)


@click.command()
@click.option(
    "--device",
    type=click.Choice(get_args(Device)),
    default="auto",
    show_default=True,
    help="auto: CUDA if there is a GPU, otherwise the CPU.",
)
@click.option(
    "-o",
    "output",
    type=FILE,
    help=f"Also write to this file, or to {CEILINGS} of this run.",
)
@format_option
def ceilings(device: Device, output: Path | None, style: Format) -> None:
    """Measure this machine's peaks: matrix products in fp32, TF32, BF16 and FP16, and a memory copy.

    It takes some seconds and needs the GPU for itself. The table also shows what NVIDIA's datasheet says of that GPU.
    """
    require_torch()
    if output is not None and output.is_dir():
        Run(output)
    Output(style).print(build_ceilings_document(measure_to(output, device)))


def measure_to(output: Path | None, device: Device) -> Ceilings:
    """Measure, keep the result in ``output`` (a file or a run directory) if one is named, and return it."""
    with shown_after_a_second("measuring what the device can do"):
        measured = measure_ceilings(device)
    if output is not None:
        path = output / CEILINGS if output.is_dir() else output
        try:
            write_ceilings(path, measured)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; name another file with -o") from None
    return measured
