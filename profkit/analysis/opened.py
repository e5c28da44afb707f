"""`OpenedTrace`: one trace and the questions that it answers. `OpenedCapture`: a run, or one of its files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from profkit.analysis.kernels.summary import Grouping, KernelsResult, summarize_kernels
from profkit.analysis.placing.attribution import Attribution, attribute_work
from profkit.analysis.ranks import Ranks
from profkit.analysis.self_check import UNKNOWN_RUN, KnownRun, SelfCheck, check_capture
from profkit.analysis.time_account import find_warmup
from profkit.analysis.tree import KernelFilter
from profkit.errors import RunError, UsageError
from profkit.names import PHASES, WARMUP, kind_of, phase_of
from profkit.run.directory import Run
from profkit.trace.columns import Trace, distinct_values
from profkit.trace.parts import only_process

# Imported where they are asked for: most traces need none of them.
if TYPE_CHECKING:
    from profkit.analysis.efficiency.summary import EfficiencyResult
    from profkit.analysis.lines import LinesResult
    from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
    from profkit.analysis.step_replay import ProgramFacts
    from profkit.analysis.step_replay.lanes import StepLanes
    from profkit.analysis.step_replay.limits import StepLimits
    from profkit.analysis.step_replay.predict import Prediction, TimeAnswer
    from profkit.analysis.step_replay.steps import StepReplay
    from profkit.analysis.time_account.account import TimeAccount
    from profkit.analysis.tree.range_tree import RangesResult
    from profkit.run.edits import Edit
    from profkit.run.manifest import Manifest

_ANY_WARMUP = "".join(f"[{letter.upper()}{letter}]" for letter in WARMUP)
"""A glob for the name in any letter case."""


class OpenedTrace:
    """One trace with its work placed; `profkit.read_trace` makes it."""

    def __init__(
        self,
        trace: Trace,
        *,
        thread_only: bool = False,
        run: Run | None = None,
        known: KnownRun = UNKNOWN_RUN,
        ranks: Ranks,
    ) -> None:
        self.recorded = trace
        """The trace as it was read. Rows are numbered by `trace`, which may have more ranges."""
        self.ranks = ranks
        self.rank: int | None = None
        """The one rank that the trace is limited to, if it is."""
        self._thread_only = thread_only
        self.run = run
        """The run directory that the trace lies in, if any."""
        self._known = known

    def of_rank(self, rank: int) -> OpenedTrace:
        """Return what one rank did, as a trace of its own: its books close over that rank's time.

        Raises:
            UsageError: there is no such rank.
        """
        trace = only_process(self.recorded, self.ranks.process_of(rank))
        alone = replace(self._known, pids=())
        opened = OpenedTrace(
            trace, thread_only=self._thread_only, run=self.run, known=alone, ranks=self.ranks.only(rank)
        )
        opened.rank = rank
        return opened

    @cached_property
    def each_rank(self) -> dict[int, OpenedTrace]:
        return {rank: self.of_rank(rank) for rank in self.ranks.numbers}

    @cached_property
    def attribution(self) -> Attribution:
        return attribute_work(self.recorded, thread_only=self._thread_only)

    @property
    def trace(self) -> Trace:
        """The trace that every row number of an analysis counts in: with the ranges that operator links add."""
        return self.attribution.trace

    @cached_property
    def account(self) -> TimeAccount:
        """Return what the steps took on the GPUs, and without a profiler: the source of every step and idle time."""
        from profkit.analysis.time_account.account import open_account

        timed = None
        if self.run is not None:
            from profkit.analysis.time_account.step_times import summarize_step_times

            whole = self.run.manifest
            # Steps that ran in a process of their own were timed on the first rank alone; ranks make them together.
            own = None if self.rank is None else summarize_step_times(whole.of_rank(self.rank))
            timed = own or summarize_step_times(whole)
        return open_account(self.attribution, self.ranks, timed)

    @cached_property
    def step_replay(self) -> StepReplay:
        """Return the recorded steps, ready to be run again: what limits them, and what a change would leave of them."""
        from profkit.analysis.step_replay.steps import replay_steps

        return replay_steps(self.account, failed_check=self.self_check.failed)

    @cached_property
    def lines(self) -> LinesResult | None:
        run, rank = self.run, self.rank or 0
        if run is None or run.lines(rank) is None:
            return None
        from profkit.analysis.lines import find_lines

        return find_lines(run, rank)

    @cached_property
    def step_limits(self) -> StepLimits:
        """Return what limits the step, by cause, phase, module and line: the one source of every such sentence."""
        if len(self.ranks.numbers) > 1:
            from profkit.analysis.step_replay.ranks_together import MOST_RANKS, limit_ranks

            if len(self.ranks.numbers) <= MOST_RANKS:
                lines = {rank: alone.lines.lines for rank, alone in self.each_rank.items() if alone.lines is not None}
                return limit_ranks(*self._replays_of_ranks(), lines)
        return self.step_replay.limits(() if self.lines is None else self.lines.lines)

    def _replays_of_ranks(self) -> tuple[dict[int, StepReplay], int | None, int | None, float | None]:
        """Return the ranks' steps, the step of all as measured and unprofiled, and the factor on hosts' time."""
        unprofiled_ns, recorded_ns = self.account.step_ns(), self.account.recorded_step_ns()
        now_ns = recorded_ns if unprofiled_ns is None else unprofiled_ns
        return (
            {rank: alone.step_replay for rank, alone in self.each_rank.items()},
            None if now_ns is None else round(now_ns),
            None if unprofiled_ns is None else round(unprofiled_ns),
            self._host_factor(),
        )

    @cached_property
    def self_check(self) -> SelfCheck:
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
        explain: bool = False,
    ) -> KernelsResult:
        """Return which kernels spent the time, under ``range`` or in the whole capture.

        The same as ``profkit kernels``; ``.to_pandas()`` of the result is its table.

        Args:
            range: a name (the exact one first), a glob (``layer *``) or a path of consecutive ancestors
                (``forward/layer 3/attention``; a slash within a name is ``\\/``).
            exclude: leave out what lies under this range.
            instance: only the n-th instance, counted from 0 in order of start.
            process: only this operating-system pid.
            device: only this GPU, by its number in the trace.
            by: one line per kernel name, category, module, innermost range, or (of a torch.profiler trace) innermost
                operator.
            per_instance: also return one row per instance.
            explain: also return where the kernels of compiled code come from (``sources``).

        Raises:
            TraceError: there is no GPU work, or there are no ranges to choose from.
            RunError: the run's file about its compiled code cannot be read.
            UsageError: an unknown range (the message has the nearest names), process, device or instance, or ``by`` is
                the operator and the trace does not record it.
        """
        wanted = KernelFilter(range, exclude, instance, process, device, self.rank)
        code = None if not explain else {} if self.run is None else self.run.compiled_code
        result = summarize_kernels(
            self.attribution, wanted, self.ranks, by=by, per_instance=per_instance, compiled_code=code
        )
        if range is not None or self.run is None:
            return result
        from profkit.analysis.kernels.compiled_code import IN_RECORDED_STEPS, find_compilations

        compilations = [finding for finding in find_compilations(self.run) if finding.code in IN_RECORDED_STEPS]
        return replace(result, warnings=(*result.warnings, *compilations))

    def phases(self, within: str = "") -> list[KernelsResult]:
        """Return a result per standard phase (forward, loss, …) that the trace has, without those in ``warmup``.

        ``within`` is the beginning of a path (``context 128/step */``), to take only the phases there.
        """
        names = {self.trace.names[i] for i in distinct_values(self.trace.ranges.name).tolist()}
        exclude = _ANY_WARMUP if find_warmup(self.trace) is not None else None
        kinds = sorted({(PHASES.index(phase), kind_of(name)) for name in names if (phase := phase_of(name))})
        results = [self.kernels(within + kind, exclude=exclude) for _, kind in kinds]
        return [result for result in results if result.instances]

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
        from profkit.analysis.efficiency import read_run_facts
        from profkit.analysis.efficiency.summary import measure_efficiency

        facts = read_run_facts(self.trace, self.run, ceilings=None if ceilings is None else Path(ceilings), dtype=dtype)
        return measure_efficiency(self.account, facts, range, numbered=numbered)

    @cached_property
    def program_facts(self) -> ProgramFacts:
        from profkit.analysis.efficiency import read_run_facts
        from profkit.analysis.step_replay import ProgramFacts
        from profkit.run.manifest import (
            Conditions,
            Loading,
            Manifest,
            can_all_be_fused,
            find_condition,
            used_optimizers,
        )

        peaks = read_run_facts(self.trace, self.run).peaks
        manifest = Manifest() if self.run is None else self.run.manifest
        loading = manifest.loading or Loading()
        of_first = next((process.conditions for process in manifest.processes), None)
        conditions = manifest.conditions or of_first or Conditions()
        batch_ns = None if self.lines is None else self.lines.batch_ns
        return ProgramFacts(
            lines=None if self.lines is None else self.lines.lines,
            callers=() if self.lines is None else self.lines.callers,
            optimizer_bytes=sum(used.fused_step_bytes for used in used_optimizers(manifest))
            if can_all_be_fused(manifest)
            else None,
            bytes_per_s=None if peaks is None else peaks.bytes_per_s,
            batch_ns=None if batch_ns is None else round(batch_ns * max(1.0, loading.batches_per_step)),
            workers=loading.workers,
            epoch_batches=loading.epoch_batches,
            restart_ns=round(loading.epoch_start_ns * loading.batches_per_step / max(loading.epoch_batches, 1)),
            starts_workers=loading.starts_workers,
            cpus=conditions.cpu_count,
            worker_cpus=1.0 if self.lines is None else self.lines.worker_cpus or 1.0,
            threads=conditions.cpu_threads or 1,
            detects_anomalies=find_condition(manifest, "anomaly_detection") is True,
        )

    def predict_time(self, edits: Sequence[Edit]) -> TimeAnswer:
        """Return how long the step would take after some edits, which `profkit.run.edits.parse_edits` reads."""
        from profkit.analysis.step_replay.predict import predict_time
        from profkit.analysis.step_replay.ranks_together import ON_TIME

        if [edit.spec.name for edit in edits] == [ON_TIME]:
            return self._predict_on_time(edits[0].argument)
        return predict_time(self.step_replay, edits, self.program_facts)

    def _predict_on_time(self, late: str) -> TimeAnswer:
        from profkit.analysis.step_replay.ranks_together import predict_on_time

        if not re.fullmatch(r"\d{1,6}", late, re.ASCII):
            raise UsageError(f"on-time:{late}: write a rank's number, as in on-time:1")
        return predict_on_time(int(late), *self._replays_of_ranks())

    def _host_factor(self) -> float | None:
        """The factor on hosts' recorded time with which it is as in steps without a profiler, by the light records."""
        from profkit.analysis.ranks.light_costs import host_factor
        from profkit.run.light_columns import read_light_columns

        recorded = {self.trace.names[name] for name in self.trace.ranges.name[self.account.steps].tolist()}
        try:
            light = [] if self.run is None else [*map(read_light_columns, self.run.light_records.values())]
        except RunError:
            return None
        return host_factor([rank.steps for rank in light], recorded) if light else None

    def step_lanes(self, edits: Sequence[Edit]) -> tuple[StepLanes, StepLanes] | None:
        """Return the lanes of a step, to be drawn, as it is and as it is expected after some edits; None if unknown."""
        from profkit.analysis.step_replay.predict import CHANGES, change_of, lanes_before_and_after

        if any(edit.spec.name not in CHANGES for edit in edits):
            return None
        return lanes_before_and_after(self.step_replay, [change_of(edit) for edit in edits], self.program_facts)

    def ranges(self, *, numbered: bool = True) -> RangesResult:
        """Return the tree of ranges; ``numbered=False`` puts ``step 0`` and ``step 1`` under ``step *``."""
        from profkit.analysis.tree.range_tree import summarize_ranges

        return replace(summarize_ranges(self.attribution, numbered=numbered), rank=self.rank)


@dataclass(frozen=True, eq=False)
class OpenedCapture:
    """An opened capture, made by `profkit.reading`; ``run`` is None for a file outside a run directory."""

    path: Path
    run: Run | None
    trace: OpenedTrace | None
    snapshot: OpenedSnapshot | None

    @property
    def manifest(self) -> Manifest:
        """What the run says of itself; nothing for a file outside a run directory."""
        from profkit.run.manifest import Manifest

        return Manifest() if self.run is None else self.run.manifest

    def whatif(
        self,
        edits: Sequence[str],
        *,
        allocators: Sequence[str] = (),
        device: int | None = None,
        capacity_bytes: int | None = None,
    ) -> Prediction:
        """Return the step's time and the peak of memory after edits of the program; ``profkit whatif`` prints them.

        Args:
            edits: as on the command line: ``optimizer:fused``, ``gpu:×1.5``. Their order does not matter.
            allocators, device, capacity_bytes: as for `OpenedSnapshot.whatif`.

        Raises:
            UsageError: an edit is unknown, or memory alone is known and the edit cannot be modelled.
            SnapshotError: no history of memory was recorded.
        """
        from profkit.analysis.step_replay.predict import Prediction
        from profkit.analysis.whatif.apply import MODELLED
        from profkit.run.edits import parse_edits

        parsed = parse_edits(edits)
        allocators = [*allocators, *(edit.argument for edit in parsed if edit.spec.name == "allocator")]
        time = self.trace.predict_time(parsed) if self.trace is not None else None
        changing = [edit for edit in parsed if edit.spec.changes_memory and edit.spec.name != "allocator"]
        if self.snapshot is None or not changing:
            return Prediction(time, None, "" if self.snapshot is None else "unchanged")
        unknown = [edit.text for edit in changing if edit.spec.name not in MODELLED]
        if unknown:
            why = (
                f"what {', '.join(unknown)} would do to memory is not known: only a run of the edited program shows it"
            )
            return Prediction(time, None, f"not predicted: {why}")
        try:
            memory = self.snapshot.whatif(
                allocators=allocators,
                edits=[edit.text for edit in changing],
                device=device,
                capacity_bytes=capacity_bytes,
            )
        except UsageError as error:
            if time is None or time.refusal is not None:
                raise
            return Prediction(time, None, f"not predicted: {error}")
        return Prediction(time, memory, "")
