"""The detector of rows that bf16 makes slower, and what the other sizes say about why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipes.detectors.columns import Phase
from recipes.detectors.finding import Finding
from recipes.detectors.sizes import Line, lines_by_size
from recipes.detectors.tables import BenchmarkTable
from recipes.detectors.times import LARGER, seconds_by_phase

_NARROW, _WIDE = {"bf16", "bfloat16"}, {"fp32", "float32", "tf32"}
_SLOWER = 1.05
"""How many times as long is slower: what kernels bound differs by up to 1 % between processes alike, on an H200."""
_BOUND = 0.5
"""The power of a size below which time follows launches: work that fills the device grows with the size itself."""


@dataclass(frozen=True)
class _Timed:
    """A row with its seconds by phase, and whether it is of TF32."""

    table: BenchmarkTable
    row: int
    seconds: dict[Phase, float]
    is_tf32: bool


Labels = tuple[tuple[str, str], ...]
_Slower = dict[Phase, tuple[float, bool]]
"""By phase: the seconds that a wider type takes, and whether that is TF32."""


def find_slower_in_bf16(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Note rows that are over 5 % slower in bf16 than in float32, or else than in TF32, phase by phase, and why.

    A phase that takes as long in both within that is not told of, though another of its row is.
    """
    narrow, wide = _split_by_dtype(tables)
    lines = {id(table): list(lines_by_size(table)) for table in tables}
    for labels, mine in narrow:
        slower = _compare(mine, wide.get(labels, []))
        if not slower:
            continue
        dtype = _dtype_of(mine.table)
        told = ", ".join(
            f"{phase} {mine.seconds[phase] * 1e3:.4g} ms against {seconds * 1e3:.4g} ms"
            for phase, (seconds, _) in slower.items()
        )
        where = mine.table.describe(mine.row, without=[dtype] if dtype else [])
        why = _say_bound(mine, slower, lines[id(mine.table)]) or _say_casts(slower)
        yield Finding("bf16-slower", mine.table.name, f"slower in bf16 at {where}: {told}: {why}", is_note=True)


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
    """Return the phases that are slower than in a wider type: than in float32, or else than in TF32."""
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
    """Return the pair of sizes that shows best that a row waits for its launches, if one does."""
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
        return "the baseline is TF32, which has the same tensor cores, and autocast casts the weights each time"
    return "autocast casts the weights each time, and launches for it; no other size tells whether launches bound it"
