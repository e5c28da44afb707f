"""`record`: the recorder of ``profkit run`` in the program's own process, around a loop or in a notebook's cell."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar, cast

from profkit.asking import Capture
from profkit.errors import RunError, UsageError
from profkit.launch.gpu_state import Gpu, read_gpus, warn_of_gpus
from profkit.launch.manifest import begin_manifest, utc_now, warn_of_run, with_outcome
from profkit.launch.passes import Outcome, Pass, Target
from profkit.launch.record import require_torch
from profkit.report.units import format_count
from profkit.run.directory import DEFAULT_PARENT, LINES, MANIFEST, Run, make_run_directory, name_of_rank, name_run
from profkit.run.manifest import Process, Workload, write_manifest
from profkit.run.recording import COMMAND_WARMUP, COMPLETE, CUT_SHORT, MemoryOptions, Order, StepChoice, take_processes

if TYPE_CHECKING:
    from profkit.capture.within import Stages
    from profkit.run.job import Job

_MEMORY_WARMUP = 2
"""In so many steps what ends a step shows anew, and what was compiled before is compiled again."""

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Returned_co = TypeVar("Returned_co", covariant=True)


class RecordedFunction(Protocol[Given, Returned_co]):
    """A function whose calls are recorded; ``run`` is the recording of the last one, None before the first."""

    run: Recording | None

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Returned_co:
        """Call the function, and record it."""


def record(
    steps: int = 5,
    *,
    memory: bool = False,
    path: str | Path | None = None,
    warmup: int = COMMAND_WARMUP,
    lines: bool = True,
    step_on: str | None = None,
) -> Recording:
    """Return what records training steps of this process: ``with profkit.record() as run:`` around a loop.

    Or ``@profkit.record()`` before a function, whose ``run`` is then the recording of its last call. The program is
    not changed and goes on after the recorded steps; when the block is left, nothing of profkit's is in the process any
    more. What ends a step is what ends one for ``profkit run`` (`profkit help scripts`). The first ``warmup`` steps run
    unprofiled, and ten or eleven of them are timed; then ``steps`` are recorded by torch.profiler; in the next one
    FLOPs are counted, and in those after it (at least 3 and a second) the lines of source are looked for; with
    ``memory``, as many more as ``steps``, after two,
    have the allocator recorded. A block with fewer steps yields what it has, and says so on standard error.

    Each of several ranks has a run of its own, ``rank0``, ``rank1``, … in one directory; none waits for another.

    Args:
        steps: how many steps are recorded.
        memory: also record the allocator, which slows Python, in further steps.
        path: the run directory to make; by default one in ``runs``. Ranks that have not joined need it to share one.
        warmup: how many steps pass before the recorded ones.
        lines: look for the lines of source behind the steps' time.
        step_on: what ends a step, as ``profkit run --step-on`` takes it: ``whole``, the block is one step;
            ``call:NAME``, ``optimizer:NAME``, ``backward``, ``replay``, ``generate``; ``optimizer*4``, four are one.

    Raises:
        UsageError: an argument is off.
    """
    if callable(steps):
        raise UsageError("write @profkit.record(), with parentheses")
    if steps < 1 or warmup < 0:
        raise UsageError("steps must be 1 or more, and warmup 0 or more")
    is_whole = step_on is not None and _parse_choice(step_on).is_whole
    if is_whole and memory:
        raise UsageError("memory=True records further steps, and with step_on='whole' there is only one")
    order = Order("", "kineto", 0 if is_whole else warmup, 1 if is_whole else steps, step_on=step_on, within=True)
    orders = [replace(order, lines=lines and not is_whole, flops="plain")]
    if memory:
        orders.append(replace(order, recorder="memory", warmup_steps=_MEMORY_WARMUP, memory=MemoryOptions()))
    return Recording(orders, path)


def _parse_choice(step_on: str) -> StepChoice:
    try:
        return StepChoice.parse(step_on)
    except ValueError as error:
        raise UsageError(f"step_on={step_on!r}: {error}") from None


class Recording(Capture):
    """A block of the program that is recorded once, and afterwards the run, for `Capture`'s questions.

    `record` makes it. As a context manager:

    Raises:
        UsageError: it was entered before, or something else already records in this process.
        RunError: the run directory cannot be made.
        ToolError: torch is not installed.
    """

    def __init__(self, orders: Sequence[Order], path: str | Path | None) -> None:
        super().__init__(DEFAULT_PARENT if path is None else path)
        self._orders = orders
        self._wanted = None if path is None else Path(path)
        self._stages: Stages | None = None
        self._why_not: str | None = "nothing has been recorded yet: enter the block first"

    @property
    def source(self) -> Path:
        if self._why_not is not None:
            raise RunError(self._why_not)
        return self.path

    def __call__(self, function: Callable[Given, Returned]) -> RecordedFunction[Given, Returned]:
        """Return ``function``, each call of which is recorded in a run of its own.

        Raises:
            UsageError: it is a generator or a coroutine, whose body runs after the call.
        """
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise UsageError(f"{function.__name__} runs after it has returned: put `with profkit.record()` into it")

        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
            recorded.run = Recording(self._orders, self._wanted)
            with recorded.run:
                return function(*args, **kwargs)

        recorded = cast("RecordedFunction[Given, Returned]", call)
        recorded.run = None
        return recorded

    def __enter__(self) -> Recording:
        if self._stages is not None:
            raise UsageError("a recording is made once: call profkit.record() for another one")
        require_torch()
        from profkit.capture.within import Stages, agree_on, find_job, why_not

        reason = why_not()
        if reason is not None:
            raise UsageError(reason)
        name, self._pid = _program_name(), os.getpid()
        job = find_job()
        agreed = None if job is None or self._wanted is not None else agree_on(str(name_run(Path(name).stem)))
        self.path = _make_directory(self._wanted if agreed is None else Path(agreed), name, job)
        orders = [replace(order, run=str(self.path.resolve())) for order in self._orders]
        self._why_not = "the recording has not ended: leave its block first"
        try:
            self._keeper = _Keeper(self.path, name, orders, job)
            self._stages = Stages(orders, self._keeper.stage_ended)
            self._stages.begin()
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror}; free some space, or name another directory") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from profkit.capture import describe_error, say

        assert self._stages is not None
        if os.getpid() != self._pid:  # a fork leaves the block too, and the recording is not its own
            return
        try:
            self._stages.end()
            nothing, lacking = self._keeper.conclude(error, self._stages.no_memory)
        except (OSError, RunError) as failure:  # a full disk, say: the program must not end with it
            nothing = f"the recording could not be saved: {describe_error(failure)}"
            lacking = [nothing]
        for line in lacking:
            say(line)
        self._why_not = None if nothing is None else f"{self.path}: {nothing}"


class _Keeper:
    """Keeps the manifest of a run whose passes are stages of one process, as the launcher does of a command's."""

    def __init__(self, run: Path, name: str, orders: Sequence[Order], job: Job | None) -> None:
        self._run = run
        self._orders = orders
        self._ended: list[tuple[Order, Process]] = []
        self._gpus = _read_gpus()
        first = orders[0]
        workload = Workload(steps=first.steps, warmup_steps=first.warmup_steps, step_on=first.step_on)
        passes = tuple(Pass((), order) for order in orders[::-1])
        target = Target(name, "block", passes, workload)
        self._manifest = replace(begin_manifest(target, None, ["profkit.record"], ()), job=job)
        write_manifest(run / MANIFEST, self._manifest, is_first=True)

    def stage_ended(self, order: Order) -> None:
        processes = take_processes(self._run)
        self._ended += [(order, process) for process in processes]
        outcome = Outcome(order, 0, processes, (), None)
        self._manifest = replace(with_outcome(self._manifest, outcome), exit_status=None)

    def conclude(self, error: BaseException | None, no_memory: str | None) -> tuple[str | None, list[str]]:
        """Write down how the recording ended; return why there is nothing, None if there is, and what it lacks.

        Args:
            error: what ended the block.
            no_memory: why the allocator could not be recorded.
        """
        process = self._ended[0][1] if self._ended else Process()
        nothing = self._why_nothing(process)
        lacking = [nothing] if nothing is not None else list(self._shortfalls(process, no_memory))
        processes = [process for _, process in self._ended]
        doubts = [*warn_of_gpus(self._gpus, _read_gpus(), processes), *warn_of_run(self._manifest)]
        reason = nothing if error is None else _describe(error)
        manifest = replace(
            self._manifest,
            status="complete" if reason is None else "failed",
            reason=reason,
            finished_utc=utc_now(),
            warnings=(*(lacking if nothing is None else ()), *doubts),
        )
        write_manifest(self._run / MANIFEST, manifest)
        return (None if process.attached else nothing), lacking

    def _why_nothing(self, process: Process) -> str | None:
        if Run(self._run).traces:
            return None
        steps, seen = process.steps_seen or 0, ", ".join(process.seen)
        if process.failure is not None:
            return f"nothing was recorded: {process.failure}"
        if steps <= 0 and seen:
            return f"nothing was recorded: no step ended in the block, which made {seen}; step_on= says which ends one"
        if steps <= 0:
            return "nothing was recorded: the block ran no model, no backward pass and no optimizer"
        timed = f"; {len(process.attached)} were timed" if process.attached else ""
        return (
            f"nothing was recorded: the block ended after {format_count(steps, 'step')}{timed}, and the recording "
            f"begins after {self._orders[0].warmup_steps}: make more steps, or lower warmup="
        )

    def _shortfalls(self, process: Process, no_memory: str | None) -> Iterator[str]:
        order, memory = self._orders[0], self._ended[1:]
        if process.failure is not None:
            yield f"the recording is not whole: {process.failure}"
        elif process.state == CUT_SHORT:
            yield f"the block ended while it was recorded: {len(process.profiled)} of {order.steps} steps are complete"
        elif order.lines and not (self._run / name_of_rank(LINES, process.rank or 0)).exists():
            yield "no lines of source are known: they are looked for in the steps after the recorded ones"
        if len(self._orders) == 1:
            return
        if not memory:
            yield f"no memory was recorded: {no_memory}"
        for _, remembered in memory:
            if remembered.state != COMPLETE:
                yield "the block ended while the allocator was recorded"


def _make_directory(wanted: Path | None, name: str, job: Job | None) -> Path:
    try:
        return make_run_directory(wanted, Path(name).stem, job)
    except RunError as error:
        raise RunError(str(error).replace(" with -o", " with path=")) from None


def _program_name() -> str:
    if "ipykernel" in sys.modules:
        return "notebook"
    return Path(sys.argv[0]).name or "python" if sys.argv else "python"


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _read_gpus() -> list[Gpu]:
    """Return the GPUs now, without who uses them: NVML does not tell this process from others everywhere."""
    return [replace(gpu, process_count=None, process_bytes=None) for gpu in read_gpus()]
