"""Repeated measurements as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from profkit.analysis.sample_statistics import summarize_samples
from recipes.common.recipe import Row


def summarize_parts(samples: Mapping[str, Sequence[float]]) -> Row:
    """Return median, mean, standard deviation and minimum of each part's samples, in milliseconds, and the samples."""
    found: Row = {}
    for part, values in samples.items():
        statistics = summarize_samples(values)
        found |= {
            f"{part}_ms": statistics.median,
            f"{part}_mean_ms": statistics.mean,
            f"{part}_std_ms": statistics.standard_deviation,
            f"{part}_min_ms": min(values),
            f"{part}_samples_ms": list(values),
        }
    return found
