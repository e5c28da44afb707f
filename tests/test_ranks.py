"""Which process is which rank, how the ranks compare, and figures that are known by another way."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.ranks.comparison import RanksResult
from profkit.analysis.ranks.members import BY_DEVICE, BY_PID, NAMED, PROVED, find_ranks
from profkit.errors import UsageError
from profkit.joining import read_ranks
from profkit.report.commands.ranks import describe_verdict
from profkit.trace.nsys import read_nsys
from tests.golden import check_transcript
from tests.kineto_builder import row, written
from tests.nsys_builder import NsysBuilder
from tests.rank_builder import BYTES, GEMM, MS, NCCL, WIRE_NS, Delay, Timeline, simulate, write_kineto_run, write_nsys

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
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(two, run / "trace.sqlite")
    processes = [{"process": f"rank{rank}", "rank": rank, "pid": pid} for rank, pid in ((8, 200), (9, 201))]
    (run / "manifest.json").write_text(json.dumps({"status": "complete", "processes": processes}))
    opened = read_trace(run)
    assert (opened.ranks.evidence, opened.ranks.numbers) == (PROVED, (8, 9))
    assert "ranks are" not in profkit("kernels", run, "--rank", "9").stdout
    # A process that the manifest does not name is none of the ranks.
    (run / "manifest.json").write_text(json.dumps({"status": "complete", "processes": processes[:1]}))
    assert read_trace(run).ranks.numbers == (8,)


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
    (tmp_path / "manifest.json").write_text('{"status": "complete"}')
    opened = read_trace(tmp_path)
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


# -- figures that are known -------------------------------------------------------------------------------------------


LIGHT_RECORDS = Path(__file__).parent / "light_records"

DELAYS = [Delay(1, "data", 9 * MS), Delay(2, "forward", 5 * MS, every=2)]


def _assert_true(result: RanksResult, lines: Sequence[Timeline], call_bytes: int | None) -> None:
    """Compare waits, wire and exposed time with what the simulated ranks did: a reduction ends on all at once."""
    calls = [[(start, end) for _, start, end, name in line.kernels if name == NCCL] for line in lines]
    last = [max(start for start, _ in each) for each in zip(*calls, strict=True)]
    waits = [sum(begin - start for begin, (start, _) in zip(last, mine, strict=True)) for mine in calls]
    steps, lengths = len(last), [sum(end - start for start, end in mine) for mine in calls]
    late = [starts.index(max(starts)) for starts in zip(*([start for start, _ in mine] for mine in calls), strict=True)]
    for number, mine in enumerate(calls):
        for_each = [0] * len(lines)
        for rank, begin, (start, _) in zip(late, last, mine, strict=True):
            for_each[rank] += begin - start
        assert result.waits_ns[number].tolist() == for_each
    (row,) = result.groups
    assert (row.kind, row.count, row.hidden_ns) == ("all_reduce", steps, 0)
    assert row.byte_count == (None if call_bytes is None else steps * call_bytes)
    assert (row.wire_ns, row.waiting_ns) == (steps * WIRE_NS, round(sum(waits) / len(lines)))
    assert row.exposed_ns == round(sum(lengths) / len(lines))
    for one, mine, waited, length in zip(result.ranks, calls, waits, lengths, strict=True):
        (began, first_end), *_, (_, last_end) = mine
        assert one.waiting_ns == round(waited / steps)
        # Of a rank's own account the first step is none: it lasts from one reduction's end to the next.
        assert one.exposed_ns == pytest.approx((length - first_end + began) / (steps - 1), abs=1)
        assert one.step_ns == pytest.approx((last_end - first_end) / (steps - 1), abs=len(one.parts) + 1)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_simulated_ranks_wait_as_they_did_by_both_profilers(tmp_path: Path, count: int) -> None:
    lines = simulate(count, 6, [one for one in DELAYS if one.rank < count])
    _assert_true(read_ranks(write_kineto_run(tmp_path / "run", lines, shift_ns=10**9)), lines, BYTES)
    _assert_true(read_ranks(write_nsys(tmp_path / "trace.sqlite", lines)), lines, None)


def test_a_real_report_of_two_gpus_has_its_known_figures(captures: Path) -> None:
    """Worked out by plain loops over its rows; where kernels ran beside a collective that is hidden."""
    result = read_ranks(captures / "ddp.nsys2025.sqlite")
    (row,) = result.groups
    times = {"wire_ns": 4_621_405, "hidden_ns": 23_109_390, "exposed_ns": 7_171_442, "waiting_ns": 25_659_427}
    assert (row.kind, row.count) == ("all_reduce", 36)
    assert {name: getattr(row, name) for name in times} == times
    assert [(one.waiting_ns, one.exposed_ns) for one in result.ranks] == [(25_659_427, 6_357_139), (0, 814_304)]
    assert [one.step_ns for one in result.ranks] == pytest.approx([44_579_317, 44_576_232], abs=5)
    assert result.waits_ns.tolist() == [[0, 51_318_854], [0, 0]]


def test_what_only_one_rank_recorded_before_its_first_step_moves_no_collective(tmp_path: Path) -> None:
    """Neither numbers its collectives: they are counted from the first step on. The ranks are late by turns."""
    lines = simulate(2, 6, [Delay(1, "data", 10 * MS, every=2), Delay(0, "data", 10 * MS, every=2, first=1)])
    lines[1].kernels.insert(0, (100_000, 110_000, 400_000, NCCL))
    result = read_ranks(write_nsys(tmp_path / "trace.sqlite", lines))
    assert [round((one.waiting_ns or 0) / MS) for one in result.ranks] == [5, 5]


def test_real_light_records_of_two_gpus_have_their_known_figures() -> None:
    """Worked out by plain loops over their lines: waits, and what phases took longer on the GPU than on the host."""
    in_full = ("ddp-backward", "fsdp2-before-forward")
    calls = [("ranks", LIGHT_RECORDS / name, "--format", "json") for name in in_full]
    others = sorted(path for path in LIGHT_RECORDS.iterdir() if path.name not in in_full)
    check_transcript("ranks-recorded", [*calls, *(("ranks", path, "--format", "csv") for path in others)])
