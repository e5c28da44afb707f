"""``profkit doctor``: what this machine can record."""

from __future__ import annotations

import os

import click

from profkit.cli.outputs import Output, format_option, shown_after_a_second
from profkit.errors import CheckError, ToolError
from profkit.launch.doctor import Check, Machine, can_record, examine, try_nsys
from profkit.launch.nsys import Nsys, find_nsys
from profkit.report.commands.machine import build_doctor_document
from profkit.report.document import Format


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
