"""The time of phases in a script that is not recorded, on a stand-in for the clock and for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from profkit.capture import phase_clock, step_samples  # noqa: E402
from profkit.capture.phase_clock import PhaseClock  # noqa: E402
from profkit.capture.step_samples import StepSamples  # noqa: E402


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PhaseClock:
    """A clock on which each look at the time is 5 ns after the one before."""
    ticks = iter(range(0, 10_000, 5))
    monkeypatch.setattr(phase_clock, "perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return PhaseClock()


def test_calls_of_a_phase_are_summed_until_they_are_taken(clock: PhaseClock) -> None:
    backward = clock.timed("backward", lambda value: value + 1)
    assert backward(1) == 2
    assert clock.take() == {}, "it has not been started"
    clock.start()
    assert (backward(1), backward(value=2)) == (2, 3)
    assert clock.take() == {"backward_ns": 10}
    assert clock.take() == {}
    clock.stop()
    backward(1)
    assert clock.take() == {}


def test_what_runs_within_a_phase_counts_as_that_phase(clock: PhaseClock) -> None:
    clock.start()
    backward = clock.timed("backward", lambda: None)
    clock.timed("optimizer", backward)()
    assert clock.take() == {"optimizer_ns": 5}


def test_a_phase_that_raises_is_timed_and_raises(clock: PhaseClock) -> None:
    clock.start()
    with pytest.raises(ValueError, match="x"):
        clock.timed("backward", functools.partial(_raise, ValueError("x")))()
    clock.timed("backward", lambda: None)()
    assert clock.take() == {"backward_ns": 10}


def _raise(error: Exception) -> None:
    raise error


def test_the_function_keeps_its_name_and_marks(clock: PhaseClock) -> None:
    def step() -> None: ...

    step.hooked = True  # type: ignore[attr-defined]  # how torch marks an optimizer's
    timed: Callable[..., Any] = clock.timed("optimizer", step)
    assert (timed.__name__, timed.hooked) == ("step", True)  # type: ignore[attr-defined]


def test_on_a_gpu_events_tell_and_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch, clock: PhaseClock) -> None:
    said: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("wait")

        def elapsed_time(self, last: Event) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock.start()
    clock.timed("backward", lambda: said.append("run"))()
    assert said == ["record", "run", "record"]
    assert clock.take() == {"backward_event_ns": 1_500_000}
    assert said[-1] == "wait"


def test_samples_are_kept_by_part_with_what_was_counted_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"compiled_graphs": 1}
    monkeypatch.setattr(step_samples, "read_counters", lambda: dict(counts))
    monkeypatch.setattr(
        step_samples, "counted_since", lambda before: {name: count - before[name] for name, count in counts.items()}
    )
    samples = StepSamples()
    samples.note({"step_ns": 9})
    samples.begin("attached")
    samples.note({"step_ns": 3})
    counts["compiled_graphs"] = 4
    samples.begin("profiled")
    samples.note({"step_ns": 5})
    samples.end()
    counts["compiled_graphs"] = 7
    samples.end()
    assert samples.steps == {"attached": [{"step_ns": 3}], "profiled": [{"step_ns": 5}]}
    assert samples.during == {"attached": {"compiled_graphs": 3}, "profiled": {"compiled_graphs": 0}}
