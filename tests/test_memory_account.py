"""The account of a snapshot: sums, moments, phases, devices, leaks, warnings, and why an allocation failed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit import read_snapshot
from profkit.analysis.memory.bins import bin_history
from profkit.analysis.memory.failures import OomVerdict, find_free_blocks
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.errors import SnapshotError, UsageError
from profkit.snapshot.reader import build_snapshot
from tests.allocator_reference import MIB, Block, ReferenceAllocator
from tests.captures import capture
from tests.memory_captures import Training, assert_books_close, sizes


@pytest.fixture
def opened(tmp_path: Path) -> OpenedSnapshot:
    return read_snapshot(Training().write(tmp_path))


@pytest.mark.parametrize(
    "name", ["small.pickle", "small_forward_cpp_stacks.pickle", "expandable.pickle", "midrun.pickle", "oom.pickle"]
)
def test_categories_and_stacks_of_real_snapshots_sum_to_what_is_allocated(name: str) -> None:
    opened = read_snapshot(capture(name))
    result = opened.memory()
    assert result.composition.allocated_bytes == result.totals.allocated_peak_bytes
    assert_books_close(result)
    assert_books_close(opened.memory(stack="probe", min_bytes=MIB))
    for phase in result.phases:
        at = opened.memory(at=f"phase:{phase.name}").composition
        assert at.allocated_bytes == phase.peak_bytes
        assert at.phase == phase.name


def test_nested_phases_count_as_the_outermost_one(tmp_path: Path) -> None:
    training = Training(steps=0)
    training.mark("START", "opt")
    training.step(0, False)
    training.mark("END", "opt")
    (phase,) = read_snapshot(training.write(tmp_path)).memory().phases
    assert (phase.name, phase.instances) == ("optimizer", 1)


def test_a_filter_adds_up_the_other_allocations_in_one_line(opened: OpenedSnapshot) -> None:
    result = opened.memory(stack="adam.py", min_bytes=MIB)
    assert sizes(result) == {"optimizer state": 16 * MIB, "(not selected)": 32 * MIB + 3072}
    assert_books_close(result)
    assert [row.bytes for row in result.composition.largest] == [4 * MIB] * 4


def test_a_moment_is_a_phase_or_a_time_and_anything_else_is_refused(opened: OpenedSnapshot) -> None:
    forward = opened.memory(at="phase:forward").composition
    assert forward.phase == "forward"
    assert {row.category for row in forward.by_category} >= {"parameters", "activations", "temporaries"}
    first = int(opened.device().timeline.times_us[0])
    assert opened.memory(at="0us").composition.moment == 1
    assert opened.memory(at=str(first)).composition.moment == 1
    assert opened.memory(at="0.014ms").composition.moment == 3
    for wrong in ("phase:nothing", "noon", "500s"):
        with pytest.raises(UsageError, match=r"^(no phase|moment)"):
            opened.memory(at=wrong)


def test_a_phase_that_the_user_names_takes_precedence(tmp_path: Path) -> None:
    training = Training()
    training.mark("START", "epoch 1")
    training.malloc(700, "keep")
    training.mark("END", "epoch 1")
    result = read_snapshot(training.write(tmp_path), phases={"tail": "epoch *"}).memory(at="phase:tail")
    assert [phase.name for phase in result.phases] == ["forward", "backward", "optimizer", "tail"]


def test_the_device_with_the_highest_peak_is_the_default(tmp_path: Path) -> None:
    data, other = Training().snapshot(), Training(scale=2).snapshot()
    for segment in other["segments"]:
        segment["device"] = 1
    data["segments"] += other["segments"]
    data["device_traces"] += other["device_traces"]
    (tmp_path / "two.pickle").write_bytes(pickle.dumps(data))
    opened = read_snapshot(tmp_path / "two.pickle")
    assert opened.memory().totals.device == 1
    assert [totals.device for totals in opened.memory().others] == [0]
    assert opened.memory(device=0).totals.allocated_peak_bytes == Training().allocator.peaks()[0]
    with pytest.raises(UsageError, match="device 7"):
        opened.memory(device=7)


def test_state_made_on_first_use_is_no_leak_and_what_every_step_keeps_is_one(tmp_path: Path) -> None:
    clean, leaking = Training(), Training(leaks=True, steps=4)
    assert not read_snapshot(clean.write(tmp_path)).memory().leaks.suspects
    result = read_snapshot(leaking.write(tmp_path)).memory()
    assert [(one.step, one.began_in) for one in result.leaks.steps] == [
        ("step 1", "step 0"),
        ("step 2", "step 1"),
        ("step 3", "step 2"),
    ]
    assert result.leaks.steps[0].bytes == 1024 + 16 * MIB  # AdamW's moments began in step 0 too
    assert [(row.bytes, row.label) for row in result.leaks.suspects] == [
        (1024, "train.py:30 remember ← train.py:45 <module>")
    ]
    assert "leak" in {warning.code for warning in result.warnings}


def test_devices_share_one_clock_and_the_phases_of_their_process() -> None:
    """torch notes a range only at the device that is current: here device 0, and device 1 starts 2 s later."""
    first, second = Training(), Training()
    for event in second.allocator.events:
        event["time_us"] += 2_000_000
    for mark in second.annotations:
        mark["time_us"] += 2_000_000
    data, other = first.snapshot(), second.snapshot()
    for segment in other["segments"]:
        segment["device"] = 1
    data["segments"] += other["segments"]
    data["device_traces"] += other["device_traces"]
    data["external_annotations"] += other["external_annotations"]
    opened = build_opened(data)
    results = [opened.memory(device=device) for device in (0, 1)]
    assert {phase.name for phase in results[1].phases} == {"forward", "backward", "optimizer"}
    assert results[1].composition.phase == "backward"
    times = [result.composition.time_us or 0 for result in results]
    assert times[1] - times[0] == 2_000_000
    assert {result.history.zero_us for result in results} == {first.allocator.events[0]["time_us"]}
    assert opened.memory(device=1, at="2.0001s").composition.allocated_bytes
    assert not opened.memory(device=1, at="1s").composition.allocated_bytes
    bins = bin_history(opened.device(1))
    assert int(bins.times_us[0]) == 2_000_000
    assert min(shape.born_us or 0 for shape in bins.shapes) >= 2_000_000


def build_opened(data: dict[str, Any]) -> OpenedSnapshot:
    return OpenedSnapshot(build_snapshot(Path("two.pickle"), data))


def suspects(tmp_path: Path, steps: int, lives: Callable[[int], int], record_at: int = 0) -> list[tuple[int, int]]:
    """Return (bytes, every how many steps) of the suspects; what step N remembers is freed after ``lives(N)`` steps."""
    training = Training(steps=0)
    remembered: list[tuple[int, Block]] = []
    for step in range(steps):
        if step == record_at:
            training.allocator.events.clear()
            training.allocator.at_event = training.allocator.at_event[-1:]
        training.step(step, False)
        for due, block in remembered:
            if due == step:
                training.allocator.free(block)
        if lives(step):
            remembered.append((step + lives(step), training.malloc(3 * MIB, "keep")))
    return [(row.bytes, row.every) for row in read_snapshot(training.write(tmp_path)).memory().leaks.suspects]


@pytest.mark.parametrize("record_at", [0, 10])
def test_a_sliding_window_is_no_leak_and_a_tensor_kept_every_few_steps_is_one(tmp_path: Path, record_at: int) -> None:
    for window in (1, 2, 3, 6):
        assert suspects(tmp_path, 20, lambda _, window=window: window, record_at) == []
    for every in (1, 2, 3):
        found = suspects(tmp_path, 20, lambda step, every=every: 0 if step % every else 100, record_at)
        assert found == [(3 * MIB, every)]


@pytest.mark.parametrize("every", [1, 2])
def test_a_window_that_is_full_since_the_last_step_is_no_leak(tmp_path: Path, every: int) -> None:
    training, window = Training(steps=0), list[Block]()
    for step in range(5 * every + 1):
        training.mark("START", f"step {step}")
        if len(window) == 5 and step % every == 0:
            training.allocator.free(window.pop(0))
        if step % every == 0:
            window.append(training.malloc(3 * MIB, "keep"))
        training.mark("END", f"step {step}")
    assert not read_snapshot(training.write(tmp_path)).memory().leaks.suspects


def test_a_leak_is_told_from_results_that_live_for_a_while_and_from_what_only_the_first_steps_keep(
    tmp_path: Path,
) -> None:
    lives = [100, 2, 100, 2, 100, 3, 100, 100, 3, 1, 100]  # in the last step more is freed than kept
    assert suspects(tmp_path, 11, lives.__getitem__)
    assert suspects(tmp_path, 8, lambda step: 100 if step < 3 else 0) == []
    for steps, is_one in ((5, False), (6, True)):  # it has grown twice, and three times
        assert bool(suspects(tmp_path, steps, lambda step: 0 if step % 2 else 100)) == is_one


def test_without_a_history_the_first_warning_says_so(tmp_path: Path) -> None:
    data = Training().snapshot()
    data["device_traces"] = []
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data))
    result = read_snapshot(tmp_path / "s.pickle").memory()
    assert result.warnings[0].code == "no-history"
    assert not result.totals.exact
    assert result.totals.bounds == (24 * MIB, None)
    assert result.composition.allocated_bytes == 24 * MIB
    assert_books_close(result)
    with pytest.raises(SnapshotError, match="no times"):
        read_snapshot(tmp_path / "s.pickle").memory(at="1s")


def test_an_impossible_sequence_is_counted_and_its_peak_is_not_exact(tmp_path: Path) -> None:
    training = Training()
    events = training.allocator.events
    odd = {"action": "free_requested", "addr": 77, "size": 5, "stream": 0, "frames": []}
    events.insert(4, {**odd, "time_us": events[3]["time_us"]})
    result = read_snapshot(training.write(tmp_path)).memory()
    assert not result.totals.exact
    low, high = result.totals.bounds or (0, 0)
    assert low <= Training().allocator.peaks()[0] <= (high or 0)
    assert result.warnings[0].code == "contradiction"
    assert_books_close(result)


def test_a_snapshot_without_settings_is_read_and_says_so(tmp_path: Path) -> None:
    data = Training().snapshot()
    del data["allocator_settings"], data["external_annotations"]
    (tmp_path / "plain.pickle").write_bytes(pickle.dumps(data))
    result = read_snapshot(tmp_path / "plain.pickle").memory()
    assert result.totals.allocated_peak_bytes == Training().allocator.peaks()[0]
    assert "no-settings" in {warning.code for warning in result.warnings}


def test_a_snapshot_without_settings_and_with_segments_of_others_is_not_exact(tmp_path: Path) -> None:
    allocator = ReferenceAllocator(divisions=4)
    allocator.record()
    allocator.free(allocator.malloc(33 * MIB))
    data = allocator.snapshot()
    del data["allocator_settings"]
    (tmp_path / "plain.pickle").write_bytes(pickle.dumps(data))
    assert not read_snapshot(tmp_path / "plain.pickle").memory().totals.exact


def test_the_json_has_all_documented_keys(opened: OpenedSnapshot) -> None:
    data = json.loads(json.dumps(opened.memory().to_dict()))
    keys = "snapshot device allocated reserved requested exact bounds history peak phases fragmentation oom devices"
    assert {*keys.split(), "warnings"} <= set(data)
    assert set(data["allocated"]) == {"peak_bytes", "peak_time_us", "end_bytes"}
    assert set(data["reserved"]) == {"peak_bytes", "end_bytes"}
    assert {"complete", "events", "reason"} <= set(data["history"])
    assert set(data["peak"]["by_category"][0]) >= {"category", "bytes", "share", "evidence"}
    assert set(data["peak"]["by_stack"][0]) == {"bytes", "share", "count", "stack"}
    assert set(data["peak"]["largest"][0]) >= {"bytes", "requested_bytes", "phase", "owner", "stack"}
    assert sum(row["bytes"] for row in data["peak"]["by_stack"]) == data["allocated"]["peak_bytes"]
    assert data["peak"]["by_stack"][0]["stack"][0].startswith("train.py")  # the user's own lines first


# -- out of memory -------------------------------------------------------------------------------------------------


def test_free_blocks_can_be_found_in_the_middle_of_a_history(allocator: ReferenceAllocator) -> None:
    first, second = allocator.malloc(5 * MIB), allocator.malloc(6 * MIB)
    allocator.free(first)
    moment = len(allocator.events)
    allocator.free(second)
    allocator.empty_cache()
    opened = OpenedSnapshot(build_snapshot(Path("x"), allocator.snapshot()))
    free_blocks = find_free_blocks(opened.device().history, moment)
    assert [(block.size_bytes, block.is_large) for block in free_blocks] == [(9 * MIB, True), (5 * MIB, True)]


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


def test_fragmentation_names_the_blocks_that_keep_the_segment(allocator: ReferenceAllocator) -> None:
    big = allocator.malloc(100 * MIB)
    allocator.free(big)
    allocator.malloc(40 * MIB)
    pin = allocator.malloc(20 * MIB)
    assert pin.address == big.address + 40 * MIB
    allocator.free(allocator.regions[0].blocks[0])
    verdict = failed(allocator, 70 * MIB, device_free=10 * MIB)
    assert verdict.cause == "fragmentation"
    assert verdict.short_bytes == 60 * MIB
    (candidate,) = verdict.largest_free
    assert (candidate.bytes, candidate.pool, candidate.is_usable) == (40 * MIB, "large", True)
    assert [block.bytes for block in candidate.pinned_by] == [20 * MIB]


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
    assert [(free.pool, free.stream, free.is_usable) for free in verdict.largest_free] == [
        ("large", 7, False),
        ("small", 0, False),
    ]


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
