"""The names of ranges, and of collectives: the capture wing opens them, the analysis wing looks for them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

_INDEX = re.compile(r"\.\d+$")
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

COMPILING = "compiling"
"""The range around torch.compile's own work begins so: kernels in it were run to choose among them."""

COLLECTING = "collecting garbage"
"""The range around a full collection of Python's garbage, in which nothing else runs on its thread."""

_COMPILED = "compiled "
_BETWEEN = " / "
# What separates names, and what torch.profiler writes no name with: it would be "unknown".
_SPECIAL = re.compile(r"[%/+]|[^ -~]|(?<=^shared):")
_REPLAY = "CUDA graph "
_GRAPH_ID = re.compile(r"[0-9a-f]{10}")
COMPILED_KERNEL = "compiled kernel"
"""What a launch on the CPU that calls no operator of torch is named in torch.profiler's trace: compiled C++."""

_COLLECTIVES = {
    "all_reduce": r"all_?reduce",
    "all_gather": r"all_?gather",
    "reduce_scatter": r"reduce_?scatter",
    "all_to_all": r"all_?to_?all",
    "barrier": r"barrier",
    "broadcast": r"broadcast",
    "reduce": r"reduce",
    "gather": r"gather",
    "scatter": r"scatter",
    "send": r"send",
    "recv": r"recv|receive",
}
"""Kind → what names of it contain. The first that fits counts: ``all_reduce`` before ``reduce``."""

_PHASE = re.compile(rf"({'|'.join(PHASES)})(?: (?:\d+|\*))?", re.IGNORECASE)


@lru_cache(4096)
def phase_of(name: str) -> str | None:
    """Return the phase that a range of this name is: ``forward`` of ``Forward`` and ``forward 2``; None of others."""
    match = _PHASE.fullmatch(name)
    return None if match is None else match[1].lower()


def step_range(number: int) -> str:
    return f"{STEP} {number}"


def context_range(context: int) -> str:
    return f"{CONTEXT} {context}"


def layer_range(number: int) -> str:
    return f"layer {number}"


@lru_cache(4096)
def kind_of(name: str) -> str:
    """Return ``layer *`` for ``layer 3``: names that differ only in a number, alone or at their end, are one kind.

    A line that modules share names each kind of them once.
    """
    if not is_shared(name):
        return _NUMBER.sub("*", name)
    return name_shared(map(kind_of, sharing_modules(name)))


def name_in_list(name: str) -> str:
    """Return ``blocks.0.experts.*`` for ``blocks.0.experts.3``: the modules of one list are one."""
    return _INDEX.sub(".*", name)


def name_shared(modules: Iterable[str]) -> str:
    """Return the name of the line that modules share: each once, in alphabetical order, numbers by their size."""
    return SHARED + " + ".join(sorted(set(modules), key=_alphabetical))


def _alphabetical(module: str) -> list[tuple[int, str]]:
    return [(len(part) if part.isdecimal() else 0, part) for part in module.split(".")]


def is_shared(name: str) -> bool:
    return name.startswith(SHARED)


def sharing_modules(name: str) -> list[str]:
    return name.removeprefix(SHARED).split(" + ")


@dataclass(frozen=True)
class LaunchPlace:
    """What the range around a launch of compiled code says: where it stands, and under which modules.

    ``path`` are the modules around it, outermost first, by the names of their ranges. ``shared`` are those that a fused
    kernel computes for together, below the last of ``path``; none for a launch of one module.
    """

    graph: str
    line: int
    path: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def below(self, around: Iterable[str]) -> list[str]:
        """Return the ranges that the launch lies in below those that are open around it, outermost first.

        What is open there already is not repeated, each range for one module: two modules may have one name.
        """
        first = 0
        for module in around:
            first = next((at + 1 for at in range(first, len(self.path)) if self.path[at] == module), first)
        return [*self.path[first:], *([name_shared(self.shared)] if self.shared else [])]


def graph_range(id: str) -> str:
    """Return the name of the range around a replay of a captured graph."""
    return _REPLAY + id


def read_graph_range(name: str) -> str | None:
    """Return the id of the captured graph whose replay a range is around; None if it is another range."""
    id_ = name.removeprefix(_REPLAY)
    return id_ if id_ != name and _GRAPH_ID.fullmatch(id_) else None


def launch_range(place: LaunchPlace) -> str:
    """Return the name of the range around a launch: ``compiled 3f9a1c22e0:123 model / h.0 / shared: h.0.a + h.0.b``.

    What separates names, and what is not ASCII, is percent-encoded within a name: ``x%2Fy`` is the module ``x/y``.
    """
    last = (SHARED + " + ".join(map(_encoded, place.shared)),) if place.shared else ()
    return f"{_COMPILED}{place.graph}:{place.line} {_BETWEEN.join((*map(_encoded, place.path), *last))}".rstrip()


def read_launch_range(name: str) -> LaunchPlace | None:
    """Return what a range's name says of a launch of compiled code; None if it is another range."""
    head, _, rest = name.removeprefix(_COMPILED).partition(" ")
    graph, _, line = head.partition(":")
    # A module of the script may be called ``compiled 1:2``.
    if not name.startswith(_COMPILED) or not _GRAPH_ID.fullmatch(graph) or not line.isdecimal() or len(line) > 9:
        return None
    path = rest.split(_BETWEEN) if rest else []
    shared = path.pop().removeprefix(SHARED).split(" + ") if path and path[-1].startswith(SHARED) else []
    return LaunchPlace(graph, int(line), tuple(map(unquote, path)), tuple(map(unquote, shared)))


def _encoded(name: str) -> str:
    return _SPECIAL.sub(lambda special: quote(special[0], safe=""), name)


C10_DTYPES = {
    **{"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64"},
    **{"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
"""What torch's C++ calls types, and what Python does; the rest differ in capital letters alone."""


def name_dtype(name: str) -> str:
    """Return Python's name of a type by that of torch's C++."""
    return C10_DTYPES.get(name, name.lower())


@lru_cache(1024)
def kind_of_collective(name: str) -> str | None:
    """Return which kind of collective a name of torch or NCCL means; None for anything else.

    ``nccl:_all_gather_base``, ``c10d::allreduce_``, ``ncclDevKernel_ReduceScatter_Sum_f32_RING_LL`` are such names.
    """
    return next((kind for kind, pattern in _COLLECTIVES.items() if re.search(pattern, name, re.IGNORECASE)), None)
