"""``profkit run`` on several ranks, and ``--ranks``: who of them is recorded in full."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit.joining import read_ranks
from profkit.run.job import RankChoice
from tests.forked_scripts import Forks
from tests.in_process import manifest_of, names_in, range_names, run_profkit
from tests.training_scripts import training_of_ranks

pytest.importorskip("torch")

from profkit import read_trace
from profkit.analysis.ranks import PROVED

Run = Callable[..., "subprocess.CompletedProcess[str]"]

MODEL = "nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))"
SAYS = "if distributed.get_rank() == 0: print(loss.item().hex(), flush=True)"
DDP = training_of_ranks(4, SAYS, model=MODEL, batch="torch.randn(4, 8)")

FAILS = """if number == 2 and distributed.get_rank() == 1:
    raise ValueError("the data of this rank are bad")"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that records two ranks by torch's own launcher."""
    (tmp_path / "ddp.py").write_text(DDP)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = ("run", "-o", "run", "--nproc-per-node", "2", *arguments)
        return run_profkit(*words, cwd=tmp_path, OMP_NUM_THREADS="1")

    return call


def test_a_script_is_started_as_ranks_and_compared_and_keeps_its_losses(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    plain = forks.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "ddp.py"], tmp_path)
    options = ("-o", "run", "--nproc-per-node", "2", "--flops", "--warmup", "1", "--steps", "2")
    done = forks.check_profkit("run", *options, "--", sys.executable, "ddp.py", cwd=tmp_path)
    assert done.stdout.startswith(plain.stdout)
    assert plain.stdout.count("0x") == 4
    light, traces = ["light.jsonl", "light.rank1.jsonl"], ["trace.json.gz", "trace.rank1.json.gz"]
    assert names_in(tmp_path / "run") == [*light, "manifest.json", *traces, "work.json"]
    for trace in traces:
        ranges = range_names(tmp_path / "run" / trace)
        assert [ranges.count(part) for part in ("model", "0", "2", "backward")] == [4, 4, 4, 2]
        assert not any(part.startswith("module") for part in ranges)
    assert "profkit ranks run" in done.stdout
    processes = manifest_of(tmp_path / "run")["processes"]
    assert [(one["process"], one["rank"]) for one in processes] == [("rank0", 0), ("rank1", 1)]
    opened = read_trace(tmp_path / "run")
    assert (opened.ranks.evidence, opened.ranks.numbers) == (PROVED, (0, 1))
    whole = opened.kernels("backward")
    assert [row.instances for row in whole.ranks] == [2, 2]
    assert [row.process for row in whole.ranks] == [one["pid"] for one in processes]
    for row in whole.ranks:
        alone = read_trace(tmp_path / "run", rank=row.rank)
        assert alone.kernels("backward").total_ns == row.kernel_time_ns
        ledger = alone.attribution.ledger
        assert ledger.direct_ns + ledger.inferred_ns + ledger.outside_ns == ledger.total_ns
        assert "communication" in {kernel.category for kernel in alone.kernels().kernels}


def test_the_rank_that_failed_is_named_and_its_status_passes_through(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "fails.py").write_text(training_of_ranks(4, FAILS))
    options = ("-o", "run", "--nproc-per-node", "2", "--warmup", "1", "--steps", "9")
    done = forks.run_profkit("run", *options, "--", sys.executable, "fails.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "(rank 1: ValueError: the data of this rank are bad" in done.stderr.splitlines()[-1]
    manifest = manifest_of(tmp_path / "run")
    assert manifest["reason"].startswith("rank 1: ValueError: the data of this rank are bad")
    assert (manifest["status"], manifest["exit_status"]) == ("failed", 1)
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(("failed", "partial"))]


def test_a_rank_that_was_killed_is_named(tmp_path: Path, run: Run) -> None:
    (tmp_path / "killed.py").write_text("import os\nos.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\n")
    done = run("--warmup", "1", "--steps", "9", "--", sys.executable, "killed.py")
    assert done.returncode == 1
    assert "(rank 1: ended by SIGKILL, perhaps because the memory was full" in done.stderr.splitlines()[-1]
    assert manifest_of(tmp_path / "run")["reason"].startswith("rank 1: ended by SIGKILL")


def test_a_built_in_model_is_trained_by_ddp(tmp_path: Path, forks: Forks) -> None:
    options = ("--context", "16", "--batch", "1", "--warmup", "1", "--steps", "1", "--device", "cpu")
    forks.check_profkit("run", "-o", "run", "--nproc-per-node", "2", *options, "model.tiny", cwd=tmp_path)
    manifest = manifest_of(tmp_path / "run")
    ranks = manifest["processes"]
    assert [one["rank"] for one in ranks] == [0, 1]
    assert {"trace.json.gz", "trace.rank1.json.gz"} <= {path.name for path in (tmp_path / "run").iterdir()}
    opened = read_trace(tmp_path / "run")
    assert not opened.self_check.failed
    rows = {row.name: row for row in opened.kernels("backward").kernels}
    assert all(rows["c10d::allreduce_"].per_rank_ns), "the gradients are averaged in backward"


@pytest.mark.nsys
def test_one_nsys_holds_all_ranks_of_a_script(tmp_path: Path, run: Run) -> None:
    done = run("--nsys", "--warmup", "1", "--steps", "2", "--", sys.executable, "ddp.py")
    assert done.returncode == 0, done.stderr
    opened = read_trace(tmp_path / "run")
    assert (opened.ranks.evidence, opened.ranks.numbers) == (PROVED, (0, 1))
    for rank in (0, 1):
        names = [row.name for row in opened.of_rank(rank).ranges().ranges]
        assert [names.count(name) for name in ("step 1", "step 2", "backward")] == [1, 1, 2]


SCRIPT = training_of_ranks(8, "if distributed.get_rank() == 2: time.sleep(0.05)", before="import time")


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
    forks.check_profkit(*command, cwd=tmp_path)
    result = read_ranks(tmp_path / "run", workers=1)
    assert [(one.rank, one.source) for one in result.ranks] == [(0, "kineto"), (1, "kineto")]
    assert not result.lost
    assert sum(row.count for row in result.groups if row.kind == "all_reduce") == 2
