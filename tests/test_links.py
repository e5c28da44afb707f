"""The links between GPUs: how they are described, the bandwidth of collectives, and what stages of a pipeline send."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from profkit.analysis.ranks.groups import bus_factor
from profkit.cli import cli
from profkit.joining import read_ranks
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord
from profkit.run.manifest import GpuLink, describe_links
from tests.rank_builder import BYTES, MS, WIRE_NS, compare_records, light_records, simulate, write_light_run

NVLINK = GpuLink((0, 1), "nvlink", 18, 4, 478_116_000_000)


def test_links_of_one_kind_are_said_once_and_others_with_their_gpus() -> None:
    far = GpuLink((0, 2), "system", 16, 5, 63_015_384_616)
    assert describe_links([NVLINK, replace(NVLINK, gpus=(2, 3))]) == "18 × NVLink 4 (478 GB/s each way)"
    assert describe_links([NVLINK, far]) == (
        "0–1: 18 × NVLink 4 (478 GB/s each way);"
        " 0–2: PCIe and the link between two CPUs, PCIe 5.0 x16 (63 GB/s each way)"
    )
    assert describe_links([]) == ""


def test_the_bus_bandwidth_is_that_of_nccl_tests(tmp_path: Path) -> None:
    (row,) = read_ranks(write_light_run(tmp_path / "run", light_records(simulate(4, 3)))).groups
    assert row.algorithm_bandwidth == pytest.approx(BYTES / WIRE_NS * 1e9)
    assert row.bus_bandwidth == pytest.approx(BYTES / WIRE_NS * 1e9 * 2 * 3 / 4)
    assert bus_factor("all_gather", 4) == bus_factor("all_to_all", 4) == 3 / 4
    assert bus_factor("broadcast", 4) == 1


def _sending(rank: int, ranks: int, sends_ns: int, node: int = 0) -> LightRecord:
    """Return a stage of a pipeline: in each of three steps two sends to each neighbour, and what they send back."""
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < ranks]
    calls = [(kind, sends_ns if kind == "send" else 7) for _ in neighbours for kind in ("send", "recv") * 2]
    count = len(calls)
    columns = Collectives(
        [0] * count,
        [],
        [kind for kind, _ in calls],
        ["float32"] * count,
        [BYTES] * count,
        list(range(count)),
        [0] * count,
        [time_ns for _, time_ns in calls],
        [0] * count,
        [None] * count,
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
    assert sent.bus_bandwidth == sent.algorithm_bandwidth == pytest.approx(BYTES / (2 * WIRE_NS) * 1e9)
    assert received.wire_ns is None


def _reducing(record: LightRecord) -> LightRecord:
    """Return the record with an all-reduce at the end of each step."""
    steps = []
    for step in record.steps:
        both = {name: [*column, column[0]] for name, column in vars(step.collectives).items()}
        both["kind"][-1] = "all_reduce"
        steps.append(replace(step, collectives=Collectives(**both)))
    return replace(record, steps=tuple(steps))


def test_a_group_that_sends_and_reduces_counts_both(tmp_path: Path) -> None:
    """NCCL numbers both from 1, each for itself."""
    records = [_reducing(_sending(rank, 2, WIRE_NS)) for rank in range(2)]
    kinds = {row.kind: row.count for row in read_ranks(write_light_run(tmp_path / "run", records)).groups}
    assert kinds == {"all_reduce": 3, "send": 12, "recv": 12}


def test_of_a_record_that_was_cut_only_what_was_sent_in_the_steps_that_all_have_counts() -> None:
    whole, cut = (_reducing(_sending(rank, 2, WIRE_NS)) for rank in range(2))
    result = compare_records([whole, replace(cut, steps=cut.steps[:2])])
    assert result.step_count == 2
    assert {row.kind: row.count for row in result.groups} == {"all_reduce": 2, "send": 8, "recv": 8}


def test_where_one_rank_was_recorded_in_full_only_what_the_others_sent_in_its_steps_counts() -> None:
    full, light = (_sending(rank, 2, WIRE_NS) for rank in range(2))
    full = replace(full, source="kineto", steps=full.steps[1:2])
    assert {row.kind: row.count for row in compare_records([full, light]).groups} == {"send": 4, "recv": 4}


def test_the_links_stand_under_the_bandwidths_that_they_carry(tmp_path: Path) -> None:
    run = write_light_run(tmp_path / "run", light_records(simulate(2, 3)))
    link = {"gpus": [0, 1], "way": "nvlink", "count": 18, "version": 4, "bytes_per_s": 478_116_000_000}
    (run / "manifest.json").write_text(json.dumps({"status": "complete", "gpus": {"links": [link]}}))
    done = CliRunner().invoke(cli, ["ranks", str(run)])
    assert "the GPUs are linked by 18 × NVLink 4 (478 GB/s each way)" in " ".join(done.output.split())
