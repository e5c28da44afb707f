"""How much of a rank's communication is waiting for the last rank to arrive.

A collective such as NCCL's all-reduce is a kernel on every GPU that spins until all of them have come. In a trace that
holds the ranks of one machine, the n-th kernel of a name on one GPU is the partner of the n-th on the others (ranks
call their collectives in the same order), and the time before the last partner began is waiting; the rest is
communicating. A name counts only where that fits: as many kernels on each GPU, and of every collective all partners
under way at once. A broadcast's sender may be done before a receiver begins, so it usually does not fit.
"""

from __future__ import annotations

import numpy as np

from profkit.analysis.intervals import NOTHING, Stretches, unite
from profkit.trace.columns import Bools, Ints, Trace, distinct_values


def find_waiting(trace: Trace, communicates: Bools) -> tuple[dict[int, Stretches], Bools]:
    """Return when each GPU waited in a collective for another, and of which kernels this could be told.

    With communication on one GPU alone, it can be told of none.
    """
    work = trace.work
    told = np.zeros(len(work), dtype=np.bool_)
    devices = distinct_values(work.device[communicates]).tolist()
    waits: dict[int, list[tuple[Ints, Ints]]] = {device: [] for device in devices}
    for name in distinct_values(work.name[communicates]).tolist() if len(devices) > 1 else ():
        partners = _partners(trace, communicates & (work.name == name), devices)
        if partners is None:
            continue
        told[partners.reshape(-1)] = True
        last_arrival = work.start_ns[partners].max(axis=0)
        for device, rows in zip(devices, partners, strict=True):
            waits[device].append((work.start_ns[rows], last_arrival))
    found = {device: unite(*map(np.concatenate, zip(*some, strict=True))) for device, some in waits.items() if some}
    return {device: found.get(device, NOTHING) for device in devices}, told


def _partners(trace: Trace, rows: Bools, devices: list[int]) -> Ints | None:
    """Return the kernels of one name as ``(devices, collectives)``, or None if they do not fit together."""
    work = trace.work
    each = [np.flatnonzero(rows & (work.device == device)) for device in devices]
    if len({len(some) for some in each}) > 1:
        return None
    partners = np.stack([some[np.argsort(work.start_ns[some], kind="stable")] for some in each])
    together = work.start_ns[partners].max(axis=0) < work.end_ns[partners].min(axis=0)
    return partners if together.all() else None
