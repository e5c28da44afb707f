"""The self-check of a run's capture against what its manifest knows."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.self_check import UNKNOWN_RUN, know_run
from profkit.models import PRESETS
from profkit.run import decode
from profkit.run.manifest import Manifest
from tests.golden import check_text
from tests.nsys_builder import NsysBuilder
from tests.run_builder import start_run

TRACES = Path(__file__).parent.parent / "traces"

GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel"
SPLIT = GEMM.replace("execute_kernel", "execute_split_k_kernel__5x_cublas")


def _manifest(preset: str = "small", **workload: Any) -> dict[str, Any]:
    layers = PRESETS[preset].num_layers
    options = {"preset_name": preset, "steps": 2, "warmup_steps": 2, "compile_mode": "none", **workload}
    return {"status": "complete", "workload": options, "preset": {"num_layers": layers}}


def _run(place: Path, trace: Path, manifest: dict[str, Any]) -> Path:
    run = start_run(place / "run", **manifest)
    shutil.copyfile(trace, run / ("trace.json.gz" if trace.name.endswith(".gz") else "trace.sqlite"))
    return run


def _lose(run: Path, per_step: dict[int, int], like: str = "%gemm%execute_kernel%") -> None:
    """Take kernels and the calls that launched them out of the forward passes, a given number from each step."""
    with closing(sqlite3.connect(run / "trace.sqlite")) as base:
        steps = base.execute(
            "select start, end from NVTX_EVENTS join StringIds on textId = id where value = 'forward' order by start"
        ).fetchall()
        for step, count in per_step.items():
            lost = base.execute(
                "select correlationId from CUPTI_ACTIVITY_KIND_RUNTIME where start between ? and ? and correlationId in"
                " (select correlationId from CUPTI_ACTIVITY_KIND_KERNEL join StringIds on demangledName = id"
                " where value like ?) order by start limit ?",
                (*steps[step], like, count),
            ).fetchall()
            assert len(lost) == count
            for table in ("KERNEL", "RUNTIME"):
                base.executemany(f"delete from CUPTI_ACTIVITY_KIND_{table} where correlationId = ?", lost)
        base.commit()


def _without_a_step(run: Path) -> None:
    trace = run / "trace.json.gz"
    content = json.loads(gzip.decompress(trace.read_bytes()))
    content["traceEvents"] = [event for event in content["traceEvents"] if event.get("name") != "step 1"]
    trace.write_bytes(gzip.compress(json.dumps(content).encode()))


def _model_of_no_layer(place: Path, *kernels: str) -> Path:
    """Write a step of a model that is its head alone, whose forward pass launches ``kernels``."""
    builder = NsysBuilder(("step 0", 0, 90_000), ("forward", 10, 80_000))
    for number, name in enumerate(["void vectorized_elementwise_kernel<4>", *kernels]):
        builder.kernel(100 + 10 * number, 5, name=name)
    return builder.write(place)


SMALL, TINY = _manifest(), _manifest("tiny")
HEAD = {**_manifest(steps=1), "preset": {"num_layers": 0}}
NSYS, CPU = "small-train.nsys2025.sqlite", "tiny-train-cpu.kineto.json.gz"
REDUCED = "void cublasLt::splitKreduce_kernel<32, 16, int, float>"
CASES: dict[str, tuple[str | tuple[str, ...], dict[str, Any], Callable[[Path], None] | None]] = {
    "a built-in model under nsys": (NSYS, SMALL, None),
    "a built-in model under torch.profiler": ("small-train.kineto.json.gz", SMALL, None),
    "a built-in model on a CPU under nsys": ("tiny-train-cpu.nsys2023.sqlite", TINY, None),
    "products missing from every step": (NSYS, SMALL, lambda run: _lose(run, {0: 3, 1: 3})),
    "kernels missing from one step": (NSYS, SMALL, lambda run: _lose(run, {1: 2}, like="%elementwise%")),
    "one step more than there are": (NSYS, _manifest(steps=3), None),
    "one step fewer than there are": (NSYS, _manifest(steps=1), None),
    "as many steps on a CPU": (CPU, _manifest("tiny", steps=3), None),
    "a step lost on a CPU": (CPU, _manifest("tiny", steps=3), _without_a_step),
    "a product": ((GEMM,), HEAD, None),
    "a product in two parts": ((GEMM, SPLIT, REDUCED), HEAD, None),
    "no product": (("void reduce_kernel<512, 1>",), HEAD, None),
    "a kernel of tomorrow": (("a_kernel_of_tomorrow",), HEAD, None),
    "two products": ((GEMM, GEMM), HEAD, None),
}
"""A trace, or kernels of one pass, what the manifest says, and what is changed of the run."""


def test_what_is_found_in_runs(tmp_path: Path) -> None:
    said = ""
    for number, (name, (trace, manifest, change)) in enumerate(CASES.items()):
        made = TRACES / trace if isinstance(trace, str) else _model_of_no_layer(tmp_path / f"{number}.sqlite", *trace)
        run = _run(tmp_path / f"{number}", made, manifest)
        if change is not None:
            change(run)
            assert not read_trace(next(run.glob("trace*"))).self_check.failed, "the capture alone looks whole"
        found = read_trace(run).self_check.findings
        said += f"{name}\n" + "".join(f"  {one.verdict} {one.code}: {one.message}\n" for one in found)
    check_text("run-check", said)


@pytest.mark.parametrize("capture", ["small.nsys2023", "small.nsys2025", "graph_nodes.nsys2023"])
def test_captures_of_a_known_model_pass(captures: Path, tmp_path: Path, capture: str) -> None:
    check = read_trace(_run(tmp_path, captures / f"{capture}.sqlite", _manifest())).self_check
    assert not check.failed, check.of("failed")
    assert "unknown-products" not in [finding.code for finding in check.findings]


@pytest.mark.parametrize(("of_other", "says"), [(3, []), (2, ["2 of one of its processes"]), (0, ["0 of one"])])
def test_each_rank_must_hold_every_step(tmp_path: Path, of_other: int, says: list[str]) -> None:
    builder = NsysBuilder()
    for pid, steps in ((100, 3), (200, of_other)):
        for step in range(steps):
            builder.range(f"step {step}", 1000 * step, 1000 * step + 900, pid=pid)
            builder.kernel(1000 * step + 10, 5, name="k", pid=pid)
    each = [
        {"process": f"rank{rank}", "rank": rank, "pid": pid, "state": "complete"} for rank, pid in ((0, 100), (1, 200))
    ]
    script = {"status": "complete", "workload": {"steps": 3, "annotate": True}, "processes": each}
    opened = read_trace(_run(tmp_path, builder.write(tmp_path / "made.sqlite"), script))
    found = opened.self_check.of("failed")
    assert [one.code for one in found] == ["step-count"] * len(says)
    assert all(part in one.message for one, part in zip(found, says, strict=True))
    assert not opened.of_rank(0).self_check.failed
    for key, value, why in (
        ("state", "cut short", "it is known to have made fewer"),
        ("is_recorded", False, "it was left out by --ranks"),
    ):
        others = [each[0], {**each[1], key: value}]
        run = start_run(tmp_path / "run", **{**script, "processes": others})
        assert not read_trace(run).self_check.failed, why


@pytest.mark.parametrize(
    ("manifest", "known"),
    [
        ({}, UNKNOWN_RUN),
        ({"status": "failed", "workload": {"preset_name": "tiny", "steps": 2}}, UNKNOWN_RUN),
        ({"status": "complete", "workload": {"steps": 3, "annotate": False}}, UNKNOWN_RUN),
    ],
)
def test_a_run_with_unknown_steps_is_not_checked(manifest: dict[str, Any], known: object) -> None:
    assert know_run(decode(Manifest, manifest)) == known


def test_a_command_and_an_older_run_are_known_only_in_part() -> None:
    script = know_run(decode(Manifest, {"status": "complete", "workload": {"steps": 3, "annotate": True}}))
    assert (script.steps, script.layers, script.even) == (3, None, False)
    old = _manifest()
    del old["preset"]
    known = know_run(decode(Manifest, old))
    assert (known.steps, known.layers) == (2, None)
    assert know_run(decode(Manifest, _manifest(contexts=[128, 256, 512]))).steps == 6
    assert not know_run(decode(Manifest, _manifest(warmup_steps=0))).even
    assert not know_run(decode(Manifest, _manifest(compile_mode="reduce-overhead"))).even
    assert know_run(decode(Manifest, _manifest(compile_mode="reduce-overhead", warmup_steps=3))).even
