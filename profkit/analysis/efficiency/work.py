"""How much work each range of a run does: the reader of ``work.json``, whose writers are in the capture wing.

The launcher works it out from the sizes of a built-in model (`profkit.models.step_work`); for any other workload
``profkit run --flops`` counts it in one step that is neither timed nor recorded (`profkit.capture.work_counter`).

All numbers are of one instance of a range and include the ranges inside it. A path names the profkit ranges around it
below the step, outermost first: ``("forward", "layer 0")``; ``()`` is the step itself. In a run over several contexts
the context's range stands before: ``("context 128", "forward")``, and ``("context 128",)`` for a step in it.

- ``flops``: matrix products and convolutions as executed, by the formulas of torch's FlopCounterMode.
- ``needed_flops``: the same, but of causal attention only what the mask leaves: for query q its q + 1 keys.
- ``other_flops``: all operations that torch has no formula for, by profkit's own (`profkit.models.step_work`,
  `profkit.capture.work_formulas`).
- ``least_bytes``: what must be moved if nothing is moved twice: what the range reads of memory that it has not written
  to before, and what it writes that an operator outside reads later, or that is still there after the step; each part
  of a tensor once. What is made and used up inside is free, what backward wants of forward is not. A range's bytes are
  at most the sum of those of the ranges and operators inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from profkit.errors import RunError
from profkit.run_directory import WORK, read_json

VERSION = 1

Source = Literal["formula", "counted"]


@dataclass(frozen=True)
class RangeWork:
    """The work of one instance of a range.

    ``flops_by_dtype`` sums to ``flops``; its keys are those of ``profkit ceilings`` ("fp32", "tf32", "bf16", "fp16"),
    else torch's name of the type. ``instances`` is how many a step has. Where they differ (``varies``) the numbers are
    means, rounded down for each type and number.
    """

    path: tuple[str, ...]
    flops: int
    other_flops: int
    needed_flops: int
    least_bytes: int
    flops_by_dtype: dict[str, int]
    instances: int = 1
    varies: bool = False


@dataclass(frozen=True)
class RunWork:
    """The content of ``work.json``.

    ``dtype`` is the one in which most of the FLOPs are done, None where there are none; ``model_flops`` those that the
    model asks for in a step, forward and backward, whatever is computed again: what MFU counts (Chowdhery et al. 2022,
    appendix B). ``missing`` names operators without a formula.
    """

    source: Source
    dtype: str | None
    ranges: tuple[RangeWork, ...]
    model_flops: int
    missing: tuple[str, ...]

    def find(self, path: tuple[str, ...]) -> RangeWork | None:
        """Return the work of the range at ``path``, or None."""
        return next((one for one in self.ranges if one.path == path), None)


def read_work(run: Path) -> RunWork | None:
    """Return what ``run`` says of its ranges' work, or None if it says nothing.

    Raises:
        RunError: its file cannot be read, or is of another version or form.
    """
    path = run / WORK
    try:
        content = read_json(path, "not JSON; record the run again")
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise RunError(f"{path}: not of version {VERSION}; record the run again, or use the profkit that wrote it")
    try:
        return _work(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path}: damaged ({type(error).__name__}: {error}); record the run again") from None


def _work(content: dict[str, Any]) -> RunWork:
    if content["source"] not in ("formula", "counted"):
        raise ValueError(f"source {content['source']!r}")
    return RunWork(
        source=cast("Source", content["source"]),
        dtype=None if content["dtype"] is None else str(content["dtype"]),
        ranges=tuple(map(_range, content["ranges"])),
        model_flops=_count(content["model_flops"]),
        missing=tuple(map(str, content["missing"])),
    )


def _range(one: dict[str, Any]) -> RangeWork:
    counts = {key: _count(one[key]) for key in ("flops", "other_flops", "needed_flops", "least_bytes")}
    return RangeWork(
        path=tuple(map(str, one["path"])),
        **counts,
        flops_by_dtype={str(name): _count(value) for name, value in one["flops_by_dtype"].items()},
        instances=_count(one.get("instances", 1)),
        varies=bool(one.get("varies", False)),
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
