"""Open a trace and ask it things: the public, Python face of the analyses of time."""

from __future__ import annotations

import stat
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from profkit.analysis.attribution import Attribution, attribute_work
from profkit.analysis.checks.run_check import UNKNOWN_RUN, KnownRun, know_run
from profkit.analysis.checks.self_check import SelfCheck, check_capture
from profkit.analysis.kernel_rows import Grouping
from profkit.analysis.kernels import KernelsResult, summarize_kernels
from profkit.analysis.range_tree import RangesResult, summarize_ranges
from profkit.analysis.ranks import Ranks, explain_no_rank, find_ranks
from profkit.analysis.selection import KernelFilter
from profkit.errors import TraceError, UsageError
from profkit.run.directory import Run, find_run
from profkit.trace.columns import Trace
from profkit.trace.processes import combine_traces, only_process

# Efficiency is imported where it is asked for: it costs every other command 15 ms.
if TYPE_CHECKING:
    from profkit.analysis.efficiency.attention import AttentionResult
    from profkit.analysis.efficiency.summary import EfficiencyResult

_SQLITE = b"SQLite format 3\x00"
_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"


class OpenedTrace:
    """One trace, read and attributed; made by `read_trace`."""

    def __init__(
        self,
        trace: Trace,
        *,
        thread_only: bool = False,
        run: Run | None = None,
        known: KnownRun = UNKNOWN_RUN,
        ranks: Ranks | None = None,
    ) -> None:
        self.trace = trace
        self.ranks = ranks or Ranks()
        self.rank: int | None = None
        """The one rank that the trace was limited to, if it was."""
        self._thread_only = thread_only
        self.run = run
        """The run that the trace is of, if it lies in a run directory."""
        self._known = known

    def of_rank(self, rank: int) -> OpenedTrace:
        """Return what one rank did, as a trace of its own: its books close over that rank's time.

        Raises:
            UsageError: there is no such rank.
        """
        trace = only_process(self.trace, self.ranks.process_of(rank))
        alone = replace(self._known, pids=())
        opened = OpenedTrace(
            trace, thread_only=self._thread_only, run=self.run, known=alone, ranks=self.ranks.only(rank)
        )
        opened.rank = rank
        return opened

    @cached_property
    def attribution(self) -> Attribution:
        """Return the trace with its work placed under its ranges."""
        return attribute_work(self.trace, thread_only=self._thread_only)

    @cached_property
    def self_check(self) -> SelfCheck:
        """Return whether the capture can be trusted."""
        return check_capture(self.attribution, "" if self.run is None else self.run.log, self._known)

    def kernels(
        self,
        range: str | None = None,
        *,
        exclude: str | None = None,
        instance: int | None = None,
        process: int | None = None,
        device: int | None = None,
        by: Grouping = "kernel",
        per_instance: bool = False,
    ) -> KernelsResult:
        """Return which kernels spent the time, under ``range`` or in the whole capture.

        The same as ``profkit kernels``; ``.to_pandas()`` of the result is its table.

        Args:
            range: a name (the exact one first), a glob (``layer *``) or a path of consecutive ancestors
                (``forward/layer 3/attention``; a slash within a name is ``\\/``).
            exclude: leave out what lies under this range.
            instance: only the n-th instance, counted from 0 in order of start.
            process: only this operating-system pid.
            device: only this CUDA device.
            by: one line per kernel name, category, innermost range, or (of a torch.profiler trace) innermost operator.
            per_instance: also return one row per instance.

        Raises:
            TraceError: there is no GPU work, or there are no ranges to choose from.
            UsageError: an unknown range (the nearest names are in the message), process, device or instance, or
                ``by`` the operator in a trace that does not tell it.
        """
        wanted = KernelFilter(range, exclude, instance, process, device, self.rank)
        return summarize_kernels(self.attribution, wanted, self.ranks, by=by, per_instance=per_instance)

    def efficiency(
        self,
        range: str | None = None,
        *,
        numbered: bool = False,
        ceilings: str | Path | None = None,
        dtype: str | None = None,
    ) -> EfficiencyResult:
        """Return how well the GPUs' time was used under each range, or under ``range`` and what lies within it.

        The same as ``profkit efficiency``; ``.to_pandas()`` of the result is its table.

        Args:
            range: as for `kernels`.
            numbered: keep ``step 0`` and ``step 1`` apart.
            ceilings: a file of `profkit ceilings`; else the run's own, else the GPU's datasheet.
            dtype: what the matrix products were done in (``bf16``), where the capture does not say.

        Raises:
            TraceError: there is no GPU work, or there are no ranges to choose from.
            RunError: a file of the run, or the ceilings, cannot be read.
            UsageError: an unknown range, ceilings of another GPU, or a ``dtype`` that the run contradicts.
        """
        from profkit.analysis.efficiency.facts import read_run_facts
        from profkit.analysis.efficiency.summary import measure_efficiency

        facts = read_run_facts(self.trace, self.run, ceilings=None if ceilings is None else Path(ceilings), dtype=dtype)
        return measure_efficiency(self.attribution, facts, self.ranks, range, numbered=numbered)

    def attention(self, range: str | None = None) -> AttentionResult:
        """Return what the parts of attention took in the forward pass: time against FLOPs, of all and each layer.

        The same as ``profkit efficiency --attention``; ``.to_pandas()`` of the result is its table.

        Args:
            range: only within this range, as for `kernels`: ``context 256`` of a run of several, one layer.

        Raises:
            TraceError: the trace has no ranges of those parts (there).
            RunError: a file of the run cannot be read.
            UsageError: an unknown range.
        """
        from profkit.analysis.efficiency.attention import measure_attention
        from profkit.analysis.efficiency.facts import read_run_facts

        return measure_attention(self.attribution, read_run_facts(self.trace, self.run), range)

    def ranges(self, *, numbered: bool = True) -> RangesResult:
        """Return the tree of ranges; ``numbered=False`` puts ``step 0`` and ``step 1`` under ``step *``."""
        return replace(summarize_ranges(self.attribution, numbered=numbered), rank=self.rank)


def read_trace(path: str | Path, *, rank: int | None = None, thread_only: bool = False) -> OpenedTrace:
    """Open an nsys SQLite export, a Kineto trace (``.json``, ``.json.gz``) or a run directory.

    The file is told by its content, not its name, and is never written to. Of a run whose ranks left a torch.profiler
    trace each, all of them are opened as one.

    Args:
        path: the capture.
        rank: only what this rank of a distributed run did.
        thread_only: place work by the launching thread's own ranges alone, as per-thread tools do.

    Raises:
        TraceError: the file cannot be read or is none of these.
        RunError: a directory that is no run.
        UsageError: there is no such rank.
    """
    path = Path(path)
    run = find_run(path)
    if run is not None and path.is_dir():
        trace = _read_run(run, rank)
        known, pids = know_run(run.manifest), run.manifest.rank_of_pid
    else:
        trace, known, pids = _read(path), UNKNOWN_RUN, {}
    opened = OpenedTrace(trace, thread_only=thread_only, run=run, known=known, ranks=find_ranks(trace, pids))
    return opened if rank is None else opened.of_rank(rank)


def _read_run(run: Run, rank: int | None) -> Trace:
    """Return the trace of a run; if its ranks left one each, that of the wanted rank, or all as one."""
    found = run.rank_traces
    if not found:
        return _read(run.find_trace())
    if rank is not None and rank not in found:
        raise UsageError(explain_no_rank(rank, tuple(found)))
    wanted = {rank: found[rank]} if rank is not None else found
    # One file after the other: parsed, each takes many times its columns' memory.
    return combine_traces([_of_rank(_read(path), number) for number, path in wanted.items()], str(run.path))


def _of_rank(trace: Trace, number: int) -> Trace:
    """Return the trace, which profkit named after its rank, with that rank for its one process."""
    return replace(trace, ranks=trace.ranks or dict.fromkeys(list(trace.process_ids)[:1], number))


def _read(path: Path) -> Trace:
    head = _head(path)
    if path.suffix == ".nsys-rep":
        raise TraceError(f"{path}: a report, not an export; run `nsys export --type sqlite {path.name}` and give that")
    if not head:
        raise TraceError(f"{path}: the file is empty")
    if head.startswith(_SQLITE):
        from profkit.trace.nsys import read_nsys

        return read_nsys(path)
    if head.startswith(_GZIP) or head.removeprefix(_UTF8_MARK).lstrip()[:1] in (b"{", b"["):
        from profkit.trace.kineto import read_kineto

        return read_kineto(path)
    raise TraceError(
        f"{path}: neither an nsys SQLite export nor a torch.profiler trace (not SQLite, gzip or JSON);"
        " `nsys export --type sqlite` makes the former"
    )


def _head(path: Path) -> bytes:
    try:
        # Opening a pipe waits for who writes to it, and what is read from it cannot be read again.
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(f"{path}: not a regular file; write the trace to a file and give that")
        with path.open("rb") as file:
            return file.read(64)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
