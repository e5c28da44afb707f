"""Detectors of mistakes that a table of measurements reveals: `inspect_tables` for files, `inspect_rows` for a recipe.

A rule is a function that yields a sentence for each mistake; rules across tables yield the table's name with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipes.detectors import memory, times
from recipes.detectors.tables import BenchmarkTable, build_table

Rule = Callable[[BenchmarkTable], Iterator[str]]
RuleAcross = Callable[[Sequence[BenchmarkTable]], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Finding:
    """A mistake that the numbers reveal; a note is no mistake, but helps to read them."""

    code: str
    table: str
    message: str
    is_note: bool


MISTAKES: Mapping[str, Rule] = {
    "negative-time": times.find_negative_times,
    "spread": times.find_spread,
    "backward-ratio": times.find_ratio,
    "identical-columns": times.find_identical_columns,
    "zero-memory": memory.find_zero_memory,
    "negative-memory": memory.find_negative_memory,
    "carried-over": memory.find_carried_over,
    "swapped-axes": memory.find_swapped_axes,
    "unit-label": memory.find_binary_under_decimal_label,
    "unit-factor": memory.find_wrong_factor,
    "unit-conversion": memory.find_pairs_that_do_not_convert,
}
NOTES: Mapping[str, Rule] = {
    "launch-bound": times.find_launch_bound,
    "subtracted": times.find_subtraction,
}
MISTAKES_ACROSS: Mapping[str, RuleAcross] = {
    "forward-in-backward": times.find_forward_in_backward,
}


def inspect_tables(tables: Sequence[BenchmarkTable]) -> list[Finding]:
    """Return what the rules find in each table and between them: mistakes first, then notes."""
    mistakes, notes = (
        [Finding(code, table.name, said, is_note) for table in tables for code in rules for said in rules[code](table)]
        for is_note, rules in ((False, MISTAKES), (True, NOTES))
    )
    across = [Finding(code, name, said, False) for code, rule in MISTAKES_ACROSS.items() for name, said in rule(tables)]
    return [*mistakes, *across, *notes]


def inspect_rows(rows: Sequence[Mapping[str, object]]) -> list[Finding]:
    """Return what the rules find in the rows of one recipe."""
    return inspect_tables([build_table("this table", rows)])
