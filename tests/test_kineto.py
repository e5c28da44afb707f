"""Traces of torch.profiler: work, launches, ranges, from backward to forward, how operators nest, and their events."""

from __future__ import annotations

import gc
import gzip
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.intervals import BusyTime
from profkit.errors import TraceError
from profkit.trace import kineto_events
from profkit.trace.columns import NO_LAUNCH, Trace, Work
from profkit.trace.kineto import OperatorForest, read_kineto
from profkit.trace.kineto_events import CutOffError, JsonError, JsonStream, load_chrome_trace, parse_microseconds
from tests.captures import capture
from tests.child import run_in_child
from tests.conftest import ROOT
from tests.kineto_builder import (
    AUTOGRAD,
    PID,
    TID,
    backward_events,
    flow,
    kernel,
    launch,
    read,
    row,
    thread_name,
    work_names,
    written,
)
from tests.second_method import union


def test_the_shared_capture_has_its_known_figures() -> None:
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


def test_a_correlation_id_may_be_any_64_bits_but_0_and_a_call_of_the_runtime_comes_first(tmp_path: Path) -> None:
    ids = (-1, 2**63 + 5, 2**62, "18446744073709551614")
    rows: list[Any] = []
    for at, one in enumerate(ids, start=1):
        rows += [launch(at, one), kernel("k", 10 + at, 1, one)]  # type: ignore[arg-type]
    assert read(tmp_path, rows).work.launch_ns.tolist() == [1000, 2000, 3000, 4000]
    # The driver's call within it has the same id.
    trace = read(tmp_path, [launch(2, 1, name="cuLaunchKernel"), launch(1, 1), kernel("k", 9, 1, 1)])
    assert trace.work.launch_ns.tolist() == [1000]
    assert trace.calls.has_work.all()


def test_work_with_a_correlation_id_of_two_processes_has_no_launch(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [launch(1, 1), launch(2, 1, pid=200, tid=200), launch(3, 2, pid=200, tid=200),
         kernel("either's", 9, 1, 1), kernel("the second's", 11, 1, 2)],
    )  # fmt: skip
    assert (trace.work.launch_thread == NO_LAUNCH).tolist() == [True, False]
    assert trace.work.process.tolist()[1] == 200
    assert "1 GPU rows have a correlation id" in trace.notes[0]


def origins_of(trace: Trace) -> dict[str, int | None]:
    assert trace.work.sequence is not None
    starts = [*trace.origins.start_ns.tolist(), None]
    return dict(zip(work_names(trace), [starts[i] for i in trace.work.sequence], strict=True))


def test_backward_kernels_lead_to_their_forward_operator(tmp_path: Path) -> None:
    trace = read(tmp_path, backward_events())
    mm, mul = 20_000, 10_000
    assert origins_of(trace) == {"k1": mm, "k2": mm, "k3": mul, "k4": None, "k5": None, "k6": None}
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


def test_operators_are_measured_beside_launches_without_work_and_annotations_alone_are_no_work(tmp_path: Path) -> None:
    operator, call = row("cpu_op", "aten::mm", 1, 5), launch(2, 1)
    trace = read(tmp_path, [operator, call, kernel("k", 0, 0, 1)])
    assert (trace.measure, work_names(trace)) == ("cpu-operator", ["aten::mm"])
    assert "1 row of kernels with impossible times" in trace.diagnostics[0].text
    trace = read(tmp_path, [operator, call])
    assert (trace.measure, trace.calls.has_work.tolist()) == ("cpu-operator", [False])
    assert "1 launches but no GPU work" in trace.notes[0]
    trace = read(tmp_path, [row("user_annotation", "forward", 1, 5)])
    assert (len(trace.work), len(trace.ranges), trace.has_kernel_table) == (0, 1, False)


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


# -- how operators nest ----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 1)), max_size=30))
def test_self_times_add_up_where_rounding_makes_a_child_outlive_its_parent(rows: list[tuple[int, int, int]]) -> None:
    start, duration, thread = (np.array([r[i] for r in rows], dtype=np.int64) for i in range(3))
    forest = OperatorForest(start, start + duration, thread)
    assert (forest.self_ns >= 0).all()
    for one in (0, 1):
        mine = [(s, s + d) for s, d, t in rows if t == one]
        assert int(forest.self_ns[thread == one].sum()) == sum(end - start for start, end in union(mine))
    if len(rows):
        zeros = np.zeros(len(rows), dtype=np.int64)
        work = Work(
            zeros, start, start + duration, forest.self_ns, zeros, zeros, thread, start, thread, zeros.astype(np.bool_)
        )
        each = np.arange(len(rows))
        assert BusyTime(work).sum_by(each, each, len(rows)).tolist() == forest.self_ns.tolist()
    # Who is innermost at a moment: the one that began last (the shorter, the later given) and is still open.
    moments = np.repeat(np.arange(95), 2)
    threads = np.tile([0, 1], 95)
    for moment, one, found in zip(moments, threads, forest.innermost_at(moments, threads), strict=True):
        is_open = [(s, -d, i) for i, (s, d, t) in enumerate(rows) if t == one and s <= moment < s + d]
        assert found == (max(is_open)[2] if is_open else -1)


# -- events: bytes, JSON read piece by piece, times and fields -------------------------------------------------------


def test_an_end_beyond_a_century_is_impossible(tmp_path: Path) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("k", 2, 5, 1), kernel("h", 4 * 10**15, 4 * 10**15, 0)])
    assert work_names(trace) == ["k"]
    assert [diagnostic.severity for diagnostic in trace.diagnostics] == ["error"]


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
def test_a_time_in_microseconds_becomes_integer_nanoseconds_or_nothing(text: object, expected: int | None) -> None:
    assert parse_microseconds(text) == expected


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
def test_impossible_work_is_left_out_with_a_diagnostic(tmp_path: Path, ts: object, dur: object) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("good", 5, 1, 1), kernel("bad", ts, dur, 1)])
    assert work_names(trace) == ["good"]
    (diagnostic,) = trace.diagnostics
    assert diagnostic.severity == "error"
    assert "1 row of kernels with impossible times left out, the first named 'bad'" in diagnostic.text
    cpu = read(tmp_path, [row("cpu_op", "good", 5, 1), row("cpu_op", "bad", ts, dur)])
    assert work_names(cpu) == ["good"]
    assert "CPU operators" in cpu.diagnostics[0].text


def test_names_that_cannot_be_printed_are_made_printable(tmp_path: Path) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("bad \ud800 name", 5, 1, 1), kernel("", 7, 1, 1)])
    for name in trace.names:
        name.encode()
    assert work_names(trace) == ["bad ? name", "(unnamed)"]


def test_a_trace_is_known_by_its_bytes_and_garbage_collection_stays_on(tmp_path: Path) -> None:
    events = [row("cpu_op", "aten::mm", 1, 2)]
    plain = written(tmp_path, events).read_bytes()
    packed = written(tmp_path, events, "trace.json.gz").read_bytes()
    for content in (plain, packed, b"\xef\xbb\xbf" + plain, json.dumps(events).encode()):
        (tmp_path / "renamed.json").write_bytes(content)
        assert work_names(read_kineto(tmp_path / "renamed.json")) == ["aten::mm"]
    assert gc.isenabled()


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
        (WHOLE.replace(b'"cat"', b"cat", 1), "not JSON (character"),
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


def test_a_file_that_cannot_be_opened_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_kineto(tmp_path / "none.json")
    with pytest.raises(TraceError, match="Is a directory"):
        read_kineto(tmp_path)

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)  # root may open anything
    with pytest.raises(TraceError, match="Permission denied"):
        read_kineto(tmp_path / "trace.json")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def stream_of(text: bytes, piece: int) -> JsonStream:
    source = io.BytesIO(text)
    return JsonStream(lambda _: source.read(piece))


def read_list(stream: JsonStream) -> list[Any]:
    found = list(stream.items())
    stream.end()
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(VALUES, max_size=5), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_pieces_of_any_size_give_what_the_whole_gives(
    values: list[Any], piece: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    expected = json.loads(text.decode("utf-8", "replace"), parse_float=str, parse_constant=str)
    assert read_list(stream_of(text, piece)) == expected


@settings(max_examples=150, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=3), st.integers(1, 40), st.data())
def test_a_damaged_text_is_refused_where_the_whole_would_be(values: list[Any], piece: int, data: st.DataObject) -> None:
    text = json.dumps(values)
    at = data.draw(st.integers(0, len(text) - 1))
    mutant = text[:at] + data.draw(st.sampled_from(["", ",", "]", "}", '"', "x", "\n", "\\"])) + text[at + 1 :]
    try:
        expected = json.loads(mutant, parse_float=str, parse_constant=str)
    except ValueError:
        expected = None
    try:
        found = read_list(stream_of(mutant.encode(), piece))
    except JsonError:
        found = None
    assert found == (expected if isinstance(expected, list) else None)


def test_an_error_names_its_place_whatever_the_pieces() -> None:
    text = b'[{"a": 1},\n {"b": 2},\n {"c" 3},\n {"d": 4}, {"e": "long enough to go on"}]'
    for piece in (1, 5, 1000):
        with pytest.raises(JsonError, match=r"character 29: Expecting ':' delimiter"):
            read_list(stream_of(text, piece))


@pytest.mark.parametrize("text", [b'[{"a": 1}, {"b"', b'[{"a": 1}', b"[tru", b'["abc', b"[1,", b"[", b'[{"a": 1},'])
def test_a_text_that_ends_early_is_cut_off(text: bytes) -> None:
    for piece in (1, 1000):
        with pytest.raises(CutOffError):
            read_list(stream_of(text, piece))


def test_what_is_no_number_in_cpp_is_read_as_null() -> None:
    text = b'[{"a": inf, "b": [-nan, "inf; nan"]}, {"c": nan}, inf, -inf]'
    for piece in (1, 7, 1000):
        assert read_list(stream_of(text, piece)) == [{"a": None, "b": [None, "inf; nan"]}, {"c": None}, None, None]


def test_events_may_stand_anywhere_and_the_last_list_of_them_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    event = json.dumps(row("cpu_op", "aten::mm", 1, 5))
    path.write_text(f'{{"a": [1], "traceEvents": [], "b": {{"traceEvents": []}}, "traceEvents": [{event}], "c": 2}}')
    header, rows = load_chrome_trace(path)
    assert header == {"a": [1], "b": {"traceEvents": []}, "c": 2}
    assert [event["name"] for event in rows["operator"]] == ["aten::mm"]


def test_a_trace_takes_at_most_two_and_a_half_times_its_size(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.decompress((ROOT / "traces" / "small-train.kineto.json.gz").read_bytes()))
    size = path.stat().st_size
    read_kineto(path)

    def grown() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        read_kineto(path)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    # Besides the events there are the pieces of text that are read, of 4 MiB, however large the file is.
    assert run_in_child(grown, cpu_seconds=60) < 2.5 * size + 4 * kineto_events._PIECE_BYTES


@pytest.mark.parametrize("beginning", [b'{"traceEvents": [', b'{"traceEvents": ["', b'{"x": "'])
def test_a_zipped_trace_is_stopped_while_it_is_inflated(tmp_path: Path, beginning: bytes) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(beginning)
        for _ in range(80):
            file.write(b" " * 2**20)

    def read() -> str:
        with pytest.raises(TraceError) as caught:
            read_kineto(path)
        return str(caught.value)

    assert "more than 0.0625 GiB of JSON" in run_in_child(read, cpu_seconds=20, memory_bytes=2**30)


def test_many_small_events_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "many.json.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b"[")
        for _ in range(400):
            file.write(b'{"ph":"X","cat":"kernel"},' * 2000)
    # In a fork, memory that earlier tests have freed would serve again, and the limit is on growth.
    code = (
        "import sys, profkit.files as files, profkit.trace.kineto_events as stream\n"
        "from profkit.trace.kineto import read_kineto\n"
        "files.LEAST_MEMORY_BYTES, stream._PIECE_BYTES = 2**27, 2**20\n"
        "read_kineto(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "too large for this machine's memory" in done.stderr.splitlines()[-1]
