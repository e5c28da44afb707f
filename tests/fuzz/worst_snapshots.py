"""The worst snapshots of under 10 MB; see `tests.fuzz.worst_exports`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


def event(action: str, address: int, size: int, time: int, frames: Any = None, **more: Any) -> dict[str, Any]:
    """Return an event as torch writes it."""
    found = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time, **more}
    return found if frames is None else found | {"frames": frames}


def segment(address: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a segment of some blocks."""
    size = sum(block["size"] for block in blocks)
    return {"device": 0, "address": address, "total_size": size, "allocated_size": size, "active_size": size,
            "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
            "blocks": blocks, **more}  # fmt: skip


def block(size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    """Return a block."""
    return {"size": size, "requested_size": size, "state": state, "frames": [], **more}


def snapshot(segments: list[Any], traces: list[Any], **more: Any) -> dict[str, Any]:
    """Return a snapshot of one device."""
    return {"segments": segments, "device_traces": [traces], **more}


def many_blocks(count: int) -> dict[str, Any]:
    """Return one segment of many free and used blocks, without a history."""
    blocks = [block(512, "inactive" if one % 2 else "active_allocated", address=512 * one) for one in range(count)]
    return snapshot([segment(0, blocks)], [])


def one_block(count: int) -> dict[str, Any]:
    """Return one segment of one block, again and again the same."""
    return snapshot([segment(0, [block(512)] * (count * 20))], [])


def one_event(count: int) -> dict[str, Any]:
    """Return a history of one event again and again."""
    return snapshot([segment(0, [block(512, "inactive")])], [event("alloc", 0, 512, 5)] * (count * 20))


def many_segments(count: int) -> dict[str, Any]:
    """Return segments reserved one after the other in a scattered order, and released in another."""
    order = [(one * 7919) % (count // 2) for one in range(count // 2)]
    traces = [event("segment_map", 2**22 * one, 2**21, at) for at, one in enumerate(order)]
    traces += [event("segment_unmap", 2**22 * one, 2**21, count + at) for at, one in enumerate(reversed(order))]
    traces.append(event("segment_alloc", 2**59, 2**21, 3 * count))
    return snapshot([segment(2**59, [block(2**21, "inactive")])], traces)


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


def deep_stacks(count: int) -> dict[str, Any]:
    """Return stacks as deep as they are read, each of the same frames in another order."""
    pool = [{"name": f"f{one}", "filename": f"/home/train/module_{one}.py", "line": one} for one in range(4_000)]
    return _simple(count // 80, lambda one: [pool[one % 2_000], *pool[1:2_000]])


def long_frames(count: int) -> dict[str, Any]:
    """Return stacks of frames that share one long file name."""
    name = "/site-packages/" * (count // 4)
    pool = [{"name": f"f{one}", "filename": name, "line": one} for one in range(200)]
    return _simple(count // 20, lambda one: [pool[one % 200], *pool[:100]])


def long_fx_frames(count: int) -> dict[str, Any]:
    """Return stacks of frames that each stand for as many lines as fit."""
    lines = "\n".join(f'File "m{one}.py", line {one}, in f' for one in range(count // 2))
    frame = {"name": "f", "filename": "fx_generated_1.py", "line": 1, "fx_original_trace": lines}
    return _simple(count // 20, lambda one: [{"name": str(one), "filename": "a.py", "line": 1}, frame, frame, frame])


def distinct_stacks(count: int) -> dict[str, Any]:
    """Return allocations that each have a stack of their own."""
    return _simple(count // 3, lambda one: [{"name": f"f{one}", "filename": f"/home/{one}.py", "line": 1}])


def annotations(count: int) -> dict[str, Any]:
    """Return allocations among nested annotations."""
    marks = []
    for one in range(count // 2):
        marks.append({"stage": "START", "name": f"step {one}", "device": 0, "time_us": one})
    for one in range(count // 2):
        marks.append({"stage": "END", "name": f"step {one}", "device": 0, "time_us": count + one})
    return _simple(count // 4, lambda _: [], external_annotations=marks)


def memory_steps(count: int) -> dict[str, Any]:
    """Return steps of three phases each, in which allocations are made that nobody frees."""
    marks = []
    for one in range(count // 6):
        for name, low, high in ((f"step {one}", 0, 9), ("forward", 1, 3), ("backward", 4, 6), ("optimizer", 7, 8)):
            marks.append({"stage": "START", "name": name, "device": 0, "time_us": 10 * one + low})
            marks.append({"stage": "END", "name": name, "device": 0, "time_us": 10 * one + high})
    found = _simple(count // 6, lambda one: [{"name": "f", "filename": "/home/t.py", "line": one % 7}])
    for at, event in enumerate(found["device_traces"][0]):
        event["time_us"] = 10 * at + at % 9
    return found | {"external_annotations": marks}


def module_texts(count: int) -> dict[str, Any]:
    """Return allocations of modules that each have a deep name of their own."""
    data = _simple(count // 20, lambda _: [])
    for one, event in enumerate(data["device_traces"][0]):
        event["user_metadata"] = f"profkit:forward:model/m{one}." + ".".join(["a"] * 60)
    return data


def long_texts(count: int) -> dict[str, Any]:
    """Return allocations whose text is as long as the file."""
    data, text = _simple(count // 3, lambda _: []), "x" * (count * 20)
    for event in data["device_traces"][0]:
        event["user_metadata"] = text
    return data


def memory_devices(count: int) -> dict[str, Any]:
    """Return 128 devices with as many allocations each."""
    one = _simple(count // 3 // 128, lambda _: [])
    segments = [segment(0, one["segments"][0]["blocks"][:], device=device) for device in range(128)]
    return {"segments": segments, "device_traces": [[dict(e) for e in one["device_traces"][0]] for _ in range(128)],
            "external_annotations": [{"stage": "START", "name": f"s{n}", "device": 0, "time_us": n}
                                     for n in range(count // 10)]}  # fmt: skip


def failures(count: int) -> dict[str, Any]:
    """Return allocations that all failed."""
    traces = [
        event("oom", 0, 2**30, one, [{"name": "f", "filename": f"{one}.py", "line": 1}], device_free=512)
        for one in range(count // 3)
    ]
    blocks = [block(512, "inactive" if one % 2 else "active_allocated") for one in range(count // 3)]
    return snapshot([segment(0, blocks)], traces)


def small_segments(count: int) -> dict[str, Any]:
    """Return as many segments as fit, of one block each."""
    return snapshot([segment(2**22 * one, [block(2**21)]) for one in range(count // 3)], [])


SNAPSHOTS: dict[str, Callable[[int], dict[str, Any]]] = {
    one.__name__.replace("_", " "): one
    for one in (
        many_blocks, one_block, one_event, many_segments, many_allocations, deep_stacks, long_frames, long_fx_frames,
        distinct_stacks, annotations, memory_steps, module_texts, long_texts, memory_devices, failures, small_segments,
    )
}  # fmt: skip


def write_snapshot(data: dict[str, Any], path: Path) -> Path:
    """Write a snapshot."""
    path.write_bytes(pickle.dumps(data, 4))
    return path
