"""Backward work placed by torch.profiler's links: under paths of its own, never in the forward ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.time_account.steps import measured_ranges
from profkit.errors import UsageError
from tests.in_process import run_command
from tests.kineto_builder import AUTOGRAD, TID, flow, kernel, launch, row, thread_name, written

Events = list[dict[str, Any]]


def span(name: str, start: int, end: int, tid: int = TID) -> dict[str, Any]:
    return row("user_annotation", name, start, end - start, tid)


def linked(number: int, forward: int, backward: int, duration: int, tid: int = TID) -> Events:
    """Return a forward operator with a kernel of 1 µs, and its backward operator with one of ``duration``."""
    return [
        row("cpu_op", "aten::mm", forward, 10, tid),
        launch(forward + 2, 2 * number, tid),
        kernel("k", forward + 7, 1, 2 * number),
        flow("s", number, forward, tid),
        row("cpu_op", "autograd::engine::evaluate_function: MmBackward0", backward, 10, AUTOGRAD),
        row("cpu_op", "MmBackward0", backward + 1, 8, AUTOGRAD),
        launch(backward + 2, 2 * number + 1, AUTOGRAD),
        kernel("k", backward + 7, duration, 2 * number + 1),
        flow("f", number, backward + 1, AUTOGRAD),
    ]


def model(forward: str = "forward", backward: str = "backward") -> Events:
    ranges = [
        ("step 0", 0, 1000),
        (forward, 10, 400),
        ("layer 0", 20, 100),
        ("layer 1", 120, 200),
        (backward, 500, 900),
    ]
    return [*(span(*range_) for range_ in ranges), *linked(1, 30, 700, 100), *linked(2, 130, 600, 50)]


def opened_with(folder: Path, events: Events) -> OpenedTrace:
    threads = [thread_name(TID, "thread 100 (python)"), thread_name(AUTOGRAD, "thread 117 (pt_autograd_0)")]
    return read_trace(written(folder, [*threads, *events]))


def tree(opened: OpenedTrace) -> dict[str, int]:
    return {row.path: row.kernel_time_ns for row in opened.ranges().ranges}


@pytest.mark.parametrize("names", [("forward", "backward"), ("model_fwd", "model_bwd")])
def test_linked_work_lies_under_the_backward_range_and_not_in_the_forward_one(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    opened = opened_with(tmp_path, model(*names))
    layer, mirror = opened.kernels("layer 0"), opened.kernels(f"{names[1]}/layer 0")
    assert (layer.kernel_count, layer.kernel_time_ns) == (1, 1000)
    assert (mirror.kernel_count, mirror.kernel_time_ns, mirror.wall_ns) == (1, 100_000, 0)
    assert (mirror.range_evidence.direct_ns, mirror.range_evidence.sequence_ns) == (0, 100_000)
    assert opened.kernels(names[0]).kernel_time_ns == 2000
    assert opened.kernels(names[1]).kernel_time_ns == 150_000
    assert opened.kernels("step 0").kernel_time_ns == 152_000


def test_the_tree_shows_linked_work_once_and_its_children_sum_to_their_parent(tmp_path: Path) -> None:
    assert tree(opened_with(tmp_path, model())) == {
        "step 0": 152_000,
        "step 0/forward": 2000,
        "step 0/forward/layer 0": 1000,
        "step 0/forward/layer 1": 1000,
        "step 0/backward": 150_000,
        "step 0/backward/layer 1": 50_000,
        "step 0/backward/layer 0": 100_000,
    }


def test_backward_work_of_what_a_checkpoint_ran_again_is_no_recomputation(tmp_path: Path) -> None:
    ranges = [("step 0", 0, 1000), ("forward", 10, 400), ("layer 0", 20, 100), ("backward", 500, 900)]
    again = [span("recompute", 510, 600, AUTOGRAD), span("layer 0", 520, 590, AUTOGRAD)]
    events = [*(span(*range_) for range_ in ranges), *again, launch(30, 1), kernel("k", 35, 1, 1)]
    assert tree(opened_with(tmp_path, [*events, *linked(5, 530, 700, 100, AUTOGRAD)])) == {
        "step 0": 102_000,
        "step 0/forward": 1000,
        "step 0/forward/layer 0": 1000,
        "step 0/backward": 101_000,
        "step 0/backward/recompute": 1000,
        "step 0/backward/recompute/layer 0": 1000,
        "step 0/backward/layer 0": 100_000,
    }


@pytest.mark.parametrize(
    ("request_", "total_ns"),
    [
        ("layer *", 2000),
        ("forward/layer 0", 1000),
        ("backward/layer 0", 100_000),
        ("/step 0/backward/layer 1", 50_000),
        ("*/layer 0", 101_000),
        ("back*/lay*", 150_000),
    ],
)
def test_only_a_path_through_the_backward_range_selects_linked_work(
    tmp_path: Path, request_: str, total_ns: int
) -> None:
    assert opened_with(tmp_path, model()).kernels(request_).kernel_time_ns == total_ns


def test_a_path_of_mirrors_only_matches_nothing(tmp_path: Path) -> None:
    opened = opened_with(tmp_path, [*model(), span("attention", 25, 60)])
    assert opened.kernels("layer 0/attention").kernel_time_ns == 1000
    assert opened.kernels("backward/layer 0/attention").kernel_time_ns == 100_000
    with pytest.raises(UsageError, match="no range 'layer 1/attention'"):
        opened.kernels("layer 1/attention")


def test_a_trace_without_a_backward_range_gets_one_for_linked_work(tmp_path: Path) -> None:
    opened = opened_with(tmp_path, [span("layer 0", 20, 100), *linked(1, 30, 700, 100)])
    assert opened.kernels("layer 0").kernel_time_ns == 1000
    assert opened.kernels("backward/layer 0").kernel_time_ns == 100_000
    assert opened.kernels("backward").kernel_time_ns == 100_000
    # Nothing was open when autograd launched it: for the capture's ledger it lies outside every range.
    assert opened.attribution.ledger.outside_ns == 100_000


def test_work_with_ranges_of_its_own_inside_backward_keeps_them(tmp_path: Path) -> None:
    opened = opened_with(tmp_path, [*model(), span("layer 0", 695, 720, AUTOGRAD)])
    result = opened.kernels("backward/layer 0")
    assert (result.range_evidence.direct_ns, result.range_evidence.sequence_ns) == (100_000, 0)


def test_ranges_next_to_backward_without_a_phase_around_them_are_kept(tmp_path: Path) -> None:
    ranges = [span("step 0", 0, 1000), span("layer 0", 20, 100), span("backward", 500, 900)]
    opened = opened_with(tmp_path, [*ranges, *linked(1, 30, 700, 100)])
    assert opened.kernels("backward/layer 0").kernel_time_ns == 100_000


def test_thread_only_follows_no_links(tmp_path: Path) -> None:
    opened_with(tmp_path, model())
    opened = read_trace(tmp_path / "trace.json", thread_only=True)
    with pytest.raises(UsageError):
        opened.kernels("backward/layer 0")


def test_every_command_reads_a_trace_whose_links_add_ranges(tmp_path: Path) -> None:
    opened_with(tmp_path, [*model(), span("ProfilerStep#1", 0, 1000), span("ProfilerStep#2", 1000, 1010)])
    for command in ("summary", "kernels", "efficiency", "ranges"):
        done = run_command(command, tmp_path / "trace.json")
        assert done.returncode == 0, done.stderr


def test_a_step_that_links_repeat_under_its_backward_pass_is_one_step(tmp_path: Path) -> None:
    events = [
        row("user_annotation", "step 5", 100, 900),
        flow("s", 1, 200, TID),
        row("cpu_op", "DivBackward0", 300, 50, AUTOGRAD),
        flow("f", 1, 300, AUTOGRAD),
        launch(310, 7, AUTOGRAD),
        kernel("k", 320, 5, 7),
    ]
    opened = read_trace(written(tmp_path, events))
    assert [opened.trace.names[name] for name in opened.trace.ranges.name].count("step 5") == 2
    assert measured_ranges(opened.attribution)["step"].tolist() == [0]
    done = run_command("report", tmp_path / "trace.json", "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
