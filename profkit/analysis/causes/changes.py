"""Changes of a step that remove a cause and that no edit of the command line names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from profkit.analysis.step_replay import COPY, HOST, LAUNCH, WAIT, StepColumns, World, kernel_edits
from profkit.analysis.step_replay.data_waits import have_batches_come
from profkit.analysis.step_replay.edits import (
    Setting,
    change_durations,
    drop_calls,
    drop_operations,
    drop_waits_of_line,
    foreach_time,
    fused_time,
    merge_launches,
    stop_waiting,
)
from profkit.analysis.step_replay.kernel_edits import SMALLEST_NS, scale_batch
from profkit.analysis.step_replay.limits import OUTSIDE
from profkit.analysis.step_replay.predict import StepChange
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import DATA, OPTIMIZER
from profkit.run.lines import LineTime

By = Mapping[World, float]
"""A number for each world."""

NOTHING: By = {"least": 0, "expected": 0, "most": 0}

Choose = Callable[[ReplayedStep], Collection[int]]
"""Chooses operations or calls of a recorded step."""

OF_SAMPLED: By = {"least": 0.7, "expected": 1.0, "most": 1.6}
"""What is left of a batch without a sampled line, of what its samples say."""
_LAUNCH_NS: By = {"least": 2_500, "expected": 4_000, "most": 7_000}
_LATENCY_NS: By = {"least": 2_000, "expected": 4_000, "most": 7_000}
"""How long a launch takes that does not wait, and from its end to the kernel's start."""
_COMPILED_LAUNCHES: Mapping[World, int] = {"least": 10, "expected": 4, "most": 2}
"""Of how many launches of an optimizer's loop compiled code has one: Python that breaks its graph leaves more."""


def scale_operations(choose: Choose, factor: By, assumption: str) -> StepChange:
    """Return the change that scales the durations of some operations, none below what the smallest kernels take."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        share = factor[setting.world]
        return change_durations(
            columns, choose(setting.step), lambda time_ns: max(round(time_ns * share), min(time_ns, SMALLEST_NS))
        )

    return StepChange(apply, assumption)


def remove_operations(choose: Choose, kept: By, assumption: str) -> StepChange:
    """Return the change that drops some operations with their launches, but for a share of their time that is kept."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        rows = set(choose(setting.step))
        share = kept[setting.world]
        if share:
            columns = change_durations(columns, rows, lambda time_ns: time_ns * share)
        else:
            columns = drop_operations(columns, rows)
        return drop_calls(columns, _launching_only(columns, rows))

    return StepChange(apply, assumption)


def _launching_only(columns: StepColumns, rows: Collection[int]) -> list[int]:
    calls = {columns.launcher[row] for row in rows}
    return [call for call in calls if all(row in rows for row in range(*columns.launches[call]))]


def fuse(
    runs: Callable[[ReplayedStep], Sequence[Sequence[int]]],
    size: Callable[[World, Sequence[int]], float],
    *,
    with_waits: bool = False,
    compiled: bool = False,
) -> StepChange:
    """Return the change that makes one kernel of each run of operations, in the time that ``size`` gives it.

    ``with_waits``: the host waits for the last of them alone. ``compiled``: what calls the compiled code and checks
    its guards takes Python as long as the launches do that go.
    """

    find_runs = cache(runs)

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        durations = list(columns.duration_ns)
        dropped: list[int] = []
        for run in find_runs(setting.step):
            durations[run[0]] = round(size(setting.world, [columns.duration_ns[row] for row in run]))
            dropped += run[1:]
        columns = drop_operations(replace(columns, duration_ns=durations), dropped)
        if compiled and setting.world != "least":
            return columns
        between = _between(columns, dropped, {HOST, WAIT} if with_waits else {HOST})
        waits = [call for call in between if columns.kind[call] in (COPY, WAIT)]
        return drop_calls(stop_waiting(columns, waits, setting.constants), between)

    return StepChange(apply, "how long the fused kernel takes")


def _between(columns: StepColumns, rows: Iterable[int], kinds: Collection[int]) -> list[int]:
    calls = sorted({columns.launcher[row] for row in rows})
    chosen = set(calls)
    for call in calls:
        at = call - 1
        while at >= 0 and at not in chosen and columns.kind[at] in kinds and columns.before[at] == at - 1:
            chosen.add(at)
            at -= 1
    return sorted(chosen)


def _choose_evenly(items: Iterable[int], share: float) -> list[int]:
    return [item for at, item in enumerate(items) if int((at + 1) * share) > int(at * share)]


def drop_some_launches(choose: Choose, share: By, of_python: By, assumption: str) -> StepChange:
    """Return the change that drops a share of some operations, evenly, with a share of the Python before each."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        chosen, part, python = choose(setting.step), share[setting.world], of_python[setting.world]
        rows = _choose_evenly(chosen, part)
        gap, own = list(columns.gap_ns), list(columns.own_ns)
        for call in (columns.launcher[row] for row in rows):
            gap[call] -= round(python * max(0, gap[call]))
            own[call] = 0
        return drop_operations(replace(columns, gap_ns=gap, own_ns=own), rows)

    return StepChange(apply, assumption)


def without_copies(choose: Choose, stay: World | None = None) -> StepChange:
    """Return the change after which some copies are not made, and the host does not wait for them.

    In the world ``stay`` all of them are.
    """

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        if setting.world == stay:
            return columns
        calls = choose(setting.step)
        after = [call + 1 for call in calls if call + 1 < len(columns.kind) and columns.kind[call + 1] == WAIT]
        rows = columns.rows_of(calls)
        columns = stop_waiting(columns, after, setting.constants)
        kinds = [LAUNCH if call in calls else kind for call, kind in enumerate(columns.kind)]
        return drop_operations(drop_calls(replace(columns, kind=kinds), calls), rows)

    return StepChange(apply)


def shorten_gaps(find_shares: Callable[[ReplayedStep], Mapping[int, float]]) -> StepChange:
    """Return the change after which Python before some calls takes less, by a share of it."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        gap = list(columns.gap_ns)
        for call, share in find_shares(setting.step).items():
            gap[call] = round(gap[call] * (1 - share))
        return replace(columns, gap_ns=gap)

    return StepChange(apply)


def spare_in_phase(phase: str, share: By) -> StepChange:
    """Return the change after which a share of a phase's Python, calls and operations is gone, evenly."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        part, calls = share[setting.world], setting.calls_in({phase})
        gap, own = list(columns.gap_ns), list(columns.own_ns)
        for call, phases in enumerate(setting.step.gap_phases):
            gap[call] -= round(part * min(max(gap[call], 0), phases.get(phase, 0)))
        gone = _choose_evenly(columns.launching(calls), part)
        for call in gone:
            own[call] = 0
        return drop_operations(replace(columns, gap_ns=gap, own_ns=own), columns.rows_of(gone))

    return StepChange(apply, "what else of the phase is its work")


def launch_without_waiting() -> StepChange:
    """Return the change after which launches return before their kernels have run."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        own, latency = list(columns.own_ns), list(columns.latency_ns)
        for call, kind in enumerate(columns.kind):
            if kind == LAUNCH:
                own[call] = min(own[call], round(_LAUNCH_NS[setting.world]))
                for row in range(*columns.launches[call]):
                    latency[row] = max(latency[row], round(_LATENCY_NS[setting.world]))
        return replace(columns, own_ns=own, latency_ns=latency)

    return StepChange(apply, "how long launches take that do not wait")


def enlarge_batch(factor: int, *, fewer_passes: bool) -> StepChange:
    """Return the change that trains on a larger batch; the step after it stands for as many samples as now.

    With ``fewer_passes`` a step has as many samples as now, in fewer passes, and one step of the optimizer as now.
    """
    per_batch = {DATA, OUTSIDE, OPTIMIZER} if fewer_passes else {DATA, OUTSIDE}

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        larger = scale_batch(columns, setting, factor, per_batch)

        def share(times_ns: Sequence[int]) -> list[int]:
            return [time_ns // factor for time_ns in times_ns]

        return replace(
            larger,
            gap_ns=share(larger.gap_ns),
            own_ns=share(larger.own_ns),
            duration_ns=share(larger.duration_ns),
            between_ns=share(larger.between_ns),
            latency_ns=share(larger.latency_ns),
        )

    return StepChange(apply, "how fast kernels are on a larger batch")


def call_once(choose: Choose, own: By) -> StepChange:
    """Return the change after which no Python runs before some calls, of whose own time a share is left."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        _, *calls = sorted(choose(setting.step)) or [0]
        gaps, times = list(columns.gap_ns), list(columns.own_ns)
        for call in calls:
            gaps[call] = min(gaps[call], 0)
            times[call] = round(times[call] * own[setting.world])
        return replace(columns, gap_ns=gaps, own_ns=times)

    return StepChange(apply, "how many launches a library makes")


def compute_in_bf16(choose: Choose) -> StepChange:
    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        return kernel_edits.compute_in_bf16(columns, setting, choose(setting.step))

    return StepChange(apply, "how fast kernels are in bf16")


def merge_groups(left: By, moved_bytes: int | None) -> StepChange:
    """Return the change after which an optimizer has this share of its launches left.

    ``moved_bytes`` is what its kernels read and write together; without it they take what is more than small ones do.
    """

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        calls = setting.calls_of_optimizer(columns)
        durations = [columns.duration_ns[row] for row in columns.rows_of(calls)]
        is_known = moved_bytes and setting.facts.bytes_per_s
        time_ns = fused_time(moved_bytes, setting) if is_known else foreach_time(durations, setting.world)
        return merge_launches(columns, calls, round(1 / left[setting.world]), min(time_ns, sum(durations)))

    return StepChange(apply, "how many parameters one launch takes")


def compile_optimizer(moved_bytes: int) -> StepChange:
    """Return the change after which an optimizer's loop over parameters is compiled code: fewer and larger launches.

    ``moved_bytes`` is the least that its kernels read and write together, without what they hand on to one another.
    """

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        calls = setting.calls_of_optimizer(columns)
        now_ns = sum(columns.duration_ns[row] for row in columns.rows_of(calls))
        rate = setting.facts.bytes_per_s
        least_ns = min(now_ns, fused_time(moved_bytes, setting)) if rate else 0
        time_ns = {"least": least_ns, "expected": (least_ns + now_ns) // 2, "most": now_ns}[setting.world]
        return merge_launches(columns, calls, _COMPILED_LAUNCHES[setting.world], time_ns)

    return StepChange(apply, "how many of the optimizer's launches compiling leaves")


def compile_rest() -> StepChange:
    return StepChange(kernel_edits.compile_rest, "which kernels a compiler fuses")


def keep_workers() -> StepChange:
    """Return the change after which a loader's workers stay for the next epoch, or go on with it where they do."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        gap, left_ns = list(columns.gap_ns), setting.facts.saved_by_keeping_workers(setting.world)
        late_ns = min(columns.late_ns, left_ns)
        left_ns -= late_ns
        for call, phases in enumerate(setting.step.gap_phases):
            taken_ns = min(left_ns, phases.get(DATA, 0), max(gap[call], 0))
            gap[call] -= taken_ns
            left_ns -= taken_ns
        return replace(columns, gap_ns=gap, late_ns=columns.late_ns - late_ns)

    return StepChange(apply, "how long an epoch's first batch takes", of_loader=True)


def batches_every(time_ns: int) -> StepChange:
    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        return have_batches_come(columns, setting, round(time_ns * OF_SAMPLED[setting.world]))

    return StepChange(apply, "how much of a batch's time the line takes, by samples", of_loader=True)


def without_calls(choose: Choose) -> StepChange:
    """Return the change after which some calls take no time; the Python before them stays."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        chosen = set(choose(setting.step))
        return replace(columns, own_ns=[0 if call in chosen else own for call, own in enumerate(columns.own_ns)])

    return StepChange(apply)


def drop_stretches(find: Callable[[ReplayedStep], Iterable[range]], assumption: str) -> StepChange:
    """Return the change that drops stretches of calls, with what they launch, wait for, and the Python before them."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        calls = [call for stretch in find(setting.step) for call in stretch]
        rows = columns.rows_of(calls)
        waits = [call for call in calls if columns.kind[call] == WAIT]
        return drop_operations(drop_calls(stop_waiting(columns, waits, setting.constants), calls), rows)

    return StepChange(apply, assumption)


def drop_own_waits(line: LineTime) -> StepChange:
    """Return the change after which a line does not wait for the GPU itself; the lines that it calls still do."""

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        own = replace(setting.facts, callers=())
        return drop_waits_of_line(columns, replace(setting, argument=f"{line.file}:{line.line}", facts=own))

    return StepChange(apply, "which of the phase's waits the line makes")


def stop_chosen_waits(choose: Choose) -> StepChange:
    return StepChange(lambda columns, setting: stop_waiting(columns, choose(setting.step), setting.constants))
