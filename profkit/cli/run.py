"""``profkit run``: record a target, keep the run, print where its time went."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from profkit.cli.run_options import (
    ceiling_options,
    command_options,
    hook_options,
    memory_options,
    model_options,
    recorder_options,
    refuse_options_of_other_kinds,
    require_nsys,
    step_options,
)
from profkit.cli.run_script import run_script
from profkit.cli.run_steps import run_steps
from profkit.errors import UsageError
from profkit.launch.nsys_options import GraphTrace
from profkit.launch.ranks import build_rank_argv
from profkit.launch.record import AnyWorkload
from profkit.launch.targets import parse_target, target_kind
from profkit.models.attachment import AttachedRecorder, Attachment
from profkit.models.workload import CallableWorkload, MemoryOptions, Stacks, Workload

_WARMUP = 2
# Of a command's steps before the recording all but the first are timed, so there should be some.
_COMMAND_WARMUP = 5
_COUNTABLE_WARMUP = 2

# torch.compile keeps this many variants of one piece of code; a further one would run uncompiled, without a word.
_COMPILED_CONTEXTS = 8


@click.command(
    epilog="TARGET is a built-in model: model.tiny, model.small, model.medium, model.large, model.xl or model.2.7B; "
    "package.module:name, a callable of yours that returns a step (a callable without arguments); "
    "or, after --, any command that starts Python: profkit run --nsys -- python train.py --lr 1e-3, "
    "-- python -m pkg.train, -- torchrun --nproc-per-node 2 train.py."
)
@click.argument("target", nargs=-1, required=True)
@recorder_options
@step_options
@model_options
@memory_options
@hook_options
@command_options
@ceiling_options
@click.option(
    "-o", "output", type=click.Path(path_type=Path), help="The run directory to make  [default: runs/TIME-TARGET]"
)
def run(
    target: tuple[str, ...],
    output: Path | None,
    with_nsys: bool,
    traces: str,
    graph_trace: GraphTrace,
    nsys_args: str,
    keep_report: bool,
    warmup: int | None,
    steps: int,
    ranks: int,
    depth: int,
    annotate: bool,
    flops: bool,
    stop: bool,
    step_on: str | None,
    ceilings: bool,
    memory: bool,
    memory_only: bool,
    memory_stacks: Stacks,
    memory_entries: int,
    memory_saved: bool,
    **model: Any,
) -> int:
    """Run TARGET under a profiler and keep what it recorded in a run directory.

    The steps of a built-in model, or of a callable of yours, run twice, each time in a process of their own: without a
    profiler, to be timed, then recorded; with --memory a third time, first of all.

    A command runs once: steps --warmup to --warmup + --steps - 1 are recorded, the ones before timed. A step ends with
    the optimizer's; in a script without an optimizer it is an outermost call of a module. With --memory it runs twice,
    to its end unless --stop: first its allocator is recorded, from the first use of CUDA to the last of these steps.

    In a callable's and a command's code ranges for phases and modules appear without an edit.

    The exit status is the target's.
    """
    command = ["profkit", *sys.argv[1:]]
    kind = target_kind(target)
    refuse_options_of_other_kinds(kind)
    nsys = require_nsys(traces, graph_trace, nsys_args, keep_report) if with_nsys else None
    allocator = MemoryOptions(memory_stacks, memory_entries, memory_saved)
    workload: AnyWorkload
    if kind == "command":
        warmup_steps = _COMMAND_WARMUP if warmup is None else warmup
        _check_countable(flops, warmup_steps)
        recorder: AttachedRecorder = "nsys" if with_nsys else "kineto"
        wanted = Attachment("", recorder, warmup_steps, steps, depth, annotate, stop, step_on, flops)
        remembered = replace(wanted, recorder="memory", memory=allocator, flops=False)
        passes = (*[remembered] * (memory or memory_only), *[wanted] * (not memory_only))
        words = tuple(build_rank_argv(target, ranks)) if ranks > 1 else target
        return run_script(words, passes, nsys, output, command, ceilings=ceilings)
    warmup_steps = _WARMUP if warmup is None else warmup
    if kind == "callable":
        _check_countable(flops, warmup_steps)
        workload = CallableWorkload(target[0], warmup_steps, steps, depth, annotate, flops)
    else:
        workload = _model_workload(
            target[0], warmup_steps=warmup_steps, steps=steps, ranks=ranks, memory=memory, **model
        )
    return run_steps(workload, nsys, output, command, memory=allocator if memory else None, ceilings=ceilings)


def _check_countable(flops: bool, warmup_steps: int) -> None:
    if flops and warmup_steps < _COUNTABLE_WARMUP:
        raise UsageError(
            f"--flops needs --warmup {_COUNTABLE_WARMUP} or more: the last of these steps is counted, and the first "
            "does what later ones do not"
        )


def _model_workload(target: str, *, contexts: tuple[int, ...], memory: bool, **options: Any) -> Workload:
    """Return what the options say of a built-in model.

    Raises:
        UsageError: no such model, or several contexts where one alone will do.
    """
    preset = parse_target(target)
    if len(contexts) == 1:
        return Workload(preset, context=contexts[0], **options)
    if options["ranks"] > 1:
        raise UsageError(
            "--nproc-per-node with several --context: each would be a model of its own; run each by itself"
        )
    if memory:
        raise UsageError("--memory with several --context: a snapshot is of one; run each by itself")
    if options["compile_mode"] != "none" and len(contexts) > _COMPILED_CONTEXTS:
        raise UsageError(f"--compile with {len(contexts)} --context: torch.compile keeps {_COMPILED_CONTEXTS} at most")
    return Workload(preset, context=max(contexts), contexts=contexts, **options)
