"""`Capture`: any run, trace or snapshot, and the questions that the commands answer, as Python asks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profkit.analysis import NotebookResult
from profkit.errors import RunError
from profkit.reading import Part, held_parts, kind_of, open_capture, open_snapshot, open_trace
from profkit.run.directory import Run, choose_run, find_run, runs_of_job

# What one question needs, another should not wait for.
if TYPE_CHECKING:
    import pandas as pd

    from profkit.analysis.compare.budgets import BudgetCheck
    from profkit.analysis.efficiency.summary import EfficiencyResult
    from profkit.analysis.kernels.summary import Grouping, KernelsResult
    from profkit.analysis.lines import LinesResult
    from profkit.analysis.memory.opened_snapshot import MemoryResult, OpenedSnapshot
    from profkit.analysis.opened import OpenedCapture, OpenedTrace
    from profkit.analysis.ranks.comparison import RanksResult
    from profkit.analysis.step_replay.predict import Prediction
    from profkit.analysis.time_account.step_times import StepTimes
    from profkit.analysis.tree.range_tree import RangesResult
    from profkit.report.document import Document

_TIME: tuple[Part, ...] = ("trace",)
_HEIGHT = 720
"""How high the first screen is in a notebook, in pixels; what is longer can be scrolled to."""


def open_any(path: str | PathLike[str], *, rank: int | None = None) -> Capture:
    """Open a run directory, a trace or a memory snapshot, for all questions that the commands answer.

    What a question needs is read when it is asked first, and once.

    Args:
        path: a run; a trace of Nsight Systems or torch.profiler; a snapshot (``.pickle``, ``.pickle.gz``).
        rank: only what this rank of a distributed run did.

    Raises:
        CaptureError: there is no such file, or it is none of these.
        RunError: the directory is no run.
    """
    capture = Capture(path, rank=rank)
    if capture.path.is_dir():
        _ = None if runs_of_job(capture.path) else Run(capture.path)
    elif kind_of(capture.path) is None:  # a report of nsys; or a file whose reader says what is wrong
        _ = capture.trace
    return capture


class Capture:
    """A run, a trace or a snapshot; `profkit.open` and `profkit.record` make it.

    Every question raises `CaptureError` where the capture does not hold what it needs, or cannot be read, and
    `UsageError` for a range, a rank or an edit that does not exist. ``trace`` and ``snapshot`` take more options.
    """

    def __init__(self, path: str | PathLike[str], *, rank: int | None = None) -> None:
        self.path = Path(path)
        self._rank = rank

    @property
    def source(self) -> Path:
        """What is read.

        Raises:
            RunError: nothing was recorded, or the recording goes on.
        """
        return self.path

    @cached_property
    def trace(self) -> OpenedTrace:
        opened = open_capture(self.source, rank=self._rank, parts=_TIME).trace
        return open_trace(self.source, rank=self._rank) if opened is None else opened

    @cached_property
    def snapshot(self) -> OpenedSnapshot:
        return open_snapshot(self.source, rank=self._rank)

    @cached_property
    def _opened(self) -> OpenedCapture:
        from profkit.analysis.opened import OpenedCapture

        path = choose_run(self.source, self._rank)
        held = held_parts(path)
        return OpenedCapture(
            path,
            find_run(path),
            self.trace if "trace" in held else None,
            self.snapshot if "snapshot" in held else None,
        )

    def summary(self) -> SummaryView:
        """Return what it spent time and memory on, and what to try: ``print`` shows what ``profkit summary`` does."""
        from profkit.analysis.causes.advice import find_advice
        from profkit.analysis.summarize import summarize_capture
        from profkit.report.commands.summary import build_summary_document

        summary = summarize_capture(self._opened)
        return SummaryView(self._opened, build_summary_document(summary, find_advice(self._opened, summary)))

    def report(self, path: str | PathLike[str]) -> Path:
        """Write one HTML page of it, as ``profkit report`` does, and return its path.

        Raises:
            OSError: the page cannot be written.
        """
        from profkit.report.page.page import render_report, write_page

        write_page(Path(path), render_report(self._opened))
        return Path(path)

    def kernels(
        self,
        range: str | None = None,
        *,
        by: Grouping = "kernel",
        exclude: str | None = None,
        instance: int | None = None,
    ) -> KernelsResult:
        """Return which kernels took the time, under a range or in all of it; see `OpenedTrace.kernels`."""
        return self.trace.kernels(range, by=by, exclude=exclude, instance=instance)

    def ranges(self) -> RangesResult:
        """Return the tree of ranges: what ``range`` may be in other questions."""
        return self.trace.ranges()

    def efficiency(self, range: str | None = None, *, dtype: str | None = None) -> EfficiencyResult:
        """Return what limits each range, or ``range`` and what lies in it; see `OpenedTrace.efficiency`."""
        return self.trace.efficiency(range, dtype=dtype)

    def memory(self, *, at: str = "peak", device: int | None = None) -> MemoryResult:
        """Return the peak of memory and what a moment was made of; see `OpenedSnapshot.memory`."""
        return self.snapshot.memory(at=at, device=device)

    def lines(self) -> LinesResult:
        """Return the lines of source that the steps' time goes to.

        Raises:
            RunError: none were recorded.
        """
        from profkit.analysis.lines import find_lines

        return find_lines(self._run, self._rank or 0)

    def step_times(self) -> StepTimes | None:
        """Return what the steps took, with a profiler and without; None if none were timed.

        Raises:
            RunError: it is no run directory.
        """
        from profkit.analysis.time_account.step_times import summarize_step_times

        manifest = self._run.manifest
        return summarize_step_times(manifest if self._rank is None else manifest.of_rank(self._rank))

    def ranks(self) -> RanksResult:
        """Return which rank the others wait for, and what communication costs."""
        from profkit.joining import read_ranks

        return read_ranks(self.source)

    def whatif(self, edits: Sequence[str]) -> Prediction:
        """Return the step's time and the peak of memory after edits such as ``optimizer:fused``; see its guide."""
        return self._opened.whatif(edits)

    def check(
        self,
        *,
        max_step_ms: float | None = None,
        max_peak_bytes: int | None = None,
        max_idle: float | None = None,
        min_mfu: float | None = None,
        max_shares: Mapping[str, float] | None = None,
        max_wait: float | None = None,
        max_skew: float | None = None,
        baseline: str | PathLike[str] | None = None,
        force: bool = False,
    ) -> BudgetCheck:
        """Return whether it keeps its budgets (``.held``), as ``profkit check`` does; shares are fractions from 0 to 1.

        Args:
            max_step_ms: the longest unprofiled step.
            max_peak_bytes: the highest peak of allocated memory.
            max_idle: the largest idle share of the GPUs.
            min_mfu: the smallest model FLOPs utilization.
            max_shares: category or range → its largest share of kernel time.
            max_wait: the largest share of a step that ranks wait for each other.
            max_skew: the largest share of a step that the latest rank costs the others.
            baseline: an earlier run, than which this one must be neither slower nor larger.
            force: accept a baseline of other origin.
        """
        from profkit.analysis.compare.budgets import Budgets, check_budgets

        step_ns = None if max_step_ms is None else round(max_step_ms * 1_000_000)
        shares = tuple((max_shares or {}).items())
        budgets = Budgets(step_ns, max_peak_bytes, max_idle, min_mfu, shares, max_wait, max_skew)
        before = None if baseline is None else open_capture(Path(baseline))
        compared: dict[str, Any] = {"ranks": self.ranks()} if budgets.of_ranks else {}
        return check_budgets(self._opened, budgets, before, force=force, **compared)

    @property
    def _run(self) -> Run:
        run = find_run(choose_run(self.source, self._rank))
        if run is None:
            raise RunError(f"{self.path}: a file outside a run directory: `profkit run` or profkit.record makes a run")
        return run

    def __fspath__(self) -> str:
        return str(self.source)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


@dataclass(frozen=True, repr=False)
class SummaryView(NotebookResult):
    """The answer of ``profkit summary``: text for ``print`` and the prompt, the page's first screen in a notebook."""

    capture: OpenedCapture
    document: Document

    def __str__(self) -> str:
        from profkit.report.document import render

        return render(self.document, "table").rstrip("\n")

    def __repr__(self) -> str:
        return str(self)

    def to_pandas(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.document.csv.rows)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.document.data)

    def _repr_html_(self) -> str:
        """Return the first screen in a frame of its own, where a notebook's style does not reach it."""
        from profkit.report.page.page import render_first_screen

        page = render_first_screen(self.capture)
        return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
