"""On a GPU: replayed peaks against the allocator's own, from the same process, to the byte.

Each case records the memory of a built-in model and analyses what it left. With PROFKIT_RESULTS set, each appends
a line of JSON to that file, from which the table in a report can be made; a case whose line is there is not run again.
"""

from __future__ import annotations

import itertools
import json
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


def _known_results() -> dict[str, object]:
    path = os.environ.get("PROFKIT_RESULTS")
    if not path or not Path(path).exists():
        return {}
    return {(line := json.loads(text))["case"]: line for text in Path(path).read_text().splitlines()}


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
    if _case_id(case) in _known_results():
        return
    model, dtype, passes, compiled, settings = case
    options = TrainingOptions(
        model, warmup_steps=1, steps=2, dtype=dtype, passes=passes, compile_mode=compiled, device="cuda"
    )
    _record(tmp_path, options, settings)
    result = read_snapshot(tmp_path).memory()
    check = result.allocator_check
    assert check is not None
    line = {
        "case": _case_id(case),
        "allocated_peak_bytes": result.totals.allocated_peak_bytes,
        "reserved_peak_bytes": result.totals.reserved_peak_bytes,
        "requested_peak_bytes": result.totals.requested_peak_bytes,
        "allocator": [check.allocated_peak_bytes, check.reserved_peak_bytes, check.requested_peak_bytes],
        "exact": result.totals.exact,
        "events": result.history.events,
        "unmatched_entries": check.unmatched_entries,
        "evidence": result.composition.evidence,
        "by_category": {row.category: row.bytes for row in result.composition.by_category},
        "phases": {phase.name: phase.peak_bytes for phase in result.phases},
        "warnings": [warning.message for warning in result.warnings],
    }
    if os.environ.get("PROFKIT_RESULTS"):
        with Path(os.environ["PROFKIT_RESULTS"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
    assert result.totals.exact
    assert check.agrees, line
    assert sum(row.bytes for row in result.composition.by_category) == result.totals.allocated_peak_bytes
