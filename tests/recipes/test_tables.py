"""Tables of a report: a missing value is a dash or an empty cell, never 0."""

from __future__ import annotations

import pytest

from recipes.common.tables import Table, csv_text, markdown, screen, select, show_bytes, show_digits, show_share


def test_a_missing_value_is_a_dash_for_people_and_empty_in_csv() -> None:
    table = select([{"a": 0.0, "b": None}, {"a": 1 / 3}], ["a", "b"])
    assert csv_text(table).splitlines() == ["a,b", "0.0,", "0.3333333333333333,"]
    assert markdown(table).splitlines()[2:] == ["| 0 | — |", "| 0.333333 | — |"]
    assert screen(table).splitlines() == ["       a  b", "────────  ─", "       0  —", "0.333333  —"]


def test_an_exact_column_keeps_its_last_digit() -> None:
    assert select([{"a": 10.000133514404297}], ["a"], exact={"a"}).cells == [["10.000133514404297"]]


def test_numbers_are_aligned_to_the_right_and_names_are_escaped() -> None:
    table = Table(["kernel", "share"], [["f<float>", None], ["_g_", "≤96%"]])
    assert markdown(table).splitlines()[1:] == ["|---|---:|", "| f\\<float> | — |", "| \\_g\\_ | ≤96% |"]


def test_a_number_rounded_up_to_more_digits_is_a_whole_number() -> None:
    assert [show_digits(value, 4) for value in (9999.4, 9999.6, -9999.6)] == ["9999", "10000", "-10000"]


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (None, None),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (2**20, "1.000 MiB"),
        (14_483_456_000, "13.49 GiB"),
    ],
)
def test_a_size_has_four_digits_in_the_unit_that_fits(size: int | None, shown: str | None) -> None:
    assert show_bytes(size) == shown


def test_a_small_share_does_not_show_as_nothing() -> None:
    assert [show_share(value) for value in (None, 0.0, 0.0004, 0.123)] == [None, "0.0%", "<0.1%", "12.3%"]
