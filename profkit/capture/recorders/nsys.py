"""Nsight Systems around the steps of a process, started and stopped through CUDA's profiler API.

One nsys watches all ranks of a machine, and starts and stops for all of them when one of them says so. The others must
not have begun their step by then, nor still be in it; they meet through files in the run's directory, so that the trace
shows no collective of profkit's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from profkit.run.recording import meeting_file

_PATIENCE_S = 10.0
_POLL_S = 0.001

# nsys reaches the other processes in its own time: on an H200 1.2 ms after cudaProfilerStart had returned in the first,
# another's range that was already open was lost.
_SETTLING_S = 0.2


@contextmanager
def recorded_by_nsys(run: Path, device: torch.device) -> Iterator[None]:
    """Have nsys capture the block through CUDA's profiler API, on all ranks of this machine once all have come to it.

    Without CUDA there is no such API, and nsys captures the processes from start to end.
    """
    ranks = LocalRanks(run)
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    ranks.meet("arrived")
    if ranks.number == 0:
        torch.cuda.profiler.start()
    try:
        if ranks.meet("started") and ranks.count > 1:
            time.sleep(_SETTLING_S)
        yield
    finally:
        torch.cuda.synchronize(device)
        ranks.meet("done")
        if ranks.number == 0:
            torch.cuda.profiler.stop()
        ranks.meet("stopped")


def number_in_environment(variable: str) -> int | None:
    """Return the whole number that a variable holds; None if it is not set, or holds something else."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


class LocalRanks:
    """This machine's ranks as the launcher numbered them, and this process among them."""

    def __init__(self, run: Path) -> None:
        self.number = number_in_environment("LOCAL_RANK") or 0
        self.count = number_in_environment("LOCAL_WORLD_SIZE") or 1
        self._run = run

    def meet(self, occasion: str, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until every rank of this machine has come here; False if one did not come in time."""
        if self.count == 1:
            return True
        meeting_file(self._run, occasion, self.number).touch()
        awaited = [meeting_file(self._run, occasion, number) for number in range(self.count)]
        deadline = time.monotonic() + patience_s
        while not all(path.exists() for path in awaited):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def agree(self, occasion: str, number: int, patience_s: float = _PATIENCE_S) -> int:
        """Return the largest number that a rank of this machine came here with; 0 if one did not come in time."""
        if self.count == 1:
            return number
        mine = meeting_file(self._run, occasion, self.number)
        written = mine.with_name(f"{mine.name}.new")
        written.write_text(str(number), encoding="ascii")
        written.replace(mine)  # whoever sees the file sees the number
        if not self.meet(occasion, patience_s):
            return 0
        files = [meeting_file(self._run, occasion, rank) for rank in range(self.count)]
        return max(int(file.read_text(encoding="ascii")) for file in files)
