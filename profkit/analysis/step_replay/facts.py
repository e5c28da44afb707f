"""What is known of a program besides its trace: its lines of source, its data loader, the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from profkit.names import DATA
from profkit.run.lines import LineTime

World = Literal["least", "expected", "most"]
WORLDS: tuple[World, ...] = ("least", "expected", "most")

_CROWDED = {"least": 1.0, "expected": 1.1, "most": 1.5}
"""How many times longer a worker takes for a batch than one process that has the machine's CPU to itself."""
_CROWDED_CORES = {"least": 1.0, "expected": 1.35, "most": 1.6}
"""The same where all CPUs are at work: these mostly are threads of half as many cores."""
_LEAST_BUSY = 0.25
"""No worker is taken to keep less of a CPU busy."""
_FIRST_BATCHES = {"least": 0, "expected": 1, "most": 2}
"""How many times what a worker usually takes for a batch an epoch's first one takes: all workers begin at once."""
_TORCHS = ("torch.", "F.", "nn.functional.")


@dataclass(frozen=True)
class ProgramFacts:
    """What is known of the program besides its trace.

    ``lines`` are the lines of source behind its unprofiled steps, and ``callers`` what lines that called others took in
    them. ``optimizer_bytes`` is what a fused optimizer moves,
    None if torch has none for it; ``bytes_per_s`` the memory's peak. The data loader has ``workers`` processes, each of
    which takes ``batch_ns`` for what a step needs, None if that is not known. They are started anew for each epoch of
    ``epoch_batches`` batches, 0 if they stay; until the first batch comes that takes ``restart_ns``, shared among the
    epoch's steps. The machine has ``cpus``, None if that is not known, of which a worker keeps ``worker_cpus`` busy;
    torch computes with ``threads`` in the program, and with one in each worker.
    """

    lines: Sequence[LineTime] | None = None
    callers: Sequence[LineTime] = ()
    optimizer_bytes: int | None = None
    bytes_per_s: float | None = None
    batch_ns: int | None = None
    workers: int = 0
    epoch_batches: int = 0
    restart_ns: int = 0
    cpus: int | None = None
    worker_cpus: float = 1.0
    threads: int = 1
    detects_anomalies: bool = False

    @property
    def room(self) -> int | None:
        """For how many workers the CPUs have room, None if that is not known: those that wait for files share one."""
        return None if self.cpus is None else max(2, int(self.cpus / max(self.worker_cpus, _LEAST_BUSY)))

    def saved_by_keeping_workers(self, world: World) -> int:
        """Return by how much a step is shorter, on average, if workers stay: an epoch's first batch is waited for."""
        first_ns = (self.batch_ns or 0) * _FIRST_BATCHES[world]
        return max(0, round(self.restart_ns - first_ns / max(self.epoch_batches, 1)))

    def batches_at_once(self, workers: int, world: World) -> float:
        """Return how many batches workers make in the time that one alone takes for one; more never make less.

        The workers beyond half of the CPUs' room share cores with the others.
        """
        if self.room is None:
            return workers / _CROWDED[world]
        half, busy = self.room / 2, min(workers, self.room)
        on_all = self.room / _CROWDED_CORES[world]
        return float(np.interp(busy, [0, half, self.room], [0, half / _CROWDED[world], on_all]))

    def slower_beside(self, workers: float, world: World) -> float:
        """Return how many times longer the program's Python takes while so many workers are at work."""
        if not self.cpus:
            return 1.0
        return 1 + (_CROWDED_CORES[world] - 1) * min(1.0, workers * self.worker_cpus / self.cpus)

    def batch_in_worker(self, waited_ns: int, world: World) -> int | None:
        """Return what a worker takes for a batch, as known, or as what the program takes itself says: ``waited_ns``.

        By how much torch's operations are slower on one thread is open: not at all, or as many times as it has cores,
        of each of which two of its threads may run on one.
        """
        if self.workers:
            return self.batch_ns
        slower = {"least": 1.0, "expected": math.sqrt(self.threads), "most": max(1.0, self.threads / 2)}[world]
        return round(waited_ns * (1 + self._torchs_share() * (slower - 1)))

    def _torchs_share(self) -> float:
        loading = [line for line in self.lines or () if line.phase == DATA and line.thread == "main"]
        in_torch = [line for line in loading if (line.called or "").startswith(_TORCHS)]
        return sum(line.time_ns for line in in_torch) / max(1, sum(line.time_ns for line in loading))
