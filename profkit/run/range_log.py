"""The log of ranges that a process leaves beside a trace of CUDA activities alone, and how the two become one trace.

torch.profiler keeps no range without CPU activities, and names a thread by a part of its handle. The log has its own
times, on the clock that the trace's times are converted to, and the threads' handles and numbers. Joined, the ranges
are rows of category ``user_annotation``, as torch.profiler itself writes them, and each thread's rows carry its number.

This is done once the program has ended, for each process that left a log beside its trace.
"""

from __future__ import annotations

import gzip
import json
import shutil
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profkit.errors import ProfkitError, RunError
from profkit.files import PARTIAL, collector_off, whole_file, write_whole
from profkit.run.directory import LOG

LEFT = -1
"""In the place of a range's number: the thread's innermost range was left."""

_LOW_BITS = 2**32
_SIGN_BIT = 2**31
_SYNCHRONIZES = "DeviceSynchronize"
_FARTHEST_NS = 50_000_000
"""How far apart the two clocks may be."""
_MOST_ACROSS = 0.01
"""The share of calls that may lie across the edge of a range on their own thread, which no call does."""
_EVENTS = "traceEvents"
_NCCL = "nccl"
_COUNTS = {"In msg nelems", "Out msg nelems"}

Event = dict[str, Any]


class RangeLogError(ProfkitError):
    """The log and the trace do not fit together."""


@dataclass(frozen=True)
class ThreadEntries:
    """What one thread entered and left.

    ``entries`` holds pairs: a range's number among `RangeLog.names` or `LEFT`, and the time in ns since the epoch.
    ``handle`` is what pthread calls the thread, ``number`` what the kernel does.
    """

    handle: int
    number: int
    name: str
    entries: list[int]


@dataclass(frozen=True)
class ClockReading:
    """The clock before and after a thread waited for the GPU, a call that the trace holds too."""

    handle: int
    before_ns: int
    after_ns: int


@dataclass(frozen=True)
class LoggedCollective:
    """One collective that the process called, as PyTorch's flight recorder knows it.

    ``arguments`` are those that torch.profiler gives the kernel of a collective where it records CPU operators.
    """

    called_ns: int
    kind: str
    group: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class RangeLog:
    """All that a process logged until ``ended_ns``; ``readings`` holds those of each moment, the start's first."""

    process: int
    names: list[str]
    threads: list[ThreadEntries]
    readings: list[list[ClockReading]]
    ended_ns: int
    collectives: list[LoggedCollective] = field(default_factory=list)


@dataclass(frozen=True)
class Alignment:
    """How well the log's times fit the trace's: what is added to them, at the start and at the end, and the error left.

    ``across`` of ``calls`` calls lie across the edge of a range on their own thread: with equal clocks none does, and
    one would if the clocks differed by more than the error.
    """

    start_ns: int
    end_ns: int
    error_ns: int
    calls: int
    across: int

    def __str__(self) -> str:
        shift = f"{self.start_ns / 1000:+.1f} µs at the start and {self.end_ns / 1000:+.1f} µs at the end"
        return (
            f"ranges: the trace's clock is {shift} from the log's, ± {self.error_ns / 1000:.1f} µs; "
            f"{self.across:,} of {self.calls:,} calls lie across a range's edge"
        )


def write_range_log(path: Path, log: RangeLog) -> None:
    # As `asdict` does, which would copy each of the entries while the program waits.
    write_whole(path, json.dumps(log, default=vars, separators=(",", ":")).encode())


def read_range_log(path: Path) -> RangeLog:
    with collector_off():
        content = json.loads(path.read_bytes())
    threads = [ThreadEntries(**thread) for thread in content.pop("threads")]
    readings = [[ClockReading(**reading) for reading in moment] for moment in content.pop("readings")]
    collectives = [LoggedCollective(**collective) for collective in content.pop("collectives")]
    return RangeLog(threads=threads, readings=readings, collectives=collectives, **content)


def fold_handle(handle: int) -> int:
    """Return what torch.profiler calls a thread: the absolute value of its handle's low 32 bits as a signed number."""
    low = handle % _LOW_BITS
    return _LOW_BITS - low if low >= _SIGN_BIT else low


def join_ranges(trace: dict[str, Any], log: RangeLog) -> Alignment:
    """Put the log's ranges into a trace of torch.profiler's, and give all rows of its threads their own numbers.

    Raises:
        RangeLogError: two threads have one name in the trace, it lacks the calls by which clocks and threads are
            matched, or the times do not fit.
    """
    base_ns = int(trace.get("baseTimeNanoseconds") or 0)
    number_of = _numbers_by_handle(log)
    row_of = _rows_by_handle(trace, log)
    calls = _calls_by_row(trace, log.process, base_ns)
    clock = _Clock(*_fit_clocks(log, calls, row_of))
    ranges: list[Event] = []
    call_count = across = 0
    error_ns = clock.error_ns
    for handle, logged in _ranges_by_handle(log).items():
        rows = [(name, clock.on_trace(start), clock.on_trace(end)) for name, start, end in logged]
        made = calls.get(row_of[handle], [])
        crossing, room_ns = _fit_calls(made, sorted(edge for _, *edges in rows for edge in edges))
        call_count, across, error_ns = call_count + len(made), across + crossing, min(error_ns, room_ns)
        thread: Event = {"pid": log.process, "tid": number_of[handle]}
        ranges += ({**thread, **_range_row(name, start - base_ns, end - base_ns)} for name, start, end in rows)
    _describe_collectives(trace, log, clock, base_ns)
    fit = Alignment(clock.first.shift_ns, clock.last.shift_ns, error_ns, call_count, across)
    if fit.across > _MOST_ACROSS * fit.calls:
        raise RangeLogError(f"the times of ranges and calls do not fit together ({fit})")
    _renumber(trace, log.process, {row_of[handle]: number for handle, number in number_of.items()})
    trace[_EVENTS] += [*ranges, *_thread_names(log)]
    return fit


def _numbers_by_handle(log: RangeLog) -> dict[int, int]:
    """Return each thread's number; one that ended gave its handle to a later one, and both are one thread here."""
    numbers: dict[int, int] = {}
    for thread in log.threads:
        numbers.setdefault(thread.handle, thread.number)
    return numbers


def _rows_by_handle(trace: dict[str, Any], log: RangeLog) -> dict[int, int]:
    """Return what the trace's rows call each thread: a part of its handle, or its number as later Kinetos do."""
    numbers = _numbers_by_handle(log)
    folded = {handle: fold_handle(handle) for handle in numbers}
    if len(set(folded.values())) < len(folded):
        raise RangeLogError(f"two threads of process {log.process} have one name in the trace")
    there = {event.get("tid") for event in trace[_EVENTS] if event.get("pid") == log.process}
    return folded if there & set(folded.values()) else numbers


def _renumber(trace: dict[str, Any], process: int, numbers: dict[int, int]) -> None:
    for event in trace[_EVENTS]:
        if event.get("pid") == process and event.get("tid") in numbers:
            event["tid"] = numbers[event["tid"]]


_Call = tuple[int, int, str]
"""Start and end of a call of CUDA in ns since the epoch, and its name."""

_CALLS = frozenset({"cuda_runtime", "cuda_driver"})


def _calls_by_row(trace: dict[str, Any], process: int, base_ns: int) -> dict[int, list[_Call]]:
    found: defaultdict[int, list[_Call]] = defaultdict(list)
    for event in trace[_EVENTS]:
        if event.get("ph") == "X" and event.get("pid") == process and event.get("cat") in _CALLS:
            start = base_ns + round(event["ts"] * 1000)
            found[event["tid"]].append((start, start + round(event.get("dur", 0) * 1000), event["name"]))
    return found


@dataclass(frozen=True)
class _Fit:
    """What is added to the log's times at one moment to have them on the trace's clock, and how wrong that may be."""

    at_ns: int
    shift_ns: int
    error_ns: int


def _fit_clocks(log: RangeLog, calls: dict[int, list[_Call]], row_of: dict[int, int]) -> tuple[_Fit, _Fit]:
    fits = []
    for readings in log.readings:
        made = calls.get(row_of[readings[0].handle], [])
        fit = _fit(readings, [(start, end) for start, end, name in made if name.endswith(_SYNCHRONIZES)])
        if fit is None:
            raise RangeLogError("the trace lacks the calls that match its clock and threads with those of the ranges")
        fits.append(fit)
    if not fits:
        raise RangeLogError("no clock was read while it was recorded")
    return fits[0], fits[-1]


def _fit(readings: list[ClockReading], waits: list[tuple[int, int]]) -> _Fit | None:
    """Both clocks count the same nanoseconds, so that it is mostly none: one in the middle would be wrong by half of
    what the program spends around the wait.
    """
    first = readings[0]
    near = [wait for wait in waits if abs(wait[0] - first.before_ns) < _FARTHEST_NS]
    found = [shift for wait in near if (shift := _narrow(_shift(first, wait), readings[1:], near)) is not None]
    if not found:
        return None
    least, most = min(found, key=lambda shift: abs(_nearest_to_zero(*shift)))
    shift_ns = _nearest_to_zero(least, most)
    return _Fit(first.before_ns, shift_ns, max(most - shift_ns, shift_ns - least))


def _nearest_to_zero(least: int, most: int) -> int:
    return min(max(0, least), most)


def _shift(reading: ClockReading, wait: tuple[int, int]) -> tuple[int, int]:
    """Return the least and the most by which a reading is to be shifted so that the wait lies within it."""
    return wait[1] - reading.after_ns, wait[0] - reading.before_ns


def _narrow(
    shift: tuple[int, int], readings: list[ClockReading], waits: list[tuple[int, int]]
) -> tuple[int, int] | None:
    for reading in readings:
        both = [(max(shift[0], one[0]), min(shift[1], one[1])) for one in (_shift(reading, wait) for wait in waits)]
        shift = max(both, key=lambda one: one[1] - one[0])
        if shift[0] > shift[1]:
            return None
    return shift if shift[0] <= shift[1] else None


class _Clock:
    """Times of the log on the trace's clock, by the fits at both ends: clocks may run apart in between."""

    def __init__(self, first: _Fit, last: _Fit) -> None:
        self.first = first
        self.last = last
        self._drift = (last.shift_ns - first.shift_ns) / max(1, last.at_ns - first.at_ns)
        self.error_ns = max(first.error_ns, last.error_ns)

    def on_trace(self, time_ns: int) -> int:
        return time_ns + self.first.shift_ns + round(self._drift * (time_ns - self.first.at_ns))


def _ranges_by_handle(log: RangeLog) -> dict[int, list[tuple[str, int, int]]]:
    found: defaultdict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for thread in log.threads:
        found[thread.handle] += _ranges_of(thread, log)
    return found


def _ranges_of(thread: ThreadEntries, log: RangeLog) -> Iterator[tuple[str, int, int]]:
    opened: list[tuple[int, int]] = []
    for number, time_ns in zip(thread.entries[::2], thread.entries[1::2], strict=True):
        if number != LEFT:
            opened.append((number, time_ns))
        elif opened:
            entered, start = opened.pop()
            yield log.names[entered], start, time_ns
    for entered, start in reversed(opened):
        yield log.names[entered], start, log.ended_ns


def _describe_collectives(trace: dict[str, Any], log: RangeLog, clock: _Clock, base_ns: int) -> None:
    """A kernel belongs to the calls since the kernel before it. Several calls that became one kernel count together if
    they are of one kind and group; where several became several kernels, which is which is unknown.
    """
    launched_us = {
        event["args"].get("correlation"): event["ts"]
        for event in trace[_EVENTS]
        if event.get("cat") in _CALLS and event.get("pid") == log.process and event.get("args")
    }
    kernels = [
        (base_ns + round(launched_us[event["args"]["correlation"]] * 1000), event)
        for event in trace[_EVENTS]
        if event.get("cat") == "kernel"
        and event["name"].startswith(_NCCL)
        and event.get("args", {}).get("correlation") in launched_us
    ]
    calls = [(clock.on_trace(call.called_ns), call) for call in log.collectives]
    for block, events in _blocks_of_calls(calls, kernels):
        arguments = _arguments_of(block, len(events))
        for event in events:
            event["args"].update(arguments)


def _blocks_of_calls(
    calls: list[tuple[int, LoggedCollective]], kernels: list[tuple[int, Event]]
) -> Iterator[tuple[list[LoggedCollective], list[Event]]]:
    block: list[LoggedCollective] = []
    events: list[Event] = []
    moments: list[tuple[int, LoggedCollective | Event]] = [*calls, *kernels]
    for _, called in sorted(moments, key=lambda moment: moment[0]):
        if not isinstance(called, LoggedCollective):
            events.append(called)
            continue
        if events:
            yield block, events
            block, events = [], []
        block.append(called)
    if events:
        yield block, events


def _arguments_of(calls: list[LoggedCollective], kernels: int) -> dict[str, Any]:
    if len({(call.kind, call.group) for call in calls}) != 1:
        return {}
    arguments = dict(calls[0].arguments)
    for key in _COUNTS & arguments.keys():
        counts = [call.arguments.get(key) for call in calls]
        del arguments[key]
        if kernels == 1 and None not in counts:
            arguments[key] = sum(counts)
    return arguments


def _fit_calls(calls: list[_Call], edges: list[int]) -> tuple[int, int]:
    across, room_ns = 0, _FARTHEST_NS
    for start, end, _ in calls:
        before, after = bisect_right(edges, start), bisect_left(edges, end)
        across += before < after
        gaps = [start - edges[before - 1]] * (before > 0) + [edge - end for edge in edges[after : after + 1]]
        room_ns = min([room_ns, *gaps])
    return across, max(0, room_ns)


def _range_row(name: str, start_ns: int, end_ns: int) -> Event:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "cat": "user_annotation", "name": name, **times, "args": {}}


def _thread_names(log: RangeLog) -> Iterator[Event]:
    for thread in log.threads:
        row = {"ph": "M", "name": "thread_name", "ts": 0, "pid": log.process, "tid": thread.number}
        yield {**row, "args": {"name": f"thread {thread.number} ({thread.name})"}}


_PLAIN, _LOG = ".json", ".ranges"
_LEVEL = 6
"""How hard traces are zipped: the highest level takes three times as long for 2 % of the size."""


def plain_beside(path: Path) -> Path:
    return path.with_name(f"{PARTIAL}{path.name}{_PLAIN}")


def log_beside(path: Path) -> Path:
    return path.with_name(f"{PARTIAL}{path.name}{_LOG}")


def finish_traces(run: Path) -> dict[str, str]:
    """Make the traces that processes left unfinished, for they were killed.

    Return why there is no trace, by the name that it would have, for each that was refused.

    Raises:
        RunError: a trace cannot be written.
    """
    refused: dict[str, str] = {}
    for plain in sorted(run.glob(f"{PARTIAL}trace.*{_PLAIN}")):
        path = plain.with_name(plain.name.removeprefix(PARTIAL).removesuffix(_PLAIN))
        try:
            finish_trace(path)
        except RangeLogError as error:
            refused[path.name] = str(error)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; free some space, or name another directory with -o") from None
    return refused


def finish_trace(path: Path) -> None:
    """Make the trace ``path`` of what a process left for it, and say in the run's log how clocks fit, if there are two.

    Raises:
        RangeLogError: the trace and the log of ranges do not fit together.
        OSError: the trace cannot be written; ``filename`` is ``path``.
    """
    plain, log = plain_beside(path), log_beside(path)
    try:
        if log.exists():
            _join(plain, log, path)
        else:
            with whole_file(path) as partial, plain.open("rb") as source, gzip.open(partial, "wb", _LEVEL) as target:
                shutil.copyfileobj(source, target)
    finally:
        plain.unlink()
        log.unlink(missing_ok=True)


def _join(plain: Path, log: Path, path: Path) -> None:
    with collector_off():
        trace = json.loads(plain.read_bytes())
        fit = join_ranges(trace, read_range_log(log))
        with whole_file(path) as partial, gzip.open(partial, "wt", _LEVEL, encoding="utf-8") as target:
            json.dump(trace, target)
    with path.with_name(LOG).open("a", encoding="utf-8") as said:
        said.write(f"{path.name}: {fit}\n")
