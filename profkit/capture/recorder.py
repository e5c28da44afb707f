"""What records the steps that are asked for: torch.profiler or Nsight Systems, as the order says, or nothing.

One nsys watches all ranks of a machine, and starts and stops for all of them when one of them says so. The others must
not have begun their step by then, nor still be in it; they meet through files in the run's directory, so that the trace
shows no collective of profkit's own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import get_ident
from time import time_ns
from typing import Any

import torch
from torch.profiler import profile

from profkit.annotation import Range
from profkit.capture.errors import describe_error
from profkit.capture.flight_recorder import knows_collectives, logged_collectives, several_ranks
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.range_log import LiveLog
from profkit.capture.kineto import (
    ScriptsProfiler,
    drop_profiler,
    recorded_by_kineto,
    warmed_up_profiler,
)
from profkit.capture.steps.times import wait_for_device
from profkit.names import COLLECTING
from profkit.run.directory import KINETO_TRACE, name_of_rank
from profkit.run.range_log import LEFT
from profkit.run.recording import LocalRanks, Order

# nsys reaches the other processes in its own time: on an H200 1.2 ms after cudaProfilerStart had returned in the first,
# another's range that was already open was lost.
_SETTLING_S = 0.2


@contextmanager
def recorded_by_nsys(run: Path, device: torch.device) -> Iterator[None]:
    """Have nsys capture the block through CUDA's profiler API, on all ranks of this machine once all have come to it.

    Without CUDA there is no such API, and nsys captures the processes from start to end.
    """
    ranks = LocalRanks(run)
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    ranks.meet("arrived")
    if ranks.number == 0:
        torch.cuda.profiler.start()
    try:
        if ranks.meet("started") and ranks.count > 1:
            time.sleep(_SETTLING_S)
        yield
    finally:
        torch.cuda.synchronize(device)
        ranks.meet("done")
        if ranks.number == 0:
            torch.cuda.profiler.stop()
        ranks.meet("stopped")


class StepsRecorder:
    """Starts and stops what records this process, and the hooks' ranges with it.

    Args:
        order: what is asked for.
        hooks: whose ranges are recorded.
        records_memory: whether the allocator's history is kept at the same time.
    """

    def __init__(self, order: Order, hooks: Hooks, *, records_memory: bool) -> None:
        self._order = order
        self._run = Path(order.run)
        self._hooks = hooks
        self._records_memory = records_memory
        self._recording: ExitStack | None = None
        self._warmed_up: profile | None = None
        self._scripts_profiler = ScriptsProfiler() if order.recorder == "kineto" else None

    @property
    def is_on(self) -> bool:
        """Whether something records."""
        return self._recording is not None

    @property
    def is_warming_up(self) -> bool:
        """Whether torch.profiler slows the step that runs, and keeps nothing of it."""
        return self._warmed_up is not None

    @property
    def meets_the_scripts(self) -> bool:
        """Whether the script's own torch.profiler runs, where a process has only one."""
        return self._scripts_profiler is not None and self._scripts_profiler.runs

    def may_warm_up(self) -> bool:
        """Return whether torch.profiler is to warm up in the step before the recorded ones.

        Not where chosen ranks alone are recorded: one rank's slower step would be taken for a late rank.
        """
        return self._order.ranks is None and not self.meets_the_scripts and self._may_log()

    def warm_up(self) -> None:
        """Have torch.profiler trace from now on, and keep nothing before `start`."""
        assert self._scripts_profiler is not None
        self._warmed_up = warmed_up_profiler(torch.device("cuda"), self._scripts_profiler, self._hooks.log)
        self._scripts_profiler.before_start = self._drop_profiler

    def start(self, rank: int | None, make_way: Callable[[], None]) -> None:
        """Record from now on.

        Args:
            rank: which rank this is, None if none.
            make_way: is called before the script starts a torch.profiler of its own.
        """
        wait_for_device()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        log = self._hooks.log if self._may_log() else None
        if log is None:
            self._drop_profiler()
        elif self._order.annotate:
            self._hooks.prepare()
        self._recording = ExitStack()
        if self._scripts_profiler is not None:
            path = self._run / name_of_rank(KINETO_TRACE, rank or 0)
            warmed_up, self._warmed_up = self._warmed_up, None
            self._recording.enter_context(recorded_by_kineto(path, device, self._scripts_profiler, log, warmed_up))
            self._scripts_profiler.before_start = make_way
        elif self._order.recorder == "nsys":
            self._recording.enter_context(recorded_by_nsys(self._run, device))
        if log is not None:
            self._hooks.start_log()
        if self._order.annotate and self._order.recorder != "memory":
            self._hooks.start()
            self._recording.enter_context(_collections_as_ranges(log))

    def stop(self) -> str | None:
        """End the recording, if there is one, and return why it could not be saved."""
        if self._scripts_profiler is not None:
            self._scripts_profiler.before_start = None
        self._drop_profiler()
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        log = self._hooks.log
        log.saw_cuda_graphs = self._hooks.steps.has_captured
        try:
            if several_ranks() and self._order.recorder == "kineto":
                log.collectives = logged_collectives(log.began_ns)
            recording.close()
        except Exception as error:  # a full disk, say: the target trains on, and the launcher reports it
            return describe_error(error)
        return None

    def forget(self) -> None:
        """Do nothing more: this process is a forked copy."""
        self._recording = self._warmed_up = None

    def _may_log(self) -> bool:
        """Return whether CUDA's activities and profkit's own log of ranges hold all that is asked for.

        Not on a CPU, whose operators are what is measured; nor where ranges must be in the allocator's history too, or
        where CPU operators alone know the names and sizes of collectives.
        """
        needs_operators = self._order.operators or self._records_memory or not torch.cuda.is_initialized()
        if self._scripts_profiler is None or needs_operators:
            return False
        return not several_ranks() or knows_collectives()

    def _drop_profiler(self) -> None:
        """End a profiler that was warmed up and is not to record: the script starts its own, or ends."""
        profiler, self._warmed_up = self._warmed_up, None
        if profiler is not None:
            drop_profiler(profiler)


_FULL = 2
"""The generation of Python's objects that a full collection looks at, and all younger ones with it."""


@contextmanager
def _collections_as_ranges(log: LiveLog | None) -> Iterator[None]:
    """Record a range around each full collection of garbage: in the log, or without one in what records ranges.

    The hooks are not shown it: a collection may begin in the middle of their work.
    """
    marker, opened = Range(COLLECTING, None), {}
    entries: dict[int, list[int]] = {}

    def note(phase: str, collection: dict[str, Any]) -> None:
        if collection["generation"] < _FULL:
            return
        thread = get_ident()
        if log is not None:
            if thread not in entries:
                entries[thread] = log.begin_thread()
            entries[thread] += (log.number_of[COLLECTING] if phase == "start" else LEFT, time_ns())
        elif phase == "start":
            opened[thread] = marker.open(())
        elif thread in opened:
            marker.close(opened.pop(thread), ())

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)
