"""The cells of nsight_questions: a size at a context, in training and in inference. Loads no torch.

The ratio of a phase is its time in a trace over its time without a profiler, with what makes it doubtful.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from profkit.models import PRESETS
from profkit.names import BACKWARD, FORWARD
from recipes.common.recipe import LAUNCH_BOUND, OK, Cell, GridName, whole
from recipes.common.tables import DASH
from recipes.whole_model.cells import Work

KEYS = ("size", "context", "passes", "batch", "steps", "profiler")
TOGETHER = ("size", "passes", "batch", "steps", "profiler")
"""One capture holds every context of these."""

TRAIN, INFERENCE = "train", "forward"
"""The names of `profkit run --passes`."""
CAPTURES = "captures"
"""The folder of the recordings in a directory of results. An nsys export holds the environment: do not share it."""
DOING = {TRAIN: "training", INFERENCE: "inference"}
MATTERS = 0.01
"""A kernel matters from this share of the kernel time on."""
GEMM = "gemm"
"""profkit's category of matrix products."""
Measured = Mapping[str, Any]
"""A row that was measured."""
NSYS, KINETO = "nsys", "kineto"
PROFILERS = (NSYS, KINETO)
SIZES = tuple(PRESETS)

_REPORTS = (("small", "medium", "large", "xl", "2.7B"), (128, 256, 512, 1024))
GRIDS: Mapping[GridName, tuple[Sequence[str], Sequence[int]]] = {
    "reports": _REPORTS,
    "small": (("tiny",), (64, 128)),
    "full": _REPORTS,
}
"""Sizes and contexts."""
STEPS: Mapping[GridName, int] = {"reports": 3, "small": 2, "full": 3}


def build_cells(sizes: Sequence[str], contexts: Sequence[int], batch: int, steps: int, profiler: str) -> list[Cell]:
    """Return the cells, the most informative first: the first size, then the others' training, then their inference."""
    first, *others = sizes
    order = [(first, TRAIN), (first, INFERENCE), *product(others, [TRAIN]), *product(others, [INFERENCE])]
    return [
        {"size": size, "context": context, "passes": passes, "batch": batch, "steps": steps, "profiler": profiler}
        for size, passes in order
        for context in contexts
    ]


def work_of(cell: Cell) -> Work:
    """Return the step that a cell records: fp32, eager."""
    return Work(str(cell["size"]), whole(cell["context"]), whole(cell["batch"]), str(cell["passes"]))


def pair_rows(rows: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Return inference and training of the same size and context, where both have their categories."""
    shared = ("size", "context", "batch", "steps", "profiler")
    inference = {tuple(row[key] for key in shared): row for row in rows if row["passes"] == INFERENCE}
    pairs = [(inference.get(tuple(row[key] for key in shared), {}), row) for row in rows if row["passes"] == TRAIN]
    return [(one, other) for one, other in pairs if one.get("step") and other.get("step")]


TIMED = ((TRAIN, FORWARD), (TRAIN, BACKWARD), (INFERENCE, FORWARD))
"""The steps and phases that are timed."""

UNEVEN = 0.20
"""Samples that range over more of their median than this make a ratio uncertain."""


@dataclass(frozen=True)
class Ratio:
    """A phase's time by the trace over Python's without a profiler.

    ``busy`` and ``busy_recorded`` are the shares of the unprofiled and the recorded time that kernels fill; None where
    the kernel time is unknown. With ``holds_loss`` they are upper bounds: the kernel time of backward includes the
    loss's. ``low`` is the shortest recorded sample over the longest unprofiled one, ``high`` the longest over the
    shortest.
    """

    row: Measured
    value: float
    busy: float | None
    busy_recorded: float | None
    holds_loss: bool
    is_uneven: bool
    low: float
    high: float

    @property
    def is_launch_bound(self) -> bool:
        """Whether launches limit the steps without a profiler, as far as is known."""
        return self.busy is not None and self.busy < LAUNCH_BOUND

    @property
    def is_slowed(self) -> bool:
        """Whether launches limit only the recorded steps, as far as is known."""
        return not self.is_launch_bound and self.busy_recorded is not None and self.busy_recorded < LAUNCH_BOUND

    @property
    def is_doubtful(self) -> bool:
        """Whether the ratio depends on the host."""
        return self.is_launch_bound or self.is_slowed or self.is_uneven


def find_ratios(rows: Sequence[Measured], passes: str, phase: str) -> list[Ratio]:
    """Return the ratios of a phase in the rows that have one."""
    return [
        compare_times(row, phase) for row in rows if row["passes"] == passes and row.get(f"{phase}_ratio") is not None
    ]


def compare_times(row: Measured, phase: str) -> Ratio:
    """Return the ratio of a row's phase."""
    recorded, clean = (row[f"{phase}_{kind}_samples_ms"] for kind in ("recorded", "clean"))
    kernels_ms, holds_loss = find_kernel_time(row, phase) if row.get("measure") == "gpu-kernel" else (None, False)
    busy = [None if kernels_ms is None else kernels_ms / row[f"{phase}_{kind}_ms"] for kind in ("clean", "recorded")]
    return Ratio(
        row=row,
        value=row[f"{phase}_ratio"],
        busy=busy[0],
        busy_recorded=busy[1],
        holds_loss=holds_loss,
        is_uneven=any(max(some) - min(some) > UNEVEN * median(some) for some in (recorded, clean)),
        low=min(recorded) / max(clean),
        high=max(recorded) / min(clean),
    )


def find_kernel_time(row: Measured, phase: str) -> tuple[float | None, bool]:
    """Return a phase's kernel time in ms, None if unknown, and whether it includes the loss's.

    Rows of earlier versions have no kernel time of backward alone: there it is that of forward, loss and backward, less
    forward's.
    """
    known, forward, both = (row.get(key) for key in (f"{phase}_kernel_ms", "forward_kernel_ms", "forward_backward"))
    if known is not None or phase != BACKWARD or forward is None or not both or not both["instances"]:
        return known, False
    return both["total_ns"] / both["instances"] / 1e6 - forward, True


def show_ratio(row: Measured | None, phase: str) -> str:
    """Return a ratio with the share that kernels fill and the marks of what is doubtful: ``1.18 (18%)*†``."""
    if row is None or row.get(f"{phase}_ratio") is None:
        return DASH if row is None or row["status"] == OK else str(row["status"])
    ratio = compare_times(row, phase)
    marks = "*" * ratio.is_launch_bound + "‡" * ratio.is_slowed + "†" * ratio.is_uneven
    busy = DASH if ratio.busy is None else f"{'≤' * ratio.holds_loss}{ratio.busy:.0%}"
    return f"{ratio.value:.2f}{f' ({busy})' * (row.get('measure') == 'gpu-kernel')}{marks}"
