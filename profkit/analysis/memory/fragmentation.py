"""Memory that is reserved and not allocated: how much at a moment, and in what pieces at the dump."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.memory.peak import History
from profkit.snapshot.columns import INACTIVE


@dataclass(frozen=True)
class Fragmentation:
    """Reserved memory that holds nothing; the second half describes the free blocks at the dump."""

    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int
    """Freed by the program, awaited by another stream."""
    free_bytes: int
    free_share: float
    """Of the reserved bytes."""
    padding_bytes: int
    """Allocated beyond what was requested: rounding, and rests too small to split off."""
    end_free_bytes: int
    end_free_blocks: int
    end_largest_free_bytes: int
    end_releasable_bytes: int
    """Whole segments without a live block: what ``empty_cache()`` would give back (of expandable ones, roughly)."""


def measure_fragmentation(history: History, moment: int) -> Fragmentation:
    """Return what was reserved and not allocated at a moment on the curves."""
    replay, curves, blocks, segments = history.replay, history.curves, history.device.blocks, history.device.segments
    is_live = (replay.birth < moment) & (replay.freed >= moment)
    is_pending = (replay.freed < moment) & (replay.completed >= moment)
    allocated, reserved = int(curves.allocated[moment]), int(curves.reserved[moment])
    pending = int(replay.size_bytes[is_pending].sum())
    free = reserved - allocated - pending
    is_free = blocks.state == INACTIVE
    is_whole = is_free & (blocks.size_bytes == segments.size_bytes[blocks.segment])
    is_releasable = np.where(segments.is_expandable[blocks.segment], is_free, is_whole)
    return Fragmentation(
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        pending_bytes=pending,
        free_bytes=free,
        free_share=free / reserved if reserved else 0.0,
        padding_bytes=allocated - int(replay.requested_bytes[is_live].sum()),
        end_free_bytes=int(blocks.size_bytes[is_free].sum()),
        end_free_blocks=int(np.count_nonzero(is_free)),
        end_largest_free_bytes=int(blocks.size_bytes[is_free].max(initial=0)),
        end_releasable_bytes=int(blocks.size_bytes[is_releasable].sum()),
    )
