"""All detectors, run on some tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from recipes.detectors import claims, memory, settings, times
from recipes.detectors.tables import BenchmarkTable, Finding, build_table

OF_ONE: tuple[Callable[[BenchmarkTable], Iterator[Finding]], ...] = (
    times.find_negative_times,
    times.find_spread,
    times.find_ratio,
    times.find_subtraction,
    times.find_identical_columns,
    times.find_falling_times,
    settings.find_disagreeing_passes,
    memory.find_zero_memory,
    memory.find_negative_memory,
    memory.find_carried_over,
    memory.find_swapped_axes,
    memory.find_binary_under_decimal_label,
    memory.find_wrong_factor,
    memory.find_pairs_that_do_not_convert,
    claims.find_wrong_exponents,
    claims.find_wrong_examples,
)
OF_ALL: tuple[Callable[[Sequence[BenchmarkTable]], Iterator[Finding]], ...] = (
    times.find_forward_in_backward,
    claims.find_borrowed_shares,
    settings.find_slower_in_bf16,
)


def inspect_tables(tables: Sequence[BenchmarkTable]) -> list[Finding]:
    """Return what the detectors find in each table and between them: mistakes first, then notes."""
    found = [finding for table in tables for detect in OF_ONE for finding in detect(table)]
    found += [finding for detect in OF_ALL for finding in detect(tables)]
    return sorted(found, key=lambda finding: finding.is_note)


def inspect_rows(rows: Sequence[Mapping[str, object]]) -> list[Finding]:
    """Return what the detectors find in the rows of one recipe."""
    return inspect_tables([build_table("this table", rows)])
