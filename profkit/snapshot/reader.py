"""Read a PyTorch memory snapshot into columns.

The file is what ``torch.cuda.memory._dump_snapshot`` writes (torch/csrc/cuda/memory_snapshot.cpp and Module.cpp): a
dictionary of ``segments`` and ``device_traces``, joined over the years by ``allocator_settings``,
``external_annotations`` and more keys per event. What is there is read, what is missing is said; keys and actions yet
to be invented are passed over, actions counted. A bare list of segments (``torch.cuda.memory_snapshot()``) is a
snapshot without history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from profkit.errors import SnapshotError
from profkit.snapshot.columns import (
    ACTIONS,
    OTHER,
    Annotation,
    Device,
    Events,
    Ints,
    Snapshot,
)
from profkit.snapshot.segments import no_segments, read_segments
from profkit.snapshot.settings import read_settings
from profkit.snapshot.unpickler import load_data

_LARGEST = 2**60
"""No address, size or time is as large; sums of them then stay within 64 bits."""


def read_snapshot(path: str | Path) -> Snapshot:
    """Return the snapshot in a ``.pickle`` or ``.pickle.gz``.

    Raises:
        SnapshotError: the file cannot be read, is no snapshot, holds impossible values, or no device was used in it.
    """
    return build_snapshot(Path(path), load_data(Path(path)))


def build_snapshot(path: Path, data: Any) -> Snapshot:
    """Return the snapshot in what a pickle held; ``path`` is for messages.

    Raises:
        SnapshotError: it is no snapshot, holds impossible values, or no device was used in it.
    """
    try:
        return _build(path, data)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise SnapshotError(f"{path}: a pickle, but not of a memory snapshot, or a damaged one ({what})") from None


def _build(path: Path, data: Any) -> Snapshot:
    if isinstance(data, list) and data and all(isinstance(item, dict) and "blocks" in item for item in data):
        data = {"segments": data, "device_traces": []}
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        raise SnapshotError(f"{path}: a pickle, but not of a memory snapshot (it has no list of segments)")
    traces = data.get("device_traces") or []
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise SnapshotError(f"{path}: a pickle, but not of a memory snapshot (its device_traces are no lists)")
    by_device = read_segments(data["segments"])
    annotations = _read_annotations(data.get("external_annotations") or [])
    unknown: Counter[str] = Counter()
    devices = []
    for index in sorted({*by_device, *range(len(traces))}):
        events = _read_events(traces[index] if index < len(traces) else [], unknown)
        segments, blocks = by_device.get(index) or no_segments()
        device = Device(index, events, segments, blocks, annotations.get(index, ()))
        if device.was_used:
            devices.append(device)
    if not devices:
        raise SnapshotError(f"{path}: no device was used in this snapshot; was it dumped before any CUDA allocation?")
    return Snapshot(str(path), tuple(devices), read_settings(data.get("allocator_settings")), (), dict(unknown))


def _read_events(trace: list[dict[str, Any]], unknown: Counter[str]) -> Events:
    actions = list(map(itemgetter("action"), trace))
    codes = {name: ACTIONS.get(name, OTHER) for name in set(actions)}
    for name in codes.keys() - ACTIONS.keys():
        unknown[str(name)] += actions.count(name)
    has_times = bool(trace) and "time_us" in trace[0]
    count = len(trace)
    return Events(
        action=np.fromiter(map(codes.__getitem__, actions), np.int8, count),
        address=_read_addresses(trace),
        size_bytes=_bounded(np.fromiter(map(itemgetter("size"), trace), np.int64, count), "size"),
        time_us=_bounded(np.fromiter(map(itemgetter("time_us"), trace), np.int64, count), "time")
        if has_times
        else np.arange(count, dtype=np.int64),
        stream=np.fromiter(_column(trace, "stream", 0), np.int64, count),
        raw=trace,
        has_times=has_times,
    )


def _read_addresses(trace: list[dict[str, Any]]) -> Ints:
    """Return where each event happened; out-of-memory events carry ``device_free`` instead."""
    try:
        addresses = np.fromiter(map(itemgetter("addr"), trace), np.int64, len(trace))
    except KeyError:
        found = (event.get("addr", event.get("device_free", 0)) for event in trace)
        addresses = np.fromiter(found, np.int64, len(trace))
    return _bounded(addresses, "address")


def _column(trace: list[dict[str, Any]], key: str, default: int) -> Iterable[int]:
    if trace and key in trace[0]:
        return map(itemgetter(key), trace)
    return (event.get(key, default) for event in trace)


def _bounded(column: Ints, what: str) -> Ints:
    if len(column) and not (column.min() >= 0 and column.max() < _LARGEST):
        raise ValueError(f"an impossible {what}")
    return column


def _read_annotations(entries: list[dict[str, Any]]) -> dict[int, tuple[Annotation, ...]]:
    """Pair the START and END marks of ``record_function`` ranges, per device and name, innermost first."""
    found: dict[int, list[Annotation]] = {}
    is_open: dict[tuple[int, str], list[int]] = {}
    for entry in sorted(entries, key=itemgetter("time_us")):
        device, name, time_us = int(entry.get("device", 0)), str(entry["name"]), int(entry["time_us"])
        if entry["stage"] == "START":
            is_open.setdefault((device, name), []).append(time_us)
        elif starts := is_open.get((device, name)):
            found.setdefault(device, []).append(Annotation(name, starts.pop(), time_us))
    for (device, name), starts in is_open.items():
        found.setdefault(device, []).extend(Annotation(name, start, None) for start in starts)
    return {
        device: tuple(sorted(ranges, key=lambda one: (one.start_us, -(one.end_us or _LARGEST))))
        for device, ranges in found.items()
    }
