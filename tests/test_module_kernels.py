"""What each module takes, kernel by kernel: on every capture the kernels of a module add up to its times."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.tree.modules import time_kernels_by_module, time_modules
from tests.nsys_builder import NsysBuilder
from tests.test_one_figure import TRACES

PARTS = ("forward_ns", "backward_ns", "recompute_ns", "inference_ns")


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_the_kernels_of_every_module_add_up_to_its_times(path: Path) -> None:
    opened = read_trace(path)
    if not len(opened.trace.work):
        pytest.skip("no kernels to place")
    times = time_modules(opened.attribution)
    found = time_kernels_by_module(opened.attribution, {one.module for one in times})
    for one in times:
        kernels = found.get(one.module, {}).values()
        assert [sum(getattr(kernel, part) for kernel in kernels) for part in PARTS] == [
            getattr(one, part) for part in PARTS
        ]
        assert all(kernel.count > 0 for kernel in kernels)


def test_what_is_computed_again_stands_apart_and_counts_once(tmp_path: Path) -> None:
    """Two checkpoints, one in the other: the block's backward pass holds 10 ns of its own, and 20 + 5 again."""
    builder = NsysBuilder()
    builder.range("step 0", 0, 1_000)
    for name, start, end in (
        ("backward", 1, 999),
        ("h.0", 3, 997),
        ("recompute", 100, 500),
        ("h.0", 101, 499),
        ("recompute", 300, 400),
        ("h.0.mlp", 301, 399),
    ):
        builder.range(name, start, end)
    for launch, duration, name in ((50, 10, "gemm"), (150, 20, "gelu"), (350, 5, "gelu")):
        builder.kernel(launch, duration, name=name)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    found = time_kernels_by_module(opened.attribution, {"h.0", "h.0.mlp"})
    assert {name: (one.backward_ns, one.recompute_ns, one.count) for name, one in found["h.0"].items()} == {
        "gemm": (10, 0, 1),
        "gelu": (0, 25, 2),
    }
    assert {name: (one.recompute_ns, one.count) for name, one in found["h.0.mlp"].items()} == {"gelu": (5, 1)}
