"""How memory lay in segments at a moment, against the reference allocator's own state at that moment."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.allocator.layout import Layout, lay_out, lay_out_end
from profkit.allocator.replay import History, replay_history
from profkit.snapshot.columns import ALLOCATED, INACTIVE, PENDING
from profkit.snapshot.reader import build_snapshot, read_snapshot
from tests.allocator_reference import MIB, ReferenceAllocator
from tests.captures import capture
from tests.test_allocator import ALLOCATORS, STEPS, drive

_STATES = {"inactive": INACTIVE, "active_allocated": ALLOCATED, "active_pending_free": PENDING}


def blocks_of(layout: Layout | None) -> list[tuple[int, int, int]]:
    assert layout is not None
    return list(zip(layout.address.tolist(), layout.size_bytes.tolist(), layout.state.tolist(), strict=True))


def listed(snapshot: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the blocks that a snapshot lists, by address."""
    return sorted(
        (block["address"], block["size"], _STATES[block["state"]])
        for segment in snapshot["segments"]
        for block in segment["blocks"]
    )


def replay(allocator: ReferenceAllocator) -> History:
    snapshot = build_snapshot(Path("made.pickle"), allocator.snapshot())
    return replay_history(snapshot.devices[0], snapshot.settings)


@given(ALLOCATORS, STEPS, st.integers(1, 250))
@settings(max_examples=100, deadline=None)
def test_the_blocks_of_a_moment_are_those_that_the_allocator_had(
    allocator: ReferenceAllocator, steps: list[Any], stop: int
) -> None:
    steps = [("malloc", 1, 0, (0, 0)), *steps]
    stopped = deepcopy(allocator)
    drive(stopped, steps[:stop], record_at=0)
    drive(allocator, steps, record_at=0)
    history = replay(allocator)
    assert blocks_of(lay_out(history, len(stopped.events))) == listed(stopped.snapshot())
    assert blocks_of(lay_out_end(history)) == listed(allocator.snapshot())


@pytest.mark.parametrize("name", ["small.pickle", "expandable.pickle", "midrun.pickle"])
def test_allocated_pending_and_free_are_all_that_is_reserved(name: str) -> None:
    snapshot = read_snapshot(capture(name))
    history = replay_history(snapshot.devices[0], snapshot.settings)
    for moment in (0, history.peak_moment, len(history.device.events) // 2):
        layout = lay_out(history, moment)
        assert layout is not None
        assert layout.reserved_bytes == history.curves.reserved[moment]
        assert layout.bytes_in(ALLOCATED) == history.curves.allocated[moment]
        assert sum(map(layout.bytes_in, (ALLOCATED, PENDING, INACTIVE))) == layout.reserved_bytes
    end, replayed = lay_out_end(history), lay_out(history, len(history.device.events))
    assert blocks_of(end) == blocks_of(replayed)
    assert end is not None
    assert replayed is not None
    assert (end.row.tolist(), end.releasable_bytes) == (replayed.row.tolist(), replayed.releasable_bytes)


def test_a_history_that_contradicts_its_segments_has_no_layout() -> None:
    allocator = ReferenceAllocator()
    allocator.record()
    allocator.malloc(8 * MIB)
    allocator.free(allocator.malloc(4 * MIB))
    # The last event says that memory was allocated where no segment is.
    allocator._note("alloc", 2**40, MIB, 0)
    assert lay_out(replay(allocator), len(allocator.events)) is None
