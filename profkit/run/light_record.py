"""``light.jsonl``: what one rank leaves of every step, with or without a profiler, so that ranks can be compared.

Each rank of a run leaves one (``light.rank7.jsonl``). A full trace of a rank reduces to the same form, so that one
analysis reads both. One JSON object a line, written whole or not at all; a last line that was cut off is left out::

    {"kind": "header", "version": 2, "rank": 1, "world_size": 4, "node": 0, "device": 1, "source": "light",
     "clock_base_ns": 1795193514683000000}
    {"kind": "group", "number": 0, "name": "0", "ranks": [0, 1, 2, 3], "dimension": "dp", "backend": "nccl"}
    {"kind": "calls", "number": 0, "collectives": {"group": [0, 0], "kind": ["all_reduce", "all_reduce"],
     "dtype": ["float32", "float32"], "bytes": [28320000, 1048576]}}
    {"kind": "step", "name": "step 3", "start_ns": 81200300, "end_ns": 141200300,
     "phases": [["data", 0, 210400], ["forward", 230100, 14020000], ["backward", …], ["optimizer", …]],
     "gpu_phases": [["forward", 260000, 15300000], …],
     "data_ns": 210400, "launch_wait_ns": 402000, "kernel_ns": {"gemm": 22400000, "communication": 3100000},
     "peak_bytes": 3073660928, "reserved_bytes": 3246391296, "sm_mhz": 1980, "throttle": ["power cap"],
     "collectives": {"calls": 0, "sequence": [41, 42], "called_ns": [16100000, 18200000],
        "start_ns": [17300000, 19500000], "end_ns": [18400000, 19600000], "hidden_ns": [1100000, null]},
     "since": [[0, "data", "data", "", 190000], [0, "kernels", "backward", "layer 3", 5100000]]}

Times are whole nanoseconds. ``start_ns`` and ``end_ns`` of a step count from ``clock_base_ns`` (nanoseconds since the
epoch, on the rank's own clock); every other time of a step counts from the step's start, and may be negative for what
began before. What is unknown is null, or the key is left out. Steps stand in their order; what ran outside every step
stands in a step whose ``name`` is null.

``node`` numbers the machine (no host name is kept), ``device`` is the GPU's number there. ``phases`` are when the host
was in each phase, waits for a batch (``data``) among them; ``gpu_phases`` are the same by CUDA events, on the GPU.
``data_ns`` is how long the host waited for data, ``launch_wait_ns`` how long the GPU was idle while the host launched;
without a profiler, how long it had at most nothing to do between phases, because the host came late (a GPU that idles
within a phase is not seen, and ``kernel_ns`` is left out).

What the collectives of several steps have in common stands once, in a line ``calls`` before the first of these steps. A
step may also hold these columns itself; in version 1 all do.

``bytes`` of a collective is the size that nccl-tests calls ``size``: of all-gather the bytes of the whole output, of
reduce-scatter those of the whole input. ``called_ns`` is when the host called it; ``start_ns`` and ``end_ns`` are when
it ran on the GPU. ``sequence`` counts the collectives of a group from 0 or 1, alike on all its ranks. ``hidden_ns`` is
how much of it ran while something else computed. ``exposed_ns``, of the last collective of a backward pass, is how long
the GPU did nothing at the pass's end but wait for what was reduced. Without a profiler ``start_ns`` and ``end_ns`` are
known only where NCCL was asked to time its collectives. ``kind`` is one of `KINDS` (`plain_kind` makes it from the
names of torch and NCCL).

``since`` says what the rank did between the end of the previous collective and the end of this one, in disjoint parts
that sum up to that time: the row of the collective, one of `CAUSES`, the phase, the module (or ""), and the time.
``outside_cuda`` is how long the host ran without calling CUDA from this step's start to the next one's, whatever the
GPU did: phase, module, time. A recorder without a profiler leaves both out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from profkit.errors import RunError
from profkit.files import collector_off
from profkit.run.records import LARGEST_NUMBER, WrongRecord, decode, read_lines

VERSION = 2

Source = Literal["light", "nsys", "kineto"]
Cause = Literal["data", "python", "launch", "kernels", "copy", "clock", "communication"]
"""What a rank did: it waited for data, ran Python without calling CUDA, launched, ran kernels, copied, ran kernels on a
slower clock, or did nothing but communicate, which includes waiting for other ranks."""

CAUSES: tuple[Cause, ...] = get_args(Cause)

WAITS_FOR_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""The kinds of collectives in which every rank waits for every other."""

P2P = ("send", "recv")
"""The kinds that go from one rank to another."""

_NUMBERS = {"start_ns", "end_ns", "data_ns", "launch_wait_ns", "peak_bytes", "reserved_bytes", "sm_mhz"}

_PATTERNS = {
    "all_reduce": r"all_?reduce",
    "all_gather": r"all_?gather",
    "reduce_scatter": r"reduce_?scatter",
    "all_to_all": r"all_?to_?all",
    "barrier": r"barrier",
    "broadcast": r"broadcast",
    "reduce": r"reduce",
    "gather": r"gather",
    "scatter": r"scatter",
    "send": r"send",
    "recv": r"recv|receive",
}
"""Kind → what names of it contain. The first that fits counts: ``all_reduce`` before ``reduce``."""

KINDS = tuple(_PATTERNS)
"""The kinds of collectives."""


@dataclass(frozen=True)
class Group:
    """A process group: its number in this record, torch's name of it, and its ranks in the world (none: all of them).

    ``dimension`` is the name of its dimension in a device mesh (``dp``, ``tp``), if it belongs to one.
    """

    number: int
    name: str
    ranks: tuple[int, ...]
    dimension: str | None = None
    backend: str | None = None


@dataclass(frozen=True)
class Collectives:
    """The collectives of one step as columns of one length, in the order in which they were called."""

    group: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    dtype: list[str | None] = field(default_factory=list)
    bytes: list[int | None] = field(default_factory=list)
    called_ns: list[int | None] = field(default_factory=list)
    start_ns: list[int | None] = field(default_factory=list)
    end_ns: list[int | None] = field(default_factory=list)
    hidden_ns: list[int | None] = field(default_factory=list)
    exposed_ns: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank; ``name`` is None for what ran outside every step."""

    name: str | None
    start_ns: int
    end_ns: int
    phases: tuple[tuple[str, int, int], ...] = ()
    gpu_phases: tuple[tuple[str, int, int], ...] = ()
    data_ns: int | None = None
    launch_wait_ns: int | None = None
    kernel_ns: Mapping[str, int] = field(default_factory=dict)
    """Category → kernel time."""
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    sm_mhz: int | None = None
    throttle: tuple[str, ...] = ()
    """Why the GPU held its clock down."""
    collectives: Collectives = field(default_factory=Collectives)
    since: tuple[tuple[int, Cause, str, str, int], ...] = ()
    outside_cuda: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True)
class LightRecord:
    """All that one rank left."""

    rank: int
    world_size: int
    node: int = 0
    device: int | None = None
    source: Source = "light"
    clock_base_ns: int = 0
    groups: tuple[Group, ...] = ()
    steps: tuple[StepRecord, ...] = ()


def plain_kind(name: str) -> str | None:
    """Return which of `KINDS` a name of torch or NCCL means; None for anything else.

    ``nccl:_all_gather_base``, ``c10d::allreduce_``, ``ncclDevKernel_ReduceScatter_Sum_f32_RING_LL`` are such names.
    """
    return next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, name, re.IGNORECASE)), None)


def header_line(record: LightRecord) -> str:
    """Return the first line of a record, with its end."""
    keys = ("rank", "world_size", "node", "device", "source", "clock_base_ns")
    return _line("header", {"version": VERSION, **{key: getattr(record, key) for key in keys}})


def group_line(group: Group) -> str:
    """Return the line of a process group, with its end; it stands before the first step that uses the group."""
    return _line("group", asdict(group))


_COMMON: Mapping[str, set[type]] = {
    "group": {int},
    "kind": {str},
    "dtype": {str, type(None)},
    "bytes": {int, type(None)},
}
"""The columns that are often alike in many steps, and what may stand in them."""
_OWN = tuple(name for name in Collectives.__dataclass_fields__ if name not in _COMMON)
_NOTHING = ""

_MOST_SHARED = 64
"""Steps whose calls differ each time, as some of a mixture of experts, keep their own from then on."""


class StepLines:
    """Makes the lines of one record's steps, in their order; what the calls of several steps share is written once."""

    def __init__(self) -> None:
        self._shared: dict[str, int] = {}

    def of(self, step: StepRecord) -> str:
        """Return the line of a step, and before it that of what it is the first to share; unknown is left out."""
        found = {name: getattr(step, name) for name in StepRecord.__dataclass_fields__ if name != "collectives"}
        kept = {name: value for name, value in found.items() if name == "name" or value not in (None, (), {})}
        columns = {
            name: column for name, column in vars(step.collectives).items() if any(x is not None for x in column)
        }
        if not columns:
            return _line("step", kept)
        common = {name: columns[name] for name in _COMMON if name in columns}
        key, before = json.dumps(common), ""
        if key not in self._shared and len(self._shared) < _MOST_SHARED:
            self._shared[key] = len(self._shared)
            before = _line("calls", {"number": self._shared[key], "collectives": common})
        if key in self._shared:
            own = {name: column for name, column in columns.items() if name not in common}
            columns = {"calls": self._shared[key], **own}
        return before + _line("step", {**kept, "collectives": columns})


def write_light_record(path: Path, record: LightRecord) -> None:
    """Write a whole record.

    Raises:
        OSError: it cannot be written.
    """
    lines = StepLines()
    parts = [header_line(record), *map(group_line, record.groups), *map(lines.of, record.steps)]
    path.write_text("".join(parts), encoding="utf-8")


def read_light_record(path: Path) -> LightRecord:
    """Return the record of a rank; unknown kinds of lines and unknown keys are passed over.

    Raises:
        RunError: it cannot be read, has no header, is of a newer version, or a line other than the last is damaged.
    """
    header: dict[str, Any] | None = None
    groups: list[Group] = []
    steps: list[StepRecord] = []
    shared: dict[int, dict[str, list[Any]]] = {}

    def take(entry: dict[str, Any]) -> None:
        nonlocal header
        kind = entry["kind"]
        if kind == "step":
            steps.append(_step(entry, shared))
        elif kind == "calls":
            shared[entry["number"]] = _common(entry["collectives"])
        elif kind == "group":
            groups.append(decode(Group, entry))
        elif kind == "header":
            header = entry
            if entry["version"] > VERSION:
                raise RunError(f"{path}: version {entry['version']}, written by a newer profkit")

    try:
        with collector_off():
            read_lines(path, take, "a line of a light record")
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    if header is None:
        raise RunError(f"{path}: not a light record (it has no header)")
    try:
        record: LightRecord = decode(
            LightRecord, {key: header[key] for key in header if key not in ("groups", "steps")}
        )
    except WrongRecord as error:
        raise RunError(f"{path}: {error}") from None
    return LightRecord(**{**vars(record), "groups": tuple(groups), "steps": tuple(steps)})


_Numbers = tuple[str, list[Any]]
"""Where numbers stand in a line, and the numbers."""


def _step(entry: dict[str, Any], shared: Mapping[int, dict[str, list[Any]]]) -> StepRecord:
    """Return a step; all its numbers are checked at once, as there may be thousands of collectives."""
    phases, gpu_phases = _spans(entry.get("phases", ())), _spans(entry.get("gpu_phases", ()))
    found = entry.get("collectives")
    columns, numbers = (Collectives(), []) if found is None else _collectives(found, shared)
    since, outside = (
        _accounts(entry, len(columns), numbers) if "since" in entry or "outside_cuda" in entry else ((), ())
    )
    name, kernels, throttle = entry["name"], entry.get("kernel_ns", {}), entry.get("throttle", [])
    spans = phases + gpu_phases
    if not (name is None or isinstance(name, str)) or not {*map(type, throttle), *[type(x[0]) for x in spans]} <= {str}:
        raise WrongRecord("name, a phase's name or throttle is no text")
    plain: dict[str, Any] = {key: value for key, value in entry.items() if key in _NUMBERS and value is not None}
    numbers += [(key, [value]) for key, value in plain.items()]
    numbers.append(("a phase", [time for _, start, end in spans for time in (start, end)]))
    if kernels:
        numbers.append(("kernel_ns", list(kernels.values())))
    _require_numbers(numbers)
    return StepRecord(
        name=name,
        start_ns=plain.pop("start_ns"),
        end_ns=plain.pop("end_ns"),
        phases=phases,
        gpu_phases=gpu_phases,
        **plain,
        kernel_ns=kernels,
        throttle=tuple(throttle),
        collectives=columns,
        since=since,
        outside_cuda=outside,
    )


def _accounts(entry: Mapping[str, Any], count: int, numbers: list[_Numbers]) -> tuple[Any, Any]:
    """Return ``since`` and ``outside_cuda``, and add the numbers in them."""
    since = tuple((row, cause, phase, where, time) for row, cause, phase, where, time in entry.get("since", ()))
    outside = tuple((phase, module, time) for phase, module, time in entry.get("outside_cuda", ()))
    if any(cause not in CAUSES or not 0 <= row < count for row, cause, *_ in since):
        raise WrongRecord("since names an unknown cause, or no collective of its step")
    numbers.append(("outside_cuda", [time for *_, time in outside]))
    numbers.append(("since", [value for row, *_, time in since for value in (row, time)]))
    return since, outside


def _spans(found: Iterable[Any]) -> tuple[tuple[str, int, int], ...]:
    return tuple([(name, start_ns, end_ns) for name, start_ns, end_ns in found])


def _collectives(
    found: Mapping[str, Any], shared: Mapping[int, dict[str, list[Any]]]
) -> tuple[Collectives, list[_Numbers]]:
    """Return the columns and the numbers in them; a column that is left out is unknown for every row."""
    common = shared[found["calls"]] if "calls" in found else _common(found)
    columns = {**common, **{name: found.get(name, common[_NOTHING]) for name in _OWN}}
    unknown = columns.pop(_NOTHING)
    numbers = []
    for name in _OWN:
        column = columns[name]
        if not isinstance(column, list) or len(column) != len(unknown):
            raise WrongRecord(f"collectives.{name} is not a list of {len(unknown)}")
        if column is not unknown:
            lacks = name != "sequence" and None in column
            numbers.append((f"collectives.{name}", [x for x in column if x is not None] if lacks else column))
        elif name == "sequence" and unknown:
            raise WrongRecord("collectives.sequence is missing")
    return Collectives(**columns), numbers


def _common(found: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the columns that steps may share, and one in which nothing is known."""
    group = found.get("group", [])
    unknown: list[Any] = [None] * len(group)
    columns = {name: found.get(name, unknown) for name in _COMMON}
    for name, kinds in _COMMON.items():
        column = columns[name]
        if not isinstance(column, list) or len(column) != len(group):
            raise WrongRecord(f"collectives.{name} is not a list of {len(group)}")
        if not set(map(type, column)) <= kinds:
            raise WrongRecord(f"collectives.{name} holds something of another type")
    _require_numbers([(name, [x for x in columns[name] if x is not None]) for name in ("group", "bytes")])
    return {**columns, _NOTHING: unknown}


def _require_numbers(found: Iterable[_Numbers]) -> None:
    """Raise unless all are whole numbers that a file may hold."""
    found = list(found)
    if not _are_whole(list(chain.from_iterable([values for _, values in found]))):
        what = next(what for what, values in found if not _are_whole(values))
        raise WrongRecord(f"{what} holds something else than whole numbers")


def _are_whole(values: list[Any]) -> bool:
    is_whole = set(map(type, values)) <= {int}
    return is_whole and (not values or -LARGEST_NUMBER < min(values) <= max(values) < LARGEST_NUMBER)


def _line(kind: str, content: Mapping[str, Any]) -> str:
    return json.dumps({"kind": kind, **content}, separators=(",", ":")) + "\n"
