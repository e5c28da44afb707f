"""Several traces made one, one process taken out of many, and what calls wait for in each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.analysis.placing.attribution import attribute_work
from profkit.errors import TraceError
from profkit.trace.columns import BEFORE_TRACE, Syncs, Trace, take_calls
from profkit.trace.nsys import read_nsys
from profkit.trace.parts import combine_traces, only_process
from tests.kineto_builder import AUTOGRAD, TID, flow, kernel, launch, read, row
from tests.nsys_builder import NsysBuilder


def _rank(folder: Path, number: int, durations: list[int]) -> Trace:
    """Return a trace whose pid, threads and correlation ids are those of every other rank's."""
    builder = NsysBuilder()
    builder.name_thread("pt_autograd_0", 101)
    builder.range("forward", 0, 1000, int64Value=number + 7)
    builder.range(f"only rank {number}", 2000, 3000)
    for index, duration in enumerate(durations):
        builder.kernel(10 + index, duration, name=f"k{index}", start=5000 * (index + 1))
    builder.range("backward", 4000, 9000)
    builder.kernel(4000, 2, name="seed")
    builder.kernel(4500, 1, name="grad", tid=101)
    return read_nsys(builder.write(folder / f"{number}.sqlite"))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(1, 1000), max_size=5), min_size=1, max_size=4))
def test_combined_traces_keep_the_work_of_each_process_apart(durations: list[list[int]]) -> None:
    with TemporaryDirectory() as folder:
        traces = [_rank(Path(folder), number, some) for number, some in enumerate(durations)]
    whole = combine_traces(traces, "all")
    ledger = attribute_work(whole).ledger
    assert ledger.total_ns == sum(map(sum, durations)) + 3 * len(durations)
    assert (ledger.outside_ns, ledger.ambiguous_ns, ledger.no_launch_ns) == (0, 0, 0)
    assert ledger.inferred_ns == len(durations)
    assert len(whole.process_ids) == len(durations)
    assert set(whole.process_ids.values()) == {100}
    for process, trace in zip(whole.process_ids, traces, strict=True):
        mine = only_process(whole, process)
        assert attribute_work(mine).ledger == attribute_work(trace).ledger
        assert [mine.names[i] for i in mine.ranges.name] == [trace.names[i] for i in trace.ranges.name]
        assert mine.ranges.payload == trace.ranges.payload
        assert [mine.names[i] for i in mine.work.name] == [trace.names[i] for i in trace.work.name]
    assert (np.diff(whole.calls.start_ns) >= 0).all(), "calls stay sorted by time"


def _kineto(folder: Path, rank: int, base: int, first_us: int) -> Trace:
    events = [
        row("user_annotation", "backward", first_us, 90),
        row("cpu_op", "fwd", first_us + 1, 3),
        row("cpu_op", "bwd", first_us + 20, 9, AUTOGRAD),
        flow("s", 5, first_us + 2, TID),
        flow("f", 5, first_us + 21, AUTOGRAD),
        launch(first_us + 22, 3, AUTOGRAD),
        kernel("k", first_us + 25, 4, 3),
    ]
    folder.mkdir(exist_ok=True)
    return read(folder, events, baseTimeNanoseconds=base, distributedInfo={"rank": rank, "world_size": 2})


def test_combined_times_are_on_one_clock_and_links_stay_within_a_process(tmp_path: Path) -> None:
    first = _kineto(tmp_path / "0", 0, base=5_000_000, first_us=100)
    second = _kineto(tmp_path / "1", 1, base=5_700_000, first_us=100)
    whole = combine_traces([first, second], "all")
    assert (whole.ranges.start_ns - 100_000).tolist() == [0, 700_000]
    assert (whole.work.start_ns - whole.work.launch_ns).tolist() == [3000, 3000]
    assert sorted(whole.ranks.values()) == [0, 1]
    assert whole.work.sequence is not None
    assert whole.origins.thread[whole.work.sequence].tolist() == whole.ranges.thread.tolist()
    assert (whole.origins.start_ns[whole.work.sequence] - 102_000).tolist() == [0, 700_000]
    assert whole.work.operator is not None
    assert [whole.names[name] for name in whole.work.operator] == ["bwd", "bwd"]


def test_a_trace_of_kernels_and_one_of_operators_are_not_combined(tmp_path: Path) -> None:
    trace = _kineto(tmp_path, 0, 0, 1)
    with pytest.raises(TraceError, match=r"trace\.json: holds cpu-operators"):
        combine_traces([trace, replace(trace, measure="cpu-operator")], "all")


NO_STREAM = 0xFFFF_FFFF


def trace_with_waits(folder: Path) -> Trace:
    """An event is recorded on stream 7; stream 20 waits for it, then for one that nobody knows; the host for all."""
    calls = ["cudaLaunchKernel", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamWaitEvent"]
    events = [launch(10 + 10 * at, 1 + at, name=name) for at, name in enumerate([*calls, "cudaDeviceSynchronize"])]
    waits = {"stream": 20, "device": 0}
    return read(
        folder,
        [
            *events,
            kernel("k", 12, 5, 1),
            row("cuda_sync", "Stream Wait Event", 31, 0, 20, pid=0, correlation=3, **waits)
            | {"args": {"correlation": 3, **waits, "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 2}},
            row("cuda_sync", "Stream Wait Event", 41, 0, 20, pid=0)
            | {"args": {"correlation": 4, **waits, "wait_on_stream": -1, "wait_on_cuda_event_record_corr_id": -1}},
            row("cuda_sync", "Context Sync", 50, 1, -1, pid=0, stream=NO_STREAM, device=0, correlation=5),
        ],
    )


def columns(syncs: Syncs | None) -> list[list[int]]:
    return [
        column.tolist()
        for column in (syncs.call, syncs.device, syncs.stream, syncs.record, syncs.record_device, syncs.record_stream)
    ]


def test_waits_of_a_torch_profiler_trace(tmp_path: Path) -> None:
    trace = trace_with_waits(tmp_path)
    assert columns(trace.syncs) == [[2, 3, 4], [0, 0, 0], [20, 20, -1], [1, -1, -1], [0, 0, 0], [7, -1, -1]]
    assert read(tmp_path, [launch(1, 1), kernel("k", 2, 3, 1)]).syncs is None


def test_waits_follow_their_calls(tmp_path: Path) -> None:
    later = take_calls(trace_with_waits(tmp_path), np.array([False, False, True, False, True]))
    assert columns(later.syncs)[0] == [0, 1]
    assert columns(later.syncs)[3] == [BEFORE_TRACE, -1]


def test_waits_of_several_processes_stay_with_each(tmp_path: Path) -> None:
    trace = trace_with_waits(tmp_path)
    whole = combine_traces([trace, trace], "all")
    for process in whole.process_ids:
        assert columns(only_process(whole, process).syncs) == columns(trace.syncs)
