"""The replay's self-check: its state after the last event must be the state that the snapshot recorded.

An allocator that was replayed wrongly (other rules, other settings, events lost in between) ends with other blocks:
the snapshot lists each, with address, size and state. Only where all agree is a replayed peak called exact.
"""

from __future__ import annotations

import numpy as np

from profkit.analysis.memory.allocator import Replay
from profkit.analysis.memory.rules import (
    MIN_LARGE_SEGMENT_REQUEST_BYTES,
    SMALL_BYTES,
    round_sizes,
    segment_size_bytes,
)
from profkit.snapshot.columns import ALLOC, ALLOCATED, INACTIVE, PENDING, SEGMENT_ALLOC, Device, Settings


def find_contradictions(device: Device, settings: Settings, replay: Replay) -> dict[str, int]:
    """Return what speaks against the replay, and how often; empty when its figures are proven."""
    found = dict(replay.contradictions)
    for what, count in (
        ("blocks at the dump that the history does not lead to", _count_differences(device, replay)),
        ("segments of a size that the default settings do not give", _count_odd_segments(device, settings)),
    ):
        if count:
            found[what] = count
    return found


def _count_differences(device: Device, replay: Replay) -> int:
    """Return how many blocks are different at the end of the replay and in the snapshot."""
    live = np.flatnonzero(replay.completed == replay.event_count)
    state = np.where(replay.freed[live] == replay.event_count, ALLOCATED, PENDING)
    columns = (replay.address[live], replay.size_bytes[live], state, replay.requested_bytes[live])
    ours = set(zip(*(column.tolist() for column in columns), strict=True))
    ours |= {(address, size, INACTIVE, 0) for address, size in replay.final_free.items()}
    blocks = device.blocks
    requested = np.where(blocks.state == INACTIVE, 0, blocks.requested_bytes)
    theirs = set(
        zip(*(column.tolist() for column in (blocks.address, blocks.size_bytes, blocks.state, requested)), strict=True)
    )
    return len(ours ^ theirs)


def _count_odd_segments(device: Device, settings: Settings) -> int:
    """Return how many segments a default allocator would have made of another size, where no settings are recorded.

    A segment is reserved for the alloc that follows it; one for 1 to 10 MiB may be of a size set by the user.
    """
    if settings.is_recorded:
        return 0
    action, address = device.events.action, device.events.address
    segments = np.flatnonzero((action[:-1] == SEGMENT_ALLOC) & (action[1:] == ALLOC) & (address[:-1] == address[1:]))
    rounded = round_sizes(device.events.size_bytes[segments + 1], settings)
    is_fixed = (rounded <= SMALL_BYTES) | (rounded >= MIN_LARGE_SEGMENT_REQUEST_BYTES)
    expected = [segment_size_bytes(size) for size in rounded.tolist()]
    return int(np.count_nonzero(is_fixed & (device.events.size_bytes[segments] != expected)))
