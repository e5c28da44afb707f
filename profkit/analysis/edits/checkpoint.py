"""Checkpointing of modules, or of other ranges: keep a call's inputs alone, and compute the rest again for backward.

A call is a range of the forward pass. What was allocated in it belongs to one of these:

- freed within the call, or later in the forward pass: stays as recorded;
- kept for the call's own backward pass: freed when the call ends (autocast's copies of parameters, which its cache
  holds, when the forward pass ends). It is allocated again where that backward pass begins, and freed as recorded;
- kept for others (the call's output, which the next layer keeps as its input): stays as recorded.

Nothing records which call a free in the backward pass belongs to. But backward runs in the reverse order: whatever was
allocated after the call ended, and the call's output (the last thing that it allocated and that is still there when it
ends), is freed in the backward pass of what followed the call. So the first allocation after the last of those frees
begins the call's own backward pass, and what the call allocated and that is freed later was kept for it.

What is computed again allocates what the call did, in the same order, up to the last tensor that is kept: there torch
stops (torch/utils/checkpoint.py, early stop).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from profkit.analysis.edits.change import CannotModelError, Change
from profkit.analysis.edits.stream import Bools, Program, Stream
from profkit.names import BACKWARD, INFERENCE, OPTIMIZER, PHASES, RECOMPUTE, kind_of
from profkit.snapshot.columns import Annotation

_EVERY = "every="
_NO_FORWARD = (BACKWARD, OPTIMIZER, INFERENCE)
_SHOWN_KINDS = 8
_TINY = 256
"""What is so much smaller than the largest allocation that outlives a call is not its output: statistics, a mask."""


@dataclass(frozen=True)
class Call:
    """A range of a forward pass, as moments, and the backward pass that follows it."""

    name: str
    begin: int
    end: int
    backward_begin: int
    backward_end: int


def edit_checkpoint(program: Program, stream: Stream, text: str) -> Change:
    """Checkpoint the ranges that match ``GLOB``, or of ``GLOB:every=K`` every K-th of them, from the first on."""
    glob, every = _parse(text)
    names = outermost_ranges(program, glob)
    if not names:
        kinds = list(dict.fromkeys(kind_of(one.name) for one in _ranges(program)))
        known = f"; ranges are {', '.join(kinds[:_SHOWN_KINDS])} …" if kinds else ": the snapshot has no ranges"
        raise CannotModelError(f"no range of a forward pass matches {glob!r}{known}")
    chosen = tuple(names[::every])
    calls = list(_calls(program, set(chosen)))
    if not calls:
        raise CannotModelError(f"no backward pass follows the ranges that match {glob!r}")
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
    return Change(stream, f"{len(chosen)} of {len(names)} ranges, {count} calls", unknown, chosen)


def outermost_ranges(program: Program, glob: str) -> list[str]:
    """Return the names of the forward pass's ranges that match, in order, without those within others that match.

    A glob may leave out the first parts of a module's name: ``h.*`` matches ``transformer.h.0``.
    """
    found: dict[str, None] = {}
    end = -1
    for one in _ranges(program):
        if one.start_us < end or not (fnmatchcase(one.name, glob) or fnmatchcase(one.name, f"*.{glob}")):
            continue
        end = one.end_us or one.start_us
        found[one.name] = None
    return list(found)


def _parse(text: str) -> tuple[str, int]:
    glob, _, every = text.rpartition(f":{_EVERY}")
    if not glob:
        return text, 1
    if not every.isdecimal() or not int(every):
        raise CannotModelError(f"every={every}: write how many modules share one checkpoint, such as every=2")
    return glob, int(every)


def _ranges(program: Program) -> Iterator[Annotation]:
    """Yield the ranges of the forward passes by their beginning, the outer before the inner ones."""
    timeline = program.memory.timeline
    others = [phase for phase in timeline.phases if phase.name in _NO_FORWARD] + list(timeline.recomputations)
    starts = np.array([phase.start_us for phase in sorted(others, key=lambda one: one.start_us)], dtype=np.int64)
    ends = np.array([phase.end_us for phase in sorted(others, key=lambda one: one.start_us)], dtype=np.int64)
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    closed = (one for one in program.memory.device.annotations if one.end_us is not None)
    for one in sorted(closed, key=lambda one: (one.start_us, -(one.end_us or 0))):
        at = int(np.searchsorted(starts, one.start_us, "right")) - 1
        is_inside = at >= 0 and one.start_us < ends[at]
        if not is_inside and one.name not in (*PHASES, RECOMPUTE):
            yield one


def _calls(program: Program, names: set[str]) -> Iterator[Call]:
    passes, timeline = program.backward_passes, program.memory.timeline
    starts = [begin for begin, _ in passes]
    end_us = -1
    for one in _ranges(program):
        if one.name not in names or one.start_us < end_us or one.end_us is None:
            continue
        end_us = one.end_us
        begin = int(np.searchsorted(timeline.times_us, one.start_us, "left"))
        end = timeline.moment_at(one.end_us)
        following = int(np.searchsorted(starts, end))
        if begin < end and following < len(passes):
            yield Call(one.name, begin, end, *passes[following])


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
    """Return which request is the call's output: the last that is alive at its end and not tiny beside the others."""
    is_alive = in_call & (stream.requests.freed >= call.end)
    sizes = np.where(is_alive, stream.requests.requested_bytes, 0)
    is_output = np.zeros(len(stream), dtype=np.bool_)
    if is_alive.any():
        found = np.flatnonzero(is_alive & (sizes * _TINY >= sizes.max()))
        is_output[found[stream.requests.born[found].argmax()]] = True
    return is_output


def _hold_inputs(stream: Stream, call: Call, until: float) -> Stream:
    """Return the stream with what the call was given and its caller then dropped held until its backward pass ends."""
    born, freed = stream.requests.born, stream.requests.freed
    following = born[(born >= call.end) & stream.is_recorded].min(initial=np.inf)
    is_input = (born < call.begin) & (freed >= call.begin) & (freed <= following) & (freed < call.backward_begin)
    return stream.freed_at(is_input, np.full(np.count_nonzero(is_input), until))
