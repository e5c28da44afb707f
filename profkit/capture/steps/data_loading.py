"""Where a program waits for data: around each batch that an iterator of torch's ``DataLoader`` hands out.

All loops come through the same door, with workers or without: a plain ``for``, Lightning, accelerate, Hugging Face's
trainer. Making the iterator counts too: there workers start, or begin the next epoch. What a program reads in any other
way, from a generator say, nobody sees.

Starting a recorder changes the queue of a data loader, and some steps are left out of the recording for it. A loader
with workers runs ahead of the program, by a queue of at most prefetch factor × workers batches. Starting a recorder
holds the program for a second or so. Where the program usually waits for data, the queue is nearly empty before that
and full afterwards: the next steps find their data ready, and look faster than all others (2.4 ms for 48 ms). So the
steps that empty a full queue once do not count, although the recorder sees them: whoever reads the run leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import get_worker_info

from profkit.capture.patches import patch
from profkit.capture.steps.times import times_without_waits
from profkit.capture.steps.variable_names import file_or_cell, find_arguments, frames_around, is_installed, variable_of
from profkit.run.lines import RARELY
from profkit.run.manifest import Loader, Loading
from profkit.run.recording import LocalRanks

_FEWEST = 2
"""How many steps must have ended after the first before anything is said of the workers' pace."""

_NEARLY = 0.75
"""A queue with this share of its batches ready is nearly full: the workers refill it as fast as it is emptied."""


@dataclass(frozen=True)
class Queue:
    """The batches of loaders with workers that are on their way: ``ready`` of at most ``capacity`` batches.

    ``ready`` is None where it is not known: macOS does not tell. A queue ``is_young`` until the program has taken as
    many batches as it held at first and as all workers then make at once: they were made while nothing was taken, so
    they do not show how fast the workers are.
    """

    workers: int = 0
    capacity: int = 0
    ready: int | None = 0
    is_young: bool = False

    def is_filled_to(self, share: float) -> bool:
        """Return whether at least this share of the queue is ready; True where that is not known."""
        return self.ready is None or self.ready >= share * self.capacity


@dataclass(frozen=True)
class Epoch:
    """An epoch of so many batches, for which a loader started its workers (``starts_workers``), or went on with them.

    ``start_ns`` is what the program waited for the last one's workers to end, for these, and for the first batch; 0 of
    the first epoch of workers that stay, which is like no other.
    """

    batches: int = 0
    start_ns: int = 0
    starts_workers: bool = True


class DataLoading:
    """Calls ``begins`` and ``ends`` around each wait for a data loader, on the thread that waits.

    A loader that reads from another one, in the same process, waits within its own wait: both are reported.
    ``epoch`` is the last one of the longest loader with workers: others, as of an evaluation, begin theirs in other
    steps. ``keeps_workers``: those of all loaders with workers stay from one epoch to the next.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins = begins
        self._ends = ends
        self._iterators: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self._starting: WeakKeyDictionary[Any, Epoch] = WeakKeyDictionary()
        self._ended_ns = 0
        self.epoch = Epoch()
        self._kept: set[bool] = set()
        self._taken = 0
        self._taken_per_step: list[int] = []
        self._queues: list[Queue] = []
        self._made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Where among `_loaders` each loader, and each of its iterators, stands."""
        self._loaders: list[Loader] = []

    def install(self) -> None:
        patch("torch.utils.data.dataloader.DataLoader.__init__", self._around_making)
        patch("torch.utils.data.dataloader.DataLoader.__iter__", partial(self._around, is_batch=False))
        patch("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", partial(self._around, is_batch=True))

    def step_ended(self) -> None:
        self._taken_per_step.append(self._taken)
        self._queues.append(self.look())
        self._taken = 0

    def forget_steps(self) -> None:
        """Something else counts as a step from now on."""
        self._taken_per_step.clear()
        self._queues.clear()

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """Return the loaders that gave batches and whose lines are known, that with most batches first."""
        known = [loader for loader in self._loaders if loader.file and loader.batches]
        return tuple(sorted(known, key=lambda loader: -loader.batches))

    @property
    def keeps_workers(self) -> bool:
        return self._kept == {True}

    @property
    def batches_per_step(self) -> float:
        """How many batches of loaders with workers a step took, by the median of the steps so far."""
        return median(self._taken_per_step) if self._taken_per_step else 0

    @property
    def falls_behind(self) -> bool:
        """Whether the workers made at most half as many batches as the steps after the first took.

        Such a program will wait for data once the queue is empty, which was full when its first step took long.
        """
        if len(self._queues) <= _FEWEST:
            return False
        first, last = self._queues[0].ready, self._queues[-1].ready
        taken = sum(self._taken_per_step[1:])
        return first is not None and last is not None and 0 < taken <= 2 * (first - last)

    @property
    def keeps_full(self) -> bool:
        return all(queue.is_filled_to(_NEARLY) for queue in self._queues)

    def look(self) -> Queue:
        try:
            queues = [queue_of(iterator) for iterator in list(self._iterators)]
        except (AttributeError, TypeError, OSError, RuntimeError, ValueError):
            # Torch does not say it under these names, or another thread begins or ends an epoch at this moment.
            return Queue(ready=None)
        ready = [queue.ready for queue in queues if queue.ready is not None]
        return Queue(
            sum(queue.workers for queue in queues),
            sum(queue.capacity for queue in queues),
            sum(ready) if len(ready) == len(queues) else None,
            any(queue.is_young for queue in queues),
        )

    def _around_making(self, constructor: Callable[..., None]) -> Callable[..., None]:
        def make(loader: Any, *args: Any, **kwargs: Any) -> None:
            constructor(loader, *args, **kwargs)
            written = find_written(loader)
            alike = [at for at, other in enumerate(self._loaders) if replace(other, epochs=0, batches=0) == written]
            if not written.file:  # a library makes another of the script's loaders, of the same data
                made = list(self._made.items())
                alike = [at for other, at in made if getattr(other, "dataset", None) is loader.dataset] or alike
            with suppress(TypeError):  # a class of loaders that cannot be a key
                self._made[loader] = alike[0] if alike else len(self._loaders)
                self._loaders += [] if alike else [written]

        return make

    def _around(self, method: Callable[[Any], Any], *, is_batch: bool) -> Callable[[Any], Any]:
        def waited(loader: Any) -> Any:
            began_ns = perf_counter_ns()
            self._begins()
            try:
                result = method(loader)
            except StopIteration:  # workers that do not stay end here
                self._ended_ns = perf_counter_ns() - began_ns
                raise
            finally:
                self._ends()
            waited_ns = perf_counter_ns() - began_ns
            with suppress(TypeError):  # a kind of iterator that nothing may refer to weakly
                self._count(loader, result, is_batch=is_batch)
                if not is_batch:
                    keeps = bool(getattr(loader, "persistent_workers", False))
                    start_ns = 0 if keeps and result not in self._iterators else self._ended_ns + waited_ns
                    self._starting[result] = Epoch(count_batches(loader), start_ns, not keeps)
                    self._ended_ns = 0
                elif getattr(loader, "_num_workers", 0) > 0:
                    self._taken += 1
                    self._iterators[loader] = None
                    self._kept.add(bool(getattr(loader, "_persistent_workers", False)))
                    self._first_came(self._starting.pop(loader, Epoch()), waited_ns)
            return result

        return waited

    def _count(self, loader: Any, result: Any, *, is_batch: bool) -> None:
        at = self._made.get(loader)
        if at is not None:
            one = self._loaders[at]
            self._loaders[at] = replace(one, batches=one.batches + is_batch, epochs=one.epochs + (not is_batch))
            if not is_batch:
                self._made[result] = at

    def _first_came(self, epoch: Epoch, waited_ns: int) -> None:
        if epoch.batches and epoch.batches >= self.epoch.batches:
            self.epoch = replace(epoch, start_ns=epoch.start_ns and epoch.start_ns + waited_ns)


def find_written(loader: Any) -> Loader:
    """Return a loader that is made right now, with the lines of the user's own code that say how; no file if none does.

    They are in the call that makes it, or a library's function that does, or else in that which makes the arguments of
    Hugging Face's Trainer, if a file on the way to it has one such call.
    """
    frames = list(frames_around())
    maker = next((frame for frame in frames if not _constructs(frame, loader)), None)
    own = [frame for frame in frames if not is_installed(frame.f_code.co_filename)]
    given = tuple((name, getattr(loader, name)) for name in ("num_workers", "persistent_workers"))
    for frame in own:
        file, at = frame.f_code.co_filename, frame.f_lineno
        places = find_arguments(file, given, at=at) or ((at, frame.f_code.co_name),) * (2 * (frame is maker))
        if places:
            return _loader_at(file, places, loader)
    for file in dict.fromkeys(frame.f_code.co_filename for frame in own):
        of_trainer = tuple((f"dataloader_{name}", value) for name, value in given)
        places = find_arguments(file, of_trainer, of="TrainingArguments")
        if places:
            return _loader_at(file, places, loader)
    return Loader()


def _loader_at(file: str, places: Sequence[tuple[int, str]], loader: Any) -> Loader:
    (line, function), (keeps_line, keeps_function) = places
    return Loader(
        file_or_cell(file), line, keeps_line, function, keeps_function, loader.num_workers, loader.persistent_workers
    )


def _constructs(frame: FrameType, loader: Any) -> bool:
    """Return whether a frame is of a constructor of the loader's class, or of one that it inherits."""
    code = frame.f_code
    return code.co_name == "__init__" and variable_of(frame, code.co_varnames[0]) is loader


def is_loader_worker() -> bool:
    """Return whether this process is a data loader's worker: what it runs trains nothing, even if it calls a model."""
    return get_worker_info() is not None


def count_batches(loader: Any) -> int:
    """Return how many batches an epoch has of a loader with workers; 0 without any, or where nobody knows."""
    if not getattr(loader, "num_workers", 0):
        return 0
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a dataset that is read to its end
        return 0


def queue_of(iterator: Any) -> Queue:
    """Return the queue of an iterator with workers; of one that has given out its last batch it is empty."""
    workers = iterator._num_workers
    # A batch that came before its turn waits in the iterator itself, one that is to be pinned in a queue before.
    held = sum(len(task) > 1 for task in iterator._task_info.values())
    capacity = min(workers * iterator._prefetch_factor, iterator._tasks_outstanding + held)
    if not capacity:
        return Queue()
    is_young = iterator._rcvd_idx < workers * (iterator._prefetch_factor + 1)
    queues = {id(queue): queue for queue in (iterator._data_queue, iterator._worker_result_queue)}
    try:
        ready = held + sum(queue.qsize() for queue in queues.values())
    except NotImplementedError:  # macOS cannot count what waits in a queue
        return Queue(workers, capacity, None, is_young)
    return Queue(workers, capacity, min(ready, capacity), is_young)


LONGEST_DRAIN = 64
"""The most steps that are left out."""
LONGEST_BURST = 16
"""The most steps that are recorded for the sake of workers that deliver at once, where fewer were asked for."""
LONGEST_DRAIN_NS = 30_000_000_000
"""The most time that the steps left out may take without a profiler."""

_HALF = 0.5
"""A queue with this share of its batches ready was not short of data."""
_WAITS = 0.1
"""A loop that waits for data for this share of its steps' time is limited by data, at least in part."""


class QueueDrain:
    """Looks at the queue before the recorder is started and after it, and says how many steps do not count.

    ``run`` is where this machine's ranks meet, None where each one records by itself.
    """

    def __init__(self, run: Path | None, loading: DataLoading) -> None:
        self._run = run
        self._loading = loading
        self._before = Queue()
        self._began_ns = 0
        self._found: Loading | None = None

    def look(self) -> None:
        self._before = self._loading.look()
        self._began_ns = perf_counter_ns()

    def plan(self, number: int, unprofiled: Sequence[Mapping[str, int]], steps: int | None) -> int:
        """The recorder has been started: return how many steps it records beyond ``steps``, None where all follow.

        Those that do not count come first. Where some do not, and the workers deliver at once for more than ``steps``,
        as many as they deliver for are recorded after these: fewer may hold all of the waits, or none. All ranks that
        meet leave out equally many, as many as the one that needs most, and record equally many. All must come here.
        """
        start_ns = perf_counter_ns() - self._began_ns
        after, per_step = self._loading.look(), self._loading.batches_per_step
        step_ns = fmean(step["step_ns"] for step in unprofiled) if unprofiled else 0.0
        waited_ns = fmean(step.get("data_ns", 0) for step in unprofiled) if unprofiled else 0.0
        usually_waits = self._loading.falls_behind or waited_ns > _WAITS * step_ns
        needed = count_steps_to_drain(
            self._before, after, per_step, usually_waits=usually_waits, keeps_full=self._loading.keeps_full
        )
        drained = min(needed, LONGEST_DRAIN, int(LONGEST_DRAIN_NS / step_ns) if step_ns else LONGEST_DRAIN)
        burst = math.ceil(after.workers / per_step) if per_step and drained else 0
        more = 0 if steps is None else max(0, min(burst, LONGEST_BURST) - steps)
        try:
            if self._run is not None:
                drained, more = (
                    LocalRanks(self._run).agree(what, count) for what, count in (("drain", drained), ("burst", more))
                )
        except OSError:  # a full disk
            drained = more = 0
        if after.workers or drained:
            found = Loading(
                workers=after.workers,
                queue_batches=after.capacity,
                batches_per_step=per_step,
                start_ns=start_ns,
                needed_steps=needed,
                drained_steps=drained,
                first_step=number + drained,
                keeps_workers=self._loading.keeps_workers,
            )
            self._found = self._with_epoch(found)
        return drained + more

    def describe(self, recorded: int) -> Loading | None:
        """Return what is to be said of the loaders, None without workers; ``recorded`` steps ended since the plan.

        Where the program ended before a step that counts, those that it made are all that there is, and count.
        """
        if self._found is None or recorded > self._found.drained_steps:
            return self._found
        return replace(self._found, drained_steps=0)

    def describe_later(self, before: Loading | None, steps: Sequence[Mapping[str, int]]) -> Loading | None:
        """Return what is to be said once steps without a recorder have followed, which began with a full queue too."""
        if before is None:
            return None
        emptied = math.ceil(before.queue_batches / before.batches_per_step) if before.batches_per_step else 0
        return self._with_epoch(replace(before, later_wait_ns=mean_wait(steps[emptied:], before.burst_steps)))

    def _with_epoch(self, loading: Loading) -> Loading:
        last = self._loading.epoch
        return replace(
            loading, epoch_batches=last.batches, epoch_start_ns=last.start_ns, starts_workers=last.starts_workers
        )


def mean_wait(steps: Sequence[Mapping[str, int]], fewest: int) -> int | None:
    """Return the mean wait for data of steps, in ns, but for those that take far longer; None if they are too few."""
    rest_ns = times_without_waits(steps)
    longest_ns = RARELY * median(rest_ns or [0])
    usual = [step.get("data_ns", 0) for step, time_ns in zip(steps, rest_ns, strict=True) if time_ns <= longest_ns]
    return round(fmean(usual)) if len(usual) >= max(fewest, 1) else None


def count_steps_to_drain(
    before: Queue, after: Queue, batches_per_step: float, *, usually_waits: bool, keeps_full: bool
) -> int:
    """Return how many steps empty a full queue, if it was filled only while the recorder's start held the program up.

    Where the workers keep the queue full, data are ready anyway, unless the program usually waits.

    Args:
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
