"""What records a process: whole traces, one nsys for all ranks, and a script's own torch.profiler beside it."""

from __future__ import annotations

import gc
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from profkit import annotate, read_trace
from profkit.capture import recorder as kineto
from profkit.capture import recorder as recorders
from profkit.capture.hooks.range_log import LiveLog
from profkit.capture.patches import restore
from profkit.capture.recorder import (
    StepsRecorder,
    drop_profiler,
    recorded_by_kineto,
    recorded_by_nsys,
    warmed_up_profiler,
)
from profkit.names import COLLECTING
from profkit.run.range_log import (
    LEFT,
    log_beside,
    plain_beside,
    read_range_log,
)
from profkit.run.recording import LocalRanks, Order
from tests.forked_scripts import Forks
from tests.in_process import manifest_of, names_in
from tests.launched import run_threads

CPU = torch.device("cpu")


def test_a_failed_block_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), recorded_by_kineto(tmp_path / "trace.json.gz", CPU):
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("written", ["", '{"traceEvents": [{"na'])
@pytest.mark.parametrize(
    ("free", "limit", "said"),
    [
        (0, resource.RLIM_INFINITY, "No space left on device"),
        (2**40, 10, "File too large"),
        (2**40, resource.RLIM_INFINITY, "wrote no whole trace, and does not say why"),
    ],
)
def test_a_trace_that_was_cut_off_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, free: int, limit: int, said: str
) -> None:
    """Kineto itself says nothing of a full disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))

    def export(_profiler: object, path: str) -> None:
        Path(path).write_text(written)
        Path(f"{path}.tmp").touch()

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with pytest.raises(OSError, match=said), recorded_by_kineto(tmp_path / "trace.json.gz", CPU):
        torch.ones(2).sum()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_write_their_traces_at_the_same_time_keep_out_of_each_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = torch.profiler.profile.export_chrome_trace

    def export_while_another_rank_does(profiler: torch.profiler.profile, path: str) -> None:
        export(profiler, path)
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
        with recorded_by_kineto(tmp_path / "trace.rank1.json.gz", CPU):
            torch.ones(2).sum()

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export_while_another_rank_does)
    with recorded_by_kineto(tmp_path / "trace.json.gz", CPU):
        torch.ones(2).sum()
    assert names_in(tmp_path) == ["trace.json.gz", "trace.rank1.json.gz"]


def test_a_profiler_that_warmed_up_keeps_what_ran_after_its_start_alone(tmp_path: Path) -> None:
    warmed_up = warmed_up_profiler(CPU, None, None)
    torch.ones(2).exp()
    with recorded_by_kineto(tmp_path / "trace.json.gz", CPU, warmed_up=warmed_up):
        torch.ones(2).log()
    with gzip.open(tmp_path / "trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert ("aten::exp" in names, "aten::log" in names) == (False, True)


def test_a_profiler_that_only_warmed_up_makes_way_for_another() -> None:
    drop_profiler(warmed_up_profiler(CPU, None, None))
    with torch.profiler.profile() as profiler:
        torch.ones(2).log()
    assert "aten::log" in {event.name for event in profiler.events()}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_threads_that_the_program_starts_are_recorded_with_their_ranges(tmp_path: Path) -> None:
    def work() -> None:
        with annotate("forward"):
            torch.ones(2).sum()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
        with recorded_by_kineto(tmp_path / "trace.json.gz", torch.device("cuda")):
            threads.submit(work).result()
    (row,) = read_trace(tmp_path / "trace.json.gz").ranges().ranges
    assert row.path == "forward"
    assert row.kernel_count > 1


def test_a_recording_ends_only_when_gloos_threads_have_noted_what_they_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a collective goes on before: here gloo's thread computes for a while after that."""
    stop, noted, at_stop = torch.profiler.profile.stop, threading.Event(), []

    def compute(_future: Any) -> None:
        total = 0
        for number in range(2_000_000):
            total += number
        noted.set()

    def stop_and_note(profiler: torch.profiler.profile) -> None:
        at_stop.append(noted.is_set())
        stop(profiler)

    monkeypatch.setattr(torch.profiler.profile, "stop", stop_and_note)
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor() as pool:  # each waits until both have come
        first, second = pool.map(lambda rank: torch.distributed.ProcessGroupGloo(store, rank, 2), range(2))
    with recorded_by_kineto(tmp_path / "trace.json.gz", CPU):
        future = first.allreduce([torch.ones(4)]).get_future()
        future.then(compute)
        second.allreduce([torch.ones(4)])
        future.wait()
    assert at_stop == [True]


def test_a_removed_directory_is_named_as_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(FileNotFoundError), recorded_by_kineto(folder / "trace.json.gz", CPU):
        folder.rmdir()


@pytest.mark.parametrize(
    "name", [b'a"b', b"a\nb", b"a\x1b[31mb", b"a\xffb"], ids=["quote", "newline", "ESC", "non-UTF-8"]
)
def test_a_trace_is_whole_in_a_directory_of_any_name_and_does_not_hold_it(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    with recorded_by_kineto(folder / "trace.json.gz", CPU):
        torch.ones(2).sum()
    trace = gzip.decompress((folder / "trace.json.gz").read_bytes())
    assert json.loads(trace)["traceName"] == "trace.json.gz"
    assert os.fsencode(tmp_path) not in trace
    assert [path.name for path in folder.iterdir()] == ["trace.json.gz"]


def _rank(run: Path, number: int, count: int) -> LocalRanks:
    rank = LocalRanks(run)
    rank.number, rank.count = number, count
    return rank


def test_no_rank_goes_on_before_all_have_come(tmp_path: Path) -> None:
    seen: list[str] = []

    def come(number: int) -> None:
        while number and f"rank {number - 1} waits" not in seen:
            time.sleep(0)
        seen.append(f"rank {number} waits")
        assert _rank(tmp_path, number, 3).meet("arrived")
        seen.append("goes on")

    run_threads(come, 3)
    assert seen == [*(f"rank {number} waits" for number in range(3)), *["goes on"] * 3]
    assert all(path.name.startswith("partial.") for path in tmp_path.iterdir()), "a run that failed is cleared of them"


def test_a_rank_that_does_not_come_is_not_awaited_for_ever(tmp_path: Path) -> None:
    assert not _rank(tmp_path, 0, 2).meet("arrived", patience_s=0.1)


def test_ranks_agree_on_the_largest_number(tmp_path: Path) -> None:
    agreed: list[int] = []
    run_threads(lambda number: agreed.append(_rank(tmp_path, number, 3).agree("drain", (2, 8, 0)[number])), 3)
    assert agreed == [8, 8, 8]
    assert _rank(tmp_path, 0, 1).agree("alone", 5) == 5
    assert _rank(tmp_path, 0, 2).agree("one alone", 5, patience_s=0.1) == 0
    assert all(path.name.startswith("partial.") for path in tmp_path.iterdir())


def test_one_nsys_starts_and_stops_once_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Local(threading.local):
        number = 0

    here = Local()
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(recorders, "LocalRanks", lambda run: _rank(run, here.number, 2))

    def train(number: int) -> None:
        here.number = number
        with recorded_by_nsys(tmp_path, torch.device("cuda")):
            said.append(f"step of {number}")
        said.append(f"after {number}")

    run_threads(train, 2)
    assert said[0] == "start"
    assert sorted(said[1:3]) == ["step of 0", "step of 1"]
    assert said[3] == "stop"
    assert sorted(said[4:]) == ["after 0", "after 1"]


def test_without_cuda_nsys_is_not_started_or_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: pytest.fail("started"))
    with recorded_by_nsys(tmp_path, CPU):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA seems to be in use, and there is nothing to wait for; torch.profiler traces the CPU in its place."""
    on_cpu = torch.profiler.ProfilerActivity.CPU
    monkeypatch.setattr(kineto, "ProfilerActivity", SimpleNamespace(CUDA=on_cpu))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def recorder(tmp_path: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepsRecorder]:
    for target in ("_prepare_trace", "__exit__"):  # the recorder watches the script's profilers from now on
        monkeypatch.setattr(torch.autograd.profiler.profile, target, getattr(torch.autograd.profiler.profile, target))
    hooks: Any = SimpleNamespace(
        log=LiveLog(), prepare=lambda: None, start_log=lambda: None, start=lambda: None, steps=SimpleNamespace()
    )
    hooks.steps.has_captured = False
    yield StepsRecorder(Order(str(tmp_path), "kineto", 2, 1), hooks, records_memory=False)
    restore()


def test_a_recording_that_was_warmed_up_leaves_a_trace_and_the_log_of_ranges(
    recorder: StepsRecorder, tmp_path: Path
) -> None:
    assert recorder.may_warm_up()
    recorder.warm_up()
    assert (recorder.is_warming_up, recorder.is_on) == (True, False)
    assert recorder.start(None, lambda: pytest.fail("made way")) is None
    assert (recorder.is_warming_up, recorder.is_on) == (False, True)
    assert recorder.stop() is None
    path = tmp_path / "trace.json.gz"
    assert sorted(tmp_path.iterdir()) == sorted([plain_beside(path), log_beside(path)])
    assert len(read_range_log(log_beside(path)).readings) == 2


def test_a_full_collection_is_a_range_and_a_younger_one_is_none(recorder: StepsRecorder, tmp_path: Path) -> None:
    gc.disable()
    try:
        gc.collect()
        recorder.start(None, lambda: None)
        gc.collect(1)
        gc.collect()
        recorder.stop()
        gc.collect()
    finally:
        gc.enable()
    log = read_range_log(log_beside(tmp_path / "trace.json.gz"))
    assert log.names == [COLLECTING]
    (entries,) = (thread.entries for thread in log.threads if thread.entries)
    assert entries[::2] == [0, LEFT]
    assert entries[1] < entries[3]


def test_a_profiler_that_warms_up_makes_way_for_the_scripts(recorder: StepsRecorder, tmp_path: Path) -> None:
    recorder.warm_up()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert (recorder.is_warming_up, recorder.meets_the_scripts) == (False, True)
        torch.ones(2).log()
    assert "aten::log" in {event.name for event in profiler.events()}
    assert not recorder.meets_the_scripts
    assert recorder.stop() is None
    assert not list(tmp_path.iterdir())


def test_what_cpu_operators_alone_know_needs_them(recorder: StepsRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "several_ranks", lambda: True)
    monkeypatch.setattr(recorders, "knows_collectives", lambda: True)
    assert recorder.may_warm_up()
    monkeypatch.setattr(recorders, "knows_collectives", lambda: False)
    assert not recorder.may_warm_up()


SCRIPT = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile, schedule

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trace(profiler):
    print("EVENTS", len(profiler.events()))


before, within, after = map(int, sys.argv[1:])
if before < 0:
    with profile(schedule=schedule(wait=within, warmup=1, active=2, repeat=1), on_trace_ready=trace) as profiler:
        for _ in range(after):
            step()
            profiler.step()
else:
    for _ in range(before):
        step()
    with profile() as profiler:
        for _ in range(within):
            step()
    trace(profiler)
    for _ in range(after):
        step()
"""


@pytest.mark.parametrize(
    ("steps", "said", "recorded"),
    [
        ((0, 12, 0), "nothing was recorded: the script's own torch.profiler ran in the steps to record", 0),
        ((0, 8, 6), "", 3),
        ((0, 3, 8), "", 3),
        ((7, 4, 3), "the recording is not whole: the script's own torch.profiler ran in the steps to record", 2),
        ((-1, 6, 14), "the recording is not whole: the script's own torch.profiler ran in the steps to record", 1),
    ],
    ids=["in all steps", "until after the warm-up", "within the warm-up", "from a recorded step on", "by a schedule"],
)
def test_a_scripts_own_profiler_keeps_its_events(
    forks: Forks, tmp_path: Path, steps: tuple[int, int, int], said: str, recorded: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), *map(str, steps)]
    plain = forks.run(words, tmp_path)
    done = forks.run_profkit("run", "-o", "run", "--warmup", "5", "--", *words, cwd=tmp_path)
    assert plain.stdout.startswith("EVENTS ")
    assert done.stdout.splitlines()[0] == plain.stdout.strip()
    assert said in done.stderr
    assert ("torch.profiler" in done.stderr) == bool(said)
    assert done.returncode == 0
    assert (tmp_path / "run" / "trace.json.gz").exists() == bool(recorded)
    if recorded:
        assert _recorded_steps(tmp_path) == recorded


def _recorded_steps(place: Path) -> int:
    return len(manifest_of(place / "run")["profiled"]["steps"])


@pytest.mark.slow
def test_lines_of_the_scripts_own_profiler_are_printed_as_without_profkit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('KINETO_LOG_LEVEL' in os.environ)\n" + SCRIPT)
    words = [sys.executable, "train.py", "9", "1", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    plain, done = (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        for command in (words, [sys.executable, "-m", "profkit", "run", "-o", "run", "--warmup", "5", "--", *words])
    )
    assert done.stdout.startswith("False\n")
    assert _recorded_steps(tmp_path) == 3, "recorded before the script's profiler began"
    printed = [[line for line in one.stderr.splitlines() if ".cpp:" in line] for one in (plain, done)]
    assert len(printed[1]) == len(printed[0])


def test_what_a_thread_recorded_that_has_ended_is_refused_whatever_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may have the number of one that has ended: it holds nothing that could be exported."""
    recording = recorded_by_kineto(tmp_path / "trace.json.gz", torch.device("cpu"))
    numbers = []

    def begin() -> None:
        numbers.append(threading.get_ident())
        recording.__enter__()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    monkeypatch.setattr("profkit.capture.recorder.threading.get_ident", lambda: numbers[0])
    with pytest.raises(OSError, match="the thread that made the steps ended"):
        recording.__exit__(None, None, None)
    assert not (tmp_path / "trace.json.gz").exists()
