"""Recording with torch.profiler (Kineto) into a Chrome trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def recorded_by_kineto(path: Path, device: torch.device) -> Iterator[None]:
    """Record the block, and write the gzipped Chrome trace to ``path`` when it has gone well.

    The file appears whole or not at all.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    # Torch 2.11 warns unless it is asked for (there is one cycle only); torch 2.4 does not know it.
    options = {"acc_events": True} if "acc_events" in signature(profile).parameters else {}
    with profile(activities=activities, **options) as profiler:
        yield
    partial = path.with_name(f"partial.{path.name}")
    profiler.export_chrome_trace(str(partial))
    os.replace(partial, path)
