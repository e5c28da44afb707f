"""The worst traces of torch.profiler of under 10 MB; see `tests.fuzz.worst_exports`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kineto_builder import flow, kernel, launch, row, thread_name


def _with_thread(events: list[Any]) -> list[Any]:
    return [thread_name(100, "thread 100 (python)"), thread_name(117, "thread 117 (pt_autograd_0)"), *events]


def nested_annotations(count: int) -> list[Any]:
    """Return annotations nested as deep as is read, each around kernels."""
    events = []
    depth = min(2_400, count)
    for first in range(0, count // 2, depth):
        at = 5_000 * (first // depth)
        for level in range(depth):
            events.append(row("user_annotation", f"a{first + level}", at + level, 4_900 - 2 * level))
        events += [launch(at + 2_401, first + 1), kernel("k", at + 2_402, 5, first + 1)]
    return events


def nested_operators(count: int) -> list[Any]:
    """Return operators within operators without end, and launches after all of them."""
    half = count // 3
    events = [row("cpu_op", "aten::mm", one, 2 * count - 2 * one) for one in range(half)]
    for one in range(half // 2):
        at = 3 * count + one
        events += [launch(at, one + 1), kernel("k", at + 1, 1, one + 1)]
    return events


def operator_threads(count: int) -> list[Any]:
    """Return threads that each run an operator and launch a kernel."""
    events = []
    for one in range(count // 4):
        events += [
            row("cpu_op", "aten::mm", 10 * one, 9, 200 + one % 2**14),
            row("user_annotation", "forward", 10 * one, 9, 200 + one % 2**14),
            launch(10 * one + 1, one + 1, 200 + one % 2**14),
            kernel("k", 10 * one + 2, 5, one + 1),
        ]
    return events


def linked_backward(count: int) -> list[Any]:
    """Return forward operators in deep annotations, each linked to a backward operator of its own."""
    events, depth = [], min(2_000, count)
    for level in range(depth):
        events.append(row("user_annotation", f"layer {level}", level, 2 * count + depth - 2 * level))
    at = 3 * count + depth
    events.append(row("user_annotation", "backward", at, 20 * count))
    for one in range(count // 6):
        events += [
            row("cpu_op", "aten::mm", depth + one, 1),
            flow("s", one, depth + one, 100),
            row("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 10 * one, 9, 100),
            flow("f", one, at + 10 * one, 100),
            launch(at + 10 * one + 1, one + 1),
            kernel("k", at + 10 * one + 2, 5, one + 1),
        ]
    return events


def linked_everywhere(count: int) -> list[Any]:
    """Return forward operators each in an annotation of its own, linked to operators in another."""
    events = []
    for one in range(count // 8):
        at = 100 * one
        events += [
            row("user_annotation", f"f{one}", at, 40),
            row("cpu_op", "aten::mm", at + 1, 5),
            flow("s", one, at + 1, 100),
            row("user_annotation", "backward", at + 50, 40),
            row("cpu_op", "MmBackward0", at + 55, 9),
            flow("f", one, at + 55, 100),
            launch(at + 56, one + 1),
            kernel("k", at + 57, 5, one + 1),
        ]
    return events


def chrome_names(count: int) -> list[Any]:
    """Return kernels and operators with distinct names of 4 kB."""
    events = []
    for one in range(count // 50):
        name = f"{one} void " + "at::native::x<T, " * 220
        events += [launch(10 * one, one + 1), kernel(name, 10 * one + 2, 5, one + 1)]
    return events


def same_correlation(count: int) -> list[Any]:
    """Return calls of many processes that share one id with all kernels."""
    events = []
    for one in range(count // 2):
        events += [launch(one, 7, pid=100 + one % 4096), kernel("k", one + 2, 5, 7)]
    return events


def odd_times(count: int) -> list[Any]:
    """Return events whose times have as many digits as fit."""
    events = []
    for one in range(count // 200):
        digits = "0." + f"{one}" * 1_000
        events += [launch(one, one + 1), kernel("k", digits, digits, one + 1)]
    return events


def chrome_steps(count: int) -> list[Any]:
    """Return steps of three phases each."""
    events = []
    for one in range(count // 5):
        at = 100 * one
        events += [
            row("user_annotation", f"step {one}", at, 99),
            row("user_annotation", "forward", at + 1, 40),
            row("user_annotation", "backward", at + 50, 20),
            launch(at + 2, one + 1),
            kernel("k", at + 5, 5, one + 1),
        ]
    return events


def empty_events(count: int) -> list[Any]:
    """Return as many events as fit that say nothing."""
    return [{"ph": "M"}] * (count * 4)


def chrome_devices(count: int) -> list[Any]:
    """Return GPUs that each run one kernel."""
    events: list[Any] = [row("user_annotation", "step 0", 0, 100 * count)]
    for one in range(count // 2):
        events += [
            launch(10 * one, one + 1),
            kernel("k", 10 * one + 2, 5, one + 1)
            | {"args": {"device": one % 256, "stream": one, "correlation": one + 1}},
        ]
    return events


CHROME: dict[str, Callable[[int], list[Any]]] = {
    one.__name__.replace("_", " "): one
    for one in (
        nested_annotations, nested_operators, operator_threads, linked_backward, linked_everywhere, chrome_names,
        same_correlation, odd_times, chrome_steps, empty_events, chrome_devices,
    )
}  # fmt: skip


def write_chrome(events: list[Any], path: Path) -> Path:
    """Write a trace of torch.profiler."""
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": _with_thread(events)}, separators=(",", ":")))
    return path
