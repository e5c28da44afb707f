"""The worst traces of torch.profiler of under 10 MB; see `tests.fuzz.worst_exports`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.kineto_builder import flow, kernel, launch, row, thread_name

CHROME: dict[str, Callable[[int], Iterator[Any]]] = {}
"""What a family holds the most of → what yields its events."""


def _family(events: Callable[[int], Iterator[Any]]) -> Callable[[int], Iterator[Any]]:
    CHROME[events.__name__.replace("_", " ")] = events
    return events


@_family
def nested_operators(count: int) -> Iterator[Any]:
    """Operators within operators without end, and launches after all of them."""
    half = count // 3
    yield from (row("cpu_op", "aten::mm", n, 2 * count - 2 * n) for n in range(half))
    for n in range(half // 2):
        at = 3 * count + n
        yield from [launch(at, n + 1), kernel("k", at + 1, 1, n + 1)]


@_family
def linked_backward(count: int) -> Iterator[Any]:
    """Forward operators in deep annotations, each linked to a backward operator of its own."""
    depth = min(2_000, count)
    for level in range(depth):
        yield row("user_annotation", f"layer {level}", level, 2 * count + depth - 2 * level)
    at = 3 * count + depth
    yield row("user_annotation", "backward", at, 20 * count)
    for n in range(count // 6):
        yield from (
            row("cpu_op", "aten::mm", depth + n, 1),
            flow("s", n, depth + n, 100),
            row("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 10 * n, 9, 100),
            flow("f", n, at + 10 * n, 100),
            launch(at + 10 * n + 1, n + 1),
            kernel("k", at + 10 * n + 2, 5, n + 1),
        )


@_family
def linked_everywhere(count: int) -> Iterator[Any]:
    """Forward operators each in an annotation of its own, linked to operators in another."""
    for n in range(count // 8):
        at = 100 * n
        yield from (
            row("user_annotation", f"f{n}", at, 40),
            row("cpu_op", "aten::mm", at + 1, 5),
            flow("s", n, at + 1, 100),
            row("user_annotation", "backward", at + 50, 40),
            row("cpu_op", "MmBackward0", at + 55, 9),
            flow("f", n, at + 55, 100),
            launch(at + 56, n + 1),
            kernel("k", at + 57, 5, n + 1),
        )


@_family
def same_correlation(count: int) -> Iterator[Any]:
    """Calls of many processes that share one id with all kernels."""
    for n in range(count // 2):
        yield from [launch(n, 7, pid=100 + n % 4096), kernel("k", n + 2, 5, 7)]


@_family
def odd_times(count: int) -> Iterator[Any]:
    """Events whose times have as many digits as fit."""
    for n in range(count // 200):
        digits = "0." + f"{n}" * 1_000
        yield from [launch(n, n + 1), kernel("k", digits, digits, n + 1)]


@_family
def empty_events(count: int) -> Iterator[Any]:
    """As many events as fit that say nothing."""
    return [{"ph": "M"}] * (count * 4)


def write_chrome(events: Iterator[Any], path: Path) -> Path:
    threads = [thread_name(100, "thread 100 (python)"), thread_name(117, "thread 117 (pt_autograd_0)")]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*threads, *events]}, separators=(",", ":")))
    return path
