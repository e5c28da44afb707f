"""Apply edits, written as on the command line, to a recorded program's requests: one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from profkit.analysis.whatif.change import Bound, CannotModelError, Change
from profkit.analysis.whatif.checkpoint import edit_checkpoint
from profkit.analysis.whatif.known_tensors import (
    drop,
    drop_gradients,
    edit_gradients,
    edit_optimizer,
    edit_parameters,
)
from profkit.analysis.whatif.loss import edit_loss
from profkit.analysis.whatif.scale import edit_size
from profkit.analysis.whatif.stream import Program, Stream
from profkit.errors import UsageError

FORMS = (
    "optimizer:none|sgd|sgd-momentum|adamw-8bit|adamw-fused|offload",
    "gradients:bf16|offload",
    "parameters:bf16",
    "checkpoint:GLOB[:every=K|:group=K][:reentrant]",
    "batch:×F",
    "sequence:×F",
    "loss:fused[:chunks=N]",
    "zero-grad:none",
    "drop:GLOB",
)

_EDITS: dict[str, Callable[[Program, Stream, str], Change]] = {
    "optimizer": edit_optimizer,
    "gradients": edit_gradients,
    "parameters": edit_parameters,
    "loss": edit_loss,
    "zero-grad": drop_gradients,
    "drop": drop,
}
_CHECKPOINT = "checkpoint"
_SCALES = ("batch", "sequence")


@dataclass(frozen=True)
class Applied:
    """One edit as it was written, and what is known of it."""

    text: str
    rests_on: str
    unknown: tuple[str, ...]
    recomputed: tuple[str, ...]
    """Ranges whose forward pass runs a second time."""


def apply_edits(
    program: Program,
    texts: Sequence[str],
    others: Sequence[Program] = (),
    *,
    stream: Stream | None = None,
    bound: Bound = "likely",
) -> tuple[Stream, tuple[Applied, ...]]:
    """Return the program's requests after some edits, and what each of them rests on.

    Args:
        program: what was recorded.
        texts: edits such as ``optimizer:sgd``; `FORMS` lists them.
        others: runs of the same program with another batch or sequence, for ``batch:×F`` and ``sequence:×F``.
        stream: what the edits change; by default what was recorded.
        bound: what to take for what is not known of them.

    Raises:
        UsageError: an edit is unknown, the snapshot says too little for it, or it would change nothing.
    """
    stream, applied = stream or program.recorded(), []
    for text in texts:
        name, _, argument = text.partition(":")
        if not argument or name not in (*_EDITS, *_SCALES, _CHECKPOINT):
            raise UsageError(f"no edit {text!r}; edits are {', '.join(FORMS)}")
        try:
            if name in _SCALES:
                change = edit_size(program, stream, argument, others, bound)
            elif name == _CHECKPOINT:
                change = edit_checkpoint(program, stream, argument, bound)
            else:
                change = _EDITS[name](program, stream, argument)
        except CannotModelError as error:
            raise UsageError(f"{text}: {error}") from None
        stream = change.stream
        applied.append(Applied(text, change.rests_on, change.unknown, change.recomputed))
    return stream, tuple(applied)
