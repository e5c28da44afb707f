"""Attribution: known answers, awkward threads, and a second, slower way to the same figures."""

from __future__ import annotations

import sqlite3
from pathlib import Path

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


@pytest.mark.parametrize(("capture", "name", "instances", "kernels", "total_ns"), KNOWN)
def test_real_captures_give_their_known_figures(
    captures: Path, capture: str, name: str, instances: int, kernels: int, total_ns: int
) -> None:
    result = read_trace(captures / f"{capture}.sqlite").kernels(name)
    assert (result.instances, result.kernel_count, result.kernel_time_ns) == (instances, kernels, total_ns)
    assert sum(row.total_ns for row in result.kernels) == total_ns
    assert sum(row.count for row in result.kernels) == kernels
    assert result.range_evidence is not None
    assert result.range_evidence.direct_ns + result.range_evidence.inferred_ns == total_ns


def test_thread_only_places_the_backward_pass_in_no_range(captures: Path) -> None:
    """What `nsys stats -r nvtx_gpu_proj_sum` says of this file, operation for operation."""
    result = read_trace(captures / "small.nsys2023.sqlite", thread_only=True).kernels("backward")
    assert (result.kernel_count, result.kernel_time_ns) == (2, 1664)


def _slow_account(path: Path, name: str) -> tuple[int, int]:
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


@pytest.mark.parametrize(
    "capture", ["small.nsys2025", "ddp.nsys2025", "graph_nodes.nsys2023", "hooks.nsys2025", "two_gpus.nsys2025"]
)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_one_launching_thread_per_process_agrees_with_a_slow_account(captures: Path, capture: str, name: str) -> None:
    path = captures / f"{capture}.sqlite"
    result = read_trace(path).kernels(name)
    assert (result.kernel_count, result.kernel_time_ns) == _slow_account(path, name)


def test_the_tree_and_the_selection_agree_on_every_path(captures: Path) -> None:
    """Two routes to the same books: parents in the tree, and stretches of time in the selection."""
    for capture in ("small.nsys2023", "ddp.nsys2025", "graph_nodes.nsys2023", "hooks.nsys2025", "two_gpus.nsys2025"):
        opened = read_trace(captures / f"{capture}.sqlite")
        rows = opened.ranges(numbered=False).ranges
        for row in rows:
            result = opened.kernels(row.path)
            # A path names every place where it fits: one that begins at the top also fits deeper down.
            same = [other for other in rows if f"/{other.path}".endswith(f"/{row.path}")]
            assert result.kernel_count == sum(other.kernel_count for other in same), row.path
            assert result.kernel_time_ns == sum(other.kernel_time_ns for other in same), row.path
            if len(same) == 1:
                assert result.busy_ns == row.busy_ns, row.path


def _open(builder: NsysBuilder, tmp_path: Path) -> OpenedTrace:
    builder.name_thread("python", MAIN)
    builder.name_thread("pt_autograd_0", AUTOGRAD)
    return read_trace(builder.write(tmp_path / "t.sqlite"))


def _train_step(builder: NsysBuilder) -> None:
    """Main launches in forward (10–90) and waits in backward (100–200), where autograd launches."""
    builder.range("forward", 10, 90)
    builder.kernel(20, 7)
    builder.range("backward", 100, 200)
    builder.kernel(102, 1)
    for time in (110, 120, 130):
        builder.kernel(time, 5, tid=AUTOGRAD)


def test_autograd_work_belongs_to_the_waiting_thread(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _train_step(builder)
    opened = _open(builder, tmp_path)
    assert opened.attribution.ledger == Ledger(8, 15, 0, 0, 0, 23)
    backward = opened.kernels("backward")
    assert backward.range_evidence is not None
    assert (backward.range_evidence.direct_ns, backward.range_evidence.inferred_ns) == (1, 15)


def test_a_range_on_the_autograd_thread_lies_inside_the_waiting_threads_range(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _train_step(builder)
    builder.range("ncclAllReduce", 125, 140, tid=AUTOGRAD)
    opened = _open(builder, tmp_path)
    assert [row.path for row in opened.ranges().ranges] == ["forward", "backward", "backward/ncclAllReduce"]
    assert opened.kernels("backward/ncclAllReduce").kernel_time_ns == 5
    assert opened.kernels("backward").kernel_time_ns == 16
    # The launching thread had a range of its own open, so the ledger's line for it is `direct`.
    assert opened.attribution.ledger == Ledger(13, 10, 0, 0, 0, 23)


def test_the_tree_of_two_gpus_in_one_process_sums_to_all_kernel_time(captures: Path) -> None:
    """Module ranges on the second autograd thread stayed open past `backward`, into the next step."""
    rows = read_trace(captures / "two_gpus.nsys2025.sqlite").ranges(numbered=False).ranges
    assert [(row.path, row.kernel_time_ns) for row in rows if "/" not in row.path] == [("step *", 33_695_255)]
    under = {row.path: row.kernel_count for row in rows}
    assert under["step */backward/model/a"] + under["step */backward/model/b"] == 62


@pytest.mark.parametrize(("call", "last"), [("backward", "step 0/backward/model"), ("bwd", "step 0/model")])
def test_a_range_on_an_autograd_thread_ends_with_the_backward_call(tmp_path: Path, call: str, last: str) -> None:
    builder = NsysBuilder()
    for number, begin in enumerate((0, 1000)):
        builder.range(f"step {number}", begin, begin + 500)
        builder.kernel(begin + 20, 7)
        builder.range(call, begin + 100, begin + 300)
        builder.range("model", begin + 110, None if number else begin + 1105, tid=AUTOGRAD)
        for launch in (120, 130, 140):
            builder.kernel(begin + launch, 10, tid=AUTOGRAD)
        builder.kernel(begin + 400, 3)
    builder.call(2000, name="cudaDeviceSynchronize_v3020")
    opened = _open(builder, tmp_path)
    totals = {row.path: row.kernel_time_ns for row in opened.ranges().ranges}
    assert {path: total for path, total in totals.items() if "/" not in path} == {"step 0": 40, "step 1": 40}
    assert totals[last] == totals[last.replace("step 0", "step 1")] == 30
    assert not opened.attribution.trace.ranges.is_open.any()


def _call_two_replicas(builder: NsysBuilder, *, inside: str, host_calls: tuple[int, ...] = ()) -> None:
    """Main calls a model (10–490); two other threads work for it in a range each, and all three launch kernels."""
    builder.range("forward", 0, 500)
    builder.range("model", 10, 490)
    builder.kernel(20, 1)
    for number, thread in enumerate((OTHER, OTHER + 1)):
        builder.range(inside, 100 + number, 300 + number, tid=thread)
        builder.range("layer", 105 + number, 295 + number, tid=thread)
        for launch in (110, 120, 130, 140):
            builder.kernel(launch + number, 10, tid=thread)
    for call in host_calls:
        builder.call(call)
    builder.kernel(400, 3)


@pytest.mark.parametrize("inside", ["replica", "forward", "inference"])
def test_replicas_lie_in_the_call_of_the_model_that_waits_for_them(inside: str, tmp_path: Path) -> None:
    """Recordings of before the name ``replica`` hold a forward pass on each replica's thread."""
    builder = NsysBuilder()
    _call_two_replicas(builder, inside=inside)
    rows = _open(builder, tmp_path).ranges().ranges
    assert {row.path: row.kernel_time_ns for row in rows} == {
        "forward": 84,
        "forward/model": 84,
        "forward/model/replica": 80,
        "forward/model/replica/layer": 80,
    }


def test_a_forward_pass_beside_a_thread_that_goes_on_is_no_replica(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _call_two_replicas(builder, inside="forward", host_calls=(115, 125, 135))
    rows = _open(builder, tmp_path).ranges().ranges
    assert {row.path: row.kernel_time_ns for row in rows} == {
        "forward": 84,
        "forward/model": 4,
        "forward/layer": 80,
    }


def test_two_waiting_threads_are_ambiguous(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _train_step(builder)
    builder.range("backward", 100, 200, tid=OTHER)
    builder.kernel(101, 1, tid=OTHER)
    opened = _open(builder, tmp_path)
    assert opened.attribution.ledger == Ledger(9, 0, 15, 0, 0, 24)
    result = opened.kernels("backward")
    assert result.kernel_time_ns == 2
    assert [warning.code for warning in result.warnings] == ["ambiguous"]


def test_the_silent_one_of_two_threads_is_the_host(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _train_step(builder)
    builder.range("forward", 95, 210, tid=OTHER)
    for time in range(96, 208, 3):
        builder.kernel(time, 1, tid=OTHER)
    opened = _open(builder, tmp_path)
    assert opened.attribution.ledger.ambiguous_ns == 0
    assert opened.kernels("backward").kernel_time_ns == 16


def test_a_range_owner_that_never_launches_is_no_candidate(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _train_step(builder)
    builder.range("loading", 0, 1000, tid=OTHER)
    opened = _open(builder, tmp_path)
    assert opened.kernels("backward").kernel_time_ns == 16


def test_a_busy_main_thread_is_not_waiting_for_a_worker(tmp_path: Path) -> None:
    """A prefetching thread without ranges launches while main works in forward: outside, not forward."""
    builder = NsysBuilder()
    builder.range("forward", 0, 1000)
    for time in range(10, 1000, 10):
        builder.kernel(time, 1)
    for time in range(105, 900, 100):
        builder.kernel(time, 3, tid=WORKER)
    opened = _open(builder, tmp_path)
    assert opened.kernels("forward").kernel_time_ns == 99
    assert opened.attribution.ledger.outside_ns == 24


def test_a_sparse_prefetcher_stays_outside_densely_annotated_work(tmp_path: Path) -> None:
    """Each of its launches falls, alone, between two calls of main within one short range."""
    builder = NsysBuilder()
    builder.range("forward", 0, 10_000)
    for layer in range(100):
        builder.range(f"layer {layer}", 100 * layer, 100 * layer + 100)
        for time in range(100 * layer, 100 * layer + 100, 20):
            builder.kernel(time, 1)
    for time in range(1010, 9000, 1000):
        builder.kernel(time, 3, tid=WORKER)
    opened = _open(builder, tmp_path)
    assert opened.attribution.ledger.outside_ns == 24
    assert opened.kernels("forward").kernel_count == 500


def test_an_independent_thread_has_no_host_even_while_main_waits(tmp_path: Path) -> None:
    """It launches at all times; main's wait in backward holds some of its launches, and autograd's."""
    builder = NsysBuilder()
    for step in range(5):
        base = 10_000 * step
        builder.range("forward", base, base + 4000)
        for time in range(base, base + 4000, 20):
            builder.kernel(time, 1)
        builder.range("backward", base + 4000, base + 10_000)
        for time in range(base + 4100, base + 9900, 20):
            builder.kernel(time, 2, tid=AUTOGRAD)
        for time in range(base + 5, base + 10_000, 500):
            builder.kernel(time, 3, tid=WORKER)
    opened = _open(builder, tmp_path)
    assert opened.kernels("backward").kernel_time_ns == 5 * 290 * 2
    assert opened.attribution.ledger.outside_ns == 5 * 20 * 3


def test_a_thread_without_ranges_works_for_the_thread_that_waits(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("forward", 0, 1000)
    builder.kernel(10, 1)
    builder.kernel(20, 1)
    builder.kernel(500, 3, tid=WORKER)
    opened = _open(builder, tmp_path)
    assert opened.attribution.ledger == Ledger(2, 3, 0, 0, 0, 5)


def test_a_thread_blocked_in_a_cuda_call_is_not_waiting_for_a_worker(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("forward", 0, 1000)
    builder.kernel(5, 1)
    builder.call(10, name="cudaDeviceSynchronize_v3020", duration=900)
    for time in range(100, 900, 50):
        builder.kernel(time, 3, tid=WORKER)
    opened = _open(builder, tmp_path)
    assert opened.attribution.ledger.outside_ns == 48


def test_a_main_thread_never_falls_into_a_helpers_range(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("helper", 0, 1000, tid=WORKER)
    builder.kernel(1, 1, tid=WORKER)
    for time in range(100, 900, 50):
        builder.kernel(time, 3)
    opened = _open(builder, tmp_path)
    assert opened.kernels("helper").kernel_time_ns == 1
    assert opened.attribution.ledger.outside_ns == 48


def test_gradient_accumulation_in_one_wide_range_finds_its_host(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("step 0", 0, 10_000)
    for micro in range(4):
        base = 100 + 1000 * micro
        for time in range(base, base + 300, 10):
            builder.kernel(time, 1)
        for time in range(base + 400, base + 800, 10):
            builder.kernel(time, 1, tid=AUTOGRAD)
    opened = _open(builder, tmp_path)
    assert opened.attribution.ledger == Ledger(120, 160, 0, 0, 0, 280)
    assert opened.kernels("step 0").kernel_count == 280


def test_work_never_lies_under_a_range_of_another_process(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("backward", 100, 200, pid=300, tid=300)
    builder.kernel(101, 1, pid=300, tid=300)
    builder.kernel(150, 5, tid=AUTOGRAD)
    builder.kernel(160, 5, tid=AUTOGRAD)
    opened = _open(builder, tmp_path)
    assert opened.attribution.ledger == Ledger(1, 0, 0, 10, 0, 11)


def test_a_start_end_range_across_threads_is_open_on_both(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("transfer", 10, 100, tid=MAIN, end_tid=WORKER)
    builder.kernel(20, 3)
    builder.kernel(30, 4, tid=WORKER)
    builder.kernel(40, 5, tid=OTHER)
    opened = _open(builder, tmp_path)
    result = opened.kernels("transfer")
    assert (result.instances, result.kernel_time_ns, result.wall_ns) == (1, 7, 90)


def test_a_range_from_autograd_to_main_does_not_enclose_itself(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("handed over", 10, 500, tid=AUTOGRAD, end_tid=MAIN)
    builder.range("backward", 10, 400)
    builder.kernel(20, 1)
    for time in (100, 110, 120):
        builder.kernel(time, 2, tid=AUTOGRAD)
    opened = _open(builder, tmp_path)
    assert opened.kernels("handed over").kernel_time_ns == 7
    assert {row.path for row in opened.ranges().ranges} == {"handed over", "handed over/backward"}
    assert opened.self_check.findings == ()


def test_start_end_ranges_that_cross_hold_their_own_work_each(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("a", 0, 50, end_tid=MAIN)
    builder.range("b", 30, 90, end_tid=MAIN)
    for time in (10, 40, 60, 95):
        builder.kernel(time, time)
    opened = _open(builder, tmp_path)
    assert opened.kernels("a").kernel_time_ns == 50
    assert opened.kernels("b").kernel_time_ns == 100
    assert opened.attribution.ledger.outside_ns == 95


def test_nested_ranges_of_one_name_count_a_kernel_once(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("block", 0, 100)
    builder.range("block", 10, 50)
    builder.range("block", 60, 80)
    builder.kernel(20, 5)
    builder.kernel(90, 5)
    result = _open(builder, tmp_path).kernels("block", per_instance=True)
    assert (result.instances, result.kernel_count, result.wall_ns) == (3, 2, 100)
    assert result.per_instance is not None
    assert [row.kernel_count for row in result.per_instance] == [2, 0, 0]


def test_the_first_nanosecond_of_a_range_is_inside_and_the_last_is_not(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("a", 10, 20)
    builder.range("b", 20, 30)
    builder.kernel(10, 1)
    builder.kernel(20, 2)
    opened = _open(builder, tmp_path)
    assert opened.kernels("a").kernel_time_ns == 1
    assert opened.kernels("b").kernel_time_ns == 2


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
    opened = _open(builder, tmp_path_factory.mktemp("trace"))
    ledger = opened.attribution.ledger
    parts = (ledger.direct_ns, ledger.inferred_ns, ledger.ambiguous_ns, ledger.outside_ns, ledger.no_launch_ns)
    assert sum(parts) == ledger.total_ns == sum(duration for _, duration, _, _ in kernels)
    assert all(part >= 0 for part in parts)
    for by in ("kernel", "category", "range"):
        whole = opened.kernels(by=by)
        assert sum(row.total_ns for row in whole.kernels) == whole.total_ns == ledger.total_ns
    for name in {opened.trace.names[i] for i in opened.trace.ranges.name.tolist()}:
        under = opened.kernels(name)
        assert under.range_evidence is not None
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
