"""The lines behind the time of a data loader's workers.

A sampler sleeps in each worker from its start, since a worker cannot be entered later. It looks while a byte of a
shared file says so, and only when the worker makes a batch: one behind a full queue waits, which costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns, process_time_ns, sleep
from typing import Any

from torch.utils.data._utils import fetch, worker

from profkit.capture.lines.samples import StackSampler, describe
from profkit.files import write_whole
from profkit.run.lines import Line, LineTime
from profkit.run.recording import lines_flag

VARIABLE = "PROFKIT_LINES"
"""The environment variable that names the run's directory, in all processes that the program starts."""

_POLL_S = 0.02
_PATIENCE_S = 1.0
_FETCHERS = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
_FETCH_CODES = [kind.fetch.__code__ for kind in _FETCHERS]
_DORMANT, _LOOKING, _OVER = range(3)


@dataclass
class OfWorkers:
    """What workers found: how many batches they made, the mean time of one, that of its CPUs, and its lines."""

    batches: int = 0
    batch_ns: int = 0
    batch_cpu_ns: int = 0
    lines: list[LineTime] = field(default_factory=list)


class WorkerLines:
    """Has each worker that this process starts from now on look for its lines when it is told to.

    Args:
        run: where a file is made by which workers are told; what they find lies beside it until `stop` takes it.
    """

    def __init__(self, run: Path) -> None:
        self._flag = lines_flag(run, os.getpid())
        self._flag.write_bytes(bytes([_DORMANT]))
        self._shared = _map(self._flag, mmap.PROT_READ | mmap.PROT_WRITE)
        os.environ[VARIABLE] = str(run)
        self._original: Callable[..., None] = worker._worker_loop
        worker._worker_loop = _worker_loop

    def start(self) -> None:
        self._shared[0] = _LOOKING

    def stop(self) -> OfWorkers:
        """End it, and return what the workers found that answer within a second."""
        self._shared[0] = _OVER
        self._uninstall()
        deadline = perf_counter_ns() + int(_PATIENCE_S * 1e9)
        while self._files("looking") and perf_counter_ns() < deadline:
            sleep(_POLL_S)
        contents = [json.loads(path.read_text(encoding="utf-8")) for path in self._files("done")]
        self._remove()
        return _join(contents)

    def close(self) -> None:
        self._shared[0] = _OVER
        self._uninstall()
        self._remove()

    def _uninstall(self) -> None:
        if worker._worker_loop is _worker_loop:
            worker._worker_loop = self._original
        os.environ.pop(VARIABLE, None)

    def _files(self, state: str) -> list[Path]:
        return sorted(self._flag.parent.glob(f"{self._flag.name}-{state}-*"))

    def _remove(self) -> None:
        for path in (self._flag, *self._files("looking"), *self._files("done")):
            path.unlink(missing_ok=True)


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
    samples: Counter[Line] = Counter()
    times: defaultdict[Line, Counter[str | None]] = defaultdict(Counter)
    for content in contents:
        for file, line, function, called, count, time_ns in content["lines"]:
            samples[Line(file, line, function)] += count
            times[Line(file, line, function)][called] += time_ns
    batch_ns = sum(content["batch_ns"] for content in contents) // batches
    sampled_ns = sum(called.total() for called in times.values())
    lines = [_of_batch(line, called, samples, sampled_ns, batch_ns) for line, called in times.items()]
    return OfWorkers(batches, batch_ns, sum(content["batch_cpu_ns"] for content in contents) // batches, lines)


def _of_batch(
    line: Line, called: Counter[str | None], samples: Counter[Line], sampled_ns: int, batch_ns: int
) -> LineTime:
    share = called.total() / sampled_ns
    error = (share * (1 - share) / samples.total()) ** 0.5
    ((longest, _),) = called.most_common(1)
    return LineTime(
        **line._replace(called=longest)._asdict(),
        phase=None,
        thread="worker",
        samples=samples[line],
        time_ns=round(share * batch_ns),
        error_ns=round(error * batch_ns),
        waits=0.0,
    )


def _worker_loop(*args: Any, **kwargs: Any) -> None:
    """Run a worker as torch does, with a sampler that sleeps until it is wanted."""
    dormant = _install()
    try:
        _torchs_loop(*args, **kwargs)
    finally:
        if dormant is not None:
            dormant.leave()


_torchs_loop: Callable[..., None] = worker._worker_loop
"""A worker that is spawned imports this module anew, before anything is replaced."""


def _install() -> _Dormant | None:
    """Return the sampler; a worker without one, because a file or a thread cannot be made, is still a worker."""
    run, parent = os.environ.get(VARIABLE), multiprocessing.parent_process()
    if run is None or parent is None or parent.pid is None:
        return None
    try:
        # A worker that was spawned has imported torch, and made a file as if it were to train.
        lines_flag(Path(run), os.getpid()).unlink(missing_ok=True)
        dormant = _Dormant(lines_flag(Path(run), parent.pid))
        dormant.start()
    except (OSError, ValueError, RuntimeError):
        return None
    return dormant


class _Dormant:
    """The sampler of one worker's process."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag
        self._shared = _map(flag, mmap.PROT_READ)
        self._thread = threading.get_ident()
        self._batches = self._batch_ns = self._batch_cpu_ns = 0
        self._ends = threading.Event()
        self._sampler = threading.Thread(target=self._run, name="profkit-lines", daemon=True)

    def start(self) -> None:
        self._sampler.start()

    def leave(self) -> None:
        self._ends.set()
        self._sampler.join()  # a thread that still ran while Python ends might take the process with it

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch_timed(*args: Any, **kwargs: Any) -> Any:
            began_ns, began_cpu_ns = perf_counter_ns(), process_time_ns()
            batch = original(*args, **kwargs)
            self._batches += 1
            self._batch_ns += perf_counter_ns() - began_ns
            self._batch_cpu_ns += process_time_ns() - began_cpu_ns
            return batch

        return fetch_timed

    def _run(self) -> None:
        while self._shared[0] == _DORMANT:
            if self._ends.wait(_POLL_S):
                return
        if self._shared[0] == _LOOKING:
            # The run's directory may be full, or gone: the worker says nothing of it, and goes on.
            with contextlib.suppress(OSError):
                self._look()

    def _look(self) -> None:
        looking = self._flag.with_name(f"{self._flag.name}-looking-{os.getpid()}")
        looking.touch()
        sampler = StackSampler(lambda: None, _FETCH_CODES)
        sampler.watch(self._thread, "worker")
        originals = [kind.fetch for kind in _FETCHERS]
        for kind in _FETCHERS:
            kind.fetch = self._timed(kind.fetch)
        sampler.start()
        while self._shared[0] == _LOOKING and not self._ends.wait(_POLL_S):
            pass
        sampler.step_ended()
        sampler.stop()
        for kind, original in zip(_FETCHERS, originals, strict=True):
            kind.fetch = original
        if self._flag.exists():  # else nobody waits for it any more
            self._write(sampler)
        looking.unlink(missing_ok=True)

    def _write(self, sampler: StackSampler) -> None:
        lines = [
            (*(describe(key[0][0]) if key[0] else Line(None, 0, "")), sampler.samples[key], times[0])
            for key, times in sampler.times.items()
        ]
        content = {
            "batches": self._batches,
            "batch_ns": self._batch_ns,
            "batch_cpu_ns": self._batch_cpu_ns,
            "lines": lines,
        }
        write_whole(self._flag.with_name(f"{self._flag.name}-done-{os.getpid()}"), json.dumps(content).encode())
