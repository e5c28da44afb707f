"""A GPU's time: sets of stretches, the parts of a window, what the host did meanwhile, waiting for other ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.efficiency.summary import GpuStep, describe_steps
from profkit.analysis.intervals import Stretches, disjoint_pieces, fill_gaps, intersect, subtract, union_ns, unite
from profkit.analysis.placing.attribution import Attribution, attribute_work
from profkit.analysis.ranks.matching import find_waiting
from profkit.analysis.time_account.gpu_time import (
    LONGEST_PAUSE_NS,
    GpuParts,
    build_gpu_times,
    build_host_times,
    find_windows,
    sum_parts,
)
from profkit.analysis.tree import select_ranges
from profkit.trace.columns import Trace
from tests.conftest import ROOT
from tests.nsys_builder import NsysBuilder, process_of

SMALL = ROOT / "traces" / "small-train.nsys2025.sqlite"
PAUSE = LONGEST_PAUSE_NS

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(-3, 12)), max_size=25)


def _columns(found: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([start for start, _ in found], dtype=np.int64)
    return start, start + np.array([length for _, length in found], dtype=np.int64)


def _moments(start: np.ndarray, end: np.ndarray) -> set[int]:
    return {moment for a, b in zip(start.tolist(), end.tolist(), strict=True) for moment in range(a, b)}


def _set(one: Stretches) -> set[int]:
    assert (one.start_ns < one.end_ns).all()
    assert (one.end_ns[:-1] <= one.start_ns[1:]).all()
    return _moments(one.start_ns, one.end_ns)


@given(pairs, pairs)
def test_operations_on_stretches_equal_counting(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    one, other = unite(*_columns(first)), unite(*_columns(second))
    mine, theirs = _moments(*_columns(first)), _moments(*_columns(second))
    assert (_set(one), _set(other)) == (mine, theirs)
    assert _set(intersect(one, other)) == _set(intersect(other, one)) == mine & theirs
    assert _set(subtract(one, other)) == mine - theirs


@given(pairs, st.integers(0, 9))
def test_gaps_up_to_a_length_are_filled_and_no_longer_ones(found: list[tuple[int, int]], longest: int) -> None:
    one = unite(*_columns(found))
    gaps = zip(one.end_ns[:-1].tolist(), one.start_ns[1:].tolist(), strict=True)
    short = {moment for end, start in gaps if start - end <= longest for moment in range(end, start)}
    assert _set(fill_gaps(one, longest)) == _set(one) | short


@given(pairs, st.integers(0, 70), st.integers(0, 70))
def test_the_part_within_a_window_equals_counting(found: list[tuple[int, int]], low: int, high: int) -> None:
    one = unite(*_columns(found))
    low, high = min(low, high), max(low, high)
    within = one.within(np.array([low]), np.array([high]))
    assert within.tolist() == [len(_moments(*_columns(found)) & set(range(low, high)))]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 12)), max_size=25))
def test_pieces_of_a_group_are_disjoint_and_cover_the_group(found: list[tuple[int, int, int]]) -> None:
    group = np.array([row[0] for row in found], dtype=np.int64)
    start, end = _columns([row[1:] for row in found])
    groups, pieces_start, pieces_end = disjoint_pieces(group, start, end)
    union = dict(zip(*(column.tolist() for column in union_ns(group, start, end)), strict=True))
    for one in set(group.tolist()):
        moments = _moments(start[group == one], end[group == one])
        mine = groups == one
        assert _moments(pieces_start[mine], pieces_end[mine]) == moments
        assert int((pieces_end - pieces_start)[mine].sum()) == union[one] == len(moments)


calls = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(1, 60),
        st.sampled_from(["cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020", "cudaMalloc_v3020"]),
        st.sampled_from([100, 101]),
    ),
    max_size=12,
)
kernels = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(1, 80),
        st.integers(0, 120),
        st.sampled_from(["gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "copy"]),
        st.sampled_from([100, 101]),
        st.sampled_from([0, 1]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(calls, kernels, st.integers(0, 300), st.integers(1, 300))
@example([(0, 2, "cudaLaunchKernel_v7000", 100)], [(0, 1, 0, "copy", 100, 0)], 0, 2)
def test_the_parts_of_a_range_equal_counting_nanoseconds(
    tmp_path_factory: pytest.TempPathFactory,
    some_calls: list[tuple[int, int, str, int]],
    some_kernels: list[tuple[int, int, int, str, int, int]],
    opened: int,
    length: int,
) -> None:
    """Every part against one array entry per nanosecond; pauses are never long here (`PAUSE` has a test of its own)."""
    trace = _trace(tmp_path_factory.mktemp("t") / "t.sqlite", some_calls, some_kernels, (opened, opened + length))
    times, attribution = build_gpu_times(trace), attribute_work(trace)
    windows = find_windows(attribution, np.array([0]), times)
    for at, device in enumerate(windows.device.tolist()):
        expected = _slow_window(attribution, device)
        assert (int(windows.start_ns[at]), int(windows.end_ns[at])) == expected
        one = slice(at, at + 1)
        parts = sum_parts(times, np.array([0]), windows.device[one], windows.start_ns[one], windows.end_ns[one])[0]
        assert parts == _slow_parts(trace, device, *expected)
        assert parts.busy_ns + parts.idle_ns == parts.span_ns
    assert set(windows.device.tolist()) == {device for device in (0, 1) if _own(attribution, device)}


def _trace(path: Path, some_calls: list, some_kernels: list, span: tuple[int, int]) -> Trace:
    builder = NsysBuilder()
    builder.range("r", *span)
    for start, duration, name, tid in some_calls:
        builder.call(start, duration=duration, name=name, tid=tid)
    for launch, delay, duration, name, tid, device in some_kernels:
        if name == "copy":
            correlation = builder.call(launch, tid=tid, name="cudaMemcpyAsync_v3020")
            when = {"start": launch + delay, "end": launch + delay + duration}
            where = {"deviceId": device, "streamId": 7, "correlationId": correlation, "globalPid": process_of(100)}
            builder.add("CUPTI_ACTIVITY_KIND_MEMCPY", **when, **where, bytes=8)
        else:
            builder.kernel(launch, duration, name=name, tid=tid, device=device, start=launch + delay)
    return read_trace(builder.write(path)).trace


def _own(attribution: Attribution, device: int) -> list[tuple[int, int]]:
    """Return the times of what lies under the range, by the rule of ``--range``."""
    trace, members = attribution.trace, select_ranges(attribution, "r")
    found = []
    for rows, placed in ((trace.work, attribution.work), (trace.copies, attribution.copies)):
        under = placed.under(members).rows
        under = under[rows.device[under] == device]
        found += list(zip(rows.start_ns[under].tolist(), rows.end_ns[under].tolist(), strict=True))
    return found


def _slow_window(attribution: Attribution, device: int) -> tuple[int, int]:
    trace, own = attribution.trace, _own(attribution, device)
    first, last = min(start for start, _ in own), max(end for _, end in own)
    earlier = [
        int(t.end_ns[i])
        for t in (trace.work, trace.copies)
        for i in range(len(t))
        if t.device[i] == device and t.start_ns[i] < first
    ]
    opened, closed = int(trace.ranges.start_ns[0]), int(trace.ranges.end_ns[0])
    end = max(closed, last)
    others = [end for one in (0, 1) for _, end in _own(attribution, one)]
    while end < max(others) and not _begins_work(trace, device, end):
        end += 1
    return min(first, max([opened, *earlier])), end


def _begins_work(trace: Trace, device: int, time: int) -> bool:
    return any(((t.device == device) & (t.start_ns == time)).any() for t in (trace.work, trace.copies))


def _slow_parts(trace: Trace, device: int, start: int, end: int) -> GpuParts:
    size = 2000
    is_talk = [trace.names[i].startswith("nccl") for i in trace.work.name.tolist()]

    def mark(rows, which) -> np.ndarray:
        marked = np.zeros(size, dtype=bool)
        for i in range(len(rows)):
            if rows.device[i] == device and which(i):
                marked[rows.start_ns[i] : rows.end_ns[i]] = True
        return marked

    computing = mark(trace.work, lambda i: not is_talk[i])
    talking = mark(trace.work, lambda i: is_talk[i])
    copying = mark(trace.copies, lambda i: True)
    threads = {
        int(t.launch_thread[i]) for t in (trace.work, trace.copies) for i in range(len(t)) if t.device[i] == device
    }
    launching, waiting = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    for thread in threads:
        mine = np.flatnonzero(trace.calls.thread == thread)
        on_the_way, sync = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        on_the_way[trace.calls.start_ns[mine].min() : trace.calls.end_ns[mine].max()] = True
        for i in mine.tolist():
            if "Synchronize" in trace.names[trace.calls.name[i]]:
                sync[trace.calls.start_ns[i] : trace.calls.end_ns[i]] = True
        # A call that returns only after the copy that it launched waits for it from the copy's end on.
        copies = trace.copies
        for row in np.flatnonzero(copies.launch_thread == thread).tolist():
            begun, ended = int(copies.launch_ns[row]), int(copies.end_ns[row])
            call = next(i for i in mine.tolist() if trace.calls.start_ns[i] == begun)
            if begun < ended < trace.calls.end_ns[call]:
                sync[ended : trace.calls.end_ns[call]] = True
        launching |= on_the_way & ~sync
        waiting |= sync
    idle = ~(computing | talking | copying)
    parts = (
        np.ones(size, dtype=bool),
        computing,
        talking & ~computing,
        copying & ~computing & ~talking,
        idle & launching,
        idle & waiting & ~launching,
        idle & ~waiting & ~launching,
        talking & computing,
    )
    return GpuParts(*(int(part[start:end].sum()) for part in parts))


def test_a_long_pause_is_outside_cuda_and_a_short_one_is_launching(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.kernel(0, 5)
    builder.kernel(1 + PAUSE, 5)  # the call before took 1 ns: a pause of just the longest
    builder.kernel(2 * PAUSE + 3, 5)  # one nanosecond more
    trace = read_trace(builder.write(tmp_path / "t.sqlite")).trace
    host = build_host_times(trace)[0]
    assert _pairs(host.launching) == [(0, PAUSE + 2), (2 * PAUSE + 3, 2 * PAUSE + 4)]
    assert not len(host.synchronising)


def test_threads_that_launch_nothing_on_the_gpu_do_not_count(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.kernel(100, 5, device=0, tid=100)
    builder.kernel(200, 5, device=1, tid=101)
    builder.call(0, duration=900, name="cudaEventQuery_v3020", tid=102)
    hosts = build_host_times(read_trace(builder.write(tmp_path / "t.sqlite")).trace)
    assert {device: _pairs(host.launching) for device, host in hosts.items()} == {0: [(100, 101)], 1: [(200, 201)]}


def test_calls_that_wait_for_the_gpu_synchronise(tmp_path: Path) -> None:
    waiting = "cudaDeviceSynchronize_v3020 cuStreamSynchronize_ptsz cudaEventSynchronize cuCtxSynchronize"
    waiting += " cudaMemcpy_v3020 cuMemcpyDtoH_v2"
    others = "cudaMemcpyAsync_v3020 cuMemcpyHtoDAsync_v2 cudaStreamWaitEvent_v3020 cudaLaunchKernel_v7000 cudaMalloc"
    for name in (*waiting.split(), *others.split()):
        builder = NsysBuilder()
        correlation = builder.call(10, duration=30, name=name)
        builder.kernel(None, 5, start=60, correlation=correlation)
        host = build_host_times(read_trace(builder.write(tmp_path / name)).trace)[0]
        assert _pairs(host.synchronising if name in waiting.split() else host.launching) == [(10, 40)], name


def test_a_call_that_goes_on_after_its_copy_waits_for_the_gpu(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.copy(10, 5, start=20, call_ns=30)
    builder.copy(2 * PAUSE, 50, start=2 * PAUSE + 5, call_ns=20)
    host = build_host_times(read_trace(builder.write(tmp_path / "t.sqlite")).trace)[0]
    assert _pairs(host.synchronising) == [(25, 40)]
    assert _pairs(host.launching) == [(10, 25), (2 * PAUSE, 2 * PAUSE + 20)]


def test_a_window_excludes_earlier_work_and_includes_idle_time_before_its_first_kernel(tmp_path: Path) -> None:
    builder = NsysBuilder(("a", 0, 100), ("b", 100, 200))
    builder.kernel(10, 400, start=20)  # a's, until 420
    builder.kernel(110, 50, start=450)  # b's: opened at 100, the GPU free from 420
    builder.range("c", 600, 700)
    builder.kernel(650, 10, start=655)
    trace = read_trace(builder.write(tmp_path / "t.sqlite")).trace
    windows = find_windows(attribute_work(trace), np.arange(3), build_gpu_times(trace))
    edges = list(zip(windows.start_ns.tolist(), windows.end_ns.tolist(), strict=True))
    assert edges == [(0, 420), (420, 500), (600, 700)]


def test_a_gpu_that_is_done_early_is_idle_until_the_others_are_or_until_it_has_other_work(tmp_path: Path) -> None:
    builder = NsysBuilder(("step 0", 0, 100))
    builder.kernel(10, 100, start=20, device=0)
    builder.kernel(30, 400, start=120, device=1)  # until 520
    builder.range("step 1", 200, 300)
    builder.kernel(210, 100, start=220, device=0)
    builder.kernel(220, 100, start=520, device=1)
    trace = read_trace(builder.write(tmp_path / "t.sqlite")).trace
    windows = find_windows(attribute_work(trace), np.arange(2), build_gpu_times(trace))
    columns = (windows.device, windows.start_ns, windows.end_ns)
    edges = list(zip(*(column.tolist() for column in columns), strict=True))
    assert edges == [(0, 0, 220), (0, 200, 620), (1, 0, 520), (1, 520, 620)]


def test_waiting_is_the_time_before_the_last_rank_arrived(tmp_path: Path) -> None:
    builder = NsysBuilder()
    reduce, send = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_Broadcast_RING_LL"
    for pid, device, arrives in ((100, 0, 100), (200, 1, 160)):
        builder.range("step 0", 0, 500, tid=pid, pid=pid)
        builder.kernel(5, 200 - arrives, name=reduce, tid=pid, pid=pid, device=device, start=arrives)
        # The sender finishes before the receiver begins, so waiting is unknown.
        builder.kernel(6, 20, name=send, tid=pid, pid=pid, device=device, start=250 + 30 * device)
    first, second = _steps(builder.write(tmp_path / "t.sqlite"))
    assert (first.rank, first.process, first.device) == (0, 100, 0)
    assert (first.communication_ns, first.waiting_ns, first.untold_ns) == (120, 60, 20)
    assert (second.process, second.communication_ns, second.waiting_ns, second.untold_ns) == (200, 60, 0, 20)
    assert first.gpu.exposed_communication_ns == 120
    alone = NsysBuilder(("step 0", 0, 500))
    alone.kernel(5, 100, name=reduce)
    (step,) = _steps(alone.write(tmp_path / "one.sqlite"))
    assert (step.waiting_ns, step.untold_ns) == (None, 100), "in a trace of one rank it is unknown"


def test_each_collective_is_waited_for_by_its_name_and_a_gpu_of_two_ranks_is_no_ranks(tmp_path: Path) -> None:
    builder = NsysBuilder()
    reduce, gather = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_AllGather_RING_LL"
    for device, (reduces, gathers) in enumerate([(100, 300), (160, 310), (130, 350)]):
        pid = 100 * (device + 1)
        builder.range("step 0", 0, 500, tid=pid, pid=pid)
        builder.kernel(5, 200 - reduces, name=reduce, tid=pid, pid=pid, device=device, start=reduces)
        builder.kernel(6, 400 - gathers, name=gather, tid=pid, pid=pid, device=device, start=gathers)
    builder.kernel(
        7, 30, name="ncclDevKernel_Reduce_RING_LL", tid=100, pid=100, device=0, start=420
    )  # without partners
    builder.range("step 0", 0, 500, tid=400, pid=400)
    builder.kernel(5, 10, tid=400, pid=400, device=2, start=20)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    waiting = find_waiting(opened.trace, opened.ranks)
    columns = (waiting.device, waiting.last, waiting.start_ns, waiting.end_ns)
    pieces = sorted(zip(*(column.tolist() for column in columns), strict=True))
    assert pieces == [(0, 1, 100, 160), (0, 2, 300, 350), (1, 2, 310, 350), (2, 1, 130, 160)]
    assert waiting.is_known.sum() == 6
    assert waiting.rank_of == {0: 0, 1: 1}, "two ranks launch on GPU 2"


def _steps(path: Path) -> tuple[GpuStep, ...]:
    opened = read_trace(path)
    return describe_steps(opened.account, find_waiting(opened.trace, opened.ranks))


def _pairs(one: Stretches) -> list[tuple[int, int]]:
    return list(zip(one.start_ns.tolist(), one.end_ns.tolist(), strict=True))
