"""Edits of a program as changes of a step's columns, and how long the step would take with them.

Each edit is a function of a step that is ready to run. What an edit leaves open (how few launches a fused optimizer
has, which of several waits a line makes) it answers in three `Worlds`: the step is run in all of them, at every speed
of the host that fits. The step after is the unprofiled one and what the change adds to the replay.

A dropped call takes no time, and a dropped operation neither: rows stay, so that all columns keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Literal

from profkit.analysis.kernels.categories import product_dtype
from profkit.analysis.step_replay.columns import COPY, HOST, LAUNCH, WAIT, StepColumns
from profkit.analysis.step_replay.limits import OUTSIDE
from profkit.analysis.step_replay.replay import Constants
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import DATA, OPTIMIZER
from profkit.run.edits import read_factor
from profkit.run.lines import LineTime

World = Literal["least", "expected", "most"]
WORLDS: tuple[World, ...] = ("least", "expected", "most")

_BANDWIDTH = {"least": 0.9, "expected": 0.75, "most": 0.6}
"""What a fused optimizer reaches of the memory's peak."""
_LAUNCHES_MERGED = {
    "fused": {"least": 400, "expected": 100, "most": 30},
    "foreach": {"least": 80, "expected": 40, "most": 15},
}
"""How many launches of a loop over parameters become one."""
_FOREACH_TO_FUSED = {"least": 14, "expected": 8, "most": 3}
"""The same of a foreach optimizer."""
_GRAPH_NODE_NS = {"least": 0, "expected": 300, "most": 1_000}
"""What the launch of a CUDA graph takes for each of its kernels."""
_TF32, _BF16, _HALF = 8, 16, 2
"""No GPU computes products in TF32 or bf16 faster than this many times, or moves numbers of half the size faster."""
_SMALL = ("softmax", "normalization", "elementwise", "reduction", "copy/cast", "loss", "random", "other")


class CannotPredictError(Exception):
    """The recording says too little for an edit, or its effect cannot be replayed; the message says why."""


@dataclass(frozen=True)
class ProgramFacts:
    """What is known of the program besides its trace.

    ``lines`` are the lines of source behind its unprofiled steps. ``optimizer_bytes`` is what a fused optimizer moves,
    None if torch has none for it; ``bytes_per_s`` the memory's peak.
    """

    lines: Sequence[LineTime] | None = None
    optimizer_bytes: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Setting:
    """What an edit is applied to: a step of a program on a machine, in one of the worlds; and the edit's argument."""

    step: ReplayedStep
    constants: Constants
    facts: ProgramFacts
    world: World
    argument: str = ""

    def calls_in(self, phases: Collection[str]) -> list[int]:
        return [at for at, phase in enumerate(self.step.phase) if phase in phases]

    @property
    def training_phases(self) -> set[str]:
        return set(self.step.phase) - {OUTSIDE, DATA}

    def name(self, columns: StepColumns, row: int) -> str:
        return self.step.names[int(columns.row[row])]

    def category(self, columns: StepColumns, row: int) -> str:
        return self.step.categories[int(columns.row[row])]


Change = Callable[[StepColumns, Setting], StepColumns]


def _scale(columns: StepColumns, rows: Collection[int], factor: float) -> StepColumns:
    """Return the step with the durations of some operations scaled."""
    if not rows:
        raise CannotPredictError("the step has no such operation")
    chosen = set(rows)
    durations = [
        round(time_ns * factor) if row in chosen else time_ns for row, time_ns in enumerate(columns.duration_ns)
    ]
    return replace(columns, duration_ns=durations)


def _rows(columns: StepColumns, setting: Setting, holds: Callable[[str, str], bool]) -> list[int]:
    """Return the operations whose name and category fit."""
    rows = range(len(columns.row))
    return [row for row in rows if holds(setting.name(columns, row), setting.category(columns, row))]


_LINKS = ("communication", "copy")


def _change_gpu(columns: StepColumns, setting: Setting) -> StepColumns:
    rows = _rows(columns, setting, lambda _, category: category not in _LINKS)
    return _scale(columns, rows, 1 / float(read_factor(setting.argument)))


def _change_links(columns: StepColumns, setting: Setting) -> StepColumns:
    rows = _rows(columns, setting, lambda _, category: category in _LINKS)
    return _scale(columns, rows, 1 / float(read_factor(setting.argument)))


def _change_kernels(columns: StepColumns, setting: Setting) -> StepColumns:
    pattern, _, factor = setting.argument.rpartition(":")
    return _scale(
        columns, _rows(columns, setting, lambda name, _: fnmatchcase(name, pattern)), float(read_factor(factor))
    )


def _change_cpu(columns: StepColumns, setting: Setting) -> StepColumns:
    factor = 1 / float(read_factor(setting.argument))
    own = [
        round(time * factor) if kind in (HOST, LAUNCH) else time
        for time, kind in zip(columns.own_ns, columns.kind, strict=True)
    ]
    return replace(columns, gap_ns=[round(gap * factor) for gap in columns.gap_ns], own_ns=own)


def drop_calls(columns: StepColumns, calls: Iterable[int]) -> StepColumns:
    """Return the step in which some calls take no time, nor Python before them."""
    gap, own = list(columns.gap_ns), list(columns.own_ns)
    for call in calls:
        gap[call] = min(gap[call], 0)
        own[call] = 0
    return replace(columns, gap_ns=gap, own_ns=own)


def drop_operations(columns: StepColumns, rows: Iterable[int]) -> StepColumns:
    duration, between, stalls = list(columns.duration_ns), list(columns.between_ns), dict(columns.stall_ns)
    for row in rows:
        duration[row] = between[row] = 0
        stalls.pop(row, None)
    return replace(columns, duration_ns=duration, between_ns=between, stall_ns=stalls)


def _refuse_waits(columns: StepColumns, calls: Iterable[int]) -> None:
    if any(columns.kind[call] in (WAIT, COPY) for call in calls):
        raise CannotPredictError("the host waits for the GPU, or copies pageable memory, within what would be captured")


def _change_to_graphs(columns: StepColumns, setting: Setting) -> StepColumns:
    """One graph holds all that runs from the first phase to the last; one call launches it."""
    inside = setting.calls_in(setting.training_phases)
    if not inside:
        raise CannotPredictError("the step has no phases")
    calls = range(inside[0], inside[-1] + 1)
    _refuse_waits(columns, calls)
    nodes = sum(last - first for first, last in (columns.launches[call] for call in calls))
    columns = drop_calls(columns, calls[1:])
    own = list(columns.own_ns)
    own[calls[0]] = setting.constants.launch_ns + _GRAPH_NODE_NS[setting.world] * nodes
    return replace(columns, own_ns=own)


def _change_optimizer(columns: StepColumns, setting: Setting) -> StepColumns:
    """The optimizer's first launch keeps the Python before it; of the others one in so many is left."""
    kind = setting.argument.removeprefix("adamw-")
    if kind not in ("fused", "foreach"):
        raise CannotPredictError("what another optimizer would do to the time is not known")
    calls = [call for call in setting.calls_in({OPTIMIZER}) if columns.kind[call] in (HOST, LAUNCH)]
    launches = [call for call in calls if columns.launches[call][0] < columns.launches[call][1]]
    rows = [row for call in launches for row in range(*columns.launches[call])]
    names = [setting.name(columns, row) for row in rows]
    is_foreach = any("multi_tensor_apply" in name for name in names)
    if not launches or any("Fused" in name for name in names) or (is_foreach and kind == "foreach"):
        raise CannotPredictError(f"the optimizer is {kind} already, or launches nothing")
    if any(setting.category(columns, row) == "communication" for row in rows):
        raise CannotPredictError("the optimizer's step communicates")
    if kind == "fused":
        time_ns = _fused_time(setting)
        merged = (_FOREACH_TO_FUSED if is_foreach else _LAUNCHES_MERGED["fused"])[setting.world]
    else:
        time_ns = _foreach_time([columns.duration_ns[row] for row in rows], setting.world)
        merged = _LAUNCHES_MERGED["foreach"][setting.world]
    kept = set(launches[::merged])
    kept_rows = [row for call in kept for row in range(*columns.launches[call])]
    columns = drop_calls(columns, [call for call in calls if call not in kept and call > launches[0]])
    columns = drop_operations(columns, [row for row in rows if row not in kept_rows])
    duration = list(columns.duration_ns)
    for row in kept_rows:
        duration[row] = time_ns // len(kept_rows)
    return replace(columns, duration_ns=duration)


def _fused_time(setting: Setting) -> int:
    facts = setting.facts
    if facts.optimizer_bytes is None or facts.bytes_per_s is None:
        raise CannotPredictError(
            "how much a fused optimizer would move, and how fast, is not recorded, or torch has none for this optimizer"
        )
    return round(facts.optimizer_bytes / (facts.bytes_per_s * _BANDWIDTH[setting.world]) * 1e9)


def _foreach_time(durations: Sequence[int], world: World) -> int:
    """Return the time of the same work in few kernels: without what even the smallest kernel takes, or all of it."""
    smallest = min(durations)
    work_ns = sum(durations) - smallest * len(durations)
    return {"least": work_ns, "expected": (work_ns + sum(durations)) // 2, "most": sum(durations)}[world]


def _change_zero_grad(columns: StepColumns, setting: Setting) -> StepColumns:
    rows = _rows(columns, setting, lambda name, _: "ZeroFunctor" in name)
    if not rows:
        raise CannotPredictError("no kernel that sets gradients to zero was recorded")
    return drop_operations(drop_calls(columns, {columns.launcher[row] for row in rows}), rows)


def _lines_at(setting: Setting) -> list[LineTime]:
    """Return what is known of a line, by phase."""
    if setting.facts.lines is None:
        raise CannotPredictError("the run holds no lines of source; `profkit run` of a script records them")
    file, _, number = setting.argument.rpartition(":")
    parts = PurePath(file).parts
    lines = [
        line
        for line in setting.facts.lines
        if line.file is not None
        and str(line.line) == number
        and line.thread != "worker"
        and PurePath(line.file).parts[-len(parts) :] == parts
    ]
    if not lines:
        raise CannotPredictError("no such line is known; `profkit summary` names those that take time")
    return lines


def _change_waits(columns: StepColumns, setting: Setting) -> StepColumns:
    """As many waits of a phase go as the line makes there: the longest, the shortest, or some all over it."""
    counts = [(line.phase or OUTSIDE, round(line.waits)) for line in _lines_at(setting)]
    if not any(count for _, count in counts):
        raise CannotPredictError("this line does not wait for the GPU")
    for phase, count in counts:
        waits = [call for call in setting.calls_in({phase}) if columns.kind[call] in (WAIT, COPY)]
        waits = [call for call in waits if columns.kind[call] == WAIT or call + 1 not in waits]
        by_length = sorted(waits, key=lambda call: columns.call_start_ns[call] - columns.call_end_ns[call])
        every = max(1, len(waits) // max(count, 1))
        chosen = {"least": by_length, "expected": waits[::every], "most": by_length[::-1]}[setting.world][:count]
        columns = stop_waiting(columns, chosen, setting.constants)
    return columns


def stop_waiting(columns: StepColumns, calls: Iterable[int], constants: Constants) -> StepColumns:
    """Return the step in which some waits are gone; a pageable copy right before one is an asynchronous one then."""
    kind, own, targets = list(columns.kind), list(columns.own_ns), list(columns.targets)
    for call in calls:
        for at in (call - 1, call):
            if at >= 0 and kind[at] == COPY:
                kind[at], own[at] = LAUNCH, constants.launch_ns
        if kind[call] == WAIT:
            kind[call], own[call], targets[call] = HOST, 0, ()
    return replace(columns, kind=kind, own_ns=own, targets=targets)


def _change_host(columns: StepColumns, setting: Setting) -> StepColumns:
    """The line's time goes from the longest pauses of its phases, give or take its error."""
    sign = {"least": 2, "expected": 0, "most": -2}[setting.world]
    gap = list(columns.gap_ns)
    for line in _lines_at(setting):
        left_ns = max(0, line.time_ns - line.waiting_ns + sign * line.error_ns)
        phases = {line.phase} if line.phase is not None else {OUTSIDE, DATA}
        for call in sorted(setting.calls_in(phases), key=lambda call: -gap[call]):
            taken_ns = min(left_ns, max(gap[call], 0))
            gap[call] -= taken_ns
            left_ns -= taken_ns
    return replace(columns, gap_ns=gap)


def _change_to_compiled(columns: StepColumns, setting: Setting) -> StepColumns:
    """At best no Python is left, and no small kernel; at worst nothing changes."""
    if setting.world != "least":
        return columns
    calls = [call for call in setting.calls_in(setting.training_phases) if columns.kind[call] in (HOST, LAUNCH)]
    phases = setting.training_phases - {OPTIMIZER}
    rows = _rows(columns, setting, lambda _, category: category in _SMALL)
    rows = [row for row in rows if setting.step.phase[columns.launcher[row]] in phases]
    return drop_operations(drop_calls(columns, calls), rows)


def _change_to_tf32(columns: StepColumns, setting: Setting) -> StepColumns:
    rows = _rows(columns, setting, lambda name, _: product_dtype(name) == "fp32")
    if not rows:
        raise CannotPredictError("by its kernels' names no product runs in fp32")
    return _scale(columns, rows, 1 / _TF32) if setting.world == "least" else columns


def _change_to_bf16(columns: StepColumns, setting: Setting) -> StepColumns:
    if setting.world != "least":
        return columns
    products = _rows(columns, setting, lambda _, category: category in ("gemm", "attention"))
    others = _rows(columns, setting, lambda _, category: category not in ("gemm", "attention", *_LINKS))
    return _scale(_scale(columns, products, 1 / _BF16), others, 1 / _HALF)


CHANGES: dict[str, Change] = {
    "optimizer": _change_optimizer,
    "zero-grad": _change_zero_grad,
    "no-wait": _change_waits,
    "no-host": _change_host,
    "tf32": _change_to_tf32,
    "autocast": _change_to_bf16,
    "compile": _change_to_compiled,
    "graphs": _change_to_graphs,
    "gpu": _change_gpu,
    "kernels": _change_kernels,
    "links": _change_links,
    "cpu": _change_cpu,
}

BOUNDS = {
    "compile": "compile is a bound: at best no Python between launches is left and all small kernels are fused away",
    "tf32": f"tf32 is a bound: fp32 products take from an eighth (1/{_TF32}) of their time to all of it",
    "autocast": (
        f"autocast:bf16 is a bound: products take at least 1/{_BF16} of their time, other kernels half;"
        " casts add time that no recording shows"
    ),
}
"""Edits whose effect unseen kernels decide: what the bound is."""
ASSUMPTIONS = {
    "optimizer": "how many launches and which bandwidth the other optimizer has",
    "no-wait": "which of the phase's waits the line makes",
    "no-host": "the line's time is sampled",
    "graphs": "what launching a graph takes for each kernel",
    "links": "all memory copies pass a link",
}
