"""What one rank hands over so that it can be compared: the same columns of its full trace as of its light record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from profkit.analysis.ranks.own_time import Part
from profkit.run.light_columns import CallColumns, StepColumns
from profkit.run.light_record import LightRecord
from profkit.trace.columns import Bools

Floats = npt.NDArray[np.float64]

Parts = dict[Part, float]
"""Part → nanoseconds."""


@dataclass(frozen=True, eq=False)
class Account:
    """What one rank did by itself in each step, as (steps, parts), and the communication that nothing hid."""

    parts: tuple[Part, ...]
    times_ns: Floats
    exposed_ns: Floats
    is_exact: bool
    sm_mhz: float | None = None

    def __len__(self) -> int:
        return len(self.times_ns)

    def sums(self) -> Floats:
        """Return how long each step took."""
        total: Floats = self.times_ns.sum(axis=1)
        return total

    def median(self, steps: slice | Bools = slice(None)) -> Parts:
        """Return each part's median over some of the steps, which one strange step does not move."""
        times = self.times_ns[steps]
        return dict(zip(self.parts, np.median(times, axis=0).tolist(), strict=True)) if len(times) else {}

    def usual(self) -> Parts:
        """Return what it does in a step: the mean of a full trace, so that parts sum up, else the median."""
        if not self.is_exact or not len(self):
            return self.median()
        return dict(zip(self.parts, (self.times_ns.sum(axis=0) / len(self)).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class ReducedRank:
    """A rank's record, whose steps stand in ``steps``; ``calls`` are those of measured steps, in order of their groups.

    ``longer_on_gpu`` is what phases of each measured step took longer on its GPU, as parts and (steps, parts).
    ``exact`` is what it did by its full trace; of a rank without one, None. ``between_ns`` is what its sends and
    receives in a group took in the steps of ``exact`` that nothing hid. ``light`` is the rank by the light record that
    it left beside its trace: that holds the steps that no profiler recorded too.
    """

    record: LightRecord
    steps: StepColumns
    calls: CallColumns
    longer_on_gpu: tuple[tuple[Part, ...], Floats]
    exact: Account | None = None
    between_ns: Mapping[int, int] = field(default_factory=dict)
    light: ReducedRank | None = None
