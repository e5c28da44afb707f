"""The sums, to the last digit, and sentences that follow from them."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from recipes.common.tables import build_table
from recipes.mixed_precision_accumulation import CELLS, RECIPE, accumulate, add_error, report, split_error

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


def test_the_sums_are_exact(rows: list[dict[str, object]]) -> None:
    assert {row["case"]: row["result"] for row in rows} == SUMS


def test_the_two_errors_make_up_the_whole(rows: list[dict[str, object]]) -> None:
    for row in rows:
        parts = float(str(row["representation_error"])) + float(str(row["addition_error"]))
        assert parts == pytest.approx(row["error"], abs=1e-12)


def test_the_printed_parts_add_up_to_the_printed_error(rows: list[dict[str, object]]) -> None:
    said = report(rows, {}).markdown
    found = re.findall(r"off by (\S+): (\S+) because .*?, (\S+) from the additions", said)
    assert len(found) == len(CELLS)
    for total, stored, added in found:
        assert Decimal(total) == Decimal(stored) + Decimal(added)
    assert split_error(-6, 0.0040435791015625, -6.0040435791015625) == ("-6.000000", "+0.004044", "-6.004044")
    assert split_error(0.5, 0.5, 0) == ("+0.5000", "+0.5000", "0")


def test_the_error_has_its_sign_and_what_is_stored_its_last_digit(rows: list[dict[str, object]]) -> None:
    assert next(row["error"] for row in rows if row["case"] == "7b") == -6
    table = build_table(RECIPE.columns, rows, RECIPE.exact)
    keys = [column.key for column in RECIPE.columns]
    assert table.cells[0][keys.index("stored_addend")] == "0.009999999776482582"


def test_what_was_not_run_has_no_error() -> None:
    row: dict[str, object] = {**CELLS[0], "status": "not run"}
    add_error([row])
    assert row["error"] is None


def test_the_conclusions_follow_the_numbers(rows: list[dict[str, object]]) -> None:
    said = report(rows, {}).markdown
    assert "Case 3, float32 += float16 (implicit cast): 10.00213623046875 for 10" in said
    assert said.count("the addend's own rounding weighs more") == 3  # cases 3, 4 and 6
    assert said.count("the sum stands still") == 3  # cases 5, 7b and 7c
    assert "is the same to the last bit (10.00213623046875)" in said
    other = [{**row, "result": 10.0} if row["case"] == "3" else row for row in rows]
    assert "is not the same" in report(other, {}).markdown


def test_a_sum_stands_still_where_half_its_last_digit_is_reached(rows: list[dict[str, object]]) -> None:
    """bfloat16 has 8 significant bits: at 4 its step is 2⁻⁵, and 0.01 is less than half of that; at 3.98 it is not."""
    bf16 = next(row for row in rows if row["case"] == "5")
    assert float(str(bf16["stored_addend"])) < 2**-5 / 2
    assert float(str(bf16["stored_addend"])) > 2**-6 / 2
