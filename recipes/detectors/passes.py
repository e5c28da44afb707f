"""The detector of forward and backward that take other times in the training step than without the optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Literal

from recipes.detectors.columns import Phase, phase_of
from recipes.detectors.finding import Finding
from recipes.detectors.tables import BenchmarkTable
from recipes.detectors.times import LAUNCH_BOUND_S, seconds_by_phase

_SAME: tuple[Phase, ...] = ("forward", "backward")
"""What both kinds of step do alike: the work is the same, and so should the time be."""
_DISAGREES = 1.25
"""How many times as long is no longer the same: launches make that, or a disturbance; alike kernels stay within 1 %."""
_TRAINING = {"train", "training", "optimizer"}

_Kind = Literal["forward-backward", "train"]
_Different = list[tuple[float, str]]
"""By phase that differs: how many times the shorter the longer is, and both in words."""


def find_disagreeing_passes(table: BenchmarkTable) -> Iterator[Finding]:
    """Note rows alike but for the kind of step whose forward or backward differs by more than 25 % of the shorter.

    Compared are steps of forward and backward with whole training steps: forward alone runs without autograd, and may
    be shorter. Phases under 1 ms in both are left out: launches are likely to bound them.
    """
    column = _find_column(table)
    if column is None:
        return
    pairs = list(_pairs(table, column))
    found = []
    for row, other in pairs:
        different = _compare(table, row, other)
        if different:
            told = ", ".join(said for _, said in different)
            found.append((max(different)[0], f"{told} at {table.describe(row, without=[column])}"))
    if found:
        worst = "; ".join(said for _, said in sorted(found, reverse=True)[:3])
        names = " and in ".join(table.rows[row][column].strip() for row in pairs[0])
        yield Finding(
            "disagreeing-passes",
            table.name,
            f"a phase takes other times in {names}, by over {_DISAGREES - 1:.0%} in {len(found)} of {len(pairs)} pairs "
            f"of rows alike but for {column}, most: {worst}; launches bound it, or something disturbed one of the two",
            is_note=True,
        )


def _find_column(table: BenchmarkTable) -> str | None:
    """Return the column that names both kinds of step, whatever its heading."""
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
    """Yield the rows that agree in all labels but ``column``: one of forward and backward, one that trains."""
    alike: dict[tuple[str, ...], dict[_Kind, list[int]]] = {}
    for row, cells in enumerate(table.rows):
        kind = _kind_of(cells[column])
        if kind is not None and any(phase in seconds_by_phase(table, row) for phase in _SAME):
            labels = tuple(table.labels(row, without=[column]).values())
            alike.setdefault(labels, {}).setdefault(kind, []).append(row)
    for kinds in alike.values():
        yield from product(kinds.get("forward-backward", []), kinds.get("train", []))


def _compare(table: BenchmarkTable, row: int, other: int) -> _Different:
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
