"""Under which conditions this process runs its steps, for the manifest: precision, compilation, what disturbed them,
and the clock of its GPU.

Everything is read from torch as it stands; nothing is imported, initialised or set by looking.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from profkit.run.manifest import THROTTLE_REASONS, Compiled, Conditions, UsedOptimizer

_PLAIN = (bool, int, float, str, type(None))


def read_conditions(
    autocast_dtypes: Collection[str] = (),
    optimizers: Collection[UsedOptimizer] | None = None,
    *,
    anomaly_detection: bool | None = None,
    evaluates_without_autocast: bool | None = None,
) -> Conditions:
    """Return how this process multiplies matrices, what it compiled, and on which GPU it runs.

    ``float32_matmul_precision`` and the two ``allow_tf32`` are torch's older settings; since torch 2.9
    ``fp32_precision`` stands for them, of matrix products and of convolutions. A setting that this torch does not have,
    or does not return because the other kind is in use, is None.

    Args:
        autocast_dtypes: those in which autocast was seen to be on.
        optimizers: those that made a step; None if they were not watched.
        anomaly_detection: whether it was seen to be on; None if that was not watched.
        evaluates_without_autocast: whether a model in evaluation was called without gradients while no autocast was on.
    """
    return Conditions(
        float32_matmul_precision=_read(torch.get_float32_matmul_precision),
        cuda_matmul_allow_tf32=_read(lambda: torch.backends.cuda.matmul.allow_tf32),
        cuda_matmul_fp32_precision=_read(lambda: torch.backends.cuda.matmul.fp32_precision),
        cudnn_allow_tf32=_read(lambda: torch.backends.cudnn.allow_tf32),
        cudnn_conv_fp32_precision=_read(lambda: torch.backends.cudnn.conv.fp32_precision),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        fills_uninitialized_memory=_read(lambda: torch.utils.deterministic.fill_uninitialized_memory),
        cpu_threads=torch.get_num_threads(),
        autocast_dtypes=tuple(sorted(autocast_dtypes)),
        compiled=_compiled(),
        optimizers=None if optimizers is None else tuple(optimizers),
        anomaly_detection=anomaly_detection,
        evaluates_without_autocast=evaluates_without_autocast,
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        launch_blocking=os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        **_describe_gpu(),
    )


class UsedOptimizers:
    """The optimizers that have made a step in this process, each described after its first."""

    def __init__(self) -> None:
        self._known: WeakSet[Optimizer] = WeakSet()
        self.described: dict[UsedOptimizer, None] = {}

    def note_step(self, optimizer: Optimizer) -> None:
        """A step of ``optimizer`` has ended; its gradients are still there."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            self.described[describe_optimizer(optimizer)] = None

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all these optimizers that are still there."""
        return [parameter for optimizer in self._known for parameter in parameters_of(optimizer)]

    def parameters_of_each(self) -> dict[int, list[Tensor]]:
        """Return the parameters of each that is still there, by its id."""
        return {id(optimizer): parameters_of(optimizer) for optimizer in self._known}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def describe_optimizer(optimizer: Optimizer) -> UsedOptimizer:
    """Return an optimizer's class, its flags in any group of parameters, and what it has on this process's device."""
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
    stepping = [group for group in groups if any(parameter.grad is not None for parameter in group["params"])]
    states = [
        value
        for parameter in parameters
        if isinstance(optimizer.state.get(parameter), dict)
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor)
    ]

    def flag(name: str) -> bool | None:
        values = [group[name] for group in groups if group.get(name) is not None]
        return any(values) if values else None

    return UsedOptimizer(
        name=type(optimizer).__name__,
        is_torchs=type(optimizer).__module__.startswith("torch.optim"),
        fused=flag("fused"),
        foreach=flag("foreach"),
        differentiable=bool(flag("differentiable")),
        parameter_bytes=sum(map(_local_bytes, parameters)),
        state_bytes=sum(map(_local_bytes, states)),
        parameters=len(parameters),
        groups=len(stepping),
        unlike_groups=len(set(map(_options, stepping))),
    )


def _options(group: dict[str, Any]) -> frozenset[tuple[str, object]]:
    """Return what tells groups apart: a name that somebody gave them, too, as a rate may depend on it."""
    return frozenset((key, _comparable(value)) for key, value in group.items() if key != "params")


def _comparable(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return value if isinstance(value, _PLAIN) else id(value)


def _local_bytes(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel() * local.element_size())


def autocast_dtypes() -> set[str]:
    kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    return {str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in kinds}


def read_counters() -> dict[str, int]:
    """Return what has happened so far in this process that makes a step slow.

    ``compiled_graphs`` counts each graph that Dynamo handed to a compiler, those of recompilations too
    (``torch._dynamo.utils.counters``); the others are the caching allocator's own on the current device: cudaMalloc
    calls that failed and were tried again after its cache was freed, out-of-memory errors, and the bytes that are
    allocated, whose difference is by how much memory has grown. ``full_collections`` are those of Python's garbage.
    """
    allocator = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
    return {
        "compiled_graphs": count_compiled_graphs(),
        "allocator_retries": allocator.get("num_alloc_retries", 0),
        "out_of_memory_errors": allocator.get("num_ooms", 0),
        "allocated_bytes": allocator.get("allocated_bytes.all.current", 0),
        "full_collections": gc.get_stats()[-1]["collections"],
    }


def count_compiled_graphs() -> int:
    # Another thread may be importing it now.
    counters: Mapping[str, Mapping[str, int]] = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


def _read(setting: Callable[[], Any]) -> Any:
    try:
        return setting()
    except (RuntimeError, AttributeError):  # set through torch's other interface, or unknown to this torch
        return None


def _compiled() -> Compiled | None:
    """Dynamo keeps the backends it was given, to reset them; Inductor's has the options that a mode stands for."""
    graphs = read_counters()["compiled_graphs"]
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if not graphs or frames is None:
        return None
    backends: list[dict[str, object]] = []
    for backend in getattr(frames, "cached_backends", {}).values():
        if backend is not None:
            name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
            options = {key: value for key, value in getattr(backend, "config", {}).items() if isinstance(value, _PLAIN)}
            backends.append({"backend": str(name), "options": options})
    return Compiled(graphs, tuple(backends))


def _describe_gpu() -> dict[str, Any]:
    if not torch.cuda.is_initialized():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = getattr(properties, "uuid", None)  # since torch 2.5
    return {
        "gpu_uuid": None if uuid is None else f"GPU-{uuid}",
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "gpu_memory_bytes": properties.total_memory,
    }


_IDLE = "gpu_idle"


class GpuClock:
    """Asks NVML, if it is here and knows the GPU; a question takes some 3 to 50 µs."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._has_failed = False

    def look(self) -> tuple[int | None, tuple[str, ...]]:
        """Return the clock of the multiprocessors in MHz, None if unknown, and why it is not higher."""
        if self._has_failed or not torch.cuda.is_initialized():
            return None, ()
        try:
            return self._ask()
        except Exception:  # NVML is an extra: whatever it lacks is not said
            self._has_failed = True
            return None, ()

    def _ask(self) -> tuple[int, tuple[str, ...]]:
        import pynvml as nvml

        if self._handle is None:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid  # since torch 2.5
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        clock = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        mask = (ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(self._handle)
        reasons = (name for bit, name in THROTTLE_REASONS.items() if mask & bit and name != _IDLE)
        return int(clock), tuple(reasons)
