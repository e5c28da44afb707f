"""How memory grows with the sequence length: fits, and where it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Points = Sequence[tuple[float, float]]
"""Sequence lengths, each with a positive value."""


def fit_exponent(points: Points) -> float | None:
    """Return the power of the sequence length that the values follow, a log–log fit's slope; None under 2 points."""
    if len({size for size, _ in points}) < 2:
        return None
    slope, _ = np.polyfit([math.log(size) for size, _ in points], [math.log(value) for _, value in points], 1)
    return float(slope)


def round_down(value: int, digits: int) -> int:
    """Return the greatest whole number up to ``value`` with so many significant digits: 27,800 for 27,895 and 3."""
    step = 10 ** max(len(str(abs(value))) - digits, 0)
    return int(value // step * step)


def project_limit(points: Points, limit: float) -> int | None:
    """Return the greatest sequence length whose value is within ``limit``; None under 3 points, or without growth.

    The values are taken for a polynomial of degree 2 in the length: tensors of ``(seq, seq)``, of ``(seq, d)`` and what
    is constant. Points weigh by their inverse, so that each fits to the same share of itself.
    """
    if len({size for size, _ in points}) < 3:
        return None
    sizes, values = (np.array(each, dtype=float) for each in zip(*points, strict=True))
    square, linear, constant = np.polyfit(sizes, values, 2, w=1 / values)
    if square * sizes.max() ** 2 < 1e-3 * values.max():
        # Nothing of (seq, seq) in it: a line.
        linear, constant = np.polyfit(sizes, values, 1, w=1 / values)
        return int((limit - constant) / linear) if linear > 0 else None
    root = math.sqrt(linear**2 + 4 * square * (limit - constant))
    return int((root - linear) / (2 * square))
