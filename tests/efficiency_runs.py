"""Run directories for the tests of efficiency: a real trace beside what `profkit run` writes of its model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from profkit.models.options import TrainingOptions
from profkit.run.work import write_work
from tests.conftest import ROOT
from tests.step_work import model_work

SMALL = ROOT / "traces" / "small-train.nsys2025.sqlite"


def make_ceilings(**flops_per_s: float) -> dict[str, Any]:
    """Return the content of a ``ceilings.json`` of an H200 with these peaks by dtype."""
    size = {"m": 8, "n": 8, "k": 8}
    return {
        "version": 1,
        "device": {"name": "NVIDIA H200", "uuid": None, "clock_mhz": 1, "clock_max_mhz": 2},
        "torch": "2.13",
        "driver": None,
        "measured_utc": "2026-01-01T00:00:00+00:00",
        "gemm": [
            {"dtype": dtype, **size, "best_flops_per_s": rate, "median_flops_per_s": rate}
            for dtype, rate in flops_per_s.items()
        ],
        "copy": {"bytes": 8, "best_bytes_per_s": 4e12, "median_bytes_per_s": 4e12},
    }


def make_small_run(folder: Path, *, ceilings: bool = True) -> Path:
    """Make the run directory that ``profkit run --nsys model.small`` would have left around the trace in ``traces``."""
    manifest = {
        "status": "complete",
        "gpu": "NVIDIA H200",
        "device": "cuda",
        "workload": {"dtype": "fp32"},
        "float32_matmul_precision": "highest",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_work(folder / "work.json", model_work(TrainingOptions("small", batch=4, contexts=(256,))))
    if ceilings:
        (folder / "ceilings.json").write_text(json.dumps(make_ceilings(fp32=50e12, bf16=700e12)))
    shutil.copyfile(SMALL, folder / "trace.sqlite")
    return folder
