"""Dtypes are observed, not recited, and what is said of LayerNorm follows from its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipes.autocast_dtypes import CELLS, compare, conclude, observe, report
from recipes.precision.layer_norm import layer_norm
from recipes.precision.operators import FLOAT32, KEEPS, LOWER, classify_operators


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {str(cell["dtype"]): {**cell, **observe(cell, "cpu"), "status": "ok"} for cell in CELLS}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_parts_of_a_step(rows: dict[str, dict[str, Any]], dtype: str) -> None:
    row = rows[dtype]
    low = ("fc1_output", "relu_output", "fc2_output", "logits", "logits_gradient")
    assert {row[part] for part in low} == {dtype}
    assert {row[part] for part in ("parameters", "loss", "parameter_gradients")} == {"float32"}


def test_without_autocast_all_is_float32(rows: dict[str, dict[str, Any]]) -> None:
    assert {entry["output"] for entry in rows["float32"]["operators"]} == {"float32"}


def test_operators_are_seen_below_autocast(rows: dict[str, dict[str, Any]]) -> None:
    seen = {(entry["phase"], entry["operator"]): entry for entry in rows["bfloat16"]["operators"]}
    assert seen["forward", "mm"] == {
        "phase": "forward", "operator": "mm", "inputs": "bfloat16", "output": "bfloat16", "count": 2
    }  # fmt: skip
    assert seen["backward", "mm"]["count"] == 3  # no gradient of the input is wanted
    assert seen["forward", "_log_softmax"]["inputs"] == "float32"


def test_operators_by_class() -> None:
    classes = {row["operator"]: row["runs_in"] for row in classify_operators("cpu", torch.bfloat16)}
    assert (classes["matmul"], classes["add"], classes["mse_loss"]) == (LOWER, KEEPS, FLOAT32)


def test_layer_norm_is_torchs() -> None:
    rows = torch.randn(4, 32, dtype=torch.float64)
    expected = torch.nn.functional.layer_norm(rows, (32,), eps=1e-5)
    for one_by_one in (False, True):
        torch.testing.assert_close(layer_norm(rows, 1e-5, one_by_one=one_by_one), expected)


def test_where_layer_norm_breaks(rows: dict[str, dict[str, Any]]) -> None:
    fp16, bf16, fp32 = (rows[name] for name in ("float16", "bfloat16", "float32"))
    # 256² = 65,536 lies beyond 65,504, the greatest float16.
    assert (fp16["square_overflows_from"], bf16["square_overflows_from"]) == (256, None)
    # A sum of ones stands still where the next whole number takes one bit more than there are: 11, 8, 24 bits.
    assert (fp16["ones_add_up_to"], bf16["ones_add_up_to"], fp32["ones_add_up_to"]) == (2**11, 2**8, 10_000)
    assert (fp16["epsilon_1e-8"], fp16["constant_row_with_epsilon_1e-8"]) == (0, False)
    assert bf16["constant_row_with_epsilon_1e-8"]
    # Every square overflows, so that 1 / root is 0 and so is the result.
    assert fp16["error_large"] == 1
    assert bf16["error_usual_summed_one_by_one"] > 10 * fp16["error_usual_summed_one_by_one"]


def test_the_conclusions_follow_the_numbers(rows: dict[str, dict[str, Any]]) -> None:
    assert (
        conclude(rows["float16"])[0]
        == "float16, the square: squares overflow from 256 on; LayerNorm of large data is off by 1."
    )
    assert "come to 256;" in conclude(rows["bfloat16"])[1]
    said = compare(rows["float16"], rows["bfloat16"])
    assert "the square is gone, a small epsilon survives" in said
    assert said.endswith("times as far off: these still want float32.")
    assert compare(rows["bfloat16"], rows["bfloat16"]).endswith("1 times as far off: these too are better.")


def test_the_report_shows_them(rows: dict[str, dict[str, Any]]) -> None:
    shown = report(list(rows.values()), {"device": "cpu"})
    assert "| ones_add_up_to | 2048 | 256 | 10000 |" in shown.markdown
    assert "- bfloat16, run in float32: cross_entropy, mse_loss." in shown.markdown
    assert set(shown.pictures) == {"layer_norm.png"}
