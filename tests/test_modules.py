"""Modules in the tree of ranges: what is one, what its work counts for, and the kernels that its times are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.tree.modules import ModuleTree, Place, read_place, time_kernels_by_module, time_modules
from tests.nsys_builder import NsysBuilder
from tests.test_one_figure import TRACES

pytestmark = pytest.mark.usefixtures("read_once")

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


def test_what_runs_outside_the_steps_counts_for_no_module(tmp_path: Path) -> None:
    """No module takes more than the steps that it is a share of."""
    builder = NsysBuilder()
    builder.range("step 0", 0, 500)
    for start, duration in ((100, 10), (600, 7)):
        builder.range("forward", start, start + 300)
        builder.range("head", start + 1, start + 299)
        builder.kernel(start + 10, duration, name="gemm")
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    (head,) = time_modules(opened.attribution)
    kernels = time_kernels_by_module(opened.attribution, {"head"})
    assert (head.module, head.total_ns, kernels["head"]["gemm"].total_ns) == ("head", 10, 10)


def place(path: str) -> Place:
    """Return the place of a path; a part that begins with ``NCCL:`` is a range of that domain."""
    parts = (part.rpartition(":") for part in path.split("/"))
    return read_place([(name, domain) for domain, _, name in parts])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("step 0/forward/model/h.*", Place("forward", ("model", "h.*"))),
        ("step 0/forward/model/NCCL:ncclAllReduce", Place("forward", ("model",))),
        ("forward/replica/model/model", Place("forward", ("model",))),
        ("backward/h.*/recompute/h.*/h.*.mlp", Place("backward", ("h.*", "h.*.mlp"), is_again=True)),
        ("optimizer/AdamW", Place("optimizer")),
        ("forward/model/compiling f/h.0", Place("compiling")),
        ("step 0/elsewhere", Place(None)),
    ],
)
def test_a_path_lies_in_a_phase_and_in_modules(path: str, expected: Place) -> None:
    assert place(path) == expected


def test_work_of_the_backward_pass_counts_for_modules_that_have_no_range_there() -> None:
    """A wrapper has no hook in the backward pass; a part computed again has no block around it."""
    tree = ModuleTree(
        map(place, ("forward/model/wrapper/h.*/h.*.mlp", "backward/model/h.*", "backward/recompute/h.*.mlp"))
    )
    assert tree.parent == {"model": None, "wrapper": "model", "h.*": "wrapper", "h.*.mlp": "h.*"}
    assert tree.modules_around(place("backward/model/h.*")) == ["model", "wrapper", "h.*"]
    assert tree.modules_around(place("backward/recompute/h.*.mlp")) == ["model", "wrapper", "h.*", "h.*.mlp"]


def test_modules_around_a_part_elsewhere_hold_nothing_of_what_it_does_alone() -> None:
    """A norm stands in each layer and at the end of the model: what it does at the end is no layer's."""
    tree = ModuleTree(map(place, ("forward/layer */norm", "forward/norm", "backward/norm")))
    assert tree.modules_around(place("forward/norm")) == ["norm"]
    assert tree.modules_around(place("backward/norm")) == ["norm"]


def test_a_module_of_two_models_has_one_parent_and_the_times_of_both() -> None:
    paths = ("forward/generator/main.*", "forward/discriminator/main.*", "backward/discriminator/main.*")
    tree = ModuleTree(map(place, paths))
    assert tree.parent["main.*"] == "discriminator"
    assert tree.modules_around(place("forward/generator/main.*")) == ["generator", "main.*"]
    assert ModuleTree(map(place, paths[::-1])).parent == tree.parent


def test_ranges_that_a_pass_nests_otherwise_do_not_move_a_module() -> None:
    """A hook's range may stay open in the backward pass while another block begins."""
    paths = (
        "forward/blocks.*/blocks.*.ln",
        "forward/blocks.*/blocks.*.mlp",
        "backward/blocks.*/blocks.*.mlp/blocks.*.ln",
    )
    assert ModuleTree(map(place, paths)).parent["blocks.*.ln"] == "blocks.*"


def test_a_wrapper_takes_what_it_holds_and_nothing_by_itself(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("step 0", 0, 1_000)
    for name, start, end in (
        ("forward", 1, 400),
        ("model", 2, 399),
        ("wrapper", 3, 398),
        ("h.0", 4, 200),
        ("h.1", 201, 397),
    ):
        builder.range(name, start, end)
    for name, start, end in (("backward", 500, 900), ("model", 501, 899), ("h.1", 502, 600), ("h.0", 601, 898)):
        builder.range(name, start, end)
    for launch, duration in ((10, 3), (210, 4), (550, 5), (650, 6)):
        builder.kernel(launch, duration)
    builder.range("optimizer", 910, 990)
    builder.range("AdamW", 911, 989)
    builder.kernel(950, 7)
    times = {row.module: row for row in time_modules(read_trace(builder.write(tmp_path / "t.sqlite")).attribution)}
    assert {name: (row.forward_ns, row.backward_ns, row.itself.total_ns) for name, row in times.items()} == {
        "model": (7, 11, 0),
        "wrapper": (7, 11, 0),
        "h.*": (7, 11, 18),
    }
    assert (times["h.*"].parent, times["h.*"].around, times["h.*"].number) == ("wrapper", ("model", "wrapper"), 2)
