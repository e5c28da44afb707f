"""A fused loss: the logits and their gradients in chunks, as Liger Kernel's cross entropy computes them."""

from __future__ import annotations

import numpy as np

from profkit.analysis.whatif.change import CannotModelError, Change
from profkit.analysis.whatif.stream import Program, Stream

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
    in_loss = [row for row in range(len(program.replay)) if _is_loss(memory.stacks.of(row).frames)]
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


def _is_loss(frames: tuple[tuple[str, str, int], ...]) -> bool:
    function, file = _FUNCTION
    return any(name == function and file in path for name, path, _ in frames)
