"""The dtypes that autocast chooses, where LayerNorm breaks in one dtype, and sums of many small numbers by dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipes import mixed_precision_accumulation as accumulation
from recipes.autocast_dtypes import CELLS, observe
from recipes.precision import FLOAT32, KEEPS, LOWER, MIXED
from recipes.precision.observe import classify, classify_operators, layer_norm
from recipes.precision.report import limits_table

_EPSILONS = ("1e-5", "1e-8")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {str(cell["dtype"]): {**cell, **observe(cell, "cpu"), "status": "ok"} for cell in CELLS}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_computes_in_low_precision_and_keeps_parameters_and_loss_in_float32(
    rows: dict[str, dict[str, Any]], dtype: str
) -> None:
    row = rows[dtype]
    low = ("fc1_output", "relu_output", "fc2_output", "logits", "logits_gradient")
    assert {row[part] for part in low} == {dtype}
    assert {row[part] for part in ("parameters", "loss", "parameter_gradients")} == {"float32"}


def test_operators_are_seen_below_autocast(rows: dict[str, dict[str, Any]]) -> None:
    seen = {(entry["phase"], entry["operator"]): entry for entry in rows["bfloat16"]["operators"]}
    assert seen["forward", "mm"] == {
        "phase": "forward", "operator": "mm", "inputs": "bfloat16", "output": "bfloat16", "count": 2
    }  # fmt: skip
    assert seen["backward", "mm"]["count"] == 3  # no gradient of the input is wanted
    assert seen["forward", "_log_softmax"]["inputs"] == "float32"
    assert {entry["output"] for entry in rows["float32"]["operators"]} == {"float32"}, "without autocast"


def test_operators_are_classified_by_the_dtype_they_run_in() -> None:
    classes = {row["operator"]: row["runs_in"] for row in classify_operators("cpu", torch.bfloat16)}
    assert (classes["matmul"], classes["add"], classes["mse_loss"]) == (LOWER, KEEPS, FLOAT32)


def test_an_operator_of_several_dtypes_is_mixed() -> None:
    """What comes out is float32 for all three; of ReLU within, autocast leaves the dtype as it is."""

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(torch.relu(x), x)

    found = classify(mixed, 1, "cpu", torch.bfloat16)
    assert (found["runs_in"], found["float32"], found["low"]) == (MIXED, "float32", "float32")
    assert found["ran_low"] == [("relu", "bfloat16"), ("mse_loss", "float32")]
    assert found["ran_float32"] == [("relu", "float32"), ("mse_loss", "float32")]
    # A cast and a view of its input come before the product, and compute nothing.
    einsum = classify(lambda x: torch.einsum("ij,jk->ik", x.T, x), 1, "cpu", torch.bfloat16)
    assert (einsum["runs_in"], einsum["ran_float32"]) == (LOWER, [("bmm", "bfloat16")])


def test_our_layer_norm_equals_torchs() -> None:
    rows = torch.randn(4, 32, dtype=torch.float64)
    expected = torch.nn.functional.layer_norm(rows, (32,), eps=1e-5)
    for one_by_one in (False, True):
        torch.testing.assert_close(layer_norm(rows, 1e-5, one_by_one=one_by_one), expected)


def test_layer_norm_breaks_by_overflow_sum_and_epsilon(rows: dict[str, dict[str, Any]]) -> None:
    fp16, bf16, fp32 = (rows[name] for name in ("float16", "bfloat16", "float32"))
    # 256² = 65,536 lies beyond 65,504, the greatest float16.
    assert (fp16["square_overflows_from"], bf16["square_overflows_from"]) == (256, None)
    # A sum of ones stands still where the next whole number takes one bit more than there are: 11, 8, 24 bits.
    assert (fp16["ones_add_up_to"], bf16["ones_add_up_to"], fp32["ones_add_up_to"]) == (2**11, 2**8, 10_000)
    assert (fp16["epsilon_1e-8"], fp16["constant_row_with_epsilon_1e-8"]) == (0, False)
    assert bf16["constant_row_with_epsilon_1e-8"]
    # Every row has a square that overflows, so that 1 / root is 0 and so is the result.
    assert (fp16["error_large"], fp16["zero_outputs_large"], fp16["error_large_summed_one_by_one"]) == (1, 1, None)
    assert bf16["error_usual_summed_one_by_one"] > 10 * fp16["error_usual_summed_one_by_one"]


def test_squares_that_become_0_are_counted(
    rows: dict[str, dict[str, Any]],
) -> None:
    fp16, bf16 = rows["float16"], rows["bfloat16"]
    # Below 2⁻²⁵, half of the least float16, a square is 0: |x| < 1.73 of × 1e-4, 0.173 of × 1e-3.
    assert fp16["squares_lost_small"] == pytest.approx(0.916, abs=0.005)
    assert fp16["squares_lost_near_epsilon"] == pytest.approx(0.137, abs=0.005)
    assert bf16["squares_lost_small"] == bf16["squares_lost_near_epsilon"] == 0
    assert fp16["error_near_epsilon"] > 2 * fp16["error_usual"] > 2 * fp16["error_small"]


@pytest.mark.parametrize(
    ("dtype", "larger", "smaller"),
    [
        ("float16", "1.00136e-05", "0"),
        ("bfloat16", "1.00136e-05", "1.00117e-08"),
        ("float32", "9.9999997e-06", "9.9999999e-09"),  # six digits would say 1e-05 and 1e-08
        ("float64", "1e-05", "1e-08"),
    ],
)
def test_an_epsilon_is_shown_as_it_is_stored(
    rows: dict[str, dict[str, Any]], dtype: str, larger: str, smaller: str
) -> None:
    stored = {f"epsilon_{text}": torch.tensor(float(text), dtype=getattr(torch, dtype)).item() for text in _EPSILONS}
    row = {**rows["float32"], "dtype": dtype, **stored}
    lines = limits_table([row]).lines
    assert ["1e-5 is stored as", larger] in lines
    assert ["1e-8 is stored as", smaller] in lines


# -- sums of many small numbers ------------------------------------------------------------------------------------


SUMS = {
    "1": 10.000133514404297,
    "2": 9.953125,
    "3": 10.00213623046875,
    "4": 10.00213623046875,
    "5": 4.0,
    "6": 10.009765625,
    "7a": 10.000411033630371,
    "7b": 4.0,
    "7c": 0.5,
}


@pytest.fixture(scope="module")
def sums() -> list[dict[str, object]]:
    made: list[dict[str, object]] = [
        {**cell, **accumulation.accumulate(cell, "cpu"), "status": "ok"} for cell in accumulation.CELLS
    ]
    accumulation.add_error(made)
    return made


def test_the_sums_are_known_to_the_last_digit(sums: list[dict[str, object]]) -> None:
    assert {row["case"]: row["result"] for row in sums} == SUMS


def test_the_two_parts_of_an_error_add_up_to_it_and_a_cell_that_did_not_run_has_none(
    sums: list[dict[str, object]],
) -> None:
    for row in sums:
        parts = float(str(row["representation_error"])) + float(str(row["addition_error"]))
        assert parts == pytest.approx(row["error"], abs=1e-12)
    absent: dict[str, object] = {**accumulation.CELLS[0], "status": "not run"}
    accumulation.add_error([absent])
    assert absent["error"] is None


def test_a_sum_stands_still_where_half_its_last_digit_is_reached(sums: list[dict[str, object]]) -> None:
    """bfloat16 has 8 significant bits: at 4 its step is 2⁻⁵, and 0.01 is less than half of that; at 3.98 it is not."""
    bf16 = next(row for row in sums if row["case"] == "5")
    assert float(str(bf16["stored_addend"])) < 2**-5 / 2
    assert float(str(bf16["stored_addend"])) > 2**-6 / 2
