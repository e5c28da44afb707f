"""Detectors that compare tables with each other: the same cell measured twice, shares of two ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from profkit.analysis.sample_statistics import median
from recipes.detectors.finding import Finding
from recipes.detectors.tables import BenchmarkTable
from recipes.detectors.times import LAUNCH_BOUND_S, ratios_by_row

_ABOUT_ONE = (0.7, 1.3)
_LAUNCHES_ALIKE = 1.2
_NARROW, _WIDE = {"bf16", "bfloat16"}, {"fp32", "float32", "tf32"}


def find_forward_in_backward(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Yield tables whose backward holds the forward pass: backward over forward is by 1 higher than elsewhere.

    Compared are cells of the same length and width with a forward pass of 1 ms and more; eager where a table says so.
    """
    by_cell = [_ratios_by_cell(table) for table in tables]
    for (table, mine), (other, theirs) in permutations(zip(tables, by_cell, strict=True), 2):
        shared = [cell for cell in mine if cell in theirs]
        if len(shared) < 3:
            continue
        more = median([mine[cell] - theirs[cell] for cell in shared])
        if _ABOUT_ONE[0] <= more <= _ABOUT_ONE[1]:
            last = shared[-1]
            yield Finding(
                "forward-in-backward",
                table.name,
                f"backward over forward is {mine[last]:.2f} at width {last[0]:g} and length {last[1]:g}, where "
                f"{other.name} has {theirs[last]:.2f} ({more:.2f} more, median of {len(shared)} cells): forward was "
                "timed inside backward",
            )
            return


def find_borrowed_shares(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Yield shares of forward that are those of forward and backward together, to the last digit, kernel by kernel."""
    shares = [(table, _phases(table), _shares(table)) for table in tables]
    for (table, phases, mine), (other, other_phases, theirs) in permutations(shares, 2):
        if phases != {"forward"} or other_phases != {"forward", "backward"}:
            continue
        same = [name for name, share in mine.items() if theirs.get(name) == share]
        if len(same) >= 2 and len(same) > len(mine) / 2:
            yield Finding(
                "borrowed-shares",
                table.name,
                f"{len(same)} of {len(mine)} shares of forward are those of {other.name}, forward and backward, to the "
                f"last digit (such as {same[0]}: {mine[same[0]]:g} %): they were read off the wrong range",
            )


def find_slower_in_bf16(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Note rows that are slower in bf16 than in float32, or else than in TF32, and why that may be."""
    times = _times_by_dtype(tables)
    for (labels, table_name), (seconds, what) in times[0].items():
        faster = [found for (other, *_), found in times[1].items() if other == labels and found[0] < seconds]
        if not faster:
            continue
        # Slower than float32 is slower than TF32 too.
        wide = min(faster, key=lambda found: (found[1], found[0]))
        bound = any(
            other != labels
            and _differs_in_size(labels, other)
            and 1 / _LAUNCHES_ALIKE < found / seconds < _LAUNCHES_ALIKE
            for (other, _), (found, _) in times[0].items()
        )
        if bound:
            why = "launch-bound: another size takes as long"
        elif wide[1]:
            why = "the baseline is TF32, which has the same tensor cores, and autocast casts the weights each time"
        else:
            why = "autocast casts the weights each time, and launches for it"
        message = f"forward is slower in bf16, {seconds * 1e3:.4g} ms against {wide[0] * 1e3:.4g} ms at {what}: {why}"
        yield Finding("bf16-slower", table_name, message, is_note=True)


Labels = tuple[tuple[str, str], ...]


def _times_by_dtype(
    tables: Sequence[BenchmarkTable],
) -> tuple[dict[tuple[Labels, str], tuple[float, str]], dict[tuple[Labels, str, bool], tuple[float, bool]]]:
    """Return seconds by row: in bf16, each with the row in words, and in wider types, each with whether it is TF32."""
    narrow: dict[tuple[Labels, str], tuple[float, str]] = {}
    wide: dict[tuple[Labels, str, bool], tuple[float, bool]] = {}
    for table in tables:
        dtype = next((heading for heading in table.headings if heading.lower() in ("dtype", "precision")), None)
        forward = table.columns("time", "forward")
        if dtype is None or not forward:
            continue
        for row, value in enumerate(table.values(forward[0])):
            if value is None:
                continue
            labels = tuple(table.labels(row, without=[dtype]).items())
            name = table.rows[row][dtype].strip().lower()
            seconds = value * table.roles[forward[0]].seconds
            if name in _NARROW:
                narrow[labels, table.name] = (seconds, table.describe(row, without=[dtype]))
            elif name in _WIDE:
                wide[labels, table.name, name == "tf32"] = (seconds, name == "tf32")
    return narrow, wide


def _differs_in_size(one: Labels, other: Labels) -> bool:
    """Return whether two rows differ in one number alone, such as the sequence length, by a factor of 2 or more."""
    different = [(a, b) for (_, a), (_, b) in zip(one, other, strict=False) if a != b]
    if len(one) != len(other) or len(different) != 1:
        return False
    sizes = [float(text) if re.fullmatch(r"[\d.]+", text) else 0.0 for text in different[0]]
    return min(sizes) > 0 and max(sizes) >= 2 * min(sizes)


def _ratios_by_cell(table: BenchmarkTable) -> dict[tuple[float, float], float]:
    lengths, widths = table.columns("length"), table.columns("width")
    if not lengths or not widths:
        return {}
    found = {}
    for row, (ratio, forward_s) in ratios_by_row(table).items():
        width, length = table.values(widths[0])[row], table.values(lengths[0])[row]
        if forward_s >= LAUNCH_BOUND_S and width and length and _is_eager(table.rows[row]):
            found[width, length] = ratio
    return found


def _is_eager(row: Mapping[str, str]) -> bool:
    compiled = next((value for key, value in row.items() if key.lower() in ("compile", "compiled")), "False")
    return compiled.strip().lower() in ("false", "no", "none", "eager", "0")


def _phases(table: BenchmarkTable) -> set[str]:
    words = set(re.findall(r"[a-z]+", table.caption.lower()))
    return words & {"forward", "backward"}


def _shares(table: BenchmarkTable) -> dict[str, float]:
    columns = table.columns("share")
    names = [heading for heading, role in table.roles.items() if role.quantity == "label"]
    if not columns or not names:
        return {}
    pairs = zip(table.rows, table.values(columns[0]), strict=True)
    return {row[names[0]]: share for row, share in pairs if share is not None}
