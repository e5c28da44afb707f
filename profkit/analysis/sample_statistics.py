"""Location and spread of a handful of samples, each by one named definition.

Samples are numbers of one unit, and every figure here is in that unit again. Medians and percentiles hardly move with
one slow sample; the mean and the standard deviation do, which is why both are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Samples = Sequence[int] | Sequence[float]


@dataclass(frozen=True)
class SampleStatistics:
    """How many samples there are, where they lie and how they spread; each figure as its function here defines it.

    ``standard_deviation`` is None for a single sample, which has none.
    """

    count: int
    median: float
    median_absolute_deviation: float
    p10: float
    p90: float
    mean: float
    standard_deviation: float | None

    @property
    def relative_deviation(self) -> float | None:
        """The standard deviation as a fraction of the mean (coefficient of variation); None where it has no meaning."""
        if self.standard_deviation is None or self.mean <= 0:
            return None
        return self.standard_deviation / self.mean


def summarize_samples(samples: Samples) -> SampleStatistics:
    """Return the statistics of ``samples``, of which there must be one at least."""
    return SampleStatistics(
        count=len(samples),
        median=median(samples),
        median_absolute_deviation=median_absolute_deviation(samples),
        p10=percentile(samples, 10),
        p90=percentile(samples, 90),
        mean=mean(samples),
        standard_deviation=standard_deviation(samples) if len(samples) > 1 else None,
    )


def median(samples: Samples) -> float:
    """Return the middle sample in order of size; of an even number, half the sum of the middle two."""
    return float(np.median(_of_some(samples)))


def median_absolute_deviation(samples: Samples) -> float:
    """Return the median of the samples' distances from their median (MAD), unscaled.

    It is not multiplied by 1.4826, which would make it estimate the standard deviation of a normal distribution: step
    times are not normal, they have a floor and a tail.
    """
    values = _of_some(samples)
    return float(np.median(np.abs(values - np.median(values))))


def percentile(samples: Samples, percent: float) -> float:
    """Return the value below which ``percent`` per cent of the samples lie.

    Of n samples in order, the one at position (n − 1) · percent / 100, counted from 0, with straight lines between
    neighbours: definition 7 of Hyndman and Fan (1996), NumPy's default. It never lies outside the samples.
    """
    return float(np.percentile(_of_some(samples), percent))


def mean(samples: Samples) -> float:
    """Return the arithmetic mean."""
    return float(np.mean(_of_some(samples)))


def standard_deviation(samples: Samples) -> float:
    """Return the sample standard deviation, with divisor n − 1 (Bessel's); it takes two samples at least."""
    if len(samples) < 2:
        raise ValueError("a standard deviation takes two samples at least")
    return float(np.std(_of_some(samples), ddof=1))


def _of_some(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if not len(samples):
        raise ValueError("there are no samples")
    return np.asarray(samples, dtype=np.float64)
