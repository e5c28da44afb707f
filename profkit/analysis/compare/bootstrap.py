"""Bootstrap confidence intervals for the difference between two groups of samples.

Steps are the samples. Each group is resampled by itself with replacement; the interval lies between two percentiles of
the resampled differences (Efron's percentile interval). For means those percentiles are moved outwards (the expanded
percentile interval: Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 4.1), because the plain
interval is too narrow by a factor of the square root of (n - 1)/n and ignores how uncertain the spread of few samples
is. Medians get the plain one, which is wide enough for them.

There are two sequences of draws, one per side, and half of the resamples exchange them. If the sides are exchanged, the
differences and the interval are therefore exactly negated: no verdict depends on which capture is called "before".

An interval of means holds the true difference in 94.1 % to 97.1 % of 10,000 pairs of synthetic samples (normal,
lognormal, and with one step in ten slower by ten deviations; 5 to 30 samples a side); the plain percentile interval of
five samples holds it in 86 % to 87 % (``tests/test_bootstrap.py``). Below `FEWEST` samples no resampling reaches far
enough, and there is no interval.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import sqrt
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from profkit.analysis.students_t import value_exceeded

Floats = npt.NDArray[np.float64]
Statistic = Literal["mean", "median", "step"]
"""``step`` is a step time: the median of the first column, its rest, and the mean of the second, its waits for data."""
Verdict = Literal["more", "less", "no measurable difference", "unchanged", "unknown"]
"""What a change is; ``unknown`` if there is a change but too few samples for an interval."""

_Draws = npt.NDArray[np.int32]
_Summary = Callable[[int, npt.NDArray[Any]], Floats]
"""Summarizes every resample of one side, column by column."""

LEVEL = 0.95
FEWEST = 5
"""Fewest samples on a side. With three an interval holds the true difference in only 90 % of cases."""

_RESAMPLES, _FEWEST_RESAMPLES = 4000, 256
_MOST_DRAWS = 2**24
"""Of thousands of samples fewer resamples are drawn: 64 MB of them."""
_DRAWS_AT_ONCE = 2**20
_CHUNK = 256
"""Columns that are resampled at once: 8 MB."""


def bootstrap_differences(
    before: npt.NDArray[Any], after: npt.NDArray[Any], statistic: Statistic = "mean"
) -> tuple[Floats, Floats] | None:
    """Return the low and high ends of the intervals of ``after - before``, one pair per column, None if too few.

    All columns are resampled by the same draws, which are the same on every call.

    Args:
        before: samples, (sample, column).
        after: samples, (sample, column); the number of samples may differ.
        statistic: what is compared.
    """
    fewest = min(len(before), len(after))
    if fewest < FEWEST:
        return None
    largest = max(len(before), len(after))
    picks = [_draw(len(before), (0, 1), largest), _draw(len(after), (1, 0), largest)]
    summaries: dict[Statistic, Callable[[list[_Draws]], _Summary]] = {
        "mean": _Means,
        "median": _Medians,
        "step": _StepTimes,
    }
    summarize = summaries[statistic](picks)
    tail = _expanded_tail(fewest) if statistic == "mean" else (1 - LEVEL) / 2
    low, high = np.empty(before.shape[1]), np.empty(before.shape[1])
    for first in range(0, before.shape[1], _CHUNK):
        some = slice(first, first + _CHUNK)
        differences = summarize(1, after[:, some]) - summarize(0, before[:, some])
        low[some], high[some] = np.quantile(differences, tail, axis=0), -np.quantile(-differences, tail, axis=0)
    return low, high


def judge_change(change: Fraction, low: int | None, high: int | None) -> Verdict:
    """Return what a change is by its interval: it is not measurable if the interval holds 0."""
    if not change:
        return "unchanged"
    if low is None or high is None:
        return "unknown"
    if low <= 0 <= high:
        return "no measurable difference"
    return "more" if change > 0 else "less"


class _Means:
    """The mean of every resample, from how often it drew each sample."""

    def __init__(self, picks: list[_Draws]) -> None:
        self._picks = picks

    def __call__(self, side: int, samples: npt.NDArray[Any]) -> Floats:
        # Relative to their mean, so that no digit is lost if the samples hardly differ.
        centre = samples.mean(axis=0)
        picks, apart = self._picks[side], samples - centre
        rows = max(_DRAWS_AT_ONCE // picks.shape[1], 1)
        parts = [picks[first : first + rows] for first in range(0, len(picks), rows)]
        means: Floats = np.concatenate([_count_draws(part) / picks.shape[1] @ apart for part in parts]) + centre
        return means


class _Medians:
    def __init__(self, picks: list[_Draws]) -> None:
        self._picks = picks

    def __call__(self, side: int, samples: npt.NDArray[Any]) -> Floats:
        return np.stack([np.median(column[self._picks[side]], axis=1) for column in samples.T], axis=1)


class _StepTimes:
    """The median rest and the mean wait of every resample, added up: the same for both columns."""

    def __init__(self, picks: list[_Draws]) -> None:
        self._rest, self._wait = _Medians(picks), _Means(picks)

    def __call__(self, side: int, samples: npt.NDArray[Any]) -> Floats:
        times = self._rest(side, samples[:, :1]) + self._wait(side, samples[:, 1:])
        return np.repeat(times, 2, axis=1)


def _draw(size: int, sequences: tuple[int, int], largest: int) -> _Draws:
    """Return which of ``size`` samples each resample holds; each sequence of draws makes one half of the resamples.

    There are as many as the side with the ``largest`` number of samples allows.
    """
    resamples = min(max(_MOST_DRAWS // largest, _FEWEST_RESAMPLES), _RESAMPLES)
    halves = (np.random.default_rng(seed).integers(0, size, (resamples // 2, size)) for seed in sequences)
    return np.concatenate([half.astype(np.int32) for half in halves])


def _count_draws(drawn: _Draws) -> npt.NDArray[np.int64]:
    resamples, size = drawn.shape
    flat = drawn + size * np.arange(resamples)[:, None]
    return np.bincount(flat.ravel(), minlength=resamples * size).reshape(resamples, size)


def _expanded_tail(count: int) -> float:
    """Return the fraction below which the resampled means lie outside the interval, for ``count`` samples."""
    return NormalDist().cdf(-sqrt(count / (count - 1)) * value_exceeded((1 - LEVEL) / 2, count - 1))
