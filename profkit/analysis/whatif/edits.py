"""A program's requests, what is known of the allocation that each comes from, and what edits make of them.

Parameters, gradients and the optimizer's state have recorded sizes, which are exact; the logits are found by the loss.
The optimizers are torch's own and bitsandbytes' AdamW8bit. Of these only torch's ``foreach`` variant, its default,
makes temporaries of the size of the parameters; the others update the tensors in place. A fused loss computes logits
and their gradients in chunks, as Liger Kernel's cross entropy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from profkit.allocator.requests import ADDED, Floats, Requests, add_request, highest_sum, requests_of
from profkit.analysis.memory.categories import Claim
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.failures import last_failure
from profkit.errors import UsageError
from profkit.names import BACKWARD, OPTIMIZER
from profkit.run.owners import ROLES
from profkit.snapshot.columns import ALLOC, Ints

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Stream:
    """Requests, as recorded or edited. Every request comes from one recorded allocation: itself, or the one it copies.

    What is known of that allocation (its category, its module) holds for the request too.
    """

    requests: Requests
    source: Ints
    """By request: the row in the `Replay` of the recorded allocation."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_recorded(self) -> Bools:
        """Whether a request is a recorded allocation, not one that an edit added."""
        return np.not_equal(self.requests.row, ADDED)

    def select(self, is_row: Bools) -> Bools:
        """Return which requests come from an allocation for which ``is_row`` is true."""
        return is_row[self.source]

    def drop(self, gone: Bools) -> Stream:
        """Return the stream without some requests."""
        kept = ~gone
        columns = ("requested_bytes", "born", "freed", "completed", "kind", "row")
        requests = replace(self.requests, **{name: getattr(self.requests, name)[kept] for name in columns})
        return Stream(requests, self.source[kept])

    def resized(self, where: Bools, requested_bytes: Ints) -> Stream:
        """Return the stream with other sizes for some requests."""
        sizes = self.requests.requested_bytes.copy()
        sizes[where] = requested_bytes
        return replace(self, requests=replace(self.requests, requested_bytes=sizes))

    def freed_at(self, where: Bools, positions: Floats) -> Stream:
        """Return the stream with some requests freed at other positions, and free for reuse at once."""
        freed, completed = self.requests.freed.copy(), self.requests.completed.copy()
        freed[where] = completed[where] = positions
        return replace(self, requests=replace(self.requests, freed=freed, completed=completed))

    def add_copies(self, of: Ints, requested_bytes: Ints, born: Floats, freed: Floats) -> Stream:
        """Return the stream with further requests: of the kind and the source of the requests ``of`` (indices)."""
        old = self.requests
        requests = replace(
            old,
            requested_bytes=np.concatenate([old.requested_bytes, requested_bytes]),
            born=np.concatenate([old.born, born]),
            freed=np.concatenate([old.freed, freed]),
            completed=np.concatenate([old.completed, freed]),
            kind=np.concatenate([old.kind, old.kind[of]]),
            row=np.concatenate([old.row, np.full(len(of), ADDED, dtype=np.int64)]),
        )
        return Stream(requests, np.concatenate([self.source, self.source[of]]))

    def requested_peak_bytes(self) -> int:
        """Return the most bytes that were requested at a time."""
        return highest_sum(self.requests, self.requests.requested_bytes, self.requests.completed)


def add_failed_request(memory: DeviceMemory, requests: Requests) -> Requests:
    """Return the requests with the one that failed last, if that ended the program: edits should let it through."""
    event, events = last_failure(memory), memory.device.events
    if event is None or np.any(events.action[event:] == ALLOC):
        return requests
    return add_request(requests, event, int(events.size_bytes[event]), int(events.stream[event]))


class Program:
    """What a snapshot knows of a program's allocations, by row of the `Replay`; worked out when first asked for."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.replay = memory.history.replay

    def recorded(self) -> Stream:
        """Return the requests as they were recorded."""
        requests = requests_of(self.memory.history)
        return Stream(requests, requests.row)

    @cached_property
    def claims(self) -> list[Claim]:
        """What each allocation is for."""
        return [self.memory.classifier.claim_of(row) for row in range(len(self.replay))]

    @cached_property
    def phases(self) -> list[str | None]:
        """The phase in which each allocation was made."""
        return [self.memory.places.phase_of(row) for row in range(len(self.replay))]

    def is_category(self, *categories: str) -> Bools:
        """Return which allocations are of one of some categories, as far as is known or guessed."""
        return self._mask(claim.category in categories for claim in self.claims)

    def is_role(self, role: str) -> Bools:
        """Return which allocations the run recorded as tensors of a role (a key of `ROLES`)."""
        owners = self.memory.owners
        return self._mask(row in owners and owners[row].role == role for row in range(len(self.replay)))

    def element_bytes(self, row: int) -> int | None:
        """Return the size of an element of a known tensor; None if the run did not record it or tensors differ."""
        owner = self.memory.owners.get(row)
        sizes = {part.element_bytes for part in owner.parts} if owner else {None}
        size = sizes.pop() if len(sizes) == 1 else None
        return size if size and size > 0 else None

    @cached_property
    def is_optimizer_temporary(self) -> Bools:
        """Which allocations an optimizer's step made and freed again."""
        memory = self.memory

        def is_one(row: int) -> bool:
            if self.claims[row].category != "temporaries":
                return False
            frames = memory.stacks.facts_of(row).frames
            return self.phases[row] == OPTIMIZER or any("torch/optim/" in file for _, file, _ in frames)

        return self._mask(is_one(row) for row in range(len(self.replay)))

    @cached_property
    def backward_passes(self) -> list[tuple[int, int]]:
        """The first and the last moment of each backward pass."""
        timeline = self.memory.timeline
        return [timeline.moments_of(phase) for phase in timeline.phases if phase.name == BACKWARD]

    def _mask(self, values: Iterator[bool]) -> Bools:
        return np.fromiter(values, np.bool_, len(self.replay))


Bound = Literal["least", "likely", "most"]
"""What is taken for that which nobody knows of an edit: what needs least memory, what was seen mostly, or most."""


@dataclass(frozen=True)
class Change:
    """An edited stream; ``rests_on`` and each line of ``unknown`` are sentences for people."""

    stream: Stream
    rests_on: str
    unknown: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    """Ranges whose forward pass runs a second time."""


@dataclass(frozen=True)
class Applied:
    """One edit as it was written, and what is known of it."""

    text: str
    rests_on: str
    unknown: tuple[str, ...]
    recomputed: tuple[str, ...]
    """Ranges whose forward pass runs a second time."""


class CannotModelError(UsageError):
    """An edit that this snapshot says too little about, or that would change nothing."""


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
    is_state = _find_tensors(program, stream, "optimizer_state")
    is_temporary = stream.select(program.is_optimizer_temporary)
    temporaries = int(np.count_nonzero(is_temporary))
    removed = f"{temporaries:,} temporaries of its steps removed"
    if kind in ("none", "sgd", "offload"):
        return Change(stream.drop(is_state | is_temporary), f"{_OPTIMIZERS[kind]}: known state and {removed}")
    names = {_state_name(program, row) for row in stream.source[is_state].tolist()}
    if not names <= _ADAM:
        raise CannotModelError(f"the recorded optimizer keeps {', '.join(sorted(names - _ADAM))}, which Adam does not")
    if kind == "sgd-momentum":  # one buffer of the parameter's size, made in the first step
        names_of = [_state_name(program, row) for row in stream.source[is_state].tolist()]
        is_state[np.flatnonzero(is_state)] = [name != "exp_avg" for name in names_of]
        return Change(stream.drop(is_state | is_temporary), f"{_OPTIMIZERS[kind]}: one known moment kept; {removed}")
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
        stream = stream.add_copies(of, sizes, requests.born[of] - 0.5, requests.freed[of])
        is_temporary = np.append(is_temporary, np.zeros(len(of), dtype=np.bool_))
    text = f"{_OPTIMIZERS['adamw-fused']}: {count:,} temporaries of its steps removed, known state as recorded"
    return Change(stream.drop(is_temporary), text)


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
    edited = edited.add_copies(of, more, requests.born[of] + 0.5, requests.freed[of])
    edited = edited.drop(np.append(gone, np.zeros(len(of), dtype=np.bool_)))
    text = f"{_OPTIMIZERS['adamw-8bit']}: known state in 8 bits with a maximum for each 256 elements; no temporaries"
    return Change(edited, text, _unsure_of_elements(program, stream.source[where]))


def edit_gradients(program: Program, stream: Stream, kind: str) -> Change:
    """Store gradients in bf16, or move each to the host as soon as the next one has been made."""
    where = _find_tensors(program, stream, "gradient")
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
    where = _find_tensors(program, stream, "parameter")
    stream = _halve(program, stream, where, "parameters")
    follows = stream.select(program.is_role("gradient") | program.is_role("optimizer_state"))
    stream = _halve(program, stream, follows, "gradients", may_change_nothing=True)
    rows = stream.source[stream.select(program.is_role("parameter"))]
    is_copy = stream.select(program.is_category("autocast copies"))
    if is_copy.any():
        text = "known parameters, gradients and optimizer state in bf16, without autocast's copies of parameters"
        unknown = "activations and temporaries that autocast left in fp32 are taken as recorded"
        return Change(stream.drop(is_copy), text, (unknown, *_unsure_of_elements(program, rows)))
    others = stream.select(program.is_category("activations", "temporaries"))
    others &= ~(follows | where)
    stream = _halve(program, stream, others, "activations", may_change_nothing=True)
    text = "known parameters, gradients and optimizer state in bf16; activations and temporaries of 4-byte elements too"
    unknown = "which activations and temporaries are no floats of 4 bytes, and what the model keeps in fp32 on purpose"
    return Change(stream, text, (unknown, *_unsure_of_elements(program, rows)))


def drop_gradients(program: Program, stream: Stream, kind: str) -> Change:
    """Free each gradient after the optimizer's step, as ``zero_grad(set_to_none=True)`` does."""
    if kind != "none":
        raise CannotModelError(f"no kind of zero-grad {kind!r}; it is none")
    where = _find_tensors(program, stream, "gradient")
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
        stream.add_copies(of, stream.requests.requested_bytes[of], born, freed),
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


def _find_tensors(program: Program, stream: Stream, role: str) -> Bools:
    """Return which requests are tensors of a role; raise if the run recorded none on the GPU."""
    where = stream.select(program.is_role(role))
    if where.any():
        return where
    if program.memory.recorded is None:
        raise CannotModelError(f"nothing says which allocations are {ROLES[role]}; `profkit run --memory` records that")
    raise CannotModelError(f"the run recorded no {ROLES[role]} on the GPU")


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
        if any(name == function and file in path for name, path, _ in memory.stacks.facts_of(row).frames)
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
    where = stream.select(is_logits & is_near)
    now = stream.requests.requested_bytes[where]
    return Change(
        stream.resized(where, -(-now // number)),
        f"{np.count_nonzero(where):,} allocations of the logits' size, in {number} chunks",
        ("how many chunks your fused loss makes, and its own buffers: loss:fused:chunks=N",),
    )
