"""What ``profkit run -- COMMAND`` does and says."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import median
from typing import Any

import click

from profkit.cli.progress import shown_after_a_second
from profkit.launch.nsys import Nsys
from profkit.launch.scripts import RecordedScript, record_script
from profkit.models.attachment import Attachment
from profkit.run_directory import read_manifest


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
        _show(recorded)
    click.echo(f"\nThe run is {where}. Next:")
    if recorded.has_kernels:
        click.echo(f"  profkit kernels {where} --range forward")
    click.echo(f"  profkit ranges {where}")
    return recorded.exit_status


def _show(recorded: RecordedScript) -> None:
    from profkit.report.summary import render_run_summary

    click.echo(render_run_summary(recorded.run))
    cost = _cost_line(read_manifest(recorded.run))
    if cost:
        click.echo(f"\n{cost}")


def _cost_line(manifest: dict[str, Any]) -> str:
    """Return what a step took before the recording and in it; "" where one of the two was not timed."""
    from profkit.report.units import format_ns

    before, within = ([step["step_ns"] for step in manifest[part]["steps"]] for part in ("attached", "profiled"))
    if not before or not within:
        return ""
    cost = f"{median(within) / median(before) - 1:+.0%}"
    return (
        f"a step took {format_ns(round(median(before)))} while profkit was attached, not recording "
        f"({len(before)} steps), and {format_ns(round(median(within)))} recorded ({len(within)} steps): {cost}"
    )
