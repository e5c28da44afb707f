"""The replay and the simulator against a naive allocator that searches, and against what torch said of real runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.allocator import round_sizes
from profkit.allocator.replay import History, replay_history
from profkit.allocator.requests import requests_of
from profkit.allocator.simulate import Simulation, check_identity, simulate
from profkit.analysis.memory.failures import Segment, lay_out
from profkit.snapshot.columns import ALLOCATED, INACTIVE, PENDING, Settings
from profkit.snapshot.reader import build_snapshot, read_snapshot
from tests.allocator_reference import MIB, Block, ReferenceAllocator, recording
from tests.captures import capture


def replayed(allocator: ReferenceAllocator) -> History:
    snapshot = build_snapshot(Path("reference.pickle"), allocator.snapshot())
    return replay_history(snapshot.devices[0], snapshot.settings)


def figures(history: History) -> tuple[int, int, int]:
    curves = history.curves
    return history.allocated_peak_bytes, int(curves.requested.max()), int(curves.reserved.max())


# -- real snapshots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "allocated", "reserved"),
    [
        ("small", 3_073_660_928, 3_246_391_296),
        ("small_forward_cpp_stacks", 633_434_112, 765_460_480),
        ("expandable", 2_383_650_816, 2_426_404_864),
        ("midrun", 2_394_425_344, 2_682_257_408),
    ],
)
def test_the_figures_of_real_snapshots_equal_the_allocators_own(name: str, allocated: int, reserved: int) -> None:
    snapshot = read_snapshot(capture(f"{name}.pickle"))
    history = replay_history(snapshot.devices[0], snapshot.settings)
    assert (figures(history)[0], figures(history)[2]) == (allocated, reserved)
    assert (history.bounds, history.contradictions) == (None, {})
    assert history.is_complete == (name != "midrun")
    if name in ("expandable", "midrun"):
        stats = json.loads(capture(f"{name}.stats.json").read_text())
        assert figures(history)[1] == stats["requested_bytes.all.peak"]
        for kind in ("requested", "allocated", "reserved"):
            assert int(getattr(history.curves, kind)[-1]) == stats[f"{kind}_bytes.all.current"]


# -- random histories -------------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 3_000),
    st.integers(1, MIB + 600),
    st.integers(MIB - 600, 12 * MIB),
    st.integers(9 * MIB, 70 * MIB),
)
STEP = st.one_of(
    st.tuples(st.just("malloc"), SIZES, st.sampled_from([0, 0, 0, 7]), st.sampled_from([(0, 0), (0, 0), (0, 1)])),
    st.tuples(st.just("malloc"), SIZES, st.just(0), st.just((0, 0))),
    st.tuples(st.just("free"), st.integers(0, 10**6)),
    st.tuples(st.just("free"), st.integers(0, 10**6)),
    st.tuples(st.just("free_elsewhere"), st.integers(0, 10**6)),
    st.tuples(st.just("complete"), st.integers(0, 10**6)),
    st.tuples(st.just("empty_cache")),
    st.tuples(st.just("collect")),
)
STEPS = st.lists(STEP, min_size=1, max_size=250)
ALLOCATORS = st.one_of(
    st.builds(ReferenceAllocator, divisions=st.sampled_from([0, 4, 8]), notes_pools=st.booleans()),
    st.builds(
        ReferenceAllocator,
        max_split=st.sampled_from([25 * MIB, 64 * MIB]),
        divisions=st.sampled_from([0, 4]),
        notes_pools=st.booleans(),
    ),
    st.builds(ReferenceAllocator, expandable=st.just(True)),
)


def drive(allocator: ReferenceAllocator, steps: list[Any], record_at: int) -> None:
    live: list[Block] = []
    pending: list[Block] = []
    for index, (what, *arguments) in enumerate(steps):
        if index == record_at:
            allocator.record()
        if what == "malloc":
            live.append(allocator.malloc(*arguments))
        elif what.startswith("free") and live:
            block = live.pop(arguments[0] % len(live))
            allocator.free(block, what == "free_elsewhere")
            pending += [block] if what == "free_elsewhere" else []
        elif what == "complete" and pending:
            allocator.complete(pending.pop(arguments[0] % len(pending)))
        elif what == "empty_cache":
            allocator.empty_cache()
        elif what == "collect":
            allocator.collect()
        elif what == "switch_expandable":
            allocator.expandable = not allocator.expandable
        elif what == "set_max_split":
            allocator.max_split = arguments[0]


@given(ALLOCATORS, STEPS)
@settings(max_examples=150, deadline=None)
def test_a_complete_history_is_replayed_to_the_byte(allocator: ReferenceAllocator, steps: list[Any]) -> None:
    drive(allocator, [("malloc", 1, 0, (0, 0)), *steps], record_at=0)
    history = replayed(allocator)
    assert not history.contradictions
    assert history.bounds is None
    assert history.is_complete
    assert figures(history) == allocator.peaks()
    curves = history.curves
    assert list(zip(curves.allocated, curves.requested, curves.reserved, strict=True)) == allocator.at_event


@given(ALLOCATORS, STEPS, st.integers(0, 150), st.sampled_from([None, 20, 80]))
@settings(max_examples=250, deadline=None)
def test_an_incomplete_history_is_exact_or_bounded(
    allocator: ReferenceAllocator, steps: list[Any], record_at: int, max_entries: int | None
) -> None:
    allocator.max_entries = max_entries
    drive(allocator, [("malloc", 1, 0, (0, 0)), *steps, ("malloc", 5, 0, (0, 0))], min(record_at, len(steps)))
    history = replayed(allocator)
    assert not history.contradictions
    allocated, requested, reserved = allocator.peaks()
    assert figures(history)[1:] == (requested, reserved)
    low, high = history.bounds or (history.allocated_peak_bytes, history.allocated_peak_bytes)
    assert high is not None
    assert low <= allocated <= high <= low + len(history.replay) * MIB
    assert history.is_complete or allocator.at_event[0] != (0, 0, 0)


@pytest.mark.parametrize("plain_private_pools", [False, True])
@pytest.mark.parametrize("switches", [0, 1, 3])
def test_settings_changed_in_mid_run_never_give_a_wrong_exact_peak(plain_private_pools: bool, switches: int) -> None:
    """A replay that relied on the settings at the dump called every tenth such history exact with a wrong peak."""
    exact = 0
    for seed in range(60):
        steps = random_steps(random.Random(seed), switches)
        allocator = ReferenceAllocator(expandable=seed % 2 == 0, plain_private_pools=plain_private_pools)
        drive(allocator, [("malloc", 1, 0, (0, 0)), *steps, ("malloc", 5, 0, (0, 0))], seed % 3 * 10)
        history = replayed(allocator)
        low, high = history.bounds or (history.allocated_peak_bytes, history.allocated_peak_bytes)
        assert not history.contradictions
        assert high is not None
        assert low <= allocator.peaks()[0] <= high
        exact += low == high
    assert exact >= 10


def random_steps(chance: random.Random, switches: int) -> list[Any]:
    """Return what a program does that changes the allocator's settings ``switches`` times."""
    steps: list[Any] = []
    for _ in range(chance.randint(20, 200)):
        size = chance.choice([3_000, MIB + 600, 12 * MIB, 70 * MIB])
        pool = (0, int(chance.random() < 0.3))
        malloc = ("malloc", chance.randint(1, size), chance.choice([0, 0, 0, 7]), pool)
        kinds: list[Any] = [malloc] * 5 + [("free", chance.randrange(10**6))] * 4
        kinds += [("free_elsewhere", chance.randrange(10**6)), ("complete", chance.randrange(10**6))]
        steps.append(chance.choice([*kinds, ("empty_cache",) if chance.random() < 0.5 else malloc]))
    for _ in range(switches):
        steps.insert(chance.randrange(len(steps)), ("switch_expandable",))
    return steps


def test_a_split_that_the_limit_at_the_dump_forbids_bounds_the_other_sizes() -> None:
    allocator = recording()
    for _ in range(2):
        allocator.free(allocator.malloc(40 * MIB, stream=_))
    shown = allocator.malloc(30 * MIB)
    allocator.malloc(9 * MIB)  # begins in the rest of 10 MiB, so that was split off
    hidden = allocator.malloc(30 * MIB, stream=1)
    peak = allocator.allocated.current
    for block in (hidden, shown):
        allocator.free(block)
    allocator.max_split = 25 * MIB
    history = replayed(allocator)
    assert history.bounds == (peak, peak + 10 * MIB)


def test_a_block_that_an_earlier_limit_kept_whole_is_bounded() -> None:
    allocator = recording(max_split=25 * MIB)
    for stream in range(2):
        allocator.free(allocator.malloc(40 * MIB, stream=stream))
    allocator.malloc(30 * MIB)  # still there at the dump, which shows that it got all 40 MiB
    hidden = allocator.malloc(30 * MIB, stream=1)
    peak = allocator.allocated.current
    allocator.free(hidden)
    allocator.max_split = None
    assert peak == 80 * MIB
    assert replayed(allocator).bounds == (peak - 10 * MIB, peak)


# -- single rules -----------------------------------------------------------------------------------------------


def test_the_gap_after_a_block_from_before_the_history_bounds_its_size() -> None:
    allocator = ReferenceAllocator()
    filler = allocator.malloc(11 * MIB)  # 12 MiB segment: 1 MiB of padding
    tail = allocator.malloc(5 * MIB)  # splits a 20 MiB segment
    allocator.record()
    allocator.free(filler)
    allocator.free(tail)
    history = replayed(allocator)
    assert not history.is_complete
    # the 1 MiB gap is padding for certain; behind the 5 MiB block up to 1 MiB might be
    assert history.bounds == (17 * MIB, 18 * MIB)


def test_an_alloc_after_the_block_proves_its_size() -> None:
    allocator = ReferenceAllocator()
    tail = allocator.malloc(5 * MIB)
    allocator.record()
    allocator.malloc(4 * MIB)
    allocator.free(tail)
    assert replayed(allocator).bounds is None


def test_a_history_with_a_lost_event_is_not_exact() -> None:
    allocator = recording()
    allocator.malloc(3 * MIB)
    allocator.free(allocator.malloc(4 * MIB))
    allocator.malloc(5 * MIB)
    del allocator.events[2:4]  # the second alloc and its free_requested
    history = replayed(allocator)
    assert history.contradictions
    assert history.bounds == (8 * MIB, 20 * MIB)


@pytest.mark.parametrize("skipped", ["free_requested", "free_completed", "alloc"])
def test_a_history_recorded_without_some_actions_is_never_called_exact(skipped: str) -> None:
    allocator = recording()
    for size in (3 * MIB, 4 * MIB, 700, 30 * MIB):
        allocator.malloc(size)
        allocator.free(allocator.malloc(size))
    allocator.empty_cache()
    allocator.events = [event for event in allocator.events if event["action"] != skipped]
    history = replayed(allocator)
    assert history.contradictions
    assert history.bounds[0] <= allocator.peaks()[0]


def test_other_settings_than_the_recorded_ones_are_not_exact() -> None:
    allocator = recording(divisions=4)
    allocator.malloc(33 * MIB)
    data = allocator.snapshot()
    for interval in data["allocator_settings"]["roundup_power2_divisions"]:
        data["allocator_settings"]["roundup_power2_divisions"][interval] = 0
    snapshot = build_snapshot(Path("x"), data)
    assert replay_history(snapshot.devices[0], snapshot.settings).contradictions


def test_a_pool_restored_to_a_checkpoint_splits_exactly() -> None:
    allocator = recording()
    allocator.malloc(512)
    address = allocator.events[-1]["addr"]
    region = allocator.regions[0]
    # CUDA graph trees allocate every block of a segment anew, also the free one between two that are in use
    allocator.free(region.blocks[0])
    region.blocks = []
    for offset, size in ((0, 512), (512, 3 * MIB // 2), (512 + 3 * MIB // 2, MIB // 2 - 512)):
        allocator._note("alloc", address + offset, size, 0)
        allocator.allocated.add(size)
        allocator.requested.add(size)
        allocator.at_event[-1] = allocator._figures()
        region.blocks.append(Block(address + offset, size, region, "active_allocated", size))
    history = replayed(allocator)
    assert not history.contradictions
    assert figures(history)[0] == 2 * MIB


@pytest.mark.parametrize(
    ("divisions", "requested", "rounded"),
    [
        ((), 1, 512),
        ((), 513, 1024),
        ((2,) * 16, 4 * MIB + 1, 6 * MIB),
        ((4,) * 16, 1200, 1536),
        ((4,) * 16, 2049, 2560),
        ((4,) * 16, 4096, 4096),
        ((8,) * 16, 5 * MIB + 1, 5 * MIB + MIB // 2),
        # Each interval between powers of two has its own.
        ((0, 4, *[8] * 14), MIB + 1, MIB + 512),
        ((0, 4, *[8] * 14), 2 * MIB + 1, 2 * MIB + MIB // 2),
        ((0, 4, *[8] * 14), 4 * MIB + 1, 4 * MIB + MIB // 2),
    ],
)
def test_a_request_is_rounded_as_in_pytorch(divisions: tuple[int, ...], requested: int, rounded: int) -> None:
    assert round_sizes(np.array([requested]), Settings(roundup_power2_divisions=divisions)).tolist() == [rounded]


_STATES = {"inactive": INACTIVE, "active_allocated": ALLOCATED, "active_pending_free": PENDING}


def blocks_of(segments: list[Segment] | None) -> list[tuple[int, int, int]]:
    assert segments is not None
    return [(address, size, state) for segment in segments for address, size, state, _ in segment.blocks]


def listed(snapshot: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the blocks that a snapshot lists, by address."""
    return sorted(
        (block["address"], block["size"], _STATES[block["state"]])
        for segment in snapshot["segments"]
        for block in segment["blocks"]
    )


@given(ALLOCATORS, STEPS, st.integers(1, 250))
@settings(max_examples=100, deadline=None)
def test_the_blocks_of_a_moment_are_those_that_the_allocator_had(
    allocator: ReferenceAllocator, steps: list[Any], stop: int
) -> None:
    steps = [("malloc", 1, 0, (0, 0)), *steps]
    stopped = deepcopy(allocator)
    drive(stopped, steps[:stop], record_at=0)
    drive(allocator, steps, record_at=0)
    history = replayed(allocator)
    assert blocks_of(lay_out(history, len(stopped.events))) == listed(stopped.snapshot())
    assert blocks_of(lay_out(history, len(allocator.events))) == listed(allocator.snapshot())


def test_a_history_that_contradicts_its_segments_has_no_layout() -> None:
    allocator = recording()
    allocator.malloc(8 * MIB)
    allocator.free(allocator.malloc(4 * MIB))
    # The last event says that memory was allocated where no segment is.
    allocator._note("alloc", 2**40, MIB, 0)
    assert lay_out(replayed(allocator), len(allocator.events)) is None


# -- the simulator ---------------------------------------------------------------------------------------------------


TRACE = Path(__file__).parents[1] / "traces" / "small-train.snapshot.pickle.gz"
REAL: dict[str, Callable[[], Path]] = {
    "small-train": lambda: TRACE,
    "small": lambda: capture("small.pickle"),
    "small_forward": lambda: capture("small_forward_cpp_stacks.pickle"),
    "expandable": lambda: capture("expandable.pickle"),
    "midrun": lambda: capture("midrun.pickle"),
    "oom": lambda: capture("oom.pickle"),
}


def wrong_addresses(history: History, simulation: Simulation) -> int:
    replay = history.replay
    is_wrong = (simulation.address != replay.address) | (simulation.size_bytes != replay.size_bytes)
    return int(np.count_nonzero(is_wrong))


def peaks(simulation: Simulation) -> tuple[int, int, int]:
    return simulation.allocated_peak_bytes, simulation.requested_peak_bytes, simulation.reserved_peak_bytes


# -- the recorded settings give the recorded addresses ----------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_the_simulator_chooses_every_recorded_address_of_a_real_snapshot(name: str) -> None:
    snapshot = read_snapshot(REAL[name]())
    history = replay_history(snapshot.devices[0], snapshot.settings)
    simulation = simulate(requests_of(history), history.settings, follows_releases=True)
    curves = history.curves
    assert wrong_addresses(history, simulation) == 0
    assert peaks(simulation) == (curves.allocated.max(), curves.requested.max(), curves.reserved.max())
    assert not simulation.bases_decide


@given(ALLOCATORS, STEPS)
@settings(max_examples=150, deadline=None)
def test_the_simulator_chooses_what_a_searching_allocator_chose(
    allocator: ReferenceAllocator, steps: list[Any]
) -> None:
    allocator.notes_pools = True  # else the pool of a segment that is gone at the dump is unknown
    drive(allocator, [("malloc", 1, 0, (0, 0)), *(step for step in steps if step[0] != "collect")], record_at=0)
    history = replayed(allocator)
    simulation = simulate(requests_of(history), history.settings)
    assert wrong_addresses(history, simulation) == 0
    assert peaks(simulation) == allocator.peaks()


@pytest.mark.parametrize("after", ["default", "expandable", "roundup", "max split"])
def test_the_simulator_goes_on_from_the_state_before_a_recording(after: str) -> None:
    """Recordings that begin in the middle, or whose buffer wrapped, wherever the replay proves what was there."""
    judged = 0
    for seed in range(60):
        chance = random.Random(seed)
        steps = random_steps(chance, 0)
        allocator = ReferenceAllocator(**VARIANTS[after][0], notes_pools=True, max_entries=chance.choice([None, 60]))
        drive(allocator, [*steps, ("malloc", 5, 0, (0, 0))], record_at=chance.randrange(len(steps)))
        history = replayed(allocator)
        if history.bounds is None:
            assert check_identity(history, requests_of(history)).exact
            judged += 1
    assert judged >= 30


# -- other settings ---------------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[dict[str, Any], Settings]] = {
    "default": ({}, Settings()),
    "expandable": ({"expandable": True}, Settings(expandable_segments=True)),
    "roundup": ({"divisions": 4}, Settings(roundup_power2_divisions=(4,) * 16)),
    "max split": ({"max_split": 25 * MIB}, Settings(max_split_size_bytes=25 * MIB)),
}


@pytest.mark.parametrize("after", VARIANTS)
@pytest.mark.parametrize("before", ["default", "expandable"])
def test_the_peaks_under_other_settings_are_those_of_a_run_with_them(before: str, after: str) -> None:
    """Where bases decide, the true peaks need not be those of one simulation; elsewhere they are equal.

    An emptied cache is left out: where it held nothing, the recording does not show that the program emptied it.
    """
    exact = 0
    for seed in range(60):
        steps = [step for step in random_steps(random.Random(seed), 0) if step[0] != "empty_cache"]
        one, other = ReferenceAllocator(**VARIANTS[before][0]), ReferenceAllocator(**VARIANTS[after][0])
        for allocator in (one, other):
            drive(allocator, [("malloc", 1, 0, (0, 0)), *steps], record_at=0)
        simulation = simulate(requests_of(replayed(one)), VARIANTS[after][1])
        if not simulation.bases_decide:
            assert peaks(simulation) == other.peaks()
            exact += 1
    assert exact >= 10
