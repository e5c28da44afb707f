"""FLOPs of compiled code on a GPU: each module does the products of the eager run, also in replayed CUDA graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from profkit.run.work import RunWork, read_work  # noqa: E402
from tests.in_process import check_profkit  # noqa: E402

pytestmark = pytest.mark.gpu

_SCRIPT = """
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


def test_every_way_to_compile_does_the_same_products_in_each_module(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    (tmp_path / "train.py").write_text(_SCRIPT)
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
