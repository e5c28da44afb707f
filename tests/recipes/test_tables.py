"""What is not there is a dash or an empty cell, never 0."""

from __future__ import annotations

from profkit.report.formats import Column, render_csv, render_markdown
from recipes.common.tables import build_pivot, build_table, format_digits


def test_none_is_a_dash_for_people_and_empty_in_csv() -> None:
    table = build_table([Column("a", "a"), Column("b", "b")], [{"a": 0.0, "b": None}, {"a": 1 / 3}])
    assert render_csv(table).splitlines() == ["a,b", "0.0,", "0.3333333333333333,"]
    assert render_markdown(table).splitlines()[2:] == ["| 0 | — |", "| 0.333333 | — |"]


def test_an_exact_column_keeps_its_last_digit() -> None:
    table = build_table([Column("a", "a")], [{"a": 10.000133514404297}], exact={"a"})
    assert table.cells == [["10.000133514404297"]]


def test_a_pivot_shows_why_a_value_is_missing() -> None:
    rows = [
        {"n": 2, "d": 16, "ms": 1.5, "status": "ok"},
        {"n": 4, "d": 16, "ms": None, "status": "OOM(forward)"},
        {"n": 2, "d": 32, "ms": None, "status": "ok"},
    ]
    table = build_pivot(rows, "n", ["d"], "ms")
    assert [column.heading for column in table.columns] == ["n", "16", "32"]
    assert table.cells == [["2", "1.5", "—"], ["4", "OOM(forward)", "—"]]
    assert table.values == [[2, 1.5, None], [4, None, None]]


def test_a_pivot_shows_as_many_digits_as_it_is_asked_for() -> None:
    rows = [{"n": n, "d": 1, "ms": ms, "status": "ok"} for n, ms in ((1, 8.9), (2, 1409.87), (3, 32882.5), (4, 7))]
    assert [line[1] for line in build_pivot(rows, "n", ["d"], "ms", digits=4).cells] == ["8.900", "1410", "32882", "7"]
    assert [line[1] for line in build_pivot(rows, "n", ["d"], "ms").cells] == ["8.9", "1409.87", "32882.5", "7"]


def test_a_number_that_is_rounded_up_to_more_digits_is_a_whole_one() -> None:
    assert [format_digits(value, 4) for value in (9999.4, 9999.6, -9999.6)] == ["9999", "10000", "-10000"]
