"""Reading torch.profiler's Chrome traces: what counts, whose launch it was, and what bad input gets."""

from __future__ import annotations

import gc
import gzip
import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.errors import TraceError
from profkit.trace.columns import NO_LAUNCH, Trace
from profkit.trace.kineto import read_kineto
from profkit.trace.kineto_events import load_chrome_trace, parse_microseconds
from profkit.trace.operators import OperatorForest
from tests.captures import capture

PID, TID, AUTOGRAD = 100, 100, 117


def row(cat: str, name: str, ts: Any, dur: Any, tid: Any = TID, *, pid: Any = PID, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: Any, dur: Any, correlation: int, **more: Any) -> dict[str, Any]:
    return row("kernel", name, ts, dur, 7, pid=0, device=0, stream=7, correlation=correlation, **more)


def launch(ts: Any, correlation: int, tid: int = TID, name: str = "cudaLaunchKernel", pid: int = PID) -> dict[str, Any]:
    category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
    return row(category, name, ts, 1, tid, pid=pid, correlation=correlation)


def flow(phase: str, flow_id: int, ts: Any, tid: int) -> dict[str, Any]:
    return {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": flow_id, "pid": PID, "tid": tid, "ts": ts}


def thread_name(tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "ts": 0, "args": {"name": name}}


def written(folder: Path, events: list[Any], name: str = "trace.json", **header: Any) -> Path:
    path = folder / name
    content = json.dumps({"schemaVersion": 1, **header, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    return path


def read(folder: Path, events: list[Any], **header: Any) -> Trace:
    return read_kineto(written(folder, events, **header))


def work_names(trace: Trace) -> list[str]:
    return [trace.names[i] for i in trace.work.name]


# What counts


def test_the_shared_capture() -> None:
    path = capture("small.kineto.json.gz")
    before = path.read_bytes()
    trace = read_kineto(path)
    # A second route: the float durations, one by one.
    events = json.loads(gzip.decompress(before))["traceEvents"]
    expected = sum(round(event["dur"] * 1000) for event in events if event.get("cat") == "kernel")
    assert (len(trace.work), int(trace.work.duration_ns.sum())) == (3008, expected) == (3008, 57_661_409)
    assert trace.measure == "gpu-kernel"
    assert trace.product == "PyTorch Kineto (trace schema 1, CUDA 13.0)"
    assert trace.gpus == ("NVIDIA H200",)
    assert (len(trace.copies), int(trace.copies.is_memset.sum())) == (316, 266)
    assert sorted(trace.names[i] for i in trace.ranges.name) == sorted(
        ["Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"] * 2
    )
    assert sorted(trace.thread_names.values()) == ["pt_autograd_0", "python3"]
    assert {trace.thread_names[thread] for thread in trace.main_threads} == {"python3"}
    # Every kernel has its launch, and every one of the autograd thread's leads back to a forward operator.
    assert (trace.work.launch_thread != NO_LAUNCH).all()
    assert trace.work.sequence is not None
    assert trace.origins is not None
    on_autograd = ~np.isin(trace.work.launch_thread, list(trace.main_threads))
    assert on_autograd.sum() == 1914
    assert ((trace.work.sequence >= 0) == on_autograd).all()
    origin = trace.work.sequence[on_autograd]
    assert np.isin(trace.origins.thread[origin], list(trace.main_threads)).all()
    assert (trace.origins.start_ns[origin] < trace.work.launch_ns[on_autograd]).all()
    assert (np.diff(trace.calls.start_ns) >= 0).all()
    assert len(trace.calls) == 3333 + 194
    assert path.read_bytes() == before


def test_annotations_of_the_host_are_ranges_and_those_of_the_gpu_are_not(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            row("user_annotation", "forward", 0, 10),
            row("gpu_user_annotation", "forward", 5, 20, 7, pid=0),
            launch(1, 1),
            kernel("k", 12, 4, 1),
        ],
    )
    assert [trace.names[i] for i in trace.ranges.name] == ["forward"]
    assert (trace.ranges.start_ns.tolist(), trace.ranges.end_ns.tolist()) == ([0], [10_000])
    assert trace.names[trace.ranges.domain[0]] == ""
    assert int(trace.work.duration_ns.sum()) == 4000


def test_launches_through_runtime_and_driver_and_graphs(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            kernel("of the runtime", 20, 1, 1),
            kernel("of the driver", 22, 1, 2),
            kernel("node", 24, 1, 3, **{"graph node id": 1}),
            kernel("node", 26, 1, 3, **{"graph node id": 2}),
            kernel("orphan", 28, 1, 99),
            kernel("uncorrelated", 30, 1, 0),
            launch(3, 3, name="cudaGraphLaunch"),
            launch(2, 2, name="cuLaunchKernelEx"),
            launch(1, 1),
            launch(4, 0, name="cudaDeviceSynchronize"),
            row("gpu_memcpy", "Memcpy HtoD", 32, 2, 7, pid=0, device=0, stream=7, correlation=5, bytes=64),
            row("gpu_memset", "Memset (Device)", 35, 3, 7, pid=0, device=0, stream=7, correlation=6, bytes=8),
            launch(5, 5, name="cudaMemcpyAsync"),
            launch(6, 6, name="cudaMemsetAsync"),
        ],
    )
    assert trace.work.launch_ns[trace.work.launch_thread != NO_LAUNCH].tolist() == [1000, 2000, 3000, 3000]
    assert (trace.work.launch_thread == NO_LAUNCH).tolist() == [False] * 4 + [True] * 2
    assert trace.work.process.tolist() == [PID] * 6
    assert trace.work.stream.tolist() == [7] * 6
    assert not trace.work.is_graph.any()
    assert [trace.names[i] for i in trace.calls.name][:3] == ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"]
    assert trace.calls.has_work.tolist() == [True, True, True, False, True, True]
    assert (trace.copies.byte_count.tolist(), trace.copies.is_memset.tolist()) == ([64, 8], [False, True])
    assert (trace.copies.launch_ns.tolist(), (trace.copies.end_ns - trace.copies.start_ns).tolist()) == (
        [5000, 6000],
        [2000, 3000],
    )


def test_of_a_runtime_and_a_driver_row_with_one_id_the_outer_launched(tmp_path: Path) -> None:
    trace = read(tmp_path, [launch(2, 1, name="cuLaunchKernel"), launch(1, 1), kernel("k", 9, 1, 1)])
    assert trace.work.launch_ns.tolist() == [1000]
    assert trace.calls.has_work.all()


def test_processes_that_share_correlation_ids_claim_nothing(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [launch(1, 1), launch(2, 1, pid=200, tid=200), launch(3, 2, pid=200, tid=200),
         kernel("either's", 9, 1, 1), kernel("the second's", 11, 1, 2)],
    )  # fmt: skip
    assert (trace.work.launch_thread == NO_LAUNCH).tolist() == [True, False]
    assert trace.work.process.tolist()[1] == 200
    assert "1 GPU rows carry a correlation id" in trace.notes[0]


def test_old_traces_say_it_in_capitals_and_text(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            row("Operator", "aten::mm", 1614800519473000, 9, "3239786240"),
            {**row("Runtime", "cudaLaunchKernel", 1614800519473001, 2, "3239786240"), "args": {"correlation": "8"}},
            {**row("Kernel", "sgemm", 1614800519473220, 5, "stream 7", pid=0), "args": {"device": 0, "correlation": 8}},
            {**row("Memcpy", "Memcpy HtoD", 1614800519473230, 5, "stream 7", pid=0), "args": {"bytes": 200}},
            row("user_annotation", "ProfilerStep#1", 1614800519472000, 2000, 3239786240),
        ],
    )
    assert work_names(trace) == ["sgemm"]
    assert trace.work.launch_ns.tolist() == [1614800519473001000]
    assert trace.work.stream.tolist() == [7]
    assert trace.ranges.thread.tolist() == trace.work.launch_thread.tolist()
    assert len(trace.copies) == 1


# Backward's way to forward


def backward_events() -> list[dict[str, Any]]:
    node = "autograd::engine::evaluate_function: "
    return [
        row("cpu_op", "aten::mul", 10, 5),
        row("cpu_op", "aten::mm", 20, 5),
        flow("s", 1, 10, TID),
        flow("s", 2, 20, TID),
        row("cpu_op", node + "MmBackward0", 100, 20, AUTOGRAD),
        row("cpu_op", "MmBackward0", 102, 10, AUTOGRAD),
        flow("f", 2, 102, AUTOGRAD),
        row("cpu_op", "aten::mm", 103, 8, AUTOGRAD),
        launch(104, 1, AUTOGRAD),
        row("cpu_op", "aten::add_", 114, 4, AUTOGRAD),  # the engine sums gradients: in the node, not in the operator
        launch(115, 2, AUTOGRAD),
        row("cpu_op", node + "MulBackward0", 130, 20, AUTOGRAD),
        row("cpu_op", "MulBackward0", 131, 10, AUTOGRAD),
        flow("f", 1, 131, AUTOGRAD),
        launch(132, 3, AUTOGRAD),
        row("cpu_op", node + "torch::autograd::AccumulateGrad", 160, 20, AUTOGRAD),
        launch(165, 4, AUTOGRAD),
        launch(190, 5, AUTOGRAD),
        launch(21, 6),
        *(kernel(f"k{i}", 200 + 10 * i, 5, i) for i in range(1, 7)),
        flow("s", 9, 30, TID),  # a flow that ends nowhere
    ]


def origins_of(trace: Trace) -> dict[str, int | None]:
    assert trace.work.sequence is not None
    assert trace.origins is not None
    starts = [*trace.origins.start_ns.tolist(), None]
    return dict(zip(work_names(trace), [starts[i] for i in trace.work.sequence], strict=True))


def test_backward_kernels_lead_to_their_forward_operator(tmp_path: Path) -> None:
    trace = read(tmp_path, backward_events())
    mm, mul = 20_000, 10_000
    assert origins_of(trace) == {"k1": mm, "k2": mm, "k3": mul, "k4": None, "k5": None, "k6": None}
    assert trace.origins is not None
    assert set(trace.origins.thread.tolist()) == set(trace.main_threads)


def test_kernels_know_the_innermost_operator_that_launched_them(tmp_path: Path) -> None:
    trace = read(tmp_path, backward_events())
    assert trace.work.operator is not None
    names = dict(zip(work_names(trace), [[*trace.names, None][i] for i in trace.work.operator], strict=True))
    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    assert names == {
        "k1": "aten::mm",
        "k2": "aten::add_",
        "k3": "MulBackward0",
        "k4": node,
        "k5": None,
        "k6": "aten::mm",
    }


def test_a_recomputation_leads_to_its_own_forward(tmp_path: Path) -> None:
    node = "autograd::engine::evaluate_function: "
    trace = read(
        tmp_path,
        [
            row("cpu_op", "CheckpointFunction", 10, 5),
            flow("s", 1, 10, TID),
            row("cpu_op", node + "CheckpointFunctionBackward", 100, 90, AUTOGRAD),
            row("cpu_op", "CheckpointFunctionBackward", 101, 88, AUTOGRAD),
            flow("f", 1, 101, AUTOGRAD),
            row("cpu_op", "aten::mm", 110, 10, AUTOGRAD),
            flow("s", 2, 110, AUTOGRAD),
            launch(111, 1, AUTOGRAD),
            row("cpu_op", node + "MmBackward0", 140, 20, AUTOGRAD),
            row("cpu_op", "MmBackward0", 141, 18, AUTOGRAD),
            flow("f", 2, 141, AUTOGRAD),
            launch(145, 2, AUTOGRAD),
            kernel("k1", 200, 5, 1),
            kernel("k2", 210, 5, 2),
        ],
    )
    assert origins_of(trace) == {"k1": 10_000, "k2": 110_000}


def test_a_thread_keeps_its_own_name_before_its_process_name(tmp_path: Path) -> None:
    process = {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "args": {"name": "python3"}}
    names = [thread_name(TID, "thread 100 (python3)"), thread_name(AUTOGRAD, "thread 117 (pt_autograd_0)"),
             thread_name(AUTOGRAD, "thread 117 (python3)"), thread_name(999, "thread 999 (idle)")]  # fmt: skip
    for order in (names, names[::-1]):
        trace = read(tmp_path, [process, *order, *backward_events()])
        assert sorted(trace.thread_names.values()) == ["pt_autograd_0", "python3"]


def test_a_thread_of_autograd_nodes_alone_is_known_without_a_name(tmp_path: Path) -> None:
    trace = read(tmp_path, [thread_name(AUTOGRAD, "thread 117 (python3)"), *backward_events()])
    autograd = {thread for thread, name in trace.thread_names.items() if name.startswith("pt_autograd")}
    assert len(autograd) == 1
    assert not autograd & trace.main_threads
    mixed = [*backward_events(), row("cpu_op", "aten::mm", 300, 5, AUTOGRAD)]
    assert not read(tmp_path, mixed).thread_names


# CPU operators


def test_cpu_operators_count_by_self_time(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            row("user_annotation", "forward", 0, 100),
            row("cpu_op", "aten::linear", 10, 50),
            row("cpu_op", "aten::addmm", 20.125, 30.25),
            row("cpu_op", "aten::relu", 60, 5),
            row("cpu_op", "aten::mm", 10, 7.5, 55),
        ],
        distributedInfo={"backend": "gloo", "rank": 1, "world_size": 4},
    )
    assert trace.measure == "cpu-operator"
    by_name = dict(zip(work_names(trace), trace.work.duration_ns.tolist(), strict=True))
    assert by_name == {"aten::linear": 19_750, "aten::addmm": 30_250, "aten::relu": 5_000, "aten::mm": 7_500}
    assert trace.work.launch_ns.tolist() == trace.work.start_ns.tolist()
    assert len(set(trace.work.launch_thread.tolist())) == 2
    assert (trace.work.sequence, trace.origins) == (None, None)
    assert len(trace.ranges) == 1
    assert len(trace.copies) == 0
    assert trace.has_kernel_table
    assert trace.product == "PyTorch Kineto (trace schema 1, rank 1 of 4)"


def test_copies_without_kernels_leave_the_operators_to_measure(tmp_path: Path) -> None:
    copy = row("gpu_memcpy", "Memcpy HtoD", 4, 3, 7, pid=0, device=0, stream=7, correlation=1, bytes=64)
    trace = read(tmp_path, [row("cpu_op", "aten::to", 1, 5), launch(2, 1, name="cudaMemcpyAsync"), copy])
    assert (trace.measure, work_names(trace), len(trace.copies)) == ("cpu-operator", ["aten::to"], 1)
    assert "1 GPU copies but no kernel" in trace.notes[0]
    trace = read(tmp_path, [launch(2, 1, name="cudaMemcpyAsync"), copy])
    assert (trace.measure, len(trace.work), len(trace.copies)) == ("gpu-kernel", 0, 1)
    with pytest.raises(TraceError, match="1 copies and fills of GPU memory, but neither a GPU kernel nor a CPU op"):
        read_trace(tmp_path / "trace.json").kernels()


def test_kernels_of_impossible_times_alone_leave_the_operators_to_measure(tmp_path: Path) -> None:
    trace = read(tmp_path, [row("cpu_op", "aten::mm", 1, 5), launch(2, 1), kernel("k", 0, 0, 1)])
    assert (trace.measure, work_names(trace)) == ("cpu-operator", ["aten::mm"])
    assert "1 row of kernels with impossible times" in trace.diagnostics[0].text


def test_an_end_beyond_a_century_is_impossible(tmp_path: Path) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("k", 2, 5, 1), kernel("h", 4 * 10**15, 4 * 10**15, 0)])
    assert work_names(trace) == ["k"]
    assert [diagnostic.severity for diagnostic in trace.diagnostics] == ["error"]


def test_a_mark_of_utf8_may_stand_first(tmp_path: Path) -> None:
    path = written(tmp_path, [row("cpu_op", "aten::mm", 1, 5)])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_trace(path).kernels().kernel_count == 1


def test_a_range_that_rounding_let_outlive_the_one_around_it_lies_within(tmp_path: Path) -> None:
    rows = [row("user_annotation", "forward", 0, 100), row("user_annotation", "layer", 50, 51)]
    path = written(tmp_path, [*rows, row("cpu_op", "aten::mm", 60, 5)])
    assert [line.path for line in read_trace(path).ranges().ranges] == ["forward", "forward/layer"]


def test_launches_without_gpu_work_are_said(tmp_path: Path) -> None:
    trace = read(tmp_path, [row("cpu_op", "aten::mm", 1, 5), launch(2, 1)])
    assert trace.measure == "cpu-operator"
    assert trace.calls.has_work.tolist() == [False]
    assert "1 launches but no GPU work" in trace.notes[0]


def test_annotations_alone_are_a_trace_without_work(tmp_path: Path) -> None:
    trace = read(tmp_path, [row("user_annotation", "forward", 1, 5)])
    assert (len(trace.work), len(trace.ranges), trace.has_kernel_table) == (0, 1, False)


@st.composite
def nested_operators(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Return (start, end) of operators that nest, in ns, in any order."""

    def inside(start: int, end: int, depth: int) -> list[tuple[int, int]]:
        cuts = sorted(draw(st.lists(st.integers(start, end), max_size=6)))
        found = []
        for low, high in list(pairwise(cuts))[::2]:
            found.append((low, high))
            found += inside(low, high, depth - 1) if depth else []
        return found

    return draw(st.permutations(inside(1, draw(st.integers(1, 10**6)), 3)))


def union_ns(intervals: list[tuple[int, int]]) -> int:
    covered, until = 0, -(10**30)
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


@given(st.lists(nested_operators(), min_size=1, max_size=3), st.integers(0, 8 * 10**18 // 10**3))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_self_times_sum_to_top_level_time(tmp_path: Path, threads: list[list[tuple[int, int]]], base_us: int) -> None:
    base_us = base_us // 10**3
    events = [
        # As Kineto prints it: microseconds with three decimals, more digits than a double holds.
        row("cpu_op", "op", f"{base_us + s // 1000}.{s % 1000:03d}", f"{(e - s) // 1000}.{(e - s) % 1000:03d}", TID + t)
        for t, operators in enumerate(threads)
        for s, e in operators
    ]
    if not any(e > s for operators in threads for s, e in operators):
        return
    trace = read(tmp_path, events)
    assert int(trace.work.duration_ns.sum()) == sum(map(union_ns, threads))
    assert (trace.work.duration_ns >= 0).all()
    starts = sorted(base_us * 1000 + s for operators in threads for s, e in operators)
    assert trace.work.start_ns.tolist() == starts


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 1)), max_size=30))
def test_self_times_close_where_rounding_lets_children_stick_out(rows: list[tuple[int, int, int]]) -> None:
    start, duration, thread = (np.array([r[i] for r in rows], dtype=np.int64) for i in range(3))
    forest = OperatorForest(start, start + duration, thread)
    assert (forest.self_ns >= 0).all()
    for one in (0, 1):
        mine = [(s, s + d) for s, d, t in rows if t == one]
        assert int(forest.self_ns[thread == one].sum()) == union_ns(mine)
    # Who is innermost at a moment: the one that began last (the shorter, the later given) and is still open.
    moments = np.repeat(np.arange(95), 2)
    threads = np.tile([0, 1], 95)
    for moment, one, found in zip(moments, threads, forest.innermost_at(moments, threads), strict=True):
        is_open = [(s, -d, i) for i, (s, d, t) in enumerate(rows) if t == one and s <= moment < s + d]
        assert found == (max(is_open)[2] if is_open else -1)


# Times


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4336530559579.979", 4336530559579979),
        ("1700000000000000.123", 1700000000000000123),  # as a double it would end in .125
        ("0.5", 500),
        ("2.1", 2100),
        ("7", 7000),
        ("-3.25", -3250),
        ("1.5e3", 1_500_000),
        ("0.0004", 0),
        ("0.0005", 0),  # half to even
        ("12.34567", 12346),
        (17, 17000),
        ("NaN", None),
        ("Infinity", None),
        ("1e999999999", None),
        ("1e-999999999", 0),
        ("sNaN", None),
        ("9" * 30, None),
        (2**70, None),
        ("soon", None),
        ("", None),
        ("1.", 1000),
        ("²", None),
        (None, None),
        ([], None),
    ],
)
def test_microseconds(text: object, expected: int | None) -> None:
    assert parse_microseconds(text) == expected


@given(st.integers(0, 2**61))
def test_microseconds_are_exact(ns: int) -> None:
    assert parse_microseconds(f"{ns // 1000}.{ns % 1000:03d}") == ns


def test_times_come_through_the_file_exactly(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1700000000000000.123,'
        ' "dur": 2.049, "args": {"memory bandwidth (GB/s)": inf, "x": -nan}}]}'
    )
    trace = read_kineto(path)
    assert trace.work.start_ns.tolist() == [1700000000000000123]
    assert trace.work.duration_ns.tolist() == [2049]


# Rows of unexpected shape


def test_rows_of_unexpected_shape_are_ignored(tmp_path: Path) -> None:
    odd = [
        row("Trace", "PyTorch Profiler (0)", 0, 100, "PyTorch Profiler", pid="Spans"),
        {"ph": "i", "name": "Iteration Start", "pid": "Traces", "tid": "Trace", "ts": 1},
        row("user_annotation", "nowhere", 1, 5, pid="Spans"),
        {"ph": "X", "cat": "user_annotation", "name": "timeless", "pid": PID, "tid": TID},
        {"ph": "M", "name": "thread_name", "pid": PID, "tid": TID, "args": None},
        {"ph": "f", "cat": "fwdbwd", "id": [], "pid": PID, "tid": TID},
        {"cat": 3},
        7,
        None,
    ]
    trace = read(tmp_path, [*odd, launch(1, 1), kernel("k", 5, 1, 1)])
    assert (work_names(trace), len(trace.ranges), trace.diagnostics) == (["k"], 0, ())


@pytest.mark.parametrize(
    ("ts", "dur"), [(5, -1), (5, None), (None, 5), ("NaN", 5), (5, "NaN"), (0, 0), ("5", "Infinity")]
)
def test_impossible_work_is_left_out_and_said(tmp_path: Path, ts: object, dur: object) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("good", 5, 1, 1), kernel("bad", ts, dur, 1)])
    assert work_names(trace) == ["good"]
    (diagnostic,) = trace.diagnostics
    assert diagnostic.severity == "error"
    assert "1 row of kernels with impossible times left out, the first named 'bad'" in diagnostic.text
    cpu = read(tmp_path, [row("cpu_op", "good", 5, 1), row("cpu_op", "bad", ts, dur)])
    assert work_names(cpu) == ["good"]
    assert "CPU operators" in cpu.diagnostics[0].text


@pytest.mark.parametrize("unfinished", [{"dur": -1}, {"dur": None}, {"dur": 3, "args": {"finished": False}}])
def test_an_annotation_in_which_the_profiler_stopped_ends_with_the_capture(
    tmp_path: Path, unfinished: dict[str, Any]
) -> None:
    trace = read(
        tmp_path,
        [row("user_annotation", "whole", 1, 5), {**row("user_annotation", "cut", 2, 0), **unfinished},
         row("cpu_op", "aten::mm", 3, 40)],
    )  # fmt: skip
    assert trace.ranges.is_open.tolist() == [False, True]
    assert trace.ranges.end_ns.tolist() == [6000, 43_000]


def test_names_that_cannot_be_printed_are_made_printable(tmp_path: Path) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("bad \ud800 name", 5, 1, 1), kernel("", 7, 1, 1)])
    for name in trace.names:
        name.encode()
    assert work_names(trace) == ["bad ? name", "(unnamed)"]


# Files


def test_gzip_is_known_by_its_bytes_and_garbage_collection_is_left_on(tmp_path: Path) -> None:
    events = [row("cpu_op", "aten::mm", 1, 2)]
    plain = read_kineto(written(tmp_path, events))
    packed = written(tmp_path, events, "trace.json.gz")
    assert work_names(read_kineto(packed.rename(tmp_path / "renamed.json"))) == work_names(plain)
    assert gc.isenabled()


def test_a_bare_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([row("cpu_op", "aten::mm", 1, 2)]))
    assert work_names(read_kineto(path)) == ["aten::mm"]


WHOLE = json.dumps({"traceEvents": [row("cpu_op", "aten::mm", 1, 2.5), kernel("k", 5, 1.5, 1)]}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (b" \n", "an empty file"),
        (gzip.compress(b"", mtime=0), "an empty file"),
        (b"SQLite format 3\0" + bytes(100), "not JSON"),
        (b"\x80\x04\x95 pickle", "not JSON"),
        (WHOLE[:-1], "cut off"),
        (WHOLE[:100], "cut off"),
        (WHOLE[: WHOLE.index(b"aten") + 2], "cut off"),
        (gzip.compress(WHOLE, mtime=0)[:-20], "the gzip file is cut off"),
        (gzip.compress(WHOLE, mtime=0)[:40] + b"\0" * 40, "the gzip file is damaged"),
        (WHOLE.replace(b'"cat"', b"cat", 1), "not JSON (line 1, column"),
        (b'{"a": 1}', "no list traceEvents"),
        (b'{"traceEvents": {}}', "no list traceEvents"),
        (b'"text"', "no list traceEvents"),
        (b"null", "no list traceEvents"),
        (b"[" * 100_000, "cannot be parsed"),
        (b'{"traceEvents": []}', "holds no operator, kernel or annotation"),
        (b'{"traceEvents": [{"ph": "X", "cat": "toplevel", "ts": 1, "dur": 2}]}', "holds no operator"),
        (b'{"traceEvents": [' + b"9" * 5000 + b"]}", "cannot be parsed"),
    ],
)
def test_bad_input_gets_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as raised:
        read_kineto(path)
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)
    assert gc.isenabled()


def test_files_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_kineto(tmp_path / "none.json")
    with pytest.raises(TraceError, match="Is a directory"):
        read_kineto(tmp_path)

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)  # root may open anything
    with pytest.raises(TraceError, match="Permission denied"):
        read_kineto(tmp_path / "trace.json")


def test_what_a_file_may_grow_to_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 40 * 2**20, mtime=0))
    with pytest.raises(TraceError, match=r"more than 0\.0312 GiB of JSON"):
        load_chrome_trace(path, size_limit_bytes=32 * 2**20)


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_damaged_file_crashes_the_reader(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(json.dumps({"traceEvents": backward_events()}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "trace.json"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 30]))])
    with suppress(TraceError):
        read_kineto(path)


values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=4), st.lists(st.none()),
    st.dictionaries(st.text(max_size=1), st.none()), st.sampled_from([PID, 7, 0, "stream 7", "100", {}]),
)  # fmt: skip
KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op", "user_annotation", "fwdbwd")


@given(
    st.lists(
        st.fixed_dictionaries(
            {"ph": st.sampled_from("XXXXsfM"), "cat": st.sampled_from(KINDS)},
            optional=dict.fromkeys(("name", "pid", "tid", "ts", "dur", "id", "args"), values),
        ),
        max_size=8,
    )
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_strange_event_crashes_the_reader(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    try:
        trace = read(tmp_path, events, deviceProperties=[1, {}], distributedInfo={"rank": []}, schemaVersion="x")
    except TraceError:
        return
    assert (trace.work.duration_ns >= 0).all()
