"""On a GPU: who holds the memory of compiled code at the peak, against the names in the running code's own frame."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from profkit import read_snapshot

pytestmark = pytest.mark.gpu

SCRIPT = """
import json
import sys

import torch
from torch import nn
from torch._inductor.codecache import PyCodeCache

best = {"allocated": 0}


def traced(path, call):
    def line(frame, event, _):
        now = torch.cuda.memory_allocated()
        if event == "line" and now > best["allocated"]:
            values = frame.f_locals.items()
            held = {name: one.untyped_storage().data_ptr() for name, one in values if isinstance(one, torch.Tensor)}
            best.update(allocated=now, held=held)
        return line

    def around(*args):
        before = sys.gettrace()
        sys.settrace(lambda frame, event, _: line if frame.f_code.co_filename == path else None)
        try:
            return call(*args)
        finally:
            sys.settrace(before)

    return around


plain = PyCodeCache.load_by_key_path.__func__


def load(cls, key, path, *args, **kwargs):
    module = plain(cls, key, path, *args, **kwargs)
    if hasattr(module, "call"):
        module.call = traced(path, module.call)
    return module


PyCodeCache.load_by_key_path = classmethod(load)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(512), nn.MultiheadAttention(512, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.h = nn.Embedding(16000, 512), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(512, 16000)

    def forward(self, tokens):
        x = self.emb(tokens)
        for block in self.h:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


model = Model().cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.randint(0, 16000, (8, 512), device="cuda")
for _ in range(8):
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with open(sys.argv[1], "w") as file:
    json.dump(best, file)
"""


def test_each_block_at_the_peak_is_held_by_the_buffer_that_the_running_code_has_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "profkit", "run", "--memory-only", "--warmup", "3", "--steps", "3", "-o", "run"]
    subprocess.run([*command, "--", sys.executable, "train.py", "held.json"], check=True, cwd=tmp_path, timeout=300)
    truth = json.loads((tmp_path / "held.json").read_text())
    opened = read_snapshot(tmp_path / "run")
    memory, result = opened.device(), opened.memory()
    assert result.totals.allocated_peak_bytes == truth["allocated"], "the peak lies within compiled code"
    at, addresses = result.composition, memory.history.replay.address
    rows = {int(addresses[row]): row for row in memory.live_rows(at.moment)}
    mine = {name: rows[address] for name, address in truth["held"].items() if name.startswith("buf")}
    assert len(mine) > 2
    for name, row in mine.items():
        held = memory.generated.held(row, at.moment)
        assert held is not None
        assert name in held.buffers
    unknown = at.evidence["none"] + sum(row.bytes for row in at.by_module if row.name == "(no module known)")
    assert unknown == 0
    modules = {row.name for row in at.by_module}
    assert {"h.0.mlp.0", "h.2.mlp.2", "head"} <= modules
