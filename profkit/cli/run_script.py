"""What ``profkit run -- COMMAND`` does and says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from profkit.cli.ceilings import measure_to
from profkit.cli.progress import shown_after_a_second
from profkit.cli.run_steps import PROFILERS, say_what_a_report_holds
from profkit.launch.nsys import Nsys
from profkit.launch.scripts import RecordedScript, record_script
from profkit.models.attachment import Attachment

_TWICE = (
    "the command runs twice, because recording the allocator slows its steps: first for the allocator, then for {} "
    "(--memory-only: the first alone)"
)


def run_script(
    words: tuple[str, ...],
    wanted: Sequence[Attachment],
    nsys: Nsys | None,
    output: Path | None,
    command: list[str],
    *,
    ceilings: bool = False,
) -> int:
    """Run the command, print what was recorded of it, and return its exit status; 1 if it left nothing to record."""
    if len(wanted) > 1:
        click.echo(f"profkit: {_TWICE.format(PROFILERS[nsys is not None])}", err=True)
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
    if ceilings and recorded.reason is None:
        measure_to(recorded.run, "auto")
    if recorded.exit_status == 0:
        _show(recorded)
    _tell_next(recorded, where)
    return recorded.exit_status or (1 if recorded.reason else 0)


def _show(recorded: RecordedScript) -> None:
    parts = []
    if recorded.has_trace:
        from profkit.report.summary import render_run_summary

        parts.append(render_run_summary(recorded.run))
    if recorded.has_snapshot:
        from profkit.report.memory_summary import render_memory_summary

        parts.append(render_memory_summary(recorded.run))
    if parts:
        click.echo("\n\n".join(parts))


def _tell_next(recorded: RecordedScript, where: str) -> None:
    if not (recorded.has_trace or recorded.has_snapshot):
        return
    say_what_a_report_holds(recorded.run)
    click.echo(f"\nThe run is {where}. Next:")
    if recorded.has_kernels:
        click.echo(f"  profkit kernels {where} --range forward")
    if recorded.has_trace:
        click.echo(f"  profkit ranges {where}")
    if recorded.has_snapshot:
        click.echo(f"  profkit memory {where} --timeline memory.html")
