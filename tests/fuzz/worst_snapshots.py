"""The worst snapshots of under 10 MB; see `tests.fuzz.worst_exports`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


def event(action: str, address: int, size: int, time: int, frames: Any = None, **more: Any) -> dict[str, Any]:
    found = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time, **more}
    return found if frames is None else found | {"frames": frames}


def segment(address: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    size = sum(block["size"] for block in blocks)
    return {"device": 0, "address": address, "total_size": size, "allocated_size": size, "active_size": size,
            "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
            "blocks": blocks, **more}  # fmt: skip


def block(size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": state, "frames": [], **more}


def snapshot(segments: list[Any], traces: list[Any], **more: Any) -> dict[str, Any]:
    return {"segments": segments, "device_traces": [traces], **more}


def one_block(count: int) -> dict[str, Any]:
    return snapshot([segment(0, [block(512)] * (count * 20))], [])


def one_event(count: int) -> dict[str, Any]:
    return snapshot([segment(0, [block(512, "inactive")])], [event("alloc", 0, 512, 5)] * (count * 20))


def many_allocations(count: int) -> dict[str, Any]:
    """Return allocations in one large segment, freed in an order that leaves the most holes."""
    size, half = 2**21, count // 3
    traces = [event("segment_alloc", 0, size * half, 0)]
    traces += [event("alloc", size * one, size, one) for one in range(half)]
    freed = [*range(0, half, 2), *range(1, half, 2)]
    for at, one in enumerate(freed):
        traces += [event("free_requested", size * one, size, half + at)]
        traces += [event("free_completed", size * one, size, half + at)]
    return snapshot([segment(0, [block(size * half, "inactive")])], traces)


def _simple(count: int, frames: Callable[[int], Any], **more: Any) -> dict[str, Any]:
    traces = [event("segment_alloc", 0, 2**21 * count, 0)]
    traces += [event("alloc", 2**21 * one, 2**21, one, frames(one)) for one in range(count)]
    blocks = [block(2**21, address=2**21 * one) for one in range(count)]
    return snapshot([segment(0, blocks)], traces, **more)


def long_fx_frames(count: int) -> dict[str, Any]:
    """Return stacks of frames that each stand for as many lines as fit."""
    lines = "\n".join(f'File "m{one}.py", line {one}, in f' for one in range(count // 2))
    frame = {"name": "f", "filename": "fx_generated_1.py", "line": 1, "fx_original_trace": lines}
    return _simple(count // 20, lambda one: [{"name": str(one), "filename": "a.py", "line": 1}, frame, frame, frame])


def annotations(count: int) -> dict[str, Any]:
    marks = []
    for one in range(count // 2):
        marks.append({"stage": "START", "name": f"step {one}", "device": 0, "time_us": one})
    for one in range(count // 2):
        marks.append({"stage": "END", "name": f"step {one}", "device": 0, "time_us": count + one})
    return _simple(count // 4, lambda _: [], external_annotations=marks)


def module_texts(count: int) -> dict[str, Any]:
    data = _simple(count // 20, lambda _: [])
    for one, event in enumerate(data["device_traces"][0]):
        event["user_metadata"] = f"profkit:forward:model/m{one}." + ".".join(["a"] * 60)
    return data


def memory_devices(count: int) -> dict[str, Any]:
    one = _simple(count // 3 // 128, lambda _: [])
    segments = [segment(0, one["segments"][0]["blocks"][:], device=device) for device in range(128)]
    return {"segments": segments, "device_traces": [[dict(e) for e in one["device_traces"][0]] for _ in range(128)],
            "external_annotations": [{"stage": "START", "name": f"s{n}", "device": 0, "time_us": n}
                                     for n in range(count // 10)]}  # fmt: skip


def failures(count: int) -> dict[str, Any]:
    traces = [
        event("oom", 0, 2**30, one, [{"name": "f", "filename": f"{one}.py", "line": 1}], device_free=512)
        for one in range(count // 3)
    ]
    blocks = [block(512, "inactive" if one % 2 else "active_allocated") for one in range(count // 3)]
    return snapshot([segment(0, blocks)], traces)


SNAPSHOTS: dict[str, Callable[[int], dict[str, Any]]] = {
    one.__name__.replace("_", " "): one
    for one in (
        one_block, one_event, many_allocations, long_fx_frames, annotations, module_texts, memory_devices, failures,
    )
}  # fmt: skip


def write_snapshot(data: dict[str, Any], path: Path) -> Path:
    path.write_bytes(pickle.dumps(data, 4))
    return path
