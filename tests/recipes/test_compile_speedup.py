"""Compiled against eager: the grid, cells measured on the CPU, pairs of rows, and the report."""

from __future__ import annotations

import csv
import json
import math
import os
import re
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
from recipes.compilation.cells import KEYS, as_attention_cell, as_model_cell, build_cells, of_reports
from recipes.compilation.pairs import Pair, add_speedups, find_pairs, list_fused, measure_speedup, steps_to_break_even
from recipes.compilation.report import remark, report
from recipes.compilation.work import (
    GENERATED,
    OTHERS,
    PRODUCTS,
    kernels_of,
    launchers_of,
    read_work,
    split_operators,
    total,
    totals_by_kind,
)
from recipes.compile_speedup import RECIPE, choose_cases, main
from recipes.whole_model.cells import COMPILED, EAGER
from tests.conftest import ROOT

PHASES = ("forward", "loss", "backward", "optimizer")


def _cell(**changed: Any) -> dict[str, Any]:
    case = {"what": "model", "d_model": 128, "size": "tiny", "length": 16, "passes": "train", "dtype": "fp32"}
    return {**case, "mode": EAGER, "batch": 2, "steps": 3, **changed}


def _attention(**changed: Any) -> dict[str, Any]:
    own = {"what": "attention", "d_model": 16, "size": None, "length": 64, "passes": "forward-backward", "batch": 8}
    return _cell(**{**own, **changed})


def test_the_reports_grid_has_whole_pairs_in_order_of_interest() -> None:
    cells = build_cells(of_reports(), 10)
    # Five sizes, forward and the whole step; three widths of attention at three lengths.
    assert len(cells) == 2 * (5 * 2 + 3 * 3)
    assert len({tuple(cell.values()) for cell in cells}) == len(cells)
    for eager, compiled in zip(cells[::2], cells[1::2], strict=True):
        assert (eager["mode"], {**eager, "mode": COMPILED}) == (EAGER, compiled)
    assert [cells[0][key] for key in ("what", "size", "length", "passes")] == ["model", "small", 256, "train"]
    assert {cell["batch"] for cell in cells if cell["what"] == "attention"} == {8}


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


def test_predictions_are_those_of_the_other_recipes() -> None:
    assert measure.predict_bytes(_attention(length=1024), "cpu") > measure.predict_bytes(
        _attention(length=1024, mode=COMPILED), "cpu"
    )
    assert as_attention_cell(_attention(mode=COMPILED))["implementation"] == "compiled"
    assert as_model_cell(_cell())["warmup"] == 0
    assert measure.predict_bytes(_cell(), "cpu") > 4 * 4 * 2_900_000  # parameters, gradients, AdamW's two


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


def test_the_parts_of_a_phase_add_up_to_it() -> None:
    pair = _pair()
    for row in (pair.eager, pair.compiled):
        for phase in PHASES:
            whole = total(each for each in kernels_of(row) if each.phase == phase)
            assert tuple(map(sum, zip(*totals_by_kind(row, phase).values(), strict=True))) == whole
    forward = totals_by_kind(pair.compiled, "forward")
    assert forward[GENERATED] == (24 + 50 + 24, 197_854 + 126_627 + 62_784)
    assert forward[OTHERS] == (2, 6_592)
    assert forward[PRODUCTS] == (144, 9_766_842)
    assert set(totals_by_kind(pair.compiled, "loss").values()) == {(0, 0)}
    assert totals_by_kind(pair.eager, "forward")[GENERATED] == (0, 0)


def test_an_operator_is_found_in_the_kernels_that_name_it() -> None:
    fused = {each.operator: each for each in list_fused(_pair(), "forward")}
    # The two kernels that multiply tensors.
    assert fused["mul"].eager == (292 + 48, 865_868 + 349_725)
    assert [kernel.name.split("_")[1] for kernel in fused["mul"].kernels] == ["poi", "per"]
    assert [kernel.count for kernel in fused["rsqrt"].kernels] == [50]
    # Eager code copies where Inductor names the clone.
    assert [kernel.fused for kernel in fused["copy"].kernels] == [("clone", "transpose")]
    assert (fused["mm"].eager[0], fused["mm"].left[0], fused["mm"].kernels) == (194, 144, ())
    assert "gather" not in fused


def test_a_speedup_is_of_the_medians_and_its_interval_of_their_ratio() -> None:
    pair = _pair()
    speedup = measure_speedup(pair)
    assert speedup.times == 40.2 / 30.2
    assert speedup.low is not None
    assert speedup.high is not None
    assert 40.0 / 30.4 <= speedup.low < speedup.times < speedup.high <= 40.4 / 30.0
    assert measure_speedup(pair, "optimizer") is None
    assert steps_to_break_even(pair) == math.ceil(30_000 / 10.0)


def test_few_steps_have_no_interval_and_equal_steps_no_break_even() -> None:
    short = measure_speedup(_pair([40.0, 41.0], [30.0, 31.0]))
    assert (short.low, short.high, short.is_measurable) == (None, None, False)
    few = _pair([40.0, 41.0], [30.0, 31.0])
    assert "| 1.33 | too few steps |" in report([few.eager, few.compiled], {}).markdown
    alike = _pair([30.0, 34.0, 31.0, 33.0, 32.1], [30.0, 34.0, 31.0, 33.0, 32.0])
    assert steps_to_break_even(alike) is None
    assert ", no measurable difference |" in report([alike.eager, alike.compiled], {}).markdown


def test_the_compiled_row_alone_gets_the_speedup() -> None:
    pair = _pair()
    rows = [pair.eager, pair.compiled, {**_cell(), "status": "not run"}]
    add_speedups(rows)
    assert not {"speedup"} & (rows[0].keys() | rows[2].keys())
    assert (rows[1]["speedup"], rows[1]["optimizer_ratio"]) == (40.2 / 30.2, None)
    assert rows[1]["kernel_speedup"] == 59.321430 / 10.450394
    assert [row["kernel_share"] for row in rows] == [59.321430 / 40.2, 10.450394 / 30.2, None]


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


def test_a_lower_bound_is_not_shown_as_a_peak() -> None:
    rows: list[dict[str, Any]] = [
        {**_cell(mode=mode), "status": "not run", "predicted_peak_bytes": 7} for mode in (EAGER, COMPILED)
    ]
    assert RECIPE.derive is not None
    RECIPE.derive(rows)
    assert [row["predicted_peak_bytes"] for row in rows] == [7, None]


def test_compilation_in_timed_steps_and_a_failed_trace_are_reported() -> None:
    pair = _pair()
    assert remark([pair.eager, pair.compiled]) == []
    pair.compiled.update({"compiled_graphs": 2, "trace_failures": ["12 launches without kernels"]})
    said = remark([pair.eager, pair.compiled])
    assert "graphs were compiled in the timed steps in 1 of 2 rows: 2 at model small" in said[0]
    assert said[1].endswith("do not trust its kernels: 12 launches without kernels")


def test_the_report_of_a_pair_has_its_times_kernels_and_fusions() -> None:
    pair = _pair()
    for row, ms in ((pair.eager, 4.18), (pair.compiled, 3.875)):
        row.update(summarize_parts({"optimizer": [ms] * 5, "forward": [8.0] * 5}))
    text = report([pair.eager, pair.compiled], {}).markdown
    case = "| model small, context 256, batch 4, train, fp32 |"
    assert re.search(
        re.escape(case) + r" 40.20 \| 30.20 \| 1.33 \| 1.3\d to 1.3\d \| 1.00 \| — \| 1.08 \| 1.000 \| ", text
    )
    assert f"{case} 59.32 | 10.45 | 5.68 | 147.6% | 34.6% |" in text
    assert "| 1,048, 3.809 ms | 98, 387.3 µs | 2, 6.592 µs |" in text
    assert r"| forward | triton_per\_…\_1 | 50 | 126.6 µs | add, mean, mul, pow, rsqrt |" in text
    assert r"| forward | rsqrt | 50, 47.74 µs | none | 50 × triton_per\_…\_1 |" in text
    assert "between the phases" not in text
    pair.eager.update({"kernels": 3_834, "kernel_ms": 59.323430})
    assert "| between the phases | 4, 2.000 µs | none |" in report([pair.eager, pair.compiled], {}).markdown


_AXES: dict[str, Any] = {
    **{"what": ("attention", "model"), "passes": ("forward",), "dtype": ("bf16",), "d_model": (16,), "seq_len": (256,)},
    **{"size": ("tiny",), "context": (128,)},
}


@pytest.mark.slow
def test_a_run_on_a_cpu_compiles_attention_into_one_kernel(tmp_path: Path) -> None:
    command = ["--device", "cpu", "-o", str(tmp_path / "out")]
    command += ["--what", "attention", "--passes", "forward", "--seq-len", "64,4194304", "--steps", "5"]
    assert main.main(command, standalone_mode=False) == 0
    with (tmp_path / "out" / "compile_speedup.csv").open(newline="") as file:
        eager, compiled, too_large, _ = csv.DictReader(file)
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


# As in a row of an earlier run, with the words of the primitive separate.
_SOFTMAX = ("triton_per_fused_div_exp_prepare_softmax_online_sub_8", "div exp prepare softmax online sub")


def _softmax_row(launched: dict[str, int], made: tuple[str, str]) -> dict[str, Any]:
    return {
        **{"what": "model", "size": "small", "length": 256, "passes": "train", "dtype": "fp32", "batch": 4},
        **{"measure": "gpu-kernel", "kernels": 12, "kernel_ms": 0.1},
        "work": [
            {
                **{"phase": "forward", "name": made[0], "category": "reduction", "count": 11, "total_ns": 94_000},
                "fused": made[1].split(),
            }
        ],
        "launchers": [
            {"phase": "forward", "name": f"aten::{name}", "count": count, "total_ns": 1_000 * count}
            for name, count in launched.items()
        ],
    }


def _softmax_pair(launched: dict[str, int], made: tuple[str, str] = _SOFTMAX) -> Pair:
    return Pair(_softmax_row(launched, made), _softmax_row({}, made))


@pytest.mark.parametrize("operator", ["amax", "sum", "exp", "div"])
def test_the_softmax_primitive_contains_maximum_and_sum(operator: str) -> None:
    (fused,) = list_fused(_softmax_pair({operator: 12}), "forward")
    assert [kernel.count for kernel in fused.kernels] == [11]


def test_fill_is_found_in_a_kernel_of_zeros() -> None:
    (fused,) = list_fused(_softmax_pair({"fill_": 1}, ("triton_poi_fused_scatter_zeros_0", "scatter zeros")), "forward")
    assert (fused.operator, len(fused.kernels)) == ("fill", 1)
