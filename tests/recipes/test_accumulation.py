"""Adding a small number many times, by dtype: sums to the last digit, and how their error divides."""

from __future__ import annotations

from decimal import Decimal

import pytest

from recipes import mixed_precision_accumulation as accumulation
from recipes.common.tables import select
from recipes.mixed_precision_accumulation import CELLS, RECIPE, accumulate, add_error, split_error

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


def test_the_printed_parts_add_up_to_the_printed_error(rows: list[dict[str, object]]) -> None:
    block = accumulation.report(rows, {}).blocks[1].splitlines()[2:]
    assert len(block) == len(CELLS)
    for line in block:
        total, stored, added = (Decimal(cell) for cell in line.split("|")[5:8])
        assert total == stored + added
    assert split_error(-6, 0.0040435791015625, -6.0040435791015625) == ("-6.000000", "+0.004044", "-6.004044")
    assert split_error(0.5, 0.5, 0) == ("+0.5000", "+0.5000", "0")


def test_the_error_has_a_sign_and_the_stored_addend_every_digit(rows: list[dict[str, object]]) -> None:
    assert next(row["error"] for row in rows if row["case"] == "7b") == -6
    table = select(rows, RECIPE.columns, RECIPE.exact)
    assert table.cells[0][RECIPE.columns.index("stored_addend")] == "0.009999999776482582"


def test_a_cell_that_did_not_run_has_no_error() -> None:
    row: dict[str, object] = {**CELLS[0], "status": "not run"}
    add_error([row])
    assert row["error"] is None


def test_a_sum_stands_still_where_half_its_last_digit_is_reached(rows: list[dict[str, object]]) -> None:
    """bfloat16 has 8 significant bits: at 4 its step is 2⁻⁵, and 0.01 is less than half of that; at 3.98 it is not."""
    bf16 = next(row for row in rows if row["case"] == "5")
    assert float(str(bf16["stored_addend"])) < 2**-5 / 2
    assert float(str(bf16["stored_addend"])) > 2**-6 / 2
