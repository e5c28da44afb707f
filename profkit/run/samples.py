"""The times of a run's steps, sample by sample, as they stand in its manifest.

A step is an object of nanoseconds: ``step_ns`` from one step's start to the next one's, by the host's clock, the device
waited for once at its end; ``<phase>_event_ns`` what CUDA events around a phase say, on the GPU's own clock; without a
GPU ``<phase>_ns``, by the host's. ``data_ns`` is the host's with a GPU too: how long the step waited for batches. In a
run over several context lengths ``context`` is the step's. (profkit of before 2027 waited after each phase of a
built-in model, and so wrote ``<phase>_ns`` beside ``<phase>_event_ns``.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from profkit.names import DATA, PHASES, STEP

Clock = Literal["wall", "cuda-events"]

_SUFFIX: dict[Clock, str] = {"wall": "_ns", "cuda-events": "_event_ns"}
_CONTEXT = "context"


@dataclass(frozen=True)
class Samples:
    """The steps of one pass.

    ``during`` counts what happened within them that makes a step slow: compiled graphs, allocator retries,
    out-of-memory errors. ``losses`` are those of a built-in model's or a callable's steps.
    """

    steps: tuple[dict[str, int], ...] = ()
    during: dict[str, int] = field(default_factory=dict)
    losses: tuple[float, ...] = ()

    @property
    def contexts(self) -> list[int | None]:
        """Return the context lengths of the steps, in their order; of a run over one, None."""
        return list(dict.fromkeys(step.get(_CONTEXT) for step in self.steps))

    def times_ns(self, clock: Clock, context: int | None) -> dict[str, list[int]]:
        """Return phase → its times in the steps of one context length that have it, in order; the step comes last."""
        found: dict[str, list[int]] = {}
        for step in self.steps:
            if step.get(_CONTEXT) == context:
                for phase, time_ns in _times_of(step, clock).items():
                    found.setdefault(phase, []).append(time_ns)
        return {phase: found[phase] for phase in sorted(found, key=phase_order)}

    def step_ns(self, context: int | None = None) -> list[int]:
        """Return the time of each step of one context length."""
        return self.times_ns("wall", context).get(STEP, [])


def _times_of(step: Mapping[str, int], clock: Clock) -> dict[str, int]:
    other = _SUFFIX["cuda-events"] if clock == "wall" else None
    return {
        name.removesuffix(_SUFFIX[clock]): time_ns
        for name, time_ns in step.items()
        if name.endswith(_SUFFIX[clock]) and not (other and name.endswith(other))
    }


def phase_order(phase: str) -> tuple[int, str]:
    """Return a key that sorts phases as they run, the whole step last."""
    order = (DATA, *PHASES, STEP)
    return (order.index(phase) if phase in order else order.index(STEP), phase)
