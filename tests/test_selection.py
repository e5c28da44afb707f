"""Choosing ranges: exact names first, globs, paths, escapes, instances, warm-up, and what an unknown name gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.opened import OpenedTrace
from profkit.errors import TraceError, UsageError
from tests.nsys_builder import NsysBuilder


@pytest.fixture
def opened(tmp_path: Path) -> OpenedTrace:
    """Return a trace of a warm-up and two steps, each with forward (two layers with attention), loss and backward."""
    builder = NsysBuilder()
    builder.range("warmup", 0, 1000)
    for step, base in enumerate((0, 1000, 2000)):
        if step:
            builder.range(f"step {step - 1}", base, base + 1000)
        builder.range("forward", base + 10, base + 400)
        for layer in range(2):
            start = base + 20 + 100 * layer
            builder.range(f"layer {layer}", start, start + 90)
            builder.range("attention", start + 10, start + 50)
            builder.kernel(start + 20, 10 ** (layer + 1))
        builder.range("loss a/b", base + 420, base + 460)
        builder.kernel(base + 430, 3)
        builder.range("backward", base + 500, base + 900)
        builder.range("attention", base + 510, base + 550)
        builder.kernel(base + 520, 1000)
    return read_trace(builder.write(tmp_path / "t.sqlite"))


@pytest.mark.parametrize(
    ("request_", "instances", "total_ns"),
    [
        ("forward", 3, 330),
        ("layer 0", 3, 30),
        ("layer *", 6, 330),
        ("layer ?", 6, 330),
        ("attention", 9, 3330),
        ("forward/layer 1/attention", 3, 300),
        ("forward/layer */attention", 6, 330),
        ("backward/attention", 3, 3000),
        ("step 1/forward", 1, 110),
        ("step */forward/layer 0", 2, 20),
        ("loss a/b", 3, 9),
        ("loss a\\/b", 3, 9),
        ("step 0/loss a\\/b", 1, 3),
    ],
)
def test_a_name_a_glob_or_a_path_selects_its_ranges(
    opened: OpenedTrace, request_: str, instances: int, total_ns: int
) -> None:
    result = opened.kernels(request_)
    assert (result.instances, result.kernel_time_ns) == (instances, total_ns)


def test_a_path_skips_no_ancestor_and_one_from_the_root_begins_at_the_top(opened: OpenedTrace) -> None:
    assert opened.kernels("/step 1/forward").instances == 1
    for request in ("forward/attention", "/attention"):
        with pytest.raises(UsageError, match=f"no range '{request}'"):
            opened.kernels(request)


def test_a_glob_with_one_numbered_match_takes_all_that_it_matches(tmp_path: Path) -> None:
    """``conv2`` alone is no kind: the tree shows no ``conv*``."""
    builder = NsysBuilder()
    for at, name in enumerate(("conv2", "convert", "linear")):
        builder.range(name, 20 * at, 20 * at + 10)
        builder.kernel(20 * at + 5, 10**at)
    assert read_trace(builder.write(tmp_path / "t.sqlite")).kernels("conv*").kernel_time_ns == 11


def test_an_existing_name_is_exact_even_if_it_looks_like_a_glob(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("layer *", 0, 10)
    builder.range("layer 1", 20, 30)
    builder.kernel(5, 1)
    builder.kernel(25, 2)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    assert opened.kernels("layer *").kernel_time_ns == 1
    assert opened.kernels("layer ?").kernel_time_ns == 3


def test_an_unknown_name_is_refused_with_the_nearest_names(opened: OpenedTrace) -> None:
    with pytest.raises(UsageError, match=r"no range 'forwrad'; nearest: 'forward'") as caught:
        opened.kernels("forwrad")
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="nearest: 'attention'"):
        opened.kernels("Attention")


def test_instances_are_counted_from_0(opened: OpenedTrace) -> None:
    assert opened.kernels("forward", instance=0).wall_ns == 390
    assert opened.kernels("step *", instance=1).kernel_time_ns == 1113
    with pytest.raises(UsageError, match="3 instances, counted from 0"):
        opened.kernels("forward", instance=3)
    with pytest.raises(UsageError, match="needs a range"):
        opened.kernels(instance=0)


def test_warmup_is_counted_and_can_be_excluded(opened: OpenedTrace) -> None:
    result = opened.kernels("forward")
    assert [warning.code for warning in result.warnings] == ["warmup"]
    assert "1 of 3 instances" in result.warnings[0].message
    without = opened.kernels("forward", exclude="warmup")
    assert (without.instances, without.kernel_time_ns, without.wall_ns) == (2, 220, 780)
    assert without.warnings == ()
    assert opened.kernels("warmup").warnings == (), "it does not lie within itself"
    assert [warning.code for warning in opened.kernels("forward", exclude="layer 0").warnings] == ["warmup"]


def test_an_excluded_range_is_removed_from_the_range_around_it(opened: OpenedTrace) -> None:
    assert opened.kernels("step 0", exclude="attention").kernel_time_ns == 3
    assert opened.kernels(exclude="attention").kernel_time_ns == 9


def test_per_instance_rows_sum_to_the_table(opened: OpenedTrace) -> None:
    result = opened.kernels("forward", per_instance=True)
    assert result.per_instance is not None
    assert [row.kernel_time_ns for row in result.per_instance] == [110, 110, 110]
    assert [row.start_ns for row in result.per_instance] == [10, 1010, 2010]
    with pytest.raises(UsageError, match="needs a range"):
        opened.kernels(per_instance=True)


def test_a_process_and_a_device_limit_the_work(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for pid, device in ((100, 0), (200, 1)):
        builder.range("forward", 0, 100, pid=pid, tid=pid)
        builder.kernel(10, pid, pid=pid, tid=pid, device=device)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    assert opened.kernels("forward").kernel_time_ns == 300
    result = opened.kernels("forward", process=200)
    assert (result.instances, result.kernel_time_ns, result.wall_ns) == (1, 200, 100)
    assert opened.kernels("forward", device=0).kernel_time_ns == 100
    assert opened.kernels("forward").busy_ns == 300
    with pytest.raises(UsageError, match="pids 100, 200"):
        opened.kernels(process=7)
    with pytest.raises(UsageError, match="devices 0, 1"):
        opened.kernels(device=7)


def test_a_trace_without_ranges_or_without_kernels_says_why(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.kernel(10, 5)
    with pytest.raises(TraceError, match=r"no ranges were recorded.*--trace=nvtx.*0\.2\.12"):
        read_trace(builder.write(tmp_path / "a.sqlite")).kernels("forward")
    builder = NsysBuilder()
    builder.range("forward", 0, 10)
    opened = read_trace(builder.write(tmp_path / "b.sqlite"))
    with pytest.raises(TraceError, match="no kernel table"):
        opened.kernels("forward")
    tree = opened.ranges()
    assert [(row.path, row.wall_ns, row.kernel_count) for row in tree.ranges] == [("forward", 10, 0)]
    assert [warning.code for warning in tree.warnings] == ["no-kernels"]


def test_an_instance_number_counts_excluded_instances_too(opened: OpenedTrace) -> None:
    result = opened.kernels("forward", exclude="warmup", per_instance=True)
    assert result.per_instance is not None
    assert [(row.instance, row.start_ns, row.kernel_time_ns) for row in result.per_instance] == [
        (1, 1010, 110),
        (2, 2010, 110),
    ]
    one = opened.kernels("forward", exclude="warmup", instance=2, per_instance=True)
    assert one.per_instance is not None
    assert [(row.instance, row.start_ns) for row in one.per_instance] == [(2, 2010)]
    none = opened.kernels("forward", exclude="warmup", instance=0, per_instance=True)
    assert (none.instances, none.kernel_count, none.per_instance) == (0, 0, ())


def test_a_range_without_kernels_or_all_excluded_gives_a_warning(opened: OpenedTrace, tmp_path: Path) -> None:
    result = opened.kernels("forward", exclude="forward", per_instance=True)
    assert (result.instances, result.wall_ns, result.kernel_count, result.per_instance) == (0, 0, 0, ())
    builder = NsysBuilder()
    builder.range("idle", 0, 5)
    builder.kernel(10, 5)
    idle = read_trace(builder.write(tmp_path / "idle.sqlite")).kernels("idle")
    assert (idle.kernel_count, idle.kernels, idle.busy_ns) == (0, (), 0)
    assert [[warning.code for warning in each.warnings] for each in (result, idle)] == [["empty-range"]] * 2


def test_the_warning_of_warmup_spells_its_name_as_the_trace_does(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for start, name in ((0, "WarmUp"), (200, "step 0")):
        builder.range(name, start, start + 100)
        builder.range("forward", start + 10, start + 90)
        builder.kernel(start + 20, 5)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    (warning,) = opened.kernels("forward").warnings
    assert warning.message.endswith("lie inside `WarmUp`; exclude 'WarmUp' to leave them out")
    assert opened.kernels("forward", exclude="WarmUp").warnings == ()


def test_an_instance_on_a_helper_thread_lies_within_its_hosts_excluded_range(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.name_thread("pt_autograd_0", 101)
    for start, name in ((0, "warmup"), (1000, "step 0")):
        builder.range(name, start, start + 900)
        builder.kernel(start + 10, 1)
        builder.range("nccl", start + 200, start + 400, tid=101)
        builder.kernel(start + 250, 20, tid=101)
        builder.kernel(start + 300, 30, tid=101)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    result = opened.kernels("nccl", exclude="warmup", per_instance=True)
    assert (result.instances, result.kernel_time_ns, result.wall_ns) == (1, 50, 200)


def test_nested_ranges_of_one_name_count_a_kernel_once(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for base in (0, 1000):
        builder.range("block", base, base + 500)
        builder.range("block", base + 100, base + 200)
        builder.kernel(base + 10, 5)
        builder.kernel(base + 150, 5)
    result = read_trace(builder.write(tmp_path / "t.sqlite")).kernels("block", per_instance=True)
    assert (result.instances, result.outermost_instances, result.kernel_count, result.wall_ns) == (4, 2, 4, 1000)
    assert result.kernels[0].per_instance_count == 2
    assert result.per_instance is not None
    assert [row.kernel_count for row in result.per_instance] == [2, 0, 2, 0]


def test_with_a_device_the_instances_are_those_with_work_there(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for pid, device in ((100, 0), (200, 1)):
        for base in (0, 1000):
            builder.range("forward", base, base + 100 * (device + 1), pid=pid, tid=pid)
            builder.kernel(base + 10, pid, pid=pid, tid=pid, device=device)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    result = opened.kernels("forward", device=1, per_instance=True)
    assert (result.instances, result.outermost_instances, result.wall_ns) == (2, 2, 400)
    assert result.kernels[0].per_instance_count == 1
    assert result.per_instance is not None
    assert [(row.instance, row.kernel_time_ns) for row in result.per_instance] == [(1, 200), (3, 200)]
    assert opened.kernels("forward").instances == 4


def test_lines_by_range_name_the_reason_where_work_has_none(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.name_thread("pt_autograd_0", 103)
    for tid in (100, 102):
        builder.range("forward", 0, 300, tid=tid)
        builder.kernel(10, 1, tid=tid)
    builder.kernel(100, 20, tid=103)
    builder.kernel(110, 30, tid=103)
    builder.kernel(None, 400, start=200)
    builder.kernel(900, 5000)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    assert {row.name: row.total_ns for row in opened.kernels(by="range").kernels} == {
        "forward": 2,
        "(ambiguous: two or more ranges could claim it)": 50,
        "(no launch record)": 400,
        "(in no range)": 5000,
    }
