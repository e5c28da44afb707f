"""Why eager attention launches more kernels at a long sequence: a score matrix over 2 GiB is computed in parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profkit.report.units import format_bytes
from recipes.attention.cells import ITEM_BYTES
from recipes.compilation.cells import ATTENTION
from recipes.compilation.pairs import Pair, is_of_gpu
from recipes.compilation.work import launchers_of

_MOST_BYTES = 2**31
"""Of a part: its last item, of 2 bytes or more, then begins at an offset that a signed 32-bit integer holds."""


def tell_splits(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield, where the counts show it, that attention launches kernels in parts, beside a length at which it does not.

    ATen's element-wise kernels and reductions hold an item's offset in bytes in a signed 32-bit integer: what has
    larger ones is halved until no part has (``TensorIteratorBase::can_use_32bit_indexing`` and
    ``with_32bit_indexing``).
    """
    rows = [pair.eager for pair in pairs if pair.eager["what"] == ATTENTION and is_of_gpu(pair.eager)]
    told: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        shorter = [other for other in rows if _is_comparable(row, other) and _count_parts(other) == 1]
        if _count_parts(row) > 1 and shorter:
            said = _compare(row, max(shorter, key=lambda other: int(other["length"])))
            if said is not None:
                told.setdefault(said, []).append(str(row["d_model"]))
    for (before, after), widths in told.items():
        yield f"{before} {' and '.join(widths)} {after}"


def _compare(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what is said before and after the width, or None where the counts do not show it."""
    parts, many, few = _count_parts(row), _count_launches(row), _count_launches(other)
    split = [name for name in many if many[name] == parts * few[name]]
    alike = [name for name in many if many[name] == few[name]]
    if not split or many.keys() != few.keys() or len(split) + len(alike) < len(many):
        return None
    listed = ", ".join(f"{name} {many[name]} for {few[name]}" for name in split)
    kept = f"; {' and '.join(alike)} as many" if alike else ""
    length, elements = row["length"], row["batch"] * row["length"] ** 2
    return (
        f"Eager attention, {row['passes']}, {row['dtype']}, of d_model",
        f"launches {row['kernels']} kernels at sequence {length} and {other['kernels']} at {other['length']}: a score "
        f"matrix of {row['batch']} × {length}² = {elements:,} elements is {format_bytes(_score_bytes(row))}, and what "
        "ATen computes element by element, or reduces, it does in parts of at most 2 GiB, whose byte offsets fit a "
        f"signed 32-bit integer, here {parts}. So it launches {listed}{kept}.",
    )


def _is_comparable(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(row[key] == other[key] for key in ("d_model", "passes", "dtype", "batch"))


def _score_bytes(row: Mapping[str, Any]) -> int:
    return int(row["batch"] * row["length"] ** 2 * ITEM_BYTES[row["dtype"]])


def _count_parts(row: Mapping[str, Any]) -> int:
    """Return into how many equal parts a score matrix is halved until its byte offsets fit; 2 GiB still do."""
    parts = 1
    while _score_bytes(row) > parts * _MOST_BYTES:
        parts *= 2
    return parts


def _count_launches(row: Mapping[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in launchers_of(row):
        found[each.name.removeprefix("aten::").removesuffix("_")] += each.count
    return found
