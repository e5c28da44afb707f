"""profkit inside a script's process: counts its steps, and records those that were asked for.

Up to the first recorded step the hooks only count: the steps before it, but for the very first, are timed as the run's
unprofiled ones, ``attached, not recording``. If its work is to be counted, that is done in the last one before the
recording, which is not timed then. The device is waited for at the end of each timed step and before and after the
recording.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from profkit.annotation import annotate
from profkit.capture.conditions import read_conditions
from profkit.capture.failures import note_failure
from profkit.capture.hooks import Hooks
from profkit.capture.kineto import recorded_by_kineto
from profkit.capture.local_ranks import describe_rank, recorded_together_by_nsys
from profkit.capture.script_memory import ScriptMemory
from profkit.capture.step_samples import StepSamples
from profkit.capture.whole_files import write_json
from profkit.models.attachment import COMPLETE, CUT_SHORT, NOT_REACHED, VARIABLE, Attachment
from profkit.names import WARMUP
from profkit.run_directory import KINETO_TRACE, WORK

if TYPE_CHECKING:
    from profkit.capture.work_counter import WorkCounter


def attach() -> None:
    """Do in this process what the environment asks for."""
    session = Session(Attachment.from_json(os.environ[VARIABLE]))
    hooks = Hooks(session, session.order.depth, session.order.step_on, session.memory)
    session.hooks = hooks
    hooks.install()
    if session.memory is None:
        hooks.clock.start()
    else:
        session.memory.wait_for_cuda()
        if session.order.annotate:
            hooks.start()
    atexit.register(note_failure, Path(session.order.run))
    atexit.register(session.end)
    # A forked child, a data loader's worker say, is not the process that trains.
    os.register_at_fork(after_in_child=session.abandon)


class Session:
    """Starts and stops the recording on steps' boundaries, and leaves what it knows for the launcher."""

    def __init__(self, order: Attachment) -> None:
        self.order = order
        self.hooks: Hooks | None = None
        self.memory = None if order.memory is None else ScriptMemory(Path(order.run), order.memory)
        self._first = order.warmup_steps
        self._end = order.warmup_steps + order.steps
        self._begun = -1
        self._start_ns = 0
        self._samples = StepSamples()
        self._recording: ExitStack | None = None
        self._failure: str | None = None
        self._unrecorded = ExitStack()
        self._counter: WorkCounter | None = None
        self._name = _process_name()
        self._over = False

    def boundary(self, number: int) -> None:
        """Time the step that ended; begin or end the recording if it is time to."""
        if self._over:
            return
        self._note_step()
        self._begun = number
        if self.memory is not None:
            self.memory.boundary(number)
        if number == self._first - 1 and self.order.flops:
            self._begin_counting()
        elif number == self._first:
            self._end_counting()
            self._samples.begin("profiled")
            self._begin()
        elif number == self._end:
            self._finish(COMPLETE)
            if self.order.stop:
                raise SystemExit(0)
        elif number == 1:
            # The first one built what later ones have: kernels, optimizer state, the allocator's pool.
            self._samples.begin("attached")
        self._start_ns = perf_counter_ns()

    def end(self) -> None:
        """At the process's end: keep what was recorded, if it was cut short, and say so."""
        used_cuda = self.memory is not None and self.memory.owners is not None
        if self._over or (self._begun < 0 and not used_cuda):
            return
        if self._recording is None:
            self._finish(NOT_REACHED)
        elif self._begun == self._end - 1 and self.hooks is not None and self.hooks.counts_calls:
            # Where calls count, nothing but the end of the script ends the last step.
            self._note_step()
            if self.memory is not None:
                self.memory.boundary(self._end)
            self._finish(COMPLETE)
        else:
            self._finish(CUT_SHORT)

    def abandon(self) -> None:
        """Do nothing more: this process is a forked copy."""
        self._over = True
        self._recording = None
        if self._counter is not None:
            self._counter.stop()
        if self.memory is not None:
            self.memory.forget()
        if self.hooks is not None:
            self.hooks.stop()

    def _note_step(self) -> None:
        if self._begun < 0:
            return
        _wait_for_device()
        step_ns = perf_counter_ns() - self._start_ns
        phases = {} if self.hooks is None else self.hooks.clock.take()
        self._samples.note({**phases, "step_ns": step_ns})

    def _begin_counting(self) -> None:
        self._samples.end()
        if _name_for(WORK, self._name) != WORK:
            return  # another rank does the same, and one speaks for all
        from profkit.capture.work_counter import WorkCounter  # it loads more of torch

        if self.order.annotate and self.hooks is not None:
            self.hooks.start()
        # Where nsys records the whole process it sees this step too: not as one of those that were asked for.
        self._unrecorded.enter_context(annotate(WARMUP))
        self._counter = WorkCounter()
        self._counter.start()

    def _end_counting(self) -> None:
        if self._counter is None:
            return
        self._counter.stop()
        self._unrecorded.close()
        try:
            write_json(Path(self.order.run) / WORK, self._counter.content())
        except OSError as error:
            self._failure = str(error)
        self._counter = None

    def _begin(self) -> None:
        _wait_for_device()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._recording = ExitStack()
        if self.order.recorder == "kineto":
            path = Path(self.order.run) / _name_for(KINETO_TRACE, self._name)
            self._recording.enter_context(recorded_by_kineto(path, device))
        elif self.order.recorder == "nsys":
            self._recording.enter_context(recorded_together_by_nsys(Path(self.order.run), device))
        if self.order.annotate and self.hooks is not None and self.memory is None:
            self.hooks.start()

    def _finish(self, state: str) -> None:
        self._over = True
        self._samples.end()
        if self.hooks is not None:
            self.hooks.stop()
        if self._recording is not None:
            recording, self._recording = self._recording, None
            try:
                recording.close()
            except OSError as error:  # a full disk, say: the script trains on, and the launcher tells
                self._failure = str(error)
        if self.memory is not None:
            self.memory.finish()
        try:
            self._write_result(state)
        except OSError as error:  # no file is left to tell by
            why = self._failure or error
            sys.stderr.write(f"profkit: {self.order.run}: what was recorded cannot be kept: {why}\n")

    def _write_result(self, state: str) -> None:
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        content: dict[str, Any] = {
            "state": state,
            "failure": self._failure,
            "process": self._name,
            **describe_rank(),
            "steps_seen": self._begun,
            "device": "cuda" if on_gpu else "cpu",
            # Asking for the name would initialise CUDA for a script that trains on the CPU.
            "gpu": torch.cuda.get_device_name() if on_gpu else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "conditions": read_conditions(() if self.hooks is None else self.hooks.autocast_dtypes),
            **self._samples.steps,
            "during": self._samples.during,
            "memory": None if self.memory is None else self.memory.result(),
        }
        write_json(Path(self.order.run) / f"attached-{self._name}.json", content)


def _process_name() -> str:
    """Return what tells this process from the script's others: its rank, or its number."""
    rank = os.environ.get("RANK")
    return f"{os.getpid()}" if rank is None else f"rank{rank}"


def _name_for(name: str, process: str) -> str:
    """Return the file's name for this process: the plain one for rank 0 and for a script without ranks."""
    if not process.startswith("rank") or process == "rank0":
        return name
    stem, _, suffix = name.partition(".")
    return f"{stem}.{process}.{suffix}"


def _wait_for_device() -> None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    # Within a script's own capture into a CUDA graph there is nothing to wait for, and waiting would break it.
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
