"""What limits a step that waits for data: idle time and copies, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.analysis.time_account.account import IdleCauses, divide_idle
from profkit.analysis.time_account.gpu_time import DataWait, GpuParts
from profkit.report.commands.efficiency import build_efficiency_document, limit_words
from profkit.report.document import render
from tests.efficiency_runs import rows_by_path
from tests.nsys_builder import NsysBuilder

MS = 1_000_000
OVERLAPPED = {"overlapped_communication_ns": 0}


def _step(builder: NsysBuilder, number: int, at: int, wait: int, *, pid: int = 100, device: int = 0) -> int:
    """Add a step: wait for data, a copy of 300 µs in which nothing else runs, 2 ms of kernels. Return its end."""
    options = {"tid": pid, "pid": pid}
    end = at + wait + 2_400_000
    builder.range(f"step {number}", at, end, **options)
    builder.range("data", at, at + wait, **options)
    copied = at + wait + 10_000
    builder.copy(copied, 300_000, start=copied + 10_000, device=device, **options)
    builder.range("forward", copied + 1_000, end - 1_000, **options)
    for part in range(4):
        launched = copied + 2_000 + part * 500_000
        builder.kernel(launched, 500_000, start=copied + 310_000 + part * 500_000, device=device, **options)
    return end


def _efficiency(builder: NsysBuilder, folder: Path) -> EfficiencyResult:
    return read_trace(builder.write(folder / "t.sqlite")).efficiency()


def _shown(result: EfficiencyResult) -> str:
    return " ".join(render(build_efficiency_document(result, []), "table").split())


def test_a_step_that_waits_for_its_batch_is_limited_by_data_loading(tmp_path: Path) -> None:
    """Of 48 ms: 45.6 waiting, 20 µs until the copy begins, 0.3 copying, 2 computing, 80 µs until the step ends."""
    builder, at = NsysBuilder(), 0
    for number in range(2):
        at = _step(builder, number, at, 45_600_000)
    result = _efficiency(builder, tmp_path)
    step = rows_by_path(result)["step *"]
    assert (step.gpu.span_ns, step.gpu.computing_ns) == (2 * 48 * MS, 4 * MS)
    assert (step.data_loading_ns, step.input_copy_ns) == (2 * 45_600_000, 600_000)
    assert (step.verdict, limit_words(step)) == ("host-bound", "data loading")
    assert [one.data_wait_ns for one in result.steps] == [45_600_000] * 2
    assert result.steps[0].data == DataWait(0, 0, 45_600_000, 300_000)
    said = _shown(result)
    assert "waiting for data: 45.60 ms per step, then 300.0 µs to copy it to the GPU" in said
    assert "idle while Python waited for data 95.0%" in said


def test_a_short_wait_between_two_launches_is_no_launching(tmp_path: Path) -> None:
    """A wait of 0.4 ms is shorter than the pauses that count as launching; of 1 ms the GPU computes 0.3."""
    builder = NsysBuilder()
    for number in range(2):
        at = number * MS
        builder.range(f"step {number}", at, at + MS)
        builder.range("data", at + 10_000, at + 410_000)
        builder.kernel(at + 1_000, 300_000, start=at + 700_000)
        builder.kernel(at + 420_000, 1_000, start=at + 430_000)
    step = rows_by_path(_efficiency(builder, tmp_path))["step *"]
    assert step.gpu.launching_ns >= 800_000
    assert step.data_loading_ns == 800_000
    assert limit_words(step) == "data loading"


def test_steps_in_bursts_are_judged_by_their_mean(tmp_path: Path) -> None:
    """Eight workers deliver at once: 80 ms of waiting in one step of eight, 10 ms a step, beside 2 ms of computing."""
    builder, at = NsysBuilder(), 0
    for number in range(16):
        at = _step(builder, number, at, 80 * MS if number % 8 == 0 else 0)
    result = _efficiency(builder, tmp_path)
    step = rows_by_path(result)["step *"]
    assert (step.data_loading_ns, limit_words(step)) == (160 * MS, "data loading")
    assert "waiting for data: 10.00 ms per step (0 ns to 80.00 ms)" in _shown(result)


def _run(folder: Path, unprofiled: list[tuple[int, int]], recorded: int, workers: int = 8) -> EfficiencyResult:
    """Steps that take 2.4 ms, of which every eighth waits 80 ms; ``unprofiled`` are steps and their waits."""
    builder, at = NsysBuilder(), 0
    for number in range(recorded):
        at = _step(builder, number, at, 80 * MS if number % 8 == 0 else 0)
    builder.write(folder / "trace.sqlite")
    steps = [{"step_ns": step, "data_ns": wait} for step, wait in unprofiled]
    loading = {"workers": workers, "queue_batches": 2 * workers, "batches_per_step": 1.0}
    manifest = {"status": "complete", "device": "cuda", "attached": {"steps": steps}}
    manifest["processes"] = [{"loading": loading}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return read_trace(folder).efficiency()


BURST = [(82 * MS, 80 * MS), *[(2 * MS, 0)] * 7]


def test_unprofiled_steps_in_bursts_count_with_their_mean_wait(tmp_path: Path) -> None:
    """The median of 2 ms would leave no idle time. The rate is 10 + 2 ms, of which the GPU is busy for 2.3."""
    result = _run(tmp_path, BURST, 8)
    step = rows_by_path(result)["step *"]
    assert step.clean_idle_share == pytest.approx(9.7 / 12)
    assert limit_words(step) == "data loading"
    costs = {one.phase: (one.clean_ns, one.profiled_ns) for one in result.inflation}
    assert costs == {}, "no recorded step was timed by the host"
    assert "use their mean wait for data and median of the rest" in _shown(result)


@pytest.mark.parametrize(
    ("unprofiled", "recorded", "workers", "found"),
    [
        (BURST, 4, 8, True),
        (BURST, 8, 8, False),
        ([(2 * MS, 0)] * 4, 4, 8, True),  # what is recorded waits
        (BURST, 4, 4, False),
    ],
)
def test_fewer_steps_than_workers_say_little_of_waiting(
    tmp_path: Path, unprofiled: list[tuple[int, int]], recorded: int, workers: int, found: bool
) -> None:
    result = _run(tmp_path, unprofiled, recorded, workers)
    said = [one.message for one in result.warnings if one.code == "few-steps-for-data"]
    assert len(said) == found
    assert all("record 8 or more" in message for message in said)


def test_few_steps_of_a_program_that_does_not_wait_are_enough(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _step(builder, 0, 0, 100_000)
    builder.write(tmp_path / "trace.sqlite")
    loading = {"workers": 8, "batches_per_step": 1.0}
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "complete", "processes": [{"loading": loading}]}))
    assert "few-steps-for-data" not in {one.code for one in read_trace(tmp_path).efficiency().warnings}


def test_waiting_while_the_gpu_computes_costs_nothing(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for number in range(2):
        at = number * 10 * MS
        builder.range(f"step {number}", at, at + 10 * MS)
        builder.kernel(at, 9_900_000, start=at + 10_000)
        builder.range("data", at + MS, at + 9 * MS)
    result = _efficiency(builder, tmp_path)
    assert rows_by_path(result)["step *"].data_loading_ns == 0
    assert [one.data_wait_ns for one in result.steps] == [8 * MS] * 2


def test_each_rank_waits_for_its_own_data(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _step(builder, 0, 0, 10 * MS, pid=100, device=0)
    builder.range("step 0", 0, 12 * MS, tid=200, pid=200)
    builder.kernel(11 * MS, MS, start=11 * MS + 10, tid=200, pid=200, device=1)
    waits = {one.device: (one.data.idle_ns, one.data_wait_ns) for one in _efficiency(builder, tmp_path).steps}
    assert waits == {0: (10 * MS, 10 * MS), 1: (0, 0)}
    (tmp_path / "t.sqlite").unlink()
    builder = NsysBuilder()  # at the same time one waits for 5 ms of a step, the other for 1
    for rank, wait in ((0, 5), (1, 1)):
        thread = 100 * (rank + 1)
        builder.range("step 0", 0, 20 * MS, tid=thread, pid=thread)
        builder.range("data", MS, (1 + wait) * MS, tid=thread, pid=thread)
        builder.kernel(10 * MS, MS, tid=thread, pid=thread, device=rank)
    assert {one.device: one.data_wait_ns for one in _efficiency(builder, tmp_path).steps} == {0: 5 * MS, 1: MS}


@pytest.mark.parametrize(
    ("at", "kind", "thread", "expected"),
    [
        (150, 1, 100, 50),  # after the wait
        (50, 1, 100, 50),  # before it, as accelerate does, which fetches one batch ahead
        (150, 2, 100, 0),  # to the host
        (250, 1, 100, 0),  # in forward
        (450, 1, 100, 0),  # after it, where nobody waits for data
        (150, 1, 101, 0),  # on another thread
    ],
)
def test_input_copies_are_those_between_phases_with_a_wait(
    tmp_path: Path, at: int, kind: int, thread: int, expected: int
) -> None:
    builder = NsysBuilder()
    builder.range("step 0", 0, 1_000)
    builder.range("data", 100, 120)
    builder.range("forward", 200, 400)
    builder.range("optimizer", 600, 700)
    builder.kernel(300, 10, start=990)
    builder.copy(at, 50, kind=kind, tid=thread, start=800)
    assert rows_by_path(_efficiency(builder, tmp_path))["step 0"].input_copy_ns == expected


def test_a_wait_that_is_less_than_half_of_the_hosts_time_is_pythons(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("step 0", 0, 10 * MS)
    builder.range("data", 0, 4 * MS)
    builder.kernel(9 * MS, MS, start=9 * MS + 10)
    step = rows_by_path(_efficiency(builder, tmp_path))["step 0"]
    assert (step.verdict, limit_words(step)) == ("host-bound", "Python")


def _with_launches(folder: Path, manifest: dict[str, Any]) -> EfficiencyRow:
    """Two steps of 10 ms: 1 of waiting for data, 6 in which the host launches, 3 of computing; return their row."""
    builder = NsysBuilder()
    for number in range(2):
        at = number * 10 * MS
        builder.range(f"step {number}", at, at + 10 * MS)
        builder.range("data", at, at + MS)
        for launch_at in range(MS, 7 * MS, 100_000):
            builder.call(at + launch_at, name="cudaEventRecord_v3020")
        builder.kernel(at + 7 * MS - 1_000, 3 * MS, start=at + 7 * MS)
    builder.write(folder / "trace.sqlite")
    (folder / "manifest.json").write_text(json.dumps({"status": "complete", "device": "cuda", **manifest}))
    return rows_by_path(read_trace(folder).efficiency())["step *"]


def test_waits_that_the_profiler_hid_count(tmp_path: Path) -> None:
    """Unprofiled 10 ms too, of which 5 are waiting: a slower host finds its data sooner. Launching keeps 2 of 6."""
    steps = {
        part: {"steps": [{"data_ns": wait * MS, "step_ns": 10 * MS}] * 3}
        for part, wait in (("attached", 5), ("profiled", 1))
    }
    row = _with_launches(tmp_path, steps)
    assert row.data_loading_ns == 2 * MS, "as recorded"
    assert (row.verdict, limit_words(row)) == ("host-bound", "data loading")
    assert row.idle.causes.data_ns / row.idle.span_ns == pytest.approx(0.5), "without a profiler"


def test_without_unprofiled_waits_the_recording_decides(tmp_path: Path) -> None:
    row = _with_launches(tmp_path, {"attached": {"steps": [{"step_ns": 10 * MS}] * 3}})
    assert limit_words(row) == "kernel launches"


@pytest.mark.parametrize(
    ("idle", "change", "expected"),
    [
        (100, None, (20, 60, 20)),
        (50, None, (10, 30, 10)),
        (200, None, (40, 120, 40)),
        (50, 0, (20, 23, 7)),  # what the profiler added was not waiting for data
        (50, 10, (30, 15, 5)),
        (50, -15, (5, 34, 11)),
        (50, -30, (0, 38, 12)),
        (50, 100, (50, 0, 0)),  # never more than all that is idle
    ],
)
def test_idle_time_without_a_profiler_is_divided(idle: int, change: int | None, expected: tuple[int, int, int]) -> None:
    """Recorded idle for 100: 70 launching, of which 10 waiting for data, and 30 outside CUDA, of which 10."""
    parts = GpuParts(140, 40, 0, 0, launching_ns=70, synchronising_ns=0, outside_cuda_ns=30, **OVERLAPPED)
    causes = divide_idle(parts, DataWait(10, 0, 10), idle, change)
    assert (causes.data_ns, causes.launching_ns, causes.outside_cuda_ns) == expected
    assert sum(expected) == idle


@pytest.mark.parametrize(("change", "expected"), [(None, (0, 0, 0, 7)), (3, (7, 0, 0, 0))])
def test_idle_time_of_a_gpu_that_was_recorded_without_any_has_no_known_cause_but_data(
    change: int | None, expected: tuple[int, int, int, int]
) -> None:
    parts = GpuParts(40, 40, 0, 0, launching_ns=0, synchronising_ns=0, outside_cuda_ns=0, **OVERLAPPED)
    assert divide_idle(parts, DataWait(), 7, change) == IdleCauses(*expected)
