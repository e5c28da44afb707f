"""The unprofiled twin of a built-in model's run: the same steps, timed, and some more of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import torch

from profkit.capture.conditions import counted_since, read_counters
from profkit.capture.phase_events import PhaseEvents
from profkit.capture.rank_group import decided_by_first
from profkit.capture.step import StepObserver
from profkit.names import STEP

# A median of three says little, and its spread nothing: this many steps of each context, if they are quick.
_ENOUGH_STEPS = 10
_LONGEST_NS = 5_000_000_000


class Steps(Protocol):
    """What is run and timed here."""

    @property
    def losses(self) -> list[float]:
        """Each measured step's loss, where it has one."""

    def run_measured(self) -> list[dict[str, int]]:
        """Run the measured steps, and return each one's times in ns."""


class ObservableSteps(Steps, Protocol):
    """Steps whose phases can be told of."""

    def observe(self, observer: StepObserver) -> None:
        """Tell ``observer`` of each phase and step from now on."""

    def run_unbroken(self) -> list[dict[str, int]]:
        """Run as many steps again, each waited for at its end alone, and return each one's ``step_ns``."""


@dataclass(frozen=True)
class Measured:
    """The measured steps' times in ns and losses, and what happened within them that makes a step slow.

    ``unbroken`` are the times of further steps that wait for the device once, at their end.
    """

    times: list[dict[str, int]]
    losses: list[float]
    during: dict[str, int]
    unbroken: list[dict[str, int]]


def measure_steps(steps: Steps) -> Measured:
    """Run the measured steps once."""
    before = read_counters()
    times = steps.run_measured()
    return Measured(times, list(steps.losses), counted_since(before), [])


def measure_clean(steps: ObservableSteps, device: torch.device) -> Measured:
    """Run the measured steps, and all of them again until there are ten of each context or five seconds would pass.

    The losses are those of the first time alone, for they are what the recorded steps have too. On CUDA each phase and
    step also has its ``_event_ns``, and as many unbroken steps follow: those measured wait for the device after each
    phase, and so take longer than a training loop's.
    """
    events = _EventObserver()
    if device.type == "cuda":
        steps.observe(events)
    before, start_ns = read_counters(), perf_counter_ns()
    times = steps.run_measured()
    losses = list(steps.losses)
    once_ns = perf_counter_ns() - start_ns
    contexts = len({one.get("context") for one in times})

    def goes_on() -> bool:
        quick = perf_counter_ns() - start_ns + once_ns < _LONGEST_NS
        return decided_by_first(len(times) < _ENOUGH_STEPS * contexts and quick, device)

    rounds = 1
    while goes_on():
        times += steps.run_measured()
        rounds += 1
    unbroken = _run_unbroken(steps, rounds) if device.type == "cuda" else []
    by_events = events.steps or [{}] * len(times)
    both = [{**wall, **gpu} for wall, gpu in zip(times, by_events, strict=True)]
    return Measured(both, losses, counted_since(before), unbroken)


def _run_unbroken(steps: ObservableSteps, rounds: int) -> list[dict[str, int]]:
    steps.observe(StepObserver())
    return [one for _ in range(rounds) for one in steps.run_unbroken()]


class _EventObserver(StepObserver):
    """Puts CUDA events around the phases and the steps that are measured."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._events = PhaseEvents()

    @contextmanager
    def step(self, name: str, number: int | None) -> Iterator[None]:
        self._events.begin(STEP)
        yield
        self._events.end(STEP)
        times = self._events.take()
        if number is not None:
            self.steps.append(times)

    def phase_begun(self, name: str) -> None:
        self._events.begin(name)

    def phase_done(self, name: str) -> None:
        self._events.end(name)
