"""Backward work placed by torch.profiler's links: under paths of its own, never in the forward ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.time_account.steps import measured_ranges
from profkit.errors import UsageError
from tests.in_process import run_command
from tests.kineto_builder import AUTOGRAD as AUTOGRAD_TID
from tests.kineto_builder import TID, flow, kernel, launch, row, written

MAIN, AUTOGRAD = 10, 11


class KinetoBuilder:
    """Collects events of a torch.profiler trace, times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 10, "tid": tid, "args": {"name": f"thread {tid} ({name})"}}
            for tid, name in ((MAIN, "python"), (AUTOGRAD, "pt_autograd_0"))
        ]
        self.correlation = 0

    def span(self, cat: str, name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 10, "tid": tid, "ts": start, "dur": end - start, "args": args}
        )

    def annotate(self, name: str, start: float, end: float, tid: int = MAIN) -> None:
        self.span("user_annotation", name, start, end, tid)

    def launch(self, start: float, duration: float, tid: int = MAIN) -> None:
        self.correlation += 1
        self.span("cuda_runtime", "cudaLaunchKernel", start, start + 1, tid, correlation=self.correlation)
        self.events.append(
            {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": start + 5, "dur": duration}
            | {"args": {"correlation": self.correlation, "device": 0, "stream": 7}}
        )

    def operator_pair(self, name: str, forward: float, backward: float, duration: float, tid: int = MAIN) -> None:
        """Add a forward operator with a kernel of 1 µs and its backward operator with one of ``duration``."""
        flow = len(self.events)
        self.span("cpu_op", f"aten::{name}", forward, forward + 10, tid)
        self.launch(forward + 2, 1, tid)
        self.events.append({"ph": "s", "id": flow, "cat": "fwdbwd", "name": "fwdbwd", "pid": 10, "tid": tid})
        self.events[-1]["ts"] = forward
        node = f"autograd::engine::evaluate_function: {name}Backward0"
        self.span("cpu_op", node, backward, backward + 10, AUTOGRAD)
        self.span("cpu_op", f"{name}Backward0", backward + 1, backward + 9, AUTOGRAD)
        self.launch(backward + 2, duration, AUTOGRAD)
        self.events.append(
            {"ph": "f", "id": flow, "cat": "fwdbwd", "name": "fwdbwd", "pid": 10, "tid": AUTOGRAD, "bp": "e"}
        )
        self.events[-1]["ts"] = backward + 1

    def open(self, folder: Path) -> OpenedTrace:
        path = folder / "t.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return read_trace(path)


def _model(names: tuple[str, str]) -> KinetoBuilder:
    """Return one step of two layers, its phases named as given."""
    builder = KinetoBuilder()
    builder.annotate("step 0", 0, 1000)
    builder.annotate(names[0], 10, 400)
    builder.annotate("layer 0", 20, 100)
    builder.annotate("layer 1", 120, 200)
    builder.annotate(names[1], 500, 900)
    builder.operator_pair("mm", 30, 700, 100)
    builder.operator_pair("add", 130, 600, 50)
    return builder


@pytest.mark.parametrize("names", [("forward", "backward"), ("model_fwd", "model_bwd")])
def test_linked_work_lies_under_the_backward_range_and_not_in_the_forward_one(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    opened = _model(names).open(tmp_path)
    layer, mirror = opened.kernels("layer 0"), opened.kernels(f"{names[1]}/layer 0")
    assert (layer.kernel_count, layer.kernel_time_ns) == (1, 1000)
    assert (mirror.kernel_count, mirror.kernel_time_ns, mirror.wall_ns) == (1, 100_000, 0)
    assert mirror.range_evidence is not None
    assert (mirror.range_evidence.direct_ns, mirror.range_evidence.sequence_ns) == (0, 100_000)
    assert opened.kernels(names[0]).kernel_time_ns == 2000
    assert opened.kernels(names[1]).kernel_time_ns == 150_000
    assert opened.kernels("step 0").kernel_time_ns == 152_000


def test_the_tree_shows_linked_work_once_and_its_children_sum_to_their_parent(tmp_path: Path) -> None:
    rows = {row.path: row.kernel_time_ns for row in _model(("forward", "backward")).open(tmp_path).ranges().ranges}
    assert rows == {
        "step 0": 152_000,
        "step 0/forward": 2000,
        "step 0/forward/layer 0": 1000,
        "step 0/forward/layer 1": 1000,
        "step 0/backward": 150_000,
        "step 0/backward/layer 1": 50_000,
        "step 0/backward/layer 0": 100_000,
    }


def test_backward_work_of_what_a_checkpoint_ran_again_is_no_recomputation(tmp_path: Path) -> None:
    builder = KinetoBuilder()
    builder.annotate("step 0", 0, 1000)
    builder.annotate("forward", 10, 400)
    builder.annotate("layer 0", 20, 100)
    builder.launch(30, 1)
    builder.annotate("backward", 500, 900)
    builder.annotate("recompute", 510, 600, AUTOGRAD)
    builder.annotate("layer 0", 520, 590, AUTOGRAD)
    builder.operator_pair("mm", 530, 700, 100, AUTOGRAD)
    rows = {row.path: row.kernel_time_ns for row in builder.open(tmp_path).ranges().ranges}
    assert rows == {
        "step 0": 102_000,
        "step 0/forward": 1000,
        "step 0/forward/layer 0": 1000,
        "step 0/backward": 101_000,
        "step 0/backward/recompute": 1000,
        "step 0/backward/recompute/layer 0": 1000,
        "step 0/backward/layer 0": 100_000,
    }


def test_evidence_sums_to_the_range_and_the_ledger_to_the_capture(tmp_path: Path) -> None:
    opened = _model(("forward", "backward")).open(tmp_path)
    for name in ("layer *", "backward/layer *", "*/layer 1", "step 0", "backward"):
        result = opened.kernels(name)
        evidence = result.range_evidence
        assert evidence is not None
        assert evidence.direct_ns + evidence.inferred_ns + evidence.sequence_ns == result.total_ns
    ledger = opened.attribution.ledger
    assert (ledger.direct_ns, ledger.inferred_ns, ledger.total_ns) == (2000, 150_000, 152_000)


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
    assert _model(("forward", "backward")).open(tmp_path).kernels(request_).kernel_time_ns == total_ns


def test_a_path_of_mirrors_only_matches_nothing(tmp_path: Path) -> None:
    builder = _model(("forward", "backward"))
    builder.annotate("attention", 25, 60)
    opened = builder.open(tmp_path)
    assert opened.kernels("layer 0/attention").kernel_time_ns == 1000
    assert opened.kernels("backward/layer 0/attention").kernel_time_ns == 100_000
    with pytest.raises(UsageError, match="no range 'layer 1/attention'"):
        opened.kernels("layer 1/attention")


def test_a_trace_without_a_backward_range_gets_one_for_linked_work(tmp_path: Path) -> None:
    builder = KinetoBuilder()
    builder.annotate("layer 0", 20, 100)
    builder.operator_pair("mm", 30, 700, 100)
    opened = builder.open(tmp_path)
    assert opened.kernels("layer 0").kernel_time_ns == 1000
    assert opened.kernels("backward/layer 0").kernel_time_ns == 100_000
    assert opened.kernels("backward").kernel_time_ns == 100_000
    # Nothing was open when autograd launched it: for the capture's ledger it lies outside every range.
    assert opened.attribution.ledger.outside_ns == 100_000


def test_work_with_ranges_of_its_own_inside_backward_keeps_them(tmp_path: Path) -> None:
    builder = _model(("forward", "backward"))
    builder.annotate("layer 0", 695, 720, AUTOGRAD)
    opened = builder.open(tmp_path)
    result = opened.kernels("backward/layer 0")
    assert result.range_evidence is not None
    assert (result.range_evidence.direct_ns, result.range_evidence.sequence_ns) == (100_000, 0)


def test_ranges_next_to_backward_without_a_phase_around_them_are_kept(tmp_path: Path) -> None:
    builder = KinetoBuilder()
    builder.annotate("step 0", 0, 1000)
    builder.annotate("layer 0", 20, 100)
    builder.annotate("backward", 500, 900)
    builder.operator_pair("mm", 30, 700, 100)
    assert builder.open(tmp_path).kernels("backward/layer 0").kernel_time_ns == 100_000


def test_thread_only_follows_no_links(tmp_path: Path) -> None:
    _model(("forward", "backward")).open(tmp_path)
    opened = read_trace(tmp_path / "t.json", thread_only=True)
    with pytest.raises(UsageError):
        opened.kernels("backward/layer 0")


def test_rows_are_numbered_by_one_trace(tmp_path: Path) -> None:
    opened = _model(("forward", "backward")).open(tmp_path)
    assert opened.trace is opened.attribution.trace
    assert len(opened.trace.ranges) > len(opened.recorded.ranges)
    assert opened.attribution.is_mirror[len(opened.recorded.ranges) :].all()


@pytest.mark.parametrize("command", ["summary", "report", "kernels", "efficiency", "ranges"])
def test_every_command_reads_a_trace_whose_links_add_ranges(tmp_path: Path, command: str) -> None:
    builder = _model(("forward", "backward"))
    builder.annotate("ProfilerStep#1", 0, 1000)
    builder.annotate("ProfilerStep#2", 1000, 1010)
    builder.open(tmp_path)
    output = ["-o", tmp_path / "page.html"] if command == "report" else []
    done = run_command(command, tmp_path / "t.json", *output)
    assert done.returncode == 0, done.stderr


def test_a_step_that_links_repeat_under_its_backward_pass_is_one_step(tmp_path: Path) -> None:
    events = [
        row("user_annotation", "step 5", 100, 900),
        flow("s", 1, 200, TID),
        row("cpu_op", "DivBackward0", 300, 50, AUTOGRAD_TID),
        flow("f", 1, 300, AUTOGRAD_TID),
        launch(310, 7, AUTOGRAD_TID),
        kernel("k", 320, 5, 7),
    ]
    opened = read_trace(written(tmp_path, events))
    assert [opened.trace.names[name] for name in opened.trace.ranges.name].count("step 5") == 2
    assert measured_ranges(opened.attribution)["step"].tolist() == [0]
    done = run_command("report", tmp_path / "trace.json", "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
