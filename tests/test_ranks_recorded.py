"""Four ranks on the CPU with gloo, recorded once: a delay is named from traces and from light records."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from profkit.cli import cli
from profkit.joining import read_ranks
from profkit.run.directory import NSYS_EXPORT, Run, name_of_rank
from profkit.run.light_columns import read_light
from tests.rank_builder import (
    MS,
    Delay,
    late_rank,
    light_records,
    simulate,
    write_light_run,
    write_nsys,
)

if TYPE_CHECKING:
    from tests.forked_scripts import Forks

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
del model  # or torch may wait, with the GIL, for gloo's thread, which waits for the GIL
dist.destroy_process_group()
"""


RANKS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(PROGRAM)
    recording = ("run", "--kineto", "--warmup", "2", "--steps", "5", "--nproc-per-node", str(RANKS), "-o", "run")
    done = forks.run_profkit(*recording, "--", sys.executable, "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.slow
def test_a_delay_in_a_forward_is_named_with_its_module(recorded: Path) -> None:
    result = read_ranks(recorded)
    found = late_rank(result)
    assert (found.rank, found.cause, found.phase) == (2, "python", "forward")
    assert found.module.endswith("1")
    assert found.extra_ns == pytest.approx(DELAY_MS * MS, rel=0.35)
    assert [one.rank for one in result.ranks if one.waiting_ns < DELAY_MS * MS / 2] == [2]


@pytest.mark.slow
def test_light_records_alone_name_the_same_rank_and_phase(recorded: Path, tmp_path: Path) -> None:
    for path in (recorded / "manifest.json", *recorded.glob("light*.jsonl")):
        shutil.copy(path, tmp_path)
    found = late_rank(read_ranks(tmp_path))
    assert (found.rank, found.cause, found.phase) == (2, "python", "forward")


@pytest.mark.slow
def test_the_summary_has_the_verdict_of_ranks(recorded: Path) -> None:
    said = " ".join(CliRunner().invoke(cli, ["summary", str(recorded)]).stdout.split())
    assert "rank 2 is late" in said
    assert sum(one.waiting_ns for one in read_ranks(recorded).ranks) > 0


@pytest.mark.slow
def test_steps_in_which_lines_are_looked_for_are_in_no_light_record(recorded: Path) -> None:
    for path in Run(recorded).light_records.values():
        assert [step.name for step in read_light(path)[1].steps] == [f"step {number}" for number in range(7)]


@pytest.mark.parametrize("traced", range(3))
def test_a_trace_of_one_rank_is_compared_with_light_records_of_more_steps(tmp_path: Path, traced: int) -> None:
    lines = simulate(3, 14, [Delay(2, "forward", 9 * MS)])
    run = write_light_run(tmp_path / "run", light_records(lines))
    write_nsys(run / name_of_rank(NSYS_EXPORT, traced), [lines[traced].part(8)])
    result = read_ranks(run)
    found = late_rank(result)
    assert (found.rank, found.cause, found.phase) == (2, "python", "forward")
    assert found.extra_ns == pytest.approx(9 * MS, rel=0.1)
    assert (result.step_count, found.steps) == (6, 5)
    assert [one.rank for one in result.ranks if one.exposed_ns is not None] == [traced]


MESHES = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
shards = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
whole = mesh["dp", "tp"]._flatten("dp_tp")
experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
model = fully_shard(nn.Linear(8, 8), mesh=shards)
plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
mlp = parallelize_module(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), mesh["tp"], plan)
optimizer = torch.optim.SGD([*model.parameters(), *mlp.parameters()], lr=0.01)
sends, receives = ([2, 2], [3, 2]) if dist.get_rank() % 2 else ([1, 3], [1, 2])
for _ in range(6):
    output = mlp(model(torch.randn(4, 8)))
    rows = torch.empty(sum(receives), 8)
    dist.all_to_all_single(rows, output.detach(), receives, sends, group=experts["ep"].get_group())
    output.square().sum().backward()
    dist.all_reduce(torch.ones(3), group=whole.get_group())
    dist.all_reduce(torch.ones(5), group=mesh.get_group("dp"))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_groups_are_named_by_the_dimensions_of_sliced_and_flattened_meshes(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(MESHES)
    recording = ("run", "--kineto", "--warmup", "2", "--steps", "2", "--nproc-per-node", str(RANKS), "-o", "run")
    done = forks.run_profkit(*recording, "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {(row.group, row.kind): row for row in read_ranks(tmp_path / "run").groups}
    sizes = {key: row.rank_count for key, row in rows.items()}
    assert sizes["shard", "all_gather"] == sizes["tp", "all_reduce"] == sizes["ep", "all_to_all"] == 2
    assert sizes["replicate", "all_reduce"] == sizes["dp", "all_reduce"] == 2
    assert sizes["dp_tp", "all_reduce"] == 4
    assert rows["dp", "all_reduce"].byte_count == rows["dp", "all_reduce"].count * 5 * 4
    exchanged = rows["ep", "all_to_all"]
    assert exchanged.byte_count == exchanged.count * 5 * 8 * 4, "the most that a rank receives"
    assert {row.group for row in rows.values()} == {"shard", "replicate", "tp", "ep", "dp", "dp_tp"}
