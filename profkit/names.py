"""The standard names of ranges: the capture wing opens them, the analysis wing looks for them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d++(?![A-Za-z0-9])|(?<!\d)\d+$")

STEP = "step"
WARMUP = "warmup"
COUNTED = "counted step"
"""A further step, after those that are measured, in which a target's work is counted."""
UNFINISHED = "unfinished"
"""In a step's range: the program ended, or the recording had to, before the step did."""
CONTEXT = "context"
FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
RECOMPUTE = "recompute"
"""Within ``backward``: what a checkpoint computes again."""

INFERENCE = "inference"
"""A model's call without gradients."""
PREFILL = "prefill"
"""Within ``generate``: the first call of the model, which reads the prompt."""
DECODE = "decode"
"""Within ``generate``: each later call."""

EVALUATION = (INFERENCE, PREFILL, DECODE)
"""What evaluates a model: its calls without gradients. None of them is part of ``forward``."""

PHASES = (FORWARD, LOSS, BACKWARD, OPTIMIZER, *EVALUATION)
"""The parts of a step, in the order in which they run: those of training, then those of inference."""

DATA = "data"
"""Waiting for the next batch. It need launch no work, so that it is no phase: what looks for kernels passes it over."""

REPLICA = "replica"
"""The work of a copy of the model on a thread of its own, within the call of the model (``nn.DataParallel``)."""

EMBEDDING = "embedding"
ATTENTION = "attention"
FFN = "ffn"
HEAD = "head"
SCALED_DOT_PRODUCT = "scaled dot product attention"
SCORES = "computing attention scores"
SOFTMAX = "computing softmax"
VALUE_PRODUCT = "final matmul"


SHARED = "shared: "
"""Begins the name of the range of a kernel that several modules share: ``shared: h.3.ln_2 + h.3.mlp``."""

MEMORY_TEXT = "profkit:"
"""How the text begins that the hooks write into an allocation: ``profkit:PHASE:MODULE``."""

MODEL = "model"
"""The range of the outermost module; the modules in it are named as its ``named_modules`` does."""


_PHASE = re.compile(rf"({'|'.join(PHASES)})(?: (?:\d+|\*))?", re.IGNORECASE)


@lru_cache(4096)
def phase_of(name: str) -> str | None:
    """Return the phase that a range of this name is: ``forward`` of ``Forward`` and ``forward 2``; None of others."""
    match = _PHASE.fullmatch(name)
    return None if match is None else match[1].lower()


def step_range(number: int) -> str:
    """Return the name of the range around step ``number``, counted from 0."""
    return f"{STEP} {number}"


def context_range(context: int) -> str:
    """Return the name of the range around the steps of one context length, where a run has several."""
    return f"{CONTEXT} {context}"


def layer_range(number: int) -> str:
    """Return the name of the range around layer ``number``, counted from 0."""
    return f"layer {number}"


@lru_cache(4096)
def kind_of(name: str) -> str:
    """Return ``layer *`` for ``layer 3``: names that differ only in a number, alone or at their end, are one kind.

    A line that modules share names each kind of them once.
    """
    if not is_shared(name):
        return _NUMBER.sub("*", name)
    return name_shared(map(kind_of, sharing_modules(name)))


def name_shared(modules: Iterable[str]) -> str:
    """Return the name of the line that modules share: each once, in alphabetical order, numbers by their size.

    The order in which a kernel computes for them says nothing, so the same modules always share the same line.
    """
    return SHARED + " + ".join(sorted(set(modules), key=_alphabetical))


def _alphabetical(module: str) -> list[tuple[int, str]]:
    return [(len(part) if part.isdecimal() else 0, part) for part in module.split(".")]


def is_shared(name: str) -> bool:
    """Return whether a range stands for launches that several modules share."""
    return name.startswith(SHARED)


def sharing_modules(name: str) -> list[str]:
    """Return the modules that the name of a shared line holds."""
    return name.removeprefix(SHARED).split(" + ")
