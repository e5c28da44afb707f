"""The exact values of a comparison as CSV: one table, the one asked for or the most detailed that there is."""

from __future__ import annotations

from collections.abc import Sequence

from profkit.analysis.compare.comparison import CaptureComparison
from profkit.analysis.compare.time_compare import KernelTotal, Part, TimeComparison
from profkit.report.formats import Column, Table, render_csv
from profkit.report.memory_compare import render_comparison

_CHANGE = ("before_ns", "after_ns", "change_ns", "low_ns", "high_ns", "verdict")
_SAMPLES = ("before_samples", "after_samples")
_PART = ("range", "category", "kind", "before_kernels", "after_kernels")


def render_compare_csv(result: CaptureComparison, by: str | None) -> str:
    """Return one table as CSV: of kernel time by ``by`` (kernels unless told), else of unprofiled steps, else memory.

    ``before_ns`` and ``after_ns`` of kernel time are totals over all samples, ``change_ns`` is per sample; of
    unprofiled steps all are medians.
    """
    if result.time is not None:
        return render_csv(_time_table(result.time, by))
    if result.clean is not None:
        rows = [[line.name, *result.clean.samples, *_values(line)] for line in result.clean.changes]
        return render_csv(_table(("name", *_SAMPLES, *_CHANGE), rows))
    return render_comparison(result.memory, "csv") if result.memory is not None else ""


def _time_table(time: TimeComparison, by: str | None) -> Table:
    if by in (None, "kernel"):
        return _table((*_PART, *_SAMPLES, *_CHANGE), [_part_values(time, part) for part in time.parts])
    lines = {"phase": time.by_phase, "category": time.by_category, "range": time.by_range}[by or ""]
    return _table(
        (by or "", *_SAMPLES, *_CHANGE), [[line.name, *time.samples, *_values(line.change)] for line in lines]
    )


def _part_values(time: TimeComparison, part: Part) -> list[object]:
    names = (_names(part.before), _names(part.after))
    return [part.range, part.category, part.kind, *names, *time.samples, *_values(part.change)]


def _table(keys: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    return Table(tuple(Column(key, key) for key in keys), [], rows)


def _values(change: object) -> list[object]:
    return [getattr(change, key) for key in _CHANGE]


def _names(kernels: Sequence[KernelTotal]) -> str:
    return "; ".join(kernel.name for kernel in kernels)
