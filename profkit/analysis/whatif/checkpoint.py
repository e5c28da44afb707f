"""Checkpointing of modules, or of other ranges: keep a call's inputs alone, and compute the rest again for backward.

A call is a range of the forward pass. What was allocated in it and freed in the forward pass stays as recorded, and so
does what is kept for others (its output, which the next layer keeps as its input). What is kept for the call's own
backward pass is freed once the operation after it has run (autocast's copies of parameters when the forward pass ends),
and allocated again where that backward pass begins.

Nothing records which call a free in the backward pass belongs to. But backward runs in the reverse order: what was
allocated after the call ended is freed in the backward pass of what followed it. After the last of those frees the
call's own begins, with the first allocation in its module, or else the first one after the free of its output. What the
call allocated and that is freed later was kept for it.

What is computed again allocates what the call did, in the same order, up to the last tensor that is kept: there torch
stops (torch/utils/checkpoint.py, early stop).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby

import numpy as np

from profkit.allocator.requests import Bools, Floats, Requests
from profkit.analysis.whatif import Bound, CannotModelError, Change, Program
from profkit.names import BACKWARD, INFERENCE, MODEL, OPTIMIZER, PHASES, RECOMPUTE, kind_of
from profkit.snapshot.columns import Ints

_FORM = re.compile(r"(?P<glob>.+?)(:(?P<how>every|group)=(?P<number>\d{1,6}))?(?P<reentrant>:reentrant)?$")
_NO_FORWARD = (BACKWARD, OPTIMIZER, INFERENCE)
_SHOWN_KINDS = 8
_USED_BY: dict[Bound, int] = {"least": 1, "likely": 2, "most": 3}
"""What is not kept is freed before the second allocation after it: the first one is of the operation that reads it."""

_WORKSPACE_BYTES = 2**20
"""What cuBLASLt needs once on each thread, for products with a bias: in backward only if these are computed again."""

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


def edit_checkpoint(program: Program, requests: Requests, text: str, bound: Bound) -> Change:
    """Checkpoint the ranges or modules that match ``GLOB``.

    Of ``GLOB:every=K`` only every K-th, from the first on; of ``GLOB:group=K`` K that follow one another share one
    checkpoint. With ``:reentrant`` at the end it is torch's ``use_reentrant=True``: all of a call runs again, and its
    output and the gradient of that are held until its backward pass ends.
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
    again = _recomputed(program)
    chosen = [name for name in (names[::number] if match["how"] == "every" else names) if name not in again]
    if not chosen:
        raise CannotModelError(f"what matches {glob!r} is checkpointed already")
    calls = [call for call in calls if call.name in chosen]
    if match["how"] == "group":
        calls = list(_joined(calls, number))
    requests, count = _checkpoint(program, requests, calls, bound, is_reentrant=match["reentrant"] is not None)
    if not count:
        raise CannotModelError(f"what matches {glob!r} keeps nothing for backward: is it compiled?")
    unknown = (
        "when a checkpointed call frees what it no longer keeps, and backward what was computed again",
        *([] if match["reentrant"] else ["use_reentrant=True needs each call's output once more: add :reentrant"]),
    )
    return Change(requests, f"{len(chosen)} of {len(names)} ranges, {count} calls", unknown, tuple(chosen))


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


def _recomputed(program: Program) -> set[str]:
    timeline = program.memory.timeline
    names = set()
    for row in range(program.replay.start_count, len(program.replay)):
        if program.phases[row] == RECOMPUTE:
            for name, _ in program.memory.running_place_of(row).modules:
                parts = name.removeprefix(f"{MODEL}/").split(".")
                names |= {".".join(parts[: depth + 1]) for depth in range(len(parts))}
    spans = [(span.start_us, span.end_us) for span in timeline.recomputations]
    starts = [start for start, _ in spans]
    for span in program.memory.device.annotations:
        at = bisect_right(starts, span.start_us) - 1
        if at >= 0 and span.start_us <= spans[at][1]:
            names.add(span.name)
    return names


def forward_ranges(program: Program) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in _ranges(program)))


def _joined(calls: list[Call], number: int) -> Iterator[Call]:
    for _, some in groupby(calls, lambda call: call.backward_begin):
        together = list(some)
        for at in range(0, len(together), number):
            yield replace(together[min(at + number, len(together)) - 1], begin=together[at].begin)


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def _outermost_ranges(program: Program, glob: str) -> list[tuple[str, int, int]]:
    ranges, end = [], -1
    for name, start_us, end_us in _ranges(program):
        if start_us >= end and _matches(name, glob):
            end = end_us
            begin = int(np.searchsorted(program.memory.timeline.times_us, start_us, "left"))
            ranges.append((name, begin, program.memory.timeline.moment_at(end_us)))
    return ranges


def _ranges(program: Program) -> Iterator[tuple[str, int, int]]:
    timeline = program.memory.timeline
    others = [phase for phase in timeline.phases if phase.name in _NO_FORWARD] + list(timeline.recomputations)
    others.sort(key=lambda span: span.start_us)
    starts = np.array([phase.start_us for phase in others], dtype=np.int64)
    ends = np.maximum.accumulate(np.array([phase.end_us for phase in others], dtype=np.int64))
    closed = [(span.start_us, -span.end_us, span.name) for span in program.memory.device.annotations if span.end_us]
    for start_us, end_us, name in sorted(closed):
        at = int(np.searchsorted(starts, start_us, "right")) - 1
        if (at < 0 or start_us >= ends[at]) and name not in (*PHASES, RECOMPUTE):
            yield name, start_us, -end_us


def _module_calls(program: Program, glob: str) -> list[tuple[str, int, int]]:
    """A module that several others share has the name that it has in the first of them. What it allocated between
    allocations of another one belongs to that.
    """
    starts = [begin for begin, _ in program.backward_passes]
    made = []
    for row in range(program.replay.start_count, len(program.replay)):
        if program.phases[row] not in (*_NO_FORWARD, RECOMPUTE):
            modules = program.memory.running_place_of(row).modules
            birth = int(program.replay.birth[row])
            made.append((modules[0][0].removeprefix(f"{MODEL}/") if modules else "", birth))
    runs = [(name, [birth for _, birth in some]) for name, some in groupby(made, lambda run: run[0])]
    units = [_unit_of(name, glob) for name, _ in runs]
    for at in range(1, len(runs) - 1):
        if units[at] is not None and units[at - 1] == units[at + 1] is not None:
            units[at] = units[at - 1]
    placed = [(unit, birth) for unit, (_, births) in zip(units, runs, strict=True) for birth in births]
    stretches = [
        (unit, [birth for _, birth in some])
        for (unit, _), some in groupby(placed, lambda run: (run[0], int(np.searchsorted(starts, run[1]))))
    ]
    ends = [births[0] for _, births in stretches[1:]] + [program.replay.event_count]
    calls = []
    for (unit, births), end in zip(stretches, ends, strict=True):
        following = int(np.searchsorted(starts, births[-1]))
        if unit is not None and following < len(starts):
            calls.append((unit, births[0], min(end, starts[following])))
    return calls


def _unit_of(module: str, glob: str) -> str | None:
    parts = module.split(".")
    names = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return next((name for name in names if _matches(name, glob)), None)


def _checkpoint(
    program: Program, requests: Requests, calls: list[Call], bound: Bound, *, is_reentrant: bool
) -> tuple[Requests, int]:
    """The calls do not overlap: each is edited on its own, and what an edit adds is no part of another call."""
    at = np.flatnonzero(requests.is_recorded)  # in the order of their births
    born, freed, sizes = requests.born[at], requests.freed[at], requests.requested_bytes[at]
    stays = program.is_category("autocast copies")[requests.source[at]]
    by_free = np.argsort(freed, kind="stable")
    new_freed = freed.copy()
    copies: list[tuple[Ints, Floats, Floats]] = []
    for call in calls:
        first, end, backward = np.searchsorted(born, [call.begin, call.end, call.backward_begin]).tolist()
        inside = np.arange(first, end)
        later = freed[end:backward]
        others_end = later[(later >= call.backward_begin) & (later < call.backward_end)].max(
            initial=call.backward_begin
        )
        own = int(np.searchsorted(born, others_end, "right"))
        output = _output_of(sizes, freed, inside, call)
        if len(output):
            last = int(np.searchsorted(born, max(freed[output[0]], others_end), "right"))
            until_then = zip(range(own, last), requests.source[at[own:last]].tolist(), strict=True)
            own = next((index for index, row in until_then if _is_made_in(program, row, call.name)), last)
        if own == len(born):
            continue
        kept = inside[(freed[inside] > born[own]) & (freed[inside] < call.backward_end)]
        if not len(kept):
            continue
        used = np.minimum(born[np.minimum(kept + _USED_BY[bound], len(born) - 1)], call.end)
        new_freed[kept] = np.where(stays[kept], call.backward_begin, used) - 0.5
        new_freed[np.intersect1d(output, kept)] = others_end
        new_freed[_inputs_of(born, freed, by_free, call, end)] = freed[kept].max()
        again = inside if is_reentrant else inside[: int(kept[-1]) - first + 1]
        births, frees = _compute_again(born[again], freed[again], call, born[own], np.isin(again, kept))
        if is_reentrant:
            # The node of the call holds what it computed again and the gradient that it was given until it is done.
            result, own_end = output if len(output) else inside[-1:], freed[kept].max()
            frees[np.isin(again, result)] = own_end
            made = np.arange(backward, own)
            is_given = (freed[made] > born[own]) & (freed[made] < own_end) & (sizes[made] == sizes[result].max())
            new_freed[made[is_given][-1:]] = own_end
        elif bound != "most":
            is_kept = np.isin(again, kept)
            frees[is_kept] = [_when_unpacked_goes(born, freed, sizes, index) for index in again[is_kept].tolist()]
        copies.append((at[again], births, frees))
    if not copies:
        return requests, 0
    of, births, frees = (np.concatenate(column) for column in zip(*copies, strict=True))
    is_changed = new_freed != freed
    edited = requests.freed_at(at[is_changed], new_freed[is_changed])
    edited = edited.add_copies(of, requests.requested_bytes[of], births, frees)
    workspace = at[_shared_workspaces(program, requests.source[at], sizes, freed)]
    is_needed = bound == "most" or (bound == "likely" and bool(np.isin(workspace, of).any()))
    if len(workspace) and is_needed:
        never = np.array([float(requests.event_count)])
        edited = edited.add_copies(workspace[:1], np.array([_WORKSPACE_BYTES], dtype=np.int64), births[:1], never)
    return edited, len(copies)


def _when_unpacked_goes(born: Floats, freed: Floats, sizes: Ints, kept: int) -> float:
    """A saved tensor goes when its node is released, after the gradients of biases have been summed. A tensor computed
    again goes when the node's own computation ends, before these sums: a tiny allocation that lasts, and temporaries.
    """
    last = int(np.searchsorted(born, freed[kept])) - 1
    while last > kept and freed[last] < freed[kept]:
        last -= 1
    is_sum = last > kept and sizes[last] * _TINY <= sizes[kept]
    return float(born[last]) - 0.25 if is_sum else float(freed[kept])


def _shared_workspaces(program: Program, rows: Ints, sizes: Ints, freed: Floats) -> Ints:
    """Return which requests may be cuBLASLt's workspace of the main thread; none if backward has one of its own."""
    kept = np.flatnonzero((sizes == _WORKSPACE_BYTES) & (freed >= program.replay.event_count))
    phases = [program.phases[row] for row in rows[kept].tolist()]
    return kept[:0] if BACKWARD in phases else kept[[phase not in _NO_FORWARD for phase in phases]]


def _is_made_in(program: Program, row: int, module: str) -> bool:
    names = (name.removeprefix(f"{MODEL}/") for name, _ in program.memory.running_place_of(row).modules)
    return any(name == module or name.startswith(f"{module}.") for name in names)


def _compute_again(born: Floats, freed: Floats, call: Call, begins: float, is_kept: Bools) -> tuple[Floats, Floats]:
    """Between the event before that and itself the call runs again, in the recorded order. What it does not keep is
    freed at the latest when it stops.
    """
    low, size = begins - 1, call.end - call.begin + 2
    births = low + (born - call.begin + 1) / size
    frees = np.minimum(low + (freed - call.begin + 1) / size, np.nextafter(births[-1], begins))
    return births, np.where(is_kept, freed, frees)


def _output_of(sizes: Ints, freed: Floats, inside: Ints, call: Call) -> Ints:
    """Return which of the requests ``inside`` a call is its output, if one is kept for backward; else none.

    The output is the last that the call allocated. If that is given back in the forward pass, nothing keeps it. Else
    backward needs the output before all else that the call kept. (A call that writes its output into memory that it
    allocated earlier ends with another allocation.) Statistics and masks, which are tiny, are no output.
    """
    alive = inside[freed[inside] >= call.end]
    large = alive[sizes[alive] * _TINY >= sizes[alive].max(initial=0)]
    if not len(large) or freed[large[-1]] < call.backward_begin:
        return np.array([], dtype=np.int64)
    return np.array([large[freed[large].argmin()]], dtype=np.int64)


def _inputs_of(born: Floats, freed: Floats, by_free: Ints, call: Call, end: int) -> Ints:
    """Return what the call was given and its caller then dropped: freed before the next allocation, or in the call."""
    following = born[end] if end < len(born) else np.inf
    low, high = np.searchsorted(freed, [call.begin, min(following, call.backward_begin)], sorter=by_free).tolist()
    dropped = by_free[low:high]
    return dropped[born[dropped] < call.begin]
