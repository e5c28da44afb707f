"""What reading and comparing the light records of many ranks costs: processor time a rank, and memory.

    python tests/benchmarks/bench_ranks.py [--ranks 8,64,256,1024] [--steps 100] [--collectives 30] [--smoke]

Ranks are synthesised: their clocks differ by a second a rank, one is 6 ms late in forward, one is lost and one's file
is cut within a line. Most collectives are in a group of all ranks, the others in groups of eight. Timed is all that
``profkit ranks RUN --format json`` does on one core, in a process of its own, without starting Python.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from profkit.joining import find_sources, read_ranks, reduce_source
from profkit.report.commands.ranks import build_ranks_document
from profkit.report.document import render
from profkit.run.directory import LIGHT, MANIFEST, name_of_rank
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord, write_light_record

MS = 1_000_000
_STEP_NS = 60 * MS
_LATE_NS = 6 * MS
_WIRE_NS = 200_000
_SMALL_GROUP = 8
_BYTES = 28_351_488


def write_run(folder: Path, ranks: int, steps: int, collectives: int, *, is_timed: bool) -> Path:
    """Write a run of so many ranks: one is late, the last but one is lost, the last one's file is cut."""
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"status": "complete"}))
    for rank in [*range(ranks - 2), ranks - 1]:
        record = _record(rank, ranks, steps, collectives, is_timed=is_timed)
        write_light_record(folder / name_of_rank(LIGHT, rank), record)
    cut = folder / name_of_rank(LIGHT, ranks - 1)
    cut.write_bytes(cut.read_bytes()[: -cut.stat().st_size // 4])
    return folder


def late_rank(ranks: int) -> int:
    """Return which rank is late."""
    return ranks // 3


def _record(rank: int, ranks: int, steps: int, collectives: int, *, is_timed: bool) -> LightRecord:
    random = np.random.default_rng(rank)
    small = min(_SMALL_GROUP, ranks)
    peers = tuple(range(rank // small * small, min(rank // small * small + small, ranks)))
    groups = (Group(0, "0", tuple(range(ranks)), "dp", "nccl"), Group(1, f"tp{peers[0]}", peers, "tp", "nccl"))
    in_all = collectives * 3 // 4
    group = [0] * in_all + [1] * (collectives - in_all)
    kind = ["all_gather"] * in_all + ["all_reduce"] * (collectives - in_all)
    late = _LATE_NS if rank == late_rank(ranks) else 0
    at = 10 * MS + np.arange(collectives) * (35 * MS // collectives)
    found = []
    for step in range(steps):
        # Whoever is there starts its kernel, and all end together when the last one is there.
        noise = random.integers(0, 15_000, collectives)
        start, end = at + late + noise, at + _LATE_NS + 15_000 + _WIRE_NS
        start[1:] = np.maximum(start[1:], at[1:] + _LATE_NS)
        # A host that is late in forward is as late in all that follows.
        host, gpu = 9 * MS + late, 25 * MS + _LATE_NS
        # Only the first collective of a step waits for the late rank: all after it begin together.
        calls = Collectives(
            group,
            [step * in_all + number if number < in_all else step * (collectives - in_all) + number - in_all
             for number in range(collectives)],
            kind,
            ["bfloat16"] * collectives,
            [_BYTES] * collectives,
            (start - 100_000).tolist(),
            start.tolist() if is_timed else [None] * collectives,
            end.tolist() if is_timed else [None] * collectives,
            [None] * collectives,
            [None] * collectives if is_timed else [None] * (collectives - 1) + [2_000_000 + _LATE_NS - late],
        )  # fmt: skip
        found.append(
            StepRecord(
                f"step {step}",
                step * _STEP_NS,
                step * _STEP_NS + _STEP_NS - 200_000,
                (
                    ("data", 0, 200_000),
                    ("forward", 300_000, host),
                    ("backward", host, 36 * MS + host),
                    ("optimizer", 36 * MS + host, 39 * MS + host),
                ),
                (("forward", 400_000, gpu), ("backward", gpu, 52 * MS), ("optimizer", 52 * MS, 55 * MS)),
                launch_wait_ns=0,
                peak_bytes=11_979_044_352 + rank,
                sm_mhz=1980,
                collectives=calls,
            )
        )
    return LightRecord(
        rank, ranks, rank // small, rank % small, "light", 1_795 * 10**15 + rank * 10**9, groups, tuple(found)
    )


def measure(run: Path) -> dict[str, float]:
    """Return the time of this process for reading all ranks, and for all of the command, and what memory it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    result = read_ranks(run, workers=1)
    text = render(build_ranks_document(result, str(run)), "json")
    whole = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    culprit = json.loads(text)["culprit"]
    began = time.process_time()
    for source in find_sources(run):
        reduce_source(source)
    read = time.process_time() - began
    return {
        "culprit": -1 if culprit is None else culprit["rank"],
        "read_s": read,
        "whole_s": whole,
        "memory_mb": (peak - before) / 1e3,
    }


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--collectives", type=int, default=30, help="in each step")
    parser.add_argument("--keep", type=Path, help="write the runs here and keep them")
    parser.add_argument("--smoke", action="store_true", help="small: only whether it starts")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run is not None:
        print(json.dumps(measure(chosen.run)))
        return
    counts, steps = ("8,16", 24) if chosen.smoke else (chosen.ranks, chosen.steps)
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in map(int, counts.split(",")):
            for is_timed in (True, False):
                name = f"{ranks}-{'timed' if is_timed else 'untimed'}"
                run = (chosen.keep or Path(scratch)) / name
                if not run.exists():
                    write_run(run, ranks, steps, chosen.collectives, is_timed=is_timed)
                done = subprocess.run(
                    [sys.executable, __file__, "--run", str(run)], check=True, capture_output=True, text=True
                )
                found = json.loads(done.stdout)
                assert found["culprit"] == late_rank(ranks), f"rank {found['culprit']} is named"
                print(
                    f"{name}: {found['read_s'] / ranks * 1e3:.2f} ms a rank to read,"
                    f" {found['whole_s'] / ranks * 1e3:.2f} ms a rank in all, {found['memory_mb']:.0f} MB more memory",
                    flush=True,
                )


if __name__ == "__main__":
    main()
