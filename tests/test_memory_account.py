"""The account of a snapshot: sums, moments, phases, devices, leaks, warnings, and why an allocation failed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from profkit import read_snapshot
from profkit.analysis.memory.bins import bin_history
from profkit.analysis.memory.failures import OomVerdict, find_free_blocks
from profkit.errors import SnapshotError, UsageError
from tests.allocator_reference import MIB, Block, ReferenceAllocator, recording
from tests.captures import capture
from tests.memory_captures import Training, assert_books_close, on_two_devices, opened, sizes


@pytest.mark.parametrize(
    "name", ["small.pickle", "small_forward_cpp_stacks.pickle", "expandable.pickle", "midrun.pickle", "oom.pickle"]
)
def test_categories_and_stacks_of_real_snapshots_sum_to_what_is_allocated(name: str) -> None:
    snapshot = read_snapshot(capture(name))
    result = snapshot.memory()
    assert result.composition.allocated_bytes == result.totals.allocated_peak_bytes
    assert_books_close(result)
    assert_books_close(snapshot.memory(stack="probe", min_bytes=MIB))
    for phase in result.phases:
        at = snapshot.memory(at=f"phase:{phase.name}").composition
        assert (at.allocated_bytes, at.phase) == (phase.peak_bytes, phase.name)


def test_of_nested_phases_the_outermost_counts_and_those_that_the_user_names_take_precedence() -> None:
    training = Training(steps=0)
    with training.within("opt"):
        training.step(0, False)
    assert [(phase.name, phase.instances) for phase in training.memory().phases] == [("optimizer", 1)]
    training = Training()
    with training.within("epoch 1"):
        training.malloc(700, "keep")
    result = opened(training.snapshot(), phases={"tail": "epoch *"}).memory(at="phase:tail")
    assert [phase.name for phase in result.phases] == ["forward", "backward", "optimizer", "tail"]


def test_a_filter_adds_up_the_other_allocations_in_one_line() -> None:
    result = Training().memory(stack="adam.py", min_bytes=MIB)
    assert sizes(result) == {"optimizer state": 16 * MIB, "(not selected)": 32 * MIB + 3072}
    assert_books_close(result)
    assert [row.bytes for row in result.composition.largest] == [4 * MIB] * 4


def test_a_moment_is_a_phase_or_a_time_and_anything_else_is_refused() -> None:
    snapshot = Training().opened()
    forward = snapshot.memory(at="phase:forward").composition
    assert forward.phase == "forward"
    assert {row.category for row in forward.by_category} >= {"parameters", "activations", "temporaries"}
    first = int(snapshot.device().timeline.times_us[0])
    for at, moment in (("0us", 1), (str(first), 1), ("0.014ms", 3)):
        assert snapshot.memory(at=at).composition.moment == moment
    for wrong in ("phase:nothing", "noon", "500s"):
        with pytest.raises(UsageError, match=r"^(no phase|moment)"):
            snapshot.memory(at=wrong)


def test_the_device_with_the_highest_peak_is_the_default() -> None:
    snapshot = opened(on_two_devices(Training().snapshot(), Training(scale=2).snapshot()))
    assert snapshot.memory().totals.device == 1
    assert [totals.device for totals in snapshot.memory().others] == [0]
    assert snapshot.memory(device=0).totals.allocated_peak_bytes == Training().allocator.peaks()[0]
    with pytest.raises(UsageError, match="device 7"):
        snapshot.memory(device=7)


def test_devices_share_one_clock_and_the_phases_of_their_process() -> None:
    """torch notes a range only at the device that is current: here device 0, and device 1 starts 2 s later."""
    first, second = Training(), Training()
    for event in (*second.allocator.events, *second.annotations):
        event["time_us"] += 2_000_000
    data = on_two_devices(first.snapshot(), second.snapshot())
    data["external_annotations"] = first.annotations + second.annotations
    snapshot = opened(data)
    results = [snapshot.memory(device=device) for device in (0, 1)]
    assert {phase.name for phase in results[1].phases} == {"forward", "backward", "optimizer"}
    assert results[1].composition.phase == "backward"
    times = [result.composition.time_us or 0 for result in results]
    assert times[1] - times[0] == 2_000_000
    assert {result.history.zero_us for result in results} == {first.allocator.events[0]["time_us"]}
    assert snapshot.memory(device=1, at="2.0001s").composition.allocated_bytes
    assert not snapshot.memory(device=1, at="1s").composition.allocated_bytes
    bins = bin_history(snapshot.device(1))
    assert int(bins.times_us[0]) == 2_000_000
    assert min(shape.born_us or 0 for shape in bins.shapes) >= 2_000_000


# -- leaks -----------------------------------------------------------------------------------------------------------


def test_state_made_on_first_use_is_no_leak_and_what_every_step_keeps_is_one() -> None:
    assert not Training().memory().leaks.suspects
    result = Training(leaks=True, steps=4).memory()
    assert [(one.step, one.began_in) for one in result.leaks.steps] == [
        (f"step {number + 1}", f"step {number}") for number in range(3)
    ]
    assert result.leaks.steps[0].bytes == 1024 + 16 * MIB  # AdamW's moments began in step 0 too
    assert [(row.bytes, row.label) for row in result.leaks.suspects] == [
        (1024, "train.py:30 remember ← train.py:45 <module>")
    ]
    assert "leak" in {warning.code for warning in result.warnings}


def suspects(steps: int, lives: Callable[[int], int], record_at: int = 0) -> list[tuple[int, int]]:
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
    return [(row.bytes, row.every) for row in training.memory().leaks.suspects]


@pytest.mark.parametrize("record_at", [0, 10])
def test_a_sliding_window_is_no_leak_and_a_tensor_kept_every_few_steps_is_one(record_at: int) -> None:
    for window in (1, 2, 3, 6):
        assert suspects(20, lambda _, window=window: window, record_at) == []
    for every in (1, 2, 3):
        found = suspects(20, lambda step, every=every: 0 if step % every else 100, record_at)
        assert found == [(3 * MIB, every)]


@pytest.mark.parametrize("every", [1, 2])
def test_a_window_that_is_full_since_the_last_step_is_no_leak(every: int) -> None:
    training, window = Training(steps=0), list[Block]()
    for step in range(5 * every + 1):
        with training.within(f"step {step}"):
            if len(window) == 5 and step % every == 0:
                training.allocator.free(window.pop(0))
            if step % every == 0:
                window.append(training.malloc(3 * MIB, "keep"))
    assert not training.memory().leaks.suspects


def test_a_leak_is_told_from_results_that_live_for_a_while_and_from_what_only_the_first_steps_keep() -> None:
    lives = [100, 2, 100, 2, 100, 3, 100, 100, 3, 1, 100]  # in the last step more is freed than kept
    assert suspects(11, lives.__getitem__)
    assert suspects(8, lambda step: 100 if step < 3 else 0) == []
    for steps, is_one in ((5, False), (6, True)):  # it has grown twice, and three times
        assert bool(suspects(steps, lambda step: 0 if step % 2 else 100)) == is_one


# -- what the history lacks ------------------------------------------------------------------------------------------


def test_without_a_history_the_first_warning_says_so() -> None:
    snapshot = opened({**Training().snapshot(), "device_traces": []})
    result = snapshot.memory()
    assert result.warnings[0].code == "no-history"
    assert (result.totals.exact, result.totals.bounds) == (False, (24 * MIB, None))
    assert result.composition.allocated_bytes == 24 * MIB
    assert_books_close(result)
    with pytest.raises(SnapshotError, match="no times"):
        snapshot.memory(at="1s")


def test_an_impossible_sequence_is_counted_and_its_peak_is_not_exact() -> None:
    training = Training()
    events = training.allocator.events
    odd = {"action": "free_requested", "addr": 77, "size": 5, "stream": 0, "frames": []}
    events.insert(4, {**odd, "time_us": events[3]["time_us"]})
    result = training.memory()
    assert not result.totals.exact
    low, high = result.totals.bounds or (0, 0)
    assert low <= Training().allocator.peaks()[0] <= (high or 0)
    assert result.warnings[0].code == "contradiction"
    assert_books_close(result)


def test_a_snapshot_without_settings_says_so_and_with_segments_of_others_is_not_exact() -> None:
    data = Training().snapshot()
    del data["allocator_settings"], data["external_annotations"]
    result = opened(data).memory()
    assert result.totals.allocated_peak_bytes == Training().allocator.peaks()[0]
    assert "no-settings" in {warning.code for warning in result.warnings}
    allocator = recording(divisions=4)
    allocator.free(allocator.malloc(33 * MIB))
    data = allocator.snapshot()
    del data["allocator_settings"]
    assert not opened(data).memory().totals.exact


def test_the_json_has_all_documented_keys() -> None:
    data = json.loads(json.dumps(Training().memory().to_dict()))
    keys = "snapshot device allocated reserved requested exact bounds history peak phases fragmentation oom devices"
    assert {*keys.split(), "warnings"} <= set(data)
    assert set(data["allocated"]) == {"peak_bytes", "peak_time_us", "end_bytes"}
    assert set(data["reserved"]) == {"peak_bytes", "end_bytes"}
    assert {"complete", "events", "reason"} <= set(data["history"])
    peak = data["peak"]
    assert set(peak["by_category"][0]) >= {"category", "bytes", "share", "evidence"}
    assert set(peak["by_stack"][0]) == {"bytes", "share", "count", "stack"}
    assert set(peak["largest"][0]) >= {"bytes", "requested_bytes", "phase", "owner", "stack"}
    assert sum(row["bytes"] for row in peak["by_stack"]) == data["allocated"]["peak_bytes"]
    assert peak["by_stack"][0]["stack"][0].startswith("train.py")  # the user's own lines first


# -- out of memory ---------------------------------------------------------------------------------------------------


def failed(allocator: ReferenceAllocator, wanted: int, device_free: int, capacity: int | None = None) -> OomVerdict:
    """Return the verdict on a request that fails now; sizes in MiB."""
    allocator.run_out(wanted * MIB, device_free * MIB)
    verdict = opened(allocator.snapshot()).memory(capacity_bytes=capacity and capacity * MIB).oom
    assert verdict is not None
    return verdict


def test_free_blocks_can_be_found_in_the_middle_of_a_history() -> None:
    allocator = recording()
    first, second = allocator.malloc(5 * MIB), allocator.malloc(6 * MIB)
    allocator.free(first)
    moment = len(allocator.events)
    allocator.free(second)
    allocator.empty_cache()
    free_blocks = find_free_blocks(opened(allocator.snapshot()).device().history, moment)
    assert [(block.size_bytes, block.is_large) for block in free_blocks] == [(9 * MIB, True), (5 * MIB, True)]


@pytest.mark.parametrize("expandable", [False, True])
def test_too_little_memory_for_the_live_blocks_is_a_lack_of_capacity_that_no_setting_helps(expandable: bool) -> None:
    allocator = recording(expandable=expandable)  # settings that are on already are no advice
    for _ in range(3):
        allocator.malloc(100 * MIB)
    verdict = failed(allocator, 80, device_free=50)
    assert (verdict.cause, verdict.fitting_settings) == ("capacity", ())
    assert verdict.short_bytes == 30 * MIB
    assert (verdict.allocated_bytes, verdict.reserved_bytes, verdict.free_bytes) == (300 * MIB, 300 * MIB, 0)


def test_fragmentation_names_the_blocks_that_keep_the_segment() -> None:
    allocator = recording()
    big = allocator.malloc(100 * MIB)
    allocator.free(big)
    allocator.malloc(40 * MIB)
    pin = allocator.malloc(20 * MIB)
    assert pin.address == big.address + 40 * MIB
    allocator.free(allocator.regions[0].blocks[0])
    verdict = failed(allocator, 70, device_free=10)
    assert (verdict.cause, verdict.short_bytes) == ("fragmentation", 60 * MIB)
    (candidate,) = verdict.largest_free
    assert (candidate.bytes, candidate.pool, candidate.is_usable) == (40 * MIB, "large", True)
    assert [block.bytes for block in candidate.pinned_by] == [20 * MIB]


def test_only_settings_that_let_the_request_through_are_named() -> None:
    """30 and 25 MiB are free in two segments; expandable ones give two pages of 20 MiB back, which then serve it."""
    allocator = recording()
    blocks = [allocator.malloc(60 * MIB) for _ in range(4)]
    for block, kept in ((blocks[0], 30), (blocks[2], 35)):
        allocator.free(block)
        allocator.malloc(kept * MIB)
    verdict = failed(allocator, 50, device_free=20)
    assert (verdict.cause, verdict.fitting_settings) == ("fragmentation", ("expandable_segments:True",))


def test_a_request_that_the_simulation_serves_proves_nothing_about_settings() -> None:
    allocator = recording()
    allocator.malloc(100 * MIB)
    allocator.free(allocator.malloc(90 * MIB))
    assert failed(allocator, 80, device_free=0).fitting_settings is None


def test_free_memory_on_another_stream_cannot_serve_the_request() -> None:
    allocator = recording()
    block = allocator.malloc(100 * MIB, stream=7)
    allocator.malloc(1000)
    allocator.free(block)
    verdict = failed(allocator, 90, device_free=0)
    assert verdict.cause == "fragmentation"
    found = [(free.pool, free.stream, free.is_usable) for free in verdict.largest_free]
    assert found == [("large", 7, False), ("small", 0, False)]


@pytest.mark.parametrize(
    ("live", "wanted", "device_free", "capacity", "cause", "outside", "needed"),
    [
        (100, 5000, 900, None, "outsized", None, 5000),
        (100, 100, 50, 4000, "outside", 3850, 100),
        (3500, 100, 50, 4000, "capacity", 450, 100),  # a CUDA context of usual size is not the cause
        (100, 5, 12, None, "fragmentation", None, 20),  # the segment that is needed is larger than the request
    ],
)
def test_what_lies_outside_pytorch_or_is_larger_than_the_device_is_the_cause(
    live: int, wanted: int, device_free: int, capacity: int | None, cause: str, outside: int | None, needed: int
) -> None:
    allocator = recording()
    allocator.malloc(live * MIB)
    verdict = failed(allocator, wanted, device_free, capacity)
    assert (verdict.cause, verdict.outside_bytes) == (cause, outside and outside * MIB)
    assert (verdict.needed_bytes, verdict.short_bytes) == (needed * MIB, (needed - device_free) * MIB)


def test_a_real_dump_under_a_memory_fraction_is_limited() -> None:
    verdict = read_snapshot(capture("oom.pickle")).memory().oom
    assert (verdict.cause, verdict.is_limited, verdict.requested_bytes) == ("capacity", True, 268_435_456)
    assert verdict.short_bytes == 7_247_757_312 + 268_435_456 - 7_314_866_176
