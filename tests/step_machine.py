"""A machine that runs a step as events in a queue: the host, streams and waits, apart from the replay's own loop.

A program is a list of `Doing`, in the order in which its threads hand each other the baton. The machine knows nothing
of causes: it advances a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from profkit.analysis.step_replay import COPY, HOST, KERNEL, LAUNCH, NONE, WAIT, StepColumns
from profkit.analysis.step_replay.replay import Constants


@dataclass(frozen=True)
class Doing:
    """One call: after ``gap_ns`` of Python, ``own_ns`` long.

    ``durations_ns`` are the operations that it launches on ``stream``; ``waits_for`` are numbers of operations, in the
    order of their launches, that the host waits for; ``stream_waits_for`` those that the first operation waits for.
    """

    gap_ns: int
    own_ns: int
    kind: int = HOST
    stream: int = 0
    durations_ns: tuple[int, ...] = ()
    waits_for: tuple[int, ...] = ()
    stream_waits_for: tuple[int, ...] = ()
    inside_ns: int = 0
    """Of a copy within its call: from the call's start to the copy's."""
    tail_ns: int = 0
    """Of a copy within its call: from the copy's end to the call's."""


@dataclass
class _Operation:
    call: int
    stream: int
    duration_ns: int
    awaits: tuple[int, ...]
    before: _Operation | None = None
    submitted_ns: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None


@dataclass
class Machine:
    """Runs a program; times are nanoseconds from its beginning."""

    program: Sequence[Doing]
    constants: Constants
    call_start_ns: list[int] = field(default_factory=list)
    call_end_ns: list[int] = field(default_factory=list)
    operations: list[_Operation] = field(default_factory=list)
    _pending: list[_Operation] = field(default_factory=list)
    _last: dict[int, _Operation] = field(default_factory=dict)
    _events: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0
    _now_ns: int = 0

    def run(self) -> Machine:
        """Run it to its end."""
        self._host = self._calls()
        self._wake = next(self._host)
        self._try_host()
        while self._events:
            self._now_ns, _, action = heapq.heappop(self._events)
            action()
            self._try_streams()
            self._try_host()
        assert len(self.call_end_ns) == len(self.program)
        assert all(operation.end_ns is not None for operation in self.operations)
        return self

    def _at(self, time_ns: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_ns, self._count, action))

    def _try_host(self) -> None:
        while self._wake is not None and self._wake():
            self._wake = next(self._host, None)

    def _until(self, time_ns: int) -> Callable[[], bool]:
        if time_ns > self._now_ns:
            self._at(time_ns, lambda: None)
        return lambda: self._now_ns >= time_ns

    def _calls(self) -> Iterator[Callable[[], bool]]:
        """Yield what the host waits for, one thing after another."""
        for number, doing in enumerate(self.program):
            yield self._until(self._now_ns + doing.gap_ns)
            begun = self._now_ns
            self.call_start_ns.append(begun)
            mine: list[_Operation] = []
            for at, duration in enumerate(doing.durations_ns):
                awaits = doing.stream_waits_for if at == 0 else ()
                mine.append(_Operation(number, doing.stream, duration, awaits))
            if doing.kind == COPY:
                yield self._until(begun + doing.inside_ns)
                self._submit(mine, self._now_ns)
                yield lambda mine=mine: mine[-1].end_ns is not None  # type: ignore[misc]
                yield self._until(self._now_ns + doing.tail_ns)
            else:
                yield self._until(begun + doing.own_ns)
                self._submit(mine, self._now_ns + self.constants.latency_ns)
            if doing.waits_for:
                awaited = [self.operations[row] for row in doing.waits_for]
                pending = [one for one in awaited if one.end_ns is None]
                yield lambda awaited=awaited: all(one.end_ns is not None for one in awaited)  # type: ignore[misc]
                ended = max(one.end_ns or 0 for one in awaited)
                if pending or ended + self.constants.wake_ns > self._now_ns:
                    yield self._until(ended + self.constants.wake_ns)
            self.call_end_ns.append(self._now_ns)

    def _submit(self, operations: list[_Operation], time_ns: int) -> None:
        self.operations += operations
        self._pending += operations
        for operation in operations:
            operation.submitted_ns = time_ns
            operation.before, self._last[operation.stream] = self._last.get(operation.stream), operation
        self._at(time_ns, lambda: None)

    def _try_streams(self) -> None:
        """Give each stream's next operation its time, once all that it waits for have theirs."""
        changed = True
        while changed:
            pending, self._pending = self._pending, []
            for operation in pending:
                awaited, before = [self.operations[row] for row in operation.awaits], operation.before
                if any(one.start_ns is None for one in [*awaited, *([before] if before else [])]):
                    self._pending.append(operation)
                    continue
                times = [operation.submitted_ns or 0, *(_ends(one) + self.constants.event_ns for one in awaited)]
                if before is not None:
                    times.append(_ends(before) + self.constants.gap_ns)
                operation.start_ns = max(times)
                ends = operation.start_ns + operation.duration_ns
                self._at(ends, lambda operation=operation, ends=ends: setattr(operation, "end_ns", ends))  # type: ignore[misc]
            changed = len(self._pending) < len(pending)

    @property
    def step_ns(self) -> int:
        """How long it took."""
        return max(max(self.call_end_ns, default=0), max((one.end_ns or 0 for one in self.operations), default=0))

    def columns(self) -> StepColumns:
        """Return what a profiler records of it."""
        launcher = [one.call for one in self.operations]
        streams = [one.stream for one in self.operations]
        edges = np.searchsorted(launcher, np.arange(len(self.program) + 1)).tolist()
        ends = [0, *self.call_end_ns]
        last: dict[int, int] = {}
        previous, awaited = [], {}
        for row, operation in enumerate(self.operations):
            previous.append(last.get(operation.stream, NONE))
            last[operation.stream] = row
            if operation.awaits:
                awaited[row] = list(operation.awaits)
        return StepColumns(
            call=np.arange(len(self.program)),
            thread=[0] * len(self.program),
            before=list(range(-1, len(self.program) - 1)),
            gap_ns=[start - end for start, end in zip(self.call_start_ns, ends, strict=False)],
            own_ns=[end - start for start, end in zip(self.call_start_ns, self.call_end_ns, strict=True)],
            kind=[doing.kind for doing in self.program],
            targets=[doing.waits_for for doing in self.program],
            launches=list(pairwise(edges)),
            call_start_ns=self.call_start_ns,
            call_end_ns=self.call_end_ns,
            row=np.arange(len(self.operations)),
            launcher=launcher,
            operation=[KERNEL] * len(launcher),
            stream=streams,
            previous=previous,
            duration_ns=[one.duration_ns for one in self.operations],
            awaited=awaited,
            start_ns=[one.start_ns or 0 for one in self.operations],
            end_ns=[one.end_ns or 0 for one in self.operations],
            slots=[1] * len(launcher),
        )


def steady_step_ns(program: Sequence[Doing], constants: Constants) -> int:
    """Return how long a step takes that makes this program again and again, waiting nowhere but where it does."""
    few, many = (Machine(_repeat(program, times), constants).run().step_ns for times in (4, 8))
    return (many - few) // 4


def _repeat(program: Sequence[Doing], times: int) -> list[Doing]:
    count = sum(len(doing.durations_ns) for doing in program)
    return [
        replace(
            doing,
            waits_for=tuple(row + turn * count for row in doing.waits_for),
            stream_waits_for=tuple(row + turn * count for row in doing.stream_waits_for),
        )
        for turn in range(times)
        for doing in program
    ]


def _ends(operation: _Operation) -> int:
    assert operation.start_ns is not None
    return operation.start_ns + operation.duration_ns


def programs(st: Any) -> Any:
    """Return a hypothesis strategy of programs: calls, launches on three streams, waits, copies."""

    @st.composite
    def draw_program(draw: Any) -> list[Doing]:
        program: list[Doing] = []
        launched = 0
        for _ in range(draw(st.integers(1, 40))):
            gap, own = draw(st.integers(0, 30_000)), draw(st.integers(0, 15_000))
            what = draw(st.sampled_from(["host", "launch", "launch", "launch", "wait", "copy"]))
            stream = draw(st.integers(0, 2))
            duration = draw(st.integers(1, 200_000))
            awaited = (draw(st.integers(0, launched - 1)),) if launched and draw(st.booleans()) else ()
            if what == "launch":
                program.append(Doing(gap, own, LAUNCH, stream, (duration,), stream_waits_for=awaited))
                launched += 1
            elif what == "copy":
                inside, tail = draw(st.integers(0, 5_000)), draw(st.integers(0, 5_000))
                program.append(Doing(gap, 0, COPY, stream, (duration,), inside_ns=inside, tail_ns=tail))
                launched += 1
            elif what == "wait" and awaited:
                program.append(Doing(gap, own, WAIT, waits_for=awaited))
            else:
                program.append(Doing(gap, own))
        return program

    return draw_program()
