"""Programs as people write them, unedited: the losses stay equal to the bit, and what is recorded is what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.forked_scripts import Forks
from tests.operator_links import backward_ns_by_forward_path
from tests.programs_counted import PROGRAMS
from tests.recorded_programs import (
    STEPS,
    Recording,
    assert_the_tree_is_whole,
    backward_ns_by_path,
    record,
    record_with_nsys,
    times_by_step,
)


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    return {}


@pytest.fixture(params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture
def recording(
    name: str, forks: Forks, recordings: dict[str, Recording], tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    """Record the program, once for all tests."""
    if name not in recordings:
        recordings[name] = record(PROGRAMS[name], forks, tmp_path_factory.mktemp("program"))
    return recordings[name]


def test_losses_are_equal_to_the_bit(recording: Recording) -> None:
    assert recording.plain.count("\n") >= STEPS + 2
    assert recording.said.startswith(recording.plain)


def test_steps_and_phases_are_as_counted_by_hand(name: str, recording: Recording) -> None:
    found = times_by_step(recording.trace)
    assert [times.pop("") for times in found] == [1] * PROGRAMS[name].steps
    phases = [{path: times for path, times in step.items() if "/" not in path} for step in found]
    assert phases == [PROGRAMS[name].phases] * PROGRAMS[name].steps
    assert f"A step is {PROGRAMS[name].step}" in recording.said


def test_modules_are_where_they_ran_as_often_as_they_ran(name: str, recording: Recording) -> None:
    wanted = PROGRAMS[name].paths
    for times in times_by_step(recording.trace):
        assert {path: times.get(path, 0) for path in wanted} == wanted


def test_every_operator_lies_in_one_line_of_the_tree(recording: Recording) -> None:
    assert_the_tree_is_whole(recording.trace)


def test_the_self_check_finds_nothing(recording: Recording) -> None:
    messages = [finding.message for finding in recording.trace.self_check.findings]
    # Gloo's thread may still be leaving its own range when the recording ends.
    assert [message for message in messages if "gloo:all_reduce" not in message] == []


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.linked], indirect=True)
def test_backward_of_each_module_equals_what_operator_links_give(recording: Recording) -> None:
    linked = backward_ns_by_forward_path(recording.run / "trace.json.gz")
    assert backward_ns_by_path(recording.trace) == linked


@pytest.mark.nsys
@pytest.mark.parametrize("name", ["GAN", "checkpointed, nested", "data loader with workers"], indirect=True)
def test_nsys_and_torch_profiler_record_the_same_ranges(name: str, recording: Recording, tmp_path: Path) -> None:
    assert times_by_step(record_with_nsys(PROGRAMS[name], tmp_path)) == times_by_step(recording.trace)
