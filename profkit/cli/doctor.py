"""``profkit doctor``: what can be recorded on this machine."""

from __future__ import annotations

import os

import click

from profkit.cli.options import format_option
from profkit.cli.outputs import print_document, shown_after_a_second
from profkit.errors import CheckError, ToolError
from profkit.launch.doctor import Check, Machine, can_record, examine
from profkit.launch.nsys import Nsys, find_nsys
from profkit.report.commands.doctor import build_doctor_document
from profkit.report.document import Format


@click.command()
@click.option(
    "--try",
    "with_trial",
    is_flag=True,
    help="Record a Python process with nsys for one second, and export it.",
)
@format_option
def doctor(with_trial: bool, style: Format) -> None:
    """Show what this machine can record, and one thing to do for each part that it cannot.

    It looks at nsys, its version against the driver, its importer, nvtx, GPUs and their links, permission, torch, disk
    and cache, and imports no torch. It exits with 3 if a trial failed or nothing can be recorded: there is neither
    torch nor an nsys that starts, or no room on the disk.
    """
    nsys, machine = _find(), Machine()
    with shown_after_a_second("looking at this machine"):
        findings = examine(machine, nsys)
    possible = can_record(findings)
    trials = [] if not with_trial else [_try(nsys)]
    findings += trials
    print_document(build_doctor_document(findings, can_record=possible, on_screen=style == "table"), style, None)
    if not possible:
        raise CheckError("nothing can be recorded here: profkit needs torch or a working nsys, and free disk space")
    for failed in (one for one in trials if one.state == "failed"):
        what = "nsys records no ranges here" if failed.check == "trial" else "no collectives between the GPUs"
        raise CheckError(f"the {failed.check} failed: {what}")


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
