"""What this device can do at most: large matrix products and a copy, timed; ``python -m profkit.capture.ceilings``.

Random normal numbers, for a GPU multiplies zeros faster than numbers: they draw less power, and the clock stays up.
Each is run some times unmeasured, then measured one by one: with CUDA events on a GPU, so that no launch is in the
time. The first argument is the device (auto, cuda, cpu), the second the file to leave the result in.
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

_GPU_LENGTH, _CPU_LENGTH = 8192, 1024
_GPU_COPY_BYTES, _CPU_COPY_BYTES = 2**30, 2**28
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


def measure(device: torch.device) -> dict[str, Any]:
    """Return ``device``, ``gemm``, ``copy`` and ``torch`` of ``ceilings.json``."""
    gemm = [_gemm(dtype, device) for dtype in _dtypes(device)]
    copied = _copy(device)
    return {"device": _describe(device), "gemm": gemm, "copy": copied, "torch": torch.__version__}


def _dtypes(device: torch.device) -> list[str]:
    """Return the types that the device multiplies natively; others would be computed in a different type."""
    if device.type != "cuda":
        return ["fp32", "bf16"]
    if torch.cuda.get_device_capability(device)[0] < _AMPERE:
        return ["fp32", "fp16"]
    return list(_DTYPES)


def _gemm(dtype: str, device: torch.device) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    length = _GPU_LENGTH if device.type == "cuda" else _CPU_LENGTH
    left, right, result = _matrices(length, dtype, device)
    times = _time(lambda: torch.mm(left, right, out=result), device)
    flops = 2 * len(left) ** 3
    return {
        "dtype": dtype,
        **dict.fromkeys("mnk", len(left)),
        "best_flops_per_s": flops / min(times),
        "median_flops_per_s": flops / median(times),
    }


def _matrices(length: int, dtype: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return two random square matrices and room for their product; smaller ones where these do not fit."""
    torch.manual_seed(0)
    try:
        left, right = (torch.randn(length, length, device=device).to(_DTYPES[dtype]) for _ in range(2))
        return left, right, torch.empty_like(left)
    except torch.cuda.OutOfMemoryError:
        if length == 1024:
            raise
    return _matrices(length // 2, dtype, device)


def _copy(device: torch.device) -> dict[str, Any]:
    count = _GPU_COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES
    if device.type == "cuda":
        torch.cuda.empty_cache()
        count = min(count, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    times = _time(lambda: target.copy_(source), device)
    moved = 2 * source.numel() * source.element_size()
    return {
        "bytes": moved // 2,
        "best_bytes_per_s": moved / min(times),
        "median_bytes_per_s": moved / median(times),
    }


def _time(run: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds that each of several runs took on the device."""
    began = perf_counter()
    for _ in range(_UNMEASURED):
        run()
        if perf_counter() - began > _MOST_S:
            break
    times: list[float] = []
    timed = _times_on_gpu(run) if device.type == "cuda" else _times_on_cpu(run)
    for seconds in timed:
        times.append(seconds)
        enough = len(times) >= _LEAST_MEASURED and sum(times) > _MEASURED_S
        if enough or len(times) >= _MOST_MEASURED or sum(times) > _MOST_S:
            break
    return times


def _times_on_cpu(run: Callable[[], object]) -> Iterator[float]:
    while True:
        start = perf_counter()
        run()
        yield perf_counter() - start


def _times_on_gpu(run: Callable[[], object]) -> Iterator[float]:
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


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": _cpu_name(), "uuid": None, "clock_mhz": None, "clock_max_mhz": None}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    named = None if uuid is None else f"GPU-{uuid}"
    now, most = _clocks(named, device)
    return {"name": torch.cuda.get_device_name(device), "uuid": named, "clock_mhz": now, "clock_max_mhz": most}


def _clocks(uuid: str | None, device: torch.device) -> tuple[int | None, int | None]:
    """Return the SMs' clock while products run and the highest that they may have, in MHz; None if unknown."""
    tool = shutil.which("nvidia-smi")
    if tool is None or uuid is None:
        return None, None
    torch.set_float32_matmul_precision("highest")
    left, right, result = _matrices(_GPU_LENGTH, "fp16", device)
    seconds = _time(lambda: torch.mm(left, right, out=result), device)
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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else 'CPU'}, {torch.get_num_threads()} threads"


def main() -> None:
    """Measure, and leave the result, or an error's line, in the file that the command line names."""
    wanted, path = sys.argv[1], Path(sys.argv[2])
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        content: dict[str, Any] = {"error": f"--device cuda: this torch ({torch.__version__}) sees no CUDA GPU"}
    else:
        device = torch.device("cuda" if has_gpu and wanted != "cpu" else "cpu")
        try:
            content = measure(device)
        except torch.cuda.OutOfMemoryError:
            content = {"error": "the GPU's memory is full: another process holds it"}
    path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
