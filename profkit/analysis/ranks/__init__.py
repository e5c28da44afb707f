"""Collectives over all ranks: what each rank did between them, who arrives last and why, and what the wire carried.

Here which process of a distributed run is which rank, how that is known, and how the ranks of one trace compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import BusyTime
from profkit.analysis.time_account.gpu_time import communication_rows
from profkit.analysis.tree import Chosen
from profkit.errors import UsageError
from profkit.trace.columns import Ints, Trace, distinct_values

PROVED, NAMED = "proved by the run's manifest", "named by the trace"
BY_DEVICE, BY_PID = "guessed from the GPUs' order", "guessed from the processes' order"


@dataclass(frozen=True)
class Ranks:
    """The ranks in rank order: each one's number and its process; ``evidence`` says how that is known.

    A trace of one process without a known rank has no members and no evidence.
    """

    members: tuple[tuple[int, int], ...] = ()
    evidence: str | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(number for number, _ in self.members)

    def process_of(self, number: int) -> int:
        """Return the process of a rank; UsageError names the ranks that exist if it is none of them."""
        for rank, process in self.members:
            if rank == number:
                return process
        raise UsageError(explain_no_rank(number, self.numbers))

    def only(self, number: int) -> Ranks:
        return Ranks(tuple(member for member in self.members if member[0] == number), self.evidence)

    def index_of(self, process: Ints) -> Ints:
        index = np.full(len(process), -1, dtype=np.int64)
        for position, (_, own) in enumerate(self.members):
            index[process == own] = position
        return index


def explain_no_rank(number: int, there: tuple[int, ...]) -> str:
    if not there:
        return f"no rank {number}: this trace holds one process, and it does not say that there were several ranks"
    return f"no rank {number}: this trace holds rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there))}"


def find_ranks(trace: Trace, known: Mapping[int, int]) -> Ranks:
    """Return the ranks of a trace by the best evidence there is.

    First what profkit itself wrote down while it ran them (``known``: pid → rank), then what the trace says of itself
    (torch.profiler names the rank it ran in). Else, where several processes launched kernels, or without any kernel
    opened ranges, they count as the ranks of one node, in the order of the GPUs on which they ran most of their
    kernels, as launchers number them; where two share a GPU's number, in the order of their process ids. Names of
    processes are no evidence.
    """
    proved = [(known[pid], process) for process, pid in trace.process_ids.items() if pid in known]
    if proved and _is_one_to_one(proved):
        return Ranks(tuple(sorted(proved)), PROVED)
    named = [(rank, process) for process, rank in trace.ranks.items()]
    if named and _is_one_to_one(named):
        return Ranks(tuple(sorted(named)), NAMED)
    launching = distinct_values(trace.work.process if len(trace.work) else trace.ranges.process).tolist()
    if len(launching) < 2:
        return Ranks()
    devices = {process: _main_device(trace, process) for process in launching}
    if len(trace.work) and len(set(devices.values())) == len(launching):
        return Ranks(tuple(enumerate(sorted(launching, key=lambda process: devices[process] or 0))), BY_DEVICE)
    return Ranks(tuple(enumerate(sorted(launching, key=lambda process: trace.process_ids.get(process, 0)))), BY_PID)


def _main_device(trace: Trace, process: int) -> int | None:
    if trace.measure != "gpu-kernel":
        return None
    used = trace.work.device[trace.work.process == process]
    # A number of a GPU is a name: in a damaged file two may lie as far apart as they like.
    numbers = distinct_values(used)
    return int(numbers[np.bincount(np.searchsorted(numbers, used)).argmax()]) if len(used) else None


@dataclass(frozen=True)
class RankRow:
    """What one rank did of what was asked for.

    ``kernel_time_ns`` holds kernels and whole graphs, ``communication_ns`` is the part of it in collectives, where a
    rank that is done sooner waits for the others. ``wall_ns`` sums the rank's own outermost instances of the range;
    without one it is from the first to the last thing recorded of the rank.
    """

    rank: int
    process: int
    device: int | None
    instances: int | None
    kernel_count: int
    kernel_time_ns: int
    busy_ns: int
    wall_ns: int | None
    communication_ns: int

    @property
    def own_ns(self) -> int:
        """Return the kernel time outside communication: what makes a rank slow."""
        return self.kernel_time_ns - self.communication_ns


def compare_ranks(trace: Trace, ranks: Ranks, chosen: Chosen) -> tuple[RankRow, ...]:
    if not ranks.members:
        return ()
    work, instances = trace.work, chosen.instances
    communication = communication_rows(trace)
    rows, busy = [], BusyTime(work)
    for number, process in ranks.members:
        mine = chosen.rows & (work.process == process)
        outermost = None if instances is None else instances.outermost
        if outermost is not None:
            outermost = outermost[trace.ranges.process[outermost] == process]
        rows.append(
            RankRow(
                rank=number,
                process=trace.process_ids.get(process, process),
                device=_main_device(trace, process),
                instances=None if outermost is None else len(outermost),
                kernel_count=int(mine.sum()),
                kernel_time_ns=int(work.duration_ns[mine].sum()),
                busy_ns=busy.total_ns(mine),
                wall_ns=_wall_ns(trace, process, outermost),
                communication_ns=int(work.duration_ns[mine & communication].sum()),
            )
        )
    return tuple(rows)


def _is_one_to_one(pairs: list[tuple[int, int]]) -> bool:
    """Return whether no two processes are of one rank: pids of several machines, or of containers, may coincide."""
    return len({rank for rank, _ in pairs}) == len({process for _, process in pairs}) == len(pairs)


def _wall_ns(trace: Trace, process: int, outermost: Ints | None) -> int | None:
    if outermost is not None:
        return trace.ranges.sum_open(outermost)
    tables = (trace.work, trace.calls, trace.ranges)
    parts = [(table, table.process == process) for table in tables]
    starts = [int(table.start_ns[mine].min()) for table, mine in parts if mine.any()]
    ends = [int(table.end_ns[mine].max()) for table, mine in parts if mine.any()]
    return max(ends) - min(starts) if starts else 0
