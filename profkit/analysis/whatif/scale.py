"""Another batch or sequence length: how each allocation grows, from runs of the same program at other sizes.

Allocations of two runs are matched by the step, the stack and the text that profkit wrote into them, the n-th with the
n-th. The runs' ratio is the commonest ratio of two matched sizes that differ. A size that is the same in both stays;
one that grew by the ratio, or by its square, goes on like that; any other lies on a line through the two sizes, or with
a second run on a parabola. Sizes of which more than one curve is possible are named, with what they may take at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import ceil

import numpy as np

from profkit.analysis.whatif.stream import Bools, Bound, CannotModelError, Change, Program, Stream
from profkit.names import kind_of
from profkit.run.edits import read_factor
from profkit.snapshot.columns import Ints

_SHOWN_SITES = 3
_GROWING = ("activations", "temporaries", "inputs", "unknown", "autocast copies")


def edit_size(
    program: Program, stream: Stream, text: str, others: Sequence[Program], bound: Bound = "likely"
) -> Change:
    """Scale the batch or the sequence by a factor, as one or more other runs of the program show."""
    factor = read_factor(text)
    if not others:
        raise CannotModelError("give a run of the same program at another size: --scale-from OTHER")
    sizes = [_sizes_in(program, other) for other in others]
    ratios = [_ratio(program.replay.requested_bytes, known) for known in sizes]
    points = dict(zip(ratios, sizes, strict=True))
    if len(points) < len(others):
        raise CannotModelError("two of the other runs have the same size")
    wanted, most, fits = _scaled(program, points, factor)
    edited = stream.resized(np.ones(len(stream), dtype=np.bool_), _follow(program, stream, wanted))
    highest = stream.resized(np.ones(len(stream), dtype=np.bool_), _follow(program, stream, most))
    doubt = highest.requested_peak_bytes() - edited.requested_peak_bytes()
    shown = ", ".join(f"×{float(ratio):g}" for ratio in ratios)
    unknown = _name_sites(program, ~fits, wanted, doubt) if not fits.all() else ()
    text = f"{np.count_nonzero(fits):,} of {len(fits):,} sizes follow from runs at {shown}"
    return Change(highest if bound == "most" else edited, text, unknown)


def _follow(program: Program, stream: Stream, wanted: Ints) -> Ints:
    """Return the size of each request: its allocation's new one, changed as earlier edits changed the old one."""
    old, now = program.replay.requested_bytes[stream.source], stream.requests.requested_bytes
    new = wanted[stream.source]
    return np.where(now == old, new, np.ceil(now * (new / np.maximum(old, 1))).astype(np.int64))


def _sizes_in(program: Program, other: Program) -> Ints:
    """Return for each allocation its size in another run, -1 where that has none like it."""
    sizes = np.full(len(program.replay), -1, dtype=np.int64)
    theirs = _sites(other)
    last = max((step for step, _ in theirs), default=-1)
    for (step, site), rows in _sites(program).items():
        matched = theirs.get((min(step, last), site), [])
        if len(matched) == len(rows):
            sizes[rows] = other.replay.requested_bytes[matched]
    return sizes


def _sites(program: Program) -> dict[tuple[int, Hashable], list[int]]:
    """Return the allocations of each place of the program in each step."""
    memory = program.memory
    sites: defaultdict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for row, birth in enumerate(program.replay.birth.tolist()):
        raw = memory.stacks.raw_of(row)
        site = (memory.stacks.of(row).frames, str(raw.get("user_metadata") or ""), memory.timeline.phase_at(birth))
        sites[memory.timeline.step_at(birth), site].append(row)
    return sites


def _ratio(sizes: Ints, others: Ints) -> Fraction:
    differ = (others > 0) & (others != sizes) & (sizes > 0)
    pairs = zip(others[differ].tolist(), sizes[differ].tolist(), strict=True)
    ratios = Counter(Fraction(other, size) for other, size in pairs)
    if not ratios:
        raise CannotModelError("the other run asks for the same sizes, or is of another program")
    return ratios.most_common(1)[0][0]


def _scaled(program: Program, points: dict[Fraction, Ints], factor: Fraction) -> tuple[Ints, Ints, Bools]:
    """Return each allocation's size at ``factor``, the most that it may be, and whether the first is proven."""
    sizes = program.replay.requested_bytes
    wanted, most, fits = sizes.copy(), sizes.copy(), np.ones(len(sizes), dtype=np.bool_)
    known: dict[tuple[int, ...], tuple[int, int, bool]] = {}
    columns = zip(*(column.tolist() for column in (sizes, *points.values())), strict=True)
    for row, key in enumerate(columns):
        if -1 in key:
            grows = program.claims[row].category in _GROWING
            wanted[row] = ceil(key[0] * factor) if grows else key[0]
            most[row], fits[row] = max(ceil(key[0] * factor), key[0]), False
            continue
        if key not in known:
            known[key] = _extrapolate(key[0], dict(zip(points, key[1:], strict=True)), factor)
        wanted[row], most[row], fits[row] = known[key]
    return wanted, most, fits


def _extrapolate(size: int, points: dict[Fraction, int], factor: Fraction) -> tuple[int, int, bool]:
    """Return a size at ``factor``, the most that it may be, and whether the first is proven."""
    for power in (0, 1, 2):
        if all(other == size * ratio**power for ratio, other in points.items()):
            scaled = ceil(size * factor**power)
            return scaled, scaled, True
    through = {Fraction(1): size, **points}
    curve = max(ceil(_interpolate(through, factor)), 1)
    if len(points) > 1:
        return curve, curve, True
    parabola = max(ceil(_interpolate({Fraction(0): 0, **through}, factor)), 1)
    return curve, max(curve, parabola), False


def _interpolate(points: dict[Fraction, int], at: Fraction) -> Fraction:
    total = Fraction(0)
    for x, y in points.items():
        term = Fraction(y)
        for other in points:
            if other != x:
                term *= (at - other) / (x - other)
        total += term
    return total


def _name_sites(program: Program, doubtful: Bools, wanted: Ints, doubt: int) -> tuple[str, ...]:
    """Return the lines that name the places whose sizes are not proven, the largest first."""
    places: dict[str, list[int]] = {}
    for row in np.flatnonzero(doubtful).tolist():
        module = next((module for module, _ in program.memory.place_of(row).modules if module), "")
        stack = program.memory.stacks.of(row)
        place = kind_of(module) if module and not stack.own else stack.label
        places.setdefault(place, []).append(int(wanted[row]))
    ordered = sorted(places.items(), key=lambda place: -max(place[1]))
    lines = [
        f"{len(sizes):,} sizes at {place}, up to {max(sizes):,} B, follow from no line through 0"
        for place, sizes in ordered[:_SHOWN_SITES]
    ]
    if rest := sum(len(sizes) for _, sizes in ordered[_SHOWN_SITES:]):
        lines.append(f"{rest:,} smaller ones at {len(ordered) - _SHOWN_SITES:,} other places")
    return (
        *lines,
        f"these may take {doubt:,} B more at the peak" if doubt > 0 else "at the peak these add nothing more",
    )
