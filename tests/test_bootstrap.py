"""The intervals hold the true difference about as often as they say, and are not given where they would not."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from profkit.analysis.compare import bootstrap
from profkit.analysis.compare.bootstrap import FEWEST, Statistic, bootstrap_differences, judge_change
from profkit.analysis.students_t import value_exceeded

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

# Times of steps: even, skewed, and with a slow one now and then; the medians and means of both sides are the same.
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda random, shape: random.normal(100, 5, shape),
    "lognormal": lambda random, shape: np.exp(random.normal(0, 0.5, shape)),
    "spikes": lambda random, shape: random.normal(100, 1, shape) + 10 * (random.random(shape) < 0.1),
}


def coverage(draw: Draw, sizes: tuple[int, int], statistic: Statistic, trials: int) -> float:
    random = np.random.default_rng(7)
    interval = bootstrap_differences(*(draw(random, (size, trials)) for size in sizes), statistic)
    assert interval is not None
    low, high = interval
    return float(((low <= 0) & (high >= 0)).mean())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("sizes", [(5, 5), (5, 20), (10, 10), (30, 30)])
def test_an_interval_of_means_holds_the_true_difference(name: str, sizes: tuple[int, int]) -> None:
    """Of 1,500 trials at 95 % the share that holds it has a standard error of 0.6 %."""
    assert 0.92 <= coverage(DISTRIBUTIONS[name], sizes, "mean", 1500) <= 0.985


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [5, 10])
def test_an_interval_of_medians_holds_the_true_difference(name: str, size: int) -> None:
    assert 0.925 <= coverage(DISTRIBUTIONS[name], (size, size), "median", 300) <= 1


def test_intervals_of_fewer_samples_hold_the_true_difference_too_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the module says of three and four samples; were it otherwise, they should have an interval."""
    monkeypatch.setattr(bootstrap, "FEWEST", 3)
    assert coverage(DISTRIBUTIONS["normal"], (3, 3), "mean", 1500) < 0.92
    assert coverage(DISTRIBUTIONS["lognormal"], (4, 4), "median", 1500) < 0.94


def test_too_few_samples_have_no_interval() -> None:
    few, enough = np.arange(FEWEST - 1)[:, None], np.arange(FEWEST)[:, None]
    assert bootstrap_differences(few, enough) is None
    assert bootstrap_differences(enough, few) is None
    assert bootstrap_differences(enough, enough) is not None


def test_the_draws_are_the_same_every_time_and_for_every_column() -> None:
    samples = np.random.default_rng(0).normal(10, 1, (8, 1))
    wide = np.repeat(samples, 600, axis=1)
    first, again = bootstrap_differences(wide, 2 * wide), bootstrap_differences(samples, 2 * samples)
    assert first is not None
    assert again is not None
    for ends, end in zip(first, again, strict=True):
        assert np.allclose(ends, end[0], rtol=1e-12)


SAMPLES = st.integers(FEWEST, 9).flatmap(lambda size: arrays(np.int64, (size, 3), elements=st.integers(0, 10**6)))


@given(SAMPLES, SAMPLES, st.sampled_from(["mean", "median"]))
@settings(max_examples=60, deadline=None)
def test_exchanging_the_sides_negates_the_interval(before: np.ndarray, after: np.ndarray, statistic: Statistic) -> None:
    there, back = bootstrap_differences(before, after, statistic), bootstrap_differences(after, before, statistic)
    assert there is not None
    assert back is not None
    assert (there[0] == -back[1]).all()
    assert (there[1] == -back[0]).all()


def test_samples_that_do_not_vary_give_an_interval_of_no_width() -> None:
    for statistic in ("mean", "median"):
        low, high = bootstrap_differences(np.full((5, 1), 10**12), np.full((6, 1), 10**12 + 1), statistic)  # type: ignore[arg-type, misc]
        assert (low[0], high[0]) == (1, 1)


def test_a_shift_moves_the_interval() -> None:
    samples = np.random.default_rng(0).normal(100, 1, (10, 1))
    low, high = bootstrap_differences(samples, samples + 50)  # type: ignore[misc]
    assert 47 < low[0] < 50 < high[0] < 53


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
