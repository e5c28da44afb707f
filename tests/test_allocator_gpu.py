"""The replay and the simulator against the real allocator: random programs under many settings, on a GPU.

Each program runs in a process of its own, because the settings are read once. It allocates and frees at random on two
streams, with tensors used across streams, empties the cache, captures a CUDA graph into a private pool, and records
from its start, from its midst, or into a buffer that wraps; then it dumps the snapshot and torch's own statistics.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from profkit.allocator.heap import Limit
from profkit.allocator.replay import History, replay_history
from profkit.allocator.requests import requests_of
from profkit.allocator.simulate import check_identity, predict, simulate
from profkit.snapshot.reader import read_snapshot

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
    snapshot = read_snapshot(folder / "snapshot.pickle")
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("recording", RECORDINGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_simulator_chooses_the_addresses_that_torch_chose(tmp_path: Path, setting: str, recording: str) -> None:
    told, agrees = simulate_program(tmp_path, setting, recording, seed=4)
    assert agrees, told


@pytest.mark.gpu
@pytest.mark.parametrize("after", ["default", "expandable", "roundup", "max split"])
@pytest.mark.parametrize("before", ["default", "expandable"])
def test_the_peaks_under_other_settings_are_those_that_torch_has(tmp_path: Path, before: str, after: str) -> None:
    told, agrees = predict_program(tmp_path, before, after, seed=5)
    assert agrees, told


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["default", "expandable", "max split"])
def test_the_request_that_fails_under_a_limit_is_the_predicted_one(tmp_path: Path, setting: str) -> None:
    told, agrees = fail_program(tmp_path, setting, seed=6)
    assert agrees, told
