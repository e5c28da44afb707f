"""Pipelines and links: what stages send and spend in send and recv, bandwidths, and which rank needs most memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from profkit.analysis.ranks.comparison import bus_factor
from profkit.joining import read_ranks
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord
from tests.rank_builder import (
    BYTES,
    MS,
    NCCL,
    WIRE_NS,
    Timeline,
    compare_records,
    light_records,
    said,
    simulate,
    with_another_call,
    write_kineto_run,
    write_light_run,
)

pytestmark = pytest.mark.usefixtures("read_here")

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


@pytest.mark.parametrize("batches", [2, 4, 8])
def test_the_bubble_of_even_stages_is_the_one_of_gpipe(tmp_path: Path, batches: int) -> None:
    """(stages − 1) / (micro-batches + stages − 1) of a step, and the transfers."""
    (one,) = read_ranks(_run(tmp_path / "run", _pipeline([10 * MS] * 3, batches), [(0, 1, 2)])).pipelines
    assert (one.group.dimension, one.ranks) == ("pp", (0, 1, 2))
    transfers = 4 * batches * TRANSFER_NS
    assert one.bubble_ns == pytest.approx(2 * 2 * 10 * MS, abs=transfers)
    assert one.bubble_ns / one.step_ns == pytest.approx(2 / (batches + 2), abs=2 * transfers / one.step_ns)
    assert one.uneven_ns <= transfers


def test_the_stages_that_compute_less_also_wait_for_the_one_that_computes_most(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _pipeline([10 * MS, 14 * MS], 4), [(0, 1)])
    (one,) = read_ranks(run).pipelines
    assert one.longest == 1
    assert one.uneven_ns == pytest.approx(2 * 4 * 4 * MS, rel=0.05)
    assert one.between_ns[0] - one.between_ns[1] == pytest.approx(one.uneven_ns, abs=MS)
    text = said("ranks", run)
    assert "rank 1 (stage 1) works longest" in text
    assert "bubble of pipeline pp" in text


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
        kinds = ["all_reduce", "recv" if record.rank else "send"]
        more = with_another_call(record, group=[0, 1], kind=kinds, bytes=[BYTES, 4096])
        records.append(replace(more, groups=(*record.groups, Group(1, "7", (0, 1), "pp", "nccl"))))
    run = write_light_run(write_kineto_run(tmp_path / "run", lines), records)
    rows = {row.kind: row for row in read_ranks(run).groups}
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
    result = read_ranks(_run(tmp_path / "run", twice, [(0, 2), (1, 3)]))
    assert [one.ranks for one in result.pipelines] == [(0, 2), (1, 3)]
    assert {one.bubble_ns for one in result.pipelines} == {result.pipelines[0].bubble_ns}


def test_without_the_group_or_a_rank_no_pipeline_is_judged_and_nobody_is_held_against_another(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", _pipeline([10 * MS, 14 * MS], 2))
    result = read_ranks(run)
    assert (result.pipelines, result.verdict.most_rank) == ((), None)
    text = said("ranks", run)
    assert "no pipeline is judged" in text
    assert "bubble" not in text
    assert "Who is late is unknown" in text
    assert "for rank 0" not in text  # the matrix of waits
    run = _run(tmp_path / "a trace is lost", _pipeline([10 * MS, 14 * MS], 2), [(0, 1)])
    (run / "trace.rank1.json.gz").unlink()
    assert read_ranks(run).pipelines == ()


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    factors = [
        bus_factor(kind, 8) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    ]
    assert factors == [1.75, 0.875, 0.875, 0.875, 1.0]


def _sending(rank: int, ranks: int, sends_ns: int) -> LightRecord:
    """Return a stage of a pipeline: in each of three steps two sends to each neighbour, and what they send back."""
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < ranks]
    calls = [(kind, sends_ns if kind == "send" else 7) for _ in neighbours for kind in ("send", "recv") * 2]
    count = len(calls)
    columns = Collectives(
        *([0] * count, [], [kind for kind, _ in calls], ["float32"] * count, [BYTES] * count),
        *(list(range(count)), [0] * count, [time_ns for _, time_ns in calls], [0] * count, [None] * count),
    )
    numbered = [replace(columns, sequence=list(range(at * count, (at + 1) * count))) for at in range(3)]
    steps = tuple(
        StepRecord(f"step {at}", at * MS, (at + 1) * MS, collectives=mine) for at, mine in enumerate(numbered)
    )
    return LightRecord(rank, ranks, 0, 0, groups=(Group(0, "7", tuple(range(ranks)), "pp", "nccl"),), steps=steps)


def test_what_stages_send_is_counted_at_each_sender(tmp_path: Path) -> None:
    """Of four stages the inner ones send twice as much: their calls have no numbers in common with the outer ones'."""
    run = write_light_run(tmp_path / "run", [_sending(rank, 4, 2 * WIRE_NS) for rank in range(4)])
    sent, received = read_ranks(run).groups
    assert (sent.kind, received.kind) == ("send", "recv")
    assert sent.count == received.count == 3 * 2 * (1 + 2 + 2 + 1)
    assert sent.byte_count == received.byte_count == sent.count * BYTES
    assert sent.wire_ns == sent.count * 2 * WIRE_NS
    assert sent.bus_bandwidth == sent.algorithm_bandwidth == pytest.approx(BYTES / (2 * WIRE_NS) * 1e9)
    assert received.wire_ns is None


def _reducing(record: LightRecord) -> LightRecord:
    """Return the record with an all-reduce at the end of each step."""
    return with_another_call(record, kind=[*record.steps[0].collectives.kind, "all_reduce"])


def test_a_group_that_sends_and_reduces_counts_both(tmp_path: Path) -> None:
    """NCCL numbers both from 1, each for itself."""
    records = [_reducing(_sending(rank, 2, WIRE_NS)) for rank in range(2)]
    kinds = {row.kind: row.count for row in read_ranks(write_light_run(tmp_path / "run", records)).groups}
    assert kinds == {"all_reduce": 3, "send": 12, "recv": 12}


def test_only_what_was_sent_in_the_steps_that_all_have_counts() -> None:
    """One rank's record was cut; one rank was recorded in full for a single step."""
    whole, cut = (_reducing(_sending(rank, 2, WIRE_NS)) for rank in range(2))
    result = compare_records([whole, replace(cut, steps=cut.steps[:2])])
    assert result.step_count == 2
    assert {row.kind: row.count for row in result.groups} == {"all_reduce": 2, "send": 8, "recv": 8}
    full, light = (_sending(rank, 2, WIRE_NS) for rank in range(2))
    full = replace(full, source="kineto", steps=full.steps[1:2])
    assert {row.kind: row.count for row in compare_records([full, light]).groups} == {"send": 4, "recv": 4}
