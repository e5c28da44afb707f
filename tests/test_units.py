"""Numbers for people: four digits, the unit that fits, averages per step."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profkit.report.units import (
    count_over,
    format_bytes,
    format_change,
    format_count,
    format_interval,
    format_ns,
    format_share,
    format_signed_ns,
    ns_over,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.000 µs"),
        (9_999, "9.999 µs"),
        (99_996, "100.0 µs"),
        (999_949, "999.9 µs"),
        (999_950, "1.000 ms"),
        (999_999, "1.000 ms"),
        (1_000_000, "1.000 ms"),
        (9_999_600, "10.00 ms"),
        (999_999_999, "1.000 s"),
        (999_960_000_000, "1,000 s"),
        (-999_999, "-1.000 ms"),
        (-5, "-5 ns"),
    ],
)
def test_durations_have_four_digits_at_every_boundary(value: int, shown: str) -> None:
    assert format_ns(value) == shown


@given(st.integers(1, 10**15))
def test_a_duration_is_shown_to_half_a_unit_of_its_fourth_digit(value: int) -> None:
    number, unit = format_ns(value).split()
    back = float(number.replace(",", "")) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert back == pytest.approx(value, rel=5.1e-4)
    assert len(re.sub(r"\D", "", number)) <= 4 or unit == "s"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0%"),
        (1e-12, "<0.1%"),
        (0.000499, "<0.1%"),
        (0.0005, "0.1%"),
        (0.5, "50.0%"),
        (0.9994, "99.9%"),
        (0.99951, ">99.9%"),
        (0.9999999, ">99.9%"),
        (1 - 1e-16, "100.0%"),
        (1.0, "100.0%"),
    ],
)
def test_a_share_above_0_never_shows_as_0_and_a_part_never_as_100(value: float, shown: str) -> None:
    assert format_share(value) == shown


def test_a_count_has_its_noun_and_bytes_their_unit() -> None:
    assert [format_count(n, "kernel") for n in (0, 1, 2422)] == ["0 kernels", "1 kernel", "2,422 kernels"]
    assert format_bytes(int(99.9996 * 2**20)) == "100.0 MiB"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 ns"), (12, "+12 ns"), (-12, "-12 ns"), (1_500_000, "+1.500 ms"), (-999_960, "-1.000 ms")],
)
def test_a_change_shows_its_sign(value: int, shown: str) -> None:
    assert format_signed_ns(value) == shown


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (-17_657, -12_940, "-17.66 … -12.94 µs"),
        (-3, 12_000_000, "-0.00 … +12.00 ms"),
        (-120, 5, "-120 … +5 ns"),
        (2_000_000_000, 2_500_000_000, "+2.000 … +2.500 s"),
        (123_456_000, 999_900_000, "+123.5 … +999.9 ms"),
        (999_960, 999_970, "+1.000 … +1.000 ms"),
    ],
)
def test_both_ends_of_an_interval_have_the_same_unit(low: int, high: int, shown: str) -> None:
    assert format_interval(low, high) == shown


@pytest.mark.parametrize(
    ("value", "steps", "shown"), [(24, 2, "12"), (5, 2, "2.5"), (24_000, 2, "12,000"), (7, None, "7")]
)
def test_a_count_per_step_has_a_decimal_only_where_it_needs_one(value: int, steps: int | None, shown: str) -> None:
    assert count_over(steps).show(value) == shown


def test_a_duration_per_step_is_an_average() -> None:
    assert (ns_over(2).show(25_000), ns_over(None).show(25_000)) == ("12.50 µs", "25.00 µs")


@pytest.mark.parametrize(
    ("change", "shown"),
    [(0.0, "+0%"), (-0.25, "-25%"), (0.126, "+13%"), (9.99, "+999%"), (9.994, ">+999%"), (106.47, ">+999%")],
)
def test_a_change_from_next_to_nothing_has_no_digits(change: float, shown: str) -> None:
    assert format_change(change) == shown


@given(st.floats(0, 1e9))
def test_no_percentage_is_above_999(value: float) -> None:
    for shown in (format_share(value), format_change(value), format_change(value, 1)):
        assert float(shown.strip("<>+%")) <= 999
