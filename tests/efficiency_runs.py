"""Run directories for the tests of efficiency: a real trace beside what `profkit run` writes of its model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.report.commands.efficiency import build_efficiency_document
from profkit.report.document import Lines
from tests.conftest import ROOT
from tests.nsys_builder import NsysBuilder
from tests.run_builder import start_run

SMALL = ROOT / "traces" / "small-train.nsys2025.sqlite"
MOVER = "void at::native::vectorized_elementwise_kernel<4, MulFunctor>(int)"
"""A kernel that does little but move data."""


def make_ceilings(gpu: str = "NVIDIA H200", *, bytes_per_s: float = 5e11, **flops_per_s: float) -> dict[str, Any]:
    """Return the content of a ``ceilings.json`` with these peaks by dtype; without any, 1 TFLOP/s in bf16."""
    size = {"m": 8, "n": 8, "k": 8}
    return {
        "version": 1,
        "device": {"name": gpu, "uuid": None, "clock_mhz": 1, "clock_max_mhz": 2},
        "torch": "2.13",
        "driver": None,
        "measured_utc": "2026-01-01T00:00:00+00:00",
        "gemm": [
            {"dtype": dtype, **size, "best_flops_per_s": rate, "median_flops_per_s": rate}
            for dtype, rate in (flops_per_s or {"bf16": 1e12}).items()
        ],
        "copy": {"bytes": 8, "best_bytes_per_s": bytes_per_s, "median_bytes_per_s": bytes_per_s},
    }


def write_run(folder: Path, builder: NsysBuilder, **manifest: Any) -> Path:
    """Write a run's trace and a manifest that holds these beside its status."""
    run = start_run(folder, **{"device": "cuda", **manifest})
    builder.write(run / "trace.sqlite")
    return run


def change_manifest(run: Path, **changes: Any) -> None:
    path = run / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_small_run(folder: Path, *, ceilings: bool = True) -> Path:
    """Make the run directory that ``profkit run --nsys model.small`` would have left around the trace in ``traces``."""
    facts = {"workload": {"dtype": "fp32"}, "conditions": {"float32_matmul_precision": "highest"}}
    start_run(folder, gpu="NVIDIA H200", device="cuda", **facts)
    shutil.copyfile(ROOT / "tests" / "small_work.json", folder / "work.json")
    if ceilings:
        (folder / "ceilings.json").write_text(json.dumps(make_ceilings(bytes_per_s=4e12, fp32=50e12, bf16=700e12)))
    shutil.copyfile(SMALL, folder / "trace.sqlite")
    return folder


def rows_by_path(result: EfficiencyResult) -> dict[str, EfficiencyRow]:
    return {row.path: row for row in result.ranges}


def notes_of(result: EfficiencyResult) -> str:
    notes = build_efficiency_document(result, ()).parts[-1]
    assert isinstance(notes, Lines)
    return "\n".join(notes.lines)


def write_two_steps(path: Path, kernel: str = "gemm") -> Path:
    """Two steps of 1,000 ns: forward with two layers, backward on the autograd thread, a pause outside CUDA."""
    builder = NsysBuilder()
    builder.add("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
    builder.name_thread("pt_autograd_0", 101)
    for step in (0, 1):
        at = 10_000 * step
        builder.range(f"step {step}", at, at + 1_000)
        builder.range("forward", at, at + 400, int64Value=3_000)
        for layer in (0, 1):
            builder.range(f"layer {layer}", at + 200 * layer, at + 200 * layer + 150, int64Value=1_000 + 500 * layer)
            builder.kernel(at + 200 * layer + 5, 80, start=at + 200 * layer + 20, name=kernel)
        builder.range("backward", at + 400, at + 1_000, int64Value=6_000)
        for launch in (410, 420, 430, 440):
            builder.kernel(at + launch, 100, start=at + launch + 10 * (launch - 400), tid=101, name=kernel)
        builder.call(at + 990, duration=5, name="cudaDeviceSynchronize_v3020")
    return builder.write(path)


def two_steps_work(**changes: Any) -> dict[str, Any]:
    """Return the content of a ``work.json`` of `write_two_steps`, with some keys changed."""

    def one(path: list[str], flops: int, least_bytes: int, other: int = 10) -> dict[str, Any]:
        counts = {"flops": flops, "other_flops": other, "needed_flops": flops - 1, "least_bytes": least_bytes}
        return {"path": path, **counts, "flops_by_dtype": {"bf16": flops}, "instances": 1, "varies": False}

    ranges = [
        one([], 9_100, 500),
        one(["forward"], 3_000, 200),
        one(["forward", "layer 0"], 1_000, 100),
        one(["forward", "layer 1"], 1_500, 60),
        one(["backward"], 6_000, 300),
    ]
    content = {
        "version": 1,
        "source": "formula",
        "dtype": "bf16",
        "ranges": ranges,
        "model_flops": 9_000,
        "missing": [],
    }
    return content | changes


def make_timed_run(
    folder: Path,
    builder: NsysBuilder | None = None,
    *,
    work: bool = True,
    ceilings: bool = True,
    clean_ns: int = 800,
    kernel: str = "gemm",
) -> Path:
    """Make the run directory of a trace, else of `write_two_steps`: steps of 1,000 ns, unprofiled of ``clean_ns``."""
    steps = [{"forward_ns": clean_ns // 4, "step_ns": clean_ns}] * 3
    profiled = [{"forward_ns": 400, "step_ns": 1_000}] * 2
    manifest = {
        "gpu": "NVIDIA H200",
        "device": "cuda",
        "workload": {"dtype": "bf16"},
        "conditions": {"float32_matmul_precision": "highest"},
        "clean": {"steps": steps},
        "profiled": {"steps": profiled},
    }
    start_run(folder, **manifest)
    if work:
        (folder / "work.json").write_text(json.dumps(two_steps_work()))
    if ceilings:
        (folder / "ceilings.json").write_text(json.dumps(make_ceilings()))
    trace = folder / "trace.sqlite"
    if builder is None:
        write_two_steps(trace, kernel)
    else:
        builder.write(trace)
    return folder
