"""How much of the communication of a GPU is waiting for another rank, and for which.

A collective such as NCCL's all-reduce is a kernel on every GPU that spins until all of them have arrived. Ranks call
their collectives in the same order, so in a trace of all ranks the n-th kernel of a name on one GPU is the partner of
the n-th on the others; the time before the last partner begins is waiting. A name counts only if this fits: equally
many kernels on each GPU, and all partners of every collective running at one moment. (It usually does not fit a
broadcast, where the sender may finish before a receiver begins.) With communication on one GPU only, nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import NOTHING, Stretches, disjoint_pieces, unite, unite_all
from profkit.analysis.ranks.members import Ranks
from profkit.analysis.time_account.gpu_time import communication_rows
from profkit.trace.columns import Bools, Ints, Trace, distinct_values


@dataclass(frozen=True, eq=False)
class Waiting:
    """When each GPU waited in a collective: device → the device that arrived last → when.

    ``is_known`` marks the communication kernels of which this is known; ``rank_of`` is device → rank.
    """

    by_last: dict[int, dict[int, Stretches]]
    is_known: Bools
    rank_of: dict[int, int]

    def on(self, device: int) -> Stretches:
        """Return when one GPU waited, for any other."""
        stretches = list(self.by_last.get(device, {}).values())
        return unite_all(stretches) if stretches else NOTHING

    def sum_by_rank(self, device: Ints, start_ns: Ints, end_ns: Ints) -> dict[int, int]:
        """Return rank → how long GPUs waited for it in these windows, in ns; windows that overlap count once."""
        sums: dict[int, int] = {}
        for here, lasts in self.by_last.items():
            mine = device == here
            _, starts, ends = disjoint_pieces(np.zeros(int(mine.sum()), dtype=np.int64), start_ns[mine], end_ns[mine])
            for last, when in lasts.items():
                if last in self.rank_of and len(starts):
                    rank = self.rank_of[last]
                    sums[rank] = sums.get(rank, 0) + int(when.within(starts, ends).sum())
        return sums


def find_waiting(trace: Trace, ranks: Ranks) -> Waiting:
    """Return when the GPUs of a trace waited in collectives for one another."""
    work, communicates = trace.work, communication_rows(trace)
    is_known = np.zeros(len(work), dtype=np.bool_)
    devices = distinct_values(work.device[communicates]).tolist()
    pieces_of: dict[tuple[int, int], list[tuple[Ints, Ints]]] = {}
    for name in distinct_values(work.name[communicates]).tolist() if len(devices) > 1 else ():
        partners = _match_partners(trace, communicates & (work.name == name), devices)
        if partners is None:
            continue
        is_known[partners.reshape(-1)] = True
        starts = work.start_ns[partners]
        last = starts.argmax(axis=0)
        for here, device in enumerate(devices):
            for there in distinct_values(last[last != here]).tolist():
                which = last == there
                pieces_of.setdefault((device, devices[there]), []).append((starts[here, which], starts[there, which]))
    by_last: dict[int, dict[int, Stretches]] = {}
    for (device, other), pieces in pieces_of.items():
        by_last.setdefault(device, {})[other] = unite(*map(np.concatenate, zip(*pieces, strict=True)))
    return Waiting(by_last, is_known, _ranks_by_device(trace, ranks))


def _match_partners(trace: Trace, rows: Bools, devices: list[int]) -> Ints | None:
    """Return the kernels of one name as ``(devices, collectives)``, or None if they do not match."""
    work = trace.work
    by_device = [np.flatnonzero(rows & (work.device == device)) for device in devices]
    if len({len(mine) for mine in by_device}) > 1:
        return None
    partners = np.stack([mine[np.argsort(work.start_ns[mine], kind="stable")] for mine in by_device])
    together = work.start_ns[partners].max(axis=0) < work.end_ns[partners].min(axis=0)
    return partners if together.all() else None


def _ranks_by_device(trace: Trace, ranks: Ranks) -> dict[int, int]:
    """Return the rank that launches work on each device; a device of several ranks is left out."""
    ranks_of: dict[int, set[int]] = {}
    for number, process in ranks.members:
        for device in distinct_values(trace.work.device[trace.work.process == process]).tolist():
            ranks_of.setdefault(device, set()).add(number)
    return {device: numbers.pop() for device, numbers in ranks_of.items() if len(numbers) == 1}
