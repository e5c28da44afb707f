"""``--ranks``: who of several ranks is recorded in full."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from profkit.joining import read_ranks
from profkit.run.job import RankChoice
from tests.forked_scripts import Forks
from tests.in_process import manifest_of

SCRIPT = """
import os, sys, time
sys.path[:0] = [os.getcwd()]
import torch
from torch import distributed, nn

distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    if distributed.get_rank() == 2:
        time.sleep(0.05)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
del model  # or torch may wait, with the GIL, for gloo's thread, which waits for the GIL
distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("text", "rank", "local_rank", "included"),
    [
        ("0,7,8-15", 7, 7, True),
        ("0,7,8-15", 15, 7, True),
        ("0,7,8-15", 16, 0, False),
        ("first-per-node", 8, 0, True),
        ("first-per-node", 9, 1, False),
        ("first-per-node", None, None, True),
    ],
)
def test_a_choice_includes_ranks(text: str, rank: int | None, local_rank: int | None, included: bool) -> None:
    assert RankChoice.parse(text).includes(rank, local_rank) is included


def test_chosen_ranks_are_refused_for_nsys_which_records_all_of_a_machine(tmp_path: Path, forks: Forks) -> None:
    stub = tmp_path / "nsys"
    stub.write_text('#!/bin/sh\necho "NVIDIA Nsight Systems version 2025.3.1.1-1v0"\n')
    stub.chmod(0o755)
    words = ("run", "--nsys", "--ranks", "0", "--", "python", "x.py")
    done = forks.run_profkit(*words, cwd=tmp_path, NSYS=str(stub))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Nsight Systems records all ranks of a machine; leave --ranks or --nsys out" in done.stderr


def _record(forks: Forks, place: Path, ranks: str, count: int) -> tuple[Any, dict[str, Any], set[str]]:
    pytest.importorskip("torch")
    (place / "train.py").write_text(SCRIPT)
    steps = ("--warmup", "5", "--steps", "2", "--nproc-per-node", str(count), "--ranks", ranks)
    done = forks.run_profkit("run", "-o", "run", *steps, "--", sys.executable, "train.py", cwd=place)
    manifest = manifest_of(place / "run")
    return done, manifest, {path.name for path in (place / "run").iterdir()}


def test_a_chosen_rank_alone_is_recorded_and_all_leave_light_records(tmp_path: Path, forks: Forks) -> None:
    done, manifest, files = _record(forks, tmp_path, "2", 3)
    assert done.returncode == 0, done.stderr
    assert {name for name in files if name.startswith("trace")} == {"trace.rank2.json.gz"}
    assert {"light.jsonl", "light.rank1.jsonl", "light.rank2.jsonl"} <= files
    assert [one["is_recorded"] for one in manifest["processes"]] == [False, False, True]
    # What the manifest says of the recorded steps is said of a rank that was recorded.
    assert manifest["profiled"]["steps"] == manifest["processes"][2]["profiled"]


def test_a_machine_without_a_chosen_rank_says_that_it_has_light_records_alone(tmp_path: Path, forks: Forks) -> None:
    done, manifest, files = _record(forks, tmp_path, "7", 2)
    assert done.returncode == 0, done.stderr
    assert "--ranks names no rank that ran here" in done.stderr
    assert manifest["status"] == "complete"
    assert done.stdout.endswith("The run is run. Next:\n  profkit ranks run\n")
    assert files == {"manifest.json", "light.jsonl", "light.rank1.jsonl"}


SPAWNED = """
import torch
from torch import distributed, nn


def train(rank):
    distributed.init_process_group("gloo", init_method="file:///PLACE/store", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


@pytest.mark.slow
def test_ranks_that_a_program_starts_by_itself_have_a_trace_each(tmp_path: Path, forks: Forks) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(SPAWNED.replace("PLACE", str(tmp_path)[1:]))
    command = ("run", "-o", "run", "--warmup", "2", "--steps", "2", "--", sys.executable, str(script))
    done = forks.run_profkit(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = read_ranks(tmp_path / "run", workers=1)
    assert [(one.rank, one.source) for one in result.ranks] == [(0, "kineto"), (1, "kineto")]
    assert not result.lost
    assert sum(row.count for row in result.groups if row.kind == "all_reduce") == 2
