"""``profkit doctor``: what can be recorded on this machine."""

from __future__ import annotations

import os

import click

from profkit.cli.outputs import print_document
from profkit.cli.progress import shown_after_a_second
from profkit.errors import CheckError, ToolError
from profkit.launch.doctor import Check, Machine, can_record, examine
from profkit.launch.nsys import Nsys, find_nsys
from profkit.report.doctor import build_doctor_document
from profkit.report.document import FORMATS, Format


@click.command()
@click.option(
    "--try", "with_trial", is_flag=True, help="Record a Python process with nsys for one second, and export it."
)
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
def doctor(with_trial: bool, style: Format) -> None:
    """Say what this machine can record, and the one thing to do for each part that it cannot.

    Looks at nsys, its version against the driver, its importer, nvtx, GPU, permission, torch, disk and cache; imports
    no torch. Exits 0 unless nothing can be recorded (neither an nsys that starts nor torch, or no room), or the trial
    failed: then 3.
    """
    nsys = _find()
    with shown_after_a_second("looking at this machine"):
        findings = examine(Machine(), nsys)
    possible = can_record(findings)
    if with_trial:
        findings.append(_try(nsys))
    print_document(build_doctor_document(findings, can_record=possible, on_screen=style == "table"), style, None)
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
    from profkit.launch.doctor import try_nsys

    with shown_after_a_second("recording a second of a Python process"):
        return try_nsys(nsys)
