"""What the GPUs did in each step: busy, idle and why, communication overlapped and exposed, waiting for other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.checks.step_check import find_measured
from profkit.analysis.efficiency.collectives import find_waiting
from profkit.analysis.efficiency.gpu_time import GpuParts, GpuTime, build_gpu_times, communication_rows, sum_parts
from profkit.analysis.efficiency.windows import Windows, find_windows
from profkit.analysis.intervals import NOTHING, Stretches, unite
from profkit.analysis.ranks import Ranks
from profkit.names import STEP
from profkit.trace.columns import Bools, empty_ints


@dataclass(frozen=True)
class GpuStep:
    """One step on one GPU, in nanoseconds.

    ``process`` is the operating system's pid, ``rank`` its number where there are ranks; ``start_ns`` and ``wall_ns``
    are the host's. ``gpu`` is the step's window on the GPU in its parts (`profkit.analysis.efficiency.windows`,
    `profkit.analysis.efficiency.gpu_time`). ``communication_ns`` is the union of communication kernels, exposed and
    overlapped; of it ``waiting_ns`` passed before the last rank had arrived, and of ``untold_ns`` this cannot be told
    (`profkit.analysis.efficiency.collectives`). ``waiting_ns`` is null where it can be told of nothing: in a trace of
    one rank, all of them.
    """

    name: str
    rank: int | None
    process: int
    device: int
    start_ns: int
    wall_ns: int
    gpu: GpuParts
    communication_ns: int
    waiting_ns: int | None
    untold_ns: int

    @property
    def idle_share(self) -> float:
        """Return the share of the step's time on the GPU in which nothing ran."""
        return self.gpu.idle_share


def summarize_steps(
    attribution: Attribution, ranks: Ranks, times: dict[int, GpuTime] | None = None
) -> tuple[GpuStep, ...]:
    """Return the steps outside ``warmup`` that launched work, one row per step and GPU, by their start on the host.

    A step is a range named ``step`` or ``step N``. None in a trace without such ranges or without GPU work.
    """
    trace = attribution.trace
    members = find_measured(attribution).get(STEP, empty_ints())
    if trace.measure != "gpu-kernel" or not len(members):
        return ()
    times = build_gpu_times(trace) if times is None else times
    windows = find_windows(attribution, members, times)
    group = np.arange(len(windows.member))
    parts = sum_parts(times, group, windows.device, windows.start_ns, windows.end_ns)
    told = _tell_communication(attribution, windows)
    ranges = trace.ranges
    numbers = {process: number for number, process in ranks.members}
    rows = [
        GpuStep(
            name=trace.names[int(ranges.name[index])],
            rank=numbers.get(int(ranges.process[index])),
            process=trace.process_ids.get(int(ranges.process[index]), int(ranges.process[index])),
            device=int(windows.device[row]),
            start_ns=int(ranges.start_ns[index]),
            wall_ns=int(ranges.end_ns[index] - ranges.start_ns[index]),
            gpu=parts[row],
            communication_ns=told[row][0],
            waiting_ns=told[row][1],
            untold_ns=told[row][2],
        )
        for row, index in enumerate(members[windows.member].tolist())
    ]
    return tuple(sorted(rows, key=lambda row: (row.start_ns, row.device)))


def _tell_communication(attribution: Attribution, windows: Windows) -> list[tuple[int, int | None, int]]:
    """Return for each window how long its GPU communicated, waited meanwhile, and of how long that is not known."""
    trace = attribution.trace
    talks = communication_rows(trace)
    waits, told = find_waiting(trace, talks)
    found: list[tuple[int, int | None, int]] = [(0, 0, 0)] * len(windows.member)
    for device in set(windows.device.tolist()):
        mine = np.flatnonzero(windows.device == device)
        here = talks & (trace.work.device == device)
        sets = (_kernels(attribution, here), waits.get(device, NOTHING), _kernels(attribution, here & ~told))
        columns = [one.within(windows.start_ns[mine], windows.end_ns[mine]).tolist() for one in sets]
        for row, talking, waiting, untold in zip(mine.tolist(), *columns, strict=True):
            known = talking > untold or not talking
            found[row] = (talking, waiting if known else None, untold)
    return found


def _kernels(attribution: Attribution, rows: Bools) -> Stretches:
    work = attribution.trace.work
    return unite(work.start_ns[rows], work.end_ns[rows])
