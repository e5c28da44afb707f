"""What a run directory knows of its ranges beside the trace: their work, unprofiled times, the device and its peaks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from profkit.analysis.efficiency.datasheet import Datasheet, find_datasheet
from profkit.analysis.step_times import PhaseTimes, StepTimes, summarize_step_times
from profkit.errors import UsageError
from profkit.names import STEP
from profkit.run.ceilings import Ceilings, read_ceilings
from profkit.run.directory import Run
from profkit.run.manifest import Manifest
from profkit.run.work import RunWork
from profkit.trace.columns import Trace

# torch.set_float32_matmul_precision: both others let cuBLAS take TF32 (torch/backends/cuda, allow_tf32).
_TF32_PRECISIONS = ("high", "medium")

VECTOR_DTYPE = "fp32"
"""What all that is no matrix product is done in, autocast or not, on the GPU's ordinary units."""


@dataclass(frozen=True)
class Peaks:
    """What the GPU can do at most, per second: matrix products by dtype, and bytes moved.

    ``source`` is ``measured`` (`profkit ceilings`, on a GPU of that name) or ``datasheet``.
    """

    source: str
    gpu: str
    flops_per_s: dict[str, float]
    bytes_per_s: float


@dataclass(frozen=True)
class RunFacts:
    """What is known beside the trace; of a bare trace little.

    ``dtype`` is what matrix products were done in where their range does not say so itself. ``peaks`` are measured ones
    if there are any, else the datasheet's; MFU is a share of ``datasheet``'s. ``step_times`` are those without a
    profiler, beside those with one. ``ceilings_uuid`` is the GPU that was measured, where the run's is known to be
    another of that name.
    """

    gpu: str | None
    dtype: str | None
    work: RunWork | None
    peaks: Peaks | None
    datasheet: Datasheet | None
    step_times: StepTimes | None
    ceilings_uuid: str | None

    def clean_times(self, phase: str, context: int | None) -> PhaseTimes | None:
        """Return what a phase (or ``step``) took without a profiler."""
        phases = self.step_times.phases if self.step_times is not None else ()
        return next((one for one in phases if (one.phase, one.context) == (phase, context)), None)

    def step_ns(self, context: int | None) -> float | None:
        """Return the median step without a profiler."""
        timed = self.clean_times(STEP, context)
        return None if timed is None else timed.clean.median


def read_run_facts(
    trace: Trace, run: Run | None, *, ceilings: Path | None = None, dtype: str | None = None
) -> RunFacts:
    """Return what is known beside a trace.

    Args:
        trace: the capture.
        run: the run that it is of, if any.
        ceilings: a file of `profkit ceilings` (or a run with one) to use; else the run's own.
        dtype: what matrix products were done in, where the run does not say.

    Raises:
        RunError: a file of the run, or the ceilings, cannot be read.
        UsageError: the ceilings were measured on another GPU, or the run says another ``dtype``.
    """
    manifest = Manifest() if run is None else run.manifest
    work = None if run is None else run.work
    gpu = _gpu_name(trace, manifest)
    sheet = find_datasheet(gpu)
    measured = _measured(run, ceilings)
    if measured is not None and gpu is not None and _bare(measured.device.name) != _bare(gpu):
        raise UsageError(
            f"{ceilings or trace.path}: the ceilings were measured on {measured.device.name}, the capture is of {gpu};"
            " measure on that GPU with `profkit ceilings`"
        )
    recorded = (work.dtype if work is not None else None) or _dtype_of(manifest)
    if None not in (dtype, recorded) and dtype != recorded:
        raise UsageError(
            f"{trace.path}: this run says that its matrix products were done in {recorded}, not in {dtype}"
        )
    return RunFacts(
        gpu=gpu,
        dtype=recorded or dtype,
        work=work,
        peaks=_peaks(measured, sheet),
        datasheet=sheet,
        step_times=summarize_step_times(manifest),
        ceilings_uuid=_other_uuid(measured, manifest),
    )


def _measured(run: Run | None, ceilings: Path | None) -> Ceilings | None:
    if ceilings is None:
        return None if run is None else run.ceilings
    return Run(ceilings).ceilings if ceilings.is_dir() else read_ceilings(ceilings)


def _peaks(measured: Ceilings | None, sheet: Datasheet | None) -> Peaks | None:
    if measured is not None:
        products = {one.dtype: one.best_flops_per_s for one in measured.gemm}
        return Peaks("measured", measured.device.name, products, measured.copy.best_bytes_per_s)
    return None if sheet is None else Peaks("datasheet", sheet.name, sheet.flops_per_s, sheet.bytes_per_s)


def _other_uuid(measured: Ceilings | None, manifest: Manifest) -> str | None:
    """Return which GPU was measured if it is not the run's; None where either is not known."""
    used = None if manifest.conditions is None else manifest.conditions.gpu_uuid
    found = None if measured is None else measured.device.uuid
    return found if None not in (used, found) and used != found else None


def _gpu_name(trace: Trace, manifest: Manifest) -> str | None:
    """Return the one name that the GPUs of the capture have; None where they differ and no manifest says which."""
    names = set(trace.gpus)
    return manifest.gpu or (names.pop() if len(names) == 1 else None)


def _dtype_of(manifest: Manifest) -> str | None:
    """Return what a run's matrix products were done in: autocast's type, else as float32 products are set to be."""
    asked = manifest.workload.dtype
    if asked is None or manifest.device == "cpu":
        return None
    return "tf32" if asked == "fp32" and manifest.float32_matmul_precision in _TF32_PRECISIONS else asked


def _bare(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").strip()
