"""``light.jsonl``: what one rank leaves of every step, with or without a profiler, so that ranks can be compared.

Each rank of a run leaves one (``light.rank7.jsonl``). One JSON object a line, written whole or not at all; a last line
that was cut off is left out::

    {"kind": "header", "version": 3, "rank": 1, "world_size": 4, "node": 0, "device": 1, "source": "light",
     "clock_base_ns": 1795193514683000000}
    {"kind": "group", "number": 0, "name": "0", "ranks": [0, 1, 2, 3], "dimension": "dp", "backend": "nccl"}
    {"kind": "calls", "number": 0, "collectives": {"group": [0, 0], "kind": ["all_reduce", "all_reduce"],
     "dtype": ["float32", "float32"], "bytes": [28320000, 1048576]}}
    {"kind": "steps", "name": ["step 3", "step 4"], "start_ns": "81200300,141200300", "end_ns": "141200300,201200300",
     "launch_wait_ns": "402000,0", "peak_bytes": "3073660928,3073660928", "sm_mhz": "1980,1980",
     "throttle": [["power cap"], []],
     "phases": {"count": "2,2", "name": ["data", "forward", "data", "forward"], "start_ns": "0,230100,0,230500",
        "end_ns": "210400,14020000,211000,14030000"},
     "gpu_phases": {"count": "1,1", "name": ["forward", "forward"], "start_ns": "260000,260100",
        "end_ns": "15300000,15310000"},
     "collectives": {"calls": "0,0", "sequence": "41,42,43,44", "called_ns": "16100000,18200000,16110000,18210000",
        "start_ns": "17300000,19500000,17310000,19510000", "end_ns": "18400000,19600000,18410000,19610000",
        "exposed_ns": "?,1100000,?,?"}}

A line ``steps`` holds some steps, at most `TOGETHER`, as columns. A column of whole numbers is one text with commas,
which is read several times as quickly as a list. What is unknown is ``?``, or the column is left out. Where a step may
hold several rows, ``count`` says how many each has. What the collectives of a step have in common with other steps,
``group``, ``kind``, ``dtype`` and ``bytes``, stands in a line ``calls`` before the first of these steps, whose number
the steps name (-1: no collectives); the other columns of ``collectives`` hold all collectives of all these steps.

Times are nanoseconds. ``start_ns`` and ``end_ns`` of a step count from ``clock_base_ns`` (nanoseconds since the
epoch, on the rank's own clock); every other time of a step counts from the step's start, and may be negative for what
began before. Steps stand in their order.

``node`` numbers the machine (no host name is kept), ``device`` is the GPU's number there. ``phases`` are when the host
was in each phase, waits for a batch (``data``) among them; ``gpu_phases`` are the same by CUDA events, on the GPU.
``launch_wait_ns`` is how long the GPU was idle while the host launched; without a profiler, how long it had at most
nothing to do between phases, because the host came late (a GPU that idles within a phase is not seen).

``bytes`` of a collective is the size that nccl-tests calls ``size``: of all-gather the bytes of the whole output, of
reduce-scatter those of the whole input. ``called_ns`` is when the host called it; ``start_ns`` and ``end_ns`` are when
it ran on the GPU: known only where NCCL was asked to time its collectives. ``sequence`` counts the collectives of a
group from 0 or 1, alike on all its ranks. ``exposed_ns``, of the last collective of a backward pass, is how long the
GPU did nothing at the pass's end but wait for what was reduced. ``kind`` is as `profkit.names.kind_of_collective` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from profkit.text_kinds import Backend, GroupName, RangeName, Reason, Word

VERSION = 3

Source = Literal["light", "nsys", "kineto"]
WAITS_FOR_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""The kinds of collectives in which every rank waits for every other."""

P2P = ("send", "recv")
"""The kinds that go from one rank to another."""


@dataclass(frozen=True)
class Group:
    """A process group: its number in this record, torch's name of it, and its ranks in the world (none: all of them).

    ``dimension`` is the name of its dimension in a device mesh (``dp``, ``tp``), if it belongs to one.
    """

    number: int
    name: GroupName
    ranks: tuple[int, ...]
    dimension: Word | None = None
    backend: Backend | None = None


@dataclass(frozen=True)
class Collectives:
    """The collectives of one step as columns of one length, in the order in which they were called."""

    group: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    kind: list[Word] = field(default_factory=list)
    dtype: list[Word | None] = field(default_factory=list)
    bytes: list[int | None] = field(default_factory=list)
    called_ns: list[int | None] = field(default_factory=list)
    start_ns: list[int | None] = field(default_factory=list)
    end_ns: list[int | None] = field(default_factory=list)
    hidden_ns: list[int | None] = field(default_factory=list)
    exposed_ns: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.group)


@dataclass
class StepRecord:
    """One step of one rank; ``name`` is None for what ran outside every step."""

    name: RangeName | None
    start_ns: int
    end_ns: int
    phases: tuple[tuple[RangeName, int, int], ...] = ()
    gpu_phases: tuple[tuple[RangeName, int, int], ...] = ()
    launch_wait_ns: int | None = None
    peak_bytes: int | None = None
    sm_mhz: int | None = None
    throttle: tuple[Reason, ...] = ()
    """Why the GPU held its clock down."""
    collectives: Collectives = field(default_factory=Collectives)


@dataclass(frozen=True)
class LightRecord:
    rank: int
    world_size: int
    node: int = 0
    device: int | None = None
    source: Source = "light"
    clock_base_ns: int = 0
    groups: tuple[Group, ...] = ()
    steps: tuple[StepRecord, ...] = ()


def header_line(record: LightRecord) -> str:
    keys = ("rank", "world_size", "node", "device", "source", "clock_base_ns")
    return _line("header", {"version": VERSION, **{key: getattr(record, key) for key in keys}})


def group_line(group: Group) -> str:
    """Return the line of a process group, with its end; it stands before the first step that uses the group."""
    return _line("group", asdict(group))


COMMON = ("group", "kind", "dtype", "bytes")
"""The columns of collectives that are often alike in many steps."""

OF_CALLS = ("sequence", "called_ns", "start_ns", "end_ns", "hidden_ns", "exposed_ns")
"""Those that are not."""

OF_STEPS = ("start_ns", "end_ns", "launch_wait_ns", "peak_bytes", "sm_mhz")

NO_CALLS = -1
"""Stands for the calls of a step without collectives."""

TOGETHER = 8
"""This many steps stand in a line at most: no more are lost where a file is cut."""

UNKNOWN_CELL = "?"

_MOST_SHARED = 64
"""Steps whose calls differ each time, as some of a mixture of experts, are not looked for from then on."""

Columns = dict[str, Any]


class StepLines:
    """Makes the lines of one record's steps, in their order; what the calls of several steps share is written once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}
        self._count = 0

    def of(self, steps: Sequence[StepRecord]) -> str:
        lines: list[str] = []
        for first in range(0, len(steps), TOGETHER):
            some = steps[first : first + TOGETHER]
            numbers = [self._number(step.collectives, lines) if len(step.collectives) else NO_CALLS for step in some]
            lines.append(_line("steps", _pack(some, numbers)))
        return "".join(lines)

    def _number(self, calls: Collectives, lines: list[str]) -> int:
        columns = {name: getattr(calls, name) for name in COMMON}
        key = tuple(map(tuple, columns.values()))
        number = self._known.get(key, self._count)
        if number == self._count:
            lines.append(_line("calls", {"number": number, "collectives": columns}))
            self._count += 1
            if number < _MOST_SHARED:
                self._known[key] = number
        return number


def _pack(steps: Sequence[StepRecord], calls: list[int]) -> Columns:
    line: Columns = {"name": [step.name for step in steps]}
    if any(step.throttle for step in steps):
        line["throttle"] = [step.throttle for step in steps]
    numbers = [(line, name, [getattr(step, name) for step in steps]) for name in OF_STEPS]
    for table in ("phases", "gpu_phases"):
        rows = [getattr(step, table) for step in steps]
        if any(rows):
            names, start_ns, end_ns = map(list, zip(*chain.from_iterable(rows), strict=True))
            into = line[table] = {"name": names}
            columns = {"count": list(map(len, rows)), "start_ns": start_ns, "end_ns": end_ns}
            numbers += [(into, name, column) for name, column in columns.items()]
    if any(number != NO_CALLS for number in calls):
        into = line["collectives"] = {}
        own = {name: [*chain.from_iterable(getattr(step.collectives, name) for step in steps)] for name in OF_CALLS}
        numbers += [(into, name, column) for name, column in {"calls": calls, **own}.items()]
    known = [(into, name, column) for into, name, column in numbers if column.count(None) < len(column)]
    # One call of the encoder for all of them: it is made anew for each call.
    texts = _encode([column for *_, column in known])[2:-2].replace("null", UNKNOWN_CELL).split("],[")
    for (into, name, _), text in zip(known, texts, strict=True):
        into[name] = text
    return line


def write_light_record(path: Path, record: LightRecord) -> None:
    parts = [header_line(record), *map(group_line, record.groups), StepLines().of(record.steps)]
    path.write_text("".join(parts), encoding="utf-8")


def _line(kind: str, content: Mapping[str, Any]) -> str:
    return _encode({"kind": kind, **content}) + "\n"


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
