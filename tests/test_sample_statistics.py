"""The statistics of samples, against Python's own and worked out by hand."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profkit.analysis.sample_statistics import (
    mean,
    median,
    median_absolute_deviation,
    percentile,
    standard_deviation,
    summarize_samples,
)

TIMES = st.lists(st.integers(min_value=0, max_value=10**13), min_size=1, max_size=30)


@given(TIMES)
def test_they_are_what_python_says(samples: list[int]) -> None:
    found = summarize_samples(samples)
    middle = statistics.median(samples)
    assert found.count == len(samples)
    assert found.median == median(samples) == pytest.approx(middle)
    assert found.median_absolute_deviation == pytest.approx(statistics.median(abs(one - middle) for one in samples))
    assert found.mean == mean(samples) == pytest.approx(statistics.fmean(samples))
    if len(samples) == 1:
        assert (found.standard_deviation, found.relative_deviation, found.p10, found.p90) == (None, None, *samples * 2)
        return
    deviation = statistics.stdev(samples)
    assert found.standard_deviation == pytest.approx(deviation, abs=1e-3)
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    assert (found.p10, found.p90) == (pytest.approx(deciles[0]), pytest.approx(deciles[-1]))
    if found.mean:
        assert found.relative_deviation == pytest.approx(deviation / found.mean, abs=1e-9)


@given(TIMES, st.integers(min_value=1, max_value=1000))
def test_they_move_and_scale_with_the_samples(samples: list[int], factor: int) -> None:
    scaled = [factor * one for one in samples]
    assert median_absolute_deviation(scaled) == pytest.approx(factor * median_absolute_deviation(samples))
    assert median_absolute_deviation([one + factor for one in samples]) == median_absolute_deviation(samples)
    assert min(samples) <= percentile(samples, 10) <= percentile(samples, 90) <= max(samples)


def test_by_hand() -> None:
    samples = [10, 12, 11, 40]
    assert median(samples) == 11.5
    assert median_absolute_deviation(samples) == 1.0  # distances 1.5, 0.5, 0.5, 28.5
    assert percentile(samples, 10) == pytest.approx(10.3)  # 0.3 of the way from 10 to 11
    assert percentile(samples, 90) == pytest.approx(31.6)  # 0.7 of the way from 12 to 40
    assert standard_deviation([2, 4]) == pytest.approx(2**0.5)


@pytest.mark.parametrize("function", [median, mean, summarize_samples, median_absolute_deviation])
def test_of_nothing_there_are_none(function: object) -> None:
    with pytest.raises(ValueError, match="no samples"):
        function([])  # type: ignore[operator]


def test_one_sample_has_no_deviation() -> None:
    with pytest.raises(ValueError, match="two samples"):
        standard_deviation([1])
