"""What ``profkit run -- COMMAND`` does and says."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from profkit.cli.progress import shown_after_a_second
from profkit.cli.run_steps import say_what_a_report_holds
from profkit.launch.nsys import Nsys
from profkit.launch.scripts import record_script
from profkit.models.attachment import Attachment


def run_script(
    words: tuple[str, ...], wanted: Attachment, nsys: Nsys | None, output: Path | None, command: list[str]
) -> int:
    """Run the command, print what was recorded of it, and return its exit status; 1 if it left nothing to record."""
    recorded = record_script(words, wanted, nsys, output, command=command, progress=shown_after_a_second)
    where = shlex.quote(str(recorded.run))
    for warning in recorded.warnings:
        click.echo(f"profkit: warning: {warning}", err=True)
    if recorded.exit_status != 0:
        kept = "" if recorded.reason else "; what was recorded up to then is kept"
        status = recorded.exit_status
        click.echo(f"profkit: {words[0]} failed with exit status {status}{kept}; see {where}/manifest.json", err=True)
    if recorded.reason is not None:
        click.echo(f"profkit: {recorded.reason}", err=True)
        return recorded.exit_status or 1
    if recorded.exit_status == 0:
        from profkit.report.summary import render_run_summary

        click.echo(render_run_summary(recorded.run))
    say_what_a_report_holds(recorded.run)
    click.echo(f"\nThe run is {where}. Next:")
    if recorded.has_kernels:
        click.echo(f"  profkit kernels {where} --range forward")
    click.echo(f"  profkit ranges {where}")
    return recorded.exit_status
