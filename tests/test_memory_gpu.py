"""On a GPU: replayed peaks against the allocator's own, from the same process, to the byte.

Each case records the memory of a built-in model and analyses what it left.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from profkit import read_snapshot
from profkit.launch.passes import model_passes
from profkit.launch.record import build_environment
from profkit.models.options import TrainingOptions
from profkit.run.recording import MemoryOptions

pytestmark = pytest.mark.gpu

CASES = list(
    itertools.product(
        ("small", "xl"), ("fp32", "bf16"), ("forward", "train"), ("none", "default"), ("", "expandable_segments:True")
    )
)


def _case_id(case: tuple[str, ...]) -> str:
    model, dtype, passes, compiled, settings = case
    return "-".join(
        (model, dtype, passes, "eager" if compiled == "none" else "compiled", "expandable" * bool(settings))
    )


def _record(run: Path, options: TrainingOptions, settings: str) -> None:
    """Make the pass over the built-in model that records memory."""
    memory = model_passes(options, "kineto", MemoryOptions())[0]
    order = replace(memory.order, run=str(run))
    environment = build_environment(os.environ, order)
    if settings:
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
    command = [word.replace("{run}", str(run)) for word in memory.argv]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=500)
    (run / "manifest.json").write_text('{"status": "complete"}')


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_the_replay_is_exact(tmp_path: Path, case: tuple[str, ...]) -> None:
    model, dtype, passes, compiled, settings = case
    options = TrainingOptions(
        model, warmup_steps=1, steps=2, dtype=dtype, passes=passes, compile_mode=compiled, device="cuda"
    )
    _record(tmp_path, options, settings)
    result = read_snapshot(tmp_path).memory()
    check = result.allocator_check
    assert result.totals.exact
    assert check.agrees, check
    assert sum(row.bytes for row in result.composition.by_category) == result.totals.allocated_peak_bytes
