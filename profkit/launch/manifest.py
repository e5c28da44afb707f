"""What a run's manifest says: what is run, with what, on what; after each pass what it found, and what is doubtful."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from statistics import median

from profkit.launch.gpu_state import driver_version
from profkit.launch.nsys import Nsys
from profkit.launch.passes import Outcome, Target
from profkit.run.manifest import RECORDED_FASTER, Loading, Manifest, MemoryPass, Samples
from profkit.version import __version__

SECRET_NAMES = ("*token", "*key", "*secret", "*password", "*passwd", "*credential*")
"""Names of options and variables whose values the manifest leaves out."""

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

REDACTED = "(redacted)"


def redact(words: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return a command line without the values of options and variables whose names match one of ``names``.

    ``--api-key V``, ``--api-key=V``, ``api_key=V`` and ``API_KEY=V`` are all found by ``*key``: case, leading ``-`` and
    the difference of ``-`` and ``_`` do not matter.
    """
    patterns = [_plain(name) for name in names]
    shown: list[str] = []
    takes_next = False
    for word in words:
        name, equals, _value = word.partition("=")
        is_secret = any(fnmatchcase(_plain(name), pattern) for pattern in patterns)
        if takes_next and not word.startswith("-"):
            shown.append(REDACTED)
        elif is_secret and equals:
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(word)
        takes_next = is_secret and not equals and word.startswith("-")
    return tuple(shown)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def begin_manifest(target: Target, nsys: Nsys | None, command: list[str], secret_names: Iterable[str]) -> Manifest:
    """Return the manifest of a run that is about to begin; its status is ``incomplete``."""
    names = (*SECRET_NAMES, *secret_names)
    argv = redact(target.argv, names)
    records_trace = target.passes[-1].order.recorder not in ("memory", "oom")
    return Manifest(
        command=redact(command, names),
        target=" ".join(argv) or target.name,
        kind=target.kind,
        argv=argv,
        workload=target.workload,
        preset=target.preset,
        profiler=None if not records_trace else "torch.profiler" if nsys is None else "nsys",
        started_utc=utc_now(),
        versions={
            "profkit": __version__,
            "python": platform.python_version(),
            "nvtx": version("nvtx"),
            "nsys": None if nsys is None else nsys.version,
        },
        driver=driver_version(),
        git_revision=git_revision(),
        environment=harmless_variables(os.environ),
    )


def harmless_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in HARMLESS if name in environment}


def utc_now() -> str:
    """Return the current time as the manifest writes it: ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_revision() -> str | None:
    """Return the revision checked out in the working directory, ``+`` after it if files differ; None without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def with_outcome(manifest: Manifest, outcome: Outcome) -> Manifest:
    """Return the manifest with what a pass found; of several ranks the first one that was recorded counts."""
    manifest = replace(manifest, exit_status=outcome.exit_status, finished_utc=utc_now())
    order = outcome.order
    first = min(outcome.processes, key=lambda process: not process.is_recorded, default=None)
    recorded = Samples()
    if first is not None:
        recorded = Samples(first.profiled, first.during.get("profiled", {}))
        manifest = replace(
            manifest,
            versions={**manifest.versions, "torch": first.torch, "cuda": first.cuda},
            device=first.device,
            gpu=first.gpu,
            conditions=first.conditions,
        )
    if order.memory is not None:
        processes = tuple(replace(process, attached=(), profiled=(), during={}) for process in outcome.processes)
        remembered = MemoryPass(processes=processes, **asdict(order.memory))
        if order.recorder in ("memory", "oom"):
            return replace(manifest, memory=replace(remembered, steps=recorded.steps))
        # Its steps are those of the trace, which the recorder slowed too.
        manifest = replace(manifest, memory=remembered)
    if order.recorder == "none":
        return replace(manifest, clean=recorded)
    manifest = replace(manifest, processes=outcome.processes)
    if first is None:
        return manifest
    attached = None if order.own_steps else Samples(first.attached, first.during.get("attached", {}))
    return replace(manifest, attached=attached, profiled=recorded)


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


def warn_of_gain(steps: Steps, recorded: Steps) -> list[str]:
    """Warn if steps took less time while they were recorded, by their medians: the unprofiled ones were disturbed."""
    rest = " without waits for data" if any(step.get("data_ns") for step in (*steps, *recorded)) else ""
    warnings, by_context = [], _without_data(recorded)
    for context, alone in _without_data(steps).items():
        with_it = by_context.get(context)
        if with_it and median(with_it) < _FASTER * median(alone):
            warnings.append(
                f"{RECORDED_FASTER} than unprofiled ones{context}, {median(with_it) / 1e6:.4g} ms against"
                f" {median(alone) / 1e6:.4g} ms (medians of {len(with_it)} and {len(alone)}{rest}):"
                " a profiler never speeds a step up, so something slowed the others down; measure again"
            )
    return warnings


def _without_data(steps: Steps) -> dict[str, list[int]]:
    """Waits for data come in bursts, and a profiler may well shorten them."""
    times: dict[str, list[int]] = {}
    for step in steps:
        context = f" (context {step['context']})" if "context" in step else ""
        times.setdefault(context, []).append(step["step_ns"] - step.get("data_ns", 0))
    return times


def warn_of_counted(during: Mapping[str, int], where: str) -> list[str]:
    warnings = []
    for name, (singular, plural, advice) in _COUNTED.items():
        count = during.get(name, 0)
        if count:
            warnings.append(f"{count:,} {singular if count == 1 else plural} within the {where} steps; {advice}")
    return warnings


def warn_of_run(manifest: Manifest, *, knows_compilations: bool = False) -> list[str]:
    """Return warnings about the times in a run's manifest.

    Args:
        knows_compilations: whether the run's own records say what was compiled in recorded steps, and why.
    """
    warnings = []
    profiled = manifest.profiled or Samples()
    for timed in filter(None, (manifest.clean, manifest.attached)):
        warnings += warn_of_counted(timed.during, "unprofiled")
        warnings += warn_of_gain(timed.steps, profiled.steps)
    said = {"compiled_graphs"} if knows_compilations else set()
    warnings += warn_of_counted({name: n for name, n in profiled.during.items() if name not in said}, "recorded")
    return warnings + warn_of_full_queue(manifest.loading)


def warn_of_full_queue(loading: Loading | None) -> list[str]:
    """Say that steps found more data ready than usual, where those that empty the queue could not be left out."""
    if loading is None or loading.drained_steps >= loading.needed_steps:
        return []
    return [
        f"the data loader's queue filled while the recorder started ({loading.start_ns / 1e9:.1f} s): the first"
        f" {loading.needed_steps - loading.drained_steps} recorded steps wait less for data than usual;"
        " record more (`profkit run --steps`), or trust the times without a profiler"
    ]
