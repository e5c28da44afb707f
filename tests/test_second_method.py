"""`profkit ranks` against a second method: the figures of raw files, worked out by plain loops (`second_method.py`)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from profkit.analysis.ranks.comparison import RanksResult
from profkit.joining import read_ranks
from profkit.run.directory import KINETO_TRACE, LIGHT, name_of_rank
from tests import second_method
from tests.rank_builder import MS, Delay, simulate, write_kineto_run, write_nsys
from tests.second_method import Rank

if TYPE_CHECKING:
    from tests.forked_scripts import Forks

LIGHT_RECORDS = Path(__file__).parent / "light_records"

DELAYS = [Delay(1, "data", 9 * MS), Delay(2, "forward", 5 * MS, every=2)]

PROGRAM = """
import time, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    if dist.get_rank() == step % 2:
        time.sleep(0.02)
    model(torch.randn(4, 64)).sum().backward()
    dist.all_gather_into_tensor(torch.empty(4 * dist.get_world_size()), torch.ones(4))
    optimizer.step()
    optimizer.zero_grad()
del model  # or torch may wait, with the GIL, for gloo's thread, which waits for the GIL
dist.destroy_process_group()
"""


def _assert_equal(result: RanksResult, ranks: list[Rank]) -> None:
    assert result.waits_ns.tolist() == second_method.sum_waits(ranks)
    rows = second_method.sum_kinds(ranks)
    assert sorted(row.kind for row in result.groups) == sorted(rows)
    for mine in result.groups:
        theirs = rows[mine.kind]
        assert mine.count == theirs.count
        assert theirs.size is None or mine.byte_count == theirs.size
        assert mine.waiting_ns == pytest.approx(theirs.waiting, abs=1)
        assert mine.wire_ns in (None, theirs.wire)
        if mine.hidden_ns is not None and mine.exposed_ns is not None:
            assert mine.hidden_ns == pytest.approx(theirs.hidden, abs=1)
            assert mine.exposed_ns == pytest.approx(theirs.exposed, abs=1)
    for one, rank in zip(result.ranks, ranks, strict=True):
        assert one.waiting_ns == round(sum(result.waits_ns[result.ranks.index(one)].tolist()) / rank.steps)
        if one.exposed_ns is not None:
            step_ns, exposed_ns = second_method.steps_and_exposed(rank)
            assert one.exposed_ns == pytest.approx(exposed_ns, abs=1)
            # Its parts are rounded one by one.
            assert one.step_ns == pytest.approx(step_ns, abs=len(one.parts) + 1)


def _kineto(run: Path, count: int) -> list[Rank]:
    return [second_method.read_kineto(run / name_of_rank(KINETO_TRACE, rank)) for rank in range(count)]


def _light(run: Path, count: int) -> list[Rank]:
    return [second_method.read_light(run / name_of_rank(LIGHT, rank)) for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_traces_of_torch_profiler_and_reports_of_nsys(tmp_path: Path, count: int) -> None:
    lines = simulate(count, 6, [one for one in DELAYS if one.rank < count])
    run = write_kineto_run(tmp_path / "run", lines, shift_ns=10**9)
    _assert_equal(read_ranks(run, workers=1), _kineto(run, count))
    report = write_nsys(tmp_path / "trace.sqlite", lines)
    _assert_equal(read_ranks(report), second_method.read_nsys(report))


def test_a_real_report_of_two_gpus(captures: Path) -> None:
    report = captures / "ddp.nsys2025.sqlite"
    result = read_ranks(report)
    assert sum(row.count for row in result.groups) == 36
    assert result.waits_ns.any()
    _assert_equal(result, second_method.read_nsys(report))


@pytest.mark.parametrize("name", ["ddp-data", "ddp-backward", "ddp-none", "fsdp2-before-forward"])
def test_real_light_records_of_two_gpus(name: str) -> None:
    result = read_ranks(LIGHT_RECORDS / name)
    assert result.waits_ns.any()
    _assert_equal(result, _light(LIGHT_RECORDS / name, 2))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_recordings_of_gloo(tmp_path: Path, forks: Forks, count: int) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    recording = ("run", "--kineto", "--warmup", "2", "--steps", "4", "--nproc-per-node", str(count), "-o", "run")
    done = forks.run_profkit(*recording, "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    result = read_ranks(run, workers=1)
    assert {row.kind for row in result.groups} == {"all_reduce", "all_gather"}
    _assert_equal(result, _kineto(run, count))
    for path in run.glob("trace*"):
        path.unlink()
    result = read_ranks(run, workers=1)
    assert {row.source for row in result.ranks} == {"light"}
    _assert_equal(result, _light(run, count))
    shutil.rmtree(run)
