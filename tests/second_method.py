"""What ranks waited for each other, worked out a second time: plain loops over raw files, with nothing of profkit's.

Read this to see what `profkit ranks` claims. Times are nanoseconds.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

LATE_NS = 20_000
WAIT_FOR_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
_SIZES = {"Float": 4, "BFloat16": 2, "Double": 8, "Long": 8}

Piece = tuple[int, int]


class Call(NamedTuple):
    """A collective on one rank; its ``end`` is None where nobody recorded it. ``step`` is -1 before the first step."""

    group: str
    number: int
    kind: str
    size: int | None
    step: int
    start: int
    end: int | None
    hidden: int | None


@dataclass
class Rank:
    """One rank: its collectives, and when it computed and communicated."""

    calls: list[Call]
    steps: int
    computing: list[Piece] = field(default_factory=list)
    communicating: list[Piece] = field(default_factory=list)


@dataclass
class Row:
    """The collectives of one kind, as sums over the mean rank."""

    count: int = 0
    size: int | None = 0
    wire: int = 0
    waiting: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0


def kind_of(name: str) -> str:
    plain = name.lower().replace("_", "")
    return next(kind for kind in _KINDS if kind.replace("_", "") in plain)


def union(pieces: Iterable[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(pieces: Iterable[Piece], start: int, end: int) -> int:
    return sum(max(0, min(end, b) - max(start, a)) for a, b in pieces)


def without(pieces: list[Piece], holes: list[Piece]) -> list[Piece]:
    found = []
    for start, end in pieces:
        left = start
        for a, b in holes:
            if a < end and b > left:
                if a > left:
                    found.append((left, a))
                left = max(left, b)
        if left < end:
            found.append((left, end))
    return found


def _rank(raw: list[tuple[int, int, int, str, str, int | None]], steps: list[Piece], computing: list[Piece]) -> Rank:
    """Return a rank of collectives (called, start, end, group, name, size), numbered as they were called."""
    calls, seen = [], {}
    for called, start, end, group, name, size in sorted(raw):
        if called >= steps[-1][1]:
            continue
        step = max((at for at, one in enumerate(steps) if one[0] <= called), default=-1)
        number = seen[group, step < 0] = seen.get((group, step < 0), -1) + 1
        hidden = overlap(computing, start, end)
        calls.append(Call(group, number, kind_of(name), size, step, start, end, hidden))
    return Rank(calls, len(steps), computing, union((start, end) for _, start, end, *_ in raw))


def read_kineto(path: Path) -> Rank:
    """Return a rank that torch.profiler recorded, on a GPU with NCCL or on the CPU with gloo."""
    content = json.loads(gzip.decompress(path.read_bytes()), parse_float=str)
    raw, kernels, operators, launched, steps = [], [], [], {}, set()
    for event in content["traceEvents"]:
        if event.get("ph") != "X":
            continue
        name, category, facts = event["name"], event["cat"], event.get("args", {})
        start = int(Decimal(str(event["ts"])) * 1000)
        end = start + int(Decimal(str(event["dur"])) * 1000)
        if category == "cuda_runtime":
            launched[facts.get("correlation")] = start
        elif category == "kernel":
            kernels.append((start, end, name, facts))
        elif category == "cpu_op" and not name.startswith("autograd::engine::evaluate_function"):
            operators.append((start, end, event["tid"], name.startswith(("c10d::", "_c10d_functional::"))))
        elif re.fullmatch(r"step \d+", name):
            steps.add((start, end))
        elif name.startswith("gloo:"):
            raw.append((start, start, end, "gloo", name, None))
    if kernels:
        for start, end, name, facts in kernels:
            if "nccl" in name:
                size = int(facts["In msg nelems"]) * _SIZES[facts["dtype"]]
                called = launched[facts["correlation"]]
                raw.append((called, start, end, facts["Process Group Name"], name, size))
        computing = union((start, end) for start, end, name, _ in kernels if "nccl" not in name)
        return _rank(raw, sorted(steps), computing)
    mine, talks = [], []
    for thread in {one[2] for one in operators}:
        talk = union((a, b) for a, b, at, is_talk in operators if at == thread and is_talk)
        mine += without(union((a, b) for a, b, at, is_talk in operators if at == thread and not is_talk), talk)
        talks += talk
    rank = _rank(raw, sorted(steps), union(mine))
    rank.communicating = union([*rank.communicating, *talks])
    return rank


def read_nsys(path: Path) -> list[Rank]:
    """Return the ranks of an export of nsys, in the order of their GPUs."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as export:
        names = dict(export.execute("select id, value from StringIds"))
        launched = {
            (thread & ~0xFFFFFF, correlation): start
            for correlation, thread, start in export.execute(
                "select correlationId, globalTid, start from CUPTI_ACTIVITY_KIND_RUNTIME"
            )
        }
        kernels: dict[int, list[tuple[int, int, int, str, int]]] = {}
        for start, end, name, correlation, process, device in export.execute(
            "select start, end, demangledName, correlationId, globalPid, deviceId from CUPTI_ACTIVITY_KIND_KERNEL"
        ):
            row = launched[process, correlation], start, end, names[name], device
            kernels.setdefault(process, []).append(row)
        steps: dict[int, list[Piece]] = {}
        for start, end, thread, text in export.execute(
            "select start, end, globalTid, coalesce(text, (select value from StringIds where id = textId))"
            " from NVTX_EVENTS where end is not null"
        ):
            if re.fullmatch(r"step \d+", text or ""):
                steps.setdefault(thread & ~0xFFFFFF, []).append((start, end))
    export.close()
    ranks = []
    for process in sorted(kernels, key=lambda one: kernels[one][0][4]):
        mine = kernels[process]
        computing = union((start, end) for _, start, end, name, _ in mine if not name.startswith("nccl"))
        raw = [(called, a, b, "nccl", name, None) for called, a, b, name, _ in mine if name.startswith("nccl")]
        ranks.append(_rank(raw, sorted(steps[process]), computing))
    return ranks


def read_light(path: Path) -> Rank:
    """Return a rank by its light record, of any version."""
    common: dict[int, dict[str, Any]] = {}
    calls, steps, base = [], 0, 0
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == "header":
            base = entry["clock_base_ns"]
        elif entry["kind"] == "calls":
            common[entry["number"]] = entry["collectives"]
        for step in _steps_of_line(entry, common):
            if step["name"] is not None:
                begin = base + step["start_ns"]
                for called, start, end, sequence, group, kind, size in step["calls"]:
                    begins = called if end is None else start
                    ends = None if end is None else begin + end
                    calls.append(Call(str(group), sequence, kind, size, steps, begin + begins, ends, None))
                steps += 1
    return Rank(calls, steps)


_OWN, _COMMON = ("called_ns", "start_ns", "end_ns", "sequence"), ("group", "kind", "bytes")


def _steps_of_line(entry: dict[str, Any], common: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps of a line: name, start and the cells of each collective."""
    if entry["kind"] == "step":
        own = entry.get("collectives", {})
        own = {**own, **common[own["calls"]]} if "calls" in own else own
        nothing = [None] * len(own.get("group", []))
        rows = zip(*(own.get(name, nothing) for name in (*_OWN, *_COMMON)), strict=True)
        return [{"name": entry["name"], "start_ns": entry["start_ns"], "calls": list(rows)}]
    if entry["kind"] != "steps":
        return []
    table = entry.get("collectives", {})
    cells = {name: (iter(text.split(",")) if text else None) for name, text in table.items()}
    found = []
    for name, start in zip(entry["name"], entry["start_ns"].split(","), strict=True):
        which = common.get(int(next(cells["calls"]))) if cells.get("calls") else None
        rows = []
        for shared in zip(*(which[key] for key in _COMMON), strict=True) if which else ():
            own = [next(column) if (column := cells.get(key)) else "?" for key in _OWN]
            rows.append((*(None if cell == "?" else int(cell) for cell in own), *shared))
        found.append({"name": name, "start_ns": int(start), "calls": rows})
    return found


def _matched(ranks: list[Rank]) -> list[dict[int, Call]]:
    """Return the collectives that all ranks of a group recorded: rank → its part; without an end, until all called."""
    found: dict[tuple[str, int], dict[int, Call]] = {}
    members: dict[str, set[int]] = {}
    for number, rank in enumerate(ranks):
        for call in rank.calls:
            if call.step >= 0:
                found.setdefault((call.group, call.number), {})[number] = call
                members.setdefault(call.group, set()).add(number)
    whole = [parts for (group, _), parts in found.items() if set(parts) == members[group] and len(parts) > 1]
    for parts in whole:
        if any(call.end is None for call in parts.values()):
            last = max(call.start for call in parts.values())
            parts.update({number: call._replace(end=last) for number, call in parts.items()})
    return whole


def _length(call: Call) -> int:
    assert call.end is not None
    return call.end - call.start


def sum_kinds(ranks: list[Rank]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for parts in _matched(ranks):
        calls = list(parts.values())
        row, least = rows.setdefault(calls[0].kind, Row()), min(map(_length, calls))
        row.count += 1
        row.size = None if calls[0].size is None or row.size is None else row.size + calls[0].size
        row.hidden += sum(call.hidden or 0 for call in calls) / len(calls)
        row.exposed += sum(_length(call) - (call.hidden or 0) for call in calls) / len(calls)
        if calls[0].kind in WAIT_FOR_ALL:
            row.wire += least
            row.waiting += sum(_length(call) - least for call in calls) / len(calls)
    return rows


def sum_waits(ranks: list[Rank]) -> list[list[int]]:
    """Return how long each rank waited for each other; of two waits at once the first counts."""
    waits: list[list[tuple[int, int, int]]] = [[] for _ in ranks]
    for parts in _matched(ranks):
        least = min(map(_length, parts.values()))
        late = min(number for number, call in sorted(parts.items()) if _length(call) == least)
        is_late = max(map(_length, parts.values())) - least >= LATE_NS
        if is_late and parts[late].kind in WAIT_FOR_ALL:
            for number, call in parts.items():
                waits[number].append((call.start, call.start + _length(call) - least, late))
    matrix = [[0] * len(ranks) for _ in ranks]
    for number, mine in enumerate(waits):
        reach = 0
        for start, end, late in sorted(mine):
            matrix[number][late] += max(0, end - max(start, reach))
            reach = max(reach, end)
    return matrix


def steps_and_exposed(rank: Rank) -> tuple[float, float]:
    """Return the mean time between the last collectives of two steps, and how much of it nothing but those ran."""
    ends: dict[int, int] = {}
    for call in rank.calls:
        assert call.end is not None
        ends[call.step] = max(ends.get(call.step, 0), call.end)
    edges = [ends[step] for step in sorted(ends)]
    alone = without(rank.communicating, rank.computing)
    windows = list(itertools.pairwise(edges))
    exposed = sum(overlap(alone, *window) for window in windows)
    return (edges[-1] - edges[0]) / len(windows), exposed / len(windows)
