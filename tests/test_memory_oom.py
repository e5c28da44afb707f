"""The verdict on an out-of-memory error, on made histories whose cause is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit import read_snapshot
from profkit.analysis.memory.failures import OomVerdict
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.snapshot.reader import build_snapshot
from tests.allocator_reference import MIB, ReferenceAllocator
from tests.captures import capture


def failed(allocator: ReferenceAllocator, wanted: int, device_free: int, capacity: int | None = None) -> OomVerdict:
    allocator.clock += 1
    allocator.events.append(
        {"action": "oom", "device_free": device_free, "size": wanted, "stream": 0, "time_us": allocator.clock}
    )
    opened = OpenedSnapshot(build_snapshot(Path("oom.pickle"), allocator.snapshot()))
    verdict = opened.memory(capacity_bytes=capacity).oom
    assert verdict is not None
    return verdict


@pytest.fixture
def allocator() -> ReferenceAllocator:
    made = ReferenceAllocator()
    made.record()
    return made


def test_too_little_memory_for_the_live_blocks_is_a_lack_of_capacity_that_no_setting_helps(
    allocator: ReferenceAllocator,
) -> None:
    expandable = ReferenceAllocator(expandable=True)
    expandable.record()
    for recorded in (allocator, expandable):  # settings that are on already are no advice
        for _ in range(3):
            recorded.malloc(100 * MIB)
        verdict = failed(recorded, 80 * MIB, device_free=50 * MIB)
        assert (verdict.cause, verdict.fitting_settings) == ("capacity", ())
        assert verdict.short_bytes == 30 * MIB
        assert (verdict.allocated_bytes, verdict.reserved_bytes, verdict.free_bytes) == (300 * MIB, 300 * MIB, 0)


def test_free_memory_in_a_segment_with_a_live_block_is_fragmentation(allocator: ReferenceAllocator) -> None:
    big = allocator.malloc(100 * MIB)
    allocator.free(big)
    allocator.malloc(40 * MIB)
    pin = allocator.malloc(20 * MIB)
    assert pin.address == big.address + 40 * MIB
    allocator.free(allocator.regions[0].blocks[0])
    verdict = failed(allocator, 70 * MIB, device_free=10 * MIB)
    assert verdict.cause == "fragmentation"
    assert verdict.short_bytes == 60 * MIB
    assert verdict.free_bytes == 80 * MIB


def test_only_settings_that_let_the_request_through_are_named(allocator: ReferenceAllocator) -> None:
    """30 and 25 MiB are free in two segments; expandable ones give two pages of 20 MiB back, which then serve it."""
    blocks = [allocator.malloc(60 * MIB) for _ in range(4)]
    for block, kept in ((blocks[0], 30), (blocks[2], 35)):
        allocator.free(block)
        allocator.malloc(kept * MIB)
    verdict = failed(allocator, 50 * MIB, device_free=20 * MIB)
    assert verdict.cause == "fragmentation"
    assert verdict.fitting_settings == ("expandable_segments:True",)


def test_a_request_that_the_simulation_serves_proves_nothing_about_settings(allocator: ReferenceAllocator) -> None:
    allocator.malloc(100 * MIB)
    allocator.free(allocator.malloc(90 * MIB))
    assert failed(allocator, 80 * MIB, device_free=0).fitting_settings is None


def test_free_memory_on_another_stream_cannot_serve_the_request(allocator: ReferenceAllocator) -> None:
    block = allocator.malloc(100 * MIB, stream=7)
    allocator.malloc(1000)
    allocator.free(block)
    verdict = failed(allocator, 90 * MIB, device_free=0)
    assert verdict.cause == "fragmentation"
    assert verdict.free_bytes == 102 * MIB - 1024


@pytest.mark.parametrize(
    ("live", "wanted", "device_free", "capacity", "cause", "outside"),
    [
        (100, 5000, 900, None, "outsized", None),
        (100, 100, 50, 4000, "outside", 3850),
        (3500, 100, 50, 4000, "capacity", 450),  # a CUDA context of usual size is not the cause
    ],
)
def test_what_lies_outside_pytorch_or_is_larger_than_the_device_is_the_cause(
    allocator: ReferenceAllocator,
    live: int,
    wanted: int,
    device_free: int,
    capacity: int | None,
    cause: str,
    outside: int | None,
) -> None:
    allocator.malloc(live * MIB)
    verdict = failed(allocator, wanted * MIB, device_free * MIB, None if capacity is None else capacity * MIB)
    assert (verdict.cause, verdict.outside_bytes) == (cause, None if outside is None else outside * MIB)


def test_the_segment_that_was_needed_may_be_larger_than_the_request(allocator: ReferenceAllocator) -> None:
    allocator.malloc(100 * MIB)
    verdict = failed(allocator, 5 * MIB, device_free=12 * MIB)
    assert (verdict.needed_bytes, verdict.short_bytes) == (20 * MIB, 8 * MIB)


def test_a_real_dump_under_a_memory_fraction_is_limited() -> None:
    verdict = read_snapshot(capture("oom.pickle")).memory().oom
    assert verdict.cause == "capacity"
    assert verdict.is_limited
    assert verdict.requested_bytes == 268_435_456
    assert verdict.short_bytes == 7_247_757_312 + 268_435_456 - 7_314_866_176
