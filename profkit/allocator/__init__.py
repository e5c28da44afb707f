"""PyTorch's caching allocator, replayed. Its arithmetic: how it rounds a request and when it splits a free block.

Facts of c10/cuda/CUDACachingAllocator.cpp (``round_size``, ``should_split``, ``get_allocation_size``), the same from
torch 2.1 to 2.13. Everything is in bytes and vectorised, because a history has hundreds of thousands of requests.

Settings are written as in ``PYTORCH_CUDA_ALLOC_CONF``: ``expandable_segments:True,max_split_size_mb:128``
(c10/core/AllocatorConfig.cpp, and c10/cuda/CUDAAllocatorConfig.cpp before torch 2.9). Those that do not change which
memory is taken are accepted and left out.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from profkit.errors import UsageError
from profkit.snapshot.columns import NO_SPLIT_LIMIT, Ints, Settings

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
    """Return for each rounded size the smallest rest that is split off; a smaller rest stays with the block."""
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


_MIB = 2**20
_INTERVALS = 16
"""Of ``roundup_power2_divisions``: from 1 MiB, from 2 MiB … and from 32 GiB on."""
_ITEM = re.compile(r"(?P<key>\w+):(?P<value>\[[^\]]*\]|[^,\[\]]+)(,|$)")
_DIVISION = re.compile(r"(>|\d+):(\d+)")
_NO_EFFECT = {"release_lock_on_cudamalloc", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom"}
_KNOWN = "expandable_segments, max_split_size_mb, roundup_power2_divisions, garbage_collection_threshold"


def parse_settings(text: str) -> Settings:
    """Return the settings that ``text`` means; an empty text means the defaults.

    Raises:
        UsageError: torch would refuse it, or profkit does not simulate it.
    """
    text = re.sub(r"\s", "", text)
    expandable, limit, threshold = False, NO_SPLIT_LIMIT, 0.0
    divisions: tuple[int, ...] = ()
    at = 0
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None:
            raise UsageError(f"allocator setting {text[at:]!r}: write KEY:VALUE,KEY:VALUE, such as {_EXAMPLE}")
        key, value, at = item["key"], item["value"], item.end()
        if key == "expandable_segments":
            expandable = _choice(key, value, {"True": True, "False": False})
        elif key == "max_split_size_mb":
            limit = _number(key, value, LARGE_SEGMENT_BYTES // _MIB) * _MIB
        elif key == "garbage_collection_threshold":
            threshold = _fraction(key, value)
        elif key == "roundup_power2_divisions":
            divisions = _divisions(key, value)
        elif key == "backend":
            _choice(key, value, {"native": None})
        elif key not in _NO_EFFECT and not key.startswith("pinned_"):
            raise UsageError(f"allocator setting {key!r}: profkit simulates {_KNOWN}")
    return Settings(
        is_recorded=True,
        expandable_segments=expandable,
        max_split_size_bytes=min(limit, NO_SPLIT_LIMIT),
        garbage_collection_threshold=threshold,
        roundup_power2_divisions=divisions,
    )


_EXAMPLE = "expandable_segments:True,max_split_size_mb:128"


def format_settings(settings: Settings) -> str:
    """Return the settings in torch's syntax; an empty text for the defaults."""
    parts = []
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if settings.max_split_size_bytes < NO_SPLIT_LIMIT:
        parts.append(f"max_split_size_mb:{settings.max_split_size_bytes // _MIB}")
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    if settings.roundup_power2_divisions:
        parts.append(f"roundup_power2_divisions:{_format_divisions(settings.roundup_power2_divisions)}")
    return ",".join(parts)


def _choice(key: str, value: str, choices: dict[str, bool] | dict[str, None]) -> bool:
    if value not in choices:
        forms = " or ".join(f"{key}:{choice}" for choice in choices)
        raise UsageError(f"allocator setting {key}:{value}: write {forms}")
    return bool(choices[value])


def _number(key: str, value: str, more_than: int) -> int:
    if not value.isdecimal() or len(value) > 12 or int(value) <= more_than:
        raise UsageError(f"allocator setting {key}:{value}: torch wants a whole number above {more_than}")
    return int(value)


def _fraction(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise UsageError(f"allocator setting {key}:{value}: torch wants a number between 0 and 1")
    return number


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Return the divisions of each interval; empty if all of them are 0 or 1, which divide nothing.

    In a list, sizes below its first interval are divided as that one; ``>`` stands for all after the last one. (Up to
    torch 2.8 it replaces the last one, too.)
    """
    wrong = UsageError(f"allocator setting {key}:{value}: write a power of two, or a list such as [64:8,256:4,>:1]")
    if not value.startswith("["):
        table = [_power(value, wrong)] * _INTERVALS
    else:
        table, last = [0] * _INTERVALS, -1
        for text in value[1:-1].split(","):
            item = _DIVISION.fullmatch(text)
            if item is None:
                raise wrong
            divisions = 0 if item[2] == "0" else _power(item[2], wrong)
            if item[1] == ">":
                table[last + 1 :] = [divisions] * (_INTERVALS - last - 1)
                continue
            index = min(_power(item[1], wrong).bit_length() - 1, _INTERVALS - 1)
            if last < 0:
                table[:index] = [divisions] * index
            table[index], last = divisions, index
    return tuple(table) if any(count > 1 for count in table) else ()


def _power(text: str, wrong: UsageError) -> int:
    number = int(text) if text.isdecimal() and len(text) < 8 else 0
    if number < 1 or number & (number - 1):
        raise wrong
    return number


def _format_divisions(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    last = max(at for at, count in enumerate(divisions) if count != divisions[-1]) + 1
    # The last interval is written out before `>`, so that every version of torch reads the same.
    parts = [f"{2**at}:{count}" for at, count in enumerate(divisions[: last + 1])]
    return f"[{','.join(parts)},>:{divisions[-1]}]"


def list_variants(settings: Settings) -> list[Settings]:
    """Return the settings that are worth a try instead of ``settings``: each changes one thing, or all to the default.

    ``max_split_size_mb`` and garbage collection are for plain segments. Collection starts at a limit of memory, so
    without one it changes nothing.
    """
    plain = replace(settings, is_recorded=True, text="")
    candidates = [replace(plain, expandable_segments=not plain.expandable_segments), Settings(is_recorded=True)]
    candidates += [replace(plain, roundup_power2_divisions=(count,) * _INTERVALS) for count in (4, 8)]
    candidates += [replace(plain, max_split_size_bytes=count * _MIB) for count in (64, 128, 512)]
    candidates.append(replace(plain, garbage_collection_threshold=0.8))
    unique: dict[str, Settings] = {}
    for candidate in candidates:
        is_mixed = candidate.max_split_size_bytes < NO_SPLIT_LIMIT or candidate.garbage_collection_threshold > 0
        if not (is_mixed and candidate.expandable_segments):
            unique.setdefault(format_settings(candidate), candidate)
    unique.pop(format_settings(settings), None)
    return list(unique.values())
