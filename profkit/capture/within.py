"""Recording that the program asked for itself: one session after the other, and nothing of them stays.

Each is a session as `profkit run` starts it in a process of its own, with the same hooks and the same rule of what ends
a step. The next one begins where the one before is done.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import torch
from torch import distributed

from profkit.capture.flight_recorder import several_ranks
from profkit.capture.session import Session
from profkit.errors import UsageError
from profkit.run.job import Job, number_in, rank_number
from profkit.run.recording import VARIABLE, Order


class Stages:
    """Sessions in this process, one for each order, from `begin` to `end`; ``ended`` is called with each one's order.

    What its program does on other threads is seen as far as ``profkit run`` sees it.
    """

    def __init__(self, orders: Sequence[Order], ended: Callable[[Order], None]) -> None:
        self._orders = iter(orders)
        self._ended = ended
        self.session: Session | None = None
        self.no_memory: str | None = None
        """Why the allocator was not recorded, if it was to be."""

    def begin(self) -> None:
        """Begin the first session.

        Raises:
            UsageError: something that forbids it is going on in this process.
            OSError: the run's directory cannot be written to.
        """
        reason = why_not()
        if reason is not None:
            raise UsageError(reason)
        _abandon_in_forks()
        _running.append(self)
        try:
            self.next()
        except BaseException:
            self.end()
            raise

    def next(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.detach()
            self._ended(session.order)
        order = next(self._orders, None)
        if order is None:
            return
        if order.recorder == "memory":
            self.no_memory = why_no_memory()
        if self.no_memory is None:
            self.session = Session(order, self.next)
            self.session.begin()

    def end(self) -> None:
        if any(order.recorder == "memory" for order in self._orders):
            self.no_memory = why_no_memory() or "the block ended before its steps began"
        try:
            self.next()
        finally:
            _running.remove(self)


_running: list[Stages] = []
_recordings = itertools.count()


@cache
def _abandon_in_forks() -> None:
    """Leave recordings alone in forked children, such as a data loader's workers."""
    os.register_at_fork(after_in_child=_abandon)


def _abandon() -> None:
    for stages in _running:
        if stages.session is not None:
            stages.session.abandon()


def why_not() -> str | None:
    if _running:
        return "profkit.record already records in this process: leave its block before another one begins"
    if VARIABLE in os.environ:
        return "`profkit run` already records this program: leave one of the two out"
    if torch.autograd.profiler._is_profiler_enabled or torch.autograd._profiler_enabled():
        return "a torch.profiler already runs, and a process has only one: end it before profkit.record begins"
    return None


def find_job() -> Job | None:
    if several_ranks():
        return Job(None, distributed.get_world_size(), distributed.get_rank(), "rank")
    count = number_in(os.environ, "WORLD_SIZE") or 1
    return Job(None, count, rank_number(os.environ), "rank") if count > 1 else None


def agree_on(name: str) -> str | None:
    """Return the name that the first rank to come gave a recording, None before ranks have joined; nobody waits."""
    if not several_ranks():
        return None
    store = distributed.distributed_c10d._get_default_store()
    return cast("bytes", store.compare_set(f"profkit.record {next(_recordings)}", "", name)).decode()


def why_no_memory() -> str | None:
    if not torch.cuda.is_initialized():
        return "no GPU was used (memory=True records the allocator of CUDA)"
    if getattr(torch._C, "_cuda_isHistoryEnabled", bool)():
        return "the program records the allocator's history itself"
    return None
