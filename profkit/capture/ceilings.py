"""What this GPU can do at most: large matrix products and a copy, timed; ``python -m profkit.capture.ceilings FILE``.

Random normal numbers, for a GPU multiplies zeros faster than numbers: they draw less power, and the clock stays up.
Each is run some times unmeasured, then measured one by one with CUDA events, so that no launch is in the time. ``FILE``
is where the result is left.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_LENGTH = 8192
_COPY_BYTES = 2**30
_UNMEASURED = 3
_LEAST_MEASURED, _MOST_MEASURED = 5, 50
_MEASURED_S = 0.5
_MOST_S = 2.0
"""Measuring goes on for the first of these times, within those counts, and never longer than the second.

What runs unmeasured is not repeated after the second either."""
_LOAD_S = 1.0
"""How long the GPU is kept at work while its clock is read: nvidia-smi takes some tenths of a second to look."""

_AMPERE = 8
"""The first compute capability with TF32 and BF16 tensor cores."""


def measure() -> dict[str, Any]:
    # Types that the GPU does not multiply natively would be computed in a different one.
    is_older = torch.cuda.get_device_capability()[0] < _AMPERE
    gemm = [_gemm(dtype) for dtype in (("fp32", "fp16") if is_older else _DTYPES)]
    copied = _copy()
    return {"device": _describe(), "gemm": gemm, "copy": copied, "torch": torch.__version__}


def _gemm(dtype: str) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    left, right, result = _matrices(_LENGTH, dtype)
    times = _time(lambda: torch.mm(left, right, out=result))
    flops = 2 * len(left) ** 3
    return {
        "dtype": dtype,
        **dict.fromkeys("mnk", len(left)),
        "best_flops_per_s": flops / min(times),
        "median_flops_per_s": flops / median(times),
    }


def _matrices(length: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    try:
        left, right = (torch.randn(length, length, device="cuda").to(_DTYPES[dtype]) for _ in range(2))
        return left, right, torch.empty_like(left)
    except torch.cuda.OutOfMemoryError:
        if length == 1024:
            raise
    return _matrices(length // 2, dtype)


def _copy() -> dict[str, Any]:
    torch.cuda.empty_cache()
    count = min(_COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.randn(count // 4, device="cuda")
    target = torch.empty_like(source)
    times = _time(lambda: target.copy_(source))
    moved = 2 * source.numel() * source.element_size()
    return {
        "bytes": moved // 2,
        "best_bytes_per_s": moved / min(times),
        "median_bytes_per_s": moved / median(times),
    }


def _time(run: Callable[[], object]) -> list[float]:
    began = perf_counter()
    for _ in range(_UNMEASURED):
        run()
        if perf_counter() - began > _MOST_S:
            break
    times: list[float] = []
    for seconds in _times_of(run):
        times.append(seconds)
        enough = len(times) >= _LEAST_MEASURED and sum(times) > _MEASURED_S
        if enough or len(times) >= _MOST_MEASURED or sum(times) > _MOST_S:
            break
    return times


def _times_of(run: Callable[[], object]) -> Iterator[float]:
    while True:
        # Several at once, so that the GPU does not run dry between them.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_LEAST_MEASURED + 1)]
        for mark in marks[:-1]:
            mark.record()
            run()
        marks[-1].record()
        torch.cuda.synchronize()
        for before, after in pairwise(marks):
            yield before.elapsed_time(after) / 1000


def _describe() -> dict[str, Any]:
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    named = None if uuid is None else f"GPU-{uuid}"
    now, most = _clocks(named)
    return {"name": torch.cuda.get_device_name(), "uuid": named, "clock_mhz": now, "clock_max_mhz": most}


def _clocks(uuid: str | None) -> tuple[int | None, int | None]:
    tool = shutil.which("nvidia-smi")
    if tool is None or uuid is None:
        return None, None
    torch.set_float32_matmul_precision("highest")
    left, right, result = _matrices(_LENGTH, "fp16")
    seconds = _time(lambda: torch.mm(left, right, out=result))
    for _ in range(int(_LOAD_S / median(seconds)) + 1):
        torch.mm(left, right, out=result)
    query = [tool, f"--id={uuid}", "--query-gpu=clocks.sm,clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    torch.cuda.synchronize()
    words = [word.strip() for word in asked.stdout.split(",")]
    if len(words) != 2 or not all(map(str.isdigit, words)):
        return None, None
    return int(words[0]), int(words[1])


def main() -> None:
    """Measure, and leave the result, or an error's line, in the file that the command line names."""
    if torch.cuda.is_available():
        try:
            content = measure()
        except torch.cuda.OutOfMemoryError:
            content = {"error": "the GPU's memory is full: another process holds it"}
    else:
        content = {"error": f"this torch ({torch.__version__}) sees no CUDA GPU"}
    Path(sys.argv[1]).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
