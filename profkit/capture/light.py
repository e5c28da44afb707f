"""The light record: what each of several ranks leaves of its steps, with or without a profiler.

It begins with the first step at which torch.distributed has several ranks, and goes on to the end of the process. It
waits for nothing: CUDA events and the flight recorder's collectives are read some steps later, when the GPU has passed
them. Which steps are kept and when the file is written depends on the step's number and on its collectives, not on the
time, so that all ranks stop for it in the same steps. Whatever fails in here ends the record, never the program.

How long NCCL's collectives take is known only where the program asked for it (TORCH_NCCL_ENABLE_TIMING). How long a
backward pass waited for them at its end is known from its own events, and is noted with the last of them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns, sleep, time_ns
from typing import Any

import torch
from torch import distributed

from profkit.capture import say
from profkit.capture.flight_recorder import RING, Collective, FlightRecorder, several_ranks, turn_on
from profkit.capture.patches import call_first, patch
from profkit.capture.steps.conditions import GpuClock
from profkit.capture.steps.times import Mark, Span, give_back, mark_on_gpu
from profkit.names import step_range
from profkit.run.directory import LIGHT, name_of_rank
from profkit.run.job import node_number
from profkit.run.light_record import (
    WAITS_FOR_ALL,
    Collectives,
    LightRecord,
    StepLines,
    StepRecord,
    group_line,
    header_line,
)

_ALL, _MANY = 128, 10_000
_OFTEN, _SELDOM = 512, 4096
_IN_ROW, _LATER = 32, 8
"""All of the first 128 steps are kept and all that are recorded, then 32 in a row of every 512, and after 10,000 steps
of every 4,096: an hour of steps of 20 ms leaves some 2,000. The last of a row are written 8 steps after its end, when
their collectives are known."""

_FIRST_PERIOD, _LONGEST_PERIOD = 8, 1024
"""While steps are kept, the file is written after this many at least and at most; always a power of two."""

_MOST_RECORDED = 1_000
"""Of the recorded steps this many are kept: the others count like those before and after them."""

_AT_LEAST_EVERY_NS = 5_000_000_000
"""A process that is killed loses what was not written yet: no more than this, unless writing takes too much time."""

_SHARE = 200
"""Writing may take 1 part in 200 of the steps' time."""

_PATIENCE_S, _POLL_S = 0.5, 0.02
"""How long the end of the process may wait for torch's watchdog to see the last collectives."""

_CAUGHT_UP_NS = 200_000
"""A GPU that passes a mark this soon after the host made it had nothing left to do: it waited for the host."""

_READ_TOGETHER = 16
"""The events of this many steps are read at once: that takes 40 µs a step on an H200's host, step by step 70 µs."""

_LOOK_EVERY_NS = 1_000_000_000
"""The allocator and NVML are asked about once a second: together they take some 20 µs."""


_UNREAD = Collectives()


@dataclass
class _Step(StepRecord):
    """A step that was kept: times in numbers, by the host's own clock, and events until the GPU has passed them.

    Few objects are kept for long: many would have Python look for garbage among all that the program holds.
    """

    number: int = 0
    spans: list[Span] = field(default_factory=list)
    waits: Sequence[tuple[int, int, int]] = ()
    """Of each backward pass on the GPU: when the host began and ended it, and how long the GPU waited at its end."""
    is_delayed: bool = False
    collectives: Collectives = _UNREAD


class LightRecorder:
    """Writes this rank's record into ``run``, from what the session says of steps.

    Args:
        first: the number of the step that is called ``step 0``; those before it are left out.
    """

    def __init__(self, run: Path, first: int = 0) -> None:
        self._run = run
        self._first = first
        self._is_over = False
        self._path: Path | None = None
        self._number = self._last_kept = -1
        self._recorded = 0
        """How many steps that ranks may record in full have begun."""
        self._keeps_all = False
        """Whether the steps before and after this one are kept too, not 32 in a row alone."""
        self._step: _Step | None = None
        self._steps: list[_Step] = []
        self._unread: deque[_Step] = deque()
        """Steps of which neither phases nor events were read: the GPU had not passed these, or nobody looked yet."""
        self._period = _FIRST_PERIOD
        self._flight = FlightRecorder()
        self._gpu_clock = GpuClock()
        self._groups: dict[str, int] = {}
        self._lines = StepLines()
        self._zero_ns = 0
        self._epoch_ns = 0
        self._left: tuple[int, int] = -2, 0
        """The number of the last step whose events were read, and when the GPU left its last phase."""
        self._gpu_zero: tuple[Mark, int] | None = None
        """A mark on the GPU whose phases are kept, and the host's time at which the GPU passed it."""
        self._zero_since = 0
        """The step before which it was made, if it was not in another step."""
        self._looked_ns = -_LOOK_EVERY_NS
        self._peak_bytes: int | None = None
        self._clock: tuple[int | None, tuple[str, ...]] = None, ()
        self._keeps = False

    def begin(self) -> None:
        turn_on()
        self._flight.watch_meshes()
        self._settle_before_groups_end()

    def step_ended(self, spans: list[Span]) -> None:
        self._harmless(self._end_step, spans)

    def step_begins(self, number: int, *, is_recorded: bool = False, is_left_out: bool = False) -> bool:
        """Step ``number`` begins, which may be one that ranks record in full; return whether its phases are wanted.

        One ``is_left_out`` in which something else slows the program.
        """
        self._keeps = False
        self._harmless(self._begin_step, number, is_recorded, is_left_out)
        return self._keeps

    @property
    def is_kept(self) -> bool:
        """Whether there are several ranks: of each of them a record is kept."""
        return self._path is not None

    def end(self) -> None:
        self._harmless(self._settle)
        self.stop()

    def stop(self) -> None:
        self._is_over = True
        self._step, self._steps, self._gpu_zero = None, [], None
        self._unread.clear()

    def _harmless(self, call: Callable[..., None], *args: Any) -> None:
        if self._is_over:
            return
        try:
            call(*args)
        except Exception as error:
            self.stop()
            say(f"the light record of this rank ends here ({type(error).__name__}: {error})")

    def _begin_step(self, number: int, is_recorded: bool, is_left_out: bool) -> None:
        if number <= self._number:  # something else counts as a step from now on
            self._steps, self._recorded = [], 0
            self._unread.clear()
            if self._path is not None:
                self._open()
        self._number = number
        if self._path is None and several_ranks():
            self._open()
        self._recorded += is_recorded
        self._keeps_all = number < _ALL or (is_recorded and self._recorded <= _MOST_RECORDED)
        is_due = self._keeps_all or number % _spacing(number) < _IN_ROW
        if self._path is None or number < self._first or is_left_out or not is_due:
            return
        self._keeps, self._last_kept = True, number
        if self._gpu_zero is None and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
            self._gpu_zero, self._zero_since = (mark_on_gpu(), perf_counter_ns()), number
        self._step = _Step(step_range(number - self._first), perf_counter_ns(), 0, number=number)

    def _end_step(self, spans: list[Span]) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._keep(step, spans)
        if self._steps and self._is_due():
            began_ns = perf_counter_ns()
            last = self._steps[-1]
            in_step = self._write(is_last=False, of=last)
            self._choose_period(perf_counter_ns() - began_ns, max(1, last.end_ns - last.start_ns), max(1, in_step))

    def _keep(self, step: _Step, spans: list[Span]) -> None:
        step.end_ns, step.spans = perf_counter_ns(), spans
        if torch.cuda.is_initialized():
            if step.end_ns - self._looked_ns >= _LOOK_EVERY_NS:
                self._look(step.end_ns)
            step.peak_bytes = self._peak_bytes
            step.sm_mhz, step.throttle = self._clock
        self._steps.append(step)
        self._unread.append(step)
        if len(self._unread) >= _READ_TOGETHER:
            self._read_passed()

    def _look(self, now_ns: int) -> None:
        self._looked_ns, self._clock = now_ns, self._gpu_clock.look()
        self._peak_bytes = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"]

    def _read_passed(self, *, is_last: bool = False) -> None:
        """Turn the marks of steps that the GPU has done into times: of many at once, which is faster.

        If nobody will look again, the others get their times on the host.
        """
        while self._unread:
            step = self._unread[0]
            spans = [span for span in step.spans if span.is_on_gpu]
            has_passed = not spans or spans[-1].last.event.query()
            if not has_passed and not is_last:
                break
            self._unread.popleft()
            start_ns = step.start_ns
            step.phases = tuple(
                (span.phase, span.first.host_ns - start_ns, span.last.host_ns - start_ns) for span in step.spans
            )
            step.spans = []
            if has_passed and spans and self._gpu_zero is not None and step.number >= self._zero_since:
                self._read_events(step, spans, *self._gpu_zero)

    def _is_due(self) -> bool:
        if self._number != self._last_kept:
            return self._number == self._last_kept + _LATER
        part = 1 if self._keeps_all else _spacing(self._number) // _IN_ROW
        return (self._number + 1) % max(_FIRST_PERIOD, self._period // part) == 0

    def _open(self) -> None:
        rank = distributed.get_rank()
        self._path = self._run / name_of_rank(LIGHT, rank)
        self._epoch_ns, self._zero_ns = time_ns(), perf_counter_ns()
        self._groups, self._lines = {}, StepLines()
        record = LightRecord(
            rank,
            distributed.get_world_size(),
            node=node_number(os.environ) or 0,
            device=torch.cuda.current_device() if torch.cuda.is_initialized() else None,
            clock_base_ns=self._epoch_ns,
        )
        self._path.write_text(header_line(record), encoding="utf-8")

    def _choose_period(self, took_ns: int, step_ns: int, in_step: int) -> None:
        """Write so often that no collective is lost, and so seldom that it costs little."""
        self._period = _FIRST_PERIOD
        while self._period < _LONGEST_PERIOD:
            is_seldom = self._period * step_ns >= _AT_LEAST_EVERY_NS or self._period * 4 * in_step >= RING
            if is_seldom and took_ns * _SHARE <= self._period * step_ns:
                break
            self._period *= 2

    def _settle(self) -> None:
        if self._path is None:
            return
        patience = 0.0
        if torch.cuda.is_initialized():
            patience = _PATIENCE_S
            self._look(perf_counter_ns())
            if self._steps:  # since the last look memory may have grown
                self._steps[-1].peak_bytes = self._peak_bytes
        self._flight.look()
        while patience > 0 and not self._flight.is_settled:
            sleep(_POLL_S)
            patience -= _POLL_S
            self._flight.look()
        self._write(is_last=True)

    def _settle_before_groups_end(self) -> None:
        """Write before the script destroys its process groups: with them torch forgets what it has not seen yet."""

        def note(group: Any = None, *_: Any, **__: Any) -> None:
            self._harmless(self._settle if group is None else self._flight.note_groups)

        patch("torch.distributed.destroy_process_group", call_first(note), stays=True)

    def _write(self, *, is_last: bool, of: _Step | None = None) -> int:
        """Append the steps of which all is known, or will not be known better; return the collectives of one step."""
        self._flight.look()
        self._read_passed(is_last=is_last)
        count = 0 if of is None else len(self._collectives_of(of))
        groups: list[str] = []
        records: list[StepRecord] = []
        for step in self._steps:
            mine = self._collectives_of(step)
            if not is_last and not (
                not step.spans and (step.is_delayed or all(collective.is_settled for collective in mine))
            ):
                break
            groups += self._new_groups(mine)
            step.collectives = self._columns(mine, step)
            step.start_ns, step.end_ns = step.start_ns - self._zero_ns, step.end_ns - self._zero_ns
            records.append(step)
        self._steps = self._steps[len(records) :]
        for step in self._steps:
            step.is_delayed = True
        self._flight.forget_before(self._on_our_clock(self._steps[0].start_ns if self._steps else perf_counter_ns()))
        if records and self._path is not None:
            lines = "".join(groups) + self._lines.of(records)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(lines)
        return count

    def _collectives_of(self, step: _Step) -> list[Collective]:
        return self._flight.between(self._on_our_clock(step.start_ns), self._on_our_clock(step.end_ns))

    def _on_our_clock(self, host_ns: int) -> int:
        return host_ns - self._zero_ns + self._epoch_ns

    def _new_groups(self, collectives: list[Collective]) -> list[str]:
        lines = []
        for collective in collectives:
            if collective.group not in self._groups:
                self._groups[collective.group] = len(self._groups)
                lines.append(group_line(self._flight.group(collective.group, self._groups[collective.group])))
        return lines

    def _read_events(self, step: _Step, spans: list[Span], before: Mark, host_ns: int) -> None:
        """The events are recorded anew later, but for the one that the next step's times count from. A process that has
        gone over to another GPU counts from a new one.
        """
        spans = [span for span in spans if span.first.device == before.device]
        if not spans:
            self._gpu_zero = None
            return
        zero = spans[0].first
        # Events far apart are compared in single precision: go on from here.
        self._gpu_zero = zero, host_ns + _between(before.event, zero.event)
        lag_ns = self._gpu_zero[1] - step.start_ns
        times = {id(zero.event): lag_ns}
        unused = [before.event]
        gpu_phases, waits = [], []
        for span in spans:
            for mark in span.marks:
                if id(mark.event) not in times:
                    times[id(mark.event)] = lag_ns + _between(zero.event, mark.event)
                    unused.append(mark.event)
            first, last, computed = span.first, span.last, span.computed
            gpu_phases.append((span.phase, times[id(first.event)], times[id(last.event)]))
            if computed is not None and id(computed.event) in times:
                waited_ns = times[id(last.event)] - times[id(computed.event)]
                waits.append((first.host_ns - step.start_ns, last.host_ns - step.start_ns, waited_ns))
        step.gpu_phases, step.waits = tuple(gpu_phases), waits
        step.launch_wait_ns = self._launch_wait(step, spans)
        give_back(zero.device, unused)

    def _launch_wait(self, step: _Step, spans: list[Span]) -> int:
        """If it passes a phase's first mark as soon as the host made it, it did no more since the phase before than
        what the host launched between them.
        """
        before, left_ns = self._left
        is_known, waited_ns = before == step.number - 1, 0
        for span, (_, begin, end) in zip(spans, step.gpu_phases, strict=True):
            if is_known and step.start_ns + begin - span.first.host_ns < _CAUGHT_UP_NS:
                waited_ns += max(step.start_ns + begin - left_ns, 0)
            is_known, left_ns = True, step.start_ns + end
        self._left = step.number, left_ns
        return waited_ns

    def _columns(self, collectives: list[Collective], step: _Step) -> Collectives:
        """The flight recorder does not say when one began on the GPU: not before it was called, and not before the one
        before it in its group had ended. That time stands for its start. What a backward pass waited for at its end is
        noted with the last collective that the host called in it.
        """
        zero_ns = self._on_our_clock(step.start_ns)
        ends: dict[str, int] = {}
        rows: list[tuple[Any, ...]] = []
        for one in collectives:
            called_ns = one.called_ns - zero_ns
            begins = max(called_ns, ends.get(one.group, called_ns))
            ends[one.group] = begins + (one.duration_ns or 0)
            times = (None, None) if one.duration_ns is None else (begins, ends[one.group])
            facts = self._groups[one.group], one.sequence, one.kind, one.dtype, one.bytes
            rows.append((*facts, called_ns, *times, None, None))
        columns = Collectives(*map(list, zip(*rows, strict=True)))
        for begin, end, waited_ns in step.waits:
            inside = [at for at, called_ns in enumerate(columns.called_ns) if begin <= (called_ns or 0) < end]
            if inside and columns.kind[inside[-1]] in WAITS_FOR_ALL:
                columns.exposed_ns[inside[-1]] = waited_ns
        return columns


def _spacing(number: int) -> int:
    return _OFTEN if number < _MANY else _SELDOM


def _between(first: Any, last: Any) -> int:
    return round(first.elapsed_time(last) * 1_000_000)
