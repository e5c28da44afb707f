"""What memory is for: the category of every allocation, with the evidence for it.

Evidence, the strongest first: ``identity`` (the run recorded whose tensor it is), ``stack`` (these lines allocate only
one kind of thing, or they are compiled code's, which frees again what they allocate), ``lifetime`` (a guess from the
phases in which it was allocated and freed, or from lines that mostly allocate this kind), ``none``.

The guess: memory allocated in the forward pass and freed in the backward pass was saved for backward (activations); if
freed earlier, it was a temporary. Memory allocated in the backward pass and freed within it was a temporary; what
outlives it is a gradient, or activations if a checkpoint computed it again. Memory allocated by the optimizer is its
state if it outlives the step. The autograd thread has no Python frames: where the history has stacks and no phases, an
alloc without a stack belongs to backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import compress, repeat
from typing import Any

import numpy as np

from profkit.analysis.memory import read_metadata
from profkit.analysis.memory.generated_memory import ReplayedDevice
from profkit.analysis.memory.stacks import StackFacts
from profkit.names import BACKWARD, OPTIMIZER
from profkit.run.owners import ROLES
from profkit.snapshot.columns import ALLOC, Codes, Ints

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "inputs",
    "buffers",
    "communication",
    "autocast copies",
    "workspace",
    "unknown",
)
EVIDENCE = ("identity", "stack", "lifetime", "none")

# The default workspaces of cuBLAS, in bytes requested: 32 MiB (Hopper and later) and 4096 KiB × 2 + 16 KiB × 8 (before)
# (aten/src/ATen/cuda/CublasHandlePool.cpp). cuBLASLt's 1 MiB is too common a size to guess from.
_WORKSPACE_BYTES = (2**25, (4096 * 2 + 16 * 8) * 1024)

# Roles whose name belongs to one tensor; a saved tensor has its module's name, and a module saves several.
_OF_ONE_TENSOR = frozenset({"parameter", "gradient", "optimizer_state", "buffer", "input"})

_MAIN, _BACKWARD, _OPTIMIZER, _UNKNOWN = range(4)


@dataclass(frozen=True)
class Claim:
    """What an allocation is for, how that is known, and whose it is (None if unknown)."""

    category: str
    evidence: str
    owner: str | None = None


Named = tuple[str, str]
"""Category and name of a tensor."""


class Classifier:
    def __init__(self, memory: ReplayedDevice) -> None:
        self._memory = memory
        self._replay, self._timeline, self._stacks = memory.history.replay, memory.timeline, memory.stacks
        self._by_stack: dict[int, str | None] = {}

    def claim_of(self, row: int) -> Claim:
        owner = self._memory.owners.get(row)
        text = read_metadata(self._stacks.raw_of(row))
        if owner is not None and owner.role in ROLES:
            return Claim(ROLES[owner.role], "identity", owner.name or text)
        name = text or (owner.name if owner else None)
        number = self._stacks.number_of(row)
        if number not in self._by_stack:
            self._by_stack[number] = category_of_stack(self._stacks.facts[number])
        category = self._by_stack[number] or self._category_of_code(row)
        if category is not None:
            return Claim(category, "stack", name)
        category = self._category_of_life(row, self._stacks.facts[number])
        return Claim("unknown", "none", name) if category is None else Claim(category, "lifetime", name)

    def named(self, row: int) -> Named | None:
        """Return which tensor an allocation is, as the run recorded; None if unknown, or if several share the name."""
        owner = self._memory.owners.get(row)
        if owner is None or owner.role not in _OF_ONE_TENSOR or not owner.name:
            return None
        return ROLES[owner.role], owner.name

    def _category_of_code(self, row: int) -> str | None:
        """What it frees itself was temporary. A library that it calls writes its result into memory of the code: what
        the library allocates besides and keeps is its workspace.
        """
        held = self._memory.generated.held(row)
        if held is None:
            return None
        is_kept = int(self._replay.freed[row]) == self._replay.event_count
        if held.is_of_library:
            return "workspace" if is_kept else "temporaries"
        return "temporaries" if held.is_freed_in_call else None

    def _category_of_life(self, row: int, stack: StackFacts) -> str | None:
        birth, freed = int(self._replay.birth[row]), int(self._replay.freed[row])
        if birth < 0:
            return None
        is_kept = freed == self._replay.event_count
        likely = self._category_of_kept(row, stack) if is_kept else None
        if likely is not None:
            return likely
        is_in_optimizer = any("torch/optim/" in file for _, file, _ in stack.frames)
        regime = _OPTIMIZER if is_in_optimizer else int(self._regimes[birth])
        stays = freed >= int(self._regime_ends[birth])
        if regime == _BACKWARD:
            return self._category_of_backward(birth, freed, stays=stays)
        if regime == _OPTIMIZER:
            return "optimizer state" if stays else "temporaries"
        if regime == _MAIN:
            return self._category_of_forward(birth, freed, is_kept, stack)
        return None

    def _category_of_kept(self, row: int, stack: StackFacts) -> str | None:
        """A library asks for cuBLAS's workspace once, on the first use of a stream, within a product of matrices: the
        same line has just asked for the memory of the product. (Of compiled code other lines do that.) So a workspace
        is the first allocation of its size by its lines, and the only one that they keep; what is made anew in every
        step (a gradient) is kept from the last step.
        """
        number = self._stacks.number_of(row)
        is_in_product = stack.is_compiled or (
            row > self._replay.start_count and self._stacks.number_of(row - 1) == number
        )
        # User code never allocates a workspace directly.
        is_in_library = not stack.python or stack.python[0] not in stack.user
        if row in self._first_and_only_kept and is_in_product and is_in_library:
            return "workspace"
        return _category_by(_LIKELY_SIGNS, stack)

    def _category_of_backward(self, birth: int, freed: int, *, stays: bool) -> str | None:
        never = self._replay.event_count
        again = self._timeline.recomputation_at(birth)
        if again is not None and freed >= self._timeline.moment_at(again.end_us):
            return "activations"
        if stays and int(self._regime_ends[birth]) < never:
            return "gradients"
        return None if freed == never else "temporaries"

    def _category_of_forward(self, birth: int, freed: int, is_kept: bool, stack: StackFacts) -> str | None:
        """What the user's own lines allocated, without a library between, and backward did not free is data."""
        never = self._replay.event_count
        at = int(np.searchsorted(self._backward_events, birth))
        backward = int(self._backward_events[at]) if at < len(self._backward_events) else never
        outlives = backward < never and freed >= int(self._regime_ends[backward])
        is_data = bool(stack.user) and stack.user == stack.python and self._has_modules
        if is_data and (is_kept or outlives):
            return "inputs"
        if is_kept:
            return "activations" if backward == never and len(self._backward_events) else None
        return "activations" if freed > backward else "temporaries"

    @cached_property
    def _first_and_only_kept(self) -> frozenset[int]:
        replay, rows_of = self._replay, dict[tuple[int, int], list[int]]()
        for row in np.flatnonzero(np.isin(replay.requested_bytes, _WORKSPACE_BYTES)).tolist():
            rows_of.setdefault((int(replay.requested_bytes[row]), self._stacks.number_of(row)), []).append(row)
        kept = replay.freed == replay.event_count
        return frozenset(rows[0] for rows in rows_of.values() if kept[rows[0]] and kept[rows].sum() == 1)

    @cached_property
    def _has_modules(self) -> bool:
        rows = range(self._replay.start_count, len(self._replay))
        return any(any(frame[0] == "_call_impl" for frame in self._stacks.facts_of(row).python) for row in rows)

    @cached_property
    def _backward_events(self) -> Ints:
        return np.flatnonzero(self._regimes == _BACKWARD)

    @cached_property
    def _regimes(self) -> Codes:
        events = self._memory.device.events
        special = {BACKWARD: _BACKWARD, OPTIMIZER: _OPTIMIZER}
        has_backward = any(phase.name == BACKWARD for phase in self._timeline.phases)
        codes = np.full(len(events), _MAIN, dtype=np.int8) if has_backward else self._regimes_by_frames()
        for phase in self._timeline.phases:
            first, last_moment = self._timeline.moments_of(phase)
            codes[first:last_moment] = special.get(phase.name, _MAIN)
        return codes

    def _regimes_by_frames(self) -> Codes:
        events = self._memory.device.events
        is_alloc = events.action == ALLOC
        frames: list[Any] = list(map(dict.get, compress(events.raw, is_alloc.tolist()), repeat("frames")))
        try:
            has_frames = np.fromiter(map(list.__len__, frames), np.int64, len(frames)) > 0
        except TypeError:  # some are no list
            has_frames = np.array([isinstance(one, list) and bool(one) for one in frames], dtype=np.bool_)
        if not has_frames.any():
            return np.full(len(events), _UNKNOWN, dtype=np.int8)
        by_frames = np.where(has_frames, _MAIN, _BACKWARD).astype(np.int8)
        last = np.cumsum(is_alloc) - 1
        return np.where(last >= 0, by_frames[np.maximum(last, 0)], _MAIN).astype(np.int8)

    @cached_property
    def _regime_ends(self) -> Ints:
        codes = self._regimes
        borders = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes))
        return borders[np.searchsorted(borders, np.arange(len(codes)), "right")]


def category_of_stack(stack: StackFacts) -> str | None:
    """Return the category that a stack alone proves, or None.

    Only frames within the innermost module call or the innermost line of the user's count: a wrapper such as
    DistributedDataParallel surrounds everything. Native frames have the names of their C++ functions, so the rules for
    them need ``stacks="all"``.
    """
    return _category_by(_SIGNS, stack)


def _category_by(signs: tuple[tuple[str, str, str], ...], stack: StackFacts) -> str | None:
    for frame in stack.frames:
        name, file, _ = frame
        for category, beginning, mark in signs:
            if name.startswith(beginning) and mark in file:
                return category
        if name == "_call_impl" or frame in stack.user:
            break
    return None


_SIGNS = (
    ("optimizer state", "_init_group", "torch/optim/"),
    # Layers whose constructor makes parameters and nothing else (a batch norm's also makes buffers).
    ("parameters", "__init__", "torch/nn/modules/linear"),
    ("parameters", "__init__", "torch/nn/modules/conv"),
    ("parameters", "__init__", "torch/nn/modules/sparse"),
    ("parameters", "__init__", "torch/nn/modules/normalization"),
    ("parameters", "", "torch/nn/parameter"),
    ("gradients", "_make_grads", ""),
    ("gradients", "torch::autograd::AccumulateGrad", ""),
    # The buffers of collectives. Other lines below torch/distributed/ and torch/nn/parallel/ run every operation of
    # a DTensor, and copy inputs and outputs.
    ("communication", "_ddp_init_helper", "torch/nn/parallel/distributed"),
    ("communication", "", "torch/distributed/distributed_c10d"),
    ("communication", "", "torch/distributed/_functional_collectives"),
    ("communication", "", "_fully_shard/_fsdp_collectives"),
    ("communication", "c10d::", ""),
    ("workspace", "at::cuda::getCUDABlas", ""),
    ("workspace", "at::cuda::getCurrentCUDABlas", ""),
    ("workspace", "at::cuda::setWorkspaceForHandle", ""),
    ("autocast copies", "at::autocast::cached_cast", ""),
)
"""(category, how the function's name begins, what its file's path contains)"""

_LIKELY_SIGNS = (
    # ``to``, ``cuda`` and ``half`` move parameters, and buffers and gradients too.
    ("parameters", "_apply", "torch/nn/modules/module"),
)
"""Signs of what is kept, as good as a guess from its lifetime."""
