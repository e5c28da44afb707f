"""Kernels that are launched in parts: told where the counts of an H200 show it, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.compilation.pairs import Pair
from recipes.compilation.splits import tell_splits

# What one forward and backward pass of attention launched on an H200, by operator, at a short sequence.
_SHORT = {"bmm": 6, "div": 6, "sub": 1, "exp": 1, "max": 1, "sum": 3, "mul": 2, "add_": 2, "neg": 2}
_SHORT |= {"fill_": 1, "scatter_": 1, "copy_": 1}


def _pair(length: int, launched: dict[str, int], **changed: Any) -> Pair:
    row = {"what": "attention", "d_model": 16, "length": length, "passes": "forward-backward", "dtype": "fp32"}
    row |= {"batch": 8, "measure": "gpu-kernel", "kernels": sum(launched.values()), **changed}
    row["launchers"] = [
        {"phase": "backward", "name": f"aten::{name}", "count": count, "total_ns": 1}
        for name, count in launched.items()
    ]
    return Pair(row, {})


def _in_parts(parts: int) -> dict[str, int]:
    return {name: count * (1 if name in ("bmm", "copy_") else parts) for name, count in _SHORT.items()}


def test_a_score_matrix_of_8_gib_is_computed_in_four_parts() -> None:
    pairs = [_pair(length, _SHORT, d_model=d_model) for length in (1024, 8192) for d_model in (16, 128)]
    # 8 × 8192² × 4 bytes are 2³¹: the last item begins at 2³¹ - 4.
    assert list(tell_splits(pairs)) == []
    pairs += [_pair(16384, _in_parts(4), d_model=d_model) for d_model in (16, 64, 128)]
    (said,) = tell_splits(pairs)
    assert said.startswith(
        "Eager attention, forward-backward, fp32, of d_model 16 and 128 launches 87 kernels at sequence 16384 and 27 "
        "at 8192: a score matrix of 8 × 16384² = 2,147,483,648 elements is 8.000 GiB, "
    )
    assert (
        " it does in parts of at most 2 GiB, whose byte offsets fit a signed 32-bit integer, here 4. So it launches "
        "div 24 for 6, sub 4 for 1,"
    ) in said
    assert said.endswith("scatter 4 for 1; bmm and copy as many.")


@pytest.mark.parametrize(
    "changed",
    [
        {"launched": _SHORT},
        {"launched": {**_in_parts(4), "exp": 3}},
        {"launched": {**_in_parts(4), "clone": 1}},
        {"launched": _in_parts(4), "dtype": "bf16"},
        {"launched": _in_parts(4), "measure": "cpu-operator"},
    ],
)
def test_what_the_counts_do_not_show_is_not_said(changed: dict[str, Any]) -> None:
    assert list(tell_splits([_pair(1024, _SHORT), _pair(16384, **changed)])) == []


def test_half_as_many_bytes_are_half_as_many_parts() -> None:
    (said,) = tell_splits([_pair(1024, _SHORT, dtype="bf16"), _pair(16384, _in_parts(2), dtype="bf16")])
    assert "is 4.000 GiB" in said
    assert "here 2. So it launches div 12 for 6" in said


@pytest.mark.parametrize(("length", "dtype", "parts"), [(8193, "fp32", 2), (11586, "bf16", 2), (11585, "bf16", 1)])
def test_more_than_2_gib_are_halved(length: int, dtype: str, parts: int) -> None:
    """8192 in fp32 is 2 GiB, 11585 in bf16 a little less: 8 × 11585² × 2 = 2,147,395,600 bytes of 2,147,483,648."""
    said = list(tell_splits([_pair(1024, _SHORT, dtype=dtype), _pair(length, _in_parts(2), dtype=dtype)]))
    assert [f"here {parts}." in each for each in said] == [True] * (parts > 1)


def test_parts_of_exactly_2_gib_are_not_halved_again() -> None:
    """ATen asks that 1 + an item's greatest offset, here 2³¹ - 4, be a signed 32-bit integer: at most 2³¹ - 1."""
    told = [list(tell_splits([_pair(1024, _SHORT), _pair(16384, _in_parts(parts))])) for parts in (4, 8)]
    assert [len(said) for said in told] == [1, 0]
