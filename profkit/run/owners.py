"""``ledger.jsonl``: which tensor each allocation held, written next to a snapshot while the allocator was recorded.

Whose storage lies where (`Owned`), what the allocator says of itself (`Figures`), and when steps began and ended
(`Step`): one JSON object a line, in order of time. ``time_us`` are microseconds since the epoch on the host's clock,
which is the clock of the snapshot's events. A last line that was cut off is left out::

    {"kind": "header", "version": 1, "torch": "2.11.0", "peaks_reset_us": 1795193514683000}
    {"kind": "step", "name": "step 0", "start_us": …, "end_us": …, "time_us": …}
    {"kind": "owned", "time_us": …, "device": 0, "address": 140676150853632, "bytes": 30720000,
     "offset_bytes": 0, "own_bytes": 30720000, "element_bytes": 4, "role": "parameter", "name": "head.weight",
     "step": 0}
    {"kind": "figures", "time_us": …, "device": 0, "moment": "step 0" | "start" | "dump",
     "allocated_bytes": …, "allocated_peak_bytes": …, "requested_bytes": …, "requested_peak_bytes": …,
     "reserved_bytes": …, "reserved_peak_bytes": …, "capacity_bytes": 150…}
    {"kind": "unread", "time_us": …, "step": 0, "saved_tensors": 3}

``address`` is that of the *storage* (``tensor.untyped_storage().data_ptr()``), ``bytes`` its ``nbytes()``: views and
tied tensors then name one allocation, each in a line of its own. ``offset_bytes`` and ``own_bytes`` say which part of
the storage the named tensor spans; older files lack them and ``element_bytes``. ``role`` is one of `ROLES`. ``name`` is
the parameter's qualified name, for optimizer state followed by the state's (``head.weight.exp_avg``), for a saved
tensor the module that ran. ``figures`` are ``torch.cuda.memory_stats``; peaks count from ``peaks_reset_us``, just
before the first event, and those of the moment ``start`` from before. ``capacity_bytes`` is the device's memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profkit.errors import SnapshotError
from profkit.run import LARGEST_NUMBER, WrongRecord, decode, read_lines
from profkit.text_kinds import ModuleName, RangeName, Word

VERSION = 1

ROLES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "buffer": "buffers",
    "input": "inputs",
    "saved": "activations",
    "workspace": "workspace",
    "communication": "communication",
    "autocast": "autocast copies",
}
"""Role → category of memory."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A storage that was alive at ``time_us``, and whose it is."""

    time_us: int
    device: int
    address: int
    size_bytes: int
    role: Word
    name: ModuleName
    step: int | None
    offset_bytes: int | None = None
    own_bytes: int | None = None
    """Which part of the storage the tensor spans; None where an older file does not say."""
    element_bytes: int | None = None
    """The size of one element; None where an older file does not say."""


@dataclass(frozen=True)
class Figures:
    """What the allocator said of itself; peaks since they were reset."""

    time_us: int
    device: int
    moment: RangeName
    allocated_bytes: int
    allocated_peak_bytes: int
    requested_bytes: int
    requested_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        if min(value for name, value in vars(self).items() if name.endswith("_bytes") and value is not None) < 0:
            raise ValueError("a negative size")


START = "start"
"""``moment`` of the figures from before the recording."""


@dataclass(frozen=True)
class Step:
    name: RangeName
    start_us: int
    end_us: int


@dataclass(frozen=True)
class Owners:
    owned: tuple[Owned, ...] = ()
    figures: tuple[Figures, ...] = ()
    steps: tuple[Step, ...] = ()
    unread_saved_tensors: int = 0
    """How many tensors that autograd kept for a backward pass the recorder could not find."""


def read_owners(path: Path) -> Owners:
    """Return the owners written beside a snapshot; unknown kinds and keys are passed over.

    Raises:
        SnapshotError: it cannot be read, is of a newer version, or a line other than the last is damaged.
    """
    owned: list[Owned] = []
    figures: list[Figures] = []
    steps: list[Step] = []
    unread: list[int] = []

    def take(entry: dict[str, Any]) -> None:
        kind = entry["kind"]
        if kind == "owned":
            owned.append(_owned(entry))
        elif kind == "figures":
            figures.append(decode(Figures, entry))
        elif kind == "step":
            steps.append(decode(Step, entry))
        elif kind == "unread":
            unread.append(_number(entry, "saved_tensors"))
        elif kind == "header" and _number(entry, "version") > VERSION:
            raise SnapshotError(f"{path}: version {entry['version']}, written by a newer profkit")

    try:
        read_lines(path, take, "a line of a ledger of owners", SnapshotError)
    except FileNotFoundError:
        raise SnapshotError(f"{path}: no such file") from None
    return Owners(tuple(owned), tuple(figures), tuple(steps), sum(unread))


def write_owners(path: Path, owners: Owners) -> None:
    lines: list[dict[str, Any]] = [{"kind": "header", "version": VERSION}]
    lines += [{"kind": "step", **asdict(step)} for step in owners.steps]
    for owned in owners.owned:
        entry = asdict(owned)
        lines.append({"kind": "owned", "bytes": entry.pop("size_bytes"), **entry})
    lines += [{"kind": "figures", **asdict(figures)} for figures in owners.figures]
    lines.append({"kind": "unread", "saved_tensors": owners.unread_saved_tensors})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _owned(entry: dict[str, Any]) -> Owned:
    """Return what `decode` would, in a third of the time: a long run leaves a million of these lines."""
    return Owned(
        _number(entry, "time_us"),
        _number(entry, "device") if "device" in entry else 0,
        _number(entry, "address"),
        _number(entry, "bytes"),
        _text(entry, "role"),
        _text(entry, "name"),
        *(
            None if entry.get(key) is None else _number(entry, key)
            for key in ("step", "offset_bytes", "own_bytes", "element_bytes")
        ),
    )


def _number(entry: dict[str, Any], key: str) -> int:
    value = entry[key]
    if not isinstance(value, int) or not abs(value) < LARGEST_NUMBER:
        raise WrongRecord(f"{key} is no whole number")
    return value


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry[key]
    if not isinstance(value, str):
        raise WrongRecord(f"{key} is no text")
    return value
