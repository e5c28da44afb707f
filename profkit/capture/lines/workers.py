"""The lines behind the time of a data loader's workers.

A sampler sleeps in each worker from its start, since a worker cannot be entered later. It looks while a byte of a
shared file says so, and only when the worker makes a batch: one behind a full queue waits, which costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any

from torch.utils.data._utils import fetch, worker

from profkit.capture.lines.own_code import describe
from profkit.capture.lines.samples import StackSampler
from profkit.files import write_whole
from profkit.run.lines import LineTime
from profkit.run.records import decode

VARIABLE = "PROFKIT_LINES"
"""The environment variable that names the shared file, in all processes that the program starts."""

_POLL_S = 0.02
_PATIENCE_S = 1.0
_FETCHERS = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
_FETCH_CODES = [kind.fetch.__code__ for kind in _FETCHERS]
_DORMANT, _LOOKING = 0, 1


@dataclass
class OfWorkers:
    """What workers found: how many batches they made, the mean time of one, and its lines."""

    batches: int = 0
    batch_ns: int = 0
    lines: list[LineTime] = field(default_factory=list)


class WorkerLines:
    """Has each worker that starts from now on look for its lines when it is told to.

    Args:
        flag: the file to make; what workers find lies beside it until `stop` takes it.
    """

    def __init__(self, flag: Path) -> None:
        self._flag = flag
        flag.write_bytes(bytes([_DORMANT]))
        self._shared = _map(flag, mmap.PROT_READ | mmap.PROT_WRITE)
        os.environ[VARIABLE] = str(flag)
        self._original: Callable[..., None] = worker._worker_loop
        worker._worker_loop = _worker_loop

    def start(self) -> None:
        """Have all workers look."""
        self._shared[0] = _LOOKING

    def stop(self) -> OfWorkers:
        """End it, and return what the workers found that answer within a second."""
        self._shared[0] = _DORMANT
        worker._worker_loop = self._original
        os.environ.pop(VARIABLE, None)
        return _join(self._take())

    def _take(self) -> list[dict[str, Any]]:
        """Return what each looking worker has left, once all of them have or the patience is over."""
        deadline = perf_counter_ns() + int(_PATIENCE_S * 1e9)
        looking, done = f"{self._flag.name}-looking-*", f"{self._flag.name}-done-*"
        while list(self._flag.parent.glob(looking)) and perf_counter_ns() < deadline:
            sleep(_POLL_S)
        paths = sorted(self._flag.parent.glob(done))
        contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for path in (*paths, *self._flag.parent.glob(looking), self._flag):
            path.unlink(missing_ok=True)
        return contents


def _map(flag: Path, protection: int) -> mmap.mmap:
    """Return the shared byte; the file itself is never written to again, which would cut it short for a moment."""
    descriptor = os.open(flag, os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, 1, prot=protection)
    finally:
        os.close(descriptor)


def _join(contents: list[dict[str, Any]]) -> OfWorkers:
    """Return all workers' lines as those of a mean batch."""
    batches = sum(content["batches"] for content in contents)
    if not batches:
        return OfWorkers()
    samples: defaultdict[tuple[str | None, int, str, str | None], list[int]] = defaultdict(list)
    for content in contents:
        for line in content["lines"]:
            samples[line["file"], line["line"], line["function"], line["called"]].append(line["samples"])
    all_samples = sum(map(sum, samples.values()))
    batch_ns = sum(content["batch_ns"] for content in contents) // batches
    lines = [_of_batch(key, sum(counts), all_samples, batch_ns) for key, counts in samples.items()]
    return OfWorkers(batches, batch_ns, lines)


def _of_batch(key: tuple[str | None, int, str, str | None], samples: int, of: int, batch_ns: int) -> LineTime:
    share = samples / of
    error = (share * (1 - share) / of) ** 0.5
    values = dict(zip(("file", "line", "function", "called"), key, strict=True))
    times = {"samples": samples, "time_ns": round(share * batch_ns), "error_ns": round(error * batch_ns), "waits": 0.0}
    line: LineTime = decode(LineTime, {**values, "phase": None, "thread": "worker", **times})
    return line


def _worker_loop(*args: Any, **kwargs: Any) -> None:
    """Run a worker as torch does, with a sampler that sleeps until it is wanted."""
    flag = os.environ.get(VARIABLE)
    if flag is not None:
        # A worker without a sampler is still a worker.
        with contextlib.suppress(OSError):
            _Dormant(Path(flag)).start()
    _torchs_loop(*args, **kwargs)


_torchs_loop: Callable[..., None] = worker._worker_loop
"""A worker that is spawned imports this module anew, before anything is replaced."""


class _Dormant:
    """The sampler of one worker's process."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag
        self._shared = _map(flag, mmap.PROT_READ)
        self._thread = threading.get_ident()
        self._batches = self._batch_ns = 0
        self._looks = False

    def start(self) -> None:
        """Time batches while looking; the sampler's thread ends with the process."""
        for kind in _FETCHERS:
            kind.fetch = self._timed(kind.fetch)
        threading.Thread(target=self._run, name="profkit-lines", daemon=True).start()

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch_timed(*args: Any, **kwargs: Any) -> Any:
            began_ns = perf_counter_ns()
            batch = original(*args, **kwargs)
            if self._looks:
                self._batches += 1
                self._batch_ns += perf_counter_ns() - began_ns
            return batch

        return fetch_timed

    def _run(self) -> None:
        while self._shared[0] != _LOOKING:
            sleep(_POLL_S)
        looking = self._flag.with_name(f"{self._flag.name}-looking-{os.getpid()}")
        looking.touch()
        sampler = StackSampler(lambda: None, _FETCH_CODES)
        sampler.watch(self._thread, "worker")
        self._looks = True
        sampler.start()
        while self._shared[0] == _LOOKING:
            sleep(_POLL_S)
        sampler.stop()
        self._looks = False
        lines = [
            {**describe(place)._asdict(), "samples": count}
            for (place, _, _), count in sampler.samples.items()
            if place is not None
        ]
        content = {"batches": self._batches, "batch_ns": self._batch_ns, "lines": lines}
        write_whole(self._flag.with_name(f"{self._flag.name}-done-{os.getpid()}"), json.dumps(content).encode())
        looking.unlink()
