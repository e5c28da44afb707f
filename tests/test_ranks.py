"""Which process is which rank, how the ranks compare, and the same figures by plain loops over raw files."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from profkit import read_trace
from profkit.analysis.ranks import BY_DEVICE, BY_PID, NAMED, PROVED, find_ranks
from profkit.analysis.ranks.comparison import RanksResult
from profkit.errors import UsageError
from profkit.joining import read_ranks
from profkit.report.commands.ranks import describe_verdict
from profkit.report.units import format_ns
from profkit.run.directory import KINETO_TRACE, LIGHT, name_of_rank
from profkit.trace.nsys import read_nsys
from tests import second_method
from tests.golden import check_transcript
from tests.kineto_builder import row, written
from tests.nsys_builder import NsysBuilder
from tests.rank_builder import GEMM, MS, NCCL, Delay, said, simulate, write_kineto_run, write_nsys
from tests.run_builder import start_run
from tests.second_method import Rank
from tests.training_scripts import training_of_ranks

if TYPE_CHECKING:
    from tests.forked_scripts import Forks


pytestmark = pytest.mark.usefixtures("read_here")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _write(path: Path, own_us: dict[int, int], devices: dict[int, int]) -> Path:
    """Write a report of one backward a process: what each computes (pid → µs), then a collective that ends for all."""
    builder = NsysBuilder()
    most = max(own_us.values())
    for pid, own in own_us.items():
        builder.range("backward", 1000, 81_000, pid=pid, tid=pid)
        builder.kernel(2000, own * 1000, name=GEMM, pid=pid, tid=pid, start=3000, device=devices[pid])
        builder.kernel(
            2500, (most - own + 10) * 1000, name=NCCL, pid=pid, tid=pid, start=3000 + own * 1000, device=devices[pid]
        )
    pid = min(own_us)
    builder.kernel(90_000, 9, pid=pid, tid=pid, start=95_000, device=devices[pid])
    return builder.write(path)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    # The pids are in the other order than the GPUs.
    return _write(tmp_path / "two.sqlite", {200: 50, 201: 20}, {200: 1, 201: 0})


def test_each_way_of_asking_for_kernels_of_ranks_prints_what_it_did(two: Path, tmp_path: Path) -> None:
    """All of them, beside one another; one by itself; of many the least, the median and the most."""
    alone = _write(tmp_path / "alone.sqlite", {200: 5}, {200: 0})
    many = _write(
        tmp_path / "many.sqlite", {pid: pid for pid in range(10, 16)}, {pid: pid - 10 for pid in range(10, 16)}
    )
    backward = ("--range", "backward")
    calls: list[tuple[str | Path, ...]] = [
        *(("kernels", two, *backward, "--format", style) for style in ("table", "json", "csv")),
        ("kernels", two, "--rank", "1"),
        ("kernels", two, "--rank", "0", *backward, "--format", "json"),
        ("ranges", two, "--rank", "1"),
        # Ranks that do not exist are refused with those that do.
        *(("kernels", two, "--rank", "7"), ("ranges", two, "--rank", "7"), ("kernels", alone, "--rank", "0")),
        ("kernels", many, *backward),
    ]
    check_transcript("kernels-of-ranks", calls)


def test_every_command_prints_the_verdict_of_ranks(profkit: Run, tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "t.sqlite", simulate(3, 12, [Delay(1, "forward", 5 * MS)]))
    sentence = describe_verdict(read_ranks(path))[0]
    assert sentence.startswith("Rank 1 is late: it arrives last in ")
    page = tmp_path / "page.html"
    assert profkit("report", path, "-o", page).returncode == 0
    for command in ("ranks", "summary", "kernels", "efficiency", "check --max-skew 99%"):
        name, *options = command.split()
        said = " ".join(profkit(name, path, *options).stdout.split())
        assert sentence[1:] in said, command
    assert sentence in page.read_text()
    kernels, summary, ranks = (
        json.loads(profkit(command, path, "--format", "json").stdout) for command in ("kernels", "summary", "ranks")
    )
    assert kernels["slowest_rank"] == summary["slowest_rank"] == ranks["culprit"]["rank"] == 1


def test_ranks_that_run_nccl_on_one_gpu_number_have_a_gpu_each(tmp_path: Path) -> None:
    opened = read_trace(_write(tmp_path / "t.sqlite", {200: 50, 201: 20}, {200: 0, 201: 0}))
    result = opened.kernels("backward")
    assert [(row.rank, row.process, row.device, row.busy_ns) for row in result.ranks] == [
        (0, 200, 0, 60_000),
        (1, 201, 1, 60_000),
    ]
    assert result.busy_ns == 120_000
    assert (opened.ranks.evidence, opened.ranks.numbers) == (BY_PID, (0, 1))


def test_processes_without_nccl_on_one_gpu_number_share_a_gpu(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for pid in (200, 201):
        builder.kernel(10, 20, pid=pid, tid=pid, start=100)
    assert read_trace(builder.write(tmp_path / "t.sqlite")).kernels().busy_ns == 20


def test_the_manifest_proves_the_ranks_of_a_run(profkit: Run, two: Path, tmp_path: Path) -> None:
    processes = [{"process": f"rank{rank}", "rank": rank, "pid": pid} for rank, pid in ((8, 200), (9, 201))]
    run = start_run(tmp_path / "run", processes=processes)
    shutil.copy(two, run / "trace.sqlite")
    opened = read_trace(run)
    assert (opened.ranks.evidence, opened.ranks.numbers) == (PROVED, (8, 9))
    assert "ranks are" not in profkit("kernels", run, "--rank", "9").stdout
    # A process that the manifest does not name is none of the ranks.
    assert read_trace(start_run(run, processes=processes[:1])).ranks.numbers == (8,)


def test_equal_pids_of_two_machines_prove_no_rank(two: Path) -> None:
    trace = read_nsys(two)
    same = dict.fromkeys(trace.process_ids, 200)
    assert find_ranks(replace(trace, process_ids=same), {200: 0}).evidence == BY_DEVICE


def _kineto(path: Path, rank: int | None, own_us: int) -> None:
    events = [
        row("user_annotation", "forward", 10, 90),
        row("cpu_op", "aten::mm", 10, own_us),
        row("cpu_op", "c10d::allreduce_", 60, 5),
    ]
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 3}}
    written(path.parent, events, path.name, **info)


def test_a_run_with_one_trace_per_rank_is_read_as_one(profkit: Run, tmp_path: Path) -> None:
    _kineto(tmp_path / "trace.json.gz", 0, 10)
    _kineto(tmp_path / "trace.rank2.json.gz", 2, 30)
    _kineto(tmp_path / "trace.rank10.json.gz", None, 20)
    opened = read_trace(start_run(tmp_path))
    assert (opened.ranks.evidence, opened.ranks.numbers) == (NAMED, (0, 2, 10))
    result = opened.kernels("forward")
    assert (result.instances, result.total_ns) == (3, 75_000)
    assert result.trace == str(tmp_path)
    assert [row.communication_ns for row in result.ranks] == [5000] * 3
    assert read_trace(tmp_path, rank=10).kernels().ledger.total_ns == 25_000
    with pytest.raises(UsageError, match="this trace holds ranks 0, 2, 10"):
        read_trace(tmp_path, rank=1)
    (tmp_path / "trace.json.gz").unlink()
    assert read_trace(tmp_path).ranks.numbers == (2, 10), "rank 0 may have died"
    done = profkit("kernels", tmp_path, "-o", tmp_path / "trace.rank2.json.gz")
    assert (done.returncode, "belongs to the run" in done.stderr) == (2, True)


# -- the second method -----------------------------------------------------------------------------------------------


LIGHT_RECORDS = Path(__file__).parent / "light_records"

DELAYS = [Delay(1, "data", 9 * MS), Delay(2, "forward", 5 * MS, every=2)]

PROGRAM = training_of_ranks(
    8,
    """time.sleep(0.02 if distributed.get_rank() == number % 2 else 0)
distributed.all_gather_into_tensor(torch.empty(4 * distributed.get_world_size()), torch.ones(4))""",
    before="import time",
    model="nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01",
    batch="torch.randn(4, 64)",
)


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


def _raw_kineto(run: Path, count: int) -> list[Rank]:
    return [second_method.read_kineto(run / name_of_rank(KINETO_TRACE, rank)) for rank in range(count)]


def _raw_light(run: Path, count: int) -> list[Rank]:
    return [second_method.read_light(run / name_of_rank(LIGHT, rank)) for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_traces_of_torch_profiler_and_reports_of_nsys(tmp_path: Path, count: int) -> None:
    lines = simulate(count, 6, [one for one in DELAYS if one.rank < count])
    run = write_kineto_run(tmp_path / "run", lines, shift_ns=10**9)
    _assert_equal(read_ranks(run), _raw_kineto(run, count))
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
    _assert_equal(result, _raw_light(LIGHT_RECORDS / name, 2))


def test_the_time_at_the_wire_is_that_of_a_step_wherever_it_is_shown() -> None:
    """Beside `compare`, whose columns are all of a step, `ranks` once showed that of one collective."""
    path = LIGHT_RECORDS / "ddp-none"
    result = read_ranks(path)
    (row,) = result.groups
    assert row.wire_ns is not None
    assert row.count == 13 * result.step_count
    wire = format_ns(round(row.wire_ns / result.step_count))
    ranks, compared = said("ranks", path), said("compare", path, LIGHT_RECORDS / "ddp-forward", "--force")
    assert f"all_reduce 13 29.59 MiB {wire} " in ranks
    assert f"all_reduce 13.00 13.00 {wire} " in compared


def test_what_columns_of_a_light_record_are_of_is_said_beneath_them() -> None:
    """Its medians are not of the step's own beginning and end, so that they may be longer."""
    path = LIGHT_RECORDS / "tp-waits-in-loss"
    late = next(rank for rank in read_ranks(path).ranks if rank.rank == 1)
    assert late.exposed_ns is None
    assert late.parts["python"] > late.step_ns
    text = said("ranks", path)
    assert "often one of the step before, to that wait; they do not sum up to the step, and may be longer." in text
    assert "waiting (mean over steps): from a rank's own arrival" in text


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_recordings_of_gloo(tmp_path: Path, forks: Forks, count: int) -> None:
    run = forks.record_ranks(tmp_path, PROGRAM, count, "--kineto", "--warmup", "2", "--steps", "4")
    result = read_ranks(run)
    assert {row.kind for row in result.groups} == {"all_reduce", "all_gather"}
    _assert_equal(result, _raw_kineto(run, count))
    for path in run.glob("trace*"):
        path.unlink()
    result = read_ranks(run)
    assert {row.source for row in result.ranks} == {"light"}
    _assert_equal(result, _raw_light(run, count))
    shutil.rmtree(run)
