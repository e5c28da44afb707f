"""Checkpointing of modules, or of other ranges: keep a call's inputs alone, and compute the rest again for backward.

A call is a range of the forward pass. What was allocated in it belongs to one of these:

- freed within the call, or later in the forward pass: stays as recorded;
- kept for the call's own backward pass: freed when the call ends (autocast's copies of parameters, which its cache
  holds, when the forward pass ends). It is allocated again where that backward pass begins, and freed as recorded;
- kept for others (the call's output, which the next layer keeps as its input): stays as recorded.

Nothing records which call a free in the backward pass belongs to. But backward runs in the reverse order: whatever was
allocated after the call ended, and the call's output, is freed in the backward pass of what followed the call. So the
first allocation after the last of those frees begins the call's own backward pass, and what the call allocated and that
is freed later was kept for it.

What is computed again allocates what the call did, in the same order, up to the last tensor that is kept: there torch
stops (torch/utils/checkpoint.py, early stop).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby

import numpy as np

from profkit.analysis.edits.change import CannotModelError, Change
from profkit.analysis.edits.stream import Bools, Program, Stream
from profkit.names import BACKWARD, INFERENCE, MODEL, OPTIMIZER, PHASES, RECOMPUTE, kind_of

_FORM = re.compile(r"(?P<glob>.+?)(:(?P<how>every|group)=(?P<number>\d{1,6}))?$")
_NO_FORWARD = (BACKWARD, OPTIMIZER, INFERENCE)
_SHOWN_KINDS = 8
_TINY = 256
"""An output is not so much smaller than the largest allocation that outlives its call."""


@dataclass(frozen=True)
class Call:
    """A range, or a module's call, in a forward pass, as moments, and the backward pass that follows it."""

    name: str
    begin: int
    end: int
    backward_begin: int
    backward_end: int


def edit_checkpoint(program: Program, stream: Stream, text: str) -> Change:
    """Checkpoint the ranges or modules that match ``GLOB``.

    Of ``GLOB:every=K`` only every K-th, from the first on; of ``GLOB:group=K`` K that follow one another share one
    checkpoint.
    """
    match = _FORM.fullmatch(text)
    number = int(match["number"] or 1) if match else 0
    if match is None or not number:
        raise CannotModelError("write checkpoint:GLOB, checkpoint:GLOB:every=2 or checkpoint:GLOB:group=2")
    glob = match["glob"]
    calls = find_calls(program, glob)
    names = list(dict.fromkeys(call.name for call in calls))
    if not calls:
        kinds = list(dict.fromkeys(map(kind_of, forward_ranges(program))))
        known = f"; ranges are {', '.join(kinds[:_SHOWN_KINDS])} …" if kinds else ": the snapshot has no ranges"
        raise CannotModelError(f"nothing in a forward pass before a backward pass matches {glob!r}{known}")
    chosen = names[::number] if match["how"] == "every" else names
    calls = [call for call in calls if call.name in chosen]
    if match["how"] == "group":
        calls = list(_joined(calls, number))
    is_autocast = program.is_category("autocast copies")
    count = 0
    # The calls do not overlap: each is edited on its own, and what an edit adds is no part of another call.
    for call in calls:
        edited = _checkpoint(stream, call, is_autocast)
        count += len(edited) > len(stream)
        stream = edited
    if not count:
        raise CannotModelError(f"what matches {glob!r} keeps nothing for backward: is it checkpointed already?")
    unknown = ("what a checkpointed call keeps is freed within it; here it is freed when the call ends",)
    return Change(stream, f"{len(chosen)} of {len(names)} ranges, {count} calls", unknown, tuple(chosen))


def find_calls(program: Program, glob: str) -> list[Call]:
    """Return the calls of a forward pass that match and are followed by a backward pass, in order.

    Those within others that match are left out. A glob may leave out the first parts of a module's name: ``h.*``
    matches ``transformer.h.0``. Ranges are looked at first, then the modules that made allocations.
    """
    passes = program.backward_passes
    starts = [begin for begin, _ in passes]
    calls: list[Call] = []
    for name, begin, end in _outermost_ranges(program, glob) or _module_calls(program, glob):
        following = int(np.searchsorted(starts, end))
        if begin < end and following < len(passes):
            calls.append(Call(name, begin, end, *passes[following]))
    return calls


def forward_ranges(program: Program) -> list[str]:
    """Return the names of the forward passes' ranges, as they first began."""
    return list(dict.fromkeys(name for name, _, _ in _ranges(program)))


def _joined(calls: list[Call], number: int) -> Iterator[Call]:
    """Yield each ``number`` of calls before one backward pass as one."""
    for _, some in groupby(calls, lambda call: call.backward_begin):
        together = list(some)
        for at in range(0, len(together), number):
            yield replace(together[at], end=together[min(at + number, len(together)) - 1].end)


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def _outermost_ranges(program: Program, glob: str) -> list[tuple[str, int, int]]:
    found, end = [], -1
    for name, start_us, end_us in _ranges(program):
        if start_us >= end and _matches(name, glob):
            end = end_us
            begin = int(np.searchsorted(program.memory.timeline.times_us, start_us, "left"))
            found.append((name, begin, program.memory.timeline.moment_at(end_us)))
    return found


def _ranges(program: Program) -> Iterator[tuple[str, int, int]]:
    """Yield the ranges of the forward passes by their beginning, the outer before the inner ones, in microseconds."""
    timeline = program.memory.timeline
    others = [phase for phase in timeline.phases if phase.name in _NO_FORWARD] + list(timeline.recomputations)
    others.sort(key=lambda one: one.start_us)
    starts = np.array([phase.start_us for phase in others], dtype=np.int64)
    ends = np.maximum.accumulate(np.array([phase.end_us for phase in others], dtype=np.int64))
    closed = [(one.start_us, -one.end_us, one.name) for one in program.memory.device.annotations if one.end_us]
    for start_us, end_us, name in sorted(closed):
        at = int(np.searchsorted(starts, start_us, "right")) - 1
        if (at < 0 or start_us >= ends[at]) and name not in (*PHASES, RECOMPUTE):
            yield name, start_us, -end_us


def _module_calls(program: Program, glob: str) -> list[tuple[str, int, int]]:
    """Return stretches of forward passes in which all allocations are of one module that matches, or of modules in it.

    A module that several others share has the name that it has in the first of them. What it allocated between
    allocations of another one belongs to that.
    """
    starts = [begin for begin, _ in program.backward_passes]
    made = []
    for row in range(program.replay.start_count, len(program.replay)):
        if program.phases[row] not in (*_NO_FORWARD, RECOMPUTE):
            modules = program.memory.place_of(row).modules
            birth = int(program.replay.birth[row])
            made.append((modules[0][0].removeprefix(f"{MODEL}/") if modules else "", birth))
    runs = [(name, [birth for _, birth in some]) for name, some in groupby(made, lambda one: one[0])]
    units = [_unit_of(name, glob) for name, _ in runs]
    for at in range(1, len(runs) - 1):
        if units[at] is not None and units[at - 1] == units[at + 1] is not None:
            units[at] = units[at - 1]
    placed = [(unit, birth) for unit, (_, births) in zip(units, runs, strict=True) for birth in births]
    stretches = [
        (unit, [birth for _, birth in some])
        for (unit, _), some in groupby(placed, lambda one: (one[0], int(np.searchsorted(starts, one[1]))))
    ]
    ends = [births[0] for _, births in stretches[1:]] + [program.replay.event_count]
    found = []
    for (unit, births), end in zip(stretches, ends, strict=True):
        following = int(np.searchsorted(starts, births[-1]))
        if unit is not None and following < len(starts):
            found.append((unit, births[0], min(end, starts[following])))
    return found


def _unit_of(module: str, glob: str) -> str | None:
    """Return the outermost module around ``module``, or itself, that matches."""
    parts = module.split(".")
    names = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return next((name for name in names if _matches(name, glob)), None)


def _checkpoint(stream: Stream, call: Call, is_autocast: Bools) -> Stream:
    """Return the stream with one call checkpointed; unchanged if it keeps nothing for its backward pass."""
    requests = stream.requests
    born, freed = requests.born, requests.freed
    in_call = (born >= call.begin) & (born < call.end) & stream.is_recorded
    is_output = _output_of(stream, call, in_call)
    is_freed_in_backward = (freed >= call.backward_begin) & (freed < call.backward_end) & stream.is_recorded
    is_later = (born >= call.end) & (born < call.backward_begin)
    others_end = float(freed[is_freed_in_backward & (is_later | is_output)].max(initial=call.backward_begin))
    begins = float(born[(born > others_end) & stream.is_recorded].min(initial=np.inf))
    is_kept = in_call & is_freed_in_backward & (freed > begins)
    if not is_kept.any():
        return stream
    stays = is_kept & stream.of(is_autocast)
    own_end = float(freed[is_kept].max())
    again = np.flatnonzero(in_call & (born <= born[is_kept].max()))
    # Between the event before the backward pass's first allocation and that: the recorded order, squeezed.
    low, size = begins - 1, call.end - call.begin + 1
    births = low + (born[again] - call.begin + 1) / (size + 1)
    last = float(births.max())
    frees = low + (freed[again] - call.begin + 1) / (size + 1)
    over = np.nextafter(last, begins)
    frees = np.where(is_kept[again], freed[again], np.minimum(frees, over))
    edited = _hold_inputs(stream, call, own_end)
    edited = edited.freed_at(is_kept & ~stays, np.full(np.count_nonzero(is_kept & ~stays), call.end - 0.5))
    edited = edited.freed_at(stays, np.full(np.count_nonzero(stays), call.backward_begin - 0.5))
    return edited.with_copies(again, requests.requested_bytes[again], births, frees)


def _output_of(stream: Stream, call: Call, in_call: Bools) -> Bools:
    """Return which request is the call's output, if one is kept for backward.

    The output is the last that the call allocated. If that is given back in the forward pass, nothing keeps it. Else
    backward needs the output before all else that the call kept. (A call that writes its output into memory that it
    allocated earlier ends with another allocation.) Statistics and masks, which are tiny, are no output.
    """
    born, freed = stream.requests.born, stream.requests.freed
    is_alive = in_call & (freed >= call.end)
    sizes = np.where(is_alive, stream.requests.requested_bytes, 0)
    large = np.flatnonzero(is_alive & (sizes * _TINY >= sizes.max(initial=0)))
    is_output = np.zeros(len(stream), dtype=np.bool_)
    if len(large) and freed[large[born[large].argmax()]] >= call.backward_begin:
        is_output[large[freed[large].argmin()]] = True
    return is_output


def _hold_inputs(stream: Stream, call: Call, until: float) -> Stream:
    """Return the stream with what the call was given and its caller then dropped held until its backward pass ends."""
    born, freed = stream.requests.born, stream.requests.freed
    following = born[(born >= call.end) & stream.is_recorded].min(initial=np.inf)
    is_input = (born < call.begin) & (freed >= call.begin) & (freed <= following) & (freed < call.backward_begin)
    return stream.freed_at(is_input, np.full(np.count_nonzero(is_input), until))
