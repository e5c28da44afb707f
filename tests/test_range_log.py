"""The log of ranges: what threads write, when it is full, and how it and a trace of CUDA alone become one trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import time_ns
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.self_check import check_capture
from profkit.errors import UsageError
from profkit.run.range_log import (
    LEFT,
    ClockReading,
    LoggedCollective,
    RangeLog,
    RangeLogError,
    ThreadEntries,
    finish_traces,
    fold_handle,
    join_ranges,
    log_beside,
    plain_beside,
    read_range_log,
    write_range_log,
)
from tests.in_process import names_in
from tests.observed_ranges import ObservedRanges, observed_ranges

pytest.importorskip("torch")

import torch

from profkit.annotation import RangeObserver, annotate
from profkit.capture.hooks import Call
from profkit.capture.hooks.open_ranges import OpenRanges
from profkit.capture.hooks.range_log import LiveLog

PROCESS, MAIN, AUTOGRAD = 4000, 4000, 4011
BASE_NS = 1_700_000_000_000_000_000
MAIN_HANDLE, AUTOGRAD_HANDLE = 0x7F0A_1234_5678, 0x7F0A_F000_0040
NAMES = ["forward", "layer", "backward"]
WAITS_US = (20, 32, 50, 900_000, 900_012, 900_030)


def _call(handle: int, start_us: float, name: str = "cudaLaunchKernel", dur: float = 10.0, number: int = 0) -> Any:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "pid": PROCESS,
        "tid": fold_handle(handle),
        "ts": start_us,
        "dur": dur,
        "args": {"correlation": number},
    }


def _kernel(start_us: float, number: int) -> Any:
    arguments = {"correlation": number, "device": 0, "stream": 7}
    row = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": start_us, "dur": 10.0}
    return {**row, "args": arguments}


def _trace(shift_us: float = 0.0) -> dict[str, Any]:
    """Two launches in forward's layer, one on the autograd thread, one after all of it, between two waits."""
    launches = [(MAIN_HANDLE, 110.0), (MAIN_HANDLE, 130.0), (AUTOGRAD_HANDLE, 320.0), (MAIN_HANDLE, 510.0)]
    events = [_call(MAIN_HANDLE, at + shift_us, "cudaDeviceSynchronize", 5.0) for at in WAITS_US]
    for number, (handle, at) in enumerate(launches, start=1):
        events += [_call(handle, at + shift_us, number=number), _kernel(at + shift_us + 20, number)]
    name = {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": fold_handle(MAIN_HANDLE), "ts": 0}
    flow = {"ph": "s", "id": 1, "pid": PROCESS, "tid": fold_handle(MAIN_HANDLE), "ts": 110.0 + shift_us, "cat": "ac2g"}
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [*events, flow, {**name, "args": {"name": "python"}}],
    }


def _entries(*pairs: tuple[int, float]) -> list[int]:
    return [value for number, at_us in pairs for value in (number, BASE_NS + round(at_us * 1000))]


def _log(autograd_handle: int = AUTOGRAD_HANDLE) -> RangeLog:
    main = _entries((0, 100), (1, 105), (LEFT, 150), (LEFT, 200), (2, 300), (LEFT, 400))
    threads = [
        ThreadEntries(MAIN_HANDLE, MAIN, "python", main),
        ThreadEntries(autograd_handle, AUTOGRAD, "pt_autograd_0", _entries((1, 310), (LEFT, 390))),
    ]
    readings = [ClockReading(MAIN_HANDLE, BASE_NS + (at - 2) * 1000, BASE_NS + (at + 7) * 1000) for at in WAITS_US]
    return RangeLog(PROCESS, NAMES, threads, [readings[:3], readings[3:]], BASE_NS + 1_000_000_000)


def _read(tmp_path: Path, trace: dict[str, Any]) -> Any:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return read_trace(path)


@pytest.mark.parametrize(
    ("handle", "name"),
    [(0x7F0A_1234_5678, 0x1234_5678), (0x7F0A_F000_0040, 0x0FFF_FFC0), (0x1_8000_0000, 0x8000_0000)],
)
def test_a_thread_is_called_by_its_handles_low_bits_as_a_signed_number(handle: int, name: int) -> None:
    assert fold_handle(handle) == name


def test_a_joined_trace_reads_as_one_with_ranges(tmp_path: Path) -> None:
    trace = _trace()
    fit = join_ranges(trace, _log())
    assert (fit.calls, fit.across, fit.error_ns) == (10, 0, 2000)
    assert abs(fit.start_ns) <= fit.error_ns
    opened = _read(tmp_path, trace)
    found = {row.path: row.kernel_count for row in opened.ranges().ranges}
    assert found == {"forward": 2, "forward/layer": 2, "backward": 1, "backward/layer": 1}
    ledger = opened.kernels().ledger
    assert (ledger.direct_ns, ledger.inferred_ns, ledger.outside_ns) == (30_000, 0, 10_000)
    with pytest.raises(UsageError, match="record CPU operators too"):
        opened.kernels(by="operator")


def _reduction(called_us: float, elements: int, group: str = "0", kind: str = "all_reduce") -> LoggedCollective:
    arguments = {"Collective name": kind, "dtype": "Float", "Process Group Name": group, "In msg nelems": elements}
    return LoggedCollective(BASE_NS + round(called_us * 1000), kind, group, arguments)


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([(105, 10), (125, 20), (500, 30)], [("0", 40), ("0", 80), ("0", 120)]),
        ([(105, 10), (500, 30)], [("0", None), ("0", None), ("0", 120)]),
        ([(100, 10), (105, 20), (125, 5), (500, 30)], [("0", 120), ("0", 20), ("0", 120)]),
        ([(100, 10), (105, 20, "1"), (125, 5), (500, 7, "0", "broadcast")], [("0", 20), ("0", 28)]),
        ([], []),
    ],
    ids=["one a kernel", "two kernels of one", "two that became one", "two groups", "none known"],
)
def test_kernels_of_nccl_get_what_the_flight_recorder_knows_of_their_calls(
    tmp_path: Path, calls: list[Any], found: list[Any]
) -> None:
    trace = _trace()
    kernels = [row for row in trace["traceEvents"] if row["cat" if "cat" in row else "ph"] == "kernel"]
    for row in (kernels[0], kernels[1], kernels[3]):  # launched at 110, 130 and 510 us
        row["name"] = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    join_ranges(trace, replace(_log(), collectives=[_reduction(*call) for call in calls]))
    assert [(call.group, call.byte_count) for call in _read(tmp_path, trace).trace.collectives] == found


def test_every_row_of_a_thread_carries_its_number() -> None:
    trace = _trace()
    join_ranges(trace, _log())
    rows = [row for row in trace["traceEvents"] if row["pid"] == PROCESS]
    assert {row["tid"] for row in rows} == {MAIN, AUTOGRAD}
    names = {row["tid"]: row["args"]["name"] for row in rows if row.get("name") == "thread_name"}
    assert names == {MAIN: "thread 4000 (python)", AUTOGRAD: "thread 4011 (pt_autograd_0)"}
    assert {row["tid"] for row in trace["traceEvents"] if row["pid"] == 0} == {7}


@pytest.mark.parametrize("shift_us", [-700.0, 12.0, 40.0, 3000.0])
def test_a_clock_that_is_off_is_set_right(shift_us: float) -> None:
    trace = _trace(shift_us)
    fit = join_ranges(trace, _log())
    assert abs(fit.start_ns - shift_us * 1000) <= fit.error_ns
    forward = next(row for row in trace["traceEvents"] if row.get("name") == "forward")
    assert abs(forward["ts"] - 100.0 - shift_us) <= fit.error_ns / 1000
    assert forward["dur"] == pytest.approx(100.0)


def test_clocks_that_run_apart_are_followed() -> None:
    trace = _trace()
    for row in trace["traceEvents"]:
        if row.get("name") == "cudaDeviceSynchronize" and row["ts"] > 500:
            row["ts"] += 5
    fit = join_ranges(trace, _log())
    assert (fit.end_ns - fit.start_ns) == pytest.approx(5_000, abs=2 * fit.error_ns)


def test_a_clock_that_was_read_once_is_taken_to_run_as_the_traces() -> None:
    log = _log()
    del log.readings[1]
    fit = join_ranges(_trace(40.0), log)
    assert fit.start_ns == fit.end_ns
    del log.readings[0]
    with pytest.raises(RangeLogError, match="no clock was read"):
        join_ranges(_trace(), log)


def test_a_range_that_was_never_left_ends_with_the_log() -> None:
    log = _log()
    del log.threads[0].entries[-2:]
    trace = _trace()
    join_ranges(trace, log)
    backward = next(row for row in trace["traceEvents"] if row.get("name") == "backward")
    assert backward["ts"] + backward["dur"] == pytest.approx(1_000_000.0, abs=2.0)


def test_a_thread_that_took_over_the_handle_of_one_that_ended_is_the_same_thread() -> None:
    log = _log()
    log.threads.append(ThreadEntries(AUTOGRAD_HANDLE, 4099, "later", _entries((1, 600), (LEFT, 700))))
    trace = _trace()
    join_ranges(trace, log)
    layers = [row for row in trace["traceEvents"] if row.get("name") == "layer" and row["tid"] == AUTOGRAD]
    assert len(layers) == 2


def test_a_trace_that_names_threads_by_their_numbers_is_taken_as_it_is() -> None:
    trace = _trace()
    numbers = {fold_handle(MAIN_HANDLE): MAIN, fold_handle(AUTOGRAD_HANDLE): AUTOGRAD}
    for row in trace["traceEvents"]:
        row["tid"] = numbers.get(row["tid"], row["tid"])
    assert join_ranges(trace, _log()).calls == 10


def test_a_log_that_does_not_match_the_trace_is_refused() -> None:
    with pytest.raises(RangeLogError, match="two threads of process 4000 have one name"):
        join_ranges(_trace(), _log(autograd_handle=MAIN_HANDLE + 2**40))
    log, trace = _log(), _trace()
    log.threads[0].entries[3] += 9_000  # the layer begins while the first launch runs
    with pytest.raises(RangeLogError, match="1 of 10 calls lie across a range's edge"):
        join_ranges(trace, log)
    for row in trace["traceEvents"]:
        row["tid"] += 1
    with pytest.raises(RangeLogError, match="lacks the calls that match its clock and threads"):
        join_ranges(trace, _log())


def test_what_a_process_leaves_becomes_its_trace(tmp_path: Path) -> None:
    paths = [tmp_path / "trace.json.gz", tmp_path / "trace.rank1.json.gz"]
    for path, log in zip(paths, (_log(), _log(MAIN_HANDLE + 2**40)), strict=True):
        plain_beside(path).write_text(json.dumps(_trace()))
        write_range_log(log_beside(path), log)
    assert read_range_log(log_beside(paths[0])) == _log()
    refused = finish_traces(tmp_path)
    assert list(refused) == ["trace.rank1.json.gz"]
    assert names_in(tmp_path) == ["log.txt", "trace.json.gz"]
    assert (tmp_path / "log.txt").read_text().endswith("0 of 10 calls lie across a range's edge\n")
    assert read_trace(paths[0]).kernels().kernel_count == 4


def test_a_trace_without_a_log_is_zipped_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    plain_beside(path).write_text('{"traceEvents": [ ]}')
    assert finish_traces(tmp_path) == {}
    assert gzip.decompress(path.read_bytes()) == b'{"traceEvents": [ ]}'


def test_a_trace_whose_threads_do_not_match_fails_the_check(tmp_path: Path) -> None:
    trace = _trace()
    join_ranges(trace, _log())
    assert not check_capture(_read(tmp_path, trace).attribution).failed
    for row in trace["traceEvents"]:
        if row.get("cat") == "user_annotation":
            row["tid"] += 10
    (failure,) = check_capture(_read(tmp_path, trace).attribution).of("failed")
    assert failure.code == "unmatched-threads"


@pytest.fixture
def observer() -> Iterator[ObservedRanges]:
    with observed_ranges() as observer:
        yield observer


@pytest.fixture
def live_log() -> LiveLog:
    log = LiveLog(most_entries=8)
    log.is_on = True
    return log


def _logged(live_log: LiveLog) -> list[list[str]]:
    content = live_log.content()
    named = [
        ["left" if one == LEFT else content.names[one] for one in thread.entries[::2]] for thread in content.threads
    ]
    for thread in content.threads:
        assert thread.entries[1::2] == sorted(thread.entries[1::2])
        assert all(time_ns <= content.ended_ns for time_ns in thread.entries[1::2])
    return named


def test_it_is_full_after_as_many_entries_as_it_may_hold(live_log: LiveLog) -> None:
    opened = OpenRanges(RangeObserver(), None, live_log)
    for _ in range(2):
        assert not live_log.is_full
        opened.open("key", "range")
        opened.close("key")
    assert live_log.is_full


def test_a_range_that_began_before_the_log_is_not_left_in_it(live_log: LiveLog) -> None:
    opened = OpenRanges(RangeObserver(), None, live_log)
    live_log.is_on = False
    opened.open("before", "before")
    live_log.is_on = True
    opened.open("within", "within")
    opened.close("before")
    assert _logged(live_log) == [["within", "left"]]


def test_backward_work_goes_on_from_call_to_call_within_what_is_open_around_it(live_log: LiveLog) -> None:
    opened = OpenRanges(RangeObserver(), None, live_log)
    model = Call("model", None, None)  # type: ignore[arg-type]
    block, other = (Call(name, model, None) for name in ("block", "other"))  # type: ignore[arg-type]
    part = Call("part", Call(None, block, None), None)  # type: ignore[arg-type]
    opened.open("key", "backward")
    for call in (block, part, part, other, None):
        opened.enter_backward_of(call)
    opened.enter_backward_of(other)
    opened.open("key", None)
    opened.enter_backward_of(part)
    opened.close("key")
    opened.enter_backward_of(block)
    opened.close_all()
    (logged,) = _logged(live_log)
    assert " ".join(logged).replace("left", "/").split("backward") == [
        "",
        " model block part / / other / / model other model block part / / / / block / / /",
    ]


def test_ranges_that_closed_in_another_order_than_they_opened_do_not_end_the_log(live_log: LiveLog) -> None:
    opened = OpenRanges(RangeObserver(), None, live_log)
    first, second = (Call(name, None, None) for name in ("first", "second"))  # type: ignore[arg-type]
    opened.open("key", "range")
    opened.note_opening(None, "script's")
    opened.close("key")
    opened.enter_backward_of(first)
    opened.note_closed()
    opened.enter_backward_of(second)
    opened.close_all()
    assert _logged(live_log) == [["range", "script's", "left", "first", "left", "left", "second", "left"]]


def test_other_observers_are_shown_what_is_logged(live_log: LiveLog, observer: ObservedRanges) -> None:
    opened = OpenRanges(RangeObserver(), None, live_log)
    opened.open("key", "range")
    opened.close("key")
    assert observer.events == ["range", "closed"]
    with annotate("the script's own"):
        pass
    assert observer.events[2:] == ["the script's own", "closed"]


def test_the_scripts_own_ranges_are_logged_under_their_names(live_log: LiveLog) -> None:
    opened = OpenRanges(RangeObserver(), None, live_log)
    opened.note_opening(None, "epoch")
    opened.note_opening(None)
    opened.note_closed()
    opened.note_closed()
    assert _logged(live_log) == [["epoch", "left"]]
    assert opened.scripts == 0


def test_the_clock_is_read_around_waits_for_the_gpu_but_not_in_a_capture(
    live_log: LiveLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    is_capturing = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(time_ns()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    live_log.read_clock()
    assert (live_log.content().readings, waits) == ([], [])
    is_capturing = False
    live_log.read_clock()
    (readings,) = live_log.content().readings
    assert all(one.before_ns <= wait <= one.after_ns for one, wait in zip(readings, waits, strict=True))
    assert [thread.handle for thread in live_log.content().threads] == [readings[0].handle]
