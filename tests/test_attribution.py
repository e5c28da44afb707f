"""Attribution: known answers, awkward threads, and a second, slower way to the same figures."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import Ledger
from tests.nsys_builder import NsysBuilder

MAIN, AUTOGRAD, WORKER, OTHER = 100, 101, 102, 103

# Range, instances, kernels, nanoseconds: worked out by a straight, process-wide account of each capture.
KNOWN = [
    ("small.nsys2023", "forward", 2, 980, 17_272_595),
    ("small.nsys2023", "backward", 2, 1916, 34_501_077),
    ("small.nsys2023", "optimizer", 2, 112, 5_704_966),
    ("small.nsys2023", "scaled dot product attention", 24, 312, 2_593_274),
    ("small.nsys2025", "forward", 2, 980, 17_223_554),
    ("small.nsys2025", "backward", 2, 1916, 34_494_524),
    ("small.nsys2025", "optimizer", 2, 112, 5_686_260),
    ("ddp.nsys2025", "forward", 10, 4904, 86_470_819),
    ("ddp.nsys2025", "backward", 10, 10_836, 329_608_344),
    ("ddp.nsys2025", "optimizer", 10, 1004, 29_207_157),
    ("graph_nodes.nsys2023", "forward", 2, 756, 17_133_666),
    ("graph_nodes.nsys2023", "backward", 2, 1440, 33_538_437),
    ("graph_nodes.nsys2023", "optimizer", 2, 112, 5_691_161),
    ("hooks.nsys2025", "forward", 2, 20, 77_856),
    ("hooks.nsys2025", "backward", 2, 39, 109_311),
    ("two_gpus.nsys2025", "forward", 2, 32, 11_179_508),
    ("two_gpus.nsys2025", "backward", 2, 70, 20_949_205),
    ("two_gpus.nsys2025", "optimizer", 2, 32, 1_465_839),
]


def test_thread_only_places_the_backward_pass_in_no_range(captures: Path) -> None:
    """What `nsys stats -r nvtx_gpu_proj_sum` says of this file, operation for operation."""
    result = read_trace(captures / "small.nsys2023.sqlite", thread_only=True).kernels("backward")
    assert (result.kernel_count, result.kernel_time_ns) == (2, 1664)


def slow_account(path: Path, name: str) -> tuple[int, int]:
    """Return kernels and time launched, by any thread of the process, while a range of that name was open.

    Row by row in SQL and Python, with no notion of who works for whom.
    """
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    strings = dict(connection.execute("SELECT id, value FROM StringIds"))
    ranges = [
        (start, end, thread >> 24)
        for start, end, text, text_id, thread in connection.execute(
            "SELECT start, end, text, textId, globalTid FROM NVTX_EVENTS WHERE eventType IN (59, 60)"
        )
        if (text or strings.get(text_id)) == name
    ]
    launches = {
        (correlation, thread >> 24): start
        for start, thread, correlation in connection.execute(
            "SELECT start, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME"
        )
    }
    count = total = 0
    for start, end, correlation, process in connection.execute(
        "SELECT start, end, correlationId, globalPid >> 24 FROM CUPTI_ACTIVITY_KIND_KERNEL"
    ):
        launch = launches.get((correlation, process))
        if launch is not None and any(s <= launch < e and p == process for s, e, p in ranges):
            count, total = count + 1, total + end - start
    connection.close()
    return count, total


@pytest.mark.parametrize(("capture", "name", "instances", "kernels", "total_ns"), KNOWN)
def test_real_captures_give_their_known_figures_which_are_those_of_aslow_account(
    captures: Path, capture: str, name: str, instances: int, kernels: int, total_ns: int
) -> None:
    path = captures / f"{capture}.sqlite"
    result = read_trace(path).kernels(name)
    assert (result.instances, result.kernel_count, result.kernel_time_ns) == (instances, kernels, total_ns)
    assert sum(row.total_ns for row in result.kernels) == total_ns
    assert sum(row.count for row in result.kernels) == kernels
    assert result.range_evidence.direct_ns + result.range_evidence.inferred_ns == total_ns
    assert slow_account(path, name) == (kernels, total_ns)


Rows = list[tuple[Any, ...]]


def _open(ranges: Rows, kernels: Rows, path: Path, calls: Rows = ()) -> OpenedTrace:  # type: ignore[assignment]
    """Return a trace with some ranges (name, start, end, thread, end thread) and kernels (launches, ns, thread)."""
    builder = NsysBuilder()
    builder.name_thread("python", MAIN)
    builder.name_thread("pt_autograd_0", AUTOGRAD)
    for row in ranges:
        name, start, end, tid, end_tid = (*row, *(MAIN, None)[len(row) - 3 :])
        builder.range(name, start, end, tid=tid, end_tid=end_tid)
    for launches, duration, *thread in kernels:
        for launch in launches:
            builder.kernel(launch, duration, tid=thread[0] if thread else MAIN)
    for start, duration in calls:
        builder.call(start, name="cudaDeviceSynchronize_v3020", duration=duration)
    return read_trace(builder.write(path / "t.sqlite"))


@dataclass(frozen=True)
class Case:
    """Ranges, kernels and calls as of `_open`; the ledger; the kernel time under ranges, or of the tree's paths."""

    ranges: Rows
    kernels: Rows
    ledger: Ledger
    totals: dict[str, int] = field(default_factory=dict)
    tree: dict[str, int] | None = None
    calls: Rows = field(default_factory=list)


# Main launches in forward and waits in backward, where autograd launches.
STEP: Rows = [("forward", 10, 90), ("backward", 100, 200)]
IN_STEP: Rows = [([20], 7), ([102], 1), ([110, 120, 130], 5, AUTOGRAD)]

CASES = {
    "autograd's work belongs to the thread that waits": Case(
        STEP, IN_STEP, Ledger(8, 15, 0, 0, 0, 23), {"backward": 16}
    ),
    # The launching thread has a range of its own open, so the ledger's line for it is `direct`.
    "a range on the autograd thread lies in the waiting thread's range": Case(
        [*STEP, ("ncclAllReduce", 125, 140, AUTOGRAD)],
        IN_STEP,
        Ledger(13, 10, 0, 0, 0, 23),
        tree={"forward": 7, "backward": 16, "backward/ncclAllReduce": 5},
    ),
    "work in a range lies under what is around that range, though the main thread goes on meanwhile": Case(
        [*STEP, ("hook", 110, 190, AUTOGRAD)],
        [*IN_STEP[:2], ([120, 130, 145, 155], 5, AUTOGRAD)],
        Ledger(28, 0, 0, 0, 0, 28),
        tree={"forward": 7, "backward": 21, "backward/hook": 20},
        calls=[(140, 1), (150, 1), (160, 1)],
    ),
    "two waiting threads are ambiguous": Case(
        [*STEP, ("backward", 100, 200, OTHER)],
        [*IN_STEP, ([101], 1, OTHER)],
        Ledger(9, 0, 15, 0, 0, 24),
        {"backward": 2},
    ),
    "the silent one of two threads is the host": Case(
        [*STEP, ("forward", 95, 210, OTHER)],
        [*IN_STEP, (range(96, 208, 3), 1, OTHER)],
        Ledger(46, 15, 0, 0, 0, 61),
        {"backward": 16},
    ),
    "a range's owner that never launches is no candidate": Case(
        [*STEP, ("loading", 0, 1000, OTHER)], IN_STEP, Ledger(8, 15, 0, 0, 0, 23), {"backward": 16}
    ),
    "a busy main thread does not wait for a thread that prefetches": Case(
        [("forward", 0, 1000)],
        [(range(10, 1000, 10), 1), (range(105, 900, 100), 3, WORKER)],
        Ledger(99, 0, 0, 24, 0, 123),
        {"forward": 99},
    ),
    # Each of its launches falls, alone, between two calls of main within one short range.
    "a sparse thread that prefetches stays outside densely annotated work": Case(
        [("forward", 0, 10_000), *((f"layer {n}", 100 * n, 100 * n + 100) for n in range(100))],
        [(range(0, 10_000, 20), 1), (range(1010, 9000, 1000), 3, WORKER)],
        Ledger(500, 0, 0, 24, 0, 524),
        {"forward": 500},
    ),
    # It launches at all times; main's wait in backward holds some of its launches, and autograd's.
    "an independent thread has no host even while main waits": Case(
        [
            *(("forward", base, base + 4000) for base in range(0, 50_000, 10_000)),
            *(("backward", base + 4000, base + 10_000) for base in range(0, 50_000, 10_000)),
        ],
        [
            *((range(base, base + 4000, 20), 1) for base in range(0, 50_000, 10_000)),
            *((range(base + 4100, base + 9900, 20), 2, AUTOGRAD) for base in range(0, 50_000, 10_000)),
            *((range(base + 5, base + 10_000, 500), 3, WORKER) for base in range(0, 50_000, 10_000)),
        ],
        Ledger(5 * 200, 5 * 290 * 2, 0, 5 * 20 * 3, 0, 5 * (200 + 580 + 60)),
        {"backward": 5 * 290 * 2},
    ),
    "a thread without ranges works for the thread that waits": Case(
        [("forward", 0, 1000)], [([10, 20], 1), ([500], 3, WORKER)], Ledger(2, 3, 0, 0, 0, 5)
    ),
    "a thread blocked in a CUDA call does not wait for a worker": Case(
        [("forward", 0, 1000)],
        [([5], 1), (range(100, 900, 50), 3, WORKER)],
        Ledger(1, 0, 0, 48, 0, 49),
        calls=[(10, 900)],
    ),
    "a main thread never falls into a helper's range": Case(
        [("helper", 0, 1000, WORKER)],
        [([1], 1, WORKER), (range(100, 900, 50), 3)],
        Ledger(1, 0, 0, 48, 0, 49),
        {"helper": 1},
    ),
    "gradient accumulation in one wide range finds its host": Case(
        [("step 0", 0, 10_000)],
        [
            *((range(base, base + 300, 10), 1) for base in range(100, 4100, 1000)),
            *((range(base + 400, base + 800, 10), 1, AUTOGRAD) for base in range(100, 4100, 1000)),
        ],
        Ledger(120, 160, 0, 0, 0, 280),
        {"step 0": 280},
    ),
    "a start/end range across threads is open on both": Case(
        [("transfer", 10, 100, MAIN, WORKER)],
        [([20], 3), ([30], 4, WORKER), ([40], 5, OTHER)],
        Ledger(7, 0, 5, 0, 0, 12),
        {"transfer": 7},
    ),
    "a range from autograd to main does not enclose itself": Case(
        [("handed over", 10, 500, AUTOGRAD, MAIN), ("backward", 10, 400)],
        [([20], 1), ([100, 110, 120], 2, AUTOGRAD)],
        Ledger(7, 0, 0, 0, 0, 7),
        tree={"handed over": 7, "handed over/backward": 7},
    ),
    "start/end ranges that cross hold their own work each": Case(
        [("a", 0, 50, MAIN, MAIN), ("b", 30, 90, MAIN, MAIN)],
        [([time], time) for time in (10, 40, 60, 95)],
        Ledger(110, 0, 0, 95, 0, 205),
        {"a": 50, "b": 100},
    ),
    "the first nanosecond of a range is inside and the last is not": Case(
        [("a", 10, 20), ("b", 20, 30)], [([10], 1), ([20], 2)], Ledger(3, 0, 0, 0, 0, 3), {"a": 1, "b": 2}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_work_comes_under_the_ranges_of_the_thread_that_it_belongs_to(case: Case, tmp_path: Path) -> None:
    opened = _open(case.ranges, case.kernels, tmp_path, case.calls)
    assert opened.attribution.ledger == case.ledger
    assert {name: opened.kernels(name).kernel_time_ns for name in case.totals} == case.totals
    if case.tree is not None:
        assert {row.path: row.kernel_time_ns for row in opened.ranges().ranges} == case.tree
    codes = [warning.code for warning in opened.kernels().warnings]
    assert ("ambiguous" in codes) == bool(case.ledger.ambiguous_ns)


def test_evidence_and_python_time_of_a_range_are_its_own(tmp_path: Path) -> None:
    backward = _open(STEP, IN_STEP, tmp_path).kernels("backward")
    assert (backward.range_evidence.direct_ns, backward.range_evidence.inferred_ns) == (1, 15)
    assert (backward.instances, backward.wall_ns) == (1, 100)


def test_the_tree_of_two_gpus_in_one_process_sums_to_all_kernel_time(captures: Path) -> None:
    """Module ranges on the second autograd thread stayed open past `backward`, into the next step."""
    rows = read_trace(captures / "two_gpus.nsys2025.sqlite").ranges(numbered=False).ranges
    assert [(row.path, row.kernel_time_ns) for row in rows if "/" not in row.path] == [("step *", 33_695_255)]
    under = {row.path: row.kernel_count for row in rows}
    assert under["step */backward/model/a"] + under["step */backward/model/b"] == 62


@pytest.mark.parametrize(("call", "last"), [("backward", "step 0/backward/model"), ("bwd", "step 0/model")])
def test_a_range_on_an_autograd_thread_ends_with_the_backward_call(tmp_path: Path, call: str, last: str) -> None:
    ranges: Rows = []
    kernels: Rows = []
    for number, begin in enumerate((0, 1000)):
        ranges += [(f"step {number}", begin, begin + 500), (call, begin + 100, begin + 300)]
        ranges.append(("model", begin + 110, None if number else begin + 1105, AUTOGRAD))
        launches = [begin + launch for launch in (120, 130, 140)]
        kernels += [([begin + 20], 7), (launches, 10, AUTOGRAD), ([begin + 400], 3)]
    opened = _open(ranges, kernels, tmp_path, [(2000, 1)])
    totals = {row.path: row.kernel_time_ns for row in opened.ranges().ranges}
    assert {path: total for path, total in totals.items() if "/" not in path} == {"step 0": 40, "step 1": 40}
    assert totals[last] == totals[last.replace("step 0", "step 1")] == 30
    assert not opened.attribution.trace.ranges.is_open.any()


@pytest.mark.parametrize("inside", ["replica", "forward", "inference"])
@pytest.mark.parametrize("is_host_busy", [False, True])
def test_replicas_lie_in_the_call_of_the_model_that_waits_for_them(
    inside: str, is_host_busy: bool, tmp_path: Path
) -> None:
    """Main calls a model; two other threads work for it in a range each.

    Recordings of before the name ``replica`` hold a forward pass there: no replica's if main goes on meanwhile.
    """
    ranges: Rows = [("forward", 0, 500), ("model", 10, 490)]
    kernels: Rows = [([20], 1), ([400], 3)]
    for number, thread in enumerate((OTHER, OTHER + 1)):
        ranges += [(inside, 100 + number, 300 + number, thread), ("layer", 105 + number, 295 + number, thread)]
        kernels.append(([launch + number for launch in (110, 120, 130, 140)], 10, thread))
    opened = _open(ranges, kernels, tmp_path, [(call, 1) for call in (115, 125, 135)] if is_host_busy else [])
    paths = {row.path: row.kernel_time_ns for row in opened.ranges().ranges}
    replicas = {"forward/model/replica": 80, "forward/model/replica/layer": 80}
    if not is_host_busy:
        assert paths == {"forward": 84, "forward/model": 84, **replicas}
    elif inside == "forward":
        assert paths == {"forward": 84, "forward/model": 4, "forward/layer": 80}


def test_work_of_an_adopted_range_has_its_host_where_a_range_that_ends_elsewhere_is_innermost(tmp_path: Path) -> None:
    """Without it two threads may have waited at that moment, and the child would hold more than its parent."""
    builder = NsysBuilder()
    builder.name_thread("pt_autograd_0", AUTOGRAD)
    builder.range("a", 0, 70)
    builder.range("b", 50, 70, tid=AUTOGRAD)
    builder.range("x", 60, 70, tid=AUTOGRAD, end_tid=OTHER)
    for thread, launch, duration in ((MAIN, 0, 1), (AUTOGRAD, 62, 10), (OTHER, 0, 1)):
        builder.kernel(launch, duration, tid=thread)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    assert {row.path: row.kernel_time_ns for row in opened.ranges().ranges} == {"a": 11, "a/b": 10, "x": 10}


def test_work_never_lies_under_a_range_of_another_process(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.name_thread("pt_autograd_0", AUTOGRAD)
    builder.range("backward", 100, 200, pid=300, tid=300)
    builder.kernel(101, 1, pid=300, tid=300)
    for launch in (150, 160):
        builder.kernel(launch, 5, tid=AUTOGRAD)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    assert opened.attribution.ledger == Ledger(1, 0, 0, 10, 0, 11)


TIMES = st.integers(0, 400)
RANGES = st.lists(
    st.tuples(
        st.sampled_from(["forward", "backward", "a/b", "step 0"]),
        TIMES,
        st.one_of(st.none(), st.integers(0, 200)),
        st.sampled_from([MAIN, AUTOGRAD, WORKER]),
        st.sampled_from([100, 500]),
        st.sampled_from([None, MAIN, WORKER]),
    ),
    max_size=12,
)
KERNELS = st.lists(
    st.tuples(
        st.one_of(st.none(), TIMES),
        st.integers(0, 50),
        st.sampled_from([MAIN, AUTOGRAD, WORKER, OTHER]),
        st.sampled_from([100, 500]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=RANGES, kernels=KERNELS)
def test_the_ledger_adds_up_on_any_trace(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple], kernels: list[tuple]
) -> None:
    builder = NsysBuilder()
    for name, start, length, tid, pid, end_tid in ranges:
        builder.range(name, start, None if length is None else start + length, tid=tid, pid=pid, end_tid=end_tid)
    for launch, duration, tid, pid in kernels:
        builder.kernel(launch, duration, tid=tid, pid=pid)
    builder.name_thread("pt_autograd_0", AUTOGRAD)
    opened = read_trace(builder.write(tmp_path_factory.mktemp("trace") / "t.sqlite"))
    ledger = opened.attribution.ledger
    parts = (ledger.direct_ns, ledger.inferred_ns, ledger.ambiguous_ns, ledger.outside_ns, ledger.no_launch_ns)
    assert sum(parts) == ledger.total_ns == sum(duration for _, duration, _, _ in kernels)
    assert all(part >= 0 for part in parts)
    for by in ("kernel", "category", "range"):
        whole = opened.kernels(by=by)
        assert sum(row.total_ns for row in whole.kernels) == whole.total_ns == ledger.total_ns
    for name in {opened.trace.names[i] for i in opened.trace.ranges.name.tolist()}:
        under = opened.kernels(name)
        assert under.range_evidence.direct_ns + under.range_evidence.inferred_ns == under.total_ns
        assert under.busy_ns <= under.kernel_time_ns <= ledger.total_ns
        without = opened.kernels(exclude=name)
        assert under.total_ns + without.total_ns == ledger.total_ns
    roots = [row for row in opened.ranges().ranges if "/" not in row.path.replace("\\/", "")]
    placed = opened.kernels(by="range")
    outside = sum(row.total_ns for row in placed.kernels if row.name.startswith("("))
    # Start/end ranges may cross: what was launched under both of two roots counts in each.
    assert sum(row.kernel_time_ns for row in roots) + outside >= ledger.total_ns
    assert all(row.kernel_time_ns <= ledger.total_ns - outside for row in roots)
