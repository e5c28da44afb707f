"""The conditions of a run, from outside its processes, and what makes its times doubtful: each in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from profkit.launch.gpu_state import GpuState, read_gpu_state, used_gpus
from profkit.run.manifest import Gpu, Gpus, Loading, Manifest, Process, Samples

# A first step counts as not warmed up if it is this much longer than the later ones, and stands out of their spread.
_LONGER = 1.2
_SPREADS = 5
_FEWEST_TO_TELL_FIRST = 4

_SLOWDOWNS = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)

# Recorded steps may come out this much faster by chance.
_FASTER = 0.90

Steps = Sequence[Mapping[str, int]]

_COUNTED = {
    "compiled_graphs": ("graph was compiled", "graphs were compiled", "raise --warmup, or see TORCH_LOGS=recompiles"),
    "allocator_retries": (
        "cudaMalloc call had to be retried",
        "cudaMalloc calls had to be retried",
        "the memory is nearly full, and freeing the cache takes milliseconds",
    ),
    "out_of_memory_errors": (
        "out-of-memory error fell",
        "out-of-memory errors fell",
        "later steps are not comparable",
    ),
}


def warn_of_times(steps: Steps, during: Mapping[str, int], where: str) -> list[str]:
    """Return warnings about the times of ``steps``.

    Args:
        steps: each step's ``<phase>_ns`` and ``step_ns``; with several contexts also its ``context``.
        during: how often each thing that makes a step slow happened in them (`profkit.capture.steps.conditions`).
        where: what these steps are called, such as ``unprofiled``.
    """
    found = []
    for context in dict.fromkeys(step.get("context") for step in steps):
        mine = [step for step in steps if step.get("context") == context]
        called = f"{where} steps" + ("" if context is None else f" (context {context})")
        found += _warn_of_first(mine, called)
    return [*found, *warn_of_counted(during, where)]


def warn_of_gain(steps: Steps, recorded: Steps, where: str) -> list[str]:
    """Warn if steps took less time while they were recorded, by their medians: then the others were disturbed."""
    found = []
    for context in dict.fromkeys(step.get("context") for step in steps):
        alone, with_it = (
            [_without_data(step) for step in some if step.get("context") == context] for some in (steps, recorded)
        )
        if not with_it or median(with_it) >= _FASTER * median(alone):
            continue
        called = f"{where} ones" + ("" if context is None else f" (context {context})")
        found.append(
            f"recorded steps were faster than {called}, {median(with_it) / 1e6:.4g} ms against"
            f" {median(alone) / 1e6:.4g} ms (medians of {len(with_it)} and {len(alone)}):"
            " a profiler never speeds a step up, so something slowed the others down; measure again"
        )
    return found


def _without_data(step: Mapping[str, int]) -> int:
    """Return a step's time less its waiting for data, which comes in bursts, and which a profiler may well shorten."""
    return step["step_ns"] - step.get("data_ns", 0)


def warn_of_counted(during: Mapping[str, int], where: str) -> list[str]:
    """Return warnings about events within the steps called ``where`` that spoil a measurement."""
    found = []
    for name, (one, many, advice) in _COUNTED.items():
        count = during.get(name, 0)
        if count:
            found.append(f"{count:,} {one if count == 1 else many} within the {where} steps; {advice}")
    return found


def _warn_of_first(steps: Steps, where: str) -> list[str]:
    """Say if the first steps stand out: longer than the median of the later half by a fifth and by five of its MADs.

    And longer than each step of that half: times that alternate between two values are not a warm-up.
    """
    times = [_without_data(step) for step in steps]
    if len(times) < _FEWEST_TO_TELL_FIRST:
        return []
    later = times[len(times) // 2 :]
    usual = median(later)
    spread = median(abs(one - usual) for one in later)
    limit = max(_LONGER * usual, usual + _SPREADS * spread, *later)
    first = next((number for number, one in enumerate(times) if one <= limit), len(times))
    if not first:
        return []
    what = "first" if first == 1 else f"first {first}"
    return [
        f"the {what} of the {len(times)} {where} took up to {max(times[:first]) / usual:.1f} times as long as the"
        " later ones: too little warm-up; raise --warmup"
    ]


def warn_of_gpus(before: Sequence[Gpu], after: Sequence[Gpu]) -> list[str]:
    """Return what disturbed the GPUs that a run used."""
    earlier = {gpu.uuid: gpu for gpu in before}
    pairs = [(earlier[gpu.uuid], gpu) for gpu in after if gpu.uuid in earlier]
    return [
        text for first, last in pairs for text in (_warn_of_others(first, last), _warn_of_clocks(first, last)) if text
    ]


def _warn_of_others(first: Gpu, last: Gpu) -> str | None:
    """Say that other processes use the GPU: before and after the run, no process on it is the run's own."""
    count = max(first.process_count or 0, last.process_count or 0)
    held = max(first.process_bytes or 0, last.process_bytes or 0)
    if not count:
        return None
    others = f"{count:,} other {'process' if count == 1 else 'processes'} used it"
    size = f", with {held / 1024**3:.1f} GiB" if held else ""
    return f"GPU {last.index} was shared during the run: {others}{size}; the times may include waiting for them"


def _warn_of_clocks(first: Gpu, last: Gpu) -> str | None:
    """Say for how long the clocks were held down, where the driver counts that; else that they were at the end."""
    slowed = {reason: us - first.throttled_us.get(reason, us) for reason, us in last.throttled_us.items()}
    if any(us > 0 for us in slowed.values()):
        reasons = ", ".join(f"{reason} {us / 1e6:.3g} s" for reason, us in slowed.items() if us > 0)
        return f"GPU {last.index}'s clocks were held down during the run ({reasons}): the times are longer than usual"
    bad = sorted(set(last.throttle_reasons or ()) & _SLOWDOWNS)
    return f"GPU {last.index}'s clocks were held down when the run ended ({', '.join(bad)})" if bad else None


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


class GpuWatch:
    """The state of the GPUs from when this is made to when `close` is called.

    Args:
        environment: the environment of the run's processes.
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
        return Gpus(self._before.gpus, self._after.gpus, self._before.reason or self._after.reason, self._before.links)

    def warnings(self, processes: Iterable[Process]) -> list[str]:
        """Return what disturbed the GPUs that these processes of the run used."""
        on_gpu = [one for one in processes if one.device == "cuda"]
        uuids = [one.conditions.gpu_uuid for one in on_gpu if one.conditions is not None]
        if not on_gpu:
            return []
        return warn_of_gpus(*(used_gpus(state, uuids, self._environment) for state in (self._before, self._after)))


def warn_of_run(manifest: Manifest, *, knows_compilations: bool = False) -> list[str]:
    """Return warnings about the times in a run's manifest.

    Args:
        manifest: the run's.
        knows_compilations: whether the run's own records say what was compiled in recorded steps, and why.
    """
    found = []
    profiled = manifest.profiled or Samples()
    for timed, where in ((manifest.clean, "unprofiled"), (manifest.attached, "unrecorded")):
        if timed is not None:
            found += warn_of_times(timed.steps, timed.during, where)
            found += warn_of_gain(timed.steps, profiled.steps, where)
    said = {"compiled_graphs"} if knows_compilations else set()
    found += warn_of_counted({name: n for name, n in profiled.during.items() if name not in said}, "recorded")
    return found + warn_of_full_queue(manifest.loading)


def warn_of_full_queue(loading: Loading | None) -> list[str]:
    """Say that steps found more data ready than usual, where those that empty the queue could not be left out."""
    if loading is None or loading.drained_steps >= loading.needed_steps:
        return []
    return [
        f"the data loader's queue filled while the recorder started ({loading.start_ns / 1e9:.1f} s): the first"
        f" {loading.needed_steps - loading.drained_steps} recorded steps wait less for data than usual;"
        " record more (`profkit run --steps`), or trust the times without a profiler"
    ]
