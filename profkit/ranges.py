"""The standard range names, the words that both wings share."""

from __future__ import annotations

STEP = "step"
WARMUP = "warmup"
FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
OPTIMIZER = "optimizer"

PHASES = (FORWARD, LOSS, BACKWARD, OPTIMIZER)
"""The parts of a training step, in the order in which they run."""
