"""Where a program waits for data: around each batch that an iterator of torch's ``DataLoader`` hands out.

All loops come through the same door, with workers or without: a plain ``for``, Lightning, accelerate, Hugging Face's
trainer. Making the iterator counts too: there workers start, or begin the next epoch. What a program reads in any other
way, from a generator say, nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import get_worker_info

from profkit.capture.patches import patch

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


class DataLoading:
    """Calls ``begins`` and ``ends`` around each wait for a data loader, on the thread that waits.

    A loader that reads from another one, in the same process, waits within its own wait: both are reported.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins = begins
        self._ends = ends
        self._iterators: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self._taken = 0
        self._taken_per_step: list[int] = []
        self._queues: list[Queue] = []

    def install(self) -> None:
        """Begin to watch."""
        patch("torch.utils.data.dataloader.DataLoader.__iter__", partial(self._around, is_batch=False))
        patch("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", partial(self._around, is_batch=True))

    def step_ended(self) -> None:
        """Note a step's boundary."""
        self._taken_per_step.append(self._taken)
        self._queues.append(self.look())
        self._taken = 0

    def forget_steps(self) -> None:
        """Something else counts as a step from now on."""
        self._taken_per_step.clear()
        self._queues.clear()

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
        """Whether the queue was nearly full at the end of every step so far."""
        return all(queue.is_filled_to(_NEARLY) for queue in self._queues)

    def look(self) -> Queue:
        """Return how full the queues of the loaders in use are now."""
        try:
            queues = [queue_of(one) for one in list(self._iterators)]
        except (AttributeError, TypeError):  # what torch does not say under these names
            return Queue(ready=None)
        except (OSError, RuntimeError, ValueError):  # another thread begins or ends an epoch at this moment
            return Queue(ready=None)
        ready = [one.ready for one in queues if one.ready is not None]
        return Queue(
            sum(one.workers for one in queues),
            sum(one.capacity for one in queues),
            sum(ready) if len(ready) == len(queues) else None,
            any(one.is_young for one in queues),
        )

    def _around(self, method: Callable[[Any], Any], *, is_batch: bool) -> Callable[[Any], Any]:
        def waited(loader: Any) -> Any:
            self._begins()
            try:
                result = method(loader)
            finally:
                self._ends()
            if is_batch and getattr(loader, "_num_workers", 0) > 0:
                self._taken += 1
                with suppress(TypeError):  # a kind of iterator that nothing may refer to weakly
                    self._iterators[loader] = None
            return result

        return waited


def is_loader_worker() -> bool:
    """Return whether this process is a data loader's worker: what it runs trains nothing, even if it calls a model."""
    return get_worker_info() is not None


def queue_of(iterator: Any) -> Queue:
    """Return the queue of an iterator with workers; of one that has given out its last batch it is empty."""
    workers = iterator._num_workers
    # A batch that came before its turn waits in the iterator itself, one that is to be pinned in a queue before.
    held = sum(len(task) > 1 for task in iterator._task_info.values())
    capacity = min(workers * iterator._prefetch_factor, iterator._tasks_outstanding + held)
    if not capacity:
        return Queue()
    is_young = iterator._rcvd_idx < workers * (iterator._prefetch_factor + 1)
    queues = {id(one): one for one in (iterator._data_queue, iterator._worker_result_queue)}
    try:
        ready = held + sum(one.qsize() for one in queues.values())
    except NotImplementedError:  # macOS cannot count what waits in a queue
        return Queue(workers, capacity, None, is_young)
    return Queue(workers, capacity, min(ready, capacity), is_young)
