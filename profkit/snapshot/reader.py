"""Read a PyTorch memory snapshot into columns.

The file is what ``torch.cuda.memory._dump_snapshot`` writes (torch/csrc/cuda/memory_snapshot.cpp and Module.cpp): a
dictionary of ``segments`` and ``device_traces``, which newer versions of torch extend by ``allocator_settings``,
``external_annotations`` and more keys per event. Unknown keys are ignored, and so are events of an unknown kind: what
one did to the blocks, the replay would contradict. A bare list of segments (``torch.cuda.memory_snapshot()``) is a
snapshot without history.

Every value is of its expected type before anything is done with it: one that is nested in itself a hundred times fits
in a kilobyte, and to print, compare or hash it would take for ever.

The blocks of a segment tile it: the first begins where the segment begins, each next one where the one before ends, and
the last ends where the segment ends. A file in which they do not is damaged.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from profkit.errors import SnapshotError
from profkit.snapshot.columns import (
    ACTIONS,
    ALLOCATED,
    INACTIVE,
    NO_SPLIT_LIMIT,
    OTHER,
    PENDING,
    SEGMENT_ALLOC,
    Annotation,
    Blocks,
    Device,
    Events,
    Ints,
    Segments,
    Settings,
    Snapshot,
    read_pool,
)
from profkit.snapshot.unpickler import load_data

_LARGEST = 2**60
"""Every address, size and time is smaller, so that sums of them stay within 64 bits."""

_MOST_DEVICES = 128
"""PyTorch counts devices in 8 bits with a sign."""

_LARGEST_SIZE_T = 2**64 - 1
_MOST_DIVISIONS = 2**16

_STATES = {
    "active_allocated": ALLOCATED,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,  # what the docstring calls it
    "inactive": INACTIVE,
}


def read_snapshot(path: str | Path) -> Snapshot:
    """Return the snapshot in a ``.pickle`` or ``.pickle.gz``.

    Raises:
        SnapshotError: the file cannot be read, is no snapshot, holds impossible values, or no device was used in it.
    """
    return build_snapshot(Path(path), load_data(Path(path)))


def build_snapshot(path: Path, data: Any) -> Snapshot:
    """Return the snapshot in what a pickle held; ``path`` is for messages."""
    try:
        return _build(path, data)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0][:200]
        raise SnapshotError(f"{path}: a pickle, but not of a memory snapshot, or a damaged one ({what})") from None


def _build(path: Path, data: Any) -> Snapshot:
    if isinstance(data, list) and data and all(isinstance(item, dict) and "blocks" in item for item in data):
        data = {"segments": data, "device_traces": []}
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        raise SnapshotError(f"{path}: a pickle, but not of a memory snapshot (it has no list of segments)")
    traces = data.get("device_traces") or []
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise SnapshotError(f"{path}: a pickle, but not of a memory snapshot (its device_traces are not lists)")
    by_device = _read_segments(data["segments"])
    annotations = _read_annotations(_records(data.get("external_annotations") or [], "external_annotations"))
    devices: list[Device] = []
    recorded = [index for index, trace in enumerate(traces) if trace]
    _refuse_shared([traces[index] for index in recorded], "histories")
    for index in sorted({*by_device, *recorded}):
        if not 0 <= index < _MOST_DEVICES:
            raise ValueError("an impossible device")
        events = _read_events(traces[index] if index < len(traces) else [])
        segments, blocks = by_device.get(index) or _tile([])
        device = Device(index, events, segments, blocks, annotations)
        if device.was_used:
            devices.append(device)
    starts = [int(device.events.time_us[0]) for device in devices if len(device.events)]
    devices = [replace(device, zero_us=min(starts)) if len(device.events) else device for device in devices]
    if not devices:
        raise SnapshotError(f"{path}: no device was used in this snapshot; was it dumped before any CUDA allocation?")
    return Snapshot(str(path), tuple(devices), _read_settings(data.get("allocator_settings")))


def _records(entries: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not set(map(type, entries)) <= {dict}:
        raise ValueError(f"{what} is no list of records")
    _refuse_shared(entries, f"records of {what}")
    return entries


def _refuse_shared(entries: list[Any], what: str) -> None:
    """Refuse one object in several places: a small file could so name any amount of data."""
    # An object in one place has as many references as a new one; to count them is five times faster than to compare.
    if max(map(sys.getrefcount, entries), default=0) <= max(map(sys.getrefcount, [object()])):
        return
    if len(set(map(id, entries))) < len(entries):
        raise ValueError(f"two {what} are one and the same")


def _integer(record: dict[str, Any], key: str, default: int | None = None) -> int:
    value = record[key] if default is None else record.get(key, default)
    if not isinstance(value, int):
        raise ValueError(f"{key} is no integer")
    return value


def _read_events(trace: list[dict[str, Any]]) -> Events:
    _records(trace, "a history")
    if trace and "time_us" not in trace[0]:
        raise ValueError("a history without times, as torch before 2.2 wrote it")
    count = len(trace)
    names = list(map(itemgetter("action"), trace))
    if not set(map(type, names)) <= {str}:
        raise ValueError("action is no text")
    action = np.fromiter(map(ACTIONS.get, names, repeat(OTHER)), np.int8, count)
    stream = np.zeros(count, dtype=np.int64)
    of_segments = np.flatnonzero(action >= SEGMENT_ALLOC)
    stream[of_segments] = [_integer(trace[event], "stream", 0) for event in of_segments.tolist()]
    return Events(
        action=action,
        address=_bounded(_read_addresses(trace), "address"),
        size_bytes=_bounded(_column(trace, "size"), "size"),
        time_us=_bounded(_column(trace, "time_us"), "time"),
        stream=stream,
        raw=trace,
    )


def _column(trace: list[dict[str, Any]], key: str) -> Ints:
    return _integers(map(itemgetter(key), trace), key)


def _integers(values: Iterable[Any], what: str) -> Ints:
    try:
        # NumPy would round a fraction off.
        return np.frombuffer(array("q", values), dtype=np.int64)
    except TypeError:
        raise ValueError(f"{what} is no integer") from None


def _read_addresses(trace: list[dict[str, Any]]) -> Ints:
    try:
        return _column(trace, "addr")
    except KeyError:
        return _integers((event.get("addr", event.get("device_free", 0)) for event in trace), "addr")


def _bounded(column: Ints, what: str) -> Ints:
    if len(column) and not (column.min() >= 0 and column.max() < _LARGEST):
        raise ValueError(f"an impossible {what}")
    return column


def _read_annotations(entries: list[dict[str, Any]]) -> tuple[Annotation, ...]:
    """The device of a mark is the current one, which may be another when the range ends."""
    annotations: list[Annotation] = []
    is_open: dict[str, list[int]] = {}
    _bounded(_column(entries, "time_us"), "time of an annotation")
    for entry in sorted(entries, key=itemgetter("time_us")):
        name, time_us = entry["name"], entry["time_us"]
        if not isinstance(name, str):
            raise ValueError("the name of an annotation is no text")
        if entry["stage"] == "START":
            is_open.setdefault(name, []).append(time_us)
        elif starts := is_open.get(name):
            annotations.append(Annotation(name, starts.pop(), time_us))
    for name, starts in is_open.items():
        annotations += [Annotation(name, start, None) for start in starts]
    return tuple(sorted(annotations, key=lambda annotation: (annotation.start_us, -(annotation.end_us or _LARGEST))))


def _read_segments(entries: list[dict[str, Any]]) -> dict[int, tuple[Segments, Blocks]]:
    by_device: dict[int, list[dict[str, Any]]] = {}
    for entry in _records(entries, "segments"):
        by_device.setdefault(_integer(entry, "device", 0), []).append(entry)
    _refuse_shared([entry["blocks"] for entry in entries], "lists of blocks")
    return {device: _tile(its_segments) for device, its_segments in by_device.items()}


def _tile(entries: list[dict[str, Any]]) -> tuple[Segments, Blocks]:
    entries = sorted(entries, key=lambda entry: _integer(entry, "address"))
    rows: list[tuple[int, int, int, int]] = []
    raw: list[dict[str, Any]] = []
    end = 0
    for entry in entries:
        start = entry["address"]
        if start < end:
            raise ValueError("segments overlap")
        end = start
        for block in _records(entry["blocks"], "blocks"):
            size = _integer(block, "size")
            if size <= 0 or _integer(block, "address", end) != end:
                raise ValueError("a segment's blocks do not tile it")
            state = _STATES.get(block["state"]) if isinstance(block["state"], str) else None
            if state is None:
                raise ValueError("a block in an unknown state")
            rows.append((end, size, _integer(block, "requested_size", size), state))
            raw.append(block)
            end += size
        if end != start + _integer(entry, "total_size") or not 0 <= start <= end < _LARGEST:
            raise ValueError("a segment's blocks do not tile it")
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    segments = Segments(
        address=np.array([entry["address"] for entry in entries], dtype=np.int64),
        size_bytes=np.array([entry["total_size"] for entry in entries], dtype=np.int64),
        stream=np.array([_integer(entry, "stream", 0) for entry in entries], dtype=np.int64),
        is_large=np.array([entry.get("segment_type") != "small" for entry in entries], dtype=np.bool_),
        is_expandable=np.array([bool(entry.get("is_expandable")) for entry in entries], dtype=np.bool_),
        pool=[_pool(entry.get("segment_pool_id")) for entry in entries],
    )
    address, size_bytes, requested_bytes, state_codes = columns.T
    return segments, Blocks(address, size_bytes, requested_bytes, state_codes.astype(np.int8), raw)


def _pool(value: Any) -> tuple[int, int]:
    pool = (0, 0) if value is None else read_pool(value)
    if pool is None:
        raise ValueError("segment_pool_id is no pair of integers")
    return pool


def _read_settings(entry: Any) -> Settings:
    """``max_split_size`` is -1 where there is no limit (the C++ counts it in size_t); the divisions are keyed by the
    lower end of their interval in MiB (c10/core/AllocatorConfig.h).
    """
    if not isinstance(entry, dict):
        return Settings()
    limit = _integer(entry, "max_split_size", -1)
    if limit > _LARGEST_SIZE_T:
        raise ValueError("an impossible max_split_size")
    threshold = entry.get("garbage_collection_threshold", 0.0)
    if not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise ValueError("garbage_collection_threshold is no number")
    divisions = entry.get("roundup_power2_divisions") or {}
    keys = divisions if isinstance(divisions, dict) else [None]
    if not all(isinstance(key, str) and len(key) < 20 and key.isdecimal() for key in keys):
        raise ValueError("roundup_power2_divisions is no table of integers")
    ordered = tuple(_integer(divisions, key) for key in sorted(divisions, key=int))
    if not all(0 <= count <= _MOST_DIVISIONS for count in ordered):
        raise ValueError("an impossible number in roundup_power2_divisions")
    text = entry.get("PYTORCH_CUDA_ALLOC_CONF", entry.get("PYTORCH_ALLOC_CONF", ""))
    return Settings(
        is_recorded=True,
        expandable_segments=bool(entry.get("expandable_segments", False)),
        max_split_size_bytes=limit if 0 < limit < NO_SPLIT_LIMIT else NO_SPLIT_LIMIT,
        garbage_collection_threshold=float(threshold),
        roundup_power2_divisions=ordered if any(count > 1 for count in ordered) else (),
        text=text if isinstance(text, str) else "",
    )
