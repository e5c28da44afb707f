"""``light.jsonl`` read as columns, without an object a step or a collective: many ranks are read quickly so.

What the columns mean is said in `profkit.run.light_record`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from sys import intern
from types import NoneType
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import numpy.typing as npt

from profkit.errors import RunError
from profkit.files import collector_off
from profkit.run.light_record import (
    COMMON,
    NO_CALLS,
    OF_CALLS,
    OF_STEPS,
    P2P,
    TABLES,
    TEXTS,
    UNKNOWN_CELL,
    VERSION,
    Columns,
    Group,
    LightRecord,
    unpack,
)
from profkit.run.records import WrongRecord, decode, read_lines

Ints = npt.NDArray[np.int64]

UNKNOWN = -(1 << 31)
"""Stands for what nobody knows, in every column of ranks: times may be negative, and a short column has 32 bits."""

_LARGEST = 1 << 62
"""No number in a record is as large: sums and differences of two of them fit."""

_MOMENTS = ("start_ns", "end_ns")


@dataclass(frozen=True, eq=False)
class Phases:
    """The phases of all steps in their order: the position of the step, that of the name in ``names``, and when.

    ``names`` are sorted. Times count from the step's start.
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
        """Return how long one phase took in each of ``count`` steps."""
        return self.times(count)[:, self.names.index(name)] if name in self.names else np.zeros(count, dtype=np.int64)

    def of_steps(self, number: Ints) -> Phases:
        """Return those of some steps alone: the position of a step → its new one, -1 for those left out."""
        kept = number[self.step] >= 0
        name, start_ns, end_ns = self.name[kept], self.start_ns[kept], self.end_ns[kept]
        return Phases(self.names, number[self.step[kept]], name, start_ns, end_ns)


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
        """Return the positions of the measured steps: those with a name."""
        return np.array([at for at, name in enumerate(self.names) if name is not None], dtype=np.int64)

    def only(self, kept: Sequence[int]) -> StepColumns:
        """Return the steps at these positions alone."""
        number = np.full(len(self), -1)
        number[kept] = np.arange(len(kept))
        columns: dict[str, Any] = {}
        for name, column in vars(self).items():
            if isinstance(column, Phases):
                columns[name] = column.of_steps(number)
            elif name in self.__dataclass_fields__:
                columns[name] = column[kept] if isinstance(column, np.ndarray) else tuple(column[at] for at in kept)
        return StepColumns(**columns)


@dataclass(frozen=True, eq=False)
class CallColumns:
    """All collectives of one rank, in the order of its steps; ``what`` is the position of kind and dtype in ``names``.

    What nobody knows is `UNKNOWN`. Times count from the start of their step.
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

    @property
    def is_pairwise(self) -> npt.NDArray[np.bool_]:
        """Whether each is sent to or received from one other rank."""
        return np.array([kind in P2P for kind, _ in self.names], dtype=np.bool_)[self.what]


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
    return _read(path)[0]


def read_light(path: Path) -> tuple[LightColumns, LightRecord]:
    """Return the record of a rank as columns, and with an object for each step; the file is read once."""
    columns, steps, calls = _read(path)
    return columns, replace(columns.record, steps=tuple(unpack(steps, calls)))


def _read(path: Path) -> tuple[LightColumns, Columns, dict[int, Columns]]:
    with collector_off(), catch_warnings():
        simplefilter("error", DeprecationWarning)  # so numpy before 2.3 says that a text holds something else
        try:
            record, steps, calls = _take_lines(path, is_each_checked=False)
            return _build(record, steps, calls), steps, calls
        except (ValueError, KeyError, TypeError, AttributeError):
            # Which line is wrong shows one by one; the last one is left out.
            record, steps, calls = _take_lines(path, is_each_checked=True)
            return _build(record, steps, calls), steps, calls


def _take_lines(path: Path, *, is_each_checked: bool) -> tuple[LightRecord, Columns, dict[int, Columns]]:
    """Return the header with the groups, all steps as one line would hold them, and the calls that they share."""
    header: dict[str, Any] | None = None
    groups: list[Group] = []
    parts: list[Columns] = []
    calls: dict[int, Columns] = {}

    def take(entry: dict[str, Any]) -> None:
        nonlocal header
        kind = entry["kind"]
        if kind == "steps":
            if type(entry["name"]) is not list:
                raise WrongRecord("name is not a list")
            if is_each_checked:
                _build(LightRecord(0, 0), _join([entry]), calls)
            parts.append(entry)
        elif kind == "calls":
            _number_calls(entry["collectives"], {})
            calls[entry["number"]] = entry["collectives"]
        elif kind == "group":
            group: Group = decode(Group, entry)
            groups.append(replace(group, ranks=_intern_ranks(group.ranks)))
        elif kind == "header":
            header = entry
            if entry["version"] != VERSION:
                older, newer = (
                    "this profkit no longer reads; record the run again",
                    "is of a newer profkit; update this one",
                )
                raise RunError(
                    f"{path}: version {entry['version']}, which {newer if entry['version'] > VERSION else older}"
                )

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
    return replace(record, groups=tuple(groups)), _join(parts), calls


@lru_cache(maxsize=256)
def _intern_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return one tuple for all that are equal: the records of all ranks name all ranks of their groups."""
    return ranks


def _join(parts: Sequence[Columns]) -> Columns:
    """Return the steps of several lines as one line would hold them, what is left out of all of them as None."""
    sizes = [len(part["name"]) for part in parts]

    def numbers(name: str, of: Sequence[Columns], sizes: Sequence[int], lacking: str | None = None) -> str | None:
        columns = [column.get(name) for column in of]
        if not any(columns) and lacking is None:
            return None
        cell = UNKNOWN_CELL if lacking is None else lacking
        texts = [
            ",".join([cell] * size) if column is None else column for column, size in zip(columns, sizes, strict=True)
        ]
        return ",".join(filter(None, texts))

    def texts(name: str, of: Sequence[Columns]) -> list[Any]:
        return list(chain.from_iterable([table.get(name, ()) for table in of]))

    throttle = [part.get("throttle", [()] * size) for part, size in zip(parts, sizes, strict=True)]
    joined: Columns = {"name": texts("name", parts), "throttle": list(chain.from_iterable(throttle))}
    joined |= {name: numbers(name, parts, sizes) for name in OF_STEPS}
    for name, columns in TABLES.items():
        tables = [part.get(name, {}) for part in parts]
        joined[name] = {"count": numbers("count", tables, sizes, "0")}
        # A table that a line leaves out has no rows there.
        rows = [0] * len(parts)
        joined[name] |= {
            column: texts(column, tables) if column in TEXTS else numbers(column, tables, rows) for column in columns
        }
    tables = [part.get("collectives", {}) for part in parts]
    rows = [sequence.count(",") + 1 if (sequence := table.get("sequence")) else 0 for table in tables]
    joined["collectives"] = {"calls": numbers("calls", tables, sizes, str(NO_CALLS))}
    joined["collectives"] |= {column: numbers(column, tables, rows) for column in OF_CALLS}
    return joined


def _build(record: LightRecord, steps: Columns, shared: Mapping[int, Columns]) -> LightColumns:
    """Return the steps as columns of numbers; all values of a column are checked at once, as there may be thousands."""
    names, throttle = steps["name"], [tuple(reasons) for reasons in steps["throttle"]]
    if not set(map(type, names)) <= {str, NoneType} or len(throttle) != len(names):
        raise WrongRecord("name or throttle is no text")
    _require_texts("throttle", chain.from_iterable(throttle))
    numbers = {name: _numbers(name, steps[name], len(names), may_lack=name not in _MOMENTS) for name in OF_STEPS}
    _refuse_reversed("a step", numbers["start_ns"], numbers["end_ns"])
    known = {reasons: reasons for reasons in throttle}
    return LightColumns(
        record,
        StepColumns(
            names=tuple([None if name is None else intern(name) for name in names]),
            start_ns=numbers["start_ns"],
            end_ns=numbers["end_ns"],
            launch_wait_ns=numbers["launch_wait_ns"],
            peak_bytes=numbers["peak_bytes"],
            sm_mhz=numbers["sm_mhz"],
            throttle=tuple([known[reasons] for reasons in throttle]),
            phases=_build_phases("a phase", steps["phases"], len(names)),
            gpu_phases=_build_phases("a phase", steps["gpu_phases"], len(names)),
        ),
        _build_calls(steps["collectives"], len(names), shared),
    )


def _numbers(what: str, column: Any, count: int, *, may_lack: bool = False) -> Ints:
    """Return ``count`` whole numbers as a column, `UNKNOWN` for those that are not known if they ``may_lack``.

    A file has them as one text, a record that is not read from one as a list.
    """
    if not column and (column is None or not count):
        if count and not may_lack:
            raise WrongRecord(f"{what} is missing")
        return np.full(count, UNKNOWN)
    if isinstance(column, str):
        try:
            text = column.replace(UNKNOWN_CELL, str(UNKNOWN)) if may_lack else column
            numbers: Ints = np.fromstring(text, np.int64, sep=",")
            # A number that does not fit is read as the largest that does.
            if len(numbers) and (numbers.max() > _LARGEST or numbers.min() < -_LARGEST):
                raise ValueError
        except (ValueError, DeprecationWarning):
            raise WrongRecord(f"{what} holds something else than whole numbers") from None
    else:
        numbers = _listed(what, column, may_lack=may_lack)
    if len(numbers) != count:
        raise WrongRecord(f"{what} does not hold {count} numbers")
    return numbers


def _listed(what: str, values: Sequence[Any], *, may_lack: bool) -> Ints:
    try:
        # An array takes whole numbers alone, and quickly; but also True and False, which it holds for 1 and 0.
        numbers = np.frombuffer(array("q", values), dtype=np.int64)
        if not ((numbers >> 1) == 0).any() or bool not in set(map(type, values)):
            return numbers
    except TypeError:
        if may_lack and set(map(type, values)) <= {int, NoneType}:
            return _listed(what, [UNKNOWN if value is None else value for value in values], may_lack=False)
    except OverflowError:
        pass
    raise WrongRecord(f"{what} holds something else than whole numbers")


def _build_phases(what: str, table: Columns, count: int) -> Phases:
    step = np.repeat(np.arange(count), _numbers(f"{what}.count", table["count"], count))
    names, name = _texts(what, table["name"], len(step))
    start_ns, end_ns = (_numbers(what, table[column], len(step)) for column in ("start_ns", "end_ns"))
    _refuse_reversed(what, start_ns, end_ns)
    return Phases(names, step, name, start_ns, end_ns)


def _refuse_reversed(what: str, start_ns: Ints, end_ns: Ints) -> None:
    if ((end_ns < start_ns) & (start_ns != UNKNOWN) & (end_ns != UNKNOWN)).any():
        raise WrongRecord(f"{what} ends before it starts")


def _texts(what: str, column: Any, count: int) -> tuple[tuple[str, ...], Ints]:
    _require_texts(what, column)
    if len(column) != count:
        raise WrongRecord(f"{what} does not hold {count} names")
    names = tuple(map(intern, sorted(set(column))))
    number = {text: at for at, text in enumerate(names)}
    return names, np.array([number[text] for text in column], dtype=np.int64)


def _require_texts(what: str, values: Iterable[Any]) -> None:
    if not set(map(type, values)) <= {str}:
        raise WrongRecord(f"{what} has a name that is no text")


def _build_calls(table: Columns, count: int, shared: Mapping[int, Columns]) -> CallColumns:
    names: dict[tuple[str, str | None], int] = {}
    numbers = _numbers("collectives.calls", table["calls"], count).tolist()
    tables = {number: _number_calls(shared[number], names) for number in dict.fromkeys(numbers) if number != NO_CALLS}
    tables[NO_CALLS] = np.zeros((3, 0), dtype=np.int64)
    group, what, byte_count = np.concatenate([tables[number] for number in numbers or [NO_CALLS]], axis=1)
    step = np.repeat(np.arange(len(numbers)), [tables[number].shape[1] for number in numbers])
    own = {
        name: _numbers(f"collectives.{name}", table[name], len(step), may_lack=name != "sequence") for name in OF_CALLS
    }
    _refuse_reversed("a collective", own["start_ns"], own["end_ns"])
    for name in ("hidden_ns", "exposed_ns"):
        _refuse_reversed(f"collectives.{name}", np.zeros_like(own[name]), own[name])
    return CallColumns(tuple(names), step, group, what, byte_count, **own)


def _number_calls(calls: Mapping[str, Any], names: dict[tuple[str, str | None], int]) -> Ints:
    """Return group, position in ``names`` and bytes of the collectives of a step; new names are added."""
    count = len(calls.get("group") or ())
    columns = {name: [None] * count if calls.get(name) is None else calls[name] for name in COMMON}
    for name, column in columns.items():
        if type(column) is not list or len(column) != count:
            raise WrongRecord(f"collectives.{name} is not a list of {count}")
    kinds, dtypes = columns["kind"], columns["dtype"]
    if not set(map(type, kinds)) <= {str} or not set(map(type, dtypes)) <= {str, NoneType}:
        raise WrongRecord("collectives.kind or collectives.dtype holds something of another type")
    pairs = zip(map(intern, kinds), dtypes, strict=True)
    what = np.array([names.setdefault(pair, len(names)) for pair in pairs], dtype=np.int64)
    group = _numbers("collectives.group", columns["group"], count)
    return np.stack([group, what, _numbers("collectives.bytes", columns["bytes"], count, may_lack=True)])
