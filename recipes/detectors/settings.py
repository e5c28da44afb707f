"""Detectors that compare rows of the same work in two settings: bf16 against fp32, with and without the optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from recipes.detectors.tables import BenchmarkTable, Finding, Phase, phase_of
from recipes.detectors.times import LARGER, LAUNCH_BOUND_S, Line, lines_by_size, seconds_by_phase

_SAME: tuple[Phase, ...] = ("forward", "backward")
"""The phases that both kinds of step share: the same work should take the same time."""
_DISAGREES = 1.25
"""The ratio from which times differ. The same kernels stay within 1 %; launches or a disturbance cause more."""
_TRAINING = {"train", "training", "optimizer"}

_Kind = Literal["forward-backward", "train"]
_Different = list[tuple[float, str]]
"""For each phase that differs: the ratio of the longer to the shorter time, and both times in words."""


def find_disagreeing_passes(table: BenchmarkTable) -> Iterator[Finding]:
    """Note pairs of rows that differ only in the kind of step, with forward or backward over 25 % apart.

    This compares steps of forward and backward with whole training steps; forward alone runs without autograd and may
    be shorter. Phases under 1 ms in both rows are left out: launches probably limit them.
    """
    column = _find_column(table)
    if column is None:
        return
    pairs = list(_pairs(table, column))
    found = []
    for row, other in pairs:
        different = _differences(table, row, other)
        if different:
            times = ", ".join(pair for _, pair in different)
            found.append((max(different)[0], f"{times} at {table.describe(row, without=[column])}"))
    if found:
        worst = "; ".join(said for _, said in sorted(found, reverse=True)[:3])
        names = " and in ".join(table.rows[row][column].strip() for row in pairs[0])
        yield Finding(
            "disagreeing-passes",
            table.name,
            f"a phase takes different times in {names}, by over {_DISAGREES - 1:.0%} in {len(found)} of {len(pairs)} "
            f"pairs of rows that differ only in {column}, most: {worst}; launches limit one, or something disturbed it",
            is_note=True,
        )


def _find_column(table: BenchmarkTable) -> str | None:
    """Return the column that names both kinds of step, under any heading."""
    for heading, role in table.roles.items():
        if role.quantity == "label" and len({_kind_of(row[heading]) for row in table.rows} - {None}) == 2:
            return heading
    return None


def _kind_of(cell: str) -> _Kind | None:
    words = set(re.findall(r"[a-z]+", cell.lower()))
    if words & _TRAINING:
        return "train"
    return "forward-backward" if phase_of(words) == "forward+backward" else None


def _pairs(table: BenchmarkTable, column: str) -> Iterator[tuple[int, int]]:
    """Yield pairs of rows that agree in all labels except ``column``: forward and backward, and training."""
    alike: dict[tuple[str, ...], dict[_Kind, list[int]]] = {}
    for row, cells in enumerate(table.rows):
        kind = _kind_of(cells[column])
        if kind is not None and any(phase in seconds_by_phase(table, row) for phase in _SAME):
            labels = tuple(table.labels(row, without=[column]).values())
            alike.setdefault(labels, {}).setdefault(kind, []).append(row)
    for kinds in alike.values():
        yield from product(kinds.get("forward-backward", []), kinds.get("train", []))


def _differences(table: BenchmarkTable, row: int, other: int) -> _Different:
    mine, theirs = seconds_by_phase(table, row), seconds_by_phase(table, other)
    found = []
    for phase in _SAME:
        if phase not in mine or phase not in theirs:
            continue
        shorter, longer = sorted((mine[phase], theirs[phase]))
        if longer >= LAUNCH_BOUND_S and longer > _DISAGREES * shorter:
            said = f"{phase} {mine[phase] * 1e3:.4g} ms and {theirs[phase] * 1e3:.4g} ms"
            found.append((longer / shorter, said))
    return found


_NARROW, _WIDE = {"bf16", "bfloat16"}, {"fp32", "float32", "tf32"}
_SLOWER = 1.05
"""The ratio from which a time is slower: on an H200 equal kernels differ by up to 1 % between processes."""
_BOUND = 0.5
"""Below this power of the size, time follows launches: work that fills the device grows with the size itself."""


@dataclass(frozen=True)
class _Timed:
    """A row with its seconds by phase, and whether it uses TF32."""

    table: BenchmarkTable
    row: int
    seconds: dict[Phase, float]
    is_tf32: bool


Labels = tuple[tuple[str, str], ...]
_Slower = dict[Phase, tuple[float, bool]]
"""By phase: the seconds of a wider type, and whether that is TF32."""


def find_slower_in_bf16(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Note phases that are over 5 % slower in bf16 than in float32, or otherwise than in TF32, and why."""
    narrow, wide = _split_by_dtype(tables)
    lines = {id(table): list(lines_by_size(table)) for table in tables}
    for labels, mine in narrow:
        slower = _compare(mine, wide.get(labels, []))
        if not slower:
            continue
        dtype = _dtype_of(mine.table)
        times = ", ".join(
            f"{phase} {mine.seconds[phase] * 1e3:.4g} ms against {seconds * 1e3:.4g} ms"
            for phase, (seconds, _) in slower.items()
        )
        where = mine.table.describe(mine.row, without=[dtype] if dtype else [])
        why = _say_bound(mine, slower, lines[id(mine.table)]) or _say_casts(slower)
        yield Finding("bf16-slower", mine.table.name, f"slower in bf16 at {where}: {times}: {why}", is_note=True)


def _split_by_dtype(
    tables: Sequence[BenchmarkTable],
) -> tuple[list[tuple[Labels, _Timed]], dict[Labels, list[_Timed]]]:
    """Return the rows in bf16 and those in wider types, by their labels without the dtype."""
    narrow: list[tuple[Labels, _Timed]] = []
    wide: dict[Labels, list[_Timed]] = {}
    for table in tables:
        dtype = _dtype_of(table)
        if dtype is None:
            continue
        for row in range(len(table.rows)):
            labels = tuple(table.labels(row, without=[dtype]).items())
            name = table.rows[row][dtype].strip().lower()
            timed = _Timed(table, row, seconds_by_phase(table, row), name == "tf32")
            if name in _NARROW:
                narrow.append((labels, timed))
            elif name in _WIDE:
                wide.setdefault(labels, []).append(timed)
    return narrow, wide


def _dtype_of(table: BenchmarkTable) -> str | None:
    return next((heading for heading in table.headings if heading.lower() in ("dtype", "precision")), None)


def _compare(mine: _Timed, others: Sequence[_Timed]) -> _Slower:
    """Return the phases that are slower than in float32, or otherwise than in TF32."""
    found: _Slower = {}
    for phase, seconds in mine.seconds.items():
        faster = [
            # Slower than float32 is slower than TF32 too.
            (other.is_tf32, other.seconds[phase])
            for other in others
            if phase in other.seconds and seconds > _SLOWER * other.seconds[phase]
        ]
        if faster:
            is_tf32, least = min(faster)
            found[phase] = (least, is_tf32)
    return found


def _say_bound(mine: _Timed, slower: _Slower, lines: Sequence[Line]) -> str | None:
    """Return the pair of sizes that shows best that a row waits for its launches, if there is one."""
    found = []
    for line in lines:
        size = next((size for size, row in line.points if row == mine.row), None)
        for other_size, other in line.points if size else ():
            theirs = seconds_by_phase(mine.table, other)
            for phase in slower.keys() & theirs.keys():
                pair = sorted(((size or 0.0, mine.seconds[phase], mine.row), (other_size, theirs[phase], other)))
                growth, times = pair[1][0] / pair[0][0], pair[1][1] / pair[0][1]
                if growth >= LARGER and math.log(times) < _BOUND * math.log(growth):
                    names = [mine.table.rows[row][line.named_by].strip() for *_, row in pair]
                    said = (
                        f"launch-bound: from {line.named_by} {names[0]} to {names[1]}, {growth:.3g} times the "
                        f"{line.heading}, {phase} takes {times:.2f} times as long"
                    )
                    found.append((math.log(times) / math.log(growth), said))
    return min(found)[1] if found else None


def _say_casts(slower: _Slower) -> str:
    if any(is_tf32 for _, is_tf32 in slower.values()):
        return "the baseline is TF32, which uses the same tensor cores, and autocast casts the weights each time"
    return "autocast casts the weights each time and launches kernels for it; no other size shows if launches limit it"
