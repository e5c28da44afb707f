"""The light record of a rank: what is written is read back, and damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profkit.errors import RunError
from profkit.run.light_record import (
    Collectives,
    Group,
    LightRecord,
    StepRecord,
    plain_kind,
    read_light_record,
    write_light_record,
)

RECORD = LightRecord(
    rank=1,
    world_size=4,
    node=1,
    device=1,
    clock_base_ns=1_795_193_514_683_000_000,
    groups=(Group(0, "0", (0, 1, 2, 3), "dp", "nccl"),),
    steps=(
        StepRecord(
            "step 3",
            100,
            9_100,
            phases=(("data", 0, 10), ("forward", 20, 400)),
            data_ns=10,
            kernel_ns={"gemm": 300},
            peak_bytes=1 << 30,
            throttle=("power cap",),
            collectives=Collectives([0], [41], ["all_reduce"], ["float32"], [4096], [-3], [50], [90], [None], [None]),
            since=((0, "kernels", "forward", "layer 1", 30),),
            outside_cuda=(("forward", "", 12),),
        ),
        StepRecord(None, 9_100, 9_200),
    ),
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    assert read_light_record(path) == RECORD


def test_columns_that_several_steps_share_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    steps = tuple(replace(RECORD.steps[0], name=f"step {number}") for number in range(70))
    write_light_record(path, replace(RECORD, steps=steps))
    assert path.read_text().count("all_reduce") == 1
    assert read_light_record(path).steps == steps
    # Where they differ each time, not all of them are remembered.
    steps = tuple(
        replace(step, collectives=replace(step.collectives, bytes=[number])) for number, step in enumerate(steps)
    )
    write_light_record(path, replace(RECORD, steps=steps))
    assert path.read_text().count('"kind":"calls"') == 64
    assert read_light_record(path).steps == steps


def test_calls_that_no_line_before_described_are_named(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    path.write_text(path.read_text().replace('"calls":0', '"calls":7'))
    with pytest.raises(RunError, match=r"light.jsonl:4: "):
        read_light_record(path)


def test_a_record_of_version_1_holds_all_columns_in_each_step(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    header, group, calls, step, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    header["version"] = 1
    del step["collectives"]["calls"]
    step["collectives"] |= calls["collectives"]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, group, step, *rest)))
    assert read_light_record(path) == RECORD


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    path.write_text(path.read_text()[:-30])
    assert read_light_record(path).steps == RECORD.steps[:1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"sequence":[41]', '"sequence":["x"]', "collectives.sequence holds something else than whole numbers"),
        ('"sequence":[41],', "", "collectives.sequence is missing"),
        ('"sequence":[41]', '"sequence":[41,42]', "collectives.sequence is not a list of 1"),
        ('[0,"kernels"', '[7,"kernels"', "no collective of its step"),
        ('[0,"kernels"', '[0,"weather"', "unknown cause"),
        ('"start_ns":100', '"start_ns":"now"', "start_ns holds something else"),
        ('["forward","",12]', '["forward","",null]', "outside_cuda holds"),
        ('"forward",20', '"forward",true', "a phase holds"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RunError, match=rf"light.jsonl:4: .*{message}"):
        read_light_record(path)


def test_a_file_without_a_header_is_no_light_record(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    path.write_text("")
    with pytest.raises(RunError, match="no header"):
        read_light_record(path)
    path.write_text('{"kind": "header", "version": 3}\n')
    with pytest.raises(RunError, match="newer profkit"):
        read_light_record(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("c10d::allreduce_", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("nccl:all_to_all_single", "all_to_all"),
        ("gloo:broadcast", "broadcast"),
        ("_reduce_oop", "reduce"),
        ("nccl:send 0->1", "send"),
        ("ampere_sgemm", None),
    ],
)
def test_names_of_torch_and_nccl_become_kinds(name: str, kind: str | None) -> None:
    assert plain_kind(name) == kind
