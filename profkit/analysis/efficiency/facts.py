"""What a run directory knows that its trace does not: work, the GPU and its peaks; datasheets' peaks."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from profkit.errors import UsageError
from profkit.findings import Finding
from profkit.run.directory import Run
from profkit.run.manifest import Loading, Manifest
from profkit.run.work import FUSED, Ceilings, RunWork, read_ceilings
from profkit.trace.columns import Trace

# torch.set_float32_matmul_precision: these two values let cuBLAS use TF32 (torch/backends/cuda, allow_tf32).
_TF32_PRECISIONS = ("high", "medium")

VECTOR_DTYPE = "fp32"
"""What everything but matrix products is computed in, with autocast or without, on the GPU's ordinary units."""

_UUID_HEAD = len("GPU-01234567")


@dataclass(frozen=True)
class Peaks:
    """The most that a GPU can do per second: FLOPs of matrix products by dtype, and bytes moved.

    ``source`` is ``measured`` (by `profkit ceilings` on a GPU of this name) or ``datasheet``.
    """

    source: str
    gpu: str
    flops_per_s: dict[str, float]
    bytes_per_s: float


@dataclass(frozen=True)
class RunFacts:
    """What is known besides the trace; little if the trace lies in no run directory.

    ``dtype`` is the type of matrix products whose range does not name one. ``peaks`` are the measured ones if there are
    any, else the datasheet's; MFU always uses ``datasheet``.
    ``ceilings_uuid`` is the GPU that was measured, if the run is known to have used another one of the same name.
    ``loading`` is of the data loaders with workers, if there were any.
    """

    gpu: str | None
    dtype: str | None
    work: RunWork | None
    peaks: Peaks | None
    datasheet: Datasheet | None
    ceilings_uuid: str | None
    loading: Loading | None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with these facts: ceilings of another GPU, operators that were not counted."""
        problems = []
        if self.ceilings_uuid is not None and self.peaks is not None:
            uuid = self.ceilings_uuid[:_UUID_HEAD]
            problems.append(
                Finding("other-gpu", f"the ceilings were measured on another {self.peaks.gpu} ({uuid}) than the run's")
            )
        missing = () if self.work is None else self.work.missing
        if FUSED in missing:
            problems.append(
                Finding(
                    "uncounted-fused",
                    "of fused kernels of compiled code only matrix products are counted: their other work and their "
                    "bytes are unknown, so their rates and % of peak are too low",
                )
            )
        names = ", ".join(name for name in missing if name != FUSED)
        if names:
            problems.append(Finding("uncounted", f"operators without a FLOP formula, counted as no work: {names}"))
        return tuple(problems)


def read_run_facts(
    trace: Trace, run: Run | None, *, ceilings: Path | None = None, dtype: str | None = None
) -> RunFacts:
    """Return what is known besides the trace.

    Args:
        trace: the capture.
        run: the run it belongs to, if any.
        ceilings: a file of `profkit ceilings`, or a run directory that has one; by default the run's own.
        dtype: the type of matrix products, if the run does not name it.

    Raises:
        RunError: a file of the run, or the ceilings, cannot be read.
        UsageError: the ceilings were measured on another GPU, or the run names another ``dtype``.
    """
    manifest = Manifest() if run is None else run.manifest
    work = None if run is None else run.work
    gpu = _gpu_name(trace, manifest)
    sheet = find_datasheet(gpu)
    measured = _measured(run, ceilings)
    if measured is not None and gpu is not None and _bare(measured.device.name) != _bare(gpu):
        raise UsageError(
            f"{ceilings or trace.path}: the ceilings were measured on {measured.device.name}, the capture on {gpu};"
            " run `profkit ceilings` on that GPU"
        )
    recorded = (work.dtype if work is not None else None) or _dtype_of(manifest)
    if None not in (dtype, recorded) and dtype != recorded:
        raise UsageError(f"{trace.path}: the run computed its matrix products in {recorded}, not in {dtype}")
    return RunFacts(
        gpu=gpu,
        dtype=recorded or dtype,
        work=work,
        peaks=_peaks(measured, sheet),
        datasheet=sheet,
        ceilings_uuid=_other_uuid(measured, manifest),
        loading=manifest.loading,
    )


def _measured(run: Run | None, ceilings: Path | None) -> Ceilings | None:
    if ceilings is None:
        return None if run is None else run.ceilings
    return Run(ceilings).ceilings if ceilings.is_dir() else read_ceilings(ceilings)


def _peaks(measured: Ceilings | None, sheet: Datasheet | None) -> Peaks | None:
    if measured is not None:
        products = {product.dtype: product.best_flops_per_s for product in measured.gemm}
        return Peaks("measured", measured.device.name, products, measured.copy.best_bytes_per_s)
    return None if sheet is None else Peaks("datasheet", sheet.name, sheet.flops_per_s, sheet.bytes_per_s)


def _other_uuid(measured: Ceilings | None, manifest: Manifest) -> str | None:
    used = None if manifest.conditions is None else manifest.conditions.gpu_uuid
    measured_uuid = None if measured is None else measured.device.uuid
    return measured_uuid if None not in (used, measured_uuid) and used != measured_uuid else None


def _gpu_name(trace: Trace, manifest: Manifest) -> str | None:
    """Return the GPUs' name; None if the capture has GPUs of several names and the manifest names none."""
    names = set(trace.gpus)
    return manifest.gpu or (names.pop() if len(names) == 1 else None)


def _dtype_of(manifest: Manifest) -> str | None:
    """Return the type of a run's matrix products: autocast's, else tf32 or fp32 as the run was set."""
    asked = manifest.workload.dtype
    if asked is None or manifest.device == "cpu":
        return None
    return "tf32" if asked == "fp32" and manifest.float32_matmul_precision in _TF32_PRECISIONS else asked


def _bare(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").strip()


_TABLE = Path(__file__).with_name("datasheet.toml")


@dataclass(frozen=True)
class Datasheet:
    """Dense peaks of a GPU: FLOP/s by type ("fp32", "tf32", "bf16", "fp16", those that it has), and memory bytes/s."""

    name: str
    flops_per_s: dict[str, float]
    bytes_per_s: float


def find_datasheet(gpu: str | None) -> Datasheet | None:
    """Return the datasheet of a GPU by the name that torch and nsys give it; None if the table lacks it.

    Names are compared whole: an "RTX 4090 D" is not an "RTX 4090".
    """
    return None if gpu is None else _datasheets().get(gpu.removeprefix("NVIDIA ").strip())


@cache
def _datasheets() -> dict[str, Datasheet]:
    sheets = {}
    for row in tomllib.loads(_TABLE.read_text(encoding="utf-8"))["gpu"]:
        peaks = {dtype: value * 1e12 for dtype, value in row["tflops_per_s"].items()}
        for name in row["names"]:
            sheets[name] = Datasheet(name, peaks, row["gigabytes_per_s"] * 1e9)
    return sheets
