"""Looks for the lines behind the time of some steps, with nothing else on: where they wait, and where time goes.

In each worker of a data loader a sampler sleeps from its start, since a worker cannot be entered later. It looks while
a byte of a shared file says so, and only when the worker makes a batch: one behind a full queue waits, which costs
nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import multiprocessing
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time_ns, sleep
from typing import Any

from torch.utils.data._utils import fetch, worker

from profkit.capture.line_samples import Key, Stack, StackSampler, Waits, describe, name_inside
from profkit.capture.steps.times import times_without_waits
from profkit.files import write_whole
from profkit.run.lines import RARELY, Line, LineSteps, LineTime, RunLines, Thread, split_lines
from profkit.run.recording import lines_flag

FEWEST_STEPS = 3
MOST_STEPS = 60
ENOUGH_NS = 2_000_000_000


class LineRecorder:
    """Looks at the thread that starts it, at threads that call backward, and at workers of data loaders."""

    def __init__(self, phase: Callable[[], str | None], workers: WorkerLines | None = None) -> None:
        self._sampler = StackSampler(phase)
        self._waits = Waits(self._phase_here)
        self._phase = phase
        self._main = threading.get_ident()
        self._workers = workers
        self._steps: list[dict[str, int]] = []
        self._until_rare: tuple[int, tuple[dict[Any, int], ...]] | None = None
        """How many steps there were with the first rare one, and what had been counted."""

    def _phase_here(self) -> tuple[str | None, Thread]:
        """Return the phase and the kind of the calling thread; phases are those of the thread that trains."""
        return (self._phase(), "main") if threading.get_ident() == self._main else (None, "backward")

    def start(self) -> None:
        self._sampler.watch(threading.get_ident(), "main")
        self._waits.start()
        if self._workers is not None:
            self._workers.start()
        self._sampler.start()

    def backward_begins(self) -> None:
        self._sampler.watch(threading.get_ident(), "backward")

    def step_ended(self, times: dict[str, int]) -> bool:
        """Note a step's times (`profkit.run.manifest.Samples`); return whether there are enough steps."""
        self._sampler.step_ended()
        self._steps.append(times)
        rare = self._find_rare()
        if rare and self._until_rare is None:
            self._until_rare = len(self._steps), self._sampler.copy_counts(self._counts())
        usual_ns = len(self._steps) * median(step["step_ns"] for step in self._steps)
        # One rare step does not say how often they come.
        has_enough = usual_ns >= ENOUGH_NS and len(rare) != 1
        return len(self._steps) >= (FEWEST_STEPS if has_enough else MOST_STEPS)

    def _find_rare(self) -> list[int]:
        """Return which steps took far longer than most; looking for lines began in the first, which counts for none."""
        times_ns = times_without_waits(self._steps)
        usual_ns = median(times_ns)
        return [at for at, time_ns in enumerate(times_ns) if at and time_ns > RARELY * usual_ns]

    def _counts(self) -> tuple[dict[Any, int], ...]:
        sampler, waits = self._sampler, self._waits
        return sampler.samples, sampler.unlocked_at, sampler.inside, waits.counts, waits.inside

    def _leave_out_first_rare(self) -> bool:
        """Leave out the steps up to a rare one that took far longer than those that came later; return whether it did.

        An evaluation for the first time allocates its memory, and has cuDNN choose its kernels.
        """
        first, *later = self._find_rare() or [0]
        took_ns = times_without_waits(self._steps)
        steps, counted = self._until_rare or (0, ())
        if steps != first + 1 or not later or took_ns[first] < RARELY * max(took_ns[at] for at in later):
            return False
        self._steps = self._steps[steps:]
        self._sampler.leave_out(steps)
        for counts, before in zip(self._counts(), counted, strict=True):
            for key, count in before.items():
                counts[key] -= count
                if not counts[key]:
                    del counts[key]
        return True

    def forget(self) -> None:
        """Leave Python as it was in this process, a forked copy in which nobody samples."""
        self._sampler.forget()
        self._waits.forget()

    def stop(self) -> RunLines | None:
        try:
            self._sampler.stop()
            self._waits.stop()
        finally:
            of_workers = None if self._workers is None else self._workers.stop()
        if not self._steps:
            return None
        is_after_rare = self._leave_out_first_rare()
        rows = _merge(self._sampler, self._waits, len(self._steps))
        of_workers = of_workers or OfWorkers()
        rows += of_workers.lines
        rows.sort(key=lambda row: (-row.time_ns, -row.waits))
        steps = LineSteps(
            tuple(self._steps),
            of_workers.batches,
            of_workers.batch_ns,
            self._waits.unknown,
            batch_cpu_ns=of_workers.batch_cpu_ns or None,
            is_after_rare=is_after_rare,
        )
        return split_lines(steps, rows)


_Row = tuple[Line, str | None, Thread, bool]
"""A line apart from what it calls, its phase, its thread, and whether it has called the line that ran."""


@dataclass
class _Total:
    """What a row took in each step, what its line called, what called it and where it was, with the time of each."""

    times: list[int]
    called: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    callers: Counter[str | None] = field(default_factory=Counter)
    inside: Counter[str | None] = field(default_factory=Counter)
    waits_inside: Counter[str | None] = field(default_factory=Counter)
    waits_in: Counter[str | None] = field(default_factory=Counter)
    samples: int = 0
    waits: int = 0
    waiting_ns: int = 0

    def add(self, times: Sequence[int], called: str | None, caller: str | None, samples: int) -> None:
        """Add what the line took in each step with one stack."""
        self.callers[caller] += sum(times)
        self.samples += samples
        for step, time_ns in enumerate(times):
            self.times[step] += time_ns
        if called is not None:
            self.called[called] += sum(times)


def _merge(sampler: StackSampler, waits: Waits, steps: int) -> list[LineTime]:
    totals: defaultdict[_Row, _Total] = defaultdict(lambda: _Total([0] * steps))
    waiting: Counter[Key] = Counter()
    for (key, spot), time_ns in sampler.unlocked_at.items():
        waiting[key] += time_ns if spot in waits.spots else 0
    for (key, code), time_ns in sampler.inside.items():
        totals[_first_row_of(*key)].inside[name_inside(code)] += time_ns
    for (key, code), count in waits.inside.items():
        totals[_first_row_of(*key)].waits_inside[name_inside(code)] += count
    for key, times in sampler.times.items():
        stack, phase, thread = key
        for row, called, caller in _rows_of(_describe_stack(stack), phase, thread):
            totals[row].add(times, called, caller, sampler.samples[key])
            totals[row].waiting_ns += waiting[key]
    for (stack, phase, thread), count in waits.counts.items():
        for row, called, caller in _rows_of(_describe_stack(stack), phase, thread):
            totals[row].waits += count
            totals[row].callers[caller] += 0 if totals[row].samples else count
            totals[row].waits_in[called] += count
            if called is not None:
                totals[row].called[called] += 0
    return [_line_time(row, total, steps) for row, total in totals.items()]


def _rows_of(stack: Sequence[Line], phase: str | None, thread: Thread) -> Iterator[tuple[_Row, str | None, str | None]]:
    """Yield the row of the line that runs, then those of its callers; one that calls itself counts once.

    With each comes what it calls, and the line that called it.
    """
    distinct: dict[tuple[str | None, int], Line] = {}
    for line in stack:
        distinct.setdefault((line.file, line.line), line)
    lines = list(distinct.values())
    callers = [f"{line.file}:{line.line} {line.function}" for line in lines[1:]]
    for at, (line, caller) in enumerate(zip_longest(lines, callers)):
        yield (line._replace(called=None), phase, thread, at > 0), line.called, caller


def _describe_stack(stack: Stack) -> list[Line]:
    return [*map(describe, stack)] or [Line(None, 0, "")]


def _first_row_of(stack: Stack, phase: str | None, thread: Thread) -> _Row:
    return next(_rows_of(_describe_stack(stack), phase, thread))[0]


def _name_most(counts: Counter[str | None]) -> str | None:
    """Return what has more than half of some counts, None if nothing has."""
    ((most, count),) = counts.most_common(1) or [(None, 0)]
    return most if 2 * count > counts.total() else None


def _line_time(row: _Row, total: _Total, steps: int) -> LineTime:
    mean = sum(total.times) / steps
    squares = sum((time_ns - mean) ** 2 for time_ns in total.times)
    error = math.sqrt(squares / (steps - 1) / steps) if steps > 1 else mean
    called = max(total.called, key=lambda name: total.called[name], default=None)
    waits_in = _name_most(total.waits_in)
    line, phase, thread, is_caller = row
    return LineTime(
        **line._replace(called=called)._asdict(),
        phase=phase,
        thread=thread,
        samples=total.samples,
        time_ns=round(mean),
        error_ns=round(error),
        waits=total.waits / steps,
        waiting_ns=round(total.waiting_ns / steps),
        is_caller=is_caller,
        inside=_name_most(total.waits_inside or total.inside),
        caller=_name_most(total.callers),
        waits_in=None if waits_in == called else waits_in,
    )


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
        self._shared[0] = _OVER
        self._uninstall()
        deadline = perf_counter_ns() + int(_PATIENCE_S * 1e9)
        while self._files("looking") and perf_counter_ns() < deadline:
            sleep(_POLL_S)
        contents = [json.loads(path.read_text(encoding="utf-8")) for path in self._files("done")]
        self._remove()
        return _join(contents)

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
    batches = sum(content["batches"] for content in contents)
    if not batches:
        return OfWorkers()
    totals: defaultdict[_Row, _Total] = defaultdict(lambda: _Total([0]))
    for stack, samples, time_ns, inside in (entry for content in contents for entry in content["stacks"]):
        for row, called, caller in _rows_of([Line(*line) for line in stack], None, "worker"):
            totals[row].add([time_ns], called, caller, samples)
            totals[row].inside.update({} if row[-1] else dict(inside))
    batch_ns = sum(content["batch_ns"] for content in contents) // batches
    own = [total for (*_, is_caller), total in totals.items() if not is_caller]
    sampled_ns, samples = sum(sum(total.times) for total in own), sum(total.samples for total in own)
    lines = [_of_batch(_line_time(row, total, 1), sampled_ns, samples, batch_ns) for row, total in totals.items()]
    return OfWorkers(batches, batch_ns, sum(content["batch_cpu_ns"] for content in contents) // batches, lines)


def _of_batch(line: LineTime, sampled_ns: int, samples: int, batch_ns: int) -> LineTime:
    share = line.time_ns / sampled_ns
    error = (share * (1 - share) / samples) ** 0.5
    return replace(line, time_ns=round(share * batch_ns), error_ns=round(error * batch_ns))


def _worker_loop(*args: Any, **kwargs: Any) -> None:
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
        dormant.time_batches()
        dormant.start()
    except (OSError, ValueError, RuntimeError):
        return None
    return dormant


class _Dormant:
    """Times a worker's batches from its start, for one may take longer than anybody looks; and looks for its lines."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag
        self._shared = _map(flag, mmap.PROT_READ)
        self._thread = threading.get_ident()
        self._batches = self._batch_ns = self._batch_cpu_ns = 0
        self._has_begun = False
        self._ends = threading.Event()
        self._sampler = threading.Thread(target=self._run, name="profkit-lines", daemon=True)

    def start(self) -> None:
        self._sampler.start()

    def leave(self) -> None:
        self._ends.set()
        self._sampler.join()  # a thread that still ran while Python ends might take the process with it

    def time_batches(self) -> None:
        """Time all that this process fetches but the first batch, for which files are opened and modules imported."""
        for kind in _FETCHERS:
            kind.fetch = self._timed(kind.fetch)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch_timed(*args: Any, **kwargs: Any) -> Any:
            began_ns, began_cpu_ns = perf_counter_ns(), process_time_ns()
            batch = original(*args, **kwargs)
            if self._has_begun:
                self._batches += 1
                self._batch_ns += perf_counter_ns() - began_ns
                self._batch_cpu_ns += process_time_ns() - began_cpu_ns
            self._has_begun = True
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
        sampler.start()
        while self._shared[0] == _LOOKING and not self._ends.wait(_POLL_S):
            pass
        sampler.step_ended()
        sampler.stop()
        if self._flag.exists():  # else nobody waits for it any more
            self._write(sampler)
        looking.unlink(missing_ok=True)

    def _write(self, sampler: StackSampler) -> None:
        inside: defaultdict[Key, Counter[str | None]] = defaultdict(Counter)
        for (key, code), time_ns in sampler.inside.items():
            inside[key][name_inside(code)] += time_ns
        stacks = [
            (_describe_stack(key[0]), sampler.samples[key], times[0], list(inside[key].items()))
            for key, times in sampler.times.items()
        ]
        content = {
            "batches": self._batches,
            "batch_ns": self._batch_ns,
            "batch_cpu_ns": self._batch_cpu_ns,
            "stacks": stacks,
        }
        write_whole(self._flag.with_name(f"{self._flag.name}-done-{os.getpid()}"), json.dumps(content).encode())
