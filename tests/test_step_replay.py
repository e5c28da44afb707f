"""The step replay: it reproduces recordings, agrees with a machine of events, and what limits a step adds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.step_replay import COPY, LAUNCH, NONE, WAIT, ProcessCalls, StepColumns
from profkit.analysis.step_replay.calibrate import USUAL_HOST, Fit, Phases, find_phases, fit_host, level_phases
from profkit.analysis.step_replay.edits import slow_host
from profkit.analysis.step_replay.limits import Cause, RankRun, find_limits
from profkit.analysis.step_replay.replay import (
    EARLIER,
    QUEUE_DEPTH,
    Constants,
    Replayed,
    measure_constants,
    prepare,
    prove,
    run,
)
from profkit.analysis.step_replay.steps import StepReplay, replay_steps
from profkit.analysis.time_account import measured_ranges
from profkit.names import STEP
from profkit.trace.columns import Syncs, Trace
from tests.captures import CAPTURES
from tests.nsys_builder import NsysBuilder
from tests.step_machine import Doing, Machine, programs, steady_step_ns

CONSTANTS = Constants(latency_ns=1_500, gap_ns=1_000, wake_ns=8_000, event_ns=700)

TRACES_FOLDER = Path(__file__).parent.parent / "traces"
TRACES = sorted(
    path
    for folder in (TRACES_FOLDER, CAPTURES)
    if folder.is_dir()
    for path in folder.iterdir()
    if path.name.endswith((".sqlite", ".kineto.json.gz"))
)


def recorded_steps(path: Path) -> Iterator[list[StepColumns]]:
    """Yield each process's steps; the last one is as long as the one before it."""
    opened = read_trace(path)
    if opened.trace.measure != "gpu-kernel":
        return
    ranges = opened.trace.ranges
    steps = measured_ranges(opened.attribution).get(STEP, [])
    for process in sorted({int(ranges.process[row]) for row in steps}):
        starts = sorted(int(ranges.start_ns[row]) for row in steps if ranges.process[row] == process)
        calls = ProcessCalls(opened.trace, process)
        ends = [*starts[1:], starts[-1] + (starts[-1] - starts[-2] if len(starts) > 1 else 10**9)]
        yield [calls.step(start, end) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_a_step_that_runs_as_recorded_ends_as_recorded_and_what_limits_it_sums_up_to_it(path: Path) -> None:
    for steps in recorded_steps(path):
        constants = measure_constants(steps)
        for step in steps:
            ready = prepare(step, constants)
            found = run(ready, constants)
            proof = prove((ready, found))
            assert abs(proof.error) <= 0.005
            assert proof.operations_p95_ns <= 150_000
            waits = [call for call, kind in enumerate(ready.kind) if kind == WAIT]
            late_ns = [abs(found.call_end_ns[call] - ready.call_end_ns[call]) for call in waits]
            assert np.quantile(late_ns or [0], 0.95) <= 150_000
            check_chain(ready, found)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TRACES_FOLDER / "small-train.kineto.json.gz", TRACES_FOLDER / "small-train.nsys2025.sqlite"),
        (CAPTURES / "small.nsys2023.sqlite", CAPTURES / "small.nsys2025.sqlite"),
    ],
    ids=["torch.profiler-nsys", "nsys2023-nsys2025"],
)
def test_two_recorders_of_one_program_agree_once_their_work_on_the_host_is_gone(first: Path, second: Path) -> None:
    if not first.exists():
        pytest.skip("the stored captures are not here")
    recorded_ns, on_fast_host_ns = [], []
    for path in (first, second):
        replay = read_trace(path).step_replay
        recorded_ns.append(replay.recorded_ns or 0)
        steps = [replay.run(slow_host(step.columns, 0.1)).step_ns for step in replay.steps]
        on_fast_host_ns.append(fmean(steps))
    assert recorded_ns[1] > 1.15 * recorded_ns[0]
    assert on_fast_host_ns[1] == pytest.approx(on_fast_host_ns[0], rel=0.005)


def check_chain(step: StepColumns, found: Replayed) -> None:
    pieces = [piece for _, piece in find_limits([RankRun(step, found)])]
    assert sum(piece.end_ns - piece.start_ns for piece in pieces) == found.step_ns
    assert all(earlier.end_ns == later.start_ns for earlier, later in pairwise(pieces))
    if pieces:
        assert (pieces[0].start_ns, pieces[-1].end_ns) == (0, found.step_ns)


def recorded(program: list[Doing]) -> StepColumns:
    return prepare(Machine(program, CONSTANTS).run().columns(), CONSTANTS)


def exact_own_times(step: StepColumns, program: list[Doing]) -> StepColumns:
    """Return the columns with what a recording cannot show: how long a call that waited would take by itself."""
    own_ns = [doing.inside_ns if doing.kind == COPY else doing.own_ns for doing in program]
    return replace(step, own_ns=own_ns, wake_ns={})


@settings(max_examples=150, deadline=None)
@given(programs(st), st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.sampled_from([0.1, 1.0, 3.0]))
def test_a_machine_of_events_runs_a_program_alike_and_a_changed_one(
    program: list[Doing], host: float, gpu: float
) -> None:
    changed = [
        replace(
            doing,
            gap_ns=round(doing.gap_ns * host),
            own_ns=round(doing.own_ns * host),
            durations_ns=tuple(1 + round(time * gpu) for time in doing.durations_ns),
        )
        for doing in program
    ]
    truth = Machine(changed, CONSTANTS).run()
    step = exact_own_times(recorded(program), program)
    assert not step.stall_ns
    step = replace(
        step,
        gap_ns=[round(time * host) for time in step.gap_ns],
        own_ns=[
            time if kind == COPY else round(time * host) for time, kind in zip(step.own_ns, step.kind, strict=True)
        ],
        duration_ns=[1 + round(time * gpu) for time in step.duration_ns],
    )
    found = run(step, CONSTANTS)
    assert (found.step_ns, found.call_end_ns) == (truth.step_ns, truth.call_end_ns)
    assert found.end_ns == [operation.end_ns for operation in truth.operations]
    check_chain(step, found)


def causes(program: list[Doing]) -> dict[Cause, int]:
    step = recorded(program)
    sums = dict.fromkeys(Cause, 0)
    for _, piece in find_limits([RankRun(step, run(step, CONSTANTS))]):
        sums[piece.cause] += piece.end_ns - piece.start_ns
    return {cause: time_ns for cause, time_ns in sums.items() if time_ns}


def test_a_slow_host_limits_a_step_of_short_kernels() -> None:
    program = [Doing(20_000, 5_000, LAUNCH, durations_ns=(2_000,)) for _ in range(10)]
    assert causes(program) == {Cause.PYTHON: 200_000, Cause.CALL: 50_000, Cause.LATENCY: 1_500, Cause.OPERATION: 2_000}


def test_a_slow_gpu_limits_a_step_of_long_kernels() -> None:
    program = [Doing(2_000, 5_000, LAUNCH, durations_ns=(100_000,)) for _ in range(10)]
    assert causes(program) == {
        Cause.PYTHON: 2_000,
        Cause.CALL: 5_000,
        Cause.LATENCY: 1_500,
        Cause.OPERATION: 1_000_000,
        Cause.BETWEEN: 9_000,
    }


def test_a_wait_hands_what_limits_a_step_from_the_gpu_to_the_host() -> None:
    program = [
        Doing(1_000, 1_000, LAUNCH, durations_ns=(500_000,)),
        Doing(1_000, 2_000, WAIT, waits_for=(0,)),
        Doing(300_000, 1_000, LAUNCH, durations_ns=(10_000,)),
    ]
    assert causes(program) == {
        Cause.PYTHON: 301_000,
        Cause.CALL: 2_000,
        Cause.LATENCY: 3_000,
        Cause.OPERATION: 510_000,
        Cause.WAKING: 8_000,
    }


def test_a_launch_into_a_full_queue_ends_when_one_operation_has_begun() -> None:
    program = [Doing(100, 1_000, LAUNCH, durations_ns=(10_000_000,)) for _ in range(QUEUE_DEPTH + 5)]
    step = recorded(program)
    found = run(step, CONSTANTS)
    begun = found.start_ns
    for number in range(5):
        assert found.call_end_ns[QUEUE_DEPTH + number] >= begun[number]
    assert found.call_end_ns[QUEUE_DEPTH + 4] == begun[4]
    check_chain(step, found)


def test_events_take_places_in_a_queue_too() -> None:
    program = [Doing(100, 1_000, LAUNCH, durations_ns=(10_000_000,)) for _ in range(5)]
    step = prepare(replace(recorded(program), slots=[QUEUE_DEPTH // 2] * 5), CONSTANTS)
    found = run(step, CONSTANTS)
    assert found.call_end_ns[3] < found.start_ns[1] == found.call_end_ns[4]
    check_chain(step, found)


def test_a_queue_that_earlier_steps_have_filled_holds_launches_up_and_their_wait_is_no_time_of_the_host() -> None:
    step = Machine([Doing(100, 1_000, LAUNCH, durations_ns=(10_000,)) for _ in range(5)], CONSTANTS).run().columns()
    begins = [1_000_000 * (number + 1) for number in range(QUEUE_DEPTH)]
    free_ns = begins[-1] + 1_000_000
    held_up = replace(step, own_ns=[900_000] * 5, backlog_ns={0: begins}, free_ns={0: free_ns})
    ready = prepare(held_up, CONSTANTS)
    assert ready.own_ns == [CONSTANTS.launch_ns] * 5
    found = run(ready, CONSTANTS)
    assert found.call_end_ns == begins[:5]
    assert found.call_cause == [EARLIER] * 5
    assert found.start_ns[0] == free_ns
    free = run(replace(ready, backlog_ns={}, free_ns={}), CONSTANTS)
    assert free.call_end_ns[-1] < 5 * (100 + 900_000)
    check_chain(ready, found)


def test_an_operation_that_began_for_no_reason_keeps_its_delay() -> None:
    machine = Machine([Doing(1_000, 1_000, LAUNCH, durations_ns=(5_000,)) for _ in range(3)], CONSTANTS).run()
    step = machine.columns()
    late = replace(
        step,
        start_ns=[*step.start_ns[:2], step.start_ns[2] + 400_000],
        end_ns=[*step.end_ns[:2], step.end_ns[2] + 400_000],
    )
    ready = prepare(late, CONSTANTS)
    assert ready.stall_ns == {2: 400_000}
    assert run(ready, CONSTANTS).end_ns == late.end_ns


def test_a_graph_begins_during_its_launch_and_is_no_measure_of_other_launches() -> None:
    program = [Doing(9_000, 4_000, LAUNCH, durations_ns=(2_000,)) for _ in range(5)]
    program.append(Doing(9_000, 400_000, LAUNCH, durations_ns=(5_000,) * 3))
    step = Machine(program, CONSTANTS).run().columns()
    early = 300_000 + CONSTANTS.latency_ns
    for column in (step.start_ns, step.end_ns):
        column[-3:] = [time_ns - early for time_ns in column[-3:]]
    constants = measure_constants([step])
    assert (constants.launch_ns, constants.latency_ns) == (4_000, CONSTANTS.latency_ns)
    ready = prepare(step, CONSTANTS)
    assert run(ready, CONSTANTS).end_ns == step.end_ns
    own_ns = [*ready.own_ns[:-1], 40_000]
    faster = run(replace(ready, own_ns=own_ns), CONSTANTS)
    assert faster.start_ns[5] == step.call_start_ns[5] + 10_000
    check_chain(ready, run(ready, CONSTANTS))


def test_a_wait_keeps_the_time_that_the_host_took_to_wake_up() -> None:
    machine = Machine([Doing(0, 1_000, LAUNCH, durations_ns=(90_000,)), Doing(0, 0, WAIT, waits_for=(0,))], CONSTANTS)
    step = machine.run().columns()
    step.call_end_ns[1] += 44_000
    ready = prepare(step, CONSTANTS)
    assert run(ready, CONSTANTS).call_end_ns == step.call_end_ns
    assert ready.wake_ns == {1: 52_000}


def test_constants_are_those_of_the_machine() -> None:
    program = [Doing(1_000, 4_000, LAUNCH, durations_ns=(80_000,)) for _ in range(10)]
    program += [Doing(1_000, 3_000, WAIT, waits_for=(number,)) for number in range(10)]
    program += [Doing(100_000, 4_000, LAUNCH, durations_ns=(1_000,)) for _ in range(5)]
    program += [Doing(100_000, 3_000, WAIT, waits_for=(number,)) for number in range(5)]
    measured = measure_constants([Machine(program, CONSTANTS).run().columns()])
    assert (measured.latency_ns, measured.gap_ns, measured.wake_ns) == (1_500, 1_000, 8_000)
    assert (measured.wait_ns, measured.launch_ns) == (3_000, 4_000)


def slowed(program: list[Doing], factor: float) -> list[Doing]:
    """Return the program on a host that a profiler slows."""
    return [
        replace(doing, gap_ns=round(doing.gap_ns * factor), own_ns=round(doing.own_ns * factor)) for doing in program
    ]


def fitted(program: list[Doing], factor: float) -> tuple[StepColumns, Phases, Fit]:
    """Record the program on a slowed host, and fit it to the time that it takes by itself."""
    step = recorded(slowed(program, factor))
    whole_ns = step.recorded_ns
    phases = find_phases(step, {"forward": [(0, whole_ns)]})
    assert phases.time_ns(step, run(step, CONSTANTS), 1.0, ["forward"]) == whole_ns
    truth = Machine(program, CONSTANTS).run()
    fit = fit_host(step, CONSTANTS, phases, {"forward": truth.step_ns, "loss": 5}, spread_ns=truth.step_ns // 200)
    assert fit is not None
    return step, phases, fit


def test_a_slow_hosts_factor_is_found_where_the_host_sets_the_pace() -> None:
    program = [Doing(20_000, 5_000, LAUNCH, durations_ns=(10_000,)) for _ in range(200)]
    step, phases, fit = fitted(program, 1.6)
    assert fit.is_identified
    assert fit.middle == pytest.approx(1 / 1.6, rel=0.02)
    scaled = phases.scale_host(step, fit.middle)
    slower_gpu = replace(scaled, duration_ns=[4 * time for time in scaled.duration_ns])
    truth = Machine([replace(doing, durations_ns=(40_000,)) for doing in program], CONSTANTS).run()
    assert run(slower_gpu, CONSTANTS).step_ns == pytest.approx(truth.step_ns, rel=0.01)


def test_the_hosts_factor_is_unknown_where_the_gpu_sets_the_pace() -> None:
    program = [Doing(2_000, 2_000, LAUNCH, durations_ns=(50_000,)) for _ in range(100)]
    _, _, fit = fitted(program, 2.0)
    assert not fit.is_identified
    assert (fit.least, fit.most) == USUAL_HOST


def test_the_time_that_the_host_was_in_phases_tells_its_factor_where_the_gpu_sets_the_pace() -> None:
    program = [Doing(2_000, 2_000, LAUNCH, durations_ns=(50_000,)) for _ in range(100)]
    step, phases, fit = fitted(program, 2.0)
    host_ns = sum(doing.gap_ns + doing.own_ns for doing in program)
    host_ends = find_phases(step, {"forward": [(0, step.call_end_ns[-1])]})
    wanted = {"forward": phases.time_ns(step, run(step, CONSTANTS), 1.0, ["forward"])}
    known = fit_host(step, CONSTANTS, host_ends, wanted, spread_ns=20_000, on_host_ns={"forward": host_ns})
    assert known is not None
    assert known.is_identified
    assert not fit.is_identified
    assert known.least <= 0.5 <= known.most
    wrong = fit_host(step, CONSTANTS, host_ends, wanted, spread_ns=20_000, on_host_ns={"forward": 100 * host_ns})
    assert wrong == fit_host(step, CONSTANTS, host_ends, wanted, spread_ns=20_000)


def test_a_host_that_a_full_queue_holds_up_is_not_taken_for_a_slow_one() -> None:
    """It is in its phases for as long as the GPU takes, however fast it is; what it does beside them may be shorter."""
    program = [Doing(20_000, 20_000, LAUNCH, durations_ns=(50_000,)) for _ in range(2 * QUEUE_DEPTH)]
    step, gpu_ns = recorded(slowed(program, 2.0)), 50_000 * len(program)
    phases = find_phases(step, {"forward": [(0, step.call_end_ns[-1])]})
    on_host_ns = {"forward": round(1.08 * gpu_ns)}
    steady_ns = {"forward": steady_step_ns(program, CONSTANTS)}
    fit = fit_host(step, CONSTANTS, phases, steady_ns, spread_ns=gpu_ns // 200, on_host_ns=on_host_ns)
    assert fit is not None
    assert fit == fit_host(step, CONSTANTS, phases, steady_ns, spread_ns=gpu_ns // 200)
    assert not fit.is_identified
    assert fit.least <= 0.5 <= fit.most


def test_a_gpu_with_work_left_of_earlier_steps_is_not_taken_for_a_fast_host() -> None:
    """A profiler's slow host leaves the GPU idle where, unprofiled, it still does the work of the step before."""
    program = [Doing(20_000, 5_000, LAUNCH, durations_ns=(5_000,)) for _ in range(100)]
    program += [Doing(2_000, 2_000, LAUNCH, durations_ns=(50_000,)) for _ in range(100)]
    step, host_ns = recorded(slowed(program, 1.6)), sum(doing.gap_ns + doing.own_ns for doing in program)
    phases = find_phases(step, {"forward": [(0, step.call_end_ns[-1])]})
    truth_ns = steady_step_ns(program, CONSTANTS)
    assert run(phases.scale_host(step, 1 / 1.6), CONSTANTS).step_ns > 1.3 * truth_ns
    fit = fit_host(
        step, CONSTANTS, phases, {"forward": truth_ns}, spread_ns=truth_ns // 200, on_host_ns={"forward": host_ns}
    )
    assert fit is not None
    assert fit.middle == pytest.approx(1 / 1.6, rel=0.05)


def test_phases_end_on_the_stream_on_which_the_step_begins_and_ends_however_busy_another_is() -> None:
    """A recurrent layer's kernels run on a stream of their own, for which the program's waits before the phase ends."""
    layer = [Doing(1_000, 2_000, LAUNCH, stream=3, durations_ns=(20_000,)) for _ in range(50)]
    program = [
        Doing(1_000, 2_000, LAUNCH, durations_ns=(100_000,)),
        *layer,
        Doing(1_000, 2_000, LAUNCH, durations_ns=(300_000,), stream_waits_for=(50,)),
        Doing(1_000, 2_000, LAUNCH, durations_ns=(200_000,)),
    ]
    step = recorded(program)
    ends = [0, step.call_end_ns[51], step.call_end_ns[-1]]
    phases = find_phases(step, {"forward": [(ends[0], ends[1])], "backward": [(ends[1], ends[2])]})
    found = run(step, CONSTANTS)
    times = [phases.time_ns(step, found, 1.0, [name]) for name in ("forward", "backward")]
    assert times == pytest.approx([50 * 20_000 + 300_000, 200_000], rel=0.1)


@pytest.mark.parametrize("waits", [False, True])
def test_each_phase_has_its_own_time_on_the_host_unless_it_waits_there(*, waits: bool) -> None:
    """Hooks slow the forward pass more than the backward pass."""
    forward = [Doing(20_000, 5_000, LAUNCH, durations_ns=(5_000,)) for _ in range(100)]
    backward = [Doing(10_000, 5_000, LAUNCH, durations_ns=(5_000,)) for _ in range(100)]
    waiting = [Doing(1_000, 2_000, WAIT, waits_for=(100,))] if waits else []
    long = [Doing(2_000, 2_000, LAUNCH, durations_ns=(8_000_000,))] if waits else []
    program = [*forward, *long, *waiting, *backward]
    step = recorded([*slowed([*forward, *long], 2.0), *waiting, *slowed(backward, 1.2)])
    middle = step.call_end_ns[len(program) - len(backward) - 1]
    phases = find_phases(step, {"forward": [(0, middle)], "backward": [(middle, step.call_end_ns[-1])]})
    truth = Machine(program, CONSTANTS).run()
    ended = truth.call_end_ns[len(program) - len(backward) - 1]
    on_host = {"forward": ended, "backward": truth.call_end_ns[-1] - ended}
    leveled = level_phases(step, CONSTANTS, phases, 0.6, on_host)
    found = run(leveled.scale_host(step, 0.6), CONSTANTS)
    if waits:
        assert leveled.uneven == pytest.approx((1.0, 1.0))
    else:
        by_phase = {name: leveled.host_ns(found, 0.6, [name]) for name in on_host}
        ratio = on_host["forward"] / on_host["backward"]
        assert by_phase["forward"] / by_phase["backward"] == pytest.approx(ratio, rel=0.01)
        whole_ns = run(phases.scale_host(step, 0.6), CONSTANTS).host_ns
        assert found.host_ns == pytest.approx(whole_ns, rel=0.01), "all together take as long as with one factor"


def test_pauses_and_time_outside_of_phases_are_not_scaled() -> None:
    program = [Doing(5_000, 5_000, LAUNCH, durations_ns=(1_000,)) for _ in range(20)]
    program[10] = replace(program[10], gap_ns=3_000_000)
    step = recorded(program)
    phases = find_phases(step, {"forward": [(step.call_start_ns[5] - 2_000, step.call_end_ns[14])]})
    scaled = phases.scale_host(step, 0.5)
    assert scaled.gap_ns[4] == 5_000
    assert scaled.gap_ns[5] == 4_000  # 2 µs of it lie within the phase
    assert scaled.gap_ns[6] == 2_500
    assert scaled.gap_ns[10] == 3_000_000
    assert scaled.own_ns[4:7] == [5_000, 2_500, 2_500]
    assert run(scaled, CONSTANTS).call_start_ns[5] == step.call_start_ns[5] - 1_000


def test_a_gpu_that_is_a_little_faster_or_slower_when_traced_sets_the_pace() -> None:
    program = [Doing(2_000, 2_000, LAUNCH, durations_ns=(50_000,)) for _ in range(100)]
    step = recorded(slowed(program, 2.0))
    phases = find_phases(step, {"forward": [(0, step.recorded_ns)]})
    for share, fits in ((0.98, True), (0.95, False), (1.02, True), (1.05, False)):
        fit = fit_host(step, CONSTANTS, phases, {"forward": round(step.recorded_ns * share)}, spread_ns=1_000)
        assert (fit is not None) == fits


def test_nothing_fits_a_step_that_the_hosts_speed_does_not_explain() -> None:
    step = recorded([Doing(1_000, 1_000, LAUNCH, durations_ns=(100_000,))])
    whole_ns = step.recorded_ns
    phases = find_phases(step, {"forward": [(0, whole_ns)]})
    for wrong_ns in (whole_ns // 2, whole_ns * 2):
        assert fit_host(step, CONSTANTS, phases, {"forward": wrong_ns}, spread_ns=100) is None
    assert fit_host(step, CONSTANTS, phases, {"optimizer": whole_ns}, spread_ns=100) is None


STEP_NS = 400_000


def record_steps(path: Path, *, after_the_last: int, watching: str | None = None) -> StepReplay:
    """Write three steps that wait for an event after the first of two kernels, and waits after the last of them.

    A thread of its own is ``watching``: it makes a call of this name again and again.
    """
    builder = NsysBuilder()
    for number in range(3):
        begin = number * STEP_NS
        builder.range(f"step {number}", begin, begin + STEP_NS - 1_000)
        builder.kernel(begin + 10_000, 50_000, start=begin + 20_000)
        builder.kernel(begin + 30_000, 200_000, start=begin + 71_000)
        builder.call(begin + 40_000, name="cudaEventSynchronize_v3020", duration=35_000)
        builder.call(begin + STEP_NS - 500, name="cudaEventQuery_v3020")
        for time_ns in range(5_000, STEP_NS, 30_000) if watching else ():
            builder.call(begin + time_ns, tid=101, name=watching)
    for number in range(after_the_last):
        builder.call(3 * STEP_NS + number * 90_000, name="cudaDeviceSynchronize_v3020", duration=80_000)
    opened = read_trace(builder.write(path))
    return replay_steps(opened.account)


@pytest.mark.parametrize("after_the_last", [0, 5])
def test_what_a_recorder_calls_after_the_last_step_is_no_part_of_it(tmp_path: Path, after_the_last: int) -> None:
    steps = record_steps(tmp_path / "t.sqlite", after_the_last=after_the_last).steps
    assert [step.columns.recorded_ns for step in steps] == [STEP_NS, STEP_NS, STEP_NS - 499]
    assert [step.columns.kind.count(WAIT) for step in steps] == [1, 1, 1]


def test_a_wait_for_an_event_is_for_nothing_that_ran_on_when_it_ended(tmp_path: Path) -> None:
    for step in record_steps(tmp_path / "t.sqlite", after_the_last=0).steps:
        assert list(step.columns.targets[2]) == [0]
        assert step.columns.wake_ns == {2: 5_000}
        assert step.proof.error == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("called_us", "copied_us", "is_held"),
    [(400, (100, 399), True), (400, (100, 420), True), (20, (15, 400), False), (20, (15, 30), False)],
)
def test_a_copy_of_pageable_memory_holds_the_host_though_its_last_piece_is_on_its_way_when_the_call_ends(
    tmp_path: Path, called_us: int, copied_us: tuple[int, int], is_held: bool
) -> None:
    builder = NsysBuilder()
    builder.range("step", 0, 1_000_000)
    start_us, end_us = copied_us
    builder.copy(0, (end_us - start_us) * 1_000, kind=1, start=start_us * 1_000)
    builder.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["end"] = called_us * 1_000
    trace = read_trace(builder.write(tmp_path / "t.sqlite")).trace
    step = ProcessCalls(trace, int(trace.calls.process[0])).step(0, 1_000_000)
    assert step.kind == [COPY if is_held else LAUNCH]
    found = run(prepare(step, CONSTANTS), CONSTANTS)
    assert (found.call_end_ns, found.end_ns) == (step.call_end_ns, step.end_ns)


def test_two_operations_in_the_queue_keep_what_passed_between_them() -> None:
    step = Machine([Doing(1_000, 1_000, LAUNCH, durations_ns=(90_000,)) for _ in range(4)], CONSTANTS).run().columns()
    later = [0, 0, 3_000, 3_000]
    for column in (step.start_ns, step.end_ns):
        column[:] = [time_ns + late_ns for time_ns, late_ns in zip(column, later, strict=True)]
    ready = prepare(step, CONSTANTS)
    assert ready.between_ns[2:] == [CONSTANTS.gap_ns + 3_000, CONSTANTS.gap_ns]
    assert run(ready, CONSTANTS).end_ns == step.end_ns


def test_of_steps_with_very_many_calls_fewer_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, steps in ((100, 3), (8, 2), (3, 1)):
        monkeypatch.setattr("profkit.analysis.step_replay.steps.MOST_CALLS", most)
        assert len(record_steps(tmp_path / f"{most}.sqlite", after_the_last=0).steps) == steps


def test_a_thread_that_only_asks_for_events_is_no_part_of_what_the_host_does(tmp_path: Path) -> None:
    """As NCCL's watchdog does; one that records them is a part."""
    names = (None, "cudaEventQuery_v3020", "cudaEventRecord_v3020")
    alone, asking, recording = (
        [
            (step.columns.call_start_ns, step.columns.gap_ns, step.columns.before, step.columns.thread)
            for step in record_steps(tmp_path / f"{number}.sqlite", after_the_last=0, watching=name).steps
        ]
        for number, name in enumerate(names)
    )
    assert alone == asking
    assert len(recording[0][0]) > len(alone[0][0])


RECORD, AWAIT = "cudaEventRecord_v3020", "cudaStreamWaitEvent_v3020"
"""The host records an event on stream 0, and stream 1 waits for it."""


def on_streams(path: Path, *done: str | tuple[int, int, int]) -> Trace:
    """Write calls, 10 us after one another, of kernels on a stream from a microsecond to another; return the trace."""
    builder = NsysBuilder()
    builder.range("step 0", 0, 2 * STEP_NS)
    for at, one in enumerate(done):
        name = one if isinstance(one, str) else "cudaLaunchKernel_v7000"
        launched = builder.call(at * 10_000 + 1_000, name=name, duration=5_000)
        if not isinstance(one, str):
            stream, start, end = one
            builder.kernel(None, (end - start) * 1_000, start=start * 1_000, correlation=launched)
            builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["streamId"] = stream
    return read_trace(builder.write(path)).trace


def awaiting(trace: Trace, *, record: int | None) -> StepColumns:
    """Return the step whose stream waits for what ``record`` says; where that is None the profiler says nothing."""
    waits = np.array([name == AWAIT for name in trace.names])[trace.calls.name]
    row, zero = np.flatnonzero(waits), np.zeros(1, dtype=np.int64)
    syncs = None if record is None else Syncs(row, zero, zero + 1, zero + record, zero, zero)
    return ProcessCalls(replace(trace, syncs=syncs), int(trace.calls.process[0])).step(0, 2 * STEP_NS)


FIRST = (0, 8, 200)
AWAITED: dict[str, tuple[Any, ...]] = {
    "one event": ([FIRST, RECORD, AWAIT, (1, 201, 260)], {1: [0]}),
    "none": ([FIRST, AWAIT, (1, 201, 260)], {}),
    "launched later": ([FIRST, RECORD, (2, 40, 50), AWAIT, (1, 201, 260)], {2: [0]}),
    "ran on": ([FIRST, (2, 18, 30), (2, 31, 500), RECORD, AWAIT, (1, 201, 260)], {3: [0, 1]}),
    "all ran on": ([FIRST, RECORD, AWAIT, (1, 150, 260)], {}),
    "its own stream": ([(1, 8, 20), FIRST, RECORD, AWAIT, (1, 201, 260)], {2: [1]}),
    "an earlier event": ([FIRST, RECORD, (2, 28, 90), RECORD, AWAIT, (1, 201, 260)], {2: [0, 1]}),
    "only the next one": ([FIRST, RECORD, AWAIT, (1, 201, 260), (1, 261, 280)], {1: [0]}),
    # Where the waiting stream is unknown, it is the one that runs next.
    "another runs first": ([FIRST, RECORD, AWAIT, (2, 201, 210), (1, 201, 260)], {2: [0]}, {1: [0]}),
}
"""What is done → what operations wait for if only the waiting stream is known, and if nothing is: else the same."""


@pytest.mark.parametrize("title", AWAITED)
def test_a_stream_that_waits_for_an_unknown_event_waits_for_what_had_ended(tmp_path: Path, title: str) -> None:
    done, *expected = AWAITED[title]
    trace = on_streams(tmp_path / "t.sqlite", *done)
    for record, awaited in ((NONE, expected[0]), (None, expected[-1])):
        step = awaiting(trace, record=record)
        assert step.awaited == awaited
        assert step.inferred_waits == 1


def test_the_waits_for_one_event_are_the_same_whether_it_is_known_or_not(tmp_path: Path) -> None:
    """On a faster host, too; nothing holds the second stream's kernel up without them."""
    trace = on_streams(tmp_path / "t.sqlite", FIRST, RECORD, AWAIT, (1, 201, 260), (0, 201, 230))
    known, *inferred = (awaiting(trace, record=record) for record in (1, NONE, None))
    assert [step.inferred_waits for step in (known, *inferred)] == [0, 1, 1]
    alike, *others, apart = (
        run(slow_host(prepare(step, CONSTANTS), 0.1), CONSTANTS).end_ns
        for step in (known, *inferred, replace(known, awaited={}))
    )
    assert others == [alike, alike]
    assert apart != alike
    replay = read_trace(tmp_path / "t.sqlite").step_replay
    assert (replay.refusal, [step.columns.inferred_waits for step in replay.steps]) == (None, [1])
