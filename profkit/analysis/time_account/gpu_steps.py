"""What ran on the GPUs in each step: overlapped and exposed communication, waiting for other ranks, products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from profkit.analysis.intervals import Stretches, intersect, subtract, unite
from profkit.analysis.ranks.matching import Waiting
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.time_account.gpu_time import DataWait, GpuParts, category_rows, communication_rows, sum_host_waits
from profkit.trace.columns import Bools, Trace, distinct_values


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
    ranges, trace = account.attribution.trace.ranges, account.attribution.trace
    talks = communication_rows(trace)
    communication, unknown = (
        account.measure(_unite_kernels(trace, rows)).tolist() for rows in (talks, talks & ~waiting.is_known)
    )
    waits = account.measure({device: waiting.waits_of(device) for device in account.gpu_times}).tolist()
    products, attends = (
        _unite_kernels(trace, category_rows(trace, frozenset({category}))) for category in ("gemm", "attention")
    )
    matmul = account.measure(products).tolist()
    attention = account.measure({device: subtract(attends[device], products[device]) for device in attends}).tolist()
    exposed = _sum_exposed_waits(account, waiting)
    waited_ns = sum_host_waits(account.attribution, account.steps)[account.step].tolist()
    return tuple(
        GpuStep(
            name=trace.names[int(ranges.name[index])],
            rank=None if account.rank[row] < 0 else int(account.rank[row]),
            process=trace.process_ids.get(int(ranges.process[index]), int(ranges.process[index])),
            device=int(account.windows.device[row]),
            start_ns=int(ranges.start_ns[index]),
            wall_ns=int(ranges.end_ns[index] - ranges.start_ns[index]),
            gpu=GpuParts(*account.parts[row].tolist()),
            communication_ns=communication[row],
            waiting_ns=waits[row] if communication[row] > unknown[row] or not communication[row] else None,
            untold_ns=unknown[row],
            data=DataWait(*account.data[row].tolist()),
            data_wait_ns=waited_ns[row],
            matmul_ns=matmul[row],
            attention_ns=attention[row],
            exposed_waiting_ns=exposed[row][0],
            waiting_for=exposed[row][1],
        )
        for row, index in enumerate(account.steps[account.step].tolist())
    )


def _sum_exposed_waits(account: TimeAccount, waiting: Waiting) -> list[tuple[int, int | None]]:
    """Return for each row how long only waiting for other ranks ran, and for which rank most of it was."""
    alone = {device: time.exposed_communication for device, time in account.gpu_times.items()}
    total = account.measure({device: intersect(waiting.waits_of(device), alone[device]) for device in alone})
    lasts = sorted({last for by_last in waiting.by_last.values() for last in by_last})
    if not lasts:
        return [(time_ns, None) for time_ns in total.tolist()]
    sets = [
        {device: intersect(waits[last], alone[device]) for device, waits in waiting.by_last.items() if last in waits}
        for last in lasts
    ]
    most = np.stack([account.measure(waits) for waits in sets]).argmax(axis=0)
    return [
        (time_ns, waiting.rank_of.get(lasts[at]) if time_ns else None)
        for time_ns, at in zip(total.tolist(), most.tolist(), strict=True)
    ]


def _unite_kernels(trace: Trace, rows: Bools) -> dict[int, Stretches]:
    work = trace.work
    here = {device: rows & (work.device == device) for device in distinct_values(work.device).tolist()}
    return {device: unite(work.start_ns[mine], work.end_ns[mine]) for device, mine in here.items()}
