"""What the rows of causes look at, and what they return."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import PurePath
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from profkit.analysis.causes.changes import NOTHING
from profkit.analysis.intervals import unite
from profkit.analysis.step_replay import ProgramFacts, World
from profkit.analysis.step_replay.calibrate import AS_RECORDED
from profkit.analysis.step_replay.edits import find_pageable_copies
from profkit.analysis.step_replay.limits import OUTSIDE, StepLimits
from profkit.analysis.step_replay.predict import (
    StepChange,
    TimeAnswer,
    change_of,
    expect_after,
    predict_changes,
    share_saved_on_fast_host,
)
from profkit.analysis.step_replay.ranks_together import MOST_RANKS
from profkit.analysis.step_replay.steps import ReplayedStep, StepReplay, find_spread, find_variation
from profkit.analysis.summary import SMALL, WORTH, Summary
from profkit.analysis.time_account import find_steps
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.tree.modules import Place as ModulePlace
from profkit.analysis.tree.modules import places_of_ranges, read_place
from profkit.names import BACKWARD, FORWARD, STEP, kind_of
from profkit.run.edits import parse_edits
from profkit.run.lines import CallTree, LineTime, calls_backward, join_at_places, lines_of_trainers, name_count
from profkit.run.manifest import Loader, Manifest, find_condition
from profkit.run.work import OperatorLine, RunWork
from profkit.trace.columns import distinct_values
from profkit.trace.nesting import NO_RANGE

if TYPE_CHECKING:
    from profkit.analysis.efficiency import Peaks
    from profkit.analysis.opened import OpenedCapture, OpenedTrace

_LINE_NUMBER = re.compile(r":(\d{1,9}) ")
_TIGHT = 0.8
"""With more than this share of the GPU's memory reserved, it is short."""
_OTHER_PROCESS = 0.1
"""By so much the steps of two processes of one program differ, on a machine that is used for other things, too."""
_LIKELY = 1.28
"""Standard errors: within so many lie four of five."""
_OFTEN = 0.5
"""Fewer calls a step without a backward pass are none of each step: a pass may lie in the next."""
WORTH_COMPILING = 0.04
"""For a smaller share of the step nobody waits for a compiler, and keeps the model compilable."""
OF_CHAINS = (*SMALL, "optimizer", "fill")
"""Categories of kernels that follow one another where an operation of torch's, or an optimizer, is written out."""
COMPARE = "profkit compare RUN NEW"
FACTORIES = ("randn", "rand", "randint", "randperm", "normal", "zeros", "ones", "full", "arange", "empty", "eye")
"""Functions of torch that make a tensor of what their arguments say: on the CPU, if nobody says where."""
MEAN_STEP, DRAINED_STEP, LATER_STEP = "mean_step_ns", "drained_step_ns", "later_step_ns"
"""In a cause's evidence: the step with it where that is not the typical one; on average, once a queue is empty, and
once steps have become shorter."""


@dataclass(frozen=True)
class Interval:
    """A prediction: the least, what is expected, and the most."""

    low: int
    expected: int
    high: int


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's own code."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Cause:
    """What a row found: the fields of `Advice`, and the changes of a step that remove it, from which effects follow.

    ``detail`` is what the sentence of the cause goes on with where there is room. ``further_modules`` have the cause
    too, and the same change removes it. ``answer`` is the step without it where several ranks' steps say that, or one
    on the CPU. ``ends_run``: the run will fail of it. ``worth`` is the share of the step that it must save: more than
    usual where the change takes more than a line.
    """

    code: str
    cause: str
    change: str
    changes: Sequence[StepChange] = ()
    answer: TimeAnswer | None = None
    detail: str = ""
    line: SourceLine | None = None
    module: str | None = None
    further_modules: Sequence[str] = ()
    edit: str | None = None
    saves_bytes: Interval | None = None
    costs: str | None = None
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    proof: str = COMPARE
    ends_run: bool = False
    worth: float = WORTH

    @property
    def place(self) -> str | None:
        """All of its modules by name; of more than two the others' number."""
        others = len(self.further_modules)
        if self.module is None or not others:
            return self.module
        return f"{self.module} and " + (self.further_modules[0] if others == 1 else f"{others} more modules")


class Operation(NamedTuple):
    """An operation of a step: its place in the step's columns, and what is known of it.

    ``module`` is the innermost one; ``is_alone``: its call launches nothing else, as that of a CUDA graph does.
    """

    at: int
    name: str
    category: str
    duration_ns: int
    call: int
    phase: str
    module: str | None
    is_alone: bool


Answer = TypeVar("Answer")

Place = tuple[str, str | None]
"""A phase, and the innermost module there."""


@dataclass
class PlaceWork:
    """What a step's ranges of one place do themselves: products of ``dtype``, and the least bytes to move."""

    dtype: str
    flops: int = 0
    least_bytes: int = 0

    def least_ns(self, flops_per_s: float, bytes_per_s: float) -> float:
        return 1e9 * max(self.flops / flops_per_s, self.least_bytes / bytes_per_s)


@dataclass(frozen=True)
class CpuStep:
    """The unprofiled step of a program that computes on the CPU, and its phases, in nanoseconds.

    There one thread does one thing after another, and nothing runs beside it but workers of data loaders: without a
    part of it the step is shorter by what that part takes while no profiler runs. Nothing is replayed. ``spread_ns``
    and ``variation`` are as of `StepReplay`.
    """

    now_ns: int
    phases: Mapping[str, int]
    spread_ns: int
    variation: float

    def without(self, saved_ns: Mapping[World, float], error_ns: float = 0.0) -> TimeAnswer:
        """Return the step without what takes so long, to which a standard error may be known."""
        after_ns = {world: max(0.0, self.now_ns - saved) for world, saved in saved_ns.items()}
        expected_ns = after_ns["expected"]
        errors = (_LIKELY * error_ns, self.variation * expected_ns, _OTHER_PROCESS * expected_ns)
        return TimeAnswer(
            self.now_ns,
            self.now_ns,
            None,
            AS_RECORDED,
            low_ns=max(0, round(expected_ns - math.hypot(expected_ns - min(after_ns.values()), *errors))),
            expected_ns=round(expected_ns),
            high_ns=round(expected_ns + math.hypot(max(after_ns.values()) - expected_ns, *errors)),
        )

    def without_all(self, answers: Iterable[TimeAnswer]) -> TimeAnswer:
        """Return the step without all that several answers lack, of which none is in another's part of it."""
        saved: dict[World, float] = dict(NOTHING)
        for answer in answers:
            after: dict[World, int | None]
            after = {"least": answer.low_ns, "expected": answer.expected_ns, "most": answer.high_ns}
            saved = {world: saved[world] + self.now_ns - (after[world] or 0) for world in saved}
        return self.without(saved)


def find_cpu_step(account: TimeAccount) -> CpuStep | None:
    """Return the step of a program that computes on the CPU; None of others, and where no step was timed."""
    timed, step_ns = account.timed, account.step_ns()
    if account.attribution.trace.measure != "cpu-operator" or timed is None or not step_ns or len(timed.contexts) != 1:
        return None
    phases = {times.phase: round(times.typical_ns) for times in timed.phases if times.phase != STEP}
    has_part = {phase: time_ns for phase, time_ns in phases.items() if time_ns}
    return CpuStep(round(step_ns), has_part, find_spread(account), find_variation(account))


class Evidence:
    """A capture and its summary, with what several rows ask of them."""

    def __init__(self, capture: OpenedCapture, summary: Summary) -> None:
        self.capture = capture
        self.summary = summary
        self.manifest = Manifest() if capture.run is None else capture.run.manifest
        self._operations: dict[int, tuple[Operation, ...]] = {}
        self._answers: dict[tuple[object, ...], Any] = {}

    @cached_property
    def trace(self) -> OpenedTrace | None:
        """The trace; of several ranks in one, that of the rank whose collectives are shortest.

        It comes to them last and waits for nobody, so that a change of all ranks changes the step as its own.
        """
        trace = self.capture.trace
        if trace is None or not 1 < len(trace.ranks.numbers) <= MOST_RANKS:
            return trace
        able = [rank for rank in trace.each_rank.values() if rank.step_replay.refusal is None]
        return min(able, key=lambda rank: _communication_ns(rank.step_replay), default=trace)

    @cached_property
    def replay(self) -> StepReplay | None:
        """The replay of the recorded steps, None without GPU work or where it predicts nothing."""
        trace = self.trace
        if trace is None or trace.trace.measure != "gpu-kernel" or not len(trace.trace.work):
            return None
        return trace.step_replay if trace.step_replay.refusal is None else None

    @cached_property
    def cpu_step(self) -> CpuStep | None:
        """The step of a program that computes on the CPU, in one process; None of others."""
        trace = self.trace
        return None if trace is None or len(trace.ranks.members) > 1 else find_cpu_step(trace.account)

    @property
    def limits(self) -> StepLimits | None:
        """What limits the step; None where that is unknown, and of several ranks: rows change the steps of one."""
        limits = self.summary.limits
        return None if limits is None or limits.refusal is not None or limits.by_rank else limits

    @cached_property
    def facts(self) -> ProgramFacts:
        return ProgramFacts() if self.trace is None else self.trace.program_facts

    @cached_property
    def peaks(self) -> Peaks | None:
        """What the GPU can do at most, None if that is not known."""
        return None if self.summary.work is None else self.summary.work.peaks

    @property
    def work(self) -> RunWork | None:
        """What a step was counted to do, None if none was."""
        return None if self.capture.run is None else self.capture.run.work

    @property
    def operator_lines(self) -> Sequence[OperatorLine]:
        return () if self.work is None else self.work.lines

    @cached_property
    def work_by_place(self) -> dict[Place, PlaceWork]:
        """What the ranges of each place do in a step without the ranges in them; empty where none was counted."""
        found: dict[Place, PlaceWork] = {}
        for work in () if self.work is None else self.work.ranges:
            flops, dtypes = work.flops_of(work.instances), work.flops_by_dtype
            dtype = max(dtypes, key=lambda name: dtypes[name], default="")
            for path, sign in ((work.path, 1), (work.path[:-1], -1)):
                own = found.setdefault(_find_place(path), PlaceWork(dtype))
                own.dtype = own.dtype or dtype
                own.flops += sign * sum(flops.values())
                own.least_bytes += sign * work.least_bytes * work.instances
        return found

    def find_operator_line(self, module: str | None, calls: Callable[[OperatorLine], float]) -> SourceLine | None:
        """Return the line for which ``calls`` is largest among those that call operators in a module itself."""
        weights: defaultdict[SourceLine, float] = defaultdict(float)
        paths: dict[SourceLine, tuple[str, ...]] = {}
        for line in self.operator_lines:
            if calls(line) > 0 and _find_place(line.path)[1] == module:
                weights[source_line(line)] += calls(line)
                paths.setdefault(source_line(line), line.path)
        if not weights:
            return None
        where = max(weights, key=lambda where: weights[where])
        here = [line.path for line in self.operator_lines if source_line(line) == where]
        is_librarys = any(paths[where][: len(path)] == path != paths[where] for path in here)
        return None if is_librarys or (where.file, where.line) in self.trainer_lines else where

    def shares_of_lines(self, places: Collection[tuple[str | None, int]]) -> Mapping[Place, float]:
        """Return for each place in which lines call operators their share of the bytes of all that multiply nothing."""
        own, all_bytes = Counter[Place](), Counter[Place]()
        for line in self.operator_lines:
            if not line.flops:
                place = _find_place(line.path)
                all_bytes[place] += line.bytes
                own[place] += line.bytes * ((line.file, line.line) in places)
        return {place: own[place] / all_bytes[place] for place in own if own[place]}

    def predict(self, changes: Sequence[StepChange]) -> TimeAnswer:
        return self._ask_once(predict_changes, changes)

    def expect_after(self, changes: Sequence[StepChange]) -> int | None:
        return self._ask_once(expect_after, changes)

    def share_saved_on_fast_host(self, changes: Sequence[StepChange]) -> float:
        return self._ask_once(share_saved_on_fast_host, changes)

    def typical_instead_of(self, step_ns: int, least_ns: int = 0) -> TimeAnswer | None:
        """Return what without a cause is the typical step, or ``least_ns`` if that is longer; with it ``step_ns``.

        None where no step is known.
        """
        if self.replay is None and self.cpu_step is None:
            return None
        typical = self.predict(()) if self.cpu_step is None else self.cpu_step.without(NOTHING)
        more_ns = max(0, least_ns - (typical.expected_ns or 0))
        low_ns, expected_ns, high_ns = (
            None if time_ns is None else time_ns + more_ns
            for time_ns in (typical.low_ns, typical.expected_ns, typical.high_ns)
        )
        return replace(typical, now_ns=step_ns, low_ns=low_ns, expected_ns=expected_ns, high_ns=high_ns)

    def _ask_once(
        self,
        question: Callable[[StepReplay, Sequence[StepChange], ProgramFacts], Answer],
        changes: Sequence[StepChange],
    ) -> Answer:
        assert self.replay is not None
        key = (question, *changes)
        if key not in self._answers:
            self._answers[key] = question(self.replay, changes, self.facts)
        answer: Answer = self._answers[key]
        return answer

    @property
    def step(self) -> ReplayedStep | None:
        return None if self.replay is None else self.replay.typical

    @cached_property
    def pageable_copies(self) -> list[int]:
        """The calls of the typical step that copy to the GPU from memory that is not pinned."""
        return [] if self.step is None else find_pageable_copies(self.step)

    @property
    def kernels(self) -> tuple[Operation, ...]:
        """The operations of the typical step; none without one."""
        return () if self.step is None else self.operations(self.step)

    @property
    def now_ns(self) -> int:
        """The step now, 0 where it is unknown."""
        now = self.replay or self.cpu_step
        return 0 if now is None else now.now_ns or 0

    @property
    def spread_ns(self) -> int:
        now = self.replay or self.cpu_step
        return 0 if now is None else now.spread_ns

    @property
    def is_tight(self) -> bool:
        memory = self.summary.memory
        if memory is None:
            return False
        return memory.failure is not None or (
            memory.capacity_bytes is not None and memory.reserved_peak_bytes > _TIGHT * memory.capacity_bytes
        )

    @cached_property
    def lines(self) -> Sequence[LineTime]:
        """The lines of source, each once a phase, scaled to unprofiled steps; empty where none are known."""
        return join_at_places(self.facts.lines or ())

    @cached_property
    def call_tree(self) -> CallTree:
        return CallTree(self.lines, self.facts.callers)

    def computes_loss(self, line: LineTime) -> bool:
        """Whether a line outside of the passes computes the loss: it stands between them, or is called there."""
        known = [one for one in (*self.lines, *self.facts.callers) if one.thread == "main"]
        ends = {(one.file, one.function): one.line for one in known if calls_backward(one.called)}
        begins: dict[tuple[str | None, str], int] = {}
        for one in known:
            if one.phase == FORWARD:
                key = one.file, one.function
                begins[key] = min(one.line, begins.get(key, one.line))

        def is_between(one: LineTime) -> bool:
            key = one.file, one.function
            return one.phase is None and key in begins and begins[key] <= one.line <= ends.get(key, one.line)

        calls = {one.method for one in self.facts.callers if is_between(one)}
        return is_between(line) or line.outer_function.rpartition(".")[2] in calls

    @property
    def loader(self) -> Loader | None:
        """The data loader that gives most batches; None where its lines are not known."""
        return next(iter(self.manifest.loaders), None)

    @property
    def is_in_trainer(self) -> bool:
        """Whether Hugging Face's Trainer runs the steps: a line that calls its ``train`` runs whole ones."""
        lines = (*self.lines, *self.facts.callers)
        return any((line.called or "").endswith(".train") and line.place in self.trainer_lines for line in lines)

    @cached_property
    def trainer_lines(self) -> frozenset[tuple[str | None, int]]:
        return lines_of_trainers((*self.lines, *self.facts.callers))

    @property
    def is_debugged(self) -> bool:
        """Whether a mode that looks for errors makes the step another one than it will be without."""
        return self.launches_block or self.condition("anomaly_detection") is True

    @property
    def launches_block(self) -> bool:
        """Whether each launch waits until its kernel has run, by the process's environment or the launcher's."""
        is_set = self.manifest.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        return is_set or self.condition("launch_blocking") is True

    @property
    def lines_of_rare_steps(self) -> Sequence[LineTime]:
        """The lines that ran in rare steps alone, as they were seen."""
        return () if self.trace is None or self.trace.lines is None else self.trace.lines.rare

    @property
    def busy_cpus_of_worker(self) -> float | None:
        """How many CPUs a loader's worker keeps busy while it makes a batch, None if that is unknown."""
        lines = None if self.trace is None else self.trace.lines
        return None if lines is None else lines.worker_cpus

    @cached_property
    def module_ranges(self) -> Mapping[tuple[str | None, str], Sequence[int]]:
        """(phase, kind of module) → the ranges of its calls, or passes, within steps, in order.

        What a checkpoint computes again is not among them.
        """
        found = defaultdict[tuple[str | None, str], list[int]](list)
        for at, place, name in self._find_modules():
            found[place.phase, name].append(at)
        return found

    def _find_modules(self) -> Iterator[tuple[int, ModulePlace, str]]:
        """Yield each range of a step that is a module's own: its number, its place, and the kind of module."""
        if self.trace is None:
            return
        attribution = self.trace.attribution
        names, name_of = attribution.trace.names, attribution.trace.ranges.name
        kinds = {number: kind_of(names[number]) for number in distinct_values(name_of).tolist()}
        places, in_steps = places_of_ranges(attribution), (find_steps(attribution) != NO_RANGE) & ~attribution.is_mirror
        for at in np.flatnonzero(in_steps).tolist():
            place, name = places[at], kinds[int(name_of[at])]
            if place.modules and place.modules[-1] == name and not place.is_again:
                yield at, place, name

    def operations_in(self, step: ReplayedStep, ranges: Sequence[int]) -> list[list[int]]:
        """Return for each of these ranges that lies in a step the operations that its thread launches in it."""
        assert self.trace is not None
        trace, columns = self.trace.trace, step.columns
        starts_ns, threads = trace.calls.start_ns[columns.call], trace.calls.thread[columns.call]
        found = []
        for at in ranges:
            inside = (starts_ns >= trace.ranges.start_ns[at]) & (starts_ns < trace.ranges.end_ns[at])
            calls = np.flatnonzero(inside & (threads == trace.ranges.thread[at])).tolist()
            found.append(columns.rows_of(calls))
        return [rows for rows in found if rows]

    @cached_property
    def unread_calls(self) -> Sequence[tuple[str, float, list[int]]]:
        """Models that are called with gradients more often than backward goes through them.

        Each has the number of backward passes a step, and the ranges of its calls, in order. What lies within a model
        says nothing: ``nn.Identity`` has no backward pass.
        """
        passed, called = Counter[str](), defaultdict[str, list[int]](list)
        for at, place, name in self._find_modules():
            if place.phase == FORWARD and len(place.modules) == 1:
                called[name].append(at)
            passed[name] += place.phase == BACKWARD
        steps = max(1, self.summary.program_steps)
        return [
            (name, passed[name] / steps, calls)
            for name, calls in called.items()
            if passed[name] and len(calls) - passed[name] >= max(_OFTEN * steps, 2)
        ]

    def condition(self, *names: str) -> object:
        return find_condition(self.manifest, *names)

    def operations(self, step: ReplayedStep) -> tuple[Operation, ...]:
        """Return the operations of a recorded step, in the order of their launches."""
        if id(step) not in self._operations:
            columns = step.columns
            self._operations[id(step)] = tuple(
                Operation(
                    at,
                    step.names[row],
                    step.categories[row],
                    columns.duration_ns[at],
                    columns.launcher[at],
                    step.phase[columns.launcher[at]],
                    step.operation_module[at],
                    columns.launches[columns.launcher[at]] == (at, at + 1),
                )
                for at, row in enumerate(columns.row.tolist())
            )
        return self._operations[id(step)]

    def shares_in_ranges(self, step: ReplayedStep, beginning: str, *, whole_from: float = 1.0) -> dict[int, float]:
        """Return call → the share of the Python before it that ran in ranges whose names begin so, if any did.

        From the share ``whole_from`` on all of that Python counts.
        """
        assert self.trace is not None
        trace, columns = self.trace.trace, step.columns
        if not len(columns.call):
            return {}
        names = [number for number, name in enumerate(trace.names) if name.startswith(beginning)]
        ours = np.isin(trace.ranges.name, names) & (trace.ranges.process == trace.calls.process[columns.call[0]])
        ranges = unite(trace.ranges.start_ns[ours], trace.ranges.end_ns[ours])
        gaps_ns = np.maximum(columns.gap_ns, 0)
        ends_ns = trace.calls.start_ns[columns.call]
        inside_ns = ranges.within(ends_ns - gaps_ns, ends_ns)
        shares = {call: float(inside_ns[call] / gaps_ns[call]) for call in np.flatnonzero(inside_ns).tolist()}
        return {call: 1.0 if share >= whole_from else share for call, share in shares.items()}

    def usual_time_in(self, beginning: str, counter: str) -> int:
        """Return how long the median recorded step ran Python in ranges whose names begin so.

        0 where most of the unprofiled steps, by their ``counter``, had nothing of it.
        """
        unprofiled = self.manifest.unprofiled
        if unprofiled is not None and 2 * unprofiled.during.get(counter, 0) <= len(unprofiled.steps):
            return 0
        times = [
            sum(share * step.columns.gap_ns[call] for call, share in self.shares_in_ranges(step, beginning).items())
            for step in (() if self.replay is None else self.replay.steps)
        ]
        return round(median(times)) if times else 0

    def awaited_copies(self, step: ReplayedStep) -> list[Operation]:
        """Return the copies, to the GPU or from it, for which the host waits."""
        waits = {*step.columns.waits_among(range(len(step.columns.kind)))}
        copies = [one for one in self.operations(step) if one.category == "copy"]
        return [one for one in copies if {one.call, one.call + 1} & waits]

    def choose(self, holds: Callable[[Operation], bool]) -> Callable[[ReplayedStep], list[int]]:
        """Return what chooses the operations of any recorded step for which a condition holds."""
        return lambda step: [operation.at for operation in self.operations(step) if holds(operation)]

    def runs(self, step: ReplayedStep, holds: Callable[[Operation], bool]) -> list[tuple[Operation, ...]]:
        """Return the operations of a step as runs of one phase and module without one for which ``holds`` is false."""
        found: list[tuple[Operation, ...]] = []
        for (fits, *_), group in groupby(self.operations(step), key=lambda one: (holds(one), one.phase, one.module)):
            found += [tuple(group)] if fits else []
        return found


def _communication_ns(replay: StepReplay) -> int:
    step = replay.typical
    if step is None:
        return 0
    rows = zip(step.columns.row.tolist(), step.columns.duration_ns, strict=True)
    return sum(time_ns for row, time_ns in rows if step.categories[row] == "communication")


def _find_place(path: Sequence[str]) -> Place:
    place = read_place([(name, "") for name in path])
    return place.phase or OUTSIDE, kind_of(place.modules[-1]) if place.modules else None


def is_part(module: str | None, of: str) -> bool:
    """Return whether a module lies in another one, by their names."""
    return module is not None and module.startswith(f"{of}.")


def sums_by_index(operation: Operation) -> bool:
    """Return whether it is the kernel of torch that adds sorted rows where an index has one several times."""
    return "indexing_backward" in operation.name


def saves_on_cpu(line: LineTime) -> bool:
    """Return whether most waits of a line are those of torch.autograd.graph.save_on_cpu for what it saves."""
    return line.waits >= 1 and "save_on_cpu" in (line.inside or "")


def source_line(line: LineTime | OperatorLine) -> SourceLine:
    assert line.file is not None
    return SourceLine(line.file, line.line, line.function)


def line_of_keeping(loader: Loader) -> SourceLine:
    """Return the line that says whether a loader's workers stay."""
    return SourceLine(loader.file, loader.keeps_line, loader.keeps_function)


def name_place(line: LineTime) -> str:
    return f"{PurePath(line.file or '').name}:{line.line}"


def find_line(text: str) -> SourceLine | None:
    match = _LINE_NUMBER.search(text)
    return None if match is None else SourceLine(text[: match.start()], int(match[1]), text[match.end() :])


def name_ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.3g} ms" if time_ns < 1_000_000_000 else f"{time_ns / 1e6:,.0f} ms"


def name_times(count: float) -> str:
    """Return how often something happens: ``once a step``, ``8 times a step``."""
    return "once a step" if count == 1 else f"{name_count(count)} times a step"


def edits(*texts: str) -> tuple[StepChange, ...]:
    """Return edits, as on the command line, as changes of a step."""
    return tuple(change_of(edit) for edit in parse_edits(texts))
