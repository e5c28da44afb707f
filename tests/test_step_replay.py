"""The step replay: it reproduces recordings, agrees with a machine of events, and what limits a step adds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.step_replay.columns import COPY, LAUNCH, WAIT, ProcessCalls, StepColumns
from profkit.analysis.step_replay.limits import Cause, find_limits
from profkit.analysis.step_replay.replay import (
    QUEUE_DEPTH,
    Constants,
    Replayed,
    Runner,
    measure_constants,
    prove,
)
from profkit.analysis.time_account.steps import measured_ranges
from profkit.names import STEP
from tests.captures import CAPTURES
from tests.step_machine import Doing, Machine, programs

CONSTANTS = Constants(latency_ns=1_500, gap_ns=1_000, wake_ns=8_000, event_ns=700)

TRACES = sorted(
    path
    for folder in (Path(__file__).parent.parent / "traces", CAPTURES)
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
def test_a_step_that_runs_as_recorded_ends_as_recorded(path: Path) -> None:
    for steps in recorded_steps(path):
        constants = measure_constants(steps)
        for step in steps:
            runner = Runner.prepare(step, constants)
            proof = prove(runner, runner.run())
            assert abs(proof.error) <= 0.005
            assert proof.operations_p95_ns <= 150_000
            assert proof.waits_p95_ns <= 150_000


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_what_limits_a_recorded_step_sums_up_to_it(path: Path) -> None:
    for steps in recorded_steps(path):
        constants = measure_constants(steps)
        for step in steps:
            runner = Runner.prepare(step, constants)
            check_chain(runner.step, runner.run())


def check_chain(step: StepColumns, found: Replayed) -> None:
    pieces = find_limits(step, found)
    assert sum(piece.end_ns - piece.start_ns for piece in pieces) == found.step_ns
    assert all(earlier.end_ns == later.start_ns for earlier, later in pairwise(pieces))
    if pieces:
        assert (pieces[0].start_ns, pieces[-1].end_ns) == (0, found.step_ns)


def run(machine: Machine) -> tuple[Runner, Replayed]:
    runner = Runner.prepare(machine.columns(), machine.constants)
    return runner, runner.run()


@settings(max_examples=200, deadline=None)
@given(programs(st))
def test_a_machine_of_events_runs_a_program_alike(program: list[Doing]) -> None:
    machine = Machine(program, CONSTANTS).run()
    runner, found = run(machine)
    assert not runner.stall_ns
    exact = exact_own_times(runner.step, program)
    found = runner.run(exact)
    assert found.call_end_ns == machine.call_end_ns
    assert found.end_ns == [operation.end_ns for operation in machine.operations]
    check_chain(exact, found)


def exact_own_times(step: StepColumns, program: list[Doing]) -> StepColumns:
    """Return the columns with what a recording cannot show: how long a call that waited would take by itself."""
    return replace(step, own_ns=[doing.inside_ns if doing.kind == COPY else doing.own_ns for doing in program])


@settings(max_examples=200, deadline=None)
@given(programs(st), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([0.1, 1.0, 3.0]))
def test_a_changed_step_ends_when_the_machine_ends_the_changed_program(
    program: list[Doing], host: float, gpu: float
) -> None:
    runner, _ = run(Machine(program, CONSTANTS).run())
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
    step = exact_own_times(runner.step, program)
    step = replace(
        step,
        gap_ns=[round(time * host) for time in step.gap_ns],
        own_ns=[
            time if kind == COPY else round(time * host) for time, kind in zip(step.own_ns, step.kind, strict=True)
        ],
        duration_ns=[1 + round(time * gpu) for time in step.duration_ns],
    )
    found = runner.run(step)
    assert found.step_ns == truth.step_ns
    assert found.end_ns == [operation.end_ns for operation in truth.operations]
    check_chain(step, found)


def causes(program: list[Doing]) -> dict[Cause, int]:
    runner, found = run(Machine(program, CONSTANTS).run())
    sums = dict.fromkeys(Cause, 0)
    for piece in find_limits(runner.step, found):
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
    step = Machine(program, CONSTANTS).run().columns()
    found = Runner.prepare(step, CONSTANTS).run()
    begun = found.start_ns
    for number in range(5):
        assert found.call_end_ns[QUEUE_DEPTH + number] >= begun[number]
    assert found.call_end_ns[QUEUE_DEPTH + 4] == begun[4]
    check_chain(step, found)


def test_an_operation_that_began_for_no_reason_keeps_its_delay() -> None:
    machine = Machine([Doing(1_000, 1_000, LAUNCH, durations_ns=(5_000,)) for _ in range(3)], CONSTANTS).run()
    step = machine.columns()
    late = replace(
        step,
        start_ns=[*step.start_ns[:2], step.start_ns[2] + 400_000],
        end_ns=[*step.end_ns[:2], step.end_ns[2] + 400_000],
    )
    runner = Runner.prepare(late, CONSTANTS)
    assert runner.stall_ns == {2: 400_000}
    assert runner.run().end_ns == late.end_ns


def test_constants_are_those_of_the_machine() -> None:
    program = [Doing(1_000, 4_000, LAUNCH, durations_ns=(80_000,)) for _ in range(10)]
    program += [Doing(1_000, 3_000, WAIT, waits_for=(number,)) for number in range(10)]
    program += [Doing(100_000, 4_000, LAUNCH, durations_ns=(1_000,)) for _ in range(5)]
    program += [Doing(100_000, 3_000, WAIT, waits_for=(number,)) for number in range(5)]
    measured = measure_constants([Machine(program, CONSTANTS).run().columns()])
    assert (measured.latency_ns, measured.gap_ns, measured.wake_ns) == (1_500, 1_000, 8_000)
    assert (measured.wait_ns, measured.launch_ns) == (3_000, 4_000)
