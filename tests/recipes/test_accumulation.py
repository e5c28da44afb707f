"""Adding a small number many times, by dtype: sums to the last digit, and how their error divides."""

from __future__ import annotations

import pytest

from recipes.mixed_precision_accumulation import CELLS, accumulate, add_error

SUMS = {
    "1": 10.000133514404297,
    "2": 9.953125,
    "3": 10.00213623046875,
    "4": 10.00213623046875,
    "5": 4.0,
    "6": 10.009765625,
    "7a": 10.000411033630371,
    "7b": 4.0,
    "7c": 0.5,
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    made: list[dict[str, object]] = [{**cell, **accumulate(cell, "cpu"), "status": "ok"} for cell in CELLS]
    add_error(made)
    return made


def test_the_sums_are_known_to_the_last_digit(rows: list[dict[str, object]]) -> None:
    assert {row["case"]: row["result"] for row in rows} == SUMS


def test_the_two_parts_of_an_error_add_up_to_it(rows: list[dict[str, object]]) -> None:
    for row in rows:
        parts = float(str(row["representation_error"])) + float(str(row["addition_error"]))
        assert parts == pytest.approx(row["error"], abs=1e-12)


def test_a_cell_that_did_not_run_has_no_error() -> None:
    row: dict[str, object] = {**CELLS[0], "status": "not run"}
    add_error([row])
    assert row["error"] is None


def test_a_sum_stands_still_where_half_its_last_digit_is_reached(rows: list[dict[str, object]]) -> None:
    """bfloat16 has 8 significant bits: at 4 its step is 2⁻⁵, and 0.01 is less than half of that; at 3.98 it is not."""
    bf16 = next(row for row in rows if row["case"] == "5")
    assert float(str(bf16["stored_addend"])) < 2**-5 / 2
    assert float(str(bf16["stored_addend"])) > 2**-6 / 2
