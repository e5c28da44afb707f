"""The simulator against real snapshots, and against a naive allocator that searches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profkit.allocator.history import History, replay_history
from profkit.allocator.requests import requests_of
from profkit.allocator.simulate import Simulation, simulate
from profkit.snapshot.columns import Settings
from profkit.snapshot.reader import read_snapshot
from tests.captures import capture

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


@pytest.mark.parametrize("name", REAL)
def test_the_simulator_chooses_every_recorded_address_of_a_real_snapshot(name: str) -> None:
    history = read(REAL[name]())
    simulation = simulate(requests_of(history), history.settings, follows_releases=True)
    assert wrong_addresses(history, simulation) == 0
    assert simulation.allocated_peak_bytes == history.allocated_peak_bytes
    assert simulation.reserved_peak_bytes == int(history.curves.reserved.max())
    assert simulation.requested_peak_bytes == int(history.curves.requested.max())
    assert not simulation.bases_decide


def test_expandable_segments_are_predicted_from_a_recording_without_them() -> None:
    simulation = simulate(requests_of(read(TRACE)), Settings(expandable_segments=True))
    assert (simulation.allocated_peak_bytes, simulation.reserved_peak_bytes) == (3_219_962_880, 3_252_682_752)
    assert not simulation.bases_decide
