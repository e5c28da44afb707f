"""What the host was doing on behalf of a GPU: launching, synchronising, or something outside CUDA.

Only the threads that launch work on that GPU count. Such a thread is

- *synchronising* while a call that waits for the GPU is in progress: ``cudaDeviceSynchronize``,
  ``cudaStreamSynchronize``, ``cudaEventSynchronize``, their driver counterparts, and copies that are not asynchronous;
- *launching* while any other CUDA call is in progress, and between two of its calls that lie at most
  `LONGEST_PAUSE_NS` apart: it is on its way from one launch to the next, through the framework;
- *outside CUDA* else: in Python, in the data loader, waiting for another thread.

Of several threads one that launches decides, then one that synchronises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import NOTHING, Stretches, gaps, subtract, unite, unite_all
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, rows_by_value

LONGEST_PAUSE_NS = 500_000
"""An eager operator's way through Python and the framework takes 5 to 300 µs under a profiler; the captures tried here
have next to no pause between this and 5 ms."""

_SYNCHRONISES = re.compile(
    r"(cuda|cu)((Device|Stream|Event|Ctx|Thread)Synchronize|Memcpy(?!\w*Async)\w*)(_ptsz)?(_v\d+)*$"
)


@dataclass(frozen=True, eq=False)
class HostTime:
    """When the host was launching and when it was synchronising; at all other times it was outside CUDA."""

    launching: Stretches
    synchronising: Stretches


def build_host_times(trace: Trace) -> dict[int, HostTime]:
    """Return what the host was doing, for each device of the trace."""
    calls = trace.calls
    threads = _threads_by_device(trace)
    wanted = {thread for some in threads.values() for thread in some}
    waits = synchronising_calls(trace)
    rows_of = rows_by_value(calls.thread)
    each = {
        thread: _one_thread(calls.start_ns[rows], calls.end_ns[rows], waits[rows])
        for thread, rows in rows_of.items()
        if thread in wanted
    }
    found = {}
    for device, some in threads.items():
        parts = [each[thread] for thread in some if thread in each]
        launching = unite_all([part.launching for part in parts])
        synchronising = unite_all([part.synchronising for part in parts])
        found[device] = HostTime(launching, subtract(synchronising, launching))
    return found


def synchronising_calls(trace: Trace) -> Bools:
    """Return which CUDA calls wait for the GPU."""
    waits = np.zeros(len(trace.names), dtype=np.bool_)
    waits[[i for i in distinct_values(trace.calls.name).tolist() if _SYNCHRONISES.match(trace.names[i])]] = True
    return waits[trace.calls.name]


def _one_thread(start_ns: Ints, end_ns: Ints, waits: Bools) -> HostTime:
    """Return one thread's time; its calls are sorted by start."""
    synchronising = unite(start_ns[waits], end_ns[waits]) if waits.any() else NOTHING
    calls = unite(start_ns, end_ns)
    pauses = gaps(calls)
    short = pauses.end_ns - pauses.start_ns <= LONGEST_PAUSE_NS
    busy = unite_all([calls, Stretches(pauses.start_ns[short], pauses.end_ns[short])])
    return HostTime(subtract(busy, synchronising), synchronising)


def _threads_by_device(trace: Trace) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for table in (trace.work, trace.copies):
        for thread, rows in rows_by_value(table.launch_thread).items():
            for device in distinct_values(table.device[rows]).tolist():
                found.setdefault(device, set()).add(thread)
    return found
