"""``profkit doctor``: what this machine can record."""

from __future__ import annotations

import os

import click

from profkit.cli.outputs import Output, format_option, shown_after_a_second
from profkit.errors import CheckError, ToolError
from profkit.launch.doctor import Machine, can_record, examine
from profkit.launch.nsys import Nsys, find_nsys
from profkit.report.commands.machine import build_doctor_document
from profkit.report.document import Format


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
    Output(style).print(build_doctor_document(findings, can_record=possible, on_screen=style == "table"))
    if not possible:
        raise CheckError("nothing can be recorded here: profkit needs torch or a working nsys, and free disk space")
