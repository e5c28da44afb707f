"""What is run, in which passes, how each pass ended, and which is made anew.

A target is a built-in model (``model.NAME``) or a command. A pass is one execution of it from start to end. A command
is run again that has fewer steps than warm-up steps, nothing that makes a step, or steps that turned into others while
they were recorded; but not unasked one that changed files in its folders while it ran.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
import shutil
import signal
import stat
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profkit.errors import UsageError
from profkit.models import PRESETS, TrainingOptions
from profkit.run import Plain
from profkit.run.directory import Run
from profkit.run.manifest import Kind, Process, Workload
from profkit.run.recording import (
    CUT_SHORT,
    NOT_REACHED,
    Attached,
    Failure,
    MemoryOptions,
    Order,
    Recorder,
    StepChoice,
    StepKind,
    describe_step,
)

PREFIX = "model."


def parse_target(text: str) -> str:
    """Return the preset that ``model.NAME`` names; UsageError names the nearest if there is none."""
    name = text.removeprefix(PREFIX)
    if text.startswith(PREFIX) and name in PRESETS:
        return name
    known = ", ".join(PREFIX + preset for preset in PRESETS)
    if not text.startswith(PREFIX) and name not in PRESETS:
        what = "this file cannot be executed" if Path(text).is_file() else "no such command"
        raise UsageError(f"{text}: {what}; built-in models are {known}; your own script: profkit run train.py")
    by_folded_name = {preset.casefold(): preset for preset in PRESETS}
    nearest = difflib.get_close_matches(name.casefold(), by_folded_name, n=1)
    hint = f"did you mean {PREFIX}{by_folded_name[nearest[0]]}?" if nearest else f"there are {known}"
    raise UsageError(f"{text}: no such model; {hint}")


def target_kind(words: Sequence[str]) -> Kind:
    """Return the kind of a target; a single word that is no program is taken as a model.

    Raises:
        UsageError: a script without the Python that runs it, or further words after a built-in model.
    """
    first, *more = words
    if first.endswith(".py") and shutil.which(first) is None:
        raise UsageError(f"put python before it, or leave out --: profkit run -- python {' '.join(words)}")
    kind: Kind = "command" if more or (first not in PRESETS and shutil.which(first) is not None) else "model"
    if first.startswith(PREFIX):
        kind = "model"
    if more and kind != "command":
        raise UsageError(f"{' '.join(more)}: a built-in model takes options only")
    return kind


def command_name(words: Sequence[str]) -> str:
    """Return a short name for a command's runs: that of its script or module, else of its program."""
    name = Path(words[0]).name
    for before, word in itertools.pairwise(words):
        if word.endswith(".py") or before == "-m":
            name = Path(word).name.removesuffix(".py")
            break
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "command"


_OWN_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_WITH_VALUE = ("-X", "-W")

_HOW = "give it to {0} itself: profkit run -- {0} … , and leave --nproc-per-node out"


def build_rank_argv(words: Sequence[str], count: int) -> list[str]:
    """Return the command that starts ``python train.py …`` or ``python -m pkg …`` as ``count`` ranks of one machine.

    torch's own launcher does it, in the Python that the command names.

    Raises:
        UsageError: the command starts its ranks itself, or is none that starts a Python script or module.
    """
    program, *rest = words
    name = Path(program).name
    if name in _OWN_LAUNCHERS:
        raise UsageError(f"--nproc-per-node {count}: {name} starts its processes itself; {_HOW.format(name)}")
    at = 0
    while at < len(rest) and rest[at].startswith("-") and rest[at] not in ("-m", "-c", "-"):
        at += 2 if rest[at] in _WITH_VALUE else 1
    flags, target = rest[:at], rest[at:]
    if not name.startswith("python") or not target or target[0] in ("-c", "-"):
        raise UsageError(
            f"--nproc-per-node {count}: only starts Python scripts and modules: profkit run --nproc-per-node {count} "
            "-- python train.py, or -- python -m package.module"
        )
    if target[0] == "-m" and target[1:2] and target[1] in _LAUNCHER_MODULES:
        raise UsageError(f"--nproc-per-node {count}: {target[1]} starts its processes itself; {_HOW.format(target[1])}")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [program, *flags, *launcher, *target]


# A median of three says little, and its spread nothing: this many clean steps of a built-in model, if they are quick.
_ENOUGH_STEPS = 10
_MOST_RANKS_NAMED = 4


@dataclass(frozen=True)
class Pass:
    """One execution of the target: its command line, and what profkit does in its processes."""

    argv: tuple[str, ...]
    order: Order


@dataclass(frozen=True)
class Target:
    """What is run: its name for directories, its kind, and its passes in their order; ``argv`` is the user's."""

    name: str
    kind: Kind
    passes: tuple[Pass, ...]
    workload: Workload
    preset: dict[str, Plain] | None = None
    argv: tuple[str, ...] = ()

    @property
    def reads_input(self) -> bool:
        return self.kind == "command"


@dataclass(frozen=True)
class OutOfMemory:
    """How many allocations failed, the first rank whose snapshot shows one, and whether the target ended with it."""

    count: int
    rank: int | None
    is_fatal: bool


@dataclass(frozen=True)
class Outcome:
    """How a pass ended: the target's exit status, what its processes left, and why nothing was recorded, if so."""

    order: Order
    exit_status: int
    processes: tuple[Process, ...]
    failures: tuple[Failure, ...]
    reason: str | None

    @property
    def may_go_on(self) -> bool:
        """Whether another pass makes sense: the target succeeded and made enough steps."""
        return self.exit_status == 0 and why_no_step(self.processes, self.order) is None

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """Return what is known of allocations that failed in this pass; None if none did, or nobody watched."""
        failed = [(process, process.memory) for process in self.processes if process.memory is not None]
        count = sum(memory.failed_allocations for _, memory in failed)
        if not count:
            return None
        # A script that prints its error and leaves with a status of its own has left no exception.
        is_fatal = self.exit_status != 0 and (
            not self.failures or any(failure.out_of_memory for failure in self.failures)
        )
        ranks = [process.rank or 0 for process, memory in failed if memory.is_of_failure]
        return OutOfMemory(count, ranks[0] if ranks else None, is_fatal=is_fatal)

    @property
    def failed_ranks(self) -> str:
        """Return what ended the first rank that failed, and which failed after it, often because it was gone.

        It is empty if none failed or there are no ranks.
        """
        ranks = [failure for failure in self.failures if failure.rank is not None and self.exit_status != 0]
        if not ranks:
            return ""
        first, *others = ranks
        then = ", ".join(f"rank {failure.rank}" for failure in others[:_MOST_RANKS_NAMED])
        more = f" and {len(others) - _MOST_RANKS_NAMED:,} more" if len(others) > _MOST_RANKS_NAMED else ""
        return f"rank {first.rank}: {first.error}" + (f"; then also {then}{more}" if others else "")


def command_passes(
    words: Sequence[str], order: Order, allocator: MemoryOptions | None, *, with_memory: bool, with_trace: bool
) -> list[Pass]:
    """Return the passes over somebody's own command: one for the allocator if it is wanted, one for the trace.

    Without the former, options for the allocator have the trace's pass watched for allocations that fail; without
    either there is one pass that does nothing else.
    """
    watched = replace(order, memory=allocator)
    orders = []
    if with_memory:
        orders.append(replace(watched, recorder="memory", flops="no", lines=False))
    if with_trace:
        orders.append(order if with_memory else watched)
    return [
        Pass(tuple(words), order) for order in orders or [replace(watched, recorder="oom", flops="no", lines=False)]
    ]


def model_passes(
    options: TrainingOptions, recorder: Recorder, memory: MemoryOptions | None, *, ranks: int = 1
) -> list[Pass]:
    """Return the passes over a built-in model: the allocator if it is wanted, then unprofiled, then with the profiler.

    The allocator goes first, so that a model that does not fit leaves its snapshot. The unprofiled pass has ten steps
    of each context where they are quick, and counts the model's work in one more. Of compiled code the recorded pass
    goes before the unprofiled one: code that this one left in Inductor's cache would say nothing of its modules.
    """
    contexts = len(options.contexts)
    order = Order("", recorder, options.warmup_steps, options.steps * contexts, depth=None, own_steps=True)
    rounds = -(-_ENOUGH_STEPS // options.steps)
    clean = (replace(options, rounds=rounds, count=True), replace(order, recorder="none", steps=None, flops="any"))
    wanted = [(options, replace(order, recorder="memory", memory=memory))] if memory is not None else []
    recorded = (options, order)
    passes = []
    for trained, how in (*wanted, *((clean, recorded) if options.compile_mode == "none" else (recorded, clean))):
        # -P: a file in the working directory must not take the place of a module of the same name.
        words = [sys.executable, "-P", "-m", "profkit.models", *trained.to_argv()]
        passes.append(Pass(tuple(build_rank_argv(words, ranks) if ranks > 1 else words), how))
    return passes


def why_nothing(run: Path, processes: Sequence[Process], order: Order) -> str | None:
    if are_left_out(processes):
        return None
    if order.recorder == "memory":
        return None if Run(run).snapshots else _why_no_snapshot(processes)
    if order.recorder == "oom":
        is_watched = any(process.memory is not None and process.memory.failure is None for process in processes)
        return None if is_watched or Run(run).snapshots else _why_no_snapshot(processes)
    why = why_no_step(processes, order)
    if why is not None or order.recorder == "none":
        return why
    if Run(run).traces:
        return None
    return f"nothing was recorded: {processes[0].failure or 'the recorder left no trace'}"


def are_left_out(processes: Sequence[Process]) -> bool:
    return bool(processes) and not any(process.is_recorded for process in processes)


def why_no_process(run: Path, attached: Attached, exit_status: int) -> str | None:
    """Return why no process left word of its steps in ``run``, None if all of them ended as Python ends."""
    if not attached.count:
        if attached.refused is not None:
            return f"nothing was recorded {attached.refused}"
        return (
            "nothing was recorded: profkit got into no Python process that imports torch; python -I, -E and -S and a "
            "cleared environment (env -i) keep it out"
        )
    if attached.unsaved is not None:
        cure = "free some space, or name another directory with -o"
        return f"nothing was recorded: {run} could not be written to ({attached.unsaved}); {cure}"
    if not attached.unended:
        return None
    signal_number = exit_status - 128
    if 0 < signal_number < signal.NSIG:
        how = f"was ended by {signal.Signals(signal_number).name}"
    else:
        how = "ended without Python's own end (os._exit, or a crash)"
    return f"nothing was recorded: a process {how} before it could save its recording"


def why_no_step(processes: Sequence[Process], order: Order) -> str | None:
    """Return why the requested steps were not reached, None if they were."""
    steps_seen = (processes[0].steps_seen if processes else None) or 0
    if processes and steps_seen < 0 and order.step_on != "whole":
        return (
            "nothing was recorded: the script showed nothing that makes a step (an optimizer, a backward pass, a CUDA "
            "graph, a call of a module); --step-on whole records all of it"
        )
    if not processes or steps_seen < 0:
        return (
            "nothing was recorded: no process with torch and profkit made a training step (an optimizer's step or a "
            "call of a module), or its recording could not be saved"
        )
    if processes[0].state != NOT_REACHED:
        return None
    if processes[0].failure is not None:
        return f"nothing was recorded: {processes[0].failure}"
    if order.step_on is not None and processes[0].step is None:
        return f"nothing was recorded: {_why_not_chosen(order.step_on, processes[0])}"
    return (
        f"nothing was recorded: the script made {steps_seen} steps, and recording begins after "
        f"{order.warmup_steps}; lower --warmup"
    )


def _why_not_chosen(step_on: str, process: Process) -> str:
    choice = StepChoice.parse(step_on)
    name = "" if choice.name is None else f" of class {choice.name}"
    missed = f"no optimizer{name} made a step" if choice.word == "optimizer" else f"there was no {step_on}"
    seen = ", ".join(sorted(process.seen)) or "nothing that makes a step"
    return f"{missed}; --step-on takes what was there: {seen}"


def shortfalls(outcome: Outcome, *, is_last: bool) -> list[str]:
    if outcome.order.recorder in ("memory", "oom"):
        return ([] if is_last or outcome.reason is None else [outcome.reason]) + _memory_shortfalls(outcome)
    if not outcome.processes:
        return []
    if are_left_out(outcome.processes):
        return ["--ranks names no rank that ran here: this run has their light records alone"]
    first = outcome.processes[0]
    lacking = _memory_shortfalls(outcome)
    others = sum(process.rank is None and not process.is_recorded for process in outcome.processes)
    if others:
        made = "1 more process made steps and was" if others == 1 else f"{others} more processes made steps and were"
        lacking.append(f"{made} not recorded: of processes that are no ranks, profkit records one")
    failed = [process for process in outcome.processes if process.failure and (process is first or process.is_recorded)]
    if failed and outcome.reason is None:
        ranks = [f"rank {process.rank}: " if process.rank is not None else "" for process in failed]
        lacking += [
            f"{rank}the recording is not whole: {process.failure}" for rank, process in zip(ranks, failed, strict=True)
        ]
    elif first.state == CUT_SHORT:
        wanted = f"{len(first.profiled)} of the {outcome.order.steps} steps requested are complete"
        lacking.append(f"the script ended while it was recorded: {wanted}")
    return lacking


def _why_no_snapshot(processes: Sequence[Process]) -> str:
    failures = [
        process.memory.failure for process in processes if process.memory is not None and process.memory.failure
    ]
    if failures:
        return f"no memory was recorded: {failures[0]}"
    return "no memory was recorded: no process of the target used a CUDA GPU (with torch and profkit installed)"


def _memory_shortfalls(outcome: Outcome) -> list[str]:
    if outcome.reason is not None:
        return []
    remembered = [(process.process, process.memory) for process in outcome.processes if process.memory is not None]
    lacking = [
        f"the memory of {name} was recorded only in part: {part.failure}" for name, part in remembered if part.failure
    ]
    if any(part.script_records for _, part in remembered):
        lacking.append(
            "the script switches the allocator's recording on or off itself, so the snapshot may lack events"
        )
    return lacking


_COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_SHORT_WARMUP = 2
"""Of a short script's steps: the first builds what the others have, the second is timed without a profiler."""
_LEFT_FOR_LINES = 3
"""How many steps after the recorded and the counted ones the lines of source need, where the program makes enough."""
_WHOLE = "whole"
_WORTH_ANOTHER = ("optimizer", "replay")
_MOST_ENTRIES = 50_000
"""This many are looked at in a fraction of a second on a local disk."""


@dataclass(frozen=True)
class AnotherTry:
    """How to run the command again: what the first run showed, what the second does, and by which options."""

    order: Order
    shown: str
    then: str
    options: str

    @property
    def why(self) -> str:
        return f"{self.shown}; it runs again {self.then}"

    def why_not(self, against: str) -> str:
        """Return why it does not, and what to do about it; ``against`` is what speaks against it, in a clause."""
        return f"{self.shown}; it was not run again by itself, because {against}: run it with {self.options}"

    @property
    def why_failed(self) -> str:
        return f"its first run ended well and its second failed: run it with {self.options}, and it runs once"

    @property
    def changed(self) -> dict[str, Any]:
        """What it changes of an order, and of the workload in the manifest."""
        return {name: getattr(self.order, name) for name in ("warmup_steps", "steps", "step_on")}


def find_another_try(outcome: Outcome) -> AnotherTry | None:
    """Return how to run a command again so that more is recorded; None if nothing more can be had by that."""
    order, processes = outcome.order, outcome.processes
    if outcome.exit_status != 0 or order.recorder == "oom" or not processes or processes[0].failure is not None:
        return None
    return _count_alike(order, processes) or _better_order(order, processes[0])


def _count_alike(order: Order, processes: Sequence[Process]) -> AnotherTry | None:
    """Return how all ranks count the same steps; None if they did. One of them alone may have had rollouts."""
    step = processes[0].step
    ranks = [process for process in processes if process.rank is not None and process.step is not None]
    if step is None or len({rank.step_times for rank in ranks}) <= 1:
        return None
    return AnotherTry(
        replace(order, step_on=step),
        "its ranks disagree on how many steps make an iteration",
        f"and counts each: {describe_step(step)}",
        f"--step-on {step}",
    )


def _better_order(order: Order, first: Process) -> AnotherTry | None:
    if order.own_steps or order.step_on == _WHOLE:
        return None
    if first.step_changed_to in _WORTH_ANOTHER:
        return AnotherTry(
            replace(order, step_on=first.step_changed_to),
            "steps of another kind came after the recording had begun",
            f"and records them: {describe_step(first.step_changed_to)}",
            f"--step-on {first.step_changed_to}",
        )
    if first.profiled or first.state not in (NOT_REACHED, CUT_SHORT):
        return None
    step, made = _steps_made(first)
    if made and (order.step_on is None or first.step is not None):
        return _shortened(order, made, first.iteration or step)
    if order.step_on is not None:
        return None
    return AnotherTry(
        replace(order, warmup_steps=0, steps=1, step_on=_WHOLE),
        "it showed nothing that makes a step",
        "and is recorded as a whole, from its first use of the GPU",
        f"--step-on {_WHOLE}",
    )


def _steps_made(process: Process) -> tuple[str | None, int]:
    if process.step is not None:
        return None, process.steps_seen or 0
    strength = {seen: max(k for k in StepKind if k.word == StepChoice.parse(seen).word) for seen in process.seen}
    strongest = max(strength, key=lambda seen: strength[seen], default=None)
    return strongest, 0 if strongest is None else process.seen[strongest]


def _shortened(order: Order, made: int, step: str | None) -> AnotherTry:
    """Return how to record some of the ``made`` steps, each of which is a ``step``; None if these are found again."""
    fits = 0 if order.steps is None else made - order.steps - (order.flops != "no") - _LEFT_FOR_LINES
    warmup = min(order.warmup_steps, max(fits, _SHORT_WARMUP), made - 1)
    steps = made - warmup if order.steps is None else min(order.steps, made - warmup)
    options = f"--warmup {warmup} --steps {steps}"
    if order.step_on is None and step is not None:
        options += f" --step-on {shlex.quote(step)}"
    few = "1 step" if made == 1 else f"{made} steps"
    return AnotherTry(
        replace(order, warmup_steps=warmup, steps=steps, step_on=order.step_on or step),
        f"it made {few}, too few for --warmup {order.warmup_steps}",
        f"with {options}",
        options,
    )


def why_not_twice(words: Sequence[str], since: Path, run: Path) -> str | None:
    """Return in a clause what speaks against running a command a second time; None if it changed nothing that is seen.

    A command that adds to a file, resumes from its own checkpoint or refuses an output that is there does other things
    the second time. So each file counts that was written after the file ``since`` in the working directory or a folder
    that the command names, with all below it. Not counted are ``run``, hidden folders, caches (also of compiled
    code) and the files that our own standard streams are. What is written elsewhere, or sent over a network, is not
    seen.
    """
    try:
        began_ns = since.stat().st_mtime_ns
        passed_over = {_identity(run.stat()), *_streams(), *_compiler_caches()}
    except OSError:
        return "it took its run's directory away"
    waiting, count = deque(map(str, _folders(words))), 0
    while waiting:
        entries = _entries_of(waiting.popleft(), passed_over)
        count += len(entries)
        if count > _MOST_ENTRIES:
            return f"its folders hold too many files to see whether it wrote one (over {_MOST_ENTRIES:,})"
        for path, status in entries:
            if stat.S_ISREG(status.st_mode) and status.st_mtime_ns > began_ns:
                return f"it wrote {os.path.relpath(path)}"
            name = os.path.basename(path)
            if stat.S_ISDIR(status.st_mode) and not name.startswith(_HIDDEN) and name not in _CACHES:
                waiting.append(path)
    return None


def _folders(words: Sequence[str]) -> list[Path]:
    folders = {Path.cwd()}
    for word in words[1:]:
        path = Path(word.rpartition("=")[2]).absolute()
        with suppress(OSError):  # a word that can be no path
            folders.update(folder for folder in (path, path.parent) if folder.is_dir() and folder != Path("/"))
    outer: list[Path] = []
    for folder in sorted(folders):
        if not any(folder.is_relative_to(around) for around in outer):
            outer.append(folder)
    return outer


def _entries_of(folder: str, passed_over: set[tuple[int, int]]) -> list[tuple[str, os.stat_result]]:
    entries = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):  # it is gone by now
                status = entry.stat(follow_symlinks=False)
                if _identity(status) not in passed_over:
                    entries.append((entry.path, status))
    return entries


_CACHES = frozenset({"__pycache__", "site-packages"})
_HIDDEN = (".", "torchinductor_")
"""How the names of folders begin that are passed over: hidden ones, and Inductor's cache where nobody chose a place."""


def _compiler_caches() -> Iterator[tuple[int, int]]:
    for variable in _COMPILER_CACHES:
        with suppress(KeyError, OSError):
            yield _identity(os.stat(os.environ[variable]))


def _streams() -> Iterator[tuple[int, int]]:
    for number in range(3):
        with suppress(OSError):  # it is closed
            yield _identity(os.fstat(number))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
