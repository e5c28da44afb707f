"""What calls wait for: read from torch.profiler's rows, and kept when calls, processes and GPUs are taken out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from profkit.trace.columns import BEFORE_TRACE, Syncs, Trace, take_calls
from profkit.trace.parts import combine_traces, only_process
from tests.kineto_builder import kernel, launch, read, row

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
    assert syncs is not None
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
