"""The times of phases and steps, and the waits for data, on stand-ins for the clock and for CUDA and by real runs."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import dataloader as torchs

from profkit.capture.steps import times
from profkit.capture.steps.data_loading import DataLoading
from profkit.capture.steps.times import PhaseClock, StepCollector, mark_on_host, sum_times
from tests.forked_scripts import Forks
from tests.in_process import manifest_of, run_command


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


SLOW = """
import sys
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __init__(self, features):
        self.features = features

    def __len__(self):
        return 12

    @torch.no_grad()
    def __getitem__(self, index):
        time.sleep(0.002)
        return self.features(torch.full((8,), float(index))), torch.ones(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    workers = int(sys.argv[1])
    features = nn.Linear(8, 8) if workers else nn.Identity().forward  # calls of modules may be steps
    loader = DataLoader(Slow(features), batch_size=2, num_workers=workers, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
    for epoch in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            print(loss.item().hex(), flush=True)
"""


class Three(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise ValueError("a bad sample")
        return index


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(2))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a watcher of this process's data loaders is called for; torch is as before afterwards."""
    found: list[str] = []
    for owner, name in ((torchs.DataLoader, "__iter__"), (torchs._BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    DataLoading(lambda: found.append("begins"), lambda: found.append("ends")).install()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_every_batch_and_the_end_of_the_epoch_are_waited_for(events: list[str], workers: int) -> None:
    assert [int(one) for one in DataLoader(Endless(), batch_size=None, num_workers=workers)] == [0, 1]
    assert events == ["begins", "ends"] * 4, "the iterator, two batches, and that there are no more"


def test_an_error_of_the_dataset_reaches_the_script_and_ends_the_wait(events: list[str]) -> None:
    loader = iter(DataLoader(Three(), batch_size=2))
    assert next(loader).tolist() == [0, 1]
    with pytest.raises(ValueError, match="a bad sample"):
        next(loader)
    assert events == ["begins", "ends"] * 3


def test_waiting_for_data_is_timed_by_the_host_also_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1_000, 5))
    monkeypatch.setattr(times, "perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    clock = PhaseClock()
    clock.start()
    for _ in range(2):
        clock.begin("data")
        clock.end()
    assert times.sum_times(clock.take()) == {"data_ns": 10}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_recorded_step_begins_with_its_wait_for_data(forks: Forks, tmp_path: Path, workers: str) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    words = ("--warmup", "3", "--steps", "4", "--", sys.executable, "train.py", workers)
    forks.check_profkit("run", "-o", "run", *words, cwd=tmp_path)
    events = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    spans = {name: _spans(events, name) for name in ("data", "step 3", "step 4", "forward")}
    for name in ("step 3", "step 4"):
        ((begins, ends),) = spans[name]
        inside = [span for span in spans["data"] if begins <= span[0] and span[1] <= ends]
        forward = next(span for span in spans["forward"] if begins <= span[0] <= ends)
        assert len(inside) == 1, name
        assert inside[0][1] <= forward[0]
    manifest = manifest_of(tmp_path / "run")
    assert len(manifest["processes"]) == 1, "a worker trains nothing"
    for part in ("attached", "profiled"):
        for step in manifest[part]["steps"]:
            assert next(iter(step)) == "data_ns"
            assert 0 < step["data_ns"] < step["step_ns"]
    table = run_command("kernels", tmp_path / "run").stdout.partition("time of")[2].splitlines()
    assert [line.split()[0] for line in table[2:7]] == ["data", "forward", "loss", "backward", "optimizer"]


def _spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    mine = [one for one in events if one.get("cat") == "user_annotation" and one["name"] == name]
    return sorted((one["ts"], one["ts"] + one["dur"]) for one in mine)
