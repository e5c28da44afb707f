"""Results in a notebook: one short line, a table as HTML, and a DataFrame, of every result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import profkit
from profkit import compare, read_snapshot, read_trace
from profkit.analysis.compare.budgets import Budgets, check_budgets
from profkit.analysis.kernels.summary import KernelRow
from profkit.analysis.notebook import NotebookResult, table_of
from profkit.reading import open_capture
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("read_once")

TRACES = ROOT / "traces"
NSYS, KINETO = TRACES / "small-train.nsys2025.sqlite", TRACES / "small-train.kineto.json.gz"
SNAPSHOT = TRACES / "small-train.snapshot.pickle.gz"

RESULTS: dict[str, tuple[Callable[[], Any], int]] = {
    "kernels": (lambda: read_trace(NSYS).kernels(), 51),
    "ranges": (lambda: read_trace(NSYS).ranges(), 178),
    "efficiency": (lambda: read_trace(NSYS).efficiency(), 12),
    "self-check": (lambda: read_trace(NSYS).self_check, 2),
    "memory": (lambda: read_snapshot(SNAPSHOT).memory(), 7),
    "two traces": (lambda: compare(NSYS, KINETO, force=True), 36),
    "two snapshots": (lambda: compare(SNAPSHOT, SNAPSHOT), 0),
    "budgets": (lambda: check_budgets(open_capture(NSYS), Budgets(max_idle=0.5)), 1),
    "prediction": (lambda: profkit.open(NSYS).whatif(["gpu:×2"]), 1),
    "ranks": (lambda: profkit.open(ROOT / "tests" / "light_records" / "ddp-data").ranks(), 2),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_one_short_line_a_table_and_a_frame(name: str) -> None:
    build, rows = RESULTS[name]
    result = build()
    assert isinstance(result, NotebookResult)
    line = repr(result)
    assert line.startswith(f"{type(result).__name__}(")
    assert len(line) < 300
    assert "\n" not in line
    frame = result.to_pandas()
    assert len(frame) == rows or (name == "two snapshots" and frame["bytes"].sum() == 0)
    assert result._repr_html_().startswith("<table")


def test_the_frames_sum_to_the_result() -> None:
    memory = read_snapshot(SNAPSHOT).memory()
    assert memory.to_pandas()["bytes"].sum() == memory.totals.allocated_peak_bytes
    changes = compare(NSYS, KINETO, force=True)
    assert changes.time is not None
    assert changes.to_pandas()["before_ns"].sum() == changes.time.kernel_time.before_ns


def test_a_table_without_rows_keeps_its_columns() -> None:
    assert list(table_of((), KernelRow).columns)[:3] == ["name", "category", "count"]


def test_names_from_a_capture_are_text_in_html(oddly_named: Any) -> None:
    html = read_trace(oddly_named).kernels()._repr_html_()
    assert "<float>" not in html
    assert "&lt;float&gt;" in html
