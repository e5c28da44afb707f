"""The times of phases and steps, on a stand-in for the clock and for CUDA."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

torch = pytest.importorskip("torch")

from profkit.capture.steps import times  # noqa: E402
from profkit.capture.steps.times import PhaseClock, StepCollector, mark_on_host, sum_times  # noqa: E402


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PhaseClock:
    """A clock on which each look at the time is 5 ns after the one before."""
    ticks = iter(range(0, 10_000, 5))
    monkeypatch.setattr(times, "perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return PhaseClock()


def _run(clock: PhaseClock, *words: str) -> None:
    """Run a phase for each name; ``name(`` begins one and ``)`` ends it; the other words are methods of the clock."""
    for word in words:
        if word in ("start", "stop", "pause", "resume", "take"):
            getattr(clock, word)()
        elif word == ")":
            clock.end()
        else:
            clock.begin(word.removesuffix("("))
            if not word.endswith("("):
                clock.end()


CLOSURE = "pause forward backward resume"


@pytest.mark.parametrize(
    ("program", "times"),
    [
        ("backward", {}),
        ("start stop backward", {}),
        ("start backward backward", {"backward": 10}),
        ("start backward take", {}),
        # Work within a phase counts as that phase, unless it is left for others, as LBFGS leaves it for its closure.
        ("start optimizer( forward backward )", {"optimizer": 5}),
        (
            f"start optimizer( {CLOSURE} {CLOSURE} pause )",
            {"optimizer": 15, "forward": 10, "loss": 10, "backward": 10},
        ),
        ("start training( optimizer( pause forward resume ) )", {"training": 5}),
        # The loss is what runs between forward and backward of one step, unless it has a phase of its own.
        ("start forward backward optimizer", {"forward": 5, "loss": 5, "backward": 5, "optimizer": 5}),
        ("start forward loss backward", {"forward": 5, "loss": 5, "backward": 5}),
        ("start forward take backward", {"backward": 5}),
        # A phase that is open at the end of a step ends there.
        ("start optimizer(", {"optimizer": 5}),
        ("start optimizer( take )", {}),
    ],
)
def test_phases_are_timed_apart(clock: PhaseClock, program: str, times: dict[str, int]) -> None:
    _run(clock, *program.split())
    assert sum_times(clock.take()) == {f"{phase}_ns": time_ns for phase, time_ns in times.items()}


def test_other_threads_are_not_timed(clock: PhaseClock) -> None:
    clock.start()
    thread = threading.Thread(target=_run, args=(clock, "forward"))
    thread.start()
    thread.join()
    assert sum_times(clock.take()) == {}


class Event:
    """A CUDA event that says what is done with it."""

    said: list[str]
    count = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        Event.count += 1
        self.number = Event.count

    def record(self, stream: object) -> None:
        self.stream = stream
        self.said.append("record")

    def synchronize(self) -> None:
        self.said.append("wait")

    def elapsed_time(self, last: Event) -> float:
        return 1.5 * (last.number - self.number)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Event.said, Event.count = [], 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(times, "_is_capturing", lambda: False)
    monkeypatch.setattr(times, "_new_event", Event)
    monkeypatch.setattr(times, "_streams", {})
    monkeypatch.setattr(times, "_unused", defaultdict(list))
    _set_current_stream(monkeypatch, 7)
    return Event.said


def _set_current_stream(monkeypatch: pytest.MonkeyPatch, number: int, device: int = 0) -> None:
    monkeypatch.setattr(times, "_current_device", lambda: device)
    monkeypatch.setattr(times, "_current_stream", lambda device: (number, device, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: f"stream {number}")


def test_on_a_gpu_events_give_the_times_and_nothing_waits_before_they_are_taken(said: list[str]) -> None:
    clock = PhaseClock()
    clock.start()
    _run(clock, "forward", "backward")
    assert said == ["record"] * 4
    found = sum_times(clock.take())
    assert {name: time_ns for name, time_ns in found.items() if name.endswith("_event_ns")} == {
        "forward_event_ns": 1_500_000,
        "loss_event_ns": 1_500_000,
        "backward_event_ns": 1_500_000,
    }
    assert {"forward_host_ns", "loss_host_ns", "backward_host_ns"} <= found.keys()
    assert said[-1] == "wait"


def test_a_step_is_timed_by_the_gpu_and_waits_only_when_it_is_read(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = times.mark_moment(), times.mark_moment()
    assert said == ["record"] * 2
    assert times.time_between(first, last) == 1_500_000
    assert said[-1] == "wait"
    _set_current_stream(monkeypatch, 9, device=1)
    elsewhere = times.mark_moment()
    assert times.time_between(first, elsewhere) == elsewhere.host_ns - first.host_ns
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before_cuda = times.mark_moment()
    assert times.time_between(before_cuda, last) == last.host_ns - before_cuda.host_ns
    assert said.count("wait") == 1


def test_events_are_recorded_on_the_stream_of_the_moment(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in (7, 8, 7):
        _set_current_stream(monkeypatch, number)
        found.append(times.mark_on_gpu().event.stream)
    assert found == ["stream 7", "stream 8", "stream 7"]


def test_an_event_is_recorded_anew_on_the_gpu_that_it_was_made_for(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = times.mark_on_gpu()
    times.give_back(first.device, [first.event])
    _set_current_stream(monkeypatch, 9, device=1)
    other = times.mark_on_gpu()
    _set_current_stream(monkeypatch, 7)
    again = times.mark_on_gpu()
    assert (first.device, other.device, again.device) == (0, 1, 0)
    assert again.event is first.event is not other.event


def test_a_phase_that_ends_on_another_gpu_is_left_out(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PhaseClock()
    clock.start()
    clock.begin("forward")
    _set_current_stream(monkeypatch, 9, device=1)
    clock.end()
    _run(clock, "optimizer")
    assert sum_times(clock.take()).keys() == {"optimizer_event_ns", "optimizer_host_ns"}


def test_a_phase_within_a_capture_into_a_cuda_graph_is_left_out(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = PhaseClock()
    clock.start()
    clock.begin("forward")
    monkeypatch.setattr(times, "_is_capturing", lambda: True)
    clock.end()
    assert sum_times(clock.take()) == {}


def _make_step(samples: StepCollector, step_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    began = mark_on_host()
    moments = iter((began, began._replace(host_ns=began.host_ns + step_ns)))
    monkeypatch.setattr(times, "mark_on_host", lambda: next(moments))
    samples.step_begins()
    samples.step_ended({})


def test_samples_are_kept_by_part_with_what_was_counted_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"compiled_graphs": 1}
    monkeypatch.setattr(times, "read_counters", lambda: dict(counts))
    monkeypatch.setattr(
        times, "counted_since", lambda before: {name: count - before[name] for name, count in counts.items()}
    )
    samples = StepCollector(PhaseClock())
    _make_step(samples, 9, monkeypatch)
    samples.begin("attached")
    _make_step(samples, 3, monkeypatch)
    counts["compiled_graphs"] = 4
    samples.begin("profiled")
    _make_step(samples, 5, monkeypatch)
    samples.end()
    counts["compiled_graphs"] = 7
    samples.end()
    assert samples.steps == {"attached": [{"step_ns": 3}], "profiled": [{"step_ns": 5}]}
    assert samples.during == {"attached": {"compiled_graphs": 3}, "profiled": {"compiled_graphs": 0}}
