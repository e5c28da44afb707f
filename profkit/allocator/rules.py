"""The caching allocator's arithmetic: how it rounds a request and when it splits a free block.

Facts of c10/cuda/CUDACachingAllocator.cpp (``round_size``, ``should_split``, ``get_allocation_size``), the same from
torch 2.1 to 2.13. Everything is in bytes and vectorised, because a history has hundreds of thousands of requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profkit.snapshot.columns import Ints, Settings

MIN_BLOCK_BYTES = 512
"""All sizes are multiples of this. In the small pool and in expandable segments any such rest is split off."""

SMALL_BYTES = 2**20
"""Requests up to this (rounded) come from the small pool. In the large pool a rest must be larger than this to be
split off, so every free block of the large pool is larger than this."""

SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
MIN_LARGE_SEGMENT_REQUEST_BYTES = 10 * 2**20

MIN_SPLIT_LIMIT_BYTES = 21 * 2**20
"""``max_split_size_mb`` must be larger than 20."""

NEVER = 2**62


def round_sizes(requested_bytes: Ints, settings: Settings) -> Ints:
    """Return the size of block that the allocator looks for when asked for ``requested_bytes``.

    That is the next multiple of 512, at least 512. Under ``roundup_power2_divisions``, and above 512 times the
    divisions of the size's interval, it is the next of that many equal steps between two powers of two.
    """
    rounded = np.maximum(-(-requested_bytes // MIN_BLOCK_BYTES), 1) * MIN_BLOCK_BYTES
    if not settings.roundup_power2_divisions:
        return rounded
    table = np.array(settings.roundup_power2_divisions, dtype=np.int64)
    exponent = _floor_log2(np.maximum(requested_bytes, 1))
    divisions = table[np.clip(exponent - 20, 0, len(table) - 1)]
    applies = (divisions > 1) & (requested_bytes > MIN_BLOCK_BYTES * divisions)
    floor = np.left_shift(1, exponent)
    step = np.right_shift(floor, _floor_log2(np.maximum(divisions, 1)))
    coarse = np.where(step > 0, -(-requested_bytes // np.maximum(step, 1)) * step, 2 * floor)
    return np.where(applies, np.where(requested_bytes == floor, requested_bytes, coarse), rounded)


def smallest_rests(rounded_bytes: Ints, settings: Settings, is_expandable: bool) -> Ints:
    """Return for each rounded size the smallest rest that is split off; a smaller rest stays with the block.

    Args:
        is_expandable: whether the memory lies in expandable segments.
    """
    if is_expandable:
        return np.full(len(rounded_bytes), MIN_BLOCK_BYTES, dtype=np.int64)
    large = np.where(rounded_bytes < settings.max_split_size_bytes, SMALL_BYTES + MIN_BLOCK_BYTES, NEVER)
    return np.where(rounded_bytes <= SMALL_BYTES, MIN_BLOCK_BYTES, large)


def depends_on_settings(size_bytes: int, rest_bytes: int) -> bool:
    """Return whether other settings would have kept with a block a rest that these split off, or the reverse.

    ``expandable_segments`` decides about rests of up to 1 MiB, in plain segments too; ``max_split_size_mb`` about rests
    of blocks of that size, which are smaller than 20 MiB (a larger block would not have served the request).
    """
    if size_bytes <= SMALL_BYTES or rest_bytes < MIN_BLOCK_BYTES:
        return False
    return rest_bytes <= SMALL_BYTES or (size_bytes >= MIN_SPLIT_LIMIT_BYTES and rest_bytes < LARGE_SEGMENT_BYTES)


def is_oversized(have_bytes: int, want_bytes: int, settings: Settings) -> bool:
    """Return whether ``max_split_size_mb`` keeps a free block from a request that fits in it."""
    limit = settings.max_split_size_bytes
    return have_bytes >= limit if want_bytes < limit else have_bytes >= want_bytes + LARGE_SEGMENT_BYTES


def segment_size_bytes(rounded_bytes: int) -> int:
    """Return the size of the segment that the allocator reserves for a request that no free block serves."""
    if rounded_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < MIN_LARGE_SEGMENT_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


def _floor_log2(values: Ints) -> npt.NDArray[np.int64]:
    # frexp of a float64 is exact only below 2**53; sizes are below 2**60, so correct where rounding went up.
    exponent = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1
    return np.where(np.left_shift(1, exponent) > values, exponent - 1, exponent)
