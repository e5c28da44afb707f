"""``profkit run``: record a target, keep the run, print where its time went."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource

from profkit.cli.progress import shown_after_a_second
from profkit.cli.run_script import run_script
from profkit.errors import ToolError, UsageError
from profkit.launch.nsys import Nsys, find_nsys
from profkit.launch.record import MemoryOptions, record_run, require_torch
from profkit.launch.targets import is_command, parse_target
from profkit.models.attachment import AttachedRecorder, Attachment
from profkit.models.workload import MEMORY_ENTRIES, CompileMode, Device, Dtype, Passes, Stacks, Workload

_KILLED = 128 + signal.SIGKILL
_MODEL_WARMUP = 2
# Of a command's steps before the recording all but the first are timed, so there should be some.
_COMMAND_WARMUP = 5
_AT_LEAST_ONE = click.IntRange(min=1)


_DEPTH_HELP = "Modules of a command's model get a range if their dotted name has at most this many parts."
# What the options of a built-in model mean to a command, and the other way round: nothing.
_FOR_MODELS = ("batch", "context", "passes", "dtype", "compile_mode", "seed", "device", "memory")
_FOR_COMMANDS = ("depth", "annotate", "stop", "step_on")


@click.command(
    epilog="TARGET is a built-in model: model.tiny, model.small, model.medium, model.large, model.xl or model.2.7B; "
    "or, after --, any command that starts Python: profkit run --nsys -- python train.py --lr 1e-3, "
    "-- python -m pkg.train, -- torchrun --nproc-per-node 2 train.py."
)
@click.argument("target", nargs=-1, required=True)
@click.option(
    "--nsys/--kineto",
    "with_nsys",
    default=False,
    help="Record with Nsight Systems, or with torch.profiler (the default). Nsight Systems copies the whole "
    "environment of the process into its report: take secrets out of it before you share a report.",
)
@click.option("--batch", type=_AT_LEAST_ONE, default=4, show_default=True, help="Sequences in a batch.")
@click.option("--context", type=_AT_LEAST_ONE, default=256, show_default=True, help="Tokens in a sequence.")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    help="Steps before the measured ones  [default: 2; 5 of a command's]",
)
@click.option("--steps", type=_AT_LEAST_ONE, default=3, show_default=True, help="Measured steps.")
@click.option(
    "--passes", type=click.Choice(get_args(Passes)), default="train", show_default=True, help="What a step does."
)
@click.option(
    "--dtype",
    type=click.Choice(get_args(Dtype)),
    default="fp32",
    show_default=True,
    help="bf16: autocast, fp32 weights.",
)
@click.option(
    "--compile",
    "compile_mode",
    type=click.Choice(get_args(CompileMode)),
    default="none",
    show_default=True,
    help="torch.compile's mode. Compiled code carries no ranges: the phases remain, layers and attention do not.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights and the tokens.")
@click.option(
    "--device",
    type=click.Choice(get_args(Device)),
    default="auto",
    show_default=True,
    help="auto: CUDA if there is a GPU.",
)
@click.option("--memory", is_flag=True, help="Also record the CUDA allocator, in a process of its own: who held it.")
@click.option(
    "--memory-stacks",
    type=click.Choice(get_args(Stacks)),
    default="python",
    show_default=True,
    help="Frames of each allocation; all: C++ too, which costs more.",
)
@click.option(
    "--memory-entries",
    type=_AT_LEAST_ONE,
    default=MEMORY_ENTRIES,
    show_default=True,
    help="Allocator events kept, some 300 B to 1 KB of host memory each; beyond it the oldest are lost.",
)
@click.option("--memory-saved", is_flag=True, help="Also write down which tensors autograd saves for backward.")
@click.option("--depth", type=click.IntRange(min=0), default=3, show_default=True, help=_DEPTH_HELP)
@click.option("--annotate/--no-annotate", default=True, help="A command's own ranges are shown in any case.")
@click.option("--stop", is_flag=True, help="End the command after the measured steps; else it goes on undisturbed.")
@click.option("--step-on", metavar="CLASS", help="The optimizer whose steps count, where a command has several.")
@click.option(
    "-o", "output", type=click.Path(path_type=Path), help="The run directory to make  [default: runs/TIME-TARGET]"
)
def run(
    target: tuple[str, ...],
    with_nsys: bool,
    output: Path | None,
    warmup: int | None,
    steps: int,
    depth: int,
    annotate: bool,
    stop: bool,
    step_on: str | None,
    memory: bool,
    memory_stacks: Stacks,
    memory_entries: int,
    memory_saved: bool,
    **options: object,
) -> int:
    """Run TARGET under a profiler and keep what it recorded in a run directory.

    A built-in model's steps run twice, each time in a process of their own: without a profiler, to be timed, then
    recorded; with --memory a third time, first of all.

    A command runs once, with ranges for its steps, phases and modules that need no edit: steps --warmup to
    --warmup + --steps - 1 are recorded, the ones before timed. A step ends with the optimizer's; in a script without
    an optimizer it is an outermost call of a module.

    The exit status is the target's.
    """
    command = ["profkit", *sys.argv[1:]]
    if is_command(target):
        _refuse(_FOR_MODELS, "is for the built-in models; leave it out")
        recorder: AttachedRecorder = "nsys" if with_nsys else "kineto"
        warmup_steps = _COMMAND_WARMUP if warmup is None else warmup
        wanted = Attachment("", recorder, warmup_steps, steps, depth, annotate, stop, step_on)
        return run_script(target, wanted, _require_nsys() if with_nsys else None, output, command)
    _refuse(_FOR_COMMANDS, "is for commands: profkit run [OPTIONS] -- python train.py")
    warmup_steps = _MODEL_WARMUP if warmup is None else warmup
    workload = Workload(parse_target(target[0]), warmup_steps=warmup_steps, steps=steps, **options)  # type: ignore[arg-type]
    require_torch()
    nsys = _require_nsys() if with_nsys else None
    allocator = MemoryOptions(memory_stacks, memory_entries, memory_saved) if memory else None
    recorded = record_run(workload, nsys, output, command, shown_after_a_second, memory=allocator)
    where = shlex.quote(str(recorded.run))
    if recorded.exit_status != 0:
        killed = " (killed: perhaps the memory was full)" if recorded.exit_status == _KILLED else ""
        click.echo(
            f"profkit: {target[0]} failed with exit status {recorded.exit_status}{killed}; see {where}/manifest.json",
            err=True,
        )
        if recorded.has_snapshot:
            click.echo(f"The allocator's history up to then is there. Next:\n  profkit memory {where}")
        return recorded.exit_status
    for warning in recorded.warnings:
        click.echo(f"profkit: warning: {warning}", err=True)
    from profkit.report.summary import render_run_summary

    click.echo(render_run_summary(recorded.run))
    if recorded.has_snapshot:
        from profkit.report.memory_summary import render_memory_summary

        click.echo("\n" + render_memory_summary(recorded.run))
    click.echo(f"\nThe run is {where}. Next:")
    if recorded.has_kernels:
        click.echo(f"  profkit kernels {where} --range forward")
    click.echo(f"  profkit ranges {where}")
    if recorded.has_snapshot:
        click.echo(f"  profkit memory {where} --timeline memory.html")
    return 0


def _refuse(names: tuple[str, ...], why: str) -> None:
    """Raise `UsageError` if any of these options was given."""
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        if parameter.name in names and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{parameter.opts[0]} {why}")


def _require_nsys() -> Nsys:
    nsys = find_nsys(os.environ)
    if nsys is None:
        raise ToolError(
            "there is no Nsight Systems here: install it (nsight-systems-cli), put nsys on PATH or name "
            "it in $NSYS; or leave --nsys out to record with torch.profiler"
        )
    return nsys
