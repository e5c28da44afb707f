"""A model that runs eagerly and compiled, recorded on the CPU: both runs show the same modules."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.tree.range_tree import build_nodes
from profkit.names import PHASES, is_shared, sharing_modules
from profkit.run.directory import Run
from profkit.run.work import (
    RunWork,
    read_work,
)
from profkit.trace.kineto import read_kineto
from tests.forked_scripts import Forks
from tests.in_process import check_profkit, printed
from tests.test_compiled_ranges import rows_of, tree_launch_by_launch

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from profkit import annotate
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    @annotate("attention")
    def forward(self, x):
        q, k, v = self.qkv(x).split(32, 2)
        return self.proj(q * k + v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(32), Attention()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        x = x + self.attn(self.ln(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.add_module("the head", nn.Linear(32, 8))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return getattr(self, "the head")(x).mean()


torch.manual_seed(0)
model = Model()
called = torch.compile(model) if sys.argv[1] == "compiled" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(2, 16, 32)
for _ in range(6):
    loss = called(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with FlopCounterMode(display=False) as counter:
    model(batch).backward()
print("counted", counter.get_total_flops())
"""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Path]:
    """Both runs, in a folder with what they printed."""
    folder = tmp_path_factory.mktemp("trees")
    (folder / "train.py").write_text(SCRIPT)
    for kind in ("eager", "compiled"):
        words = ("--warmup=2", "--steps=2", "--flops", "-o", kind, "--", sys.executable, "train.py", kind)
        done = forks.check_profkit("run", *words, cwd=folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"))
        (folder / f"{kind}.txt").write_text(done.stdout)
    return {kind: folder / kind for kind in ("eager", "compiled")}


def modules_of(run: Path) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Return the paths of the modules with work in each phase, and the same of the lines that modules share."""
    own, shared = set(), set()
    for row in read_trace(run).ranges(numbered=True).ranges:
        parts = tuple(row.path.split("/"))
        at = next((number for number, part in enumerate(parts) if part in PHASES[:3]), None)
        if at is not None and row.kernel_count:
            (shared if is_shared(parts[-1]) else own).add(parts[at:])
    return own, shared


def products(run: Path) -> Counter[tuple[str, ...]]:
    """Return how many matrix products ran in each place."""
    opened = read_trace(run)
    trace, nodes = opened.trace, build_nodes(opened.attribution, numbered=True)
    names = nodes.names_above()
    places = opened.attribution.work.innermost
    return Counter(
        names[nodes.of_range[place]]
        for place, name in zip(places.tolist(), trace.work.name.tolist(), strict=True)
        if trace.names[name] in PRODUCTS
    )


def test_a_decorated_forward_has_its_range_in_both(runs: dict[str, Path]) -> None:
    for run in runs.values():
        own, _ = modules_of(run)
        for phase in ("forward", "backward"):
            assert (phase, "model", "h.0", "h.0.attn", "attention", "h.0.attn.qkv") in own


def test_a_compiled_run_has_the_modules_of_the_eager_one(runs: dict[str, Path]) -> None:
    eager, _ = modules_of(runs["eager"])
    compiled, shared = modules_of(runs["compiled"])
    assert compiled <= eager
    assert all(line[:-1] in eager for line in shared)
    for missing in eager - compiled:
        sharing = [module for line in shared if line[0] == missing[0] for module in sharing_modules(line[-1])]
        assert any(module == missing[-1] or module.startswith(f"{missing[-1]}.") for module in sharing), missing


def test_each_module_of_a_compiled_model_does_the_counted_products_of_the_eager_one(runs: dict[str, Path]) -> None:
    works = [read_work(run / "work.json") for run in runs.values()]
    eager, compiled = (
        {one.path: sum(one.flops_of(one.instances).values()) for one in work.ranges if one.flops} for work in works
    )
    assert compiled == eager
    printed = [run.with_suffix(".txt").read_text() for run in runs.values()]
    assert all(f"counted {eager[()]}\n" in text for text in printed)
    assert "compiled code" not in works[1].missing


def test_the_tree_of_a_recording_equals_one_made_launch_by_launch(runs: dict[str, Path]) -> None:
    trace = read_kineto(Run(runs["compiled"]).find_trace())
    expected = tree_launch_by_launch(trace)
    found = rows_of(runs["compiled"])
    assert {path: time for path, (time, _) in found.items()} == {path: time for path, (time, _) in expected.items()}


def test_explain_leads_to_the_lines_of_the_script(runs: dict[str, Path]) -> None:
    sources = read_trace(runs["compiled"]).kernels(explain=True).sources
    assert sources
    assert all(one.launch is not None for one in sources)
    gelu = [one for one in sources if one.operators and "aten.erf" in one.operators and not one.is_extern]
    assert gelu
    (product, *_) = (one for one in sources if one.modules == ("h.*.attn.qkv",) and one.kernel == "aten::addmm")
    assert product.is_extern
    (line,) = product.lines or ()
    number = 1 + SCRIPT.splitlines().index(next(one for one in SCRIPT.splitlines() if "self.qkv(x)" in one))
    assert f"train.py:{number}" in line
    assert printed("kernels", runs["compiled"], "--explain")["sources"]


# -- on a GPU --------------------------------------------------------------------------------------------------------


ON_GPU = """
import sys
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        query, key, value = (one.unflatten(-1, (4, 16)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


model = nn.Sequential(nn.Linear(64, 64), Block(), Block(), nn.Linear(64, 8)).cuda()
called = model if sys.argv[1] == "eager" else torch.compile(model, mode=sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(8):
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast("cuda", torch.bfloat16):
        loss = called(torch.randn(4, 32, 64, device="cuda")).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _flops(work: RunWork) -> dict[tuple[str, ...], int]:
    return {one.path: sum(one.flops_of(one.instances).values()) for one in work.ranges if one.flops}


@pytest.mark.gpu
def test_every_way_to_compile_does_the_same_products_in_each_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_GPU)
    works = {}
    for mode in ("eager", "default", "reduce-overhead"):
        command = ("run", "-o", mode, "--flops", "--warmup=6", "--steps=1", "--", sys.executable, "train.py", mode)
        check_profkit(*command, cwd=tmp_path)
        works[mode] = read_work(tmp_path / mode / "work.json")
        assert "compiled code" not in works[mode].missing
    found = {mode: _flops(work) for mode, work in works.items()}
    assert found["default"] == found["eager"]
    assert found["reduce-overhead"] == found["eager"]
    assert {mode: work.model_flops for mode, work in works.items()} == dict.fromkeys(works, works["eager"].model_flops)
