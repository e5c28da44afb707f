"""The replay against the real allocator, in the same process: random programs under many settings, on a GPU.

Each program runs in a process of its own, because the settings are read once. It allocates and frees at random on two
streams, with tensors used across streams, empties the cache, captures a CUDA graph into a private pool, and records
from its start, from its midst, or into a buffer that wraps; then it dumps the snapshot and torch's own statistics.
Run as a script, it prints one line a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

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
dice = random.Random(seed)
torch.cuda.init()
torch.cuda.set_per_process_memory_fraction(0.03)
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
json.dump({name: stats[name] for name in names}, open(folder + "/stats.json", "w"))
"""


def replay_program(folder: Path, setting: str, recording: str, seed: int) -> tuple[str, bool]:
    """Run one program and return what the replay says of it, and whether it agrees with torch."""
    from profkit.allocator.history import replay_history
    from profkit.snapshot.reader import read_snapshot

    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS[setting]}
    command = [sys.executable, "-c", PROGRAM, str(folder), recording, str(seed)]
    subprocess.run(command, env=environment, check=True)
    stats = json.loads((folder / "stats.json").read_text())
    snapshot = read_snapshot(folder / "snapshot.pickle")
    history = replay_history(snapshot.devices[0], snapshot.settings)
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
    told = f"{len(snapshot.devices[0].events):>5} events, {proof}, {peaks}, torch {stats}, {history.contradictions}"
    return told, agrees


@pytest.mark.gpu
@pytest.mark.parametrize("recording", RECORDINGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_replay_is_what_torch_says(tmp_path: Path, setting: str, recording: str) -> None:
    for seed in range(3):
        told, agrees = replay_program(tmp_path, setting, recording, seed)
        assert agrees, told


def main() -> None:
    """Run all programs, eight at a time, and print what came of each."""

    def run(case: tuple[str, str]) -> str:
        folder = Path(sys.argv[1]) / "-".join(case).replace(" ", "-")
        folder.mkdir(parents=True)
        told, agrees = replay_program(folder, *case, seed=1)
        return f"{'agrees ' if agrees else 'DIFFERS'} {', '.join(case)}: {told}"

    with ThreadPoolExecutor(8) as pool:
        for line in pool.map(run, product(SETTINGS, RECORDINGS)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
