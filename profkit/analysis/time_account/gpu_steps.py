"""What ran on the GPUs in each step: overlapped and exposed communication, waiting for other ranks, products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from profkit.analysis.intervals import Stretches, intersect, subtract, unite
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.ranks.matching import Waiting
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.time_account.gpu_time import GpuParts, GpuTime, Windows, category_rows, communication_rows
from profkit.analysis.time_account.waits import DataWait, sum_host_waits
from profkit.trace.columns import Bools, Ints, Trace, distinct_values


@dataclass(frozen=True)
class GpuStep:
    """One step on one GPU, in nanoseconds.

    ``process`` is the operating system's pid, ``rank`` its rank if the run has ranks; ``start_ns`` and ``wall_ns`` are
    Python time. ``gpu`` is the step's window on the GPU in its parts (`profkit.analysis.time_account.gpu_time`).
    ``communication_ns`` is the union of communication kernels, exposed and overlapped. ``waiting_ns`` is the part
    before the last rank arrived (`profkit.analysis.ranks.matching`); ``untold_ns`` is the part for which this is
    unknown. ``waiting_ns`` is None if it is unknown for the whole, as in a trace of one rank. ``data`` is the part of
    ``gpu`` that is waiting for data; ``data_wait_ns`` is the Python time of these waits, whatever the GPU did.

    ``matmul_ns`` and ``attention_ns`` split ``gpu.computing_ns``: the time in which a matrix product ran, and of the
    rest that in which an attention kernel did. ``exposed_waiting_ns`` is the part of ``gpu.exposed_communication_ns``
    that is known to be waiting; most of it was for ``waiting_for``, a rank.
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
    data: DataWait
    data_wait_ns: int
    matmul_ns: int = 0
    attention_ns: int = 0
    exposed_waiting_ns: int = 0
    waiting_for: int | None = None

    @property
    def idle_share(self) -> float:
        """Return the share of the step's time on the GPU in which nothing ran."""
        return self.gpu.idle_share


def sum_steps(steps: Sequence[GpuStep]) -> tuple[GpuParts, DataWait]:
    """Return the time of all steps on all GPUs in its parts, and their waits for data."""
    return (
        GpuParts(*(sum(getattr(step.gpu, part.name) for step in steps) for part in fields(GpuParts))),
        DataWait(*(sum(getattr(step.data, part.name) for step in steps) for part in fields(DataWait))),
    )


def describe_steps(account: TimeAccount, waiting: Waiting) -> tuple[GpuStep, ...]:
    """Return the rows of the account with what ran on their GPUs: communication, waiting, products, attention."""
    attribution, windows = account.attribution, account.windows
    ranges, trace = attribution.trace.ranges, attribution.trace
    measured = _measure_communication(attribution, windows, waiting)
    waited_ns = sum_host_waits(attribution, account.steps).tolist()
    products, attention = _split_computing(trace, windows)
    exposed = _sum_exposed_waits(account.gpu_times, windows, waiting)
    return tuple(
        GpuStep(
            name=trace.names[int(ranges.name[index])],
            rank=None if account.rank[row] < 0 else int(account.rank[row]),
            process=trace.process_ids.get(int(ranges.process[index]), int(ranges.process[index])),
            device=int(windows.device[row]),
            start_ns=int(ranges.start_ns[index]),
            wall_ns=int(ranges.end_ns[index] - ranges.start_ns[index]),
            gpu=GpuParts(*account.parts[row].tolist()),
            communication_ns=measured[row][0],
            waiting_ns=measured[row][1],
            untold_ns=measured[row][2],
            data=DataWait(*account.data[row].tolist()),
            data_wait_ns=waited_ns[int(windows.member[row])],
            matmul_ns=int(products[row]),
            attention_ns=int(attention[row]),
            exposed_waiting_ns=exposed[row][0],
            waiting_for=exposed[row][1],
        )
        for row, index in enumerate(account.steps[windows.member].tolist())
    )


def _split_computing(trace: Trace, windows: Windows) -> tuple[Ints, Ints]:
    """Return for each window how long matrix products ran, and how long attention did while none of them ran."""
    work, (products, attention) = trace.work, np.zeros((2, len(windows.member)), dtype=np.int64)
    is_product, is_attention = (category_rows(trace, frozenset({category})) for category in ("gemm", "attention"))
    for device in distinct_values(windows.device).tolist():
        mine, here = windows.device == device, work.device == device
        window = windows.start_ns[mine], windows.end_ns[mine]
        matmuls, attends = (
            unite(work.start_ns[rows], work.end_ns[rows]) for rows in (here & is_product, here & is_attention)
        )
        products[mine], attention[mine] = matmuls.within(*window), subtract(attends, matmuls).within(*window)
    return products, attention


def _sum_exposed_waits(times: dict[int, GpuTime], windows: Windows, waiting: Waiting) -> list[tuple[int, int | None]]:
    """Return for each window how long only waiting for other ranks ran, and for which rank most of it was."""
    waits: list[tuple[int, int | None]] = []
    for device, start, end in zip(windows.device.tolist(), windows.start_ns, windows.end_ns, strict=True):
        alone, window = times[device].exposed_communication, (np.array([start]), np.array([end]))
        total = int(intersect(waiting.waits_of(device), alone).within(*window)[0])
        sums = {
            waiting.rank_of.get(last): int(intersect(when, alone).within(*window)[0])
            for last, when in waiting.by_last.get(device, {}).items()
        }
        waits.append((total, max(sums, key=lambda rank: sums[rank]) if total else None))
    return waits


def _measure_communication(
    attribution: Attribution, windows: Windows, waits: Waiting
) -> list[tuple[int, int | None, int]]:
    """Return for each window its communication, the waiting in it, and the part for which waiting is unknown, in ns."""
    trace = attribution.trace
    talks = communication_rows(trace)
    measured: list[tuple[int, int | None, int]] = [(0, 0, 0)] * len(windows.member)
    for device in set(windows.device.tolist()):
        mine = np.flatnonzero(windows.device == device)
        here = talks & (trace.work.device == device)
        sets = (_kernels(attribution, here), waits.waits_of(device), _kernels(attribution, here & ~waits.is_known))
        columns = [stretches.within(windows.start_ns[mine], windows.end_ns[mine]).tolist() for stretches in sets]
        for row, talking, waiting, unknown in zip(mine.tolist(), *columns, strict=True):
            known = talking > unknown or not talking
            measured[row] = (talking, waiting if known else None, unknown)
    return measured


def _kernels(attribution: Attribution, rows: Bools) -> Stretches:
    work = attribution.trace.work
    return unite(work.start_ns[rows], work.end_ns[rows])
