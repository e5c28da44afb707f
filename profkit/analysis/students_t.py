"""Student's t distribution: how often it exceeds a value, and the value that it exceeds so often."""

from __future__ import annotations

import math

import numpy as np

_POINTS = 2000
_HALVINGS = 40


def chance_beyond(value: float, freedom: float) -> float:
    """Return how often t exceeds ``value``: the integral over t = √ν tan θ, where the density is smooth."""
    angle = math.atan2(abs(value), math.sqrt(freedom))
    at = angle + (math.pi / 2 - angle) * (np.arange(_POINTS) + 0.5) / _POINTS
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    beyond = float(np.mean(np.cos(at) ** (freedom - 1))) * (math.pi / 2 - angle) * math.exp(scale)
    return beyond if value >= 0 else 1 - beyond


def value_exceeded(chance: float, freedom: float) -> float:
    """Return which value t exceeds with this chance, of at most one half."""
    low, high = 0.0, 1.0
    while chance_beyond(high, freedom) > chance:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if chance_beyond(middle, freedom) > chance else (low, middle)
    return (low + high) / 2
