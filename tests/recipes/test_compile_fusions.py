"""What was fused into what: Inductor's own primitive, and operators that no kernel names."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.compilation.fusions import tell_fusions
from recipes.compilation.pairs import Pair, list_fused
from recipes.compilation.work import kernels_of

# As a row of an earlier run has it, the primitive's words one by one.
_SOFTMAX = ("triton_per_fused_div_exp_prepare_softmax_online_sub_8", "div exp prepare softmax online sub")


def _row(launched: dict[str, int], made: tuple[str, str]) -> dict[str, Any]:
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


def _pair(launched: dict[str, int], made: tuple[str, str] = _SOFTMAX) -> Pair:
    return Pair(_row(launched, made), _row({}, made))


def test_the_words_of_a_primitive_are_one() -> None:
    (kernel,) = kernels_of(_pair({}).compiled)
    assert kernel.fused == ("div", "exp", "prepare_softmax_online", "sub")


@pytest.mark.parametrize("operator", ["amax", "sum", "exp", "div"])
def test_maximum_and_sum_of_a_softmax_are_in_the_primitive(operator: str) -> None:
    (fused,) = list_fused(_pair({operator: 12}), "forward")
    assert [kernel.count for kernel in fused.kernels] == [11]


def test_zeros_are_filled() -> None:
    (fused,) = list_fused(_pair({"fill_": 1}, ("triton_poi_fused_scatter_zeros_0", "scatter zeros")), "forward")
    assert (fused.operator, len(fused.kernels)) == ("fill", 1)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("mm", "1 kernel, 1.000 µs fewer of 1 operator that no generated kernel names (mm)."),
        ("mm neg", "2 kernels, 2.000 µs fewer of 2 operators that no generated kernel names (mm, neg)."),
        ("a b c d e f", "6 kernels, 6.000 µs fewer of 6 operators that no generated kernel names (a, b, c, d, e, …)."),
    ],
)
def test_what_no_kernel_names_is_counted_and_cut_only_where_it_is_long(names: str, said: str) -> None:
    *_, table = tell_fusions([_pair(dict.fromkeys(names.split(), 1))])
    assert table.endswith(said)
