"""What is known of the allocations that a program's requests come from, and what edits make of the requests.

Parameters, gradients and the optimizer's state have recorded sizes, which are exact; the logits are found by the loss.
The optimizers are torch's own and bitsandbytes' AdamW8bit. Of these only torch's ``foreach`` variant, its default,
makes temporaries of the size of the parameters; the others update the tensors in place. A fused loss computes logits
and their gradients in chunks, as Liger Kernel's cross entropy does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np

from profkit.allocator.requests import Bools, Floats, Requests, requests_of
from profkit.analysis.memory.categories import Claim
from profkit.analysis.memory.device import DeviceMemory
from profkit.errors import UsageError
from profkit.names import BACKWARD, OPTIMIZER
from profkit.run.owners import ROLES
from profkit.snapshot.columns import Ints

Frame = tuple[str, str, int]
"""Function, file and line."""


class Program:
    """What a snapshot knows of a program's allocations, by row of the `Replay`; worked out when first asked for."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.replay = memory.history.replay

    def recorded(self) -> Requests:
        return requests_of(self.memory.history)

    @cached_property
    def claims(self) -> list[Claim]:
        return [self.memory.classifier.claim_of(row) for row in range(len(self.replay))]

    @cached_property
    def phases(self) -> list[str | None]:
        return [self.memory.places.phase_of(row) for row in range(len(self.replay))]

    def is_category(self, *categories: str) -> Bools:
        """Return which allocations are of one of some categories, as far as is known or guessed."""
        return self._mask(claim.category in categories for claim in self.claims)

    def knows_all(self, category: str) -> bool:
        """Return whether no allocation is of a category by a guess from its lifetime."""
        return not any(claim.category == category and claim.evidence == "lifetime" for claim in self.claims)

    def is_role(self, role: str) -> Bools:
        owners = self.memory.owners
        return self._mask(row in owners and owners[row].role == role for row in range(len(self.replay)))

    @cached_property
    def element_bytes(self) -> Ints:
        """The size of an element of each known tensor; 0 if the run did not record it or tensors differ."""
        sizes = np.zeros(len(self.replay), dtype=np.int64)
        for row, owner in self.memory.owners.items():
            known = {part.element_bytes for part in owner.parts}
            sizes[row] = max(known.pop() or 0, 0) if len(known) == 1 else 0
        return sizes

    def states_of(self, requests: Requests, where: Bools | Ints) -> list[str | None]:
        """Return which state of a parameter some requests are: ``exp_avg`` of ``head.weight.exp_avg``.

        Where the run did not record it, the line that made the state says it of Adam and AdamW; else it is None.
        """
        owners, by_line = self.memory.owners, self._state_of_line
        return [
            owners[row].parts[0].name.rpartition(".")[2] if row in owners else by_line.get(self._state_line(row))
            for row in requests.source[where].tolist()
        ]

    def _state_line(self, row: int) -> Frame | None:
        frames = self.memory.stacks.facts_of(row).frames
        return next((frame for frame in frames if frame[0] == _MAKES_STATE and _ADAM_FILE.search(frame[1])), None)

    @cached_property
    def _state_of_line(self) -> dict[Frame | None, str]:
        """The state that each line of Adam's makes: a counter of one number, if it is on the GPU, then the moments."""
        largest: dict[Frame, int] = {}
        for row in np.flatnonzero(self.is_category("optimizer state")).tolist():
            line = self._state_line(row)
            if line is not None:
                size = int(self.replay.requested_bytes[row])
                largest[line] = max(largest.get(line, 0), size)
        lines = sorted(largest, key=itemgetter(2))
        moments = [line for line in lines if largest[line] > _LARGEST_SCALAR_BYTES]
        counters = [line for line in lines if largest[line] <= _LARGEST_SCALAR_BYTES]
        return {**dict.fromkeys(counters, "step"), **dict(zip(moments, _ADAM_MOMENTS, strict=False))}

    @cached_property
    def is_optimizer_temporary(self) -> Bools:
        memory = self.memory

        def is_one(row: int) -> bool:
            if self.claims[row].category != "temporaries":
                return False
            frames = memory.stacks.facts_of(row).frames
            return self.phases[row] == OPTIMIZER or any("torch/optim/" in file for _, file, _ in frames)

        return self._mask(is_one(row) for row in range(len(self.replay)))

    @cached_property
    def backward_passes(self) -> list[tuple[int, int]]:
        timeline = self.memory.timeline
        return [timeline.moments_of(phase) for phase in timeline.phases if phase.name == BACKWARD]

    def _mask(self, values: Iterator[bool]) -> Bools:
        return np.fromiter(values, np.bool_, len(self.replay))


Bound = Literal["least", "likely", "most"]
"""What is taken for that which nobody knows of an edit: what needs least memory, what was seen mostly, or most."""


class Change(NamedTuple):
    """Edited requests; ``rests_on`` and each line of ``unknown`` are sentences for people."""

    requests: Requests
    rests_on: str
    unknown: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
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

_ADAM_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""In the order in which ``Adam._init_group`` makes them (torch/optim/adam.py)."""

_ADAM = {*_ADAM_MOMENTS, "step"}
_ADAM_FILE = re.compile(r"torch/optim/adamw?\.py$")
_MAKES_STATE = "_init_group"


def edit_optimizer(program: Program, requests: Requests, kind: str) -> Change:
    """Replace the optimizer by none, or by one of `_OPTIMIZERS`; ``offload`` moves it to the host."""
    if kind not in _OPTIMIZERS:
        raise CannotModelError(f"no optimizer {kind!r}; it is one of {', '.join(_OPTIMIZERS)}")
    is_state = _find_tensors(program, requests, "optimizer_state")
    is_temporary = program.is_optimizer_temporary[requests.source]
    removed = f"{np.count_nonzero(is_temporary):,} temporaries of its steps removed"
    if kind in ("none", "sgd", "offload"):
        return Change(requests.keep(~(is_state | is_temporary)), f"{_OPTIMIZERS[kind]}: known state and {removed}")
    states = program.states_of(requests, is_state)
    if None in states:
        raise CannotModelError(
            "nothing says which state of a parameter each allocation is; `profkit run --memory` records that"
        )
    if unknown := {*filter(None, states)} - _ADAM:
        raise CannotModelError(f"the recorded optimizer keeps {', '.join(sorted(unknown))}, which Adam does not")
    if kind == "adamw-8bit":
        return _make_8bit(program, requests, np.flatnonzero(is_state), is_temporary)
    is_first = is_state.copy()
    is_first[is_state] = [state == "exp_avg" for state in states]
    if kind == "adamw-fused":
        return _fuse(requests, np.flatnonzero(is_first), is_temporary, has_counters="step" in states)
    # One buffer of the parameter's size, made in the first step.
    kept = is_first | ~(is_state | is_temporary)
    return Change(requests.keep(kept), f"{_OPTIMIZERS[kind]}: one known moment kept; {removed}")


_OPTIMIZERS = {
    "none": "no optimizer runs",
    "sgd": "SGD without momentum and weight decay",
    "sgd-momentum": "SGD with momentum",
    "adamw-8bit": "bitsandbytes' AdamW8bit",
    "adamw-fused": "torch's AdamW(fused=True)",
    "offload": "the optimizer and its state are on the host",
}


def _fuse(requests: Requests, moments: Ints, is_temporary: Bools, *, has_counters: bool) -> Change:
    """Remove the temporaries; the fused step keeps its counters on the GPU, one for each parameter."""
    if has_counters and not is_temporary.any():
        raise CannotModelError("the recorded optimizer makes no temporaries: it is fused already")
    text = (
        f"{_OPTIMIZERS['adamw-fused']}: {np.count_nonzero(is_temporary):,} temporaries of its steps removed, known"
        " state as recorded"
    )
    of = moments[:0] if has_counters else moments
    counters = np.full(len(of), _FUSED_STEP_BYTES, dtype=np.int64)
    return Change(_replace(requests, is_temporary, of, counters, requests.born[of] - 0.5), text)


def _make_8bit(program: Program, requests: Requests, where: Ints, gone: Bools) -> Change:
    sizes = requests.requested_bytes[where]
    elements = sizes // _element_bytes(program, requests.source[where])
    is_large = elements >= _LEAST_8BIT_ELEMENTS
    is_counter = np.array([state == "step" for state in program.states_of(requests, where)])
    gone[where] |= (sizes <= _LARGEST_SCALAR_BYTES) & is_counter
    maxima = -(-elements[is_large] // _BLOCK_ELEMENTS) * _WHOLE
    of = np.concatenate([where[is_large], np.full(_TABLES, where[0])])
    more = np.concatenate([maxima, np.full(_TABLES, _TABLE_BYTES)])
    edited = requests.resized(where, np.where(is_large, elements, elements * _WHOLE))
    edited = _replace(edited, gone, of, more, requests.born[of] + 0.5)
    text = f"{_OPTIMIZERS['adamw-8bit']}: known state in 8 bits with a maximum for each 256 elements; no temporaries"
    return Change(edited, text, _unsure_of_elements(program, requests.source[where]))


def _replace(requests: Requests, gone: Bools, of: Ints, sizes: Ints, born: Floats) -> Requests:
    edited = requests.add_copies(of, sizes, born, requests.freed[of])
    return edited.keep(~np.append(gone, np.zeros(len(of), dtype=np.bool_)))


def edit_gradients(program: Program, requests: Requests, kind: str) -> Change:
    """Store gradients in bf16, or move each to the host as soon as the next one has been made."""
    where = _find_tensors(program, requests, "gradient")
    if kind == "bf16":
        unsure = _unsure_of_elements(program, requests.source[where])
        unknown = "what backward makes before it adds to a gradient is taken as recorded"
        return Change(_halve(program, requests, where, "gradients"), "known gradients in bf16", (unknown, *unsure))
    if kind != "offload":
        raise CannotModelError(f"no kind of gradients {kind!r}; it is bf16 or offload")
    at = np.flatnonzero(where)
    at = at[np.argsort(requests.born[at], kind="stable")]
    born = requests.born[at]
    ends = np.array([end for _, end in program.backward_passes] or [0], dtype=np.float64)
    inside = np.minimum(np.searchsorted(ends, born), len(ends) - 1)
    end = np.where(ends[inside] > born, ends[inside], requests.event_count)
    following = np.append(born[1:], np.inf)
    return Change(
        requests.freed_at(at, np.minimum(requests.freed[at], np.minimum(following, end))),
        "each known gradient leaves the GPU when the next one has been made",
        ("the copies' speed: slow ones hold several gradients at a time",),
    )


def edit_parameters(program: Program, requests: Requests, kind: str) -> Change:
    """Store parameters in bf16, as ``model.bfloat16()``: their gradients and the optimizer's state become bf16 too."""
    if kind != "bf16":
        raise CannotModelError(f"no kind of parameters {kind!r}; it is bf16")
    where = _find_tensors(program, requests, "parameter")
    follows = _known_tensors(program, requests, "gradient") | _known_tensors(program, requests, "optimizer_state")
    unsure = _unsure_of_elements(program, requests.source[where])
    requests = _halve(program, requests, where, "parameters")
    requests = _halve(program, requests, follows)
    is_copy = program.is_category("autocast copies")[requests.source]
    if is_copy.any():
        text = "known parameters, gradients and optimizer state in bf16, without autocast's copies of parameters"
        unknown = "activations and temporaries that autocast left in fp32 are taken as recorded"
        return Change(requests.keep(~is_copy), text, (unknown, *unsure))
    others = program.is_category("activations", "temporaries")[requests.source] & ~(follows | where)
    text = "known parameters, gradients and optimizer state in bf16; activations and temporaries of 4-byte elements too"
    unknown = "which activations and temporaries are no floats of 4 bytes, and what the model keeps in fp32 on purpose"
    return Change(_halve(program, requests, others), text, (unknown, *unsure))


def drop_gradients(program: Program, requests: Requests, _kind: str) -> Change:
    """Free each gradient after the optimizer's step, as ``zero_grad(set_to_none=True)`` does."""
    at = np.flatnonzero(_find_tensors(program, requests, "gradient"))
    steps = [phase for phase in program.memory.timeline.phases if phase.name == OPTIMIZER]
    ends = np.array([program.memory.timeline.moments_of(phase)[1] for phase in steps], dtype=np.float64)
    first, last = np.searchsorted(ends, requests.born[at]), np.searchsorted(ends, requests.freed[at])
    at, first = at[last > first + 1], first[last > first + 1]
    if not len(at):
        raise CannotModelError("no known gradient outlives the step that made it: this is done already")
    of, born, freed = _made_again(program, requests, at, ends)
    return Change(
        requests.freed_at(at, ends[first] + 0.25).add_copies(of, requests.requested_bytes[of], born, freed),
        f"{len(at):,} known gradients are freed after each optimizer step",
        (f"when in later {BACKWARD} passes each gradient is made: taken as in the first",),
    )


def _made_again(program: Program, requests: Requests, at: Ints, ends: Floats) -> tuple[Ints, Floats, Floats]:
    """Return which gradients later steps make anew, when, and when they are freed: after the ``ends`` of the steps."""
    starts = np.array([low for low, _ in program.backward_passes], dtype=np.float64)
    copies = []
    for gradient in at.tolist():
        born, freed = float(requests.born[gradient]), float(requests.freed[gradient])
        first = int(np.searchsorted(starts, born, "right")) - 1
        for end in ends[ends > born][1:].tolist():
            start = starts[np.searchsorted(starts, end) - 1]
            if first >= 0 and start < freed:
                copies.append((gradient, _handed_over(requests, gradient, start + born - starts[first]), end + 0.25))
    of, births, frees = zip(*copies, strict=True) if copies else ((), (), ())
    return np.array(of, dtype=np.int64), np.array(births, dtype=np.float64), np.array(frees, dtype=np.float64)


def _handed_over(requests: Requests, gradient: int, position: float) -> float:
    """Return when backward had made what it adds to a gradient about then: from there on it is the gradient itself."""
    alike = np.flatnonzero(requests.requested_bytes == requests.requested_bytes[gradient])
    nearest = alike[np.abs(requests.born[alike] - position).argmin()]
    return float(max(requests.freed[nearest], position))


def _halve(program: Program, requests: Requests, where: Bools, what: str | None = None) -> Requests:
    sizes = requests.requested_bytes[where]
    elements = _element_bytes(program, requests.source[where])
    is_whole = (elements == _WHOLE) & (sizes > _LARGEST_SCALAR_BYTES)
    if what is not None and not is_whole.any():
        raise CannotModelError(f"the {what} are not of 4 bytes an element")
    return requests.resized(where, np.where(is_whole, sizes // _WHOLE * _HALF, sizes))


def _find_tensors(program: Program, requests: Requests, role: str) -> Bools:
    where = _known_tensors(program, requests, role)
    if where.any():
        return where
    if program.memory.recorded is None:
        raise CannotModelError(f"nothing says which allocations are {ROLES[role]}; `profkit run --memory` records that")
    raise CannotModelError(f"the run recorded no {ROLES[role]} on the GPU")


def _known_tensors(program: Program, requests: Requests, role: str) -> Bools:
    """Return which requests are of a role, as the run recorded; without a record, as their call stacks prove.

    A part of a category that is known does not say what an edit of all of it would do.
    """
    if program.memory.recorded is not None:
        return program.is_role(role)[requests.source]
    category = ROLES[role]
    if not program.knows_all(category):
        raise CannotModelError(
            f"which allocations are {category} is only guessed from their lifetimes; `profkit run --memory` records it"
        )
    return program.is_category(category)[requests.source]


def _element_bytes(program: Program, rows: Ints) -> Ints:
    known = program.element_bytes[rows]
    return np.where(known > 0, known, _WHOLE)


def _unsure_of_elements(program: Program, rows: Ints) -> tuple[str, ...]:
    is_known = program.element_bytes[rows].all()
    return () if is_known else ("the run does not say how large the elements are: taken as 4 bytes",)


_CHUNKS = 16
_NEAR = 8
"""How many allocations before and after that of the loss, and before and after its free, may be of the logits."""

_FUNCTION = ("cross_entropy", "torch/nn/functional")
_KNOWN = ("parameters", "gradients", "optimizer state", "buffers")


def edit_loss(program: Program, requests: Requests, kind: str) -> Change:
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
    where = (is_logits & is_near)[requests.source]
    now = requests.requested_bytes[where]
    return Change(
        requests.resized(where, -(-now // number)),
        f"{np.count_nonzero(where):,} allocations of the logits' size, in {number} chunks",
        ("how many chunks your fused loss makes, and its own buffers: loss:fused:chunks=N",),
    )
