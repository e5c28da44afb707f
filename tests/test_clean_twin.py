"""How many steps the unprofiled twin makes, and what becomes of their losses and events."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from profkit.capture import clean_twin  # noqa: E402
from profkit.capture.clean_twin import measure_clean, measure_steps  # noqa: E402
from profkit.capture.contexts import ContextSteps  # noqa: E402
from profkit.capture.phase_events import PhaseEvents  # noqa: E402
from profkit.capture.step import TrainingStep  # noqa: E402
from profkit.models.workload import Workload  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class _Steps:
    """Steps of a given length on a clock that the test moves."""

    def __init__(self, clock: _Clock, count: int, step_ns: int) -> None:
        self.losses: list[float] = []
        self._clock, self._count, self._step_ns = clock, count, step_ns

    def observe(self, observer: object) -> None:
        raise AssertionError("there is no CUDA here")

    def run_measured(self) -> list[dict[str, int]]:
        self._clock.now += self._count * self._step_ns
        self.losses += [1.0] * self._count
        return [{"step_ns": self._step_ns}] * self._count


class _Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


@pytest.mark.parametrize(
    ("count", "step_ms", "made"),
    [(3, 40, 12), (5, 1, 10), (12, 1, 12), (3, 3000, 3), (3, 700, 6), (1, 600, 8)],
)
def test_quick_steps_are_repeated_in_whole_rounds(
    monkeypatch: pytest.MonkeyPatch, count: int, step_ms: int, made: int
) -> None:
    clock = _Clock()
    monkeypatch.setattr(clean_twin, "perf_counter_ns", clock)
    measured = measure_clean(_Steps(clock, count, step_ms * 1_000_000), CPU)
    assert (len(measured.times), len(measured.losses)) == (made, count)


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Workload:
    monkeypatch.setattr(clean_twin, "_LONGEST_NS", 10**12)  # this machine may be busy
    return Workload("tiny", batch=1, context=16, warmup_steps=0, steps=4, device="cpu")


def test_the_losses_are_those_that_the_recorded_steps_have(workload: Workload) -> None:
    clean, recorded = measure_clean(TrainingStep(workload, CPU), CPU), measure_steps(TrainingStep(workload, CPU))
    assert clean.losses == recorded.losses
    assert (len(clean.times), len(recorded.times)) == (12, 4)
    assert list(clean.times[0]) == list(recorded.times[0])
    assert clean.during == recorded.during == dict.fromkeys(clean.during, 0)


def test_each_context_has_ten_steps(workload: Workload) -> None:
    both = Workload("tiny", batch=1, context=16, warmup_steps=0, steps=4, device="cpu", contexts=(8, 16))
    measured = measure_clean(ContextSteps(both, CPU), CPU)
    assert [sum(one["context"] == context for one in measured.times) for context in (8, 16)] == [12, 12]
    assert len(measured.losses) == 8


class _Event:
    """A stand-in for ``torch.cuda.Event``: the GPU passes one every 2 ms."""

    passed = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.waited = False

    def record(self) -> None:
        _Event.passed += 1
        self.at_ms = 2.0 * _Event.passed

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, last: _Event) -> float:
        assert last.waited, "its time is not known before the GPU has passed it"
        return last.at_ms - self.at_ms


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    state = [False]
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


def test_events_are_merged_into_the_steps(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, capturing: list[bool]
) -> None:
    step = TrainingStep(workload, CPU)
    step.run_warmup()
    times = measure_clean(step, CUDA).times
    assert len(times) == 12
    for one in times:
        # Ten events a step: the step's two around a pair for each of four phases.
        assert {name: ns for name, ns in one.items() if "event" in name} == {
            **{f"{phase}_event_ns": 2_000_000 for phase in ("forward", "loss", "backward", "optimizer")},
            "step_event_ns": 18_000_000,
        }


def test_unbroken_steps_wait_once_and_are_as_many_as_the_others(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, capturing: list[bool]
) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    step = TrainingStep(workload, CPU)
    step.device = CUDA
    measured = measure_clean(step, CUDA)
    assert (len(measured.times), len(measured.unbroken), len(measured.losses)) == (12, 12, 4)
    assert waits == [CUDA] * (12 * 4 + 12), "after each of four phases, and then at the end alone"
    assert all(list(one) == ["step_ns"] for one in measured.unbroken)
    step.run_measured()
    assert len(waits) == 12 * 4 + 12 + 4 * 4, "as before"


def test_unbroken_steps_of_contexts_keep_them_apart(workload: Workload) -> None:
    both = ContextSteps(
        Workload("tiny", batch=1, context=8, warmup_steps=0, steps=2, device="cpu", contexts=(8, 16)), CPU
    )
    assert [one["context"] for one in both.run_unbroken()] == [8, 8, 16, 16]


def test_repeated_phases_are_summed_and_captured_ones_left_out(capturing: list[bool]) -> None:
    events = PhaseEvents()
    taken: list[dict[str, Any]] = []
    for capturing[0] in (False, True):
        for _ in range(2):
            events.begin("backward")
            events.end("backward")
        taken.append(events.take())
    capturing[0] = False
    events.begin("backward")
    capturing[0] = True
    events.end("backward")
    assert [*taken, events.take()] == [{"backward_event_ns": 4_000_000}, {}, {}]
