"""Compiled against eager: the grid, cells measured on the CPU, pairs of rows, and the report."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from profkit.errors import UsageError
from recipes.common.measuring import summarize_parts
from recipes.common.recipe import GridName
from recipes.compilation import measure
from recipes.compilation.cells import KEYS
from recipes.compilation.pairs import Pair, add_speedups, find_pairs, measure_speedup, steps_to_break_even
from recipes.compilation.report import remark, report
from recipes.compilation.work import (
    GENERATED,
    kernels_of,
    launchers_of,
    read_work,
    split_operators,
    total,
)
from recipes.compile_speedup import RECIPE, choose_cases, main
from recipes.whole_model.cells import COMPILED, EAGER
from tests.conftest import ROOT
from tests.in_process import csv_rows

PHASES = ("forward", "loss", "backward", "optimizer")


pytestmark = pytest.mark.usefixtures("read_once")


def _cell(**changed: Any) -> dict[str, Any]:
    case = {"what": "model", "d_model": 128, "size": "tiny", "length": 16, "passes": "train", "dtype": "fp32"}
    return {**case, "mode": EAGER, "batch": 2, "steps": 3, **changed}


def _attention(**changed: Any) -> dict[str, Any]:
    own = {"what": "attention", "d_model": 16, "size": None, "length": 64, "passes": "forward-backward", "batch": 8}
    return _cell(**{**own, **changed})


def test_values_restrict_the_reports_and_replace_in_a_product() -> None:
    chosen = choose_cases("reports", {"size": ("xl",), "seq_len": (1024,), "passes": ("train", "forward-backward")})
    assert {(case[0], case[2], case[3]) for case in chosen} == {("model", "xl", 256), ("attention", None, 1024)}
    assert choose_cases("small", {"what": ("model",), "size": ("small",), "passes": ("forward",)}) == [
        ("model", 768, "small", 128, "forward", "fp32")
    ]


@pytest.mark.parametrize(
    ("grid", "given"),
    [
        ("reports", {"dtype": ("bf16",)}),
        ("small", {"what": ("attention",), "passes": ("train",)}),
    ],
)
def test_values_of_no_cell_are_refused(grid: GridName, given: Any) -> None:
    with pytest.raises(UsageError, match=f"--grid {grid}: no case has all of these values"):
        choose_cases(grid, given)


@pytest.mark.parametrize(
    ("cell", "phases"),
    [
        (_cell(), PHASES),
        (_cell(passes="forward"), ("forward",)),
        (_attention(), ("forward", "backward")),
        (_attention(passes="forward", dtype="bf16"), ("forward",)),
    ],
)
def test_a_cell_on_the_cpu_has_times_and_operators_of_every_phase(
    cell: dict[str, Any], phases: tuple[str, ...]
) -> None:
    row: dict[str, Any] = measure.measure_cell(cell, "cpu")
    assert row["status"] == "ok"
    assert {f"{phase}_samples_ms" for phase in phases} < row.keys()
    assert len(row["step_samples_ms"]) == 3
    assert all(0 < row[f"{phase}_ms"] <= row["step_ms"] for phase in phases)
    # Nothing had run before the first step.
    assert row["first_step_s"] > 0
    assert (row["measure"], row["compiled_graphs"], row["generated_kernels"]) == ("cpu-operator", 0, 0)
    assert tuple(dict.fromkeys(each["phase"] for each in row["work"])) == phases
    # What runs outside the phases is little: ``step`` and the taking of the loss.
    inside = sum(each["count"] for each in row["work"])
    assert 0.99 * row["kernels"] <= inside <= row["kernels"]
    assert total(kernels_of(row)) == total(launchers_of(row))
    assert any(each["name"] == "aten::bmm" for each in row["work"])
    assert json.loads(json.dumps(row)) == {**row, "work": json.loads(json.dumps(row["work"]))}


def test_code_is_compiled_anew_and_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with measure.compiling_anew(tmp_path):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_cell_that_is_ended_removes_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = []

    def give_up(*_arguments: Any) -> Any:
        made.extend(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(measure, "_measure", give_up)
    with pytest.raises(SystemExit):
        measure.measure_cell(_cell(), "cpu")
    assert [folder.name.partition(".")[0] for folder in made] == ["compile_speedup"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("triton_poi_fused__unsafe_view_mul_silu_silu_backward_view_0", "_unsafe_view mul silu silu_backward view"),
        ("triton_per_fused_add_mean_mul_pow_rsqrt_0", "add mean mul pow rsqrt"),
        ("triton_red_fused__log_softmax_nll_loss_forward_5", "_log_softmax nll_loss_forward"),
        ("triton_tem_fused_addmm_relu_3", "addmm relu"),
        (
            "graph_0_cpp_fused_add_bitwise_not_div_embedding_dense_backward_exp_masked_fill_9",
            "add bitwise_not div embedding_dense_backward exp masked_fill",
        ),
        ("triton_poi_fused_nosuch_thing_add_1", "nosuch thing add"),
        ("triton_per_fused_div_exp_prepare_softmax_online_sub_view_8", "div exp prepare_softmax_online sub view"),
        ("triton_poi_fused_0", ""),
        ("triton_mm_12", ""),
        ("void at::native::elementwise_kernel<128, 2>(int)", ""),
    ],
)
def test_a_generated_kernel_names_what_is_fused_in_it(name: str, operators: str) -> None:
    assert " ".join(split_operators(name, measure.is_aten_operator)) == operators


def _work(rows: list[tuple[str, str, str, int, int]]) -> list[dict[str, Any]]:
    return [
        {
            **{"phase": phase, "name": name, "category": category, "count": count, "total_ns": total_ns},
            "fused": split_operators(name, measure.is_aten_operator),
        }
        for phase, name, category, count, total_ns in rows
    ]


# Of one real step of a compiled model of that size, on an H200: some of its kernels, and no other.
_COMPILED = [
    ("forward", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_cublas", "gemm", 144, 9_766_842),
    ("forward", "triton_poi_fused__unsafe_view_mul_silu_0", "elementwise", 24, 197_854),
    ("forward", "triton_per_fused_add_mean_mul_pow_rsqrt_1", "normalization", 50, 126_627),
    ("forward", "triton_poi_fused_clone_transpose_2", "copy/cast", 24, 62_784),
    ("forward", "void at::native::vectorized_gather_kernel<(int)16, long>(…)", "embedding/index", 2, 6_592),
    ("backward", "triton_red_fused_mul_sum_0", "reduction", 50, 289_695),
]
_LAUNCHERS = [("forward", "aten::mm", 144, 9_766_842), ("forward", "CompiledFunction", 98, 387_265)]
_LAUNCHERS += [("forward", "aten::gather", 2, 6_592), ("backward", "CompiledFunctionBackward", 50, 289_695)]


def _pair(eager_ms: list[float] | None = None, compiled_ms: list[float] | None = None) -> Pair:
    eager = read_work(ROOT / "traces" / "small-train.kineto.json.gz", PHASES, measure.is_aten_operator)
    rows = [
        {**eager, **summarize_parts({"step": eager_ms or [40.0, 40.2, 40.4, 40.1, 40.3]}), "first_step_s": 1.0},
        {
            **{"measure": "gpu-kernel", "kernels": 294, "kernel_ms": 10.450394, "trace_failures": []},
            **{"work": _work(_COMPILED), "generated_kernels": 148, "first_step_s": 31.0},
            "launchers": [dict(zip(("phase", "name", "count", "total_ns"), row, strict=True)) for row in _LAUNCHERS],
            **summarize_parts({"step": compiled_ms or [30.0, 30.2, 30.4, 30.1, 30.3]}),
        },
    ]
    cell = _cell(size="small", d_model=768, length=256, batch=4, steps=5)
    common = {"status": "ok", "compiled_graphs": 0, "allocator_retries": 0, "device": "cuda"}
    pairs = find_pairs(
        [{**cell, "mode": mode, **common, **row} for mode, row in zip((EAGER, COMPILED), rows, strict=True)]
    )
    assert len(pairs) == 1
    return pairs[0]


def test_a_gpu_trace_gives_kernels_by_phase_and_by_launching_operator() -> None:
    pair = _pair()
    kernels, launchers = kernels_of(pair.eager), launchers_of(pair.eager)
    # What the trace's own README says of it.
    assert total(each for each in kernels if each.phase == "backward") == (2422, 35_722_497)
    assert total(each for each in launchers if each.phase == "backward") == (2422, 35_722_497)
    assert pair.eager["kernels"] == total(kernels)[0] == 3830
    assert pair.eager["kernel_ms"] == 59.321430
    assert pair.eager["trace_failures"] == []
    assert not any(each.kind == GENERATED for each in kernels)


def test_few_steps_have_no_interval_and_equal_steps_no_break_even() -> None:
    short = measure_speedup(_pair([40.0, 41.0], [30.0, 31.0]))
    assert (short.low, short.high, short.is_measurable) == (None, None, False)
    few = _pair([40.0, 41.0], [30.0, 31.0])
    assert "| 1.33 | too few steps |" in report([few.eager, few.compiled], {}).markdown
    alike = _pair([30.0, 34.0, 31.0, 33.0, 32.1], [30.0, 34.0, 31.0, 33.0, 32.0])
    assert steps_to_break_even(alike) is None
    assert ", no measurable difference |" in report([alike.eager, alike.compiled], {}).markdown


def test_on_a_cpu_there_is_no_kernel_time() -> None:
    pair = _pair()
    for row in (pair.eager, pair.compiled):
        row["measure"] = "cpu-operator"
    rows = [pair.eager, pair.compiled]
    add_speedups(rows)
    assert [(row.get("kernel_speedup"), row["kernel_share"]) for row in rows] == [(None, None)] * 2
    said = report(rows, {"device": "cpu"}).markdown
    assert "Counts and times of operators, by self time" in said
    assert "Kernel time" not in said


def test_compilation_in_timed_steps_and_a_failed_trace_are_reported() -> None:
    pair = _pair()
    assert remark([pair.eager, pair.compiled]) == []
    pair.compiled.update({"compiled_graphs": 2, "trace_failures": ["12 launches without kernels"]})
    said = remark([pair.eager, pair.compiled])
    assert "graphs were compiled in the timed steps in 1 of 2 rows: 2 at model small" in said[0]
    assert said[1].endswith("do not trust its kernels: 12 launches without kernels")


@pytest.mark.slow
def test_a_run_on_a_cpu_compiles_attention_into_one_kernel(tmp_path: Path) -> None:
    command = ["--device", "cpu", "-o", str(tmp_path / "out")]
    command += ["--what", "attention", "--passes", "forward", "--seq-len", "64,4194304", "--steps", "5"]
    assert main.main(command, standalone_mode=False) == 0
    eager, compiled, too_large, _ = csv_rows(tmp_path / "out" / "compile_speedup.csv")
    assert list(eager) == list(RECIPE.columns)
    assert (eager["status"], compiled["status"], too_large["status"]) == ("ok", "ok", "not run")
    assert (eager["speedup"], too_large["step_ms"]) == ("", "")
    assert float(compiled["speedup"]) == pytest.approx(float(eager["step_ms"]) / float(compiled["step_ms"]))
    # Scores, softmax and mix: Inductor makes one kernel of what is between the two products.
    assert int(compiled["generated_kernels"]) >= 1
    assert int(compiled["kernels"]) < int(eager["kernels"])
    assert float(compiled["first_step_s"]) > 100 * float(compiled["step_ms"]) / 1e3
    assert compiled["compiled_graphs"] == "0"
    rows = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    (made,) = [each for each in rows[1]["work"] if each["fused"]]
    assert {"exp", "max", "sub", "sum", "div"} <= set(made["fused"])
    assert {key: str(rows[0][key] or "") for key in KEYS} == {key: eager[key] for key in KEYS}
    for name in ("speedup.png", "kernels.png", "manifest.json", "compile_speedup.md"):
        assert (tmp_path / "out" / name).stat().st_size > 0


def test_what_ran_between_the_phases_has_a_line_of_its_own() -> None:
    pair = _pair()
    assert "between the phases" not in report([pair.eager, pair.compiled], {}).markdown
    pair.eager.update({"kernels": 3_834, "kernel_ms": 59.323430})
    line = "| between the phases | 4, 2.000 µs | none | — | — | — | — | — |"
    assert line in report([pair.eager, pair.compiled], {}).markdown
