"""``light.jsonl`` read as columns, without an object a step or a collective: many ranks are read quickly so.

What the columns mean is said in `profkit.run.light_record`; here all times are nanoseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from pathlib import Path
from sys import intern
from types import NoneType
from typing import Any, TypeVar
from warnings import catch_warnings, simplefilter

import numpy as np
import numpy.typing as npt

from profkit.errors import RunError
from profkit.files import collector_off
from profkit.run import WrongRecord, decode, read_lines
from profkit.run.light_record import (
    COMMON,
    NO_CALLS,
    OF_CALLS,
    OF_STEPS,
    P2P,
    UNKNOWN_CELL,
    VERSION,
    Collectives,
    Columns,
    Group,
    LightRecord,
    StepRecord,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

UNKNOWN = -(1 << 31)
"""Stands for what nobody knows, in every column of ranks: times may be negative, and a short column has 32 bits."""

_LARGEST = 1 << 62
"""No number in a record is as large: sums and differences of two of them fit."""

_MOMENTS = ("called_ns", "start_ns", "end_ns")


def later(times_ns: Ints, by_ns: Ints | int) -> Ints:
    """Return these times by another clock; unknown ones stay so."""
    return np.where(times_ns == UNKNOWN, UNKNOWN, times_ns + by_ns)


@dataclass(frozen=True, eq=False)
class Phases:
    """The phases of all steps in their order: the position of the step, that of the name in ``names``, and when.

    ``names`` are sorted.
    """

    names: tuple[str, ...]
    step: Ints
    name: Ints
    start_ns: Ints
    end_ns: Ints

    def times(self, count: int) -> Ints:
        """Return how long each phase took in each of ``count`` steps, as (steps, names)."""
        sums = np.zeros((count, len(self.names)), dtype=np.int64)
        np.add.at(sums, (self.step, self.name), self.end_ns - self.start_ns)
        return sums

    def times_of(self, name: str, count: int) -> Ints:
        return self.times(count)[:, self.names.index(name)] if name in self.names else np.zeros(count, dtype=np.int64)


_NOTHING = np.zeros(0, dtype=np.int64)
NO_PHASES = Phases((), _NOTHING, _NOTHING, _NOTHING, _NOTHING)


@dataclass(frozen=True, eq=False)
class StepColumns:
    """The steps of one rank, without their collectives; steps without a name are what a trace holds outside of steps.

    ``outside_cuda`` is how long the host ran without calling CUDA in each phase: how long alone is known, not when, and
    by a trace alone.
    """

    names: tuple[str | None, ...]
    start_ns: Ints
    end_ns: Ints
    launch_wait_ns: Ints
    peak_bytes: Ints
    sm_mhz: Ints
    throttle: tuple[tuple[str, ...], ...]
    phases: Phases
    gpu_phases: Phases
    outside_cuda: Phases = NO_PHASES

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def named(self) -> Ints:
        return np.array([at for at, name in enumerate(self.names) if name is not None], dtype=np.int64)

    def only(self, kept: Sequence[int]) -> StepColumns:
        columns: dict[str, Any] = {name: vars(self)[name] for name in self.__dataclass_fields__}
        for name, column in columns.items():
            if isinstance(column, Phases):
                columns[name] = rows_of_steps(column, kept, len(self))
            else:
                columns[name] = column[kept] if isinstance(column, np.ndarray) else tuple(column[at] for at in kept)
        return StepColumns(**columns)


@dataclass(frozen=True, eq=False)
class CallColumns:
    """Collectives of one rank; ``what`` is the position of kind and dtype in ``names``, ``step`` that of the step.

    What nobody knows is `UNKNOWN`. ``exposed_ns`` is how long nothing else ran at the end of a backward pass.
    """

    names: tuple[tuple[str, str | None], ...]
    step: Ints
    group: Ints
    what: Ints
    bytes: Ints
    sequence: Ints
    called_ns: Ints
    start_ns: Ints
    end_ns: Ints
    hidden_ns: Ints
    exposed_ns: Ints

    def __len__(self) -> int:
        return len(self.step)

    @property
    def is_pairwise(self) -> Bools:
        """Whether each is sent to or received from one other rank."""
        return np.array([kind in P2P for kind, _ in self.names], dtype=np.bool_)[self.what]

    @property
    def duration_ns(self) -> Ints:
        is_timed = (self.start_ns != UNKNOWN) & (self.end_ns != UNKNOWN)
        return np.where(is_timed, self.end_ns - self.start_ns, UNKNOWN)

    def take(self, rows: Ints | Bools) -> CallColumns:
        return CallColumns(self.names, **{name: column[rows] for name, column in vars(self).items() if name != "names"})


Table = TypeVar("Table", Phases, CallColumns)


def rows_of_steps(table: Table, kept: Sequence[int], count: int) -> Table:
    """Return the rows of some of ``count`` steps alone, with the steps numbered anew."""
    number = np.full(count, -1)
    number[kept] = np.arange(len(kept))
    step = number[table.step]
    columns = {name: column[step >= 0] for name, column in vars(table).items() if name not in ("names", "step")}
    return replace(table, step=step[step >= 0], **columns)


@dataclass(frozen=True, eq=False)
class LightColumns:
    """All that one rank left, or that its trace says; the ``record`` has no steps."""

    record: LightRecord
    steps: StepColumns
    calls: CallColumns


def read_light_columns(path: Path) -> LightColumns:
    """Return the record of a rank as columns; unknown kinds of lines and unknown keys are passed over.

    Raises:
        RunError: it cannot be read, has no header, is of another version, or a line other than the last is damaged.
    """
    with collector_off(), catch_warnings():
        simplefilter("error", DeprecationWarning)  # so numpy before 2.3 says that a text holds something else
        try:
            return _build(*_take_lines(path, is_each_checked=False))
        except (ValueError, KeyError, TypeError, AttributeError):
            # Which line is wrong shows one by one; the last one is left out.
            return _build(*_take_lines(path, is_each_checked=True))


def read_light(path: Path) -> LightRecord:
    columns = read_light_columns(path)
    return replace(columns.record, steps=tuple(_unpack(columns)))


def _take_lines(path: Path, *, is_each_checked: bool) -> tuple[LightRecord, list[Columns], dict[int, Columns]]:
    """Return the header with the groups, the lines of steps, and the calls that these share."""
    header: dict[str, Any] | None = None
    groups: list[Group] = []
    lines: list[Columns] = []
    calls: dict[int, Columns] = {}

    def take(entry: dict[str, Any]) -> None:
        nonlocal header
        kind = entry["kind"]
        if kind == "steps":
            if type(entry["name"]) is not list:
                raise WrongRecord("name is not a list")
            if is_each_checked:
                _build(LightRecord(0, 0), [entry], calls)
            lines.append(entry)
        elif kind == "calls":
            _number_calls(entry["collectives"], {})
            calls[entry["number"]] = entry["collectives"]
        elif kind == "group":
            group: Group = decode(Group, entry)
            groups.append(replace(group, ranks=_intern_ranks(group.ranks)))
        elif kind == "header":
            header = entry
            if entry["version"] != VERSION:
                is_newer = entry["version"] > VERSION
                newer = "is of a newer profkit; update this one"
                why = newer if is_newer else "this profkit no longer reads; record the run again"
                raise RunError(f"{path}: version {entry['version']}, which {why}")

    try:
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
    return replace(record, groups=tuple(groups)), lines, calls


@lru_cache(maxsize=256)
def _intern_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return ranks


def _build(record: LightRecord, lines: Sequence[Columns], shared: Mapping[int, Columns]) -> LightColumns:
    names = list(chain.from_iterable(line["name"] for line in lines))
    sizes = [len(line["name"]) for line in lines]
    throttle = [*chain.from_iterable(line.get("throttle", [()] * len(line["name"])) for line in lines)]
    if not set(map(type, names)) <= {str, NoneType} or len(throttle) != len(names):
        raise WrongRecord("name or throttle is no text")
    _require_texts("throttle", chain.from_iterable(throttle))
    known = {reasons: reasons for reasons in map(tuple, throttle)}
    columns: dict[str, Any] = {
        name: _numbers(name, lines, sizes, None if name in _MOMENTS else UNKNOWN) for name in OF_STEPS
    }
    _refuse_reversed("a step", columns["start_ns"], columns["end_ns"])
    begin_ns = columns["start_ns"] + record.clock_base_ns
    columns |= {"start_ns": begin_ns, "end_ns": columns["end_ns"] + record.clock_base_ns}
    steps = StepColumns(
        names=tuple([None if name is None else intern(name) for name in names]),
        throttle=tuple([known[tuple(reasons)] for reasons in throttle]),
        phases=_build_phases([line.get("phases", {}) for line in lines], sizes, begin_ns),
        gpu_phases=_build_phases([line.get("gpu_phases", {}) for line in lines], sizes, begin_ns),
        **columns,
    )
    return LightColumns(
        record, steps, _build_calls([line.get("collectives", {}) for line in lines], sizes, begin_ns, shared)
    )


def _numbers(what: str, tables: Sequence[Columns], counts: Sequence[int], lacking: int | None) -> Ints:
    """Return a column of several lines; ``lacking`` stands for unknown numbers, of which None allows none."""
    columns, count = [table.get(what.rpartition(".")[2]) for table in tables], sum(counts)
    if not any(columns):
        if count and lacking is None:
            raise WrongRecord(f"{what} is missing")
        return np.full(count, 0 if lacking is None else lacking)
    parts = [
        ",".join([UNKNOWN_CELL] * size) if column is None else column
        for column, size in zip(columns, counts, strict=True)
    ]
    text = ",".join(filter(None, parts))
    try:
        numbers: Ints = np.fromstring(
            text if lacking is None else text.replace(UNKNOWN_CELL, str(lacking)), np.int64, sep=","
        )
        # A number that does not fit is read as the largest that does.
        if len(numbers) and (numbers.max() > _LARGEST or numbers.min() < -_LARGEST):
            raise ValueError
    except (ValueError, DeprecationWarning):
        raise WrongRecord(f"{what} holds something else than whole numbers") from None
    if len(numbers) != count:
        raise WrongRecord(f"{what} does not hold {count} numbers")
    return numbers


def _sum_lines(counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    before = np.cumsum([0, *counts])
    sums: list[int] = np.diff(before[np.cumsum([0, *sizes])]).tolist()
    return sums


def _build_phases(tables: Sequence[Columns], sizes: Sequence[int], begin_ns: Ints) -> Phases:
    count = _numbers("a phase.count", tables, sizes, 0)
    step, counts = np.repeat(np.arange(len(count)), count), _sum_lines(count.tolist(), sizes)
    texts = [*chain.from_iterable(table.get("name", ()) for table in tables)]
    _require_texts("a phase", texts)
    if len(texts) != len(step):
        raise WrongRecord(f"a phase does not hold {len(step)} names")
    names = tuple(map(intern, sorted(set(texts))))
    number = {text: at for at, text in enumerate(names)}
    start_ns, end_ns = (_numbers(f"a phase.{name}", tables, counts, None) for name in ("start_ns", "end_ns"))
    _refuse_reversed("a phase", start_ns, end_ns)
    begin_ns = begin_ns[step]
    name = np.array([number[text] for text in texts], dtype=np.int64)
    return Phases(names, step, name, start_ns + begin_ns, end_ns + begin_ns)


def _refuse_reversed(what: str, start_ns: Ints, end_ns: Ints) -> None:
    if ((end_ns < start_ns) & (start_ns != UNKNOWN) & (end_ns != UNKNOWN)).any():
        raise WrongRecord(f"{what} ends before it starts")


def _require_texts(what: str, values: Iterable[Any]) -> None:
    if not set(map(type, values)) <= {str}:
        raise WrongRecord(f"{what} has a name that is no text")


def _build_calls(
    tables: Sequence[Columns], sizes: Sequence[int], begin_ns: Ints, shared: Mapping[int, Columns]
) -> CallColumns:
    names: dict[tuple[str, str | None], int] = {}
    numbers = _numbers("collectives.calls", tables, sizes, NO_CALLS).tolist()
    called = {number: _number_calls(shared[number], names) for number in dict.fromkeys(numbers) if number != NO_CALLS}
    called[NO_CALLS] = np.zeros((3, 0), dtype=np.int64)
    group, what, byte_count = np.concatenate([called[number] for number in numbers or [NO_CALLS]], axis=1)
    counts = [called[number].shape[1] for number in numbers]
    rows = _sum_lines(counts, sizes)
    own = {
        name: _numbers(f"collectives.{name}", tables, rows, None if name == "sequence" else UNKNOWN)
        for name in OF_CALLS
    }
    _refuse_reversed("a collective", own["start_ns"], own["end_ns"])
    for name in ("hidden_ns", "exposed_ns"):
        _refuse_reversed(f"collectives.{name}", np.zeros_like(own[name]), own[name])
    step = np.repeat(np.arange(len(numbers)), counts)
    own |= {name: later(own[name], begin_ns[step]) for name in _MOMENTS}
    return CallColumns(tuple(names), step, group, what, byte_count, **own)


def _number_calls(calls: Mapping[str, Any], names: dict[tuple[str, str | None], int]) -> Ints:
    count = len(calls.get("group") or ())
    columns = {name: [None] * count if calls.get(name) is None else calls[name] for name in COMMON}
    types: dict[str, set[type]] = {"group": {int}, "kind": {str}, "dtype": {str, NoneType}, "bytes": {int, NoneType}}
    for name, column in columns.items():
        if type(column) is not list or len(column) != count or not set(map(type, column)) <= types[name]:
            raise WrongRecord(f"collectives.{name} is not a list of {count}, or holds something of another type")
    pairs = zip(map(intern, columns["kind"]), columns["dtype"], strict=True)
    what = [names.setdefault(pair, len(names)) for pair in pairs]
    size = [UNKNOWN if value is None else value for value in columns["bytes"]]
    try:
        return np.array([columns["group"], what, size], dtype=np.int64)
    except OverflowError:
        raise WrongRecord("collectives.bytes holds a number that is too large") from None


def _unpack(columns: LightColumns) -> Iterator[StepRecord]:
    steps, calls, base_ns = columns.steps, columns.calls, columns.record.clock_base_ns
    fields: dict[str, Sequence[Any]] = {name: _known(getattr(steps, name)) for name in OF_STEPS}
    fields |= {"name": steps.names, "throttle": steps.throttle}
    fields |= {name: _known(getattr(steps, name) - base_ns) for name in ("start_ns", "end_ns")}
    for name in ("phases", "gpu_phases"):
        table: Phases = getattr(steps, name)
        times = (_known(time - steps.start_ns[table.step]) for time in (table.start_ns, table.end_ns))
        rows = tuple(zip((table.names[number] for number in table.name.tolist()), *times, strict=True))
        fields[name] = [rows[first:last] for first, last in _spans(table.step, len(steps))]
    of_calls = {name: _known(getattr(calls, name)) for name in ("group", "bytes", *OF_CALLS)}
    for name in _MOMENTS:
        of_calls[name] = _known(later(getattr(calls, name), -steps.start_ns[calls.step]))
    of_calls["kind"], of_calls["dtype"] = ([calls.names[what][at] for what in calls.what.tolist()] for at in (0, 1))
    fields["collectives"] = [
        Collectives(**{name: column[first:last] for name, column in of_calls.items()})
        for first, last in _spans(calls.step, len(steps))
    ]
    for values in zip(*fields.values(), strict=True):
        yield StepRecord(**dict(zip(fields, values, strict=True)))


def _known(column: Ints) -> list[Any]:
    return [None if value == UNKNOWN else value for value in column.tolist()]


def _spans(step: Ints, count: int) -> Iterable[tuple[int, int]]:
    return pairwise(np.searchsorted(step, np.arange(count + 1)).tolist())
