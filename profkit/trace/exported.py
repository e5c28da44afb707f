"""What ``profkit export --chrome`` (report/export/chrome_trace.py) adds to torch.profiler's format, read back.

Kineto leaves out, or only guesses, what an nsys export says: domains and payloads of ranges, ranges that end on another
thread, exact nesting, ranks of several processes. An exported trace says all of it, under `EXPORTED` in its header and
in arguments of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from profkit.trace.columns import Diagnostic, Measure, Ranges, Trace
from profkit.trace.kineto_events import HostRows, Reading, parse_argument, parse_integer

EXPORTED = "profkit"
"""The key of the header under which an exported trace says what it is."""

_SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True)
class Exported:
    """What an exported trace says of itself; ``ranks`` is by pid."""

    product: str
    measure: Measure
    has_kernel_table: bool
    ranks: dict[int, int]
    diagnostics: tuple[Diagnostic, ...]
    notes: tuple[str, ...]

    def complete(self, trace: Trace) -> Trace:
        """Return the trace as it was read, with what the header says of it."""
        return replace(
            trace,
            product=self.product,
            has_kernel_table=self.has_kernel_table,
            ranks={pid: rank for pid, rank in self.ranks.items() if pid in trace.process_ids},
            diagnostics=(*trace.diagnostics, *self.diagnostics),
            notes=(*trace.notes, *self.notes),
        )


def read_exported(header: dict[str, Any]) -> Exported | None:
    """Return what the header of an exported trace says; None for a trace of torch.profiler, or one that was damaged."""
    said = header.get(EXPORTED)
    if not isinstance(said, dict) or said.get("measure") not in ("gpu-kernel", "cpu-operator"):
        return None
    ranks = said.get("ranks")
    pairs = ranks.items() if isinstance(ranks, dict) else ()
    known = {parse_integer(pid): parse_integer(rank) for pid, rank in pairs}
    diagnostics = [
        diagnostic for diagnostic in _list(said, "diagnostics") if isinstance(diagnostic, list) and len(diagnostic) == 3
    ]
    return Exported(
        product=f"{said.get('source')}, exported by profkit {said.get('version')}",
        measure="gpu-kernel" if said["measure"] == "gpu-kernel" else "cpu-operator",
        has_kernel_table=bool(said.get("has_kernel_table")),
        ranks={pid: rank for pid, rank in known.items() if pid is not None and rank is not None},
        diagnostics=tuple(
            Diagnostic(kind, str(text), parse_integer(pid)) for kind, text, pid in diagnostics if kind in _SEVERITIES
        ),
        notes=tuple(str(note) for note in _list(said, "notes")),
    )


def complete_ranges(ranges: Ranges, rows: HostRows, reading: Reading) -> Ranges:
    """Return the ranges with the domains, payloads and other threads that their rows name."""
    domain, thread, end_thread = ranges.domain.copy(), ranges.thread.copy(), ranges.end_thread.copy()
    payload: dict[int, int | float] = {}
    is_replayed = np.zeros(len(ranges), dtype=np.bool_)
    for index, event in enumerate(rows.events):
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            continue
        if isinstance(arguments.get("domain"), str):
            domain[index] = reading.intern(arguments["domain"])
        number = _number(arguments.get("payload"))
        if number is not None:
            payload[index] = number
        is_replayed[index] = parse_argument(event, "replayed") == 1
        process = int(rows.process[index])
        own = parse_argument(event, "thread")
        if own is not None:
            thread[index] = end_thread[index] = reading.threads.setdefault((process, own), len(reading.threads))
        other = parse_argument(event, "end_tid")
        if other is not None:
            end_thread[index] = reading.threads.setdefault((process, other), len(reading.threads))
    replayed = is_replayed if is_replayed.any() else None
    return replace(ranges, domain=domain, thread=thread, end_thread=end_thread, payload=payload, is_replayed=replayed)


def _list(said: dict[str, Any], key: str) -> list[Any]:
    items = said.get(key)
    return items if isinstance(items, list) else []


def _number(value: object) -> int | float | None:
    """Return a number; decimals come as text from the reader of JSON."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
        return value if np.isfinite(value) else None
    return value if isinstance(value, int) and abs(value) < 1 << 62 else None
