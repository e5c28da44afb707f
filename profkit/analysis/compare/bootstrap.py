"""Bootstrap confidence intervals for the difference between two groups of samples.

Steps are the samples. Each group is resampled with replacement, apart from the other; the interval lies between two
percentiles of the resampled differences (Efron's percentile interval). For means those percentiles are moved outwards
(Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 4.1: the expanded percentile interval), for
the plain one is too narrow by a factor of the square root of (n - 1)/n and takes no account of how uncertain the spread
of few samples is. Medians get the plain one, which is wide enough for them.

There are two sequences of draws, one for either side, and in half of the resamples they are exchanged. With the sides
exchanged the differences are then the same ones negated, and so is the interval: which capture is called the earlier
decides no verdict.

How often an interval of means holds the true difference, of 10,000 pairs of synthetic samples each (normal, lognormal,
and with one step in ten slower by ten deviations; 5 to 30 samples a side): 94.1 % to 97.1 %, where the plain percentile
interval of five holds it in 86 % to 87 % (``tests/test_bootstrap.py``). Below `FEWEST` samples no resampling reaches
far enough, and there is no interval.
"""

from __future__ import annotations

from fractions import Fraction
from math import sqrt
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Statistic = Literal["mean", "median"]
Verdict = Literal["more", "less", "no measurable difference", "unchanged", "unknown"]
"""What can be said of a change; ``unknown`` where there is one and too few samples for an interval."""

LEVEL = 0.95
FEWEST = 5
"""Fewest samples a side: of three an interval holds the true difference in 90 % of cases, of four medians in 93 %."""

_RESAMPLES = 4000
# So many columns are resampled at once: 8 MB.
_CHUNK = 256


def bootstrap_differences(
    before: npt.NDArray[Any], after: npt.NDArray[Any], statistic: Statistic = "mean"
) -> tuple[Floats, Floats] | None:
    """Return the low and high ends of the intervals of ``after - before``, one pair a column; None of too few samples.

    Every column is resampled by the same draws, and draws are the same on every call. With the sides exchanged the
    interval is the negated one, exactly.

    Args:
        before: samples, (sample, column).
        after: samples, (sample, column), not necessarily as many.
        statistic: what is compared.
    """
    fewest = min(len(before), len(after))
    if fewest < FEWEST:
        return None
    picks = [np.concatenate(halves) for halves in (_draw(len(before), (0, 1)), _draw(len(after), (1, 0)))]
    summarize = _Means(picks) if statistic == "mean" else _Medians(picks)
    tail = _expanded_tail(fewest) if statistic == "mean" else (1 - LEVEL) / 2
    low, high = np.empty(before.shape[1]), np.empty(before.shape[1])
    for first in range(0, before.shape[1], _CHUNK):
        some = slice(first, first + _CHUNK)
        differences = summarize(1, after[:, some]) - summarize(0, before[:, some])
        low[some], high[some] = np.quantile(differences, tail, axis=0), -np.quantile(-differences, tail, axis=0)
    return low, high


def judge_change(change: Fraction, low: int | None, high: int | None) -> Verdict:
    """Return what can be said of a change by its interval: none is measurable where the interval holds 0."""
    if not change:
        return "unchanged"
    if low is None or high is None:
        return "unknown"
    if low <= 0 <= high:
        return "no measurable difference"
    return "more" if change > 0 else "less"


class _Means:
    """The mean of every resample, from how often it drew each sample."""

    def __init__(self, picks: list[npt.NDArray[np.int64]]) -> None:
        self._weights = [_count_draws(drawn) / drawn.shape[1] for drawn in picks]

    def __call__(self, side: int, samples: npt.NDArray[Any]) -> Floats:
        # Around their mean, so that no digit is lost where the samples hardly differ.
        centre = samples.mean(axis=0)
        return np.asarray(self._weights[side] @ (samples - centre) + centre)


class _Medians:
    """The median of every resample."""

    def __init__(self, picks: list[npt.NDArray[np.int64]]) -> None:
        self._picks = picks

    def __call__(self, side: int, samples: npt.NDArray[Any]) -> Floats:
        return np.stack([np.median(column[self._picks[side]], axis=1) for column in samples.T], axis=1)


def _draw(size: int, sequences: tuple[int, int]) -> list[npt.NDArray[np.int64]]:
    """Return which samples of ``size`` each resample holds, half of them by either sequence of draws."""
    return [np.random.default_rng(seed).integers(0, size, (_RESAMPLES // 2, size)) for seed in sequences]


def _count_draws(drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    resamples, size = drawn.shape
    flat = drawn + size * np.arange(resamples)[:, None]
    return np.bincount(flat.ravel(), minlength=resamples * size).reshape(resamples, size)


def _expanded_tail(count: int) -> float:
    """Return the percentile, as a fraction, at which an interval of means of ``count`` samples begins."""
    return NormalDist().cdf(-sqrt(count / (count - 1)) * _student_quantile(count - 1))


def _student_quantile(freedom: int) -> float:
    """Return Student's t at `LEVEL` by its expansion in 1/freedom, Abramowitz and Stegun 26.7.5.

    Off by 0.3 % at 4 degrees of freedom, by less at more.
    """
    z: float = NormalDist().inv_cdf((1 + LEVEL) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))
