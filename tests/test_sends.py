"""What ranks send to one another and reduce, by group: which group it is, how much, and the bandwidths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from profkit.analysis.ranks.groups import bus_factor
from profkit.joining import read_ranks
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord
from tests.rank_builder import (
    BYTES,
    MS,
    NCCL,
    WIRE_NS,
    compare_records,
    light_records,
    simulate,
    with_another_call,
    write_kineto_run,
    write_light_run,
)

pytestmark = pytest.mark.usefixtures("read_here")

SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)"


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


def test_a_group_of_the_trace_gets_its_dimension_from_the_light_record(tmp_path: Path) -> None:
    """torch.profiler calls a mesh of one dimension over all ranks the default group."""
    lines = simulate(2, 4)
    run = write_light_run(write_kineto_run(tmp_path / "run", lines), light_records(lines))
    (row,) = read_ranks(run).groups
    assert row.group == "dp"


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    factors = [
        bus_factor(kind, 8) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    ]
    assert factors == [1.75, 0.875, 0.875, 0.875, 1.0]


def _sending(rank: int, ranks: int, sends_ns: int, node: int = 0) -> LightRecord:
    """Return a stage of a pipeline: in each of three steps two sends to each neighbour, and what they send back."""
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < ranks]
    calls = [(kind, sends_ns if kind == "send" else 7) for _ in neighbours for kind in ("send", "recv") * 2]
    count = len(calls)
    columns = Collectives(
        *([0] * count, [], [kind for kind, _ in calls], ["float32"] * count, [BYTES] * count),
        *(list(range(count)), [0] * count, [time_ns for _, time_ns in calls], [None] * count),
    )
    numbered = [replace(columns, sequence=list(range(at * count, (at + 1) * count))) for at in range(3)]
    steps = tuple(
        StepRecord(f"step {at}", at * MS, (at + 1) * MS, collectives=mine) for at, mine in enumerate(numbered)
    )
    return LightRecord(rank, ranks, node, 0, groups=(Group(0, "7", tuple(range(ranks)), "pp", "nccl"),), steps=steps)


def test_what_stages_send_is_counted_at_each_sender(tmp_path: Path) -> None:
    """Of four stages the inner ones send twice as much: their calls have no numbers in common with the outer ones'."""
    run = write_light_run(tmp_path / "run", [_sending(rank, 4, 2 * WIRE_NS) for rank in range(4)])
    sent, received = read_ranks(run).groups
    assert (sent.kind, received.kind) == ("send", "recv")
    assert sent.count == received.count == 3 * 2 * (1 + 2 + 2 + 1)
    assert sent.byte_count == received.byte_count == sent.count * BYTES
    assert sent.wire_ns == sent.count * 2 * WIRE_NS
    assert sent.bus_bandwidth == pytest.approx(BYTES / (2 * WIRE_NS) * 1e9)
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
