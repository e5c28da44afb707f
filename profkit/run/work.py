"""``work.json``: how much work each range of a run does, counted in one step that is neither timed nor recorded.

All numbers are of one instance of a range and include the ranges inside it. A path names the profkit ranges around it
below the step, outermost first: ``("forward", "layer 0")``; ``()`` is the step itself. In a run over several context
lengths that range stands before: ``("context 128", "forward")``, and ``("context 128",)`` for a step in it.

- ``flops``: matrix products and convolutions as executed, by the formulas of torch's FlopCounterMode; the gradient
  of a convolution's weights counts once, and not once for each of its groups.
- ``needed_flops``: the same, but of causal attention only what the mask leaves: for query q its q + 1 keys.
- ``recomputed_flops``: the part of ``flops`` that repeats what the forward pass did: what a checkpoint computes again,
  and of fused attention's backward the product for the scores. The model asks for the rest; the hardware does both.
- ``other_flops``: all operations that torch has no formula for, by profkit's own (`profkit.capture`).
- ``least_bytes``: what must be moved if nothing is moved twice: what the range reads of memory that it has not written
  to before, and what it writes that an operator outside reads later, or that is still there after the step; each part
  of a tensor once. What is made and used up inside is free, what backward wants of forward is not. A range's bytes are
  at most the sum of those of the ranges and operators inside it.

- ``lines``: which lines of the user's own called the operators of the forward pass, and of what runs between passes.

``ceilings.json``, what a device can do at most: as ``profkit ceilings`` measured it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Literal

from profkit.errors import RunError
from profkit.run import read_record
from profkit.text_kinds import (
    FunctionName,
    GpuName,
    Message,
    Moment,
    OperatorName,
    RangeName,
    SourceFile,
    Version,
    Word,
)

VERSION = 1
"""Of both files."""

FUSED = "fused kernels of compiled code, except their matrix products"
"""Stands in ``missing`` where torch.compile fused operators: their bytes and their other work are not known."""

Source = Literal["formula", "counted"]
"""``formula``: worked out from a built-in model's sizes, by profkit of before 2027. ``counted``: while a step ran."""


@dataclass(frozen=True)
class RangeWork:
    """The work of one instance of a range.

    ``flops_by_dtype`` sums to ``flops``; its keys are those of ``profkit ceilings`` ("fp32", "tf32", "bf16", "fp16"),
    else torch's name of the type. ``instances`` is how many a step has. Where they differ (``varies``) the numbers are
    means, rounded down for each type and number, and ``flops_in_step`` are the FLOPs of all instances together by type;
    else it is empty. Files of before 2027 know no ``recomputed_flops``: 0. Some of November 2026 have no
    ``needed_flops``: None.
    """

    path: tuple[RangeName, ...]
    flops: int
    other_flops: int
    least_bytes: int
    flops_by_dtype: dict[Word, int]
    instances: int = 1
    varies: bool = False
    recomputed_flops: int = 0
    flops_in_step: dict[Word, int] = field(default_factory=dict)
    needed_flops: int | None = None

    def flops_of(self, count: int) -> dict[str, int]:
        """Return the FLOPs of ``count`` instances by type: exact for those of whole steps."""
        if not self.flops_in_step:
            return {dtype: flops * count for dtype, flops in self.flops_by_dtype.items()}
        return {dtype: flops * count // self.instances for dtype, flops in self.flops_in_step.items()}

    def __post_init__(self) -> None:
        counts = (self.flops, self.other_flops, self.needed_flops or 0, self.least_bytes, self.instances)
        if min(*counts, self.recomputed_flops, *self.flops_by_dtype.values(), *self.flops_in_step.values()) < 0:
            raise ValueError("a negative count")


VOLUME_CONVOLUTION, SIGNAL_CONVOLUTION, INSTANCE_NORM = "convolution3d", "convolution1d", "instance_norm"
"""Operators of a line that their shapes tell from torch's ``convolution`` and ``native_batch_norm``."""


@dataclass(frozen=True)
class OperatorLine:
    """What a line of the user's own made one operator do in a step, ``count`` times, under ranges of the same kinds.

    ``path`` has the ranges' names with ``*`` for their numbers. ``dtype`` is that of the result. ``bytes`` is what the
    operators read and wrote.
    """

    path: tuple[RangeName, ...]
    operator: OperatorName
    dtype: Word
    file: SourceFile
    line: int
    function: FunctionName
    count: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class Padding:
    """The positions of a step's samples, by the ``attention_mask`` of each outermost call, or else by what all samples'
    tokens end with.

    ``in_longest`` of them lie within the longest sample of their batch; ``used`` are no padding.
    """

    positions: int
    in_longest: int
    used: int


@dataclass(frozen=True)
class GivenMask:
    """The masks that modules of one kind gave to so many ``calls`` of fused attention in a step.

    ``causal`` of them hide what ``is_causal`` hides and nothing else, ``empty`` hide nothing.
    """

    module: RangeName
    calls: int
    causal: int
    empty: int


@dataclass(frozen=True)
class ScoredPositions:
    """The positions for which modules of one kind scored classes in a step; of all but the ``counted`` ones the loss
    ignores the scores.
    """

    module: RangeName
    positions: int
    counted: int


@dataclass(frozen=True)
class UnreadGradients:
    """Modules of one kind (``*`` for their numbers) and the gradients in them that no optimizer reads.

    ``parameters`` have such a gradient, of so many ``bytes`` together, in ``unread`` of the ``instances``. In ``early``
    of these nothing of the backward pass is needed, since nothing in them depends on a parameter that is stepped, and
    in ``first`` no gradient of what comes in, which does not depend on one.

    With ``before`` it is so in the passes between two optimizers' steps, of which the second is that one, from 0: their
    gradients, in this ``model``, are thrown away before their own optimizer's step.
    """

    module: RangeName
    parameters: int
    bytes: int
    instances: int
    unread: int
    early: int
    first: int = 0
    before: int | None = None
    model: RangeName | None = None


@dataclass(frozen=True)
class DenseTable:
    """Embedding tables of one kind whose gradients have all their ``rows``, of ``bytes`` together.

    A step's indices name at most ``used`` of the rows; the others are zeros.
    """

    module: RangeName
    rows: int
    used: int
    bytes: int


@dataclass(frozen=True)
class IndependentCalls:
    """A module that a pass calls so often, though no call needs what another of them made.

    It is given images of so many ``sizes``, which cannot be stacked together; 1 where it convolves none.
    """

    module: RangeName
    calls: int
    sizes: int = 1


@dataclass(frozen=True)
class IndependentTurns:
    """A loop of so many ``turns`` in the code of a module's own, of which none needs what another one made.

    The line is the first in it that multiplies, or else the first that computes.
    """

    module: RangeName
    turns: int
    file: SourceFile
    line: int
    function: FunctionName


@dataclass(frozen=True)
class RepeatedCalls:
    """A module that a pass calls so often on what it was given the first time."""

    module: RangeName
    calls: int


@dataclass(frozen=True)
class RunWork:
    """The content of ``work.json``.

    ``dtype`` is the one in which most of the FLOPs are done, None where there are none; ``model_flops`` those that the
    model asks for in a step, forward and backward, whatever is computed again: what MFU counts (Chowdhery et al. 2022,
    appendix B). ``missing`` names operators without a formula. Files of before December 2026 have no ``lines``,
    ``unread_gradients``, ``tables``, ``independent_calls``, ``independent_turns``, ``repeated_calls``,
    ``given_masks``, ``scored_positions`` and ``optimizer_steps``, how many steps of optimizers the counted one had, and
    no ``padding``: None where no call had a mask.
    """

    version: int
    source: Source
    dtype: Word | None
    ranges: tuple[RangeWork, ...]
    model_flops: int
    missing: tuple[OperatorName, ...]
    lines: tuple[OperatorLine, ...] = ()
    padding: Padding | None = None
    unread_gradients: tuple[UnreadGradients, ...] = ()
    tables: tuple[DenseTable, ...] = ()
    independent_calls: tuple[IndependentCalls, ...] = ()
    repeated_calls: tuple[RepeatedCalls, ...] = ()
    optimizer_steps: int = 0
    given_masks: tuple[GivenMask, ...] = ()
    scored_positions: tuple[ScoredPositions, ...] = ()
    independent_turns: tuple[IndependentTurns, ...] = ()

    def find(self, path: tuple[str, ...]) -> RangeWork | None:
        return next((work for work in self.ranges if work.path == path), None)


def read_work(path: Path) -> RunWork:
    """Return the content of a ``work.json``; RunError if it cannot be read, or is of another version or form."""
    return read_record(RunWork, path, VERSION)


@dataclass(frozen=True)
class MeasuredDevice:
    """What was measured. ``clock_mhz`` is the SMs' clock seen under load and ``clock_max_mhz`` what the device allows;
    None where the device does not report it.
    """

    name: GpuName
    uuid: Message | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None


@dataclass(frozen=True)
class Gemm:
    """Products of ``(m, k)`` by ``(k, n)`` in ``dtype``: "fp32", "tf32", "bf16" or "fp16"."""

    dtype: Word
    m: int
    n: int
    k: int
    best_flops_per_s: float
    median_flops_per_s: float

    def __post_init__(self) -> None:
        _refuse_impossible(self.best_flops_per_s, self.median_flops_per_s)


@dataclass(frozen=True)
class Copy:
    """A copy on the device of ``bytes``; its rates count each byte twice, read and written."""

    bytes: int
    best_bytes_per_s: float
    median_bytes_per_s: float

    def __post_init__(self) -> None:
        _refuse_impossible(self.best_bytes_per_s, self.median_bytes_per_s)


@dataclass(frozen=True)
class Ceilings:
    version: int
    device: MeasuredDevice
    torch: Version
    driver: Version | None
    measured_utc: Moment
    gemm: tuple[Gemm, ...]
    copy: Copy


def read_ceilings(path: Path) -> Ceilings:
    """Return the ceilings in a file; RunError if it cannot be read, or is of another version or form."""
    try:
        return read_record(Ceilings, path, VERSION)
    except FileNotFoundError:
        raise RunError(f"{path}: no such file; measure with `profkit ceilings -o {path}`") from None


def _refuse_impossible(*rates: float) -> None:
    for rate in rates:
        if not (isfinite(rate) and rate > 0):
            raise ValueError(f"{rate!r} is not a rate")
