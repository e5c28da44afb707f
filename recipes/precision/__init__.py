"""What the recipes on mixed precision observe: a toy model's dtypes, each operator's, and where LayerNorm breaks.

Here are the data that LayerNorm is tried on, and names that measurement and report share. Loads no torch.
"""

from __future__ import annotations

ROWS, FEATURES = 64, 1024
EPSILON = 1e-5
SCALES = {"usual": 1.0, "large": 1000.0, "near_epsilon": 1e-3, "small": 1e-4}
"""Factors of the rows of normally distributed data; their squares are the variances."""
ONE_BY_ONE = "_summed_one_by_one"
MOST = 10_000
"""How many ones are added, and the greatest number that is squared."""

LOWER, FLOAT32, KEEPS, MIXED = "lower precision", "float32", "its input's", "mixed"
"""The dtype in which autocast runs an operator."""
