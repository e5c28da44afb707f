"""What starting a recorder does to the queue of a data loader, and which steps are left out of the recording for it.

A loader with workers runs ahead of the program, by a queue of at most prefetch factor × workers batches. Starting a
recorder holds the program for a second or so. Where the program usually waits for data, the queue is nearly empty
before that and full afterwards: the next steps find their data ready, and look faster than all others (2.4 ms for
48 ms). So the steps that empty a full queue once do not count, although the recorder sees them: whoever reads the run
leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from time import perf_counter_ns

from profkit.capture.hooks.data_loading import DataLoading, Queue
from profkit.capture.recorders.nsys import LocalRanks
from profkit.run.manifest import Loading

LONGEST_DRAIN = 64
"""The most steps that are left out."""
LONGEST_DRAIN_NS = 30_000_000_000
"""The most time that the steps left out may take without a profiler."""

_HALF = 0.5
"""A queue with this share of its batches ready was not short of data."""
_WAITS = 0.1
"""A loop that waits for data for this share of its steps' time is limited by data, at least in part."""


class QueueDrain:
    """Looks at the queue before the recorder is started and after it, and says how many steps do not count."""

    def __init__(self, run: Path, loading: DataLoading) -> None:
        self._run = run
        self._loading = loading
        self._before = Queue()
        self._began_ns = 0
        self._found: Loading | None = None

    def look(self) -> None:
        """The recorder is about to be started."""
        self._before = self._loading.look()
        self._began_ns = perf_counter_ns()

    def plan(self, number: int, unprofiled: Sequence[Mapping[str, int]], *, may_drain: bool) -> int:
        """The recorder has been started: return how many of the steps that begin now do not count.

        All ranks of this machine leave out equally many, as many as the one that needs most. All must come here.

        Args:
            number: the number of the step that begins now.
            unprofiled: the times of the steps before.
            may_drain: False where the number of steps that follow is fixed.
        """
        start_ns = perf_counter_ns() - self._began_ns
        after, per_step = self._loading.look(), self._loading.batches_per_step
        step_ns = fmean(one["step_ns"] for one in unprofiled) if unprofiled else 0.0
        waited_ns = fmean(one.get("data_ns", 0) for one in unprofiled) if unprofiled else 0.0
        usually_waits = self._loading.falls_behind or waited_ns > _WAITS * step_ns
        needed = count_steps_to_drain(
            self._before, after, per_step, usually_waits=usually_waits, keeps_full=self._loading.keeps_full
        )
        drained = min(needed, LONGEST_DRAIN, int(LONGEST_DRAIN_NS / step_ns) if step_ns else LONGEST_DRAIN)
        try:
            drained = LocalRanks(self._run).agree("drain", drained) if may_drain else 0
        except OSError:  # a full disk
            drained = 0
        if after.workers or drained:
            self._found = Loading(
                workers=after.workers,
                queue_batches=after.capacity,
                ready_before=self._before.ready,
                ready_after=after.ready,
                batches_per_step=per_step,
                start_ns=start_ns,
                needed_steps=needed,
                drained_steps=drained,
                first_step=number + drained,
            )
        return drained

    def describe(self, recorded: int) -> Loading | None:
        """Return what is to be said of the loaders, None without workers; ``recorded`` steps ended since the plan.

        Where the program ended before a step that counts, those that it made are all that there is, and count.
        """
        if self._found is None or recorded > self._found.drained_steps:
            return self._found
        return replace(self._found, drained_steps=0)


def count_steps_to_drain(
    before: Queue, after: Queue, batches_per_step: float, *, usually_waits: bool, keeps_full: bool
) -> int:
    """Return how many steps empty a full queue, if it was filled only while the program was held up.

    Where the workers keep the queue full, data are ready anyway, unless the program usually waits.

    Args:
        before: the queue before the recorder was started.
        after: the queue when that was done.
        batches_per_step: how many batches a step takes.
        usually_waits: the unprofiled steps waited for data, or will when the queue is empty.
        keeps_full: the queue was nearly full at the end of every step before.
    """
    if not after.capacity or not batches_per_step:
        return 0
    is_ahead = keeps_full if after.is_young else before.is_filled_to(_HALF)
    if is_ahead and not usually_waits:
        return 0
    filled = None if before.ready is None or after.ready is None else after.ready - before.ready
    if not after.is_young and filled is not None and filled <= batches_per_step:
        return 0
    return math.ceil(after.capacity / batches_per_step)
