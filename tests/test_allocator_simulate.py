"""The simulator against real snapshots, and against a naive allocator that searches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples

from profkit.allocator.replay import History, replay_history
from profkit.allocator.requests import requests_of
from profkit.allocator.simulate import Simulation, check_identity, simulate
from profkit.snapshot.columns import Settings
from profkit.snapshot.reader import read_snapshot
from tests.allocator_reference import MIB, ReferenceAllocator
from tests.captures import capture
from tests.test_allocator import ALLOCATORS, STEPS, drive, random_steps, replayed

TRACE = Path(__file__).parents[1] / "traces" / "small-train.snapshot.pickle.gz"
REAL: dict[str, Callable[[], Path]] = {
    "small-train": lambda: TRACE,
    "small": lambda: capture("small.pickle"),
    "small_forward": lambda: capture("small_forward_cpp_stacks.pickle"),
    "expandable": lambda: capture("expandable.pickle"),
    "midrun": lambda: capture("midrun.pickle"),
    "oom": lambda: capture("oom.pickle"),
}


def read(path: Path) -> History:
    snapshot = read_snapshot(path)
    return replay_history(snapshot.devices[0], snapshot.settings)


def wrong_addresses(history: History, simulation: Simulation) -> int:
    replay = history.replay
    is_wrong = (simulation.address != replay.address) | (simulation.size_bytes != replay.size_bytes)
    return int(np.count_nonzero(is_wrong))


def peaks(simulation: Simulation) -> tuple[int, int, int]:
    return simulation.allocated_peak_bytes, simulation.requested_peak_bytes, simulation.reserved_peak_bytes


# -- the recorded settings give the recorded addresses ----------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_the_simulator_chooses_every_recorded_address_of_a_real_snapshot(name: str) -> None:
    history = read(REAL[name]())
    simulation = simulate(requests_of(history), history.settings, follows_releases=True)
    curves = history.curves
    assert wrong_addresses(history, simulation) == 0
    assert peaks(simulation) == (curves.allocated.max(), curves.requested.max(), curves.reserved.max())
    assert not simulation.bases_decide


@given(ALLOCATORS, STEPS)
@examples(max_examples=150, deadline=None)
def test_the_simulator_chooses_what_a_searching_allocator_chose(
    allocator: ReferenceAllocator, steps: list[Any]
) -> None:
    allocator.notes_pools = True  # else the pool of a segment that is gone at the dump is unknown
    drive(allocator, [("malloc", 1, 0, (0, 0)), *(step for step in steps if step[0] != "collect")], record_at=0)
    history = replayed(allocator)
    simulation = simulate(requests_of(history), history.settings)
    assert wrong_addresses(history, simulation) == 0
    assert peaks(simulation) == allocator.peaks()


@pytest.mark.parametrize("after", ["default", "expandable", "roundup", "max split"])
def test_the_simulator_goes_on_from_the_state_before_a_recording(after: str) -> None:
    """Recordings that begin in the middle, or whose buffer wrapped, wherever the replay proves what was there."""
    judged = 0
    for seed in range(60):
        chance = random.Random(seed)
        steps = random_steps(chance, 0)
        allocator = ReferenceAllocator(**VARIANTS[after][0], notes_pools=True, max_entries=chance.choice([None, 60]))
        drive(allocator, [*steps, ("malloc", 5, 0, (0, 0))], record_at=chance.randrange(len(steps)))
        history = replayed(allocator)
        if history.bounds is None:
            assert check_identity(history, requests_of(history)).exact
            judged += 1
    assert judged >= 30


# -- other settings ---------------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[dict[str, Any], Settings]] = {
    "default": ({}, Settings()),
    "expandable": ({"expandable": True}, Settings(expandable_segments=True)),
    "roundup": ({"divisions": 4}, Settings(roundup_power2_divisions=(4,) * 16)),
    "max split": ({"max_split": 25 * MIB}, Settings(max_split_size_bytes=25 * MIB)),
}


@pytest.mark.parametrize("after", VARIANTS)
@pytest.mark.parametrize("before", ["default", "expandable"])
def test_the_peaks_under_other_settings_are_those_of_a_run_with_them(before: str, after: str) -> None:
    """Where bases decide, the true peaks need not be those of one simulation; elsewhere they are equal.

    An emptied cache is left out: where it held nothing, the recording does not show that the program emptied it.
    """
    exact = 0
    for seed in range(60):
        steps = [step for step in random_steps(random.Random(seed), 0) if step[0] != "empty_cache"]
        one, other = ReferenceAllocator(**VARIANTS[before][0]), ReferenceAllocator(**VARIANTS[after][0])
        for allocator in (one, other):
            drive(allocator, [("malloc", 1, 0, (0, 0)), *steps], record_at=0)
        simulation = simulate(requests_of(replayed(one)), VARIANTS[after][1])
        if not simulation.bases_decide:
            assert peaks(simulation) == other.peaks()
            exact += 1
    assert exact >= 10
