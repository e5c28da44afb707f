"""The ranks of one machine: who this process is among them, and where they wait for each other.

One nsys watches all ranks of a machine, and starts and stops for all of them at once when one of them says so. The
others must not have begun their step by then, nor still be in it; they meet through files in the run's directory, so
that no collective of profkit's own stands in the trace.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from profkit.capture.nsys import recorded_by_nsys
from profkit.models.attachment import meeting_name

_PATIENCE_S = 10.0
_POLL_S = 0.001

# nsys tells the other processes in its own time: on an H200 1.2 ms after cudaProfilerStart had returned in the first,
# another's range that was already open was lost.
_SETTLING_S = 0.2


def describe_rank() -> dict[str, Any]:
    """Return this process's pid and, where a launcher said so, its rank among all and on this machine."""
    numbers = {name: os.environ.get(name.upper()) for name in ("rank", "local_rank")}
    return {"pid": os.getpid(), **{name: None if text is None else int(text) for name, text in numbers.items()}}


@contextmanager
def recorded_together_by_nsys(run: Path, device: torch.device) -> Iterator[None]:
    """Have nsys capture the block on all ranks of this machine, from the moment when all have come to it.

    The first of them starts and stops nsys. Without CUDA, nsys captures the processes from start to end.
    """
    together = LocalRanks(run)
    if device.type != "cuda" or together.count == 1:
        with recorded_by_nsys(device):
            yield
        return
    torch.cuda.synchronize()
    together.meet("arrived")
    if together.number == 0:
        with recorded_by_nsys(device):
            together.meet("started")
            time.sleep(_SETTLING_S)
            yield
            torch.cuda.synchronize()
            together.meet("done")
    else:
        together.meet("started")
        time.sleep(_SETTLING_S)
        yield
        torch.cuda.synchronize()
        together.meet("done")
    together.meet("stopped")


class LocalRanks:
    """This machine's ranks as the launcher numbered them, and this process among them."""

    def __init__(self, run: Path) -> None:
        self.number = int(os.environ.get("LOCAL_RANK", "0"))
        self.count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._run = run

    def meet(self, occasion: str, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until every rank of this machine has come here; False if some did not come while patience lasted."""
        (self._run / meeting_name(occasion, self.number)).touch()
        awaited = [self._run / meeting_name(occasion, number) for number in range(self.count)]
        deadline = time.monotonic() + patience_s
        while not all(path.exists() for path in awaited):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True
