"""The account of a snapshot: sums, moments, phases, devices, leaks, warnings, and why an allocation failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest

from profkit import read_snapshot
from profkit.analysis.memory.bins import bin_history
from profkit.errors import SnapshotError, UsageError
from tests.allocator_reference import MIB, Block, ReferenceAllocator, recording
from tests.captures import capture
from tests.golden import check_text
from tests.memory_captures import Training, assert_books_close, on_two_devices, opened


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


def test_a_moment_is_a_phase_or_a_time_and_anything_else_is_refused() -> None:
    snapshot = Training().opened()
    forward = snapshot.memory(at="phase:forward").composition
    assert forward.phase == "forward"
    assert {row.category for row in forward.by_category} >= {"parameters", "activations", "temporaries"}
    for at, moment in (("0us", 1), ("0.014ms", 3)):
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


def test_a_snapshot_without_settings_is_exact_but_not_with_segments_of_others() -> None:
    data = Training().snapshot()
    del data["allocator_settings"], data["external_annotations"]
    result = opened(data).memory()
    assert result.totals.allocated_peak_bytes == Training().allocator.peaks()[0]
    assert result.totals.exact
    allocator = recording(divisions=4)
    allocator.free(allocator.malloc(33 * MIB))
    data = allocator.snapshot()
    del data["allocator_settings"]
    assert not opened(data).memory().totals.exact


# -- out of memory ---------------------------------------------------------------------------------------------------


def full(*sizes: int, expandable: bool = False) -> ReferenceAllocator:
    allocator = recording(expandable=expandable)
    for size in sizes:
        allocator.malloc(size * MIB)
    return allocator


def pinned() -> ReferenceAllocator:
    """Of a segment of 100 MiB the first 40 are free, and 20 in its middle keep it."""
    allocator = recording()
    big = allocator.malloc(100 * MIB)
    allocator.free(big)
    allocator.malloc(40 * MIB)
    assert allocator.malloc(20 * MIB).address == big.address + 40 * MIB
    allocator.free(allocator.regions[0].blocks[0])
    return allocator


def in_two_segments() -> ReferenceAllocator:
    """30 and 25 MiB are free in two segments; expandable ones give two pages of 20 MiB back, which then serve it."""
    allocator = recording()
    blocks = [allocator.malloc(60 * MIB) for _ in range(4)]
    for block, kept in ((blocks[0], 30), (blocks[2], 35)):
        allocator.free(block)
        allocator.malloc(kept * MIB)
    return allocator


def served_by_the_simulation() -> ReferenceAllocator:
    """The request proves nothing about settings."""
    allocator = full(100)
    allocator.free(allocator.malloc(90 * MIB))
    return allocator


def on_another_stream() -> ReferenceAllocator:
    allocator = recording()
    block = allocator.malloc(100 * MIB, stream=7)
    allocator.malloc(1000)
    allocator.free(block)
    return allocator


FAILURES: dict[str, tuple[ReferenceAllocator, int, int, int | None]] = {
    "too little memory for the live blocks": (full(100, 100, 100), 80, 50, None),
    "settings that are on already are no advice": (full(100, 100, 100, expandable=True), 80, 50, None),
    "blocks that keep a segment": (pinned(), 70, 10, None),
    "only settings that let the request through are named": (in_two_segments(), 50, 20, None),
    "a request that the simulation serves": (served_by_the_simulation(), 80, 0, None),
    "free memory on another stream": (on_another_stream(), 90, 0, None),
    "more than the device has": (full(100), 5000, 900, None),
    "memory outside PyTorch": (full(100), 100, 50, 4000),
    "a CUDA context of usual size is not the cause": (full(3500), 100, 50, 4000),
    "the segment that is needed is larger than the request": (full(100), 5, 12, None),
}
"""What failed → the allocator before, and in MiB what was asked for, free on the device, and its capacity."""


def test_why_an_allocation_failed() -> None:
    found = {}
    for name, (allocator, wanted, device_free, capacity) in FAILURES.items():
        allocator.run_out(wanted * MIB, device_free * MIB)
        verdict = opened(allocator.snapshot()).memory(capacity_bytes=capacity and capacity * MIB).oom
        assert verdict is not None
        assert verdict.short_bytes == verdict.needed_bytes - device_free * MIB
        found[name] = asdict(verdict)
    check_text("out-of-memory", json.dumps(found, indent=1) + "\n")


def test_a_real_dump_under_a_memory_fraction_is_limited() -> None:
    verdict = read_snapshot(capture("oom.pickle")).memory().oom
    assert (verdict.cause, verdict.is_limited, verdict.requested_bytes) == ("capacity", True, 268_435_456)
    assert verdict.short_bytes == 7_247_757_312 + 268_435_456 - 7_314_866_176
