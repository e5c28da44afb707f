"""``profkit run``: record a target, keep the run, print where its time went and what to ask next."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from profkit.cli.outputs import print_line, quote_path, say, shown_after_a_second
from profkit.cli.run_options import (
    RunCommand,
    add_options,
    names_recorder,
    parse_option,
    refuse_options_of_other_kinds,
    require_nsys,
)
from profkit.errors import CaptureError, UsageError
from profkit.launch.nsys import GraphTrace
from profkit.launch.passes import (
    OutOfMemory,
    Target,
    build_rank_argv,
    command_name,
    command_passes,
    model_passes,
    parse_target,
    target_kind,
)
from profkit.launch.record import Recorded, may_use_cuda, record_run, require_torch
from profkit.models import TrainingOptions
from profkit.names import BACKWARD, DECODE, context_range
from profkit.report.units import format_count
from profkit.run.directory import Run
from profkit.run.edits import can_be_tried
from profkit.run.job import FIRST_OF_JOB, JOB, RankChoice, is_of_job, starts_on_all_machines
from profkit.run.manifest import Workload
from profkit.run.recording import (
    BY_TREE,
    COMMAND_WARMUP,
    ENDED_TOO_SOON,
    Counted,
    MemoryOptions,
    Order,
    Recorder,
    Stacks,
    StepChoice,
    describe_step,
)

_WARMUP = 2

# torch.compile keeps this many variants of one piece of code; a further one would run uncompiled, without a word.
_COMPILED_CONTEXTS = 8

_ONE_MACHINE = (
    "one Nsight Systems records the processes of this machine alone, and those that {0} starts on others may fail with "
    '"Failed to connect to Agent": with other machines put {0} before profkit run'
)

_OF_PASSES = ("device", "rounds", "count")
"""What a pass over a built-in model is asked for besides its workload."""

_KILLED = 128 + signal.SIGKILL
_TOP_STACKS = 3
"""Of the memory in which an allocation failed."""


@click.command(
    cls=RunCommand,
    epilog="TARGET is a script with its arguments (train.py --lr 1e-3); or, after --, any command that starts Python "
    "(-- python -m pkg.train, -- torchrun --nproc-per-node 2 train.py); or a built-in model: model.tiny, small, "
    "medium, large, xl or 2.7B.",
)
@click.argument("target", nargs=-1, required=True)
@add_options
def run(
    target: tuple[str, ...],
    output: Path | None,
    with_nsys: bool,
    graph_trace: GraphTrace,
    keep_report: bool,
    redact: tuple[str, ...],
    **options: Any,
) -> int:
    """Run TARGET under a profiler and keep what it recorded in a run directory.

    A script or command needs no edit: profkit opens the ranges for phases and modules. It runs once: the first --warmup
    steps run unprofiled and are timed, the next --steps are recorded, and then it finishes. One with too few steps, or
    none, runs a second time unless it wrote a file. With --memory it runs twice: first to record the allocator.

    A built-in model runs in processes of its own: unprofiled, to be timed, and recorded.

    A step ends when the last of its optimizers has made a step. Without an optimizer it ends with a backward pass, else
    with a replay of a CUDA graph, else with a call of generate, of the model, or of a function decorated with annotate.

    The exit status is the command's, also where nothing was recorded: the last line then says why.
    """
    kind = target_kind(target)
    refuse_options_of_other_kinds(kind)
    nsys = require_nsys(graph_trace, keep_report) if with_nsys else None
    build = _command if kind == "command" else _model
    wanted = build(target, "nsys" if with_nsys else "kineto", **options)
    _say_how_often(wanted, "Nsight Systems" if with_nsys else "torch.profiler")
    recorded = record_run(
        wanted,
        nsys,
        output,
        command=["profkit", *sys.argv[1:]],
        progress=shown_after_a_second,
        say=say,
        secret_names=redact,
    )
    return _conclude(recorded, wanted)


_COUNTED: dict[bool | None, Counted] = {None: "plain", True: "any", False: "no"}
"""Whose work is counted, by what ``--flops`` says."""


def _command(
    words: tuple[str, ...],
    recorder: Recorder,
    *,
    warmup: int | None,
    steps: int,
    ranks: int,
    step_on: str | None,
    flops: bool | None,
    depth: int | None,
    full_ranks: str | None,
    memory_stacks: Stacks,
    memory_entries: int,
    **given: Any,
) -> Target:
    warmup = COMMAND_WARMUP if warmup is None else warmup
    if step_on is not None and parse_option("--step-on", StepChoice.parse, step_on).is_whole:
        warmup, steps = 0, 1
        if flops:
            raise UsageError("--flops counts the step after the recorded ones, and --step-on whole has none")
    if recorder == "nsys" and given["operators"]:
        raise UsageError("--operators: Nsight Systems records no CPU operators; leave --nsys out")
    if full_ranks is not None:
        parse_option("--ranks", RankChoice.parse, full_ranks)
        if recorder == "nsys":
            raise UsageError("--ranks: Nsight Systems records all ranks of a machine; leave --ranks or --nsys out")
    reach = BY_TREE if depth is None else depth
    order = Order("", recorder, warmup, steps, reach, step_on=step_on, flops=_COUNTED[flops], ranks=full_ranks)
    order = replace(order, **{name: given[name] for name in ("annotate", "stop", "operators", "lines")})
    words = tuple(build_rank_argv(words, ranks)) if ranks > 1 else words
    with_memory = given["memory_only"] or (given["memory"] and _finds_gpu(words))
    with_trace = not given["memory_only"] and (given["memory"] or not given["oom"] or names_recorder())
    watched = MemoryOptions(memory_stacks, memory_entries) if with_memory or given["oom"] else None
    passes = command_passes(words, order, watched, with_memory=with_memory, with_trace=with_trace)
    if recorder == "nsys" and starts_on_all_machines(words):
        say(_ONE_MACHINE.format(words[0]))
    return Target(command_name(words), "command", tuple(passes), _workload(order), argv=words)


def _finds_gpu(target: tuple[str, ...]) -> bool:
    """Return whether the target can use a GPU, as srun's and mpirun's may on another machine; if not, say so."""
    if may_use_cuda(os.environ) or starts_on_all_machines(target):
        return True
    say("no memory was recorded: no GPU was found here (--memory records the allocator of CUDA)")
    return False


def _model(
    words: tuple[str, ...],
    recorder: Recorder,
    *,
    warmup: int | None,
    steps: int,
    ranks: int,
    contexts: tuple[int, ...],
    memory: bool,
    memory_stacks: Stacks,
    memory_entries: int,
    **given: Any,
) -> Target:
    preset = parse_target(words[0])
    if len(contexts) > 1:
        _refuse_several_contexts(len(contexts), given["compile_mode"], ranks=ranks, memory=memory)
    if memory and given["device"] == "cpu":
        raise UsageError("--memory records the CUDA allocator, and --device cpu uses none; leave one of them out")
    training = TrainingOptions(
        preset,
        contexts=contexts,
        warmup_steps=_WARMUP if warmup is None else warmup,
        steps=steps,
        **{name: given[name] for name in ("batch", "passes", "dtype", "compile_mode", "seed", "device")},
    )
    workload = Workload(
        **{name: value for name, value in vars(training).items() if name not in ("contexts", *_OF_PASSES)},
        context=max(contexts),
        contexts=contexts if len(contexts) > 1 else (),
        ranks=ranks,
    )
    allocator = MemoryOptions(memory_stacks, memory_entries) if memory else None
    passes = model_passes(training, recorder, allocator, ranks=ranks)
    require_torch()
    return Target(words[0], "model", tuple(passes), workload, asdict(training.preset))


def _refuse_several_contexts(count: int, compile_mode: str, *, ranks: int, memory: bool) -> None:
    if ranks > 1:
        raise UsageError("--nproc-per-node takes one --context: each would be a separate model; run them one by one")
    if memory:
        raise UsageError("--memory takes one --context: a snapshot holds one; run them one by one")
    if compile_mode != "none" and count > _COMPILED_CONTEXTS:
        most = f"{_COMPILED_CONTEXTS} values of --context at most, as torch.compile does"
        raise UsageError(f"--compile takes {most}: there are {count}")


def _workload(order: Order) -> Workload:
    return Workload(
        steps=order.steps,
        warmup_steps=order.warmup_steps,
        annotate=order.annotate,
        depth=None if order.depth == BY_TREE else order.depth,
        flops=order.flops != "no",
        stop=order.stop,
        step_on=order.step_on,
    )


def _say_how_often(target: Target, profiler: str) -> None:
    if target.passes[0].order.recorder != "memory" or len(target.passes) == 1:
        return
    only = " (--memory-only: only the first)" if target.kind == "command" else ""
    passes = "first for the allocator, then for" if target.kind == "command" else "for the allocator, unprofiled, for"
    often = "the command runs twice" if target.kind == "command" else "the steps run three times"
    text = f"{often}, because recording the allocator slows steps: {passes} {profiler}{only}"
    say(text)


def _conclude(recorded: Recorded, target: Target) -> int:
    """A command's status is kept, whatever was recorded. Built-in models run for nothing but the recording: 1 if there
    is none.
    """
    where = quote_path(recorded.run)
    is_job = is_of_job(recorded.run) and (recorded.run.parent / JOB).exists()
    out_of_memory = recorded.outcome.out_of_memory
    if recorded.exit_status != 0:
        if out_of_memory is not None and out_of_memory.is_fatal:
            _explain_out_of_memory(recorded, out_of_memory, where)
        say(_describe_failure(recorded, target, where))
        return recorded.exit_status
    for warning in recorded.warnings:
        say(f"{recorded.run.name}: warning: {warning}" if is_job else f"warning: {warning}")
    if out_of_memory is not None:
        _explain_out_of_memory(recorded, out_of_memory, where)
    if recorded.reason is not None:
        say(recorded.reason)
    # srun and mpirun bring what all say into one place: of a job's runs only the first tells what to read next.
    if not is_job or recorded.run.name in FIRST_OF_JOB:
        has_tries = _show(recorded) and target.kind == "command"
        _say_next(recorded, target, where, is_job=is_job, has_tries=has_tries)
    return 1 if recorded.reason is not None and target.kind != "command" else 0


def _describe_failure(recorded: Recorded, target: Target, where: str) -> str:
    name = target.argv[0] if target.argv else target.name
    killed = " (killed: perhaps the memory was full)" if recorded.exit_status == _KILLED else ""
    ranks = f" ({recorded.outcome.failed_ranks})" if recorded.outcome.failed_ranks else ""
    failed = f"{name} failed with exit status {recorded.exit_status}{killed}{ranks}"
    if recorded.has_trace:
        count, wanted = len(recorded.process.profiled), target.workload.steps
        is_counting = count == wanted and recorded.process.uncounted == ENDED_TOO_SOON
        hint = "; --no-flops leaves out the step that it failed in, whose work profkit counts" if is_counting else ""
        return f"{failed}; {count} of {wanted} steps were recorded and are kept: profkit ranges {where}{hint}"
    if recorded.has_snapshot:
        return f"{failed}; what was recorded up to then is kept: profkit memory {where}"
    return f"{failed}; nothing was recorded; see {where}/manifest.json"


def _explain_out_of_memory(recorded: Recorded, failed: OutOfMemory, where: str) -> None:
    if failed.is_fatal and failed.rank is not None:
        from profkit.analysis.memory.failures import last_failure
        from profkit.analysis.memory.opened_snapshot import FAILURE
        from profkit.reading import open_snapshot
        from profkit.report.commands.memory import build_memory_document
        from profkit.report.document import render

        try:
            opened = open_snapshot(recorded.run, rank=failed.rank)
            devices = [memory.device.index for memory in opened.devices.values() if last_failure(memory) is not None]
            result = opened.memory(at=FAILURE, device=devices[-1] if devices else None)
            print_line(render(build_memory_document(result, top=_TOP_STACKS), "table"))
        except (CaptureError, UsageError) as error:
            say(str(error))
    elif recorded.has_snapshot:
        failures = format_count(failed.count, "allocation")
        ranks = len(Run(recorded.run).snapshots)
        rank = f" --rank {failed.rank}" if failed.rank is not None and ranks > 1 else ""
        say(f"{failures} failed and the target went on; profkit memory {where}{rank} says why the last failed")


def _show(recorded: Recorded) -> bool:
    if not (recorded.has_trace or recorded.has_snapshot):
        return False
    from profkit.analysis.causes.advice import find_advice
    from profkit.analysis.summarize import summarize_capture
    from profkit.reading import open_capture
    from profkit.report.commands.summary import build_summary_document
    from profkit.report.document import render

    opened = open_capture(recorded.run)
    summary = summarize_capture(opened)
    advice = find_advice(opened, summary)
    print_line(render(build_summary_document(summary, advice, for_run=True), "table"))
    return any(can_be_tried(proposal.edit) for proposal in advice.tries)


def _say_next(recorded: Recorded, target: Target, where: str, *, is_job: bool, has_tries: bool) -> None:
    has_ranks = is_job or len(Run(recorded.run).light_records) > 1
    if not (recorded.has_trace or recorded.has_snapshot or has_ranks):
        return
    reports = [path for path in Run(recorded.run).traces if path.suffix == ".nsys-rep"]
    if reports:
        report, others = reports[0], " (and the other ranks')" if len(reports) > 1 else ""
        print_line(
            f"\n{report.name}{others} holds the environment, secrets included, and cannot be scrubbed: share a "
            f"`profkit scrub` of\n{report.with_suffix('.sqlite').name}; --no-keep-report deletes the report"
        )
    process = recorded.process
    step, left_out = process.step, process.left_out
    if recorded.has_trace and step is not None:
        print_line(
            f"\nA step is {describe_step(step, process.step_names, process.step_times)} (--step-on chooses another)."
        )
    if recorded.has_trace and left_out is not None:
        count, depth = f"{left_out.modules:,}", left_out.depth
        print_line(f"\n{count} modules have no range, to keep recording cheap: --depth {depth} gives them one.")
    print_line(f"\nThe run is {where}. Next:")
    if has_ranks:
        print_line(f"  profkit ranks {quote_path(recorded.run.parent) if is_job else where}")
    if has_tries:
        print_line(f"  profkit try {where}")
    if recorded.has_trace or recorded.has_snapshot:
        print_line(f"  profkit report {where}")
    if recorded.has_kernels:
        print_line(f"  profkit kernels {where} --range {_example_range(target, step)}")
    if recorded.has_trace:
        print_line(f"  profkit ranges {where}")
    if recorded.has_snapshot:
        print_line(f"  profkit memory {where} --timeline memory.html")


def _example_range(target: Target, step: str | None) -> str:
    if step in ("replay", "call", "whole"):  # it need not have phases
        return "'step *'"
    if step in ("backward", "generate"):
        return BACKWARD if step == "backward" else DECODE
    contexts = target.workload.contexts
    return f"'{context_range(max(contexts))}/step */forward'" if contexts else "forward"
