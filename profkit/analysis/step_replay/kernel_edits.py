"""Edits that change which kernels run, or how fast; what no recording shows is a range of factors on their times."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from typing import NamedTuple

from profkit.analysis.kernels import categorize, product_dtype
from profkit.analysis.step_replay import COPY, StepColumns, World
from profkit.analysis.step_replay.calibrate import PAUSE_NS
from profkit.analysis.step_replay.edits import (
    CannotPredictError,
    Setting,
    change_durations,
    drop_calls,
    drop_operations,
    find_rows,
    stop_waiting,
)
from profkit.analysis.step_replay.limits import OUTSIDE
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import BACKWARD, DATA, FORWARD, OPTIMIZER
from profkit.run.edits import read_factor

COMPILED_PHASES = (FORWARD, BACKWARD)
"""What compiling a model compiles; a loss outside of it and the optimizer stay as they are."""
_FUSABLE = ("softmax", "normalization", "elementwise", "reduction", "copy/cast", "loss")
"""Small kernels of which a compiler makes fewer: gathering and scattering take as long in compiled code."""
_FP32, _IN_16_BITS = re.compile("float|OpaqueType<4u>"), re.compile("bfloat16|half|bf16|f16", re.IGNORECASE)
_RECURRENT = re.compile("RNN|(?:LSTM|GRU)_elementWise")
"""Kernels of cuDNN's recurrent layers."""
_COMPILED = "triton_"
"""How the kernels begin that torch.compile writes."""
_FUSED = {"least": 0.4, "expected": 0.58, "most": 0.9}
"""What is left of the time of small kernels when a compiler has fused them; the median of nine programs was 0.56."""
_LONG_RUN = 8
_FUSED_RUN = {"least": 0.1, "expected": 0.35, "most": 0.9}
"""The same where more than so many follow one another: 0.05 and 0.13 in two programs that wrote functions out, 0.3 to
more than all in four that did not.
"""
_CUDNN_ATTENTION = re.compile("cudnn.*(sdpa|compute_dot_do_o)")
"""What cuDNN's attention launches first, in forward and in backward."""
_PLANNING_NS = 10_000_000
"""On two machines with an H200 a plan took 35 to 200 ms."""
_FLASH = {"least": 1.0, "expected": 1.5, "most": 2.7}
"""How many times as long as cuDNN's attention PyTorch's own takes, forward and backward: on an H200 1.0 to 1.9 without
a mask, but for the shortest, and with one, which flash attention has no kernels for, 1.2 to 2.7.
"""
_REPLAYING = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that replay CUDA graphs."""
_REPLAY_NS = {"least": 80_000, "expected": 180_000, "most": 400_000}
"""Python's time in a phase of compiled code before its graph is launched: guards, copies of inputs."""


class _Speed(NamedTuple):
    """How long a kernel takes in another type: a share of its time, and nanoseconds that no type saves."""

    share: float
    fixed_ns: int = 0


_Speeds = Mapping[World, _Speed]

_TF32_FROM_FP32: _Speeds = {
    "least": _Speed(1 / 8, 1_500),
    "expected": _Speed(1 / 6, 3_000),
    "most": _Speed(1 / 3, 6_000),
}
_LARGE_TF32_FROM_FP32: _Speeds = {**_TF32_FROM_FP32, "most": _Speed(1 / 4.5, 6_000)}
_LARGE_NS = 100_000
"""A kernel that takes longer fills the GPU; a product in fp32 fills the tensor cores too."""
_BF16_FROM_FP32: _Speeds = {
    "least": _Speed(1 / 16, 1_500),
    "expected": _Speed(1 / 11, 3_000),
    "most": _Speed(1 / 5, 6_000),
}
_LARGE_BF16_FROM_FP32: _Speeds = {**_BF16_FROM_FP32, "most": _Speed(1 / 8, 6_000)}
_BF16_FROM_TF32: _Speeds = {"least": _Speed(0.5), "expected": _Speed(0.6, 1_000), "most": _Speed(0.85, 2_000)}
"""Tensor cores compute twice as many products in bf16, of half as many bytes."""
_BF16_ATTENTION: _Speeds = {"least": _Speed(1 / 14), "expected": _Speed(0.2, 2_000), "most": _Speed(0.5, 2_000)}
_BF16_OTHERS: _Speeds = {"least": _Speed(0.6), "expected": _Speed(0.75), "most": _Speed(1.0)}
"""Elementwise kernels move half the bytes at best; norms and losses stay in fp32, and casts come on top."""
_CASTS = {"least": 1.0, "expected": 1.08, "most": 1.25}
"""How many times longer Python takes that casts, too."""
_CHANNELS_LAST: _Speeds = {"least": _Speed(0.75), "expected": _Speed(0.95), "most": _Speed(1.05)}
_CONVERTED: _Speeds = {"least": _Speed(0.95), "expected": _Speed(1.0), "most": _Speed(1.05)}
"""Convolutions whose inputs cuDNN converts run the kernels of the other layout already."""
_NORMS_CHANNELS_LAST: _Speeds = {"least": _Speed(0.27), "expected": _Speed(0.36), "most": _Speed(0.65)}
"""torch's own batch norms, which read one channel at a time; on an H100 0.37, on an H200 0.30 and 0.32."""
_CONVERSIONS_LEFT: Mapping[World, float] = {"least": 0.0, "expected": 0.0, "most": 0.25}
"""An operation in between may have the old layout still."""
_BENCHMARKED: _Speeds = {"least": _Speed(0.6), "expected": _Speed(0.95), "most": _Speed(1.0)}
_OF_LARGER_BATCH: Mapping[World, float] = {"least": 0.8, "expected": 1.0, "most": 1.05}
"""What kernels take for each sample of a larger batch, of their time now; of a smaller one, the other way round."""
_LARGE_OF_LARGER_BATCH: Mapping[World, float] = {"least": 0.93, "expected": 1.0, "most": 1.03}
"""The same of kernels that fill the GPU as it is."""
SMALLEST_NS = 2_500
"""No kernel gets shorter than this by another type of its numbers, or fewer of them."""
_KEEPING_STACKS: Mapping[World, float] = {"least": 0.1, "expected": 0.25, "most": 0.6}
"""What is left of Python's time in passes when operations keep no stacks."""
_CONVERSIONS = ("nchwtonhwc", "nhwctonchw")
_OWN_NORM, _CHANNELS_LAST_NORM = "at::native::batch_norm", "channels_last_kernel"
_CONVOLUTION = re.compile(r"conv(?!ert)|fprop|dgrad|wgrad|winograd", re.IGNORECASE)


def _scale(columns: StepColumns, rows: Collection[int], factor: float) -> StepColumns:
    if not rows:
        raise CannotPredictError("the step has no such operation")
    return change_durations(columns, rows, lambda time_ns: time_ns * factor)


def _speed_up(columns: StepColumns, rows: Collection[int], speeds: _Speeds, world: World) -> StepColumns:
    share, fixed_ns = speeds[world]
    return change_durations(columns, rows, lambda time_ns: min(time_ns * max(share, 1.0), time_ns * share + fixed_ns))


_LINKS = ("communication", "copy")


def change_gpu(columns: StepColumns, setting: Setting) -> StepColumns:
    rows = find_rows(columns, setting, lambda _, category: category not in _LINKS)
    return _scale(columns, rows, 1 / float(read_factor(setting.argument)))


def change_links(columns: StepColumns, setting: Setting) -> StepColumns:
    rows = find_rows(columns, setting, lambda _, category: category in _LINKS)
    return _scale(columns, rows, 1 / float(read_factor(setting.argument)))


def change_kernels(columns: StepColumns, setting: Setting) -> StepColumns:
    pattern, _, factor = setting.argument.rpartition(":")
    return _scale(
        columns, find_rows(columns, setting, lambda name, _: fnmatchcase(name, pattern)), float(read_factor(factor))
    )


def is_norm_by_channel(name: str) -> bool:
    """Return whether a kernel is of torch's own batch norm, and reads images one channel at a time."""
    return _OWN_NORM in name and _CHANNELS_LAST_NORM not in name


@cache
def is_recurrent(name: str) -> bool:
    """Return whether a kernel is of cuDNN's recurrent layers, which torch.compile leaves out of its graphs."""
    return _RECURRENT.search(name) is not None


def has_recurrent_layers(step: ReplayedStep) -> bool:
    return any(map(is_recurrent, step.operation_names))


def find_fusable(step: ReplayedStep) -> list[int]:
    """Return the small kernels that the model itself runs in a forward or backward pass; a loss outside is none."""
    columns, has_modules = step.columns, any(module is not None for module in step.operation_module)
    return [
        at
        for at, row in enumerate(columns.row.tolist())
        if step.categories[row] in _FUSABLE
        and not is_recurrent(step.names[row])
        and step.phase[columns.launcher[at]] in COMPILED_PHASES
        and (step.operation_module[at] is not None or not has_modules)
    ]


def find_left_eager(step: ReplayedStep) -> list[int]:
    """Return the small kernels of a model's passes that none of its compiled code runs."""
    return [row for row in find_fusable(step) if not step.operation_names[row].startswith(_COMPILED)]


def compile_model(columns: StepColumns, setting: Setting) -> StepColumns:
    """Small kernels are fused; Python takes as long as now, but in modes whose CUDA graphs replay each pass."""
    columns = _fuse_small(columns, find_fusable(setting.step), setting.world)
    return _replay_passes(columns, setting) if setting.argument in _REPLAYING else columns


def compile_rest(columns: StepColumns, setting: Setting) -> StepColumns:
    """What is left of a compiled model's small kernels is fused, too."""
    return _fuse_small(columns, find_left_eager(setting.step), setting.world)


def _fuse_small(columns: StepColumns, rows: Sequence[int], world: World) -> StepColumns:
    durations = list(columns.duration_ns)
    # Rows that follow one another have the same difference to their places in the list.
    for _, places in groupby(enumerate(rows), key=lambda one: one[1] - one[0]):
        run = [row for _, row in places]
        share = (_FUSED_RUN if len(run) > _LONG_RUN else _FUSED)[world]
        for row in run:
            durations[row] = round(durations[row] * share)
    return replace(columns, duration_ns=durations)


def _replay_passes(columns: StepColumns, setting: Setting) -> StepColumns:
    calls, phases = setting.calls_in(COMPILED_PHASES), setting.step.phase
    if columns.waits_among(calls):
        raise CannotPredictError("the host waits for the GPU within a pass, which no graph can hold")
    if has_recurrent_layers(setting.step):
        raise CannotPredictError("torch.compile leaves recurrent layers out of its graphs")
    columns = drop_calls(columns, calls)
    own = list(columns.own_ns)
    for call in calls:
        if call == 0 or phases[call - 1] != phases[call]:
            own[call] = round(_REPLAY_NS[setting.world])
    return replace(columns, own_ns=own)


def change_batch(columns: StepColumns, setting: Setting) -> StepColumns:
    return scale_batch(columns, setting, float(read_factor(setting.argument)), {DATA, OUTSIDE})


def scale_batch(columns: StepColumns, setting: Setting, factor: float, per_batch: Collection[str]) -> StepColumns:
    """Return the step on a batch of ``factor`` times the size.

    Kernels take that many times longer, but for what the smallest one takes. Python and launches take as long as now,
    and so does the optimizer, but in the phases ``per_batch``, and copies of pageable memory.
    """
    step = setting.step
    gap = [
        time_ns + round((factor - 1) * min(time_ns, sum(phases.get(phase, 0) for phase in per_batch)))
        if time_ns > 0
        else time_ns
        for time_ns, phases in zip(columns.gap_ns, step.gap_phases, strict=True)
    ]
    own = [
        round(time_ns * factor) if kind == COPY or phase in per_batch else time_ns
        for time_ns, kind, phase in zip(columns.own_ns, columns.kind, step.phase, strict=True)
    ]
    durations = list(columns.duration_ns)
    for row, call in enumerate(columns.launcher):
        if step.phase[call] != OPTIMIZER:
            growth = (_LARGE_OF_LARGER_BATCH if durations[row] > _LARGE_NS else _OF_LARGER_BATCH)[setting.world]
            growth = growth if factor > 1 else 1 / growth
            fixed_ns = min(durations[row], SMALLEST_NS)
            durations[row] = round(fixed_ns + (durations[row] - fixed_ns) * factor * growth)
        elif OPTIMIZER in per_batch:
            durations[row] = round(durations[row] * factor)
    return replace(columns, gap_ns=gap, own_ns=own, duration_ns=durations)


def stop_anomaly_detection(columns: StepColumns, setting: Setting) -> StepColumns:
    """No gradient is searched for NaN, nor waited for, and no operation keeps its stack."""
    if not setting.facts.detects_anomalies:
        raise CannotPredictError("anomaly detection was not on, or the run does not say whether it was")
    backward = setting.calls_in({BACKWARD})
    columns = stop_waiting(columns, columns.waits_among(backward), setting.constants)
    checks = set(find_rows(columns, setting, _is_nan_check))
    launched = {call: range(*columns.launches[call]) for call in backward if range(*columns.launches[call])}
    checking = [call for call, rows in launched.items() if checks.issuperset(rows)]
    columns = drop_operations(drop_calls(columns, checking), [row for call in checking for row in launched[call]])
    passes = set(setting.calls_in(setting.training_phases - {OPTIMIZER}))
    left = _KEEPING_STACKS[setting.world]
    gap = [
        round(time_ns * left) if call in passes and time_ns > 0 else time_ns
        for call, time_ns in enumerate(columns.gap_ns)
    ]
    return replace(columns, gap_ns=gap)


def _is_nan_check(name: str, category: str) -> bool:
    lowered = name.lower()
    return category == "copy" or any(word in lowered for word in ("nan", "ne_", "or_", "notequal"))


def use_tf32(columns: StepColumns, setting: Setting) -> StepColumns:
    """Products whose kernels compute in fp32 use the tensor cores; convolutions have a switch of their own."""
    rows = find_rows(columns, setting, lambda name, _: product_dtype(name) == "fp32" and not is_convolution(name))
    if not rows:
        raise CannotPredictError("by its kernels' names no product runs in fp32")
    large = [row for row in rows if columns.duration_ns[row] > _LARGE_NS]
    columns = _speed_up(columns, large, _LARGE_TF32_FROM_FP32, setting.world)
    return _speed_up(columns, [row for row in rows if row not in set(large)], _TF32_FROM_FP32, setting.world)


def use_bf16(columns: StepColumns, setting: Setting) -> StepColumns:
    """Products and what surrounds them run in bf16, which takes casts; the optimizer stays as it is."""
    inside = set(setting.calls_in(setting.training_phases - {OPTIMIZER}))
    products = find_rows(columns, setting, _is_known_product)
    if all(columns.launcher[row] not in inside for row in products):
        raise CannotPredictError("by its kernels' names no product runs in fp32 or TF32")
    return compute_in_bf16(columns, setting, inside)


def _is_known_product(name: str, category: str) -> bool:
    return category == "gemm" and product_dtype(name) is not None


def compute_in_bf16(columns: StepColumns, setting: Setting, inside: Collection[int]) -> StepColumns:
    """Return the step in which what some calls launch computes in bf16, and the Python before them casts, too."""

    def rows_where(holds: Callable[[str, str], bool]) -> list[int]:
        return [row for row in find_rows(columns, setting, holds) if columns.launcher[row] in inside]

    products = rows_where(_is_known_product)
    simple = {row for row in products if product_dtype(setting.name(columns, row)) == "fp32"}
    large = [row for row in simple if columns.duration_ns[row] > _LARGE_NS]
    attention = rows_where(lambda _, category: category == "attention")
    others = rows_where(lambda name, category: category not in ("gemm", "attention", *_LINKS) and handles_fp32(name))
    gap = [
        round(time_ns * _CASTS[setting.world]) if call in inside and time_ns > 0 else time_ns
        for call, time_ns in enumerate(columns.gap_ns)
    ]
    columns = replace(columns, gap_ns=gap)
    for rows, speeds in (
        (large, _LARGE_BF16_FROM_FP32),
        (simple - set(large), _BF16_FROM_FP32),
        ([row for row in products if row not in simple], _BF16_FROM_TF32),
        (attention, _BF16_ATTENTION),
        (others, _BF16_OTHERS),
    ):
        columns = _speed_up(columns, rows, speeds, setting.world)
    return columns


def handles_fp32(name: str) -> bool:
    """Return whether a kernel handles numbers in fp32: not whole ones, nor those that are in 16 bits already."""
    return _FP32.search(name) is not None and _IN_16_BITS.search(name) is None


def use_channels_last(columns: StepColumns, setting: Setting) -> StepColumns:
    """Kernels that convert layouts are gone, and norms and some convolutions are others.

    Python before a conversion is that of the convolution that makes it, and stays.
    """
    conversions = find_rows(columns, setting, lambda name, _: any(kind in name.lower() for kind in _CONVERSIONS))
    convolutions = _convolutions(columns, setting)
    norms = find_rows(
        columns, setting, lambda name, category: category == "normalization" and _CHANNELS_LAST_NORM not in name
    )
    own = [row for row in norms if is_norm_by_channel(setting.name(columns, row))]
    converted = [row for row in convolutions if conversions and "nhwc" in setting.name(columns, row).lower()]
    others = {*convolutions, *norms} - {*own, *converted}
    for rows, speeds in ((own, _NORMS_CHANNELS_LAST), (converted, _CONVERTED), (sorted(others), _CHANNELS_LAST)):
        columns = _speed_up(columns, rows, speeds, setting.world)
    left = _CONVERSIONS_LEFT[setting.world]
    if left:
        return _speed_up(columns, conversions, {setting.world: _Speed(left)}, setting.world)
    own_ns = list(columns.own_ns)
    for row in conversions:
        own_ns[columns.launcher[row]] = 0
    return drop_operations(replace(columns, own_ns=own_ns), conversions)


def find_attention_plans(step: ReplayedStep) -> list[int]:
    """Return the calls before which the host stands still to plan cuDNN's attention for sizes that it has not had.

    Pauses before at most half of a step's attention are plans: what Python does before all of it is none. One must be
    long: shorter ones may be the machine's.
    """
    columns = step.columns
    launches = [
        (call, _CUDNN_ATTENTION.search(step.names[row]) is not None)
        for call, row in zip(columns.launcher, columns.row.tolist(), strict=True)
        if step.categories[row] != "fill"
    ]
    plans = []
    for call, gap_ns in enumerate(columns.gap_ns):
        if gap_ns > PAUSE_NS:
            at = bisect_left(launches, (call,))
            plans += [call] if at < len(launches) and launches[at][1] else []
    is_rare = 2 * len(plans) <= sum(is_planned for _, is_planned in launches)
    return plans if is_rare and any(columns.gap_ns[call] > _PLANNING_NS for call in plans) else []


def use_flash_attention(columns: StepColumns, setting: Setting) -> StepColumns:
    """PyTorch's own flash attention, which needs no plan for each size, computes what cuDNN's does."""
    rows = find_rows(columns, setting, lambda name, _: _CUDNN_ATTENTION.search(name) is not None)
    if not rows:
        raise CannotPredictError("by its kernels' names the step has no attention of cuDNN's")
    plans, gap = set(find_attention_plans(setting.step)), list(columns.gap_ns)
    gap = [0 if call in plans else gap_ns for call, gap_ns in enumerate(gap)]
    factor = _FLASH[setting.world]
    return change_durations(replace(columns, gap_ns=gap), rows, lambda time_ns: time_ns * factor)


def benchmark_convolutions(columns: StepColumns, setting: Setting) -> StepColumns:
    """cuDNN chooses the fastest kernels, which may be those that it has."""
    return _speed_up(columns, _convolutions(columns, setting), _BENCHMARKED, setting.world)


@cache
def is_convolution(name: str) -> bool:
    """Return whether a kernel's name is that of a convolution; cuDNN's attention has an ``fprop`` too."""
    return _CONVOLUTION.search(name) is not None and categorize(name).name != "attention"


def _convolutions(columns: StepColumns, setting: Setting) -> list[int]:
    rows = find_rows(columns, setting, lambda name, _: is_convolution(name))
    if not rows:
        raise CannotPredictError("by its kernels' names the step has no convolution")
    return rows
