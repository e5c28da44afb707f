"""Recording with torch.profiler (Kineto) into a Chrome trace."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from profkit.capture.whole_files import partial_of


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
    _export(profiler, path)


def _export(profiler: profile, path: Path) -> None:
    """Write the trace; torch's own way with ``.gz`` goes through TMPDIR, and is silent if that is full."""
    partial = partial_of(path)
    plain = path.with_name(f"partial.{path.name}.json")
    try:
        profiler.export_chrome_trace(str(plain))
        if not _is_whole(plain):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path.parent))
        with plain.open("rb") as source, gzip.open(partial, "wb") as target:
            shutil.copyfileobj(source, target)
        os.replace(partial, path)
    finally:
        for left in (partial, plain, Path(f"{plain}.tmp")):  # Kineto's own name for what is half written
            left.unlink(missing_ok=True)


def _is_whole(trace: Path) -> bool:
    """Return whether a JSON object was written to its end."""
    if not trace.exists() or not trace.stat().st_size:
        return False
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
