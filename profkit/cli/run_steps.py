"""What ``profkit run`` does and says where profkit drives the steps: of a built-in model, or of a callable."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import click

from profkit.cli.ceilings import measure_to
from profkit.cli.progress import shown_after_a_second
from profkit.launch.nsys import Nsys
from profkit.launch.record import AnyWorkload, Recorded, record_run, require_torch
from profkit.models.workload import CallableWorkload, MemoryOptions, Workload
from profkit.names import context_range

PROFILERS = ("torch.profiler", "Nsight Systems")

_KILLED = 128 + signal.SIGKILL
_THREE_TIMES = (
    "three passes, each in a process of its own, because recording the allocator slows the steps and so does a "
    "profiler: for the allocator, unprofiled, for {}"
)


def run_steps(
    workload: AnyWorkload,
    nsys: Nsys | None,
    output: Path | None,
    command: list[str],
    *,
    memory: MemoryOptions | None,
    ceilings: bool = False,
) -> int:
    """Run the steps, print what was recorded of them and what to ask next, and return the target's exit status."""
    require_torch()
    if memory is not None:
        click.echo(f"profkit: {_THREE_TIMES.format(PROFILERS[nsys is not None])}", err=True)
    recorded = record_run(workload, nsys, output, command, shown_after_a_second, memory=memory)
    where = shlex.quote(str(recorded.run))
    if recorded.exit_status != 0:
        killed = " (killed: perhaps the memory was full)" if recorded.exit_status == _KILLED else ""
        status = recorded.exit_status
        said = f"profkit: {workload.target} failed with exit status {status}{killed}; see {where}/manifest.json"
        click.echo(said, err=True)
        if recorded.has_snapshot:
            click.echo(f"The allocator's history up to then is there. Next:\n  profkit memory {where}")
        return recorded.exit_status
    for warning in recorded.warnings:
        click.echo(f"profkit: warning: {warning}", err=True)
    if ceilings:
        measure_to(recorded.run, "auto" if isinstance(workload, CallableWorkload) else workload.device)
    _show(recorded)
    say_what_a_report_holds(recorded.run)
    click.echo(f"\nThe run is {where}. Next:")
    if recorded.has_kernels:
        click.echo(f"  profkit kernels {where} --range {_example_range(workload)}")
    click.echo(f"  profkit ranges {where}")
    if recorded.has_snapshot:
        click.echo(f"  profkit memory {where} --timeline memory.html")
    return 0


def say_what_a_report_holds(run: Path) -> None:
    """Print, of a run that kept nsys' report, what is in it and cannot be taken out."""
    from profkit.run.directory import NSYS_EXPORT, NSYS_REPORT

    if (run / NSYS_REPORT).exists():
        click.echo(
            f"\n{NSYS_REPORT} holds the environment, secrets included, and cannot be scrubbed: share a `profkit scrub` "
            f"of\n{NSYS_EXPORT}; --no-keep-report deletes the report"
        )


def _show(recorded: Recorded) -> None:
    from profkit.report.summary import render_run_summary

    click.echo(render_run_summary(recorded.run))
    if recorded.has_snapshot:
        from profkit.report.memory_summary import render_memory_summary

        click.echo("\n" + render_memory_summary(recorded.run))


def _example_range(workload: AnyWorkload) -> str:
    if not isinstance(workload, Workload):  # it need not have phases
        return "'step *'"
    return f"'{context_range(workload.context)}/step */forward'" if workload.contexts else "forward"
