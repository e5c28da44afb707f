"""The result behind ``profkit efficiency``: how well the GPUs' time was used, range by range, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from profkit.analysis.efficiency.gpu_steps import GpuStep
from profkit.analysis.efficiency.gpu_time import GpuParts
from profkit.analysis.efficiency.run_facts import Peaks
from profkit.findings import Finding

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class EfficiencyRow:
    """All ranges of one path together; times in nanoseconds, unknown figures None.

    ``wall_ns`` is the host's, ``kernel_time_ns`` and ``busy_ns`` (the union per GPU) are of the kernels and graphs
    launched under it, ``launch_count`` counts the calls that launched them. ``gpu`` is its time on the GPUs in parts,
    ``idle_share`` the idle part of that; None if it launched nothing. ``flops`` are matrix products as executed,
    ``needed_flops`` those without what a causal mask hides, ``other_flops`` all other operations; rates are over
    ``busy_ns``. ``ceiling_share`` is the time that ``flops`` would take at their dtypes' peak over ``busy_ns``.
    ``roof_share`` is the same of the least bytes where the range is memory-bound; else of all operations or of the
    least bytes, whichever would take longer: how near the range comes to the peak that it would meet first.
    ``intensity`` is all operations per least byte. ``mfu`` is of steps: model FLOPs over the median unprofiled step
    time and the datasheet's peak (Chowdhery et al. 2022, appendix B).
    ``idle_factor`` is what unprofiled time leaves of the idle time, where that is known of the phase around it, and
    ``clean_idle_share`` the idle share that follows.
    """

    path: str
    name: str
    domain: str
    instances: int
    wall_ns: int
    kernel_time_ns: int
    busy_ns: int
    kernel_count: int
    launch_count: int
    gpu: GpuParts | None
    idle_share: float | None
    clean_idle_share: float | None
    flops: int | None
    other_flops: int | None
    needed_flops: int | None
    least_bytes: int | None
    flops_per_s: float | None
    ceiling_share: float | None
    roof_share: float | None
    bytes_per_s: float | None
    intensity: float | None
    mfu: float | None
    idle_factor: float | None
    verdict: str | None
    rule: str

    @property
    def best_idle_share(self) -> float | None:
        """The idle share without a profiler, where that is known; else the recorded one."""
        return self.idle_share if self.clean_idle_share is None else self.clean_idle_share

    @property
    def launching_share(self) -> float | None:
        """The share of its time on the GPU that is idle while the host launches, without a profiler where known."""
        return None if self.gpu is None else self.gpu.launching_share_at(self.best_idle_factor)

    @property
    def host_share(self) -> float | None:
        """The share of it that is idle while the host synchronises or is outside CUDA, as ``launching_share`` is."""
        return None if self.gpu is None else self.gpu.host_share_at(self.best_idle_factor)

    @property
    def best_idle_factor(self) -> float:
        """What is left of idle time without a profiler, where that is known; else all of it."""
        return 1.0 if self.idle_factor is None else self.idle_factor


@dataclass(frozen=True)
class Inflation:
    """What profiling made of a phase (or the step): medians, the unprofiled one of another process or other steps."""

    phase: str
    context: int | None
    clean_ns: float
    profiled_ns: float
    cost: float


@dataclass(frozen=True)
class EfficiencyResult:
    """The rows, and all that they rest on: the JSON of ``profkit efficiency --format json``.

    ::

        {"trace", "gpu", "dtype", "work_source": "formula" | "counted" | "payload" | null,
         "peaks": null | {"source": "measured" | "datasheet", "gpu", "flops_per_s": {dtype: …}, "bytes_per_s"},
         "capture": {parts of the GPUs' time from the first to the last thing recorded},
         "ranges": [{fields of `EfficiencyRow`; "gpu": null | {parts, "busy_ns", "idle_ns"}}],
         "steps": [{fields of `GpuStep`, "idle_share"}], "twin": "clean" | "attached" | null,
         "inflation": [{fields of `Inflation`}], "model_flops", "mfu",
         "idle_share", "clean_idle_share", "warnings": [{"code", "message"}]}

    ``ranges`` stand depth first. ``twin`` says which steps were timed without a profiler: those of a process of their
    own, or those of the same script before it was recorded. ``model_flops`` are a step's; ``mfu`` and ``idle_share``
    are of all steps together, None without steps (or, for MFU, without what it needs). ``clean_idle_share`` is the idle
    share as it would be without a profiler, None where that is not known.
    """

    trace: str
    gpu: str | None
    dtype: str | None
    work_source: str | None
    peaks: Peaks | None
    capture: GpuParts
    ranges: tuple[EfficiencyRow, ...]
    steps: tuple[GpuStep, ...]
    twin: str | None
    inflation: tuple[Inflation, ...]
    model_flops: int | None
    mfu: float | None
    idle_share: float | None
    clean_idle_share: float | None
    warnings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        data = asdict(self)
        for row, values in zip(self.ranges, data["ranges"], strict=True):
            values["gpu"] = None if row.gpu is None else row.gpu.to_dict()
        for step, values in zip(self.steps, data["steps"], strict=True):
            values |= {"gpu": step.gpu.to_dict(), "idle_share": step.idle_share}
        return data | {"capture": self.capture.to_dict()}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per range; the parts of its time on the GPU are columns such as ``gpu_launching_ns``."""
        import pandas as pd

        return pd.json_normalize(self.to_dict()["ranges"], sep="_")
