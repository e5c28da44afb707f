"""Tables of measurements, anybody's: read from Markdown or CSV, or made of rows, with what each column holds."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from profkit.errors import CaptureError

Quantity = Literal[
    "time", "memory", "memory per square", "length", "width", "parameters", "share", "number", "outcome", "label"
]
Phase = Literal["forward", "backward", "forward+backward", "optimizer", "step"]
Statistic = Literal["location", "deviation"]

SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BINARY_BYTES = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DECIMAL_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BYTES = {"b": 1, "bytes": 1, **BINARY_BYTES, **DECIMAL_BYTES}

_LENGTHS = {"seq", "seq len", "seq length", "sequence", "sequence length", "context", "context length", "length"}
_LENGTHS |= {"s", "n", "t"}
_WIDTHS = {"d model", "dmodel", "width", "d", "head dim", "d head"}
_FORWARD = {"fwd", "fws", "forward"}
_BACKWARD = {"bwd", "back", "backward"}
_MEANS = {"avg", "mean", "average"}
_LOCATIONS = {*_MEANS, "median", "min", "max", "p10", "p90"}
_DEVIATIONS = {"std", "stdev", "sd", "deviation", "mad"}
_MEMORY = {"mem", "memory", "peak", "saved", "allocated", "reserved", "activations"}
_PARAMETERS = {"parameters", "params"}
_OUTCOMES = {"status", "reason"}
_COUNTED = {"kernels", "graphs", "retries", "launches", "calls", "count", "counts"}
_PER_SQUARE = re.compile(
    r"(/|(?:\b|_)per[ _])\s*(seq(?:uence|[ _]len(?:gth)?)?|s|n|l|t|context)\s*(\^\s*2|\*\*\s*2|²|2\b|[ _]squared?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Role:
    """What a column holds. ``base`` is its heading without unit and statistic, the same for columns of one quantity."""

    quantity: Quantity
    unit: str | None = None
    phase: Phase | None = None
    statistic: Statistic = "location"
    base: tuple[str, ...] = ()
    is_mean: bool = False

    @property
    def is_label(self) -> bool:
        """Whether the column identifies the row; measured and computed columns do not."""
        return self.quantity in ("length", "width", "label")

    @property
    def seconds(self) -> float:
        """The unit in seconds; 1 if the table gives none, as ratios hold in any unit."""
        return SECONDS.get(self.unit or "", 1.0)


def recognize(heading: str) -> Role:
    """Return what the column under ``heading`` holds: ``fwd std (sec)``, ``mem_after_inputs_MiB``, ``d_model``."""
    words = re.findall(r"[a-zµ]+\d*|\d+|%", heading.lower())
    plain = " ".join(words)
    if plain in _LENGTHS or plain in _WIDTHS:
        return Role("length" if plain in _LENGTHS else "width", base=tuple(words))
    # A pivot's column has a value as heading, such as a model's size: 2.7B are no bytes.
    is_value = re.fullmatch(r"[\d.]+[a-z]?", heading.strip(), re.IGNORECASE) is not None
    unit = words[-1] if len(words) > 1 and words[-1] in {*SECONDS, *BYTES} and not is_value else None
    rest = [word for word in words if word != unit]
    base = tuple(word for word in rest if word not in _LOCATIONS | _DEVIATIONS)
    statistic: Statistic = "deviation" if _DEVIATIONS & set(rest) else "location"
    if _PER_SQUARE.search(heading) or {"share", "%", "percent"} & set(words):
        return Role("memory per square" if _PER_SQUARE.search(heading) else "share", unit, base=base)
    if unit in BYTES or (unit is None and _MEMORY & set(words)):
        return Role("memory", unit, statistic=statistic, base=base)
    if unit in SECONDS or _LOCATIONS & set(words) or _DEVIATIONS & set(words):
        return Role("time", unit, phase_of(set(rest)), statistic, base, bool(_MEANS & set(rest)))
    return Role(_kind_of(set(words)), base=tuple(words))


def _kind_of(words: set[str]) -> Quantity:
    """Return what a column holds that is neither a size of its own, a time, nor memory."""
    if _OUTCOMES & words:
        return "outcome"
    if _PARAMETERS & words:
        return "parameters"
    return "number" if _COUNTED & words else "label"


def phase_of(words: set[str]) -> Phase | None:
    """Return the phase that some words name, in lower case: ``fwd``, ``step``."""
    forward, backward = bool(words & _FORWARD), bool(words & _BACKWARD)
    if forward or backward:
        return "forward+backward" if forward and backward else "forward" if forward else "backward"
    return "optimizer" if "optimizer" in words else "step" if words & {"step", "steps", "iteration"} else None


_NUMBER = re.compile(
    r"(?P<value>[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(?:(?:±|\+/-)\s*(?P<deviation>[\d.]+(?:e[-+]?\d+)?))?"
    r"\s*(?P<unit>[a-zµ%]*)",
    re.IGNORECASE,
)
_LEAST = 1e-24
"""Smaller numbers, and larger ones than its inverse, measure nothing and would break arithmetic."""
_NOTHING = {"", "-", "–", "—", "n/a", "not run"}
_RULE = re.compile(r":?-+:?")
_CELL_END = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Number:
    """A printed number: ``0.37 ± 0.71``, ``3.8 GB``; ``ulp`` is one unit of its last digit."""

    value: float
    deviation: float | None
    unit: str | None
    decimals: int

    @property
    def ulp(self) -> float:
        return 10.0**-self.decimals


@dataclass(frozen=True)
class BenchmarkTable:
    """A table; ``rows`` hold the printed cells by heading."""

    name: str
    headings: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]

    @cached_property
    def roles(self) -> dict[str, Role]:
        found = {heading: recognize(heading) for heading in self.headings}
        for heading, role in found.items():
            numbers = [number for number in self.numbers[heading] if number is not None]
            if role.quantity == "parameters" and len(numbers) <= self._filled(heading) / 2:
                # No count: a dtype, or a name.
                found[heading] = replace(role, quantity="label")
            # Sizes of models are words, 2.7B among them; times stay numbers although memory ran out in some row.
            if role.quantity != "label" or len(numbers) <= self._filled(heading) / 2:
                continue
            units = {number.unit for number in numbers if number.unit}
            if len(units) == 1:
                # The unit stands in the cells.
                found[heading] = recognize(f"{heading} {units.pop()}")
            elif any(number.decimals > 0 for number in numbers):
                found[heading] = replace(role, quantity="number")
        return found

    def _filled(self, heading: str) -> int:
        return sum(1 for row in self.rows if not is_nothing(row[heading]))

    @cached_property
    def numbers(self) -> dict[str, list[Number | None]]:
        """Each column's numbers; None where a cell holds none."""
        return {heading: [parse_number(row[heading]) for row in self.rows] for heading in self.headings}

    def columns(self, quantity: Quantity, phase: Phase | None = None) -> list[str]:
        """Return the headings of the columns that hold the location (mean, median) of a quantity."""
        return [
            heading
            for heading, role in self.roles.items()
            if role.quantity == quantity and role.statistic == "location" and phase in (None, role.phase)
        ]

    def values(self, heading: str) -> list[float | None]:
        return [None if number is None else number.value for number in self.numbers[heading]]

    def seconds(self, phase: Phase) -> list[float | None]:
        """Return each row's time of a phase, from the first column that holds it; None where there is none."""
        for heading in self.columns("time", phase)[:1]:
            unit = self.roles[heading].seconds
            return [None if value is None else value * unit for value in self.values(heading)]
        return [None] * len(self.rows)

    def deviation_of(self, heading: str, row: int) -> float | None:
        """Return the deviation printed with a value, or in its column of deviations."""
        number = self.numbers[heading][row]
        if number is not None and number.deviation is not None:
            return number.deviation
        mine = self.roles[heading]
        for other, role in self.roles.items():
            if role.statistic == "deviation" and (role.base, role.quantity) == (mine.base, mine.quantity):
                found = self.numbers[other][row]
                return None if found is None else found.value
        return None

    def labels(self, row: int, without: Sequence[str] = ()) -> dict[str, str]:
        """Return what identifies a row: all columns but measurements and bare row numbers; empty cells are ''."""
        return {
            heading: "" if is_nothing(self.rows[row][heading]) else self.rows[row][heading].strip()
            for heading, role in self.roles.items()
            if heading and role.is_label and heading not in without
        }

    def describe(self, row: int, without: Sequence[str] = ()) -> str:
        """Return a row's labels in words: those that are not empty and differ between the rows."""
        shown = [
            f"{heading} {value}"
            for heading, value in self.labels(row, without).items()
            if value and len({other[heading] for other in self.rows}) > 1
        ]
        return ", ".join(shown) or f"row {row + 1}"


def read_tables(path: Path) -> list[BenchmarkTable]:
    """Return the tables of a Markdown or CSV file. In CSV, lines that begin with # are text.

    Raises:
        CaptureError: the file cannot be read, or holds no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CaptureError(f"{path}: not text; give a Markdown or CSV file") from None
    tables = read_csv(text, path.name) if path.suffix.lower() == ".csv" else read_markdown(text, path.name)
    if not tables:
        raise CaptureError(f"{path}: no table in it; a table is CSV (.csv) or has | between its cells")
    return tables


def read_markdown(text: str, name: str) -> list[BenchmarkTable]:
    """Return the tables of a Markdown text."""
    found: list[list[list[str]]] = []
    previous: list[str] | None = None
    table: list[list[str]] | None = None
    for line in text.splitlines():
        cells = _split(line)
        if cells is None:
            previous = table = None
        elif table is not None:
            table.append(cells)
        elif previous is not None and all(_RULE.fullmatch(cell) for cell in cells):
            table = [previous]
            found.append(table)
        else:
            previous = cells
    return [_build(f"{name}, table {number}" if len(found) > 1 else name, rows) for number, rows in enumerate(found, 1)]


def read_csv(text: str, name: str) -> list[BenchmarkTable]:
    """Return the table of a CSV text."""
    rows = list(csv.reader(line for line in text.splitlines() if line.strip() and not line.startswith("#")))
    return [_build(name, rows)] if len(rows) > 1 else []


def build_table(name: str, rows: Sequence[Mapping[str, object]]) -> BenchmarkTable:
    """Return the table of a recipe's own rows, to be inspected like any other."""
    headings = tuple(dict.fromkeys(key for row in rows for key in row))
    cells = [{key: "" if row.get(key) is None else str(row[key]) for key in headings} for row in rows]
    return BenchmarkTable(name, headings, tuple(cells))


def is_nothing(cell: str) -> bool:
    """Return whether a cell says in any usual way that it has no value."""
    return cell.strip().strip("*").strip().lower() in _NOTHING


def parse_number(cell: str) -> Number | None:
    """Return the number that a cell holds, or None."""
    match = _NUMBER.fullmatch(cell.strip().strip("*").strip())
    if match is None:
        return None
    digits = match["value"].replace(",", "")
    mantissa, _, exponent = digits.lower().partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    deviation = None if match["deviation"] is None else float(match["deviation"])
    if float(digits) and not _LEAST <= abs(float(digits)) <= 1 / _LEAST:
        return None
    return Number(float(digits), deviation, match["unit"].lower() or None, decimals)


def _split(line: str) -> list[str] | None:
    stripped = line.strip()
    if not _CELL_END.search(stripped):
        return None
    if stripped.startswith("|"):
        stripped = stripped[1:]
    if stripped.endswith("|") and not stripped.endswith("\\|"):
        stripped = stripped[:-1]
    return [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(stripped)]


def _build(name: str, rows: Sequence[Sequence[str]]) -> BenchmarkTable:
    headings = tuple(heading.strip() for heading in rows[0])
    body = tuple(dict(zip(headings, [*row, *[""] * len(headings)], strict=False)) for row in rows[1:])
    return BenchmarkTable(name, headings, body)
