"""Edits of a program as changes of a step's columns, and how long the step would take with them.

Each edit is a function of a step that is ready to run. What an edit leaves open (how few launches a fused optimizer
has, which of several waits a line makes) it answers in three worlds (`facts.World`): the step is run in all of them, at
every speed of the host that fits. The step after is the unprofiled one and what the change adds to the replay.

A dropped call takes no time, and a dropped operation neither: rows stay, so that all columns keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate, groupby
from pathlib import PurePath

from profkit.analysis.step_replay import COPY, HOST, LAUNCH, NONE, WAIT, ProgramFacts, StepColumns, World
from profkit.analysis.step_replay.calibrate import PAUSE_NS
from profkit.analysis.step_replay.limits import OUTSIDE
from profkit.analysis.step_replay.replay import Constants
from profkit.analysis.step_replay.steps import FROM_HOST, ReplayedStep
from profkit.names import BACKWARD, DATA, FORWARD, OPTIMIZER
from profkit.run.edits import read_factor
from profkit.run.lines import LineTime, join_at_places

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
_NODE_GAP_NS = {"least": 60, "expected": 150, "most": 1_000}
"""What passes between two kernels of a CUDA graph; on an H200 it was 0.1 µs (median; mean 0.4)."""
_PINNED_BYTES_PER_S = {"least": 55e9, "expected": 40e9, "most": 12e9}
_HELD_NS = 100_000
"""A copy from pinned memory returns sooner than this."""
_PINNING_BYTES_PER_S = {"least": 20e9, "expected": 8e9, "most": 4e9}
"""Without workers the thread that trains moves a batch to pinned memory itself."""
_WRAPPER = {
    FORWARD: {"least": 0.45, "expected": 0.35, "most": 0.1},
    BACKWARD: {"least": 0.35, "expected": 0.25, "most": 0.0},
}
"""Of the Python of a module's pass that is not computed again, what checkpointing adds: generators' states, hooks.

In a transformer of 8 blocks on two H200s it was 0.43 and 0.40 in forward, 0.30 and 0.28 in backward.
"""
_FEWEST_ZEROED = 4
"""Fewer fills one after another are no gradients'."""
_SUM_TO_FILL = 3
"""How many times the bytes of a fill a sum moves."""
_MOST_NAMED = 3
_SUM = "CUDAFunctor_add"
"""What torch's kernels are called that add two tensors."""
_AGAIN = {"least": 1.0, "expected": 1.5, "most": 2.0}
"""How many times the Python of a forward pass its repetition takes, with what the wrapper adds to both."""


class CannotPredictError(Exception):
    """The recording says too little for an edit, or its effect cannot be replayed; the message says why."""


@dataclass(frozen=True)
class Setting:
    """What an edit is applied to: a step of a program on a machine, in one of the worlds; and the edit's argument."""

    step: ReplayedStep
    constants: Constants
    facts: ProgramFacts
    world: World
    argument: str = ""

    def calls_in(self, phases: Collection[str]) -> list[int]:
        return self.step.calls_in(phases)

    def calls_of_optimizer(self, columns: StepColumns) -> list[int]:
        """Return the calls of its phase that neither wait nor copy."""
        return [call for call in self.calls_in({OPTIMIZER}) if columns.kind[call] in (HOST, LAUNCH)]

    @property
    def training_phases(self) -> set[str]:
        return set(self.step.phase) - {OUTSIDE, DATA}

    def name(self, columns: StepColumns, row: int) -> str:
        return self.step.names[int(columns.row[row])]

    def category(self, columns: StepColumns, row: int) -> str:
        return self.step.categories[int(columns.row[row])]


Change = Callable[[StepColumns, Setting], StepColumns]


def change_cpu(columns: StepColumns, setting: Setting) -> StepColumns:
    return slow_host(columns, 1 / float(read_factor(setting.argument)))


def slow_host(columns: StepColumns, factor: float) -> StepColumns:
    """Return the step in which the host takes ``factor`` times as long for all that it does itself."""
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
    slots = list(columns.slots)
    for row in rows:
        duration[row] = between[row] = slots[row] = 0
        stalls.pop(row, None)
    return replace(columns, duration_ns=duration, between_ns=between, stall_ns=stalls, slots=slots)


def change_durations(columns: StepColumns, rows: Iterable[int], new_time: Callable[[int], float]) -> StepColumns:
    """Return the step in which some operations take what ``new_time`` makes of their time."""
    durations = list(columns.duration_ns)
    for row in rows:
        durations[row] = round(new_time(durations[row]))
    return replace(columns, duration_ns=durations)


def launch_as_graph(columns: StepColumns, setting: Setting) -> StepColumns:
    """One graph holds all that runs from the first phase to the last; one call launches it."""
    inside = setting.calls_in(setting.training_phases)
    if not inside:
        raise CannotPredictError("the step has no phases")
    calls = range(inside[0], inside[-1] + 1)
    if columns.waits_among(calls):
        raise CannotPredictError("the host waits for the GPU, or copies pageable memory, within what would be captured")
    nodes = len(columns.rows_of(calls))
    columns = drop_calls(columns, calls[1:])
    own = list(columns.own_ns)
    own[calls[0]] = setting.constants.launch_ns + _GRAPH_NODE_NS[setting.world] * nodes
    return join_in_graph(replace(columns, own_ns=own), calls, setting.world)


def join_in_graph(columns: StepColumns, calls: Iterable[int], world: World) -> StepColumns:
    """Return the step in which what some calls launch follows one another as in a CUDA graph."""
    between = list(columns.between_ns)
    for row in columns.rows_of(calls):
        between[row] = min(between[row], _NODE_GAP_NS[world])
    return replace(columns, between_ns=between)


def change_optimizer(columns: StepColumns, setting: Setting) -> StepColumns:
    """The optimizer's first launch keeps the Python before it; of the others one in so many is left."""
    kind = setting.argument.removeprefix("adamw-")
    if kind not in ("fused", "foreach"):
        raise CannotPredictError("what another optimizer would do to the time is not known")
    calls = setting.calls_of_optimizer(columns)
    launches = columns.launching(calls)
    rows = columns.rows_of(launches)
    names = [setting.name(columns, row) for row in rows]
    is_foreach = any("multi_tensor_apply" in name for name in names)
    if not launches or any("Fused" in name for name in names) or (is_foreach and kind == "foreach"):
        raise CannotPredictError(f"the optimizer is {kind} already, or launches nothing")
    if any(setting.category(columns, row) == "communication" for row in rows):
        raise CannotPredictError("the optimizer's step communicates")
    if kind == "fused":
        time_ns = fused_time(setting.facts.optimizer_bytes, setting)
        merged = (_FOREACH_TO_FUSED if is_foreach else _LAUNCHES_MERGED["fused"])[setting.world]
    else:
        time_ns = foreach_time([columns.duration_ns[row] for row in rows], setting.world)
        merged = _LAUNCHES_MERGED["foreach"][setting.world]
    return merge_launches(columns, calls, merged, time_ns)


def merge_launches(columns: StepColumns, calls: Sequence[int], merged: int, time_ns: int) -> StepColumns:
    """Return the step in which one of so many launches of these calls is left, and what is left takes this long."""
    launches = columns.launching(calls)
    kept = set(launches[::merged])
    kept_rows = columns.rows_of(kept)
    columns = drop_calls(columns, [call for call in calls if call not in kept and call > launches[0]])
    columns = drop_operations(columns, columns.rows_of(call for call in launches if call not in kept))
    return change_durations(columns, kept_rows, lambda _: time_ns // len(kept_rows))


def fused_time(moved_bytes: int | None, setting: Setting) -> int:
    if moved_bytes is None or setting.facts.bytes_per_s is None:
        raise CannotPredictError(
            "how much a fused optimizer would move, and how fast, is not recorded, or torch has none for this optimizer"
        )
    return round(moved_bytes / (setting.facts.bytes_per_s * _BANDWIDTH[setting.world]) * 1e9)


def foreach_time(durations: Sequence[int], world: World) -> int:
    smallest = min(durations)
    work_ns = sum(durations) - smallest * len(durations)
    return {"least": work_ns, "expected": (work_ns + sum(durations)) // 2, "most": sum(durations)}[world]


def find_rows(columns: StepColumns, setting: Setting, holds: Callable[[str, str], bool]) -> list[int]:
    rows, holds = range(len(columns.row)), cache(holds)  # thousands of kernels have few names
    return [row for row in rows if holds(setting.name(columns, row), setting.category(columns, row))]


def find_zeroed_gradients(step: ReplayedStep) -> list[int]:
    """Return the operations that set gradients to zero: torch's for many at once, or fills, one for each.

    Fills are theirs if several follow one another outside of all phases, and the backward pass then adds to them.
    """
    columns = step.columns
    names = step.operation_names
    together = [at for at, name in enumerate(names) if "ZeroFunctor" in name]
    if together:
        return together
    is_fill = ["FillFunctor" in name and step.phase[columns.launcher[at]] == OUTSIDE for at, name in enumerate(names)]
    runs = [list(run) for fills, run in groupby(range(len(names)), key=is_fill.__getitem__) if fills]
    zeroed = [at for run in runs if len(run) >= _FEWEST_ZEROED for at in run]
    return zeroed if _find_sums(step, zeroed) else []


def _find_sums(step: ReplayedStep, zeroed: Sequence[int]) -> list[int]:
    """A sum reads two tensors and writes one, where a fill writes one."""
    columns = step.columns
    is_sum = ["CUDAFunctor_add<float>" in name for name in step.operation_names]
    in_backward = [at for at, fits in enumerate(is_sum) if fits and step.phase[columns.launcher[at]] == BACKWARD]
    needed_ns = _SUM_TO_FILL * sum(columns.duration_ns[at] for at in zeroed)
    longest = sorted(in_backward, key=lambda at: -columns.duration_ns[at])
    before = accumulate((columns.duration_ns[at] for at in longest), initial=0)
    return [at for at, before_ns in zip(longest, before, strict=False) if before_ns < needed_ns]


def drop_zeroed_gradients(columns: StepColumns, setting: Setting) -> StepColumns:
    zeroed = find_zeroed_gradients(setting.step)
    if not zeroed:
        raise CannotPredictError("no kernel that sets gradients to zero was recorded")
    gone = zeroed if setting.world == "most" else [*zeroed, *_find_sums(setting.step, zeroed)]
    return drop_operations(drop_calls(columns, {columns.launcher[at] for at in gone}), gone)


def _lines_at(setting: Setting) -> list[LineTime]:
    facts = setting.facts
    if facts.lines is None:
        raise CannotPredictError("the run holds no lines of source; `profkit run` of a script records them")
    file, _, number = setting.argument.rpartition(":")
    parts = PurePath(file).parts

    def of_file(lines: Sequence[LineTime]) -> list[LineTime]:
        own = (line for line in lines if line.file is not None and line.thread != "worker")
        return [line for line in own if PurePath(line.file or "").parts[-len(parts) :] == parts]

    calling = [line for line in of_file(facts.callers) if str(line.line) == number]
    lines = [*calling, *(line for line in of_file(facts.lines) if str(line.line) == number)]
    if not lines:
        others = [*dict.fromkeys(str(line.line) for line in of_file(facts.lines)[:_MOST_NAMED])]
        named = f"line{'s' * (len(others) > 1)} {', '.join(others)}"
        known = f"; most of {PurePath(file).name}'s time is in {named}" if others else ""
        old = "" if facts.callers else ", and the recording does not say which lines call others"
        raise CannotPredictError(f"no time or wait of this line is known{old}{known}")
    if {line.phase for line in calling} & {BACKWARD, OPTIMIZER}:
        raise CannotPredictError("this line calls what trains: passes of the step lie in it")
    return list(join_at_places(lines))


def drop_waits_of_line(columns: StepColumns, setting: Setting) -> StepColumns:
    """As many waits of a phase go as the line makes there: the longest, the shortest, or some all over it.

    Those after a copy from the host are of lines that move tensors, and the others of other lines, if they are enough.
    """
    counts = [(line, round(line.waits)) for line in _lines_at(setting)]
    if not any(count for _, count in counts):
        raise CannotPredictError("this line does not wait for the GPU")
    for line, count in counts:
        waits = columns.waits_among(setting.calls_in({line.phase or OUTSIDE}))
        waits = [call for call in waits if columns.kind[call] == WAIT or call + 1 not in waits]
        alike = [call for call in waits if _follows_copy_from_host(columns, call, setting) == line.is_move]
        waits = alike if len(alike) >= count else waits
        by_length = sorted(waits, key=lambda call: columns.call_start_ns[call] - columns.call_end_ns[call])
        every = max(1, len(waits) // max(count, 1))
        chosen = {"least": by_length, "expected": waits[::every], "most": by_length[::-1]}[setting.world][:count]
        columns = stop_waiting(columns, chosen, setting.constants)
    return columns


def _follows_copy_from_host(columns: StepColumns, call: int, setting: Setting) -> bool:
    ranges = (columns.launches[at] for at in (call - 1, call) if at >= 0 and columns.kind[at] == COPY)
    return any(setting.name(columns, first) == FROM_HOST for first, last in ranges if first < last)


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


def drop_python_of_line(columns: StepColumns, setting: Setting) -> StepColumns:
    """The line's time goes, and its waits with it."""
    lines = _lines_at(setting)
    columns = _drop_time(columns, setting, lines)
    return drop_waits_of_line(columns, setting) if any(round(line.waits) for line in lines) else columns


def _drop_time(columns: StepColumns, setting: Setting, lines: Sequence[LineTime]) -> StepColumns:
    """Return the step without what lines take themselves, give or take its error, in their phases' longest pauses.

    What would be left of a long pause is the line's too, unless it is more than that error.
    """
    sign = {"least": 2, "expected": 0, "most": -2}[setting.world]
    gap = list(columns.gap_ns)
    for line in lines:
        left_ns = max(0, line.own_ns + sign * line.error_ns)
        phases = {line.phase} if line.phase is not None else {OUTSIDE, DATA}
        pauses = [sum(of_gap.get(phase, 0) for phase in phases) for of_gap in setting.step.gap_phases]
        for call in sorted(range(len(gap)), key=lambda call: -pauses[call]):
            taken_ns = min(left_ns, max(gap[call], 0), pauses[call])
            rest_ns = min(max(gap[call], 0), pauses[call]) - taken_ns
            is_all = taken_ns and pauses[call] > PAUSE_NS and rest_ns <= 2 * line.error_ns and setting.world != "most"
            gap[call] -= taken_ns + (rest_ns if is_all else 0)
            left_ns -= taken_ns
    return replace(columns, gap_ns=gap)


def find_pageable_copies(step: ReplayedStep) -> list[int]:
    """Return the copies from the host's memory that hold the host: to their end, or until most of it is staged."""
    columns = step.columns
    found = []
    for call, (first, last) in enumerate(columns.launches):
        is_copy = first < last and step.names[int(columns.row[first])] == FROM_HOST
        if is_copy and (columns.kind[call] == COPY or columns.own_ns[call] > _HELD_NS):
            found.append(call)
    return found


def pin_memory(columns: StepColumns, setting: Setting) -> StepColumns:
    """Copies from the host need not pass through a buffer; where the program waits after them, it still does.

    What a worker sends lies in memory that is shared with it. The thread that pins it gives that back, which the line
    that moves the batch did before.
    """
    copies = find_pageable_copies(setting.step)
    if not copies:
        raise CannotPredictError("the step copies nothing from pageable memory to the GPU")
    kind, own, durations = list(columns.kind), list(columns.own_ns), list(columns.duration_ns)
    for call in copies:
        kind[call], own[call] = LAUNCH, setting.constants.launch_ns
        for row in range(*columns.launches[call]):
            size = setting.step.copied_bytes[int(columns.row[row])]
            durations[row] = min(durations[row], round(size / _PINNED_BYTES_PER_S[setting.world] * 1e9))
            if not setting.facts.workers:
                own[call] += round(size / _PINNING_BYTES_PER_S[setting.world] * 1e9)
    columns = replace(columns, kind=kind, own_ns=own, duration_ns=durations)
    moves = [line for line in setting.facts.lines or () if line.is_move and line.thread == "main"]
    return _drop_time(columns, setting, moves) if setting.facts.workers else columns


def _calls_of_modules(setting: Setting, pattern: str) -> set[int]:
    modules = enumerate(setting.step.module)
    return {call for call, module in modules if module is not None and fnmatchcase(module, pattern)}


def add_checkpoints(columns: StepColumns, setting: Setting) -> StepColumns:
    """What matching modules compute in forward passes runs once more, spread over their backward passes.

    A checkpoint that is not reentrant stops computing once it has all that was saved.
    """
    pattern, _, options = setting.argument.partition(":")
    if options.removeprefix("reentrant"):
        raise CannotPredictError("what checkpoints of some of the modules, or of groups, do to the time is not known")
    matching = _calls_of_modules(setting, pattern)
    forward = matching & set(setting.calls_in({FORWARD}))
    backward = columns.launching(matching & set(setting.calls_in({BACKWARD})))
    if not forward or not backward:
        raise CannotPredictError("no module of this name has forward and backward passes; `profkit ranges` shows names")
    if any(columns.kind[call] == WAIT for call in forward):
        raise CannotPredictError("these modules wait for the GPU in their forward passes")
    rows = set(columns.rows_of(forward))
    again = rows if options else rows - _unsaved_ends(columns, setting, pattern, sorted(rows))
    gpu_ns = sum(columns.duration_ns[row] + max(0, columns.between_ns[row]) for row in again)
    calls = [call for call in forward if again.issuperset(range(*columns.launches[call]))]
    python_ns = _AGAIN[setting.world] * sum(max(0, columns.gap_ns[call]) + columns.own_ns[call] for call in calls)
    gap, duration = list(columns.gap_ns), list(columns.duration_ns)
    for call in backward:
        gap[call] += round(python_ns / len(backward))
        duration[columns.launches[call][0]] += gpu_ns // len(backward)
    return replace(columns, gap_ns=gap, duration_ns=duration)


def _unsaved_ends(columns: StepColumns, setting: Setting, pattern: str, rows: Sequence[int]) -> set[int]:
    """A product needs its factors and a sum nothing, so nobody saved what they make. Each product of the same module
    within the matching one is such an end if as many sums follow it.
    """
    is_sum = [_SUM in setting.name(columns, row) for row in rows]
    modules = [setting.step.operation_module[row] for row in rows]
    products = [at for at, row in enumerate(rows) if setting.category(columns, row) == "gemm"]
    if not products:
        return set()
    last = products[-1]
    within, sums = (modules[last] or "").rpartition(".")[0], is_sum[last + 1 :]
    if not sums or not all(sums) or not fnmatchcase(within, pattern):
        return set()
    ends = [at for at in products if modules[at] == modules[last] and is_sum[at + 1 : at + 1 + len(sums)] == sums]
    return {row for at in ends for row in rows[at : at + 1 + len(sums)]}


def drop_checkpoints(columns: StepColumns, setting: Setting) -> StepColumns:
    """Nothing of the matching modules is computed again, and their passes lose what the wrapper adds.

    Its calls lie in none of these modules: before a forward pass it reads generators' states, and sets them around
    what is computed again.
    """
    matching, module = _calls_of_modules(setting, setting.argument), setting.step.module
    again = _find_recomputed(columns, setting, matching)
    if not again:
        raise CannotPredictError("nothing is computed again in a module of this name; `profkit ranges` shows the names")
    reading = _find_calls_before(columns, matching & set(setting.calls_in({FORWARD})))
    # What else runs before a pass is the program's own: reading states takes less than all that is done with them.
    of_states_ns = sum(max(0, columns.gap_ns[call]) for call in again if module[call] is None)
    rows = columns.rows_of(again)
    columns = drop_operations(drop_calls(columns, again), rows)
    gap = list(columns.gap_ns)
    for call in reading:
        gap[call] -= min(max(gap[call], 0), of_states_ns // len(reading))
    for phase, wrapper in _WRAPPER.items():
        for call in matching & set(setting.calls_in({phase})):
            gap[call] -= round(max(gap[call], 0) * wrapper[setting.world])
    return replace(columns, gap_ns=gap)


def _find_recomputed(columns: StepColumns, setting: Setting, matching: set[int]) -> set[int]:
    again, module = set(setting.step.recomputing), setting.step.module
    by_thread = sorted(range(len(columns.kind)), key=lambda call: columns.thread[call])
    runs = [[*run] for _, run in groupby(by_thread, key=lambda call: (columns.thread[call], call in again))]
    chosen = [call for run in runs if not again.isdisjoint(run) and not matching.isdisjoint(run) for call in run]
    return {call for call in chosen if call in matching or module[call] is None}


def _find_calls_before(columns: StepColumns, passes: Collection[int]) -> set[int]:
    found: set[int] = set()
    for call in passes:
        before = columns.before[call]
        if before not in passes and before != NONE and columns.kind[before] == HOST:
            found.add(before)
    return found
