"""What NCCL says of its collectives in NVTX payloads, as nsys 2025.3.1 exports them: sizes, types, communicators."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from profkit.joining import read_ranks
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord
from profkit.trace.columns import CollectiveCall, Trace
from profkit.trace.nsys import read_nsys
from tests.nsys_builder import NsysBuilder, thread_of
from tests.rank_builder import compare_records, simulate, write_light_run, write_nsys

WORLD, PAIR = 0x7A81B8DEC23CAEBB, 0x11
GROUP, PAIR_GROUP = "communicator 7a81b8dec23caebb", "communicator 0000000000000011"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"

SIZED, SENT, MADE = 16777221, 16777226, 16777227
DOMAIN = 1


def payload(schema: int, data: bytes) -> bytes:
    """Return a payload as the export holds it: domain, schema, size, where the data begin; then the data."""
    return struct.pack("<QQQQ", DOMAIN, schema, len(data), 32) + data


def sized(communicator: int, byte_count: int) -> bytes:
    return payload(SIZED, struct.pack("<QQii", communicator, byte_count, 0, 0))


def sent(communicator: int, byte_count: int, peer: int) -> bytes:
    return payload(SENT, struct.pack("<QQii", communicator, byte_count, peer, 0))


def made(communicator: int, ranks: int, rank: int) -> bytes:
    return payload(MADE, struct.pack("<Qiiii", communicator, ranks, rank, rank, 0))


@pytest.fixture
def builder() -> NsysBuilder:
    found = NsysBuilder()
    describe(found)
    return found


def describe(builder: NsysBuilder) -> None:
    """Add the schemas of NCCL 2.28: the first entry's offset is NULL."""
    entries: dict[int, list[tuple[int, str, int | None]]] = {
        SIZED: [
            (18, "NCCL communicator ID", None),
            (22, "Message size [bytes]", 8),
            (16777236, "Reduction operation", 16),
        ],
        SENT: [(18, "NCCL communicator ID", None), (22, "Message size [bytes]", 8), (5, "Peer rank", 16)],
        MADE: [
            *((18, "NCCL communicator ID", None), (5, "No. of ranks", 8), (5, "Rank", 12), (5, "CUDA device", 16)),
        ],
    }
    for schema, some in entries.items():
        for index, (kind, name, offset) in enumerate(some):
            values: dict[str, Any] = {"type": kind, "name": name, "offset": offset}
            builder.add("NVTX_PAYLOAD_SCHEMA_ENTRIES", domainId=DOMAIN, schemaId=schema, idx=index, **values)


def say(builder: NsysBuilder, name: str, start: int, data: bytes | None, *, pid: int = 100, tid: int = 100) -> None:
    """Add a range of NCCL's."""
    builder.add(
        "NVTX_EVENTS",
        **{"start": start, "end": start + 5, "eventType": 59, "textId": builder.string(name), "domainId": DOMAIN},
        globalTid=thread_of(pid, tid),
        binaryData=data,
    )


def _calls(trace: Trace) -> list[CollectiveCall | None]:
    """Return what is known of each kernel, in order of their starts."""
    order = trace.work.start_ns.argsort()
    index = [int(trace.work.collective[row]) for row in order]
    return [None if at < 0 else trace.collectives[at] for at in index]


def test_a_kernel_gets_size_type_and_communicator_of_the_call_around_its_launch(
    builder: NsysBuilder, tmp_path: Path
) -> None:
    say(builder, "ncclAllReduce", 100, sized(WORLD, 4096))
    builder.kernel(103, 10, name=ALL_REDUCE, start=200)
    builder.kernel(110, 10, name="gemm", start=300)
    found = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert found == [CollectiveCall("all_reduce", GROUP, dtype="bfloat16", byte_count=4096), None]


def test_a_payload_as_nsys_wrote_it_on_two_gpus_is_read(builder: NsysBuilder, tmp_path: Path) -> None:
    """DDP's first bucket: 4 layers of 1024 × 1024 weights and 1024 biases in float32; the operation ends in rubbish."""
    data = (
        "0100000000000000 0500000100000000 1800000000000000 2000000000000000"
        "bbae3cc2deb8817a 0040000100000000 000000008a7f0000"
    )
    say(builder, "ncclAllReduce", 100, bytes.fromhex(data))
    builder.kernel(103, 10, name=ALL_REDUCE.replace("bf16", "f32"))
    (found,) = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert found == CollectiveCall("all_reduce", GROUP, dtype="float32", byte_count=4 * (1024 * 1024 + 1024) * 4)


def test_of_an_all_gather_nccl_says_the_part_of_one_rank(builder: NsysBuilder, tmp_path: Path) -> None:
    for rank, pid in enumerate((100, 200)):
        say(builder, "ncclCommInitRankConfig", 1, made(WORLD, 2, rank), pid=pid, tid=pid)
        for name, start in (("ncclAllGather", 100), ("ncclReduceScatter", 200), ("ncclAlltoAll", 300)):
            say(builder, name, start, sized(WORLD, 1024), pid=pid, tid=pid)
            builder.kernel(start + 1, 5, name=SEND_RECV if "All" in name else ALL_GATHER, pid=pid, tid=pid)
    found = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert {(one.kind, one.byte_count) for one in found if one is not None} == {
        *(("all_gather", 2048), ("reduce_scatter", 2048), ("all_to_all", 2048)),
    }


def test_a_communicator_that_was_split_off_has_the_ranks_that_use_it_if_all_are_here(
    builder: NsysBuilder, tmp_path: Path
) -> None:
    for rank, pid in enumerate((100, 200, 300, 400)):
        say(builder, "ncclCommInitRankConfig", 1, made(WORLD, 4, rank), pid=pid, tid=pid)
        say(builder, "ncclAllGather", 100, sized(PAIR + rank // 2, 1024), pid=pid, tid=pid)
        builder.kernel(101, 5, name=ALL_GATHER, pid=pid, tid=pid)
    found = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert {one.byte_count for one in found if one is not None} == {2048}


@pytest.mark.parametrize("ranks", [None, 4])
def test_the_size_is_unknown_where_ranks_may_be_elsewhere(
    builder: NsysBuilder, tmp_path: Path, ranks: int | None
) -> None:
    """The communicator was made before the recording began, or on two machines."""
    for rank, pid in enumerate((100, 200)):
        if ranks is not None:
            say(builder, "ncclCommInitRankConfig", 1, made(WORLD, ranks, rank), pid=pid, tid=pid)
        say(builder, "ncclAllGather", 100, sized(PAIR, 1024), pid=pid, tid=pid)
        builder.kernel(101, 5, name=ALL_GATHER, pid=pid, tid=pid)
    found = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert found == [CollectiveCall("all_gather", PAIR_GROUP)] * 2


def test_several_calls_that_became_one_kernel_count_together(builder: NsysBuilder, tmp_path: Path) -> None:
    for at in range(3):
        say(builder, "ncclAllReduce", 100 + 10 * at, sized(WORLD, 1000))
    builder.kernel(150, 10, name=ALL_REDUCE)
    say(builder, "ncclSend", 200, sized(WORLD, 77))
    say(builder, "ncclRecv", 210, sized(WORLD, 77))
    builder.kernel(250, 10, name=SEND_RECV)
    first, second = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert first == CollectiveCall("all_reduce", GROUP, dtype="bfloat16", byte_count=3000)
    assert second == CollectiveCall("send", GROUP), "it also waits for what it receives"


@pytest.mark.parametrize("ranks", [None, 2])
def test_sends_to_every_rank_and_so_to_itself_are_an_all_to_all(
    builder: NsysBuilder, tmp_path: Path, ranks: int | None
) -> None:
    """As torch makes it of uneven parts, on two GPUs; its size is the larger side of the rank, here what it receives.

    Whether the communicator was made while nsys recorded or before.
    """
    parts = {100: ((46, 46), (87, 89)), 200: ((89, 87), (85, 85))}
    for rank, (pid, sizes) in enumerate(parts.items()):
        if ranks is not None:
            say(builder, "ncclCommInitRankConfig", 1, made(WORLD, ranks, rank), pid=pid, tid=pid)
        for peer, (out, back) in enumerate(sizes):
            say(builder, "ncclSend", 100 + 10 * peer, sent(WORLD, out, peer), pid=pid, tid=pid)
            say(builder, "ncclRecv", 105 + 10 * peer, sent(WORLD, back, peer), pid=pid, tid=pid)
        builder.kernel(150 + rank, 10, name=SEND_RECV, pid=pid, tid=pid, start=200 + rank)
    first, second = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert first == CollectiveCall("all_to_all", GROUP, byte_count=46 + 89)
    assert second == CollectiveCall("all_to_all", GROUP, byte_count=89 + 85)


def test_the_light_record_says_which_sends_are_an_all_to_all(tmp_path: Path) -> None:
    """Here NCCL left no payloads: its kernels are all called SendRecv."""
    builder, records = NsysBuilder(), []
    for rank, pid in enumerate((100, 200)):
        steps = []
        for step in range(3):
            start = 1000 * step
            builder.range(f"step {step}", start, start + 990, pid=pid, tid=pid)
            builder.kernel(start + 6, 400, name=SEND_RECV, pid=pid, tid=pid, device=rank, start=start + 10)
            calls = Collectives([0], [step], ["all_to_all"], ["float32"], [4096], *([None] for _ in range(5)))
            steps.append(StepRecord(f"step {step}", start, start + 990, collectives=calls))
        records.append(LightRecord(rank, 2, groups=(Group(0, "7", (0, 1), "ep", "nccl"),), steps=tuple(steps)))
    run = write_light_run(tmp_path / "run", records)
    builder.write(run / "trace.sqlite")
    result = read_ranks(run)
    (row,) = result.groups
    assert (row.group, row.kind, row.byte_count, row.wire_ns) == ("ep", "all_to_all", 3 * 4096, 3 * 400)
    assert result.pipelines == ()


def test_sends_to_both_neighbours_are_sends(builder: NsysBuilder, tmp_path: Path) -> None:
    """Of three stages, the middle one sends to both others at once, and the outer ones to it."""
    for rank, (pid, peers) in enumerate(((100, (1,)), (200, (0, 2)), (300, (1,)))):
        for at, peer in enumerate(peers):
            say(builder, "ncclSend", 100 + 10 * at, sent(WORLD, 50, peer), pid=pid, tid=pid)
            say(builder, "ncclRecv", 105 + 10 * at, sent(WORLD, 40, peer), pid=pid, tid=pid)
        builder.kernel(150 + rank, 10, name=SEND_RECV, pid=pid, tid=pid, start=200 + rank)
    found = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert found == [CollectiveCall("send", GROUP)] * 3


def test_which_of_several_calls_a_kernel_is_is_unknown(builder: NsysBuilder, tmp_path: Path) -> None:
    for at in range(2):
        say(builder, "ncclAllReduce", 100 + 10 * at, sized(WORLD, 1000 * (at + 1)))
    for at in range(2):
        builder.kernel(150 + at, 10, name=ALL_REDUCE)
    found = _calls(read_nsys(builder.write(tmp_path / "a.sqlite")))
    assert found == [CollectiveCall("all_reduce", GROUP, dtype="bfloat16")] * 2


@pytest.mark.parametrize("others", [("ncclAllReduce", PAIR), ("ncclAllGather", WORLD)])
def test_calls_of_several_kinds_or_communicators_tell_nothing_of_one_kernel(
    builder: NsysBuilder, tmp_path: Path, others: tuple[str, int]
) -> None:
    say(builder, "ncclAllReduce", 100, sized(WORLD, 1000))
    say(builder, others[0], 110, sized(others[1], 1000))
    builder.kernel(150, 10, name=ALL_REDUCE)
    trace = read_nsys(builder.write(tmp_path / "a.sqlite"))
    assert (trace.work.collective, trace.collectives) == (None, ())


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"\x01",
        sized(WORLD, 1000)[:40],
        payload(99, struct.pack("<QQ", WORLD, 1000)),
        struct.pack("<QQQQ", DOMAIN, SIZED, 1 << 63, 1 << 63),
    ],
)
def test_a_payload_that_cannot_be_read_tells_nothing(builder: NsysBuilder, tmp_path: Path, data: bytes | None) -> None:
    say(builder, "ncclAllReduce", 100, data)
    builder.kernel(103, 10, name=ALL_REDUCE)
    assert read_nsys(builder.write(tmp_path / "a.sqlite")).collectives == ()


def test_an_impossible_size_is_unknown(builder: NsysBuilder, tmp_path: Path) -> None:
    say(builder, "ncclAllReduce", 100, sized(WORLD, (1 << 64) - 1))
    builder.kernel(103, 10, name=ALL_REDUCE)
    assert _calls(read_nsys(builder.write(tmp_path / "a.sqlite"))) == [
        CollectiveCall("all_reduce", GROUP, dtype="bfloat16")
    ]


def test_an_export_without_payloads_reads_as_before(tmp_path: Path) -> None:
    trace = read_nsys(write_nsys(tmp_path / "a.sqlite", simulate(2, 2)))
    assert (trace.work.collective, trace.collectives) == (None, ())


def test_a_pipeline_is_judged_by_its_communicator_alone(builder: NsysBuilder, tmp_path: Path) -> None:
    for stage, (pid, name) in enumerate(((100, "ncclSend"), (200, "ncclRecv"))):
        for step in range(4):
            start = 1000 * step
            builder.range(f"step {step}", start, start + 990, pid=pid, tid=pid)
            say(builder, name, start + 5, sized(PAIR, 4096), pid=pid, tid=pid)
            builder.kernel(
                start + 6, 400 - 100 * stage, name=SEND_RECV, pid=pid, tid=pid, device=stage, start=start + 10
            )
            builder.kernel(start + 500, 400, pid=pid, tid=pid, device=stage, start=start + 510)
    (one,) = read_ranks(builder.write(tmp_path / "a.sqlite")).pipelines
    assert (one.ranks, one.longest, one.bubble_ns) == ((0, 1), 1, 300)


def test_a_group_of_a_communicator_has_the_ranks_that_used_it(builder: NsysBuilder, tmp_path: Path) -> None:
    for rank, pid in enumerate((100, 200, 300, 400)):
        for step in range(3):
            start = 1000 * step
            say(builder, "ncclAllReduce", start + 100, sized(PAIR + rank // 2, 4096), pid=pid, tid=pid)
            builder.range(f"step {step}", start, start + 900, pid=pid, tid=pid)
            builder.kernel(start + 101, 300, name=ALL_REDUCE, pid=pid, tid=pid, device=rank, start=start + 200 + rank)
    result = read_ranks(builder.write(tmp_path / "a.sqlite"))
    (row,) = result.groups
    assert (row.group, row.rank_count) == ("groups of 2", 2)
    assert (row.byte_count, row.dtype) == (row.count * 4096, "bfloat16")
    assert row.bus_bandwidth == row.algorithm_bandwidth
    assert compare_records([]).groups == ()
