"""Programs as people write them, unedited: losses equal to the bit, what is recorded is what they do, on a GPU too."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from profkit import read_snapshot, read_trace
from tests.forked_scripts import Forks
from tests.operator_links import backward_ns_by_forward_path
from tests.programs_counted import ON_A_GPU, ON_TWO_GPUS, PROGRAMS, Program
from tests.recorded_programs import (
    STEPS,
    assert_the_tree_is_whole,
    backward_ns_by_path,
    kernels_by_step,
    record,
    record_with_nsys,
    times_by_step,
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_recorded_as_counted_by_hand(name: str, forks: Forks, tmp_path: Path) -> None:
    _assert_counted(PROGRAMS[name], forks, tmp_path)


@pytest.mark.nsys
@pytest.mark.parametrize("name", ["checkpointed, nested", "data loader with workers"])
def test_nsys_and_torch_profiler_record_the_same_ranges(name: str, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "nsys").mkdir()
    by_kineto = record(PROGRAMS[name], forks, tmp_path).trace
    assert times_by_step(record_with_nsys(PROGRAMS[name], tmp_path / "nsys")) == times_by_step(by_kineto)


SEEN_BY_ONE = {"gradient penalty": "backward/", "DataParallel": "forward/model/replica"}
"""What one profiler alone places: only torch.profiler's links know the modules in a second derivative, and only Nsight
Systems sees the ranges of threads that the program itself starts."""

OF_ONE_PROCESS = {name: program for name, program in PROGRAMS.items() if program.ranks == 1}


def _require_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def _assert_counted(program: Program, forks: Forks, place: Path) -> None:
    """Losses are equal to the bit; steps, phases and modules are as counted; each operator is in one line."""
    recording = record(program, forks, place)
    assert recording.plain.count("\n") >= STEPS + 2
    assert recording.said.startswith(recording.plain)
    assert f"A step is {program.step}" in recording.said
    opened = recording.trace
    found = times_by_step(opened)
    assert [times.pop("") for times in found] == [1] * program.steps
    for times in found:
        assert {path: count for path, count in times.items() if "/" not in path} == program.phases
        assert {path: times.get(path, 0) for path in program.paths} == program.paths
    assert_the_tree_is_whole(opened)
    messages = [finding.message for finding in opened.self_check.findings]
    # Gloo's thread may still be leaving its own range when the recording ends.
    assert [message for message in messages if "gloo:all_reduce" not in message] == []
    if program.linked:
        assert backward_ns_by_path(opened) == backward_ns_by_forward_path(recording.run / "trace.json.gz")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_program_that_needs_a_gpu_is_recorded_as_counted_by_hand(name: str, forks: Forks, tmp_path: Path) -> None:
    _assert_counted(ON_A_GPU[name], forks, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_TWO_GPUS)
def test_a_program_on_two_gpus_is_recorded_as_counted_by_hand(name: str, forks: Forks, tmp_path: Path) -> None:
    _require_gpus(2)
    _assert_counted(ON_TWO_GPUS[name], forks, tmp_path)
    opened = read_trace(tmp_path / "run")
    devices = {device: opened.kernels("backward", device=device).kernel_time_ns for device in (0, 1)}
    assert min(devices.values()) > 0
    assert sum(devices.values()) == opened.kernels("backward").kernel_time_ns


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*OF_ONE_PROCESS, *ON_TWO_GPUS])
def test_both_profilers_agree_on_the_kernels_under_each_path(name: str, forks: Forks, tmp_path: Path) -> None:
    if shutil.which("nsys") is None:
        pytest.skip("no nsys")
    _require_gpus(2 if name in ON_TWO_GPUS else 1)
    program = (PROGRAMS | ON_TWO_GPUS)[name]
    by_kineto = kernels_by_step(record(program, forks, tmp_path).trace)
    (tmp_path / "nsys").mkdir()
    by_nsys = kernels_by_step(record_with_nsys(program, tmp_path / "nsys"))
    assert [step[""] > 0 for step in by_kineto] == [True] * program.steps
    if name in SEEN_BY_ONE:
        by_nsys, by_kineto = (
            [{path: count for path, count in step.items() if not path.startswith(SEEN_BY_ONE[name])} for step in steps]
            for steps in (by_nsys, by_kineto)
        )
    assert by_nsys == by_kineto


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*OF_ONE_PROCESS, *ON_A_GPU])
def test_the_peak_is_the_allocators_own(name: str, forks: Forks, tmp_path: Path) -> None:
    words = [sys.executable, *(PROGRAMS | ON_A_GPU)[name].words]
    for _ in range(2):  # the first run compiles, and measures kernels on memory of its own; the later ones load them
        assert forks.run(words, tmp_path).returncode == 0
    peak = int((tmp_path / ".forked" / "peak.txt").read_text())
    # More steps than it makes: the history goes to its end.
    options = ("-o", "run", "--memory-only", "--warmup", "1", "--steps", "50")
    forks.check_profkit("run", *options, "--", *words, cwd=tmp_path)
    opened = read_snapshot(tmp_path / "run")
    result = opened.memory()
    assert result.totals.exact, result.warnings
    assert result.totals.allocated_peak_bytes == peak
    assert sum(row.bytes for row in result.composition.by_category) == peak
    assert result.allocator_check is not None
    assert result.allocator_check.agrees, result.allocator_check
