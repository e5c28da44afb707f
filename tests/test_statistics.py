"""The intervals hold the true difference about as often as they say, and are not given where they would not."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from profkit.analysis.statistics import FEWEST, interval_of_means, interval_of_step_times, judge_change, value_exceeded

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

# Times of steps: even, skewed, and with a slow one now and then; the medians and means of both sides are the same.
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda random, shape: random.normal(100, 5, shape),
    "lognormal": lambda random, shape: np.exp(random.normal(0, 0.5, shape)),
    "spikes": lambda random, shape: random.normal(100, 1, shape) + 10 * (random.random(shape) < 0.1),
}


def coverage_of_means(draw: Draw, sizes: tuple[int, int], trials: int) -> float:
    random = np.random.default_rng(7)
    interval = interval_of_means(*(draw(random, (size, trials)) for size in sizes))
    assert interval is not None
    low, high = interval
    return float(((low <= 0) & (high >= 0)).mean())


def coverage_of_step_times(draw: Draw, size: int, trials: int) -> float:
    random = np.random.default_rng(7)
    intervals = [interval_of_step_times(*(draw(random, (size, 2)) for _ in range(2))) for _ in range(trials)]
    return sum(low <= 0 <= high for low, high in intervals) / trials  # type: ignore[misc]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("sizes", [(5, 5), (5, 20), (10, 10), (30, 30)])
def test_an_interval_of_means_holds_the_true_difference(name: str, sizes: tuple[int, int]) -> None:
    """Of 1,500 trials at 95 % the share that holds it has a standard error of 0.6 %."""
    assert 0.92 <= coverage_of_means(DISTRIBUTIONS[name], sizes, 1500) <= 0.99


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [5, 10])
def test_an_interval_of_step_times_holds_the_true_difference(name: str, size: int) -> None:
    assert 0.9 <= coverage_of_step_times(DISTRIBUTIONS[name], size, 300) <= 1


def test_too_few_samples_have_no_interval() -> None:
    few, enough = np.ones((FEWEST - 1, 2)), np.ones((FEWEST, 2))
    for interval in (interval_of_means, interval_of_step_times):
        assert interval(few, enough) is None
        assert interval(enough, few) is None
        assert interval(enough, enough) is not None


SAMPLES = st.integers(FEWEST, 9).flatmap(lambda size: arrays(np.int64, (size, 2), elements=st.integers(0, 10**6)))


@given(SAMPLES, SAMPLES)
@settings(max_examples=60, deadline=None)
def test_exchanging_the_sides_negates_the_interval(before: np.ndarray, after: np.ndarray) -> None:
    for interval in (interval_of_means, interval_of_step_times):
        there, back = interval(before, after), interval(after, before)
        assert np.all(there[0] == -back[1])
        assert np.all(there[1] == -back[0])


def test_samples_that_do_not_vary_give_an_interval_of_no_width() -> None:
    before, after = np.full((5, 2), 10**12), np.full((6, 2), 10**12 + 1)
    low, high = interval_of_means(before, after)  # type: ignore[misc]
    assert (low[0], high[0]) == (1, 1)
    assert interval_of_step_times(before, after) == (2, 2)


def test_a_shift_moves_the_interval() -> None:
    samples = np.random.default_rng(0).normal(100, 1, (10, 2))
    low, high = interval_of_means(samples, samples + 50)  # type: ignore[misc]
    assert 47 < low[0] < 50 < high[0] < 53
    low, high = interval_of_step_times(samples, samples + np.array([50, 0]))  # type: ignore[misc]
    assert 47 < low < 50 < high < 53


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (9, 2.262), (29, 2.045), (1000, 1.962)])
def test_students_quantiles_equal_those_in_tables(freedom: int, quantile: float) -> None:
    assert value_exceeded(0.025, freedom) == pytest.approx(quantile, abs=0.0006)


@pytest.mark.parametrize(
    ("change", "low", "high", "verdict"),
    [
        (Fraction(0), -1, 1, "unchanged"),
        (Fraction(0), None, None, "unchanged"),
        (Fraction(1, 3), None, None, "unknown"),
        (Fraction(5), -1, 9, "no measurable difference"),
        (Fraction(5), 0, 9, "no measurable difference"),
        (Fraction(5), 1, 9, "more"),
        (Fraction(-5), -9, -1, "less"),
    ],
)
def test_a_change_is_measurable_if_its_interval_does_not_hold_zero(
    change: Fraction, low: int | None, high: int | None, verdict: str
) -> None:
    assert judge_change(change, low, high) == verdict
