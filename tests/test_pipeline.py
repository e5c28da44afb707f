"""Pipelines: what stages spend in send and recv, which group that is, and which rank needs most memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from profkit.analysis.ranks.comparison import RanksResult
from profkit.cli import cli
from profkit.joining import read_ranks
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord
from tests.rank_builder import MS, NCCL, Timeline, light_records, simulate, write_kineto_run, write_light_run

SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)"
TRANSFER_NS = 100_000
STEPS = 4


def _pipeline(forward_ns: Sequence[int], batches: int) -> list[Timeline]:
    """Return what the stages of GPipe do: all forwards, then all backwards, each as long as the stage's forward.

    A stage sends in a kernel after it computed, and receives in one that begins when it is free and ends with the data;
    stages begin a step when they are free.
    """
    lines = [Timeline(now=MS) for _ in forward_ns]
    for step in range(STEPS):
        begins = [line.now for line in lines]
        for order in (list(range(len(lines))), list(reversed(range(len(lines))))):
            arrived = [0] * batches
            for at in order:
                line = lines[at]
                for batch in range(batches):
                    if at != order[0]:
                        _talk(line, max(arrived[batch], line.now + TRANSFER_NS))
                    line.compute(forward_ns[at])
                    if at != order[-1]:
                        _talk(line, line.now + TRANSFER_NS)
                        arrived[batch] = line.now
        for begin, line in zip(begins, lines, strict=True):
            line.ranges.append((f"step {step}", begin, line.now))
            line.now += 1_000
    return lines


def _talk(line: Timeline, end: int) -> None:
    line.kernels.append((line.now, line.now, end, SEND))
    line.now = end


def _run(
    folder: Path, lines: Sequence[Timeline], pairs: Sequence[tuple[int, ...]], dimension: str | None = "pp"
) -> Path:
    """Write a run of traces that name no group of sends, and of light records that do; peaks of 1, 2, … GiB."""
    run = write_kineto_run(folder, lines)
    return write_light_run(run, [_light(lines, rank, pairs, dimension) for rank in range(len(lines))])


def _light(
    lines: Sequence[Timeline], rank: int, pairs: Sequence[tuple[int, ...]], dimension: str | None
) -> LightRecord:
    ranks = next(pair for pair in pairs if rank in pair)
    steps = []
    for name, start, end in lines[rank].ranges:
        # Both ways at once are one kernel but two entries, so that the trace and the record do not fit.
        calls = [(group, *rest) for group, *rest in ((0, 1, "send"), (0, 2, "recv"))]
        columns = Collectives(*map(list, zip(*calls, strict=True)), *([None, None] for _ in range(7)))
        steps.append(StepRecord(name, start, end, peak_bytes=(rank + 1) << 30, collectives=columns))
    groups = (Group(0, "7", ranks, dimension, "nccl"),)
    return LightRecord(rank, len(lines), groups=groups, steps=tuple(steps))


def _said(run: Path) -> str:
    done = CliRunner().invoke(cli, ["ranks", str(run), "--workers", "1"])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("batches", [2, 4, 8])
def test_the_bubble_of_even_stages_is_the_one_of_gpipe(tmp_path: Path, batches: int) -> None:
    """(stages − 1) / (micro-batches + stages − 1) of a step, and the transfers."""
    (one,) = read_ranks(_run(tmp_path / "run", _pipeline([10 * MS] * 3, batches), [(0, 1, 2)]), workers=1).pipelines
    assert (one.group.dimension, one.ranks) == ("pp", (0, 1, 2))
    transfers = 4 * batches * TRANSFER_NS
    assert one.bubble_ns == pytest.approx(2 * 2 * 10 * MS, abs=transfers)
    assert one.bubble_ns / one.step_ns == pytest.approx(2 / (batches + 2), abs=2 * transfers / one.step_ns)
    assert one.uneven_ns <= transfers


def test_the_stages_that_compute_less_also_wait_for_the_one_that_computes_most(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _pipeline([10 * MS, 14 * MS], 4), [(0, 1)])
    (one,) = read_ranks(run, workers=1).pipelines
    assert one.longest == 1
    assert one.uneven_ns == pytest.approx(2 * 4 * 4 * MS, rel=0.05)
    assert one.between_ns[0] - one.between_ns[1] == pytest.approx(one.uneven_ns, abs=MS)
    said = _said(run)
    assert "rank 1 (stage 1) works longest" in said
    assert "bubble of pipeline pp" in said


def test_what_ranks_do_and_spend_between_stages_is_their_step(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _pipeline([10 * MS, 14 * MS], 4), [(0, 1)])
    result = read_ranks(run)
    (one,) = result.pipelines
    for rank, between, own in zip(result.ranks, one.between_ns, one.own_ns, strict=True):
        assert rank.step_ns == pytest.approx(between + own, abs=2)
        assert rank.exposed_ns == pytest.approx(between, abs=1)


def test_the_light_record_says_which_kernels_send_and_how_much(tmp_path: Path) -> None:
    """torch.profiler says of them neither; next to them collectives of which it says everything."""
    lines = simulate(2, 4)
    for line in lines:
        ends = [end for _, _, end, name in line.kernels if name == NCCL]
        line.kernels += [(end + 1_000, end + 2_000, end + 12_000, SEND) for end in ends]
        line.kernels.sort()
    records = []
    for record in light_records(lines):
        steps = []
        for step in record.steps:
            calls = step.collectives
            kind = "recv" if record.rank else "send"
            both = {name: [*column, column[0]] for name, column in vars(calls).items()}
            both |= {"group": [0, 1], "kind": ["all_reduce", kind], "bytes": [calls.bytes[0], 4096]}
            steps.append(replace(step, collectives=Collectives(**both)))
        groups = (*record.groups, Group(1, "7", (0, 1), "pp", "nccl"))
        records.append(replace(record, groups=groups, steps=tuple(steps)))
    run = write_light_run(write_kineto_run(tmp_path / "run", lines), records)
    rows = {row.kind: row for row in read_ranks(run, workers=1).groups}
    assert {kind: (row.group, row.count) for kind, row in rows.items()} == {
        "all_reduce": ("dp", 4),
        "send": ("pp", 4),
        "recv": ("pp", 4),
    }
    assert (rows["send"].byte_count, rows["send"].wire_ns) == (4 * 4096, 4 * 10_000)
    assert (rows["recv"].byte_count, rows["recv"].wire_ns) == (4 * 4096, None)


def test_two_pipelines_side_by_side_are_told_apart_by_the_light_records(tmp_path: Path) -> None:
    lines = _pipeline([10 * MS, 14 * MS], 4)
    twice = [lines[0], lines[0], lines[1], lines[1]]
    result = read_ranks(_run(tmp_path / "run", twice, [(0, 2), (1, 3)]), workers=1)
    assert [one.ranks for one in result.pipelines] == [(0, 2), (1, 3)]
    assert {one.bubble_ns for one in result.pipelines} == {result.pipelines[0].bubble_ns}


def test_without_the_group_no_pipeline_is_judged(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", _pipeline([10 * MS, 14 * MS], 2))
    assert read_ranks(run, workers=1).pipelines == ()
    said = _said(run)
    assert "no pipeline is judged" in said
    assert "bubble" not in said


def test_where_ranks_only_send_and_receive_nobody_is_held_against_another(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", _pipeline([10 * MS, 14 * MS], 2))
    assert read_ranks(run, workers=1).verdict.most_rank is None
    said = _said(run)
    assert "Who is late is unknown" in said
    assert "for rank 0" not in said  # the matrix of waits


def test_a_rank_without_a_trace_leaves_its_pipeline_unjudged(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _pipeline([10 * MS, 14 * MS], 2), [(0, 1)])
    (run / "trace.rank1.json.gz").unlink()
    assert read_ranks(run, workers=1).pipelines == ()


def test_a_group_of_the_trace_gets_its_dimension_from_the_light_record(tmp_path: Path) -> None:
    """torch.profiler calls a mesh of one dimension over all ranks the default group."""
    lines = simulate(2, 4)
    run = write_light_run(write_kineto_run(tmp_path / "run", lines), light_records(lines))
    (row,) = read_ranks(run, workers=1).groups
    assert row.group == "dp"


class TestPeaks:
    def _of(self, tmp_path: Path) -> tuple[Path, RanksResult]:
        run = _run(tmp_path / "run", _pipeline([10 * MS] * 3, 2), [(0, 1, 2)])
        return run, read_ranks(run, workers=1)

    def test_the_highest_is_held_against_the_median_rank(self, tmp_path: Path) -> None:
        run, result = self._of(tmp_path)
        assert result.peaks is not None
        assert (result.peaks.rank, result.peaks.median_rank) == (2, 1)
        assert (result.peaks.peak_bytes, result.peaks.median_bytes) == (3 << 30, 2 << 30)
        said = (
            "peak memory is highest on rank 2 (stage 2): 3.000 GiB, 1.000 GiB (50.0%) more than on rank 1, the median"
        )
        assert said in _said(run)

    def test_ranks_that_need_the_same_are_not_compared(self, tmp_path: Path) -> None:
        run, _ = self._of(tmp_path)
        shutil.copy(run / "light.jsonl", run / "light.rank1.jsonl")
        shutil.copy(run / "light.jsonl", run / "light.rank2.jsonl")
        assert read_ranks(run, workers=1).peaks is None
