"""Four ranks on the CPU with gloo, recorded once: a delay is named from traces and from light records; Dask."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from profkit.cli import cli
from profkit.errors import ToolError
from profkit.joining import read_ranks
from tests.rank_builder import MS, Delay, light_records, simulate, write_kineto_run, write_light_run

DELAY_MS = 120
"""Longer than what four processes on two cores wait for each other by chance."""

PROGRAM = f"""
import os, time, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        if dist.get_rank() == 2:
            time.sleep({DELAY_MS / 1000})
        return self.inner(x)


model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), Late(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


RANKS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(PROGRAM)
    recording = ("run", "--kineto", "--warmup", "2", "--steps", "5", "--nproc-per-node", str(RANKS), "-o", "run")
    command = [sys.executable, "-m", "profkit", *recording, "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.slow
def test_a_delay_in_a_forward_is_named_with_its_module(recorded: Path) -> None:
    result = read_ranks(recorded)
    found = result.verdict.culprit
    assert found is not None
    assert (found.rank, found.cause, found.phase) == (2, "python", "forward")
    assert found.module.endswith("1")
    assert found.extra_ns == pytest.approx(DELAY_MS * MS, rel=0.35)
    assert [one.rank for one in result.ranks if one.waiting_ns < DELAY_MS * MS / 2] == [2]


@pytest.mark.slow
def test_light_records_alone_name_the_same_rank_and_phase(recorded: Path, tmp_path: Path) -> None:
    for path in (recorded / "manifest.json", *recorded.glob("light*.jsonl")):
        shutil.copy(path, tmp_path)
    found = read_ranks(tmp_path).verdict.culprit
    assert found is not None
    assert (found.rank, found.cause, found.phase) == (2, "python", "forward")


def test_a_cluster_prints_the_same_bytes_as_one_process(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    lines = simulate(3, 3, [Delay(2, "forward", 9 * MS)])
    run = write_light_run(write_kineto_run(tmp_path / "run", lines), light_records(lines))
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp"
    ) as cluster:
        outputs = [
            CliRunner().invoke(cli, ["ranks", str(run), "--format", "json", *how])
            for how in (["--workers", "1"], ["--scheduler", cluster.scheduler_address])
        ]
    assert [one.exit_code for one in outputs] == [0, 0], outputs[1].output
    assert outputs[0].stdout == outputs[1].stdout
    assert json.loads(outputs[0].stdout)["culprit"]["rank"] == 2


def test_a_scheduler_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    run = write_kineto_run(tmp_path / "run", simulate(2, 2))
    with pytest.raises(ToolError, match="--scheduler nonsense"):
        read_ranks(run, scheduler="nonsense")
