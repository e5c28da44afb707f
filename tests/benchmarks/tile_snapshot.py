"""Make a large snapshot out of a small one: ``python tests/benchmarks/tile_snapshot.py SMALL OUT EVENTS``.

Tiles follow one another in time at addresses of their own. Before the next begins, all that a tile left is freed and
its segments are released, so that the whole is a history that an allocator could have had, with the peak of one tile.
Frames are shared as in the original; their lists are each tile's own, as they are in a long recording.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

_SHIFT = 2**40


def tile_snapshot(small: dict[str, Any], event_count: int) -> dict[str, Any]:
    """Return a snapshot with about ``event_count`` events (whole tiles) on device 0."""
    trace = small["device_traces"][0]
    closing = _closing(small["segments"], trace[-1])
    tile = [*trace, *closing]
    tiles = max(round((event_count - len(trace)) / len(tile)), 0)
    span = tile[-1]["time_us"] - tile[0]["time_us"] + 1_000
    events: list[dict[str, Any]] = []
    for number in range(tiles + 1):
        stacks: dict[int, list[Any]] = {}
        for event in tile if number < tiles else trace:
            frames = stacks.setdefault(id(event["frames"]), list(event["frames"]))
            moved = {**event, "time_us": event["time_us"] + number * span, "frames": frames}
            if "addr" in moved:
                moved["addr"] += number * _SHIFT
            events.append(moved)
    segments = [_shift_segment(segment, tiles * _SHIFT) for segment in small["segments"]]
    annotations = [
        {**one, "time_us": one["time_us"] + number * span}
        for number in range(tiles + 1)
        for one in small["external_annotations"]
    ]
    return {**small, "segments": segments, "device_traces": [events], "external_annotations": annotations}


def _closing(segments: list[dict[str, Any]], last: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events that free all blocks and release all segments."""
    live = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    steps = [
        ("free_requested" if half == 0 else "free_completed", block["address"], block["requested_size"])
        for block in live
        for half in range(2)
    ]
    steps += [("segment_free", segment["address"], segment["total_size"]) for segment in segments]
    return [
        {**last, "action": action, "addr": address, "size": size, "time_us": last["time_us"] + after}
        for after, (action, address, size) in enumerate(steps, 1)
    ]


def _shift_segment(segment: dict[str, Any], shift: int) -> dict[str, Any]:
    blocks = [{**block, "address": block["address"] + shift} for block in segment["blocks"]]
    return {**segment, "address": segment["address"] + shift, "blocks": blocks}


def main() -> None:
    small, out, count = sys.argv[1:]
    with Path(small).open("rb") as file:
        data = pickle.load(file)
    tiled = tile_snapshot(data, int(count))
    with Path(out).open("wb") as file:
        pickle.dump(tiled, file, 4)
    print(len(tiled["device_traces"][0]))


if __name__ == "__main__":
    main()
