"""Kernel time by step: the samples and what they leave out are the whole capture, and each kernel has its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.compare.kernel_changes import compare_times
from profkit.analysis.compare.samples import StepSamples, has_measured_steps, sample_both, sample_steps
from profkit.analysis.tree.selection import join_path
from profkit.errors import UsageError
from tests.nsys_builder import NsysBuilder
from tests.step_builder import ADD, SGEMM, Step, add_steps, write_steps

pytestmark = pytest.mark.usefixtures("read_once")

STEP = {"": [(ADD, 7)], "forward/layer 0/ffn": [(SGEMM, 100)], "forward/layer 1/ffn": [(SGEMM, 50), (ADD, 10)]}


def sampled(path: Path, range: str | None = None, *, by_step: bool = True) -> StepSamples:
    return sample_steps(read_trace(path).attribution, range, by_step=by_step)


def totals(samples: StepSamples) -> dict[tuple[str, str], list[int]]:
    return {
        (join_path(key.path), key.kernel): samples.kernel_ns[:, column].tolist()
        for column, key in enumerate(samples.keys)
    }


def test_each_measured_step_is_a_sample_and_warm_up_is_not(tmp_path: Path) -> None:
    later = {**STEP, "": [(ADD, 9)]}
    samples = sampled(write_steps(tmp_path / "t.sqlite", [STEP, later], warmup={"forward": [(SGEMM, 1000)]}))
    assert totals(samples) == {
        ("", ADD): [7, 9],
        ("forward/layer */ffn", SGEMM): [150, 150],
        ("forward/layer */ffn", ADD): [10, 10],
    }
    assert samples.left_out_ns == 1000
    assert (samples.busy_ns.tolist(), samples.even) == ([167, 169], True)
    assert {join_path(path) for path in samples.paths} >= {"", "forward", "forward/layer *", "forward/layer */ffn"}
    assert {key.category for key in samples.keys} == {"gemm", "elementwise"}


def test_the_steps_of_several_processes_are_added_up(tmp_path: Path) -> None:
    builder = NsysBuilder()
    add_steps(builder, [STEP, STEP, STEP], pid=100)
    add_steps(builder, [STEP, STEP], pid=200)
    samples = sampled(builder.write(tmp_path / "t.sqlite"))
    assert samples.kernel_ns.sum(axis=1).tolist() == [334, 334, 167]
    assert not samples.even


def test_without_steps_the_capture_is_one_sample(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("warmup", 0, 100)
    builder.kernel(10, 1000)
    builder.range("forward", 200, 300)
    builder.kernel(210, 5)
    builder.kernel(400, 6)
    path = builder.write(tmp_path / "t.sqlite")
    assert not has_measured_steps(read_trace(path).attribution)
    samples = sampled(path, by_step=False)
    assert totals(samples) == {("", "k"): [6], ("forward", "k"): [5]}
    assert (samples.size, samples.left_out_ns, samples.wall_ns) == (1, 1000, None)


def test_a_range_limits_the_samples(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "t.sqlite", [STEP, STEP])
    samples = sampled(path, "layer 1")
    assert samples.kernel_ns.sum(axis=1).tolist() == [60, 60]
    assert samples.left_out_ns == 2 * 107
    with pytest.raises(UsageError, match="no range 'layr 1'"):
        sampled(path, "layr 1")


def test_a_range_can_select_the_steps_of_one_context(tmp_path: Path) -> None:
    builder = NsysBuilder()
    end = add_steps(builder, [STEP, STEP])
    builder.range("context 128", 0, end - 1)
    later = add_steps(builder, [STEP, STEP, STEP], begin=end)
    builder.range("context 256", end, later)
    path = builder.write(tmp_path / "t.sqlite")
    mixed, one = sampled(path), sampled(path, "context 256")
    assert (mixed.size, mixed.has_contexts) == (5, True)
    assert (one.size, one.has_contexts) == (3, False)
    assert totals(one)["forward/layer */ffn", SGEMM] == [150, 150, 150]


def test_the_kth_steps_of_all_ranks_are_one_sample(captures: Path) -> None:
    opened = read_trace(captures / "ddp.nsys2025.sqlite")
    samples = sample_steps(opened.attribution)
    assert (samples.size, samples.even) == (2, True)
    assert samples.total_ns == opened.kernels("step *").total_ns


def test_what_torch_compile_runs_is_apart_from_the_step_that_it_holds_up(tmp_path: Path) -> None:
    held_up = {**STEP, "forward/compiling f/layer 0": [(SGEMM, 3000)], "compiling f": [(ADD, 500)]}
    plain = sampled(write_steps(tmp_path / "plain.sqlite", [STEP, STEP]))
    after = sampled(write_steps(tmp_path / "after.sqlite", [STEP, held_up]))
    assert {key.category for key in after.keys if key.path == ("compiling",)} == {"compiling"}
    found = compare_times(plain, after)
    phases = {line.name: (line.change.before_ns, line.change.after_ns) for line in found.by_phase}
    assert phases == {"compiling": (0, 3500), "forward": (320, 320), "(in no inner range)": (14, 14)}
    assert {line.name: line.change.after_ns for line in found.by_category}["compiling"] == 3500
    assert sum(part.change.after_ns for part in found.parts) == found.kernel_time.after_ns


def _both(folder: Path, *steps: Step) -> tuple[StepSamples, StepSamples]:
    """Return the samples of two captures of two steps of these each."""
    before, after = (
        read_trace(write_steps(folder / f"{at}.sqlite", [one, one])).attribution for at, one in enumerate(steps)
    )
    return sample_both(before, after)


def test_paths_of_two_captures_are_kinds_if_either_has_several(tmp_path: Path) -> None:
    """As in the tree of ranges, a single ``conv2`` is no ``conv*``; what both are called must be the same."""
    one = {"forward/conv2": [(SGEMM, 5)], "forward/layer 0": [(ADD, 1)]}
    two = {"forward/conv2": [(SGEMM, 5)], "forward/layer 0": [(ADD, 1)], "forward/layer 1": [(ADD, 2)]}
    sides = _both(tmp_path, one, two)
    assert [{join_path(key.path) for key in side.keys} for side in sides] == [{"forward/conv2", "forward/layer *"}] * 2
    alone = sampled(tmp_path / "0.sqlite")
    assert {join_path(key.path) for key in alone.keys} == {"forward/conv2", "forward/layer 0"}
    assert {line.name for line in compare_times(*sides).by_range} == {"forward/conv2", "forward/layer *"}


def test_a_path_that_one_capture_lacks_counts_in_the_range_around_it(tmp_path: Path) -> None:
    sides = _both(tmp_path, {"forward": [(SGEMM, 5)], "forward/layer 0": [(ADD, 1)]}, {"forward": [(SGEMM, 6)]})
    assert [{join_path(path) for path in side.paths} for side in sides] == [
        {"", "forward", "forward/layer 0"},
        {"", "forward"},
    ]
    (line,) = compare_times(*sides).by_range
    assert (line.name, line.change.before_ns, line.change.after_ns) == ("forward", 12, 12)
