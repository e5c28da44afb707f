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
from profkit.analysis.self_check import UNKNOWN_RUN, SelfCheck, know_run, products_per_forward
from profkit.models.options import PRESETS
from profkit.run.manifest import Manifest
from profkit.run.records import decode
from tests.nsys_builder import NsysBuilder

TRACES = Path(__file__).parent.parent / "traces"

GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel"
SPLIT = GEMM.replace("execute_kernel", "execute_split_k_kernel__5x_cublas")


def _manifest(preset: str = "small", **workload: Any) -> dict[str, Any]:
    layers = PRESETS[preset].num_layers
    options = {"preset_name": preset, "steps": 2, "warmup_steps": 2, "compile_mode": "none", **workload}
    return {"status": "complete", "workload": options, "preset": {"num_layers": layers}}


def _run(place: Path, trace: Path, manifest: dict[str, Any]) -> Path:
    run = place / "run"
    run.mkdir()
    name = "trace.json.gz" if trace.name.endswith(".gz") else "trace.sqlite"
    shutil.copyfile(trace, run / name)
    (run / "manifest.json").write_text(json.dumps(manifest))
    return run


def _failed(check: SelfCheck) -> list[str]:
    return [finding.code for finding in check.of("failed")]


@pytest.mark.parametrize(
    ("trace", "preset"),
    [
        ("small-train.nsys2025.sqlite", "small"),
        ("small-train.kineto.json.gz", "small"),
        ("tiny-train-cpu.nsys2023.sqlite", "tiny"),
    ],
)
def test_runs_of_built_in_models_pass(tmp_path: Path, trace: str, preset: str) -> None:
    check = read_trace(_run(tmp_path, TRACES / trace, _manifest(preset))).self_check
    assert not check.failed, check.of("failed")
    assert not check.of("warning")


@pytest.mark.parametrize("capture", ["small.nsys2023", "small.nsys2025", "graph_nodes.nsys2023"])
def test_captures_of_a_known_model_pass(captures: Path, tmp_path: Path, capture: str) -> None:
    check = read_trace(_run(tmp_path, captures / f"{capture}.sqlite", _manifest())).self_check
    assert not check.failed, check.of("failed")
    assert "unknown-products" not in [finding.code for finding in check.findings]


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


def test_products_missing_from_every_step_fail(tmp_path: Path) -> None:
    trace = TRACES / "small-train.nsys2025.sqlite"
    run = _run(tmp_path, trace, _manifest())
    _lose(run, {0: 3, 1: 3})
    opened = read_trace(run)
    assert _failed(opened.self_check) == ["missing-products"]
    assert "makes 109 matrix products; 2 of 2 hold fewer, down to 106" in opened.self_check.of("failed")[0].message
    assert not read_trace(run / "trace.sqlite").self_check.failed, "the capture alone looks whole"


def test_a_failed_run_check_heads_the_output_and_strict_exits_3(tmp_path: Path, profkit: Callable[..., Any]) -> None:
    run = _run(tmp_path, TRACES / "small-train.nsys2025.sqlite", _manifest(steps=3))
    done = profkit("kernels", run, "--strict", "--top", "1")
    assert done.returncode == 3
    assert done.stdout.splitlines()[1] == "  ✗ the run made 3 steps, and the capture holds 2"


def test_kernels_missing_from_one_step_fail(tmp_path: Path) -> None:
    run = _run(tmp_path, TRACES / "small-train.nsys2025.sqlite", _manifest())
    _lose(run, {1: 2}, like="%elementwise%")
    check = read_trace(run).self_check
    assert _failed(check) == ["unequal-steps", "unequal-steps"]
    assert "step: kernels per instance range from 1,913 to 1,915" in check.of("failed")[0].message
    assert not read_trace(run / "trace.sqlite").self_check.failed, "of any other workload that is odd, no proof"


@pytest.mark.parametrize("steps", [1, 3])
def test_another_number_of_steps_fails(tmp_path: Path, steps: int) -> None:
    check = read_trace(_run(tmp_path, TRACES / "small-train.nsys2025.sqlite", _manifest(steps=steps))).self_check
    assert [finding.message for finding in check.of("failed")] == [
        f"the run made {steps} step{'s' * (steps != 1)}, and the capture holds 2"
    ]


def test_a_step_lost_from_a_cpu_trace_fails(tmp_path: Path) -> None:
    run = _run(tmp_path, TRACES / "tiny-train-cpu.kineto.json.gz", _manifest("tiny", steps=3))
    assert not read_trace(run).self_check.failed
    trace = run / "trace.json.gz"
    content = json.loads(gzip.decompress(trace.read_bytes()))
    content["traceEvents"] = [event for event in content["traceEvents"] if event.get("name") != "step 1"]
    trace.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert _failed(read_trace(run).self_check) == ["step-count"]


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
        (tmp_path / "run" / "manifest.json").write_text(json.dumps({**script, "processes": others}))
        assert not read_trace(tmp_path / "run").self_check.failed, why


def _model_of_no_layer(place: Path, kernels: list[str], steps: int = 1, **workload: Any) -> SelfCheck:
    """Check a run whose model is its head alone, each of whose forward passes launches ``kernels``."""
    builder = NsysBuilder()
    for step in range(steps):
        begin = 100_000 * step
        builder.range(f"step {step}", begin, begin + 90_000)
        builder.range("forward", begin + 10, begin + 80_000)
        for number, name in enumerate(kernels):
            builder.kernel(begin + 100 + 10 * number, 5, name=name)
    manifest = {**_manifest(steps=steps, **workload), "preset": {"num_layers": 0}}
    return read_trace(_run(place, builder.write(place / "made.sqlite"), manifest)).self_check


@pytest.mark.parametrize(
    ("kernels", "verdict"),
    [
        ([GEMM], []),
        ([GEMM, SPLIT, "void cublasLt::splitKreduce_kernel<32, 16, int, float>"], []),
        (["void reduce_kernel<512, 1>"], ["failed"]),
        (["a_kernel_of_tomorrow"], ["warning"]),
        ([GEMM, GEMM], ["warning"]),
    ],
)
def test_each_matrix_product_counts_once(tmp_path: Path, kernels: list[str], verdict: list[str]) -> None:
    found = _model_of_no_layer(tmp_path, ["void vectorized_elementwise_kernel<4>", *kernels]).findings
    assert [finding.verdict for finding in found] == verdict


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


def test_each_preset_has_its_number_of_products() -> None:
    assert {name: products_per_forward(preset.num_layers) for name, preset in PRESETS.items()} == {
        "tiny": 19,
        "small": 109,
        "medium": 217,
        "large": 325,
        "xl": 433,
        "2.7B": 289,
    }
