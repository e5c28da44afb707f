"""Captures of training steps whose kernels are given one by one, for what compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from profkit.analysis.compare import Key, StepSamples
from profkit.analysis.kernels import categorize
from profkit.analysis.tree.modules import read_place
from profkit.names import COMPILING
from tests.nsys_builder import NsysBuilder

Kernels = Sequence[tuple[str, int]]
Step = Mapping[str, Kernels]
"""Path of ranges within the step → its kernels' names and durations, in order."""

SGEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_ffma_execute_kernel__5x_cublas"
NVJET = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
ADD = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>,"
    " std::array<char *, (unsigned long)3>>(int, T2, T3)"
)
MUL = ADD.replace("CUDAFunctor_add<float>", "BinaryFunctor<float, float, float, MulFunctor<float>>")
SUM = (
    "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::sum_functor<float>>>(T3)"
)
FUSED = "triton_poi_fused_add_mul_3"
FUSED_SUM = "triton_red_fused_add_mul_sum_1"


def write_steps(path: Path, steps: Sequence[Step], *, warmup: Step | None = None, **options: int) -> Path:
    """Write an export of these steps; with ``warmup`` another one before them, in that range."""
    builder = NsysBuilder()
    add_steps(builder, steps, warmup=warmup, **options)
    return builder.write(path)


def add_steps(
    builder: NsysBuilder, steps: Sequence[Step], *, warmup: Step | None = None, pid: int = 100, begin: int = 0
) -> int:
    """Add steps one after another to a capture; return when the next may begin."""
    if warmup is not None:
        begin = _add_step(builder, "warmup", warmup, begin, pid)
    for number, step in enumerate(steps):
        begin = _add_step(builder, f"step {number}", step, begin, pid)
    return begin


def _add_step(builder: NsysBuilder, name: str, step: Step, begin: int, pid: int) -> int:
    """Add one step that begins then; return when the next may."""
    now = begin + 100
    for path, kernels in step.items():
        parts = path.split("/") if path else []
        opened = now
        now += 100
        for kernel, duration in kernels:
            builder.kernel(now, duration, name=kernel, tid=pid, pid=pid)
            now += duration + 20
        for depth, part in enumerate(parts):
            builder.range(part, opened + depth, now + 50 - depth, tid=pid, pid=pid)
        now += 100
    builder.range(name, begin, now, tid=pid, pid=pid)
    return now + 100


def key_of(path: tuple[str, ...], kernel: str) -> Key:
    """Return a key of samples as `sample_steps` makes it."""
    place = read_place([(name, "") for name in path])
    category = COMPILING if place.phase == COMPILING else categorize(kernel).name
    return Key((COMPILING,) if place.phase == COMPILING else path, category, kernel, place)


def samples_of(kernels: Mapping[tuple[str, str], tuple[int, int]], steps: int = 1) -> StepSamples:
    """Return samples of equal steps, given each kernel's time and number per step by its path and name."""
    keys = tuple(key_of(tuple(path.split("/")) if path else (), name) for path, name in kernels)
    times = [time for time, _ in kernels.values()]
    return StepSamples(
        measure="gpu-kernel",
        range=None,
        has_steps=True,
        keys=keys,
        kernel_ns=np.array([times] * steps, dtype=np.int64).reshape(steps, len(keys)),
        kernel_count=np.array([count * steps for _, count in kernels.values()], dtype=np.int64),
        busy_ns=np.array([sum(times)] * steps, dtype=np.int64),
        wall_ns=None,
        paths=frozenset({(), *(key.path[:end] for key in keys for end in range(len(key.path) + 1))}),
        left_out_ns=0,
    )
