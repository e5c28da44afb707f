"""The conditions of a run, from outside its processes: the GPUs before and after, and harmless variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from profkit.launch.gpu_state import GpuState, read_gpu_state, used_gpus
from profkit.launch.timing_warnings import warn_of_counted, warn_of_gain, warn_of_gpus, warn_of_times
from profkit.run.manifest import Gpus, Manifest, Process
from profkit.run.samples import Samples

HARMLESS = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_IB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "RANK",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_COMPILE_DISABLE",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "WORLD_SIZE",
)
"""The environment variables that a manifest records, where they are set: each holds numbers and switches, no path, no
name of a person or a machine, no secret. No other is ever written down.
"""


class Conditions:
    """The state of the GPUs from when this is made to when `close` is called.

    Args:
        environment: that of the run's processes.
        read: returns the GPUs' state now.
    """

    def __init__(self, environment: Mapping[str, str], read: Callable[[], GpuState] = read_gpu_state) -> None:
        self._environment = environment
        self._read = read
        self._before = read()
        self._after = GpuState()

    def close(self) -> None:
        """Look at the GPUs again: the run's processes have ended."""
        self._after = self._read()

    @property
    def environment(self) -> dict[str, str]:
        """Return the harmless variables that are set."""
        return {name: self._environment[name] for name in HARMLESS if name in self._environment}

    @property
    def gpus(self) -> Gpus:
        """Return the GPUs before and after."""
        return Gpus(self._before.gpus, self._after.gpus, self._before.reason or self._after.reason)

    def warnings(self, processes: Iterable[Process]) -> list[str]:
        """Return what disturbed the GPUs that these processes of the run used."""
        on_gpu = [one for one in processes if one.device == "cuda"]
        uuids = [one.conditions.gpu_uuid for one in on_gpu if one.conditions is not None]
        if not on_gpu:
            return []
        return warn_of_gpus(*(used_gpus(state, uuids, self._environment) for state in (self._before, self._after)))


def warn_of_run(manifest: Manifest) -> list[str]:
    """Return what makes the times in a run's manifest doubtful."""
    found = []
    profiled = manifest.profiled or Samples()
    for timed, where in ((manifest.clean, "unprofiled"), (manifest.attached, "unrecorded")):
        if timed is not None:
            found += warn_of_times(timed.steps, timed.during, where)
            found += warn_of_gain(timed.steps, profiled.steps, where)
    return found + warn_of_counted(profiled.during, "recorded")
