"""The slowest rank, found while all run: the one that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from statistics import fmean, median

from torch import distributed

from profkit.capture.flight_recorder import Collective, FlightRecorder, several_ranks

_PATIENCE = timedelta(seconds=10)
_MINE, _ANSWER = "profkit/waits-of-{}", "profkit/slowest"


def is_slowest() -> bool:
    """Return whether this rank is the slowest; True of rank 0 if the ranks cannot agree, and of a process alone.

    All ranks ask at the same step. They tell each other through the store by which their process groups were made: it
    is no collective, and changes nothing that the program computes.
    """
    if not several_ranks():
        return True
    rank = distributed.get_rank()
    flight = FlightRecorder()
    with suppress(Exception):  # no store, or a rank that does not come
        flight.look()
        return _agree(rank, waiting_ns(flight.all())) == rank
    return rank == 0


def waiting_ns(collectives: Sequence[Collective]) -> float:
    """Return how long a rank's collectives take on average, waiting for others included: the least is the slowest's.

    gloo does not say how long. There the rank that calls last counts, by the machines' clocks: later is less. The first
    half of the collectives is passed over: there ranks wait for each other's start.
    """
    later = collectives[len(collectives) // 2 :]
    timed = [one.duration_ns for one in later if one.duration_ns is not None]
    return fmean(timed) if timed else -median([one.called_ns for one in later] or [0])


def _agree(rank: int, mine: float) -> int:
    store = distributed.distributed_c10d._get_default_store()
    if rank:
        store.set(_MINE.format(rank), repr(mine))
        store.wait([_ANSWER], _PATIENCE)
        return int(store.get(_ANSWER))
    names = [_MINE.format(other) for other in range(1, distributed.get_world_size())]
    store.wait(names, _PATIENCE)
    waits = [mine, *(float(store.get(name)) for name in names)]
    slowest = waits.index(min(waits))
    store.set(_ANSWER, str(slowest))
    return slowest
