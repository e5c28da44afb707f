"""Recording with torch.profiler (Kineto) into a Chrome trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def recorded_by_kineto(path: Path, device: torch.device) -> Iterator[None]:
    """Record the block, and write the gzipped Chrome trace to ``path`` when it has gone well.

    The file appears whole or not at all.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        yield
    partial = path.with_name(f"partial.{path.name}")
    profiler.export_chrome_trace(str(partial))
    os.replace(partial, path)
