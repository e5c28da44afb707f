"""The Snapshot: the columns that the reader fills and that every analysis of memory reads.

One `Device` a GPU, because the allocator keeps one history, one set of segments and one pair of pools for each. Events
are NumPy arrays of one length in the order in which the allocator recorded them (which is the order in which they
happened: they are written under the allocator's lock). Sizes of events are *requested* bytes; sizes of blocks are what
the allocator charged. Times are microseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]

Stack = tuple[tuple[str, str, int], ...]
"""Frames from the innermost outwards: (function, file, line)."""

ALLOC, FREE_COMPLETED, FREE_REQUESTED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM, OTHER = range(9)
"""What an event did; `OTHER` is any kind that this reader does not know, and the allocator's own ``snapshot`` marks."""

ACTIONS = {
    "alloc": ALLOC,
    "free_completed": FREE_COMPLETED,
    "free_requested": FREE_REQUESTED,
    "segment_alloc": SEGMENT_ALLOC,
    "segment_free": SEGMENT_FREE,
    "segment_map": SEGMENT_MAP,
    "segment_unmap": SEGMENT_UNMAP,
    "oom": OOM,
    "snapshot": OTHER,
}

INACTIVE, ALLOCATED, PENDING = range(3)
"""State of a block: free for reuse, in use, or freed by the program while another stream still uses it."""

NO_SPLIT_LIMIT = 2**62
"""``max_split_size_bytes`` when blocks of every size may be split."""


@dataclass(frozen=True)
class Settings:
    """The allocator's settings at the time of the dump; the defaults where the file records none."""

    is_recorded: bool = False
    expandable_segments: bool = False
    max_split_size_bytes: int = NO_SPLIT_LIMIT
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = ()
    """Divisions between two powers of two, for sizes from 1 MiB, 2 MiB, 4 MiB … up; empty when all are 0."""
    text: str = ""
    """``PYTORCH_CUDA_ALLOC_CONF`` as the process had it."""


@dataclass(frozen=True, eq=False)
class Events:
    """One device's history. ``raw`` are the pickle's own dictionaries, for the stacks and metadata of a few events."""

    action: Codes
    address: Ints
    """Where it happened; for an `OOM`, how many bytes CUDA said were free on the device."""
    size_bytes: Ints
    time_us: Ints
    stream: Ints
    """Of events on segments and of an `OOM`; 0 for allocs and frees, where reading it would only take time."""
    raw: Sequence[dict[str, Any]] = ()

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, eq=False)
class Segments:
    """What the device had reserved at the dump, sorted by address; a row is a segment or a mapped part of one."""

    address: Ints
    size_bytes: Ints
    stream: Ints
    is_large: npt.NDArray[np.bool_]
    is_expandable: npt.NDArray[np.bool_]
    pool: list[tuple[int, int]]
    """``(0, 0)`` is the default pool; anything else a private one (CUDA graphs, ``torch.cuda.MemPool``)."""

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The pieces of the segments at the dump, sorted by address."""

    address: Ints
    size_bytes: Ints
    requested_bytes: Ints
    state: Codes
    raw: Sequence[dict[str, Any]] = ()

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True)
class Annotation:
    """A ``record_function`` that was open on the host; ``end_us`` is None if it was still open at the dump."""

    name: str
    start_us: int
    end_us: int | None


@dataclass(frozen=True, eq=False)
class Device:
    """Everything that the snapshot says about one GPU."""

    index: int
    events: Events
    segments: Segments
    blocks: Blocks
    annotations: tuple[Annotation, ...] = ()
    """Of the whole process: one thread works for all devices, and torch notes each range at the current one alone."""
    zero_us: int = 0
    """The first event's time on any device of the snapshot, so that the moments of two devices can be compared."""

    @property
    def was_used(self) -> bool:
        return bool(len(self.events) or len(self.segments))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One memory snapshot, from one file."""

    path: str
    devices: tuple[Device, ...]
    """The devices that were used, by index."""
    settings: Settings


MOST_FRAMES = 2000
"""Twice as deep as Python calls itself."""

_MOST_LINES = 2**31
# Linux has no longer paths.
_LONGEST_TEXT = 4096
_LONGEST_TRACE = 2**16
_LONGEST_NUMBER = 10


def read_frame(frame: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield (function, file, line) of a frame, then of what FX generated its code from, innermost first."""
    yield _text(frame.get("name")), _text(frame.get("filename")), _line(frame.get("line"))
    for line in reversed(_text(frame.get("fx_original_trace"), _LONGEST_TRACE).splitlines()):
        place, _, name = line.partition(", in ")
        file, is_there, number = place.strip().removeprefix('File "').partition('", line ')
        if is_there:
            yield name, file, int(number) if number.isdecimal() and len(number) < _LONGEST_NUMBER else 0


def write_frame(lines: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return the frame of which `read_frame` yields these lines."""
    name, file, line = lines[0]
    frame: dict[str, Any] = {"name": name, "filename": file, "line": line}
    if len(lines) > 1:
        made_from = (f'File "{file}", line {line}, in {name}' for name, file, line in reversed(lines[1:]))
        frame["fx_original_trace"] = "\n".join(made_from)
    return frame


def read_pool(value: object) -> tuple[int, int] | None:
    """Return the id of a memory pool; None of anything else."""
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, int) for part in value):
        return value[0], value[1]
    return None


def _text(value: Any, longest: int = _LONGEST_TEXT) -> str:
    return value[:longest] if isinstance(value, str) else "?"


def _line(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < _MOST_LINES else 0
