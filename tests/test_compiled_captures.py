"""A training step on an H200, eager, compiled and replayed as CUDA graphs: the same products in the same modules."""

from __future__ import annotations

from collections import Counter

import pytest

from profkit import read_trace
from profkit.analysis.kernels.categories import categorize
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.tree.modules import modules_of_ranges
from tests.conftest import ROOT

BLOCKS = ROOT / "traces" / "blocks"
RUNS = ("eager", "compiled", "reduce-overhead")
PASSES = ("forward", "backward")


def _open(run: str) -> OpenedTrace:
    return read_trace(BLOCKS / run)


def _paths(opened: OpenedTrace) -> Counter[tuple[str, ...]]:
    """Return how many kernels lie under each path of ranges, by climbing from the innermost of each kernel."""
    attribution = opened.attribution
    names, ranges, parent = attribution.trace.names, attribution.trace.ranges, attribution.parent
    found: Counter[tuple[str, ...]] = Counter()
    for innermost in attribution.work.innermost.tolist():
        path: list[str] = []
        around = innermost
        while around >= 0:
            name = names[ranges.name[around]]
            # The replayed run was recorded when a compiled model still had two ranges at its first capture.
            path += [name] if path[-1:] != [name] else []
            around = parent[around]
        found[tuple(reversed(path[:-1]))] += 1  # without the step
    return found


def _products(opened: OpenedTrace) -> Counter[tuple[str, str]]:
    """Return the time of the matrix products and fused attentions of each module."""
    attribution = opened.attribution
    work, names = attribution.trace.work, attribution.trace.names
    modules = modules_of_ranges(attribution)
    kinds = {at: categorize(names[at], "gpu-kernel").name for at in set(work.name.tolist())}
    found: Counter[tuple[str, str]] = Counter()
    for row, innermost in enumerate(attribution.work.innermost.tolist()):
        kind = kinds[int(work.name[row])]
        if kind in ("gemm", "attention"):
            found[modules[innermost], kind] += int(work.duration_ns[row])
    return found


@pytest.mark.parametrize("run", RUNS[1:])
def test_compiled_or_replayed_each_module_makes_the_products_that_it_makes_eagerly(run: str) -> None:
    eager, other = _products(_open("eager")), _products(_open(run))
    assert other.keys() == eager.keys()
    for module, time_ns in eager.items():
        assert other[module] == pytest.approx(time_ns, rel=0.15), module


def test_a_replay_has_the_kernels_of_the_compiled_run_under_the_same_ranges() -> None:
    """Before a replay its inputs are copied to where the graph reads them: once a step and pass, for no module."""
    compiled, replayed = (_paths(_open(run)) for run in RUNS[1:])
    assert any(path[-1].startswith("shared: ") for path in compiled)
    assert replayed - compiled == {("forward", "model"): 4, ("backward", "model"): 4}
    assert not compiled - replayed


@pytest.mark.parametrize("run", RUNS)
def test_nearly_all_time_of_both_passes_lies_under_a_module_or_a_shared_line(run: str) -> None:
    opened = _open(run)
    rows = opened.kernels(by="module").kernels
    assert sum(row.total_ns for row in rows) == opened.kernels().total_ns
    bare = sum(row.total_ns for row in rows if row.name in {f"(no module: {name})" for name in PASSES})
    assert bare <= 0.02 * sum(opened.kernels(name).total_ns for name in PASSES)


@pytest.mark.parametrize("run", RUNS[1:])
def test_what_a_fused_kernel_computes_is_known_by_its_operators_and_lines(run: str) -> None:
    sources = _open(run).kernels(explain=True).sources
    assert sources is not None
    assert all(one.operators and one.lines for one in sources if not one.is_extern)
