"""Where a worker's own output goes when a profiler writes to the standard streams."""

from __future__ import annotations

import os
from dataclasses import replace

from profkit.models.workload import Order


def take_outputs(order: Order) -> Order:
    """Make the descriptors that the order names this process's standard output and error; return it without them."""
    for inherited, stream in zip(order.output_fds or (), (1, 2), strict=False):
        os.dup2(inherited, stream)
    return replace(order, output_fds=None)
