"""Edits of tensors: parameters, gradients and the optimizer's state, whose recorded sizes are exact, the logits; sizes.

The optimizers are torch's own and bitsandbytes' AdamW8bit. Of these only torch's ``foreach`` variant, its default,
makes temporaries of the size of the parameters; the others update the tensors in place. A fused loss computes logits
and their gradients in chunks, as Liger Kernel's cross entropy does.

How sizes grow with another batch or sequence length follows from runs of the same program at other sizes. Allocations
of two runs are matched by the step, the stack and the text that profkit wrote into them, the n-th with the n-th. The
runs' ratio is the commonest ratio of two matched sizes that differ. A size that is the same in both stays; one that
grew by the ratio, or by its square, goes on like that; any other lies on a line through the two sizes, or with a second
run on a parabola. Sizes of which more than one curve is possible are named, with what they may take at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from math import ceil

import numpy as np

from profkit.allocator.requests import Floats
from profkit.analysis.memory.stacks import format_frame
from profkit.analysis.whatif.stream import Bools, Bound, CannotModelError, Change, Program, Stream
from profkit.names import BACKWARD, OPTIMIZER, kind_of
from profkit.run.edits import read_factor
from profkit.snapshot.columns import Ints

_HALF = 2
_WHOLE = 4

# bitsandbytes/optim/optimizer.py: a moment of fewer elements stays in 32 bits; each block of 256 has an fp32 maximum;
# two tables of 256 floats serve all tensors.
_LEAST_8BIT_ELEMENTS = 4096
_BLOCK_ELEMENTS = 256
_TABLES, _TABLE_BYTES = 2, 1024

_FUSED_STEP_BYTES = 4
_LARGEST_SCALAR_BYTES = 8

_ADAM = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}


def edit_optimizer(program: Program, stream: Stream, kind: str) -> Change:
    """Replace the optimizer by none, or by one of `_OPTIMIZERS`; ``offload`` moves it to the host."""
    if kind not in _OPTIMIZERS:
        raise CannotModelError(f"no optimizer {kind!r}; it is one of {', '.join(_OPTIMIZERS)}")
    is_state, is_temporary = stream.of(program.is_role("optimizer_state")), stream.of(program.is_optimizer_temporary)
    if not is_state.any():
        raise _unknown(program, "optimizer state")
    temporaries = int(np.count_nonzero(is_temporary))
    removed = f"{temporaries:,} temporaries of its steps removed"
    if kind in ("none", "sgd", "offload"):
        return Change(stream.without(is_state | is_temporary), f"{_OPTIMIZERS[kind]}: known state and {removed}")
    names = {_state_name(program, row) for row in stream.source[is_state].tolist()}
    if not names <= _ADAM:
        raise CannotModelError(f"the recorded optimizer keeps {', '.join(sorted(names - _ADAM))}, which Adam does not")
    if kind == "sgd-momentum":  # one buffer of the parameter's size, made in the first step
        names_of = [_state_name(program, row) for row in stream.source[is_state].tolist()]
        is_state[np.flatnonzero(is_state)] = [name != "exp_avg" for name in names_of]
        return Change(stream.without(is_state | is_temporary), f"{_OPTIMIZERS[kind]}: one known moment kept; {removed}")
    if kind == "adamw-fused":
        return _fuse(program, stream, is_state, is_temporary)
    return _make_8bit(program, stream, is_state, is_temporary)


_OPTIMIZERS = {
    "none": "no optimizer runs",
    "sgd": "SGD without momentum and weight decay",
    "sgd-momentum": "SGD with momentum",
    "adamw-8bit": "bitsandbytes' AdamW8bit",
    "adamw-fused": "torch's AdamW(fused=True)",
    "offload": "the optimizer and its state are on the host",
}


def _fuse(program: Program, stream: Stream, is_state: Bools, is_temporary: Bools) -> Change:
    """Remove the temporaries; the fused step keeps its counters on the GPU, one for each parameter."""
    first = [
        at for at in np.flatnonzero(is_state).tolist() if _state_name(program, int(stream.source[at])) == "exp_avg"
    ]
    has_counters = any(_state_name(program, row) == "step" for row in stream.source[is_state].tolist())
    if has_counters and not is_temporary.any():
        raise CannotModelError("the recorded optimizer makes no temporaries: it is fused already")
    count = int(np.count_nonzero(is_temporary))
    if not has_counters:
        of = np.array(first, dtype=np.int64)
        sizes = np.full(len(of), _FUSED_STEP_BYTES, dtype=np.int64)
        requests = stream.requests
        stream = stream.with_copies(of, sizes, requests.born[of] - 0.5, requests.freed[of])
        is_temporary = np.append(is_temporary, np.zeros(len(of), dtype=np.bool_))
    text = f"{_OPTIMIZERS['adamw-fused']}: {count:,} temporaries of its steps removed, known state as recorded"
    return Change(stream.without(is_temporary), text)


def _make_8bit(program: Program, stream: Stream, is_state: Bools, is_temporary: Bools) -> Change:
    """Store each large moment in one byte an element, with the maximum of each block in a tensor of its own."""
    where = np.flatnonzero(is_state)
    sizes, maxima, gone = [], [], is_temporary.copy()
    for at in where.tolist():
        row, size = int(stream.source[at]), int(stream.requests.requested_bytes[at])
        elements = size // (program.element_bytes(row) or _WHOLE)
        is_large = elements >= _LEAST_8BIT_ELEMENTS
        gone[at] |= size <= _LARGEST_SCALAR_BYTES and _state_name(program, row) == "step"
        sizes.append(elements if is_large else elements * _WHOLE)
        maxima.append(-(-elements // _BLOCK_ELEMENTS) * _WHOLE if is_large else 0)
    extra = np.array(maxima, dtype=np.int64)
    of = np.concatenate([where[extra > 0], np.full(_TABLES, where[0])])
    more = np.concatenate([extra[extra > 0], np.full(_TABLES, _TABLE_BYTES)])
    requests = stream.requests
    edited = stream.resized(is_state, np.array(sizes, dtype=np.int64))
    edited = edited.with_copies(of, more, requests.born[of] + 0.5, requests.freed[of])
    edited = edited.without(np.append(gone, np.zeros(len(of), dtype=np.bool_)))
    text = f"{_OPTIMIZERS['adamw-8bit']}: known state in 8 bits with a maximum for each 256 elements; no temporaries"
    return Change(edited, text, _unsure_of_elements(program, stream.source[where]))


def edit_gradients(program: Program, stream: Stream, kind: str) -> Change:
    """Store gradients in bf16, or move each to the host as soon as the next one has been made."""
    where = stream.of(program.is_role("gradient"))
    if not where.any():
        raise _unknown(program, "gradients")
    if kind == "bf16":
        stream = _halve(program, stream, where, "gradients")
        unknown = ("what backward makes before it adds to a gradient is taken as recorded",)
        return Change(
            stream, "known gradients in bf16", (*unknown, *_unsure_of_elements(program, stream.source[where]))
        )
    if kind != "offload":
        raise CannotModelError(f"no kind of gradients {kind!r}; it is bf16 or offload")
    at = np.flatnonzero(where)
    at = at[np.argsort(stream.requests.born[at], kind="stable")]
    born = stream.requests.born[at]
    ends = np.array([end for _, end in program.backward_passes] or [0], dtype=np.float64)
    inside = np.minimum(np.searchsorted(ends, born), len(ends) - 1)
    end = np.where(ends[inside] > born, ends[inside], stream.requests.event_count)
    following = np.append(born[1:], np.inf)
    freed = np.minimum(stream.requests.freed[at], np.minimum(following, end))
    positions = np.zeros(len(stream))
    positions[at] = freed
    return Change(
        stream.freed_at(where, positions[where]),
        "each known gradient leaves the GPU when the next one has been made",
        ("the copies' speed: slow ones hold several gradients at a time",),
    )


def edit_parameters(program: Program, stream: Stream, kind: str) -> Change:
    """Store parameters in bf16, as ``model.bfloat16()``: their gradients and the optimizer's state become bf16 too."""
    if kind != "bf16":
        raise CannotModelError(f"no kind of parameters {kind!r}; it is bf16")
    where = stream.of(program.is_role("parameter"))
    if not where.any():
        raise _unknown(program, "parameters")
    stream = _halve(program, stream, where, "parameters")
    follows = stream.of(program.is_role("gradient") | program.is_role("optimizer_state"))
    stream = _halve(program, stream, follows, "gradients", may_change_nothing=True)
    rows = stream.source[stream.of(program.is_role("parameter"))]
    is_copy = stream.of(program.is_category("autocast copies"))
    if is_copy.any():
        text = "known parameters, gradients and optimizer state in bf16, without autocast's copies of parameters"
        unknown = "activations and temporaries that autocast left in fp32 are taken as recorded"
        return Change(stream.without(is_copy), text, (unknown, *_unsure_of_elements(program, rows)))
    others = stream.of(program.is_category("activations", "temporaries"))
    others &= ~(follows | where)
    stream = _halve(program, stream, others, "activations", may_change_nothing=True)
    text = "known parameters, gradients and optimizer state in bf16; activations and temporaries of 4-byte elements too"
    unknown = "which activations and temporaries are no floats of 4 bytes, and what the model keeps in fp32 on purpose"
    return Change(stream, text, (unknown, *_unsure_of_elements(program, rows)))


def drop(program: Program, stream: Stream, glob: str) -> Change:
    """Remove every allocation of a category or module, or with a line in its stack, that matches ``glob``."""
    memory = program.memory
    by_stack: dict[int, bool] = {}

    def matches(row: int) -> bool:
        claim, number = program.claims[row], memory.stacks.number_of(row)
        if number not in by_stack:
            lines = map(format_frame, memory.stacks.facts[number].frames)
            by_stack[number] = any(fnmatchcase(line, f"*{glob}*") for line in lines)
        modules = (module for module, _ in memory.place_of(row).modules)
        names = filter(None, (claim.category, claim.owner, *modules))
        return by_stack[number] or any(fnmatchcase(name, glob) for name in names)

    rows = range(len(program.replay))
    gone = stream.of(np.fromiter(map(matches, rows), np.bool_, len(rows)))
    if not gone.any():
        raise CannotModelError(f"nothing has a category, a module or a line of its stack that matches {glob!r}")
    return Change(stream.without(gone), f"{np.count_nonzero(gone):,} allocations that match {glob!r} removed")


def drop_gradients(program: Program, stream: Stream, kind: str) -> Change:
    """Free each gradient after the optimizer's step, as ``zero_grad(set_to_none=True)`` does."""
    if kind != "none":
        raise CannotModelError(f"no kind of zero-grad {kind!r}; it is none")
    where = stream.of(program.is_role("gradient"))
    if not where.any():
        raise _unknown(program, "gradients")
    steps = [phase for phase in program.memory.timeline.phases if phase.name == OPTIMIZER]
    ends = np.array([program.memory.timeline.moments_of(phase)[1] for phase in steps], dtype=np.float64)
    at = np.flatnonzero(where)
    is_kept = np.searchsorted(ends, stream.requests.freed[at]) > np.searchsorted(ends, stream.requests.born[at]) + 1
    if not is_kept.any():
        raise CannotModelError("no known gradient outlives the step that made it: this is done already")
    at = at[is_kept]
    first = np.searchsorted(ends, stream.requests.born[at])
    positions = stream.requests.freed.copy()
    positions[at] = ends[first] + 0.25
    kept = np.zeros(len(stream), dtype=np.bool_)
    kept[at] = True
    of, born, freed = _made_again(program, stream, at, ends)
    stream = stream.freed_at(kept, positions[kept])
    return Change(
        stream.with_copies(of, stream.requests.requested_bytes[of], born, freed),
        f"{len(at):,} known gradients are freed after each optimizer step",
        (f"when in later {BACKWARD} passes each gradient is made: taken as in the first",),
    )


def _made_again(program: Program, stream: Stream, at: Ints, ends: Floats) -> tuple[Ints, Floats, Floats]:
    """Return which gradients later steps make anew, when, and when they are freed: after the ``ends`` of the steps."""
    starts = np.array([low for low, _ in program.backward_passes], dtype=np.float64)
    copies = []
    for gradient in at.tolist():
        born, freed = float(stream.requests.born[gradient]), float(stream.requests.freed[gradient])
        first = int(np.searchsorted(starts, born, "right")) - 1
        for end in ends[ends > born][1:].tolist():
            start = starts[np.searchsorted(starts, end) - 1]
            if first >= 0 and start < freed:
                copies.append((gradient, _handed_over(stream, gradient, start + born - starts[first]), end + 0.25))
    of, births, frees = zip(*copies, strict=True) if copies else ((), (), ())
    return np.array(of, dtype=np.int64), np.array(births, dtype=np.float64), np.array(frees, dtype=np.float64)


def _handed_over(stream: Stream, gradient: int, position: float) -> float:
    """Return when backward had made what it adds to a gradient about then: from there on it is the gradient itself."""
    requests = stream.requests
    alike = np.flatnonzero(requests.requested_bytes == requests.requested_bytes[gradient])
    nearest = alike[np.abs(requests.born[alike] - position).argmin()]
    return float(max(requests.freed[nearest], position))


def _halve(program: Program, stream: Stream, where: Bools, what: str, *, may_change_nothing: bool = False) -> Stream:
    """Return the stream with 4-byte elements as 2-byte ones where ``where`` says."""
    sizes = stream.requests.requested_bytes[where]
    elements = np.array([program.element_bytes(row) or _WHOLE for row in stream.source[where].tolist()], dtype=np.int64)
    is_whole = (elements == _WHOLE) & (sizes > _LARGEST_SCALAR_BYTES)
    if not (is_whole.any() or may_change_nothing):
        raise CannotModelError(f"the {what} are not of 4 bytes an element")
    return stream.resized(where, np.where(is_whole, sizes // _WHOLE * _HALF, sizes))


def _unknown(program: Program, what: str) -> CannotModelError:
    if program.memory.recorded is None:
        return CannotModelError(f"nothing says which allocations are {what}; `profkit run --memory` records that")
    return CannotModelError(f"the run recorded no {what} on the GPU")


def _state_name(program: Program, row: int) -> str:
    """Return which state of a parameter it is: ``exp_avg`` of ``head.weight.exp_avg``."""
    return program.memory.owners[row].parts[0].name.rpartition(".")[2]


def _unsure_of_elements(program: Program, rows: Ints) -> tuple[str, ...]:
    is_known = all(program.element_bytes(row) for row in rows.tolist())
    return () if is_known else ("the run does not say how large the elements are: taken as 4 bytes",)


_CHUNKS = 16
_NEAR = 8
"""How many allocations before and after that of the loss, and before and after its free, may be of the logits."""

_FUNCTION = ("cross_entropy", "torch/nn/functional")
_KNOWN = ("parameters", "gradients", "optimizer state", "buffers")


def edit_loss(program: Program, stream: Stream, kind: str) -> Change:
    """Compute the loss in chunks: whatever has the logits' number of elements is of one chunk's size.

    ``cross_entropy`` allocates the logarithms of the probabilities, one for each logit. Half and twice their bytes are
    the same elements in another precision; only what is asked for next to these counts. ``fused:chunks=N`` says how
    many chunks there are.
    """
    name, _, chunks = kind.partition(":chunks=")
    if name != "fused" or (chunks and not (chunks.isdecimal() and int(chunks))):
        raise CannotModelError(f"no kind of loss {kind!r}; it is fused, or fused:chunks=N")
    number = int(chunks) if chunks else _CHUNKS
    memory, sizes = program.memory, program.replay.requested_bytes
    function, file = _FUNCTION
    in_loss = [
        row
        for row in range(len(program.replay))
        if any(name == function and file in path for name, path, _ in memory.stacks.of(row).frames)
    ]
    if not in_loss:
        raise CannotModelError("no line of the snapshot calls torch's cross_entropy")
    largest = int(sizes[in_loss].max())
    is_near = np.zeros(len(sizes), dtype=np.bool_)
    for row in in_loss:
        if sizes[row] == largest:
            end = int(np.searchsorted(program.replay.birth, program.replay.freed[row]))
            is_near[max(row - _NEAR, 0) : row + _NEAR] = is_near[max(end - _NEAR, 0) : end + _NEAR] = True
    is_near[in_loss] = True
    is_logits = np.isin(sizes, [largest, 2 * largest, largest // 2]) & ~program.is_category(*_KNOWN)
    where = stream.of(is_logits & is_near)
    now = stream.requests.requested_bytes[where]
    return Change(
        stream.resized(where, -(-now // number)),
        f"{np.count_nonzero(where):,} allocations of the logits' size, in {number} chunks",
        ("how many chunks your fused loss makes, and its own buffers: loss:fused:chunks=N",),
    )


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
