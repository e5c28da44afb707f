"""On a GPU: replayed peaks against the allocator's own, from the same process, to the byte.

Each case records the memory of a built-in model and analyses what it left.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from profkit import read_snapshot
from profkit.allocator.heap import Limit
from profkit.allocator.replay import History, replay_history
from profkit.allocator.requests import requests_of
from profkit.allocator.simulate import check_identity, predict, simulate
from profkit.launch.passes import model_passes
from profkit.launch.record import build_environment
from profkit.models import TrainingOptions
from profkit.run.recording import MemoryOptions
from profkit.snapshot.reader import read_snapshot as read_columns

pytestmark = pytest.mark.gpu

CASES = list(
    itertools.product(
        ("small", "xl"), ("fp32", "bf16"), ("forward", "train"), ("none", "default"), ("", "expandable_segments:True")
    )
)


def _case_id(case: tuple[str, ...]) -> str:
    model, dtype, passes, compiled, settings = case
    return "-".join(
        (model, dtype, passes, "eager" if compiled == "none" else "compiled", "expandable" * bool(settings))
    )


def _record(run: Path, options: TrainingOptions, settings: str) -> None:
    """Make the pass over the built-in model that records memory."""
    memory = model_passes(options, "kineto", MemoryOptions())[0]
    order = replace(memory.order, run=str(run))
    environment = build_environment(os.environ, order)
    if settings:
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
    command = [word.replace("{run}", str(run)) for word in memory.argv]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=500)
    (run / "manifest.json").write_text('{"status": "complete"}')


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_the_replay_is_exact(tmp_path: Path, case: tuple[str, ...]) -> None:
    model, dtype, passes, compiled, settings = case
    options = TrainingOptions(
        model, warmup_steps=1, steps=2, dtype=dtype, passes=passes, compile_mode=compiled, device="cuda"
    )
    _record(tmp_path, options, settings)
    result = read_snapshot(tmp_path).memory()
    check = result.allocator_check
    assert result.totals.exact
    assert check.agrees, check
    assert sum(row.bytes for row in result.composition.by_category) == result.totals.allocated_peak_bytes


# -- compiled code ---------------------------------------------------------------------------------------------------


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


# -- random programs under many settings -----------------------------------------------------------------------------
# Each runs in a process of its own, because the settings are read once, and dumps the snapshot and torch's statistics.
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "roundup": "roundup_power2_divisions:4",
    "roundup by interval": "roundup_power2_divisions:[1:2,4:8,16:1,>:4]",
    "max split": "max_split_size_mb:64",
    "both": "roundup_power2_divisions:4,max_split_size_mb:64",
    "collecting": "garbage_collection_threshold:0.6",
}
RECORDINGS = ("whole", "midrun", "wrapped")

PROGRAM = r"""
import json, random, sys
import torch
folder, recording, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
fraction, is_simple = float(sys.argv[4]), sys.argv[5] == "simple"
dice = random.Random(seed)
torch.cuda.init()
torch.cuda.set_per_process_memory_fraction(fraction)
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
live, graphs = [], []

def start():
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=400 if recording == "wrapped" else 10**6)

def size():
    kind = dice.random()
    if kind < 0.3: return dice.randrange(1, 3000)
    if kind < 0.5: return dice.randrange(1, 2**20 + 600)
    if kind < 0.8: return dice.randrange(2**20 - 600, 12 * 2**20)
    return dice.randrange(9 * 2**20, 120 * 2**20)

def act():
    kind = dice.random()
    if kind < 0.5 or not live:
        with torch.cuda.stream(dice.choice([main, main, side])):
            live.append(torch.empty(size(), dtype=torch.uint8, device="cuda"))
    elif kind < 0.94:
        tensor = live.pop(dice.randrange(len(live)))
        if dice.random() < 0.2:
            tensor.record_stream(side)
        del tensor
    elif is_simple:
        pass
    elif kind < 0.97:
        torch.cuda.empty_cache()
    elif kind < 0.98 and len(graphs) < 3:
        graph, source = torch.cuda.CUDAGraph(), torch.ones(2**20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            kept = (source * 2).relu() + source
        graphs.append((graph, source, kept))
    elif graphs:
        graphs.pop()

try:
    for number in range(900):
        if number == {"whole": 0, "midrun": 300, "wrapped": 0}[recording]:
            start()
        act()
except torch.OutOfMemoryError:
    pass
torch.cuda.synchronize()
stats = torch.cuda.memory_stats()
torch.cuda.memory._dump_snapshot(folder + "/snapshot.pickle")
names = [f"{kind}_bytes.all.{what}" for kind in ("allocated", "requested", "reserved") for what in ("peak", "current")]
total = torch.cuda.get_device_properties(0).total_memory
json.dump({**{name: stats[name] for name in names}, "limit": int(fraction * total)}, open(folder + "/stats.json", "w"))
"""


def run_program(folder: Path, setting: str, recording: str, seed: int, fraction: float, kind: str) -> History:
    """Run one program and return its replayed history; torch's statistics lie in ``stats.json``."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS[setting]}
    command = [sys.executable, "-c", PROGRAM, str(folder), recording, str(seed), str(fraction), kind]
    subprocess.run(command, env=environment, check=True)
    snapshot = read_columns(folder / "snapshot.pickle")
    return replay_history(snapshot.devices[0], snapshot.settings)


def replay_program(folder: Path, setting: str, recording: str, seed: int) -> tuple[str, bool]:
    """Run one program and return what the replay says of it, and whether it agrees with torch."""
    history = run_program(folder, setting, recording, seed, 0.03, "all")
    stats = json.loads((folder / "stats.json").read_text())
    curves = history.curves
    peaks = {"allocated": history.allocated_peak_bytes}
    peaks |= {"requested": int(curves.requested.max()), "reserved": int(curves.reserved.max())}
    ends = {kind: int(getattr(curves, kind)[-1]) for kind in peaks}
    agrees = not history.contradictions
    for kind in peaks:
        agrees &= ends[kind] == stats[f"{kind}_bytes.all.current"]
        if recording != "wrapped" and (kind != "allocated" or history.bounds is None):
            agrees &= peaks[kind] == stats[f"{kind}_bytes.all.peak"]
    low, high = history.bounds or (peaks["allocated"], peaks["allocated"])
    if recording != "wrapped":
        agrees &= low <= stats["allocated_bytes.all.peak"] <= (high or 0)
    proof = "exact" if history.bounds is None else f"within {high - low if high else None} B"
    told = f"{len(history.device.events):>5} events, {proof}, {peaks}, torch {stats}, {history.contradictions}"
    return told, agrees


@pytest.mark.parametrize("recording", RECORDINGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_replay_is_what_torch_says(tmp_path: Path, setting: str, recording: str) -> None:
    for seed in range(3):
        told, agrees = replay_program(tmp_path, setting, recording, seed)
        assert agrees, told


def simulate_program(folder: Path, setting: str, recording: str, seed: int) -> tuple[str, bool]:
    """Run one program and return how many addresses the simulator chose otherwise than torch, and whether none."""
    history = run_program(folder, setting, recording, seed, 0.03, "simple")
    if history.bounds is not None:
        return "the replay is not exact", True
    identity = check_identity(history, requests_of(history))
    return str(identity), identity.exact


def predict_program(folder: Path, before: str, after: str, seed: int) -> tuple[str, bool]:
    """Run one program under two settings; return the second's peaks as predicted from the first, and as torch says."""
    one = run_program(folder, before, "whole", seed, 0.5, "simple")
    settings = run_program(folder, after, "whole", seed, 0.5, "simple").settings
    stats = json.loads((folder / "stats.json").read_text())
    found = predict(requests_of(one), settings)
    agrees = True
    for kind in ("allocated", "reserved"):
        low, high = getattr(found, f"{kind}_range_bytes")
        peak = stats[f"{kind}_bytes.all.peak"]
        # several draws are a sample of the addresses that CUDA may choose
        agrees &= low == peak if found.exact else abs(peak - (low + high) / 2) <= (high - low) / 2 + 0.01 * peak
    ranges = f"{found.allocated_range_bytes}, {found.reserved_range_bytes}, {'exact' if found.exact else 'a range'}"
    return f"predicted {ranges}, torch {stats}", agrees


def fail_program(folder: Path, setting: str, seed: int) -> tuple[str, bool]:
    """Run one program without and with a limit; return after how many requests it fails, predicted and in truth."""
    requests = requests_of(run_program(folder, setting, "whole", seed, 0.5, "simple"))
    limited = run_program(folder, setting, "whole", seed, 0.006, "simple")
    stats = json.loads((folder / "stats.json").read_text())
    found = simulate(requests, limited.settings, limit=Limit(stats["limit"]))
    predicted = len(requests) if found.failed is None else found.failed.index
    told = f"predicted after {predicted} requests, in truth after {len(limited.replay)} of {len(requests)}"
    return told, predicted == len(limited.replay)


@pytest.mark.parametrize("recording", RECORDINGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_simulator_chooses_the_addresses_that_torch_chose(tmp_path: Path, setting: str, recording: str) -> None:
    told, agrees = simulate_program(tmp_path, setting, recording, seed=4)
    assert agrees, told


@pytest.mark.parametrize("after", ["default", "expandable", "roundup", "max split"])
@pytest.mark.parametrize("before", ["default", "expandable"])
def test_the_peaks_under_other_settings_are_those_that_torch_has(tmp_path: Path, before: str, after: str) -> None:
    told, agrees = predict_program(tmp_path, before, after, seed=5)
    assert agrees, told


@pytest.mark.parametrize("setting", ["default", "expandable", "max split"])
def test_the_request_that_fails_under_a_limit_is_the_predicted_one(tmp_path: Path, setting: str) -> None:
    told, agrees = fail_program(tmp_path, setting, seed=6)
    assert agrees, told
