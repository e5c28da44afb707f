"""The tree of ranges: what encloses what, what ``--range PATH`` counts, `profkit ranges`, and the modules in it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.time_account import measured_ranges
from profkit.analysis.tree.modules import PASSES, ModuleTree, Place, read_place, time_kernels_by_module, time_modules
from profkit.analysis.tree.range_tree import RangeRow
from profkit.trace import nesting
from profkit.trace.columns import Ranges
from profkit.trace.nesting import NO_RANGE, ancestors, build_timelines, mark_nested
from profkit.trace.nsys import read_nsys
from tests.child import run_in_child
from tests.fuzz import worst_exports
from tests.golden import check_text, check_transcript
from tests.in_process import run_command
from tests.nsys_builder import NsysBuilder

pytestmark = pytest.mark.usefixtures("read_once")

MAIN, AUTOGRAD, OTHER = 100, 101, 102


def _opened(builder: NsysBuilder, tmp_path: Path) -> OpenedTrace:
    return read_trace(builder.write(tmp_path / "t.sqlite"))


def _figures(opened: OpenedTrace, *, numbered: bool = True) -> dict[str, tuple[int, int]]:
    return {row.path: (row.kernel_time_ns, row.kernel_count) for row in opened.ranges(numbered=numbered).ranges}


def test_a_range_that_has_ended_holds_nothing_launched_later(tmp_path: Path) -> None:
    builder = NsysBuilder(("forward", 0, 100))
    builder.range("async", 50, 400, end_tid=100)
    builder.range("backward", 150, 300)
    builder.kernel(10, 5)
    builder.kernel(200, 70)
    opened = _opened(builder, tmp_path)
    assert _figures(opened) == {"forward": (5, 1), "async": (70, 1), "async/backward": (70, 1)}
    for row in opened.ranges().ranges:
        assert opened.kernels(row.path).kernel_time_ns == row.kernel_time_ns


def test_ranges_that_leak_do_not_fill_the_memory(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for index in range(400):
        builder.range("leaked", index * 10, None)
        builder.kernel(index * 10 + 5, 1)
    rows = _opened(builder, tmp_path).ranges().ranges
    assert [row.kernel_count for row in rows] == list(range(400, 0, -1))
    assert [row.busy_ns for row in rows] == list(range(400, 0, -1))


def _siblings(tmp_path: Path, names: list[str]) -> OpenedTrace:
    builder = NsysBuilder()
    for index, name in enumerate(names):
        builder.range(name, 100 * index, 100 * index + 90)
        builder.kernel(100 * index + 10, 10**index)
    return _opened(builder, tmp_path)


def test_a_kind_shown_in_the_tree_selects_its_ranges(tmp_path: Path) -> None:
    opened = _siblings(tmp_path, ["layer 0", "layer 1", "layer norm", "h.0.mlp", "h.1.mlp", "x[0]", "x[1]"])
    assert _figures(opened, numbered=False) == {
        "layer *": (11, 2),
        "layer norm": (100, 1),
        "h.*.mlp": (11_000, 2),
        "x[*]": (1_100_000, 2),
    }
    for row in opened.ranges(numbered=False).ranges:
        assert opened.kernels(row.path).kernel_time_ns == row.kernel_time_ns
    assert opened.kernels("layer*").kernel_time_ns == 111
    assert {row.name: row.total_ns for row in opened.kernels(by="range").kernels}["layer *"] == 11


def test_a_number_within_a_word_or_without_a_sibling_stays(tmp_path: Path) -> None:
    opened = _siblings(tmp_path, ["conv2d", "conv3d", "block7", "pool_2d"])
    assert [row.name for row in opened.ranges(numbered=False).ranges] == ["conv2d", "conv3d", "block7", "pool_2d"]


@st.composite
def traces(draw: st.DrawFn) -> NsysBuilder:
    """Push/pop ranges that nest on two or three threads, start/end ranges that need not, and kernels anywhere."""
    builder = NsysBuilder()
    moment = st.integers(0, 200)
    threads = [MAIN, AUTOGRAD, OTHER]
    if draw(st.booleans()):
        builder.name_thread("pt_autograd_0", AUTOGRAD)

    def push(tid: int, low: int, high: int, depth: int) -> None:
        at = low
        for _ in range(draw(st.integers(0, 3))):
            start = at + draw(st.integers(0, 20))
            end = start + draw(st.integers(1, 120))
            if end > high:
                return
            builder.range(draw(st.sampled_from("abc")) + "·", start, end, tid=tid)
            if depth < 3:
                push(tid, start, end, depth + 1)
            at = end

    for tid in threads:
        push(tid, 0, 220, 0)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(moment)
        tid, end_tid = draw(st.sampled_from(threads)), draw(st.sampled_from(threads))
        builder.range(draw(st.sampled_from("xyz")), start, start + draw(st.integers(1, 150)), tid=tid, end_tid=end_tid)
    for _ in range(draw(st.integers(1, 25))):
        tid, device = draw(st.sampled_from(threads)), draw(st.sampled_from([0, 1]))
        builder.kernel(draw(moment), draw(st.integers(0, 30)), tid=tid, device=device)
    return builder


@settings(max_examples=40, deadline=None)
@given(builder=traces())
def test_each_path_of_the_tree_selects_the_work_it_shows(builder: NsysBuilder) -> None:
    with tempfile.TemporaryDirectory() as folder:
        opened = _opened(builder, Path(folder))
    ranges = opened.trace.ranges
    # Of two ranges that begin and end together neither is the outer one.
    assume(len(set(zip(ranges.start_ns.tolist(), ranges.end_ns.tolist(), strict=True))) == len(ranges))
    for numbered in (True, False):
        rows = opened.ranges(numbered=numbered).ranges
        times = {row.path: row.kernel_time_ns for row in rows}
        for row in rows:
            assert row.kernel_time_ns <= times.get(row.path.rpartition("/")[0], row.kernel_time_ns)
            # A path names every chain of ranges that ends in it: ask only for those that name one row.
            if sum(other.path == row.path or other.path.endswith("/" + row.path) for other in rows) == 1:
                shown = row.path, row.instances, row.wall_ns, row.kernel_time_ns, row.busy_ns, row.kernel_count
                assert _by_range(opened, row) == shown


def _by_range(opened: OpenedTrace, row: RangeRow) -> tuple[Any, ...]:
    result = opened.kernels(row.path, per_instance=True)
    assert result.per_instance is not None
    assert sum(instance.kernel_time_ns for instance in result.per_instance) == result.kernel_time_ns
    for by in ("category", "range"):
        grouped = opened.kernels(row.path, by=by)  # type: ignore[arg-type]
        assert sum(line.total_ns for line in grouped.kernels) == result.kernel_time_ns
    return row.path, result.instances, result.wall_ns, result.kernel_time_ns, result.busy_ns, result.kernel_count


def test_the_two_sweeps_agree_where_ranges_nest(captures: Path) -> None:
    for name in ("small.nsys2023", "ddp.nsys2025", "hooks.nsys2025"):
        ranges = read_nsys(captures / f"{name}.sqlite").ranges
        for thread, members in nesting.ranges_by_thread(ranges).items():
            quick, slow = (np.full(len(ranges), nesting.NO_RANGE) for _ in range(2))
            nested = nesting._sweep_nested(ranges, members, quick)
            general = nesting._sweep_any(ranges, members, thread, slow)
            assert np.array_equal(quick, slow)
            assert np.array_equal(nested.time_ns, general.time_ns)
            assert np.array_equal(nested.innermost, general.innermost)


# -- what encloses what ----------------------------------------------------------------------------------------------


def plain_parent(ranges: Ranges, index: int) -> int:
    """Return the range opened last of those that enclose a range, in time and in threads."""
    start, end = int(ranges.start_ns[index]), int(ranges.end_ns[index])
    mine = (int(ranges.thread[index]), int(ranges.end_thread[index]))
    order = np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist()
    for other in reversed(order[: order.index(index)]):
        threads = (ranges.thread[other], ranges.end_thread[other])
        if ranges.end_ns[other] > start and ranges.end_ns[other] >= end and set(mine) <= set(threads):
            return other
    return NO_RANGE


def test_the_parent_of_a_crossing_range_is_the_last_opened_that_encloses_it(tmp_path: Path) -> None:
    random = Random(5)
    for _ in range(60):
        builder = NsysBuilder()
        for number in range(random.choice([3, 8, 25])):
            start = random.randrange(40)
            tid, end_tid = random.choice([(100, 100), (100, 100), (100, 101), (101, 100), (101, 101)])
            builder.range(str(number), start, start + random.randrange(1, 40), tid=tid, end_tid=end_tid)
        path = tmp_path / "crossing.sqlite"
        path.unlink(missing_ok=True)
        ranges = read_nsys(builder.write(path)).ranges
        _, parent = build_timelines(ranges)
        assert parent.tolist() == [plain_parent(ranges, index) for index in range(len(ranges))]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9))
def test_ranges_that_nest_touch_and_take_no_time_are_found_by_a_plain_search(drawn: list[tuple[int, int]]) -> None:
    spans: list[tuple[int, int]] = []
    for start, length in drawn:
        end = start + length
        if not any(other < start < its_end < end or start < other < end < its_end for other, its_end in spans):
            spans.append((start, end))
    start_ns, end_ns = np.array(spans, dtype=np.int64).T
    zeros = np.zeros(len(spans), dtype=np.int64)
    ranges = Ranges(zeros, zeros, start_ns, end_ns, zeros, zeros, zeros, zeros.astype(np.bool_))
    timelines, parent = build_timelines(ranges)
    assert parent.tolist() == [plain_parent(ranges, index) for index in range(len(spans))]
    order = np.lexsort((-end_ns, start_ns)).tolist()
    for moment in range(-1, 20):
        is_open = [index for index in order if spans[index][0] <= moment < spans[index][1]]
        assert timelines[0].innermost_at(np.array([moment])).tolist() == [is_open[-1] if is_open else NO_RANGE]


def test_thousands_of_ranges_that_cross_are_not_searched_one_by_one(tmp_path: Path) -> None:
    ranges = read_nsys(worst_exports.overlapping(60_000).write(tmp_path / "server.sqlite")).ranges
    parents = run_in_child(lambda: int((build_timelines(ranges)[1] != NO_RANGE).sum()), cpu_seconds=5)
    assert parents == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=40))
def test_what_lies_within_a_marked_range_is_found_at_any_depth(drawn: list[tuple[int, bool]]) -> None:
    parent = np.array([number % (at + 1) - 1 for at, (number, _) in enumerate(drawn)], dtype=np.int64)
    marked = np.array([is_marked for _, is_marked in drawn], dtype=np.bool_)
    slowly = [any(marked[index] for index in ancestors(parent, at)) for at in range(len(drawn))]
    assert mark_nested(parent, marked).tolist() == slowly


# -- the command -----------------------------------------------------------------------------------------------------


def test_each_way_of_asking_prints_what_it_did(trace: Path, two_devices: Path, tmp_path: Path) -> None:
    """A table has one line a kind, JSON and CSV one a range; without kernels there are Python times and a warning."""
    builder = NsysBuilder(("forward", 0, 10_000))
    alone = builder.write(tmp_path / "alone.sqlite")
    operators = Path(__file__).parent.parent / "traces" / "tiny-train-cpu.kineto.json.gz"
    shown: list[tuple[str | Path, ...]] = [(trace,), (trace, "--totals"), (trace, "--numbered"), (two_devices,)]
    exact = [(path, "--format", style) for path in (trace, two_devices) for style in ("csv", "markdown", "latex")]
    calls = [*shown, (trace, "--format", "json"), *exact, (alone,), (operators,), (operators, "--totals")]
    check_transcript("ranges", [*(("ranges", *words) for words in calls), ("kernels", alone)])


# -- modules -------------------------------------------------------------------------------------------------------


Span = tuple[str, int, int]
Named = tuple[int, int, str]
MODULES: dict[str, tuple[Sequence[Span], Sequence[Named]]] = {
    # Two checkpoints, one in the other: the block's backward pass holds 10 ns of its own, and 20 + 5 again.
    "what is computed again stands apart and counts once": (
        [
            *(("backward", 1, 999), ("h.0", 3, 997), ("recompute", 100, 500), ("h.0", 101, 499)),
            *(("recompute", 300, 400), ("h.0.mlp", 301, 399)),
        ],
        [(50, 10, "gemm"), (150, 20, "gelu"), (350, 5, "gelu")],
    ),
    # No module takes more than the steps that it is a share of.
    "what runs outside the steps counts for none": (
        [span for at in (100, 1100) for span in (("forward", at, at + 300), ("head", at + 1, at + 299))],
        [(110, 10, "gemm"), (1110, 7, "gemm")],
    ),
    "a wrapper takes what it holds and nothing by itself": (
        [
            *(("forward", 1, 400), ("model", 2, 399), ("wrapper", 3, 398), ("h.0", 4, 200), ("h.1", 201, 397)),
            *(("backward", 500, 900), ("model", 501, 899), ("h.1", 502, 600), ("h.0", 601, 898)),
            *(("optimizer", 910, 990), ("AdamW", 911, 989)),
        ],
        [(10, 3, "a"), (210, 4, "a"), (550, 5, "b"), (650, 6, "b"), (950, 7, "c")],
    ),
    # The same kernels with gradients, then without: a validation pass in the step.
    "evaluation is no part of a forward pass": (
        [
            span
            for phase, at in (("forward", 100), ("inference", 500))
            for span in ((phase, at, at + 200), ("model", at + 1, at + 199), ("head", at + 2, at + 198))
        ],
        [(110, 10, "k"), (510, 10, "k")],
    ),
    "a phase is one in any letter case and with a number": (
        [
            span
            for at, phase in ((100, "Forward"), (300, "forward 1"), (500, "BACKWARD"))
            for span in ((phase, at, at + 190), ("head", at + 1, at + 189))
        ],
        [(110, 10, "k"), (310, 10, "k"), (510, 10, "k")],
    ),
    "a module whose range lies in one of NCCL's is counted": (
        [
            *(("forward", 0, 400), ("NCCL:outer", 1, 399), ("inner", 2, 398), ("outer", 3, 397)),
            *(("backward", 500, 900), ("recompute", 501, 899), ("inner", 502, 898)),
        ],
        [(10, 10, "k"), (600, 7, "k")],
    ),
}


def test_each_module_has_its_times_and_kernels(tmp_path: Path) -> None:
    """Of a step of 1,000 ns: passes, the module around it, and what the summary says of the costliest."""
    said = []
    for number, (title, (ranges, kernels)) in enumerate(MODULES.items()):
        builder = NsysBuilder()
        builder.domain(1, "NCCL")
        builder.range("step 0", 0, 1_000)
        for name, start, end in ranges:
            builder.range(name.removeprefix("NCCL:"), start, end, domain=int(name.startswith("NCCL:")))
        for launch, duration, name in kernels:
            builder.kernel(launch, duration, name=name)
        path = builder.write(tmp_path / f"{number}.sqlite")
        opened = read_trace(path)
        times = time_modules(opened.attribution)
        found = time_kernels_by_module(opened.attribution, {one.module for one in times})
        measured = {label: len(rows) for label, rows in measured_ranges(opened.attribution).items()}
        said += ["", f"# {title}", f"measured: {measured}"]
        for one in times:
            parts = {part: getattr(one, part) for part in PASSES if getattr(one, part)}
            said.append(f"{one.module} ×{one.number} in {one.parent}, around it {one.around}:")
            said.append(f"  {parts}, {one.itself.total_ns} by itself")
            for name, kernel in sorted(found[one.module].items()):
                parts = {part: getattr(kernel, part) for part in PASSES if getattr(kernel, part)}
                said.append(f"  {name} {kernel.count} times: {parts}")
        words = " ".join(run_command("summary", path).stdout.split())
        said.append(f"summary: {words.partition('MODULE ')[2].partition(' Try ')[0]}")
    check_text("modules", "\n".join(said).lstrip() + "\n")


def place(path: str) -> Place:
    """Return the place of a path; a part that begins with ``NCCL:`` is a range of that domain."""
    parts = (part.rpartition(":") for part in path.split("/"))
    return read_place([(name, domain) for domain, _, name in parts])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("step 0/forward/model/h.*", Place("forward", ("model", "h.*"))),
        ("step 0/forward/model/NCCL:ncclAllReduce", Place("forward", ("model",))),
        ("forward/replica/model/model", Place("forward", ("model",))),
        ("backward/h.*/recompute/h.*/h.*.mlp", Place("backward", ("h.*", "h.*.mlp"), is_again=True)),
        ("optimizer/AdamW", Place("optimizer")),
        ("forward/model/compiling f/h.0", Place("compiling")),
        ("step 0/elsewhere", Place(None)),
    ],
)
def test_a_path_lies_in_a_phase_and_in_modules(path: str, expected: Place) -> None:
    assert place(path) == expected


def test_work_of_the_backward_pass_counts_for_modules_that_have_no_range_there() -> None:
    """A wrapper has no hook in the backward pass; a part computed again has no block around it."""
    tree = ModuleTree(
        map(place, ("forward/model/wrapper/h.*/h.*.mlp", "backward/model/h.*", "backward/recompute/h.*.mlp"))
    )
    assert tree.parent == {"model": None, "wrapper": "model", "h.*": "wrapper", "h.*.mlp": "h.*"}
    assert tree.modules_around(place("backward/model/h.*")) == ["model", "wrapper", "h.*"]
    assert tree.modules_around(place("backward/recompute/h.*.mlp")) == ["model", "wrapper", "h.*", "h.*.mlp"]


def test_modules_around_a_part_elsewhere_hold_nothing_of_what_it_does_alone() -> None:
    """A norm stands in each layer and at the end of the model: what it does at the end is no layer's."""
    tree = ModuleTree(map(place, ("forward/layer */norm", "forward/norm", "backward/norm")))
    assert tree.modules_around(place("forward/norm")) == ["norm"]
    assert tree.modules_around(place("backward/norm")) == ["norm"]


def test_a_module_of_two_models_has_one_parent_and_the_times_of_both() -> None:
    paths = ("forward/generator/main.*", "forward/discriminator/main.*", "backward/discriminator/main.*")
    tree = ModuleTree(map(place, paths))
    assert tree.parent["main.*"] == "discriminator"
    assert tree.modules_around(place("forward/generator/main.*")) == ["generator", "main.*"]
    assert ModuleTree(map(place, paths[::-1])).parent == tree.parent


def test_ranges_that_a_pass_nests_otherwise_do_not_move_a_module() -> None:
    """A hook's range may stay open in the backward pass while another block begins."""
    paths = (
        "forward/blocks.*/blocks.*.ln",
        "forward/blocks.*/blocks.*.mlp",
        "backward/blocks.*/blocks.*.mlp/blocks.*.ln",
    )
    assert ModuleTree(map(place, paths)).parent["blocks.*.ln"] == "blocks.*"


def test_rows_of_a_tree_are_told_apart_on_a_screen(tmp_path: Path) -> None:
    """What modules of one block share, all of them begin with; the row above them says it."""
    parts = ("mlp", "block1", "res_conv", "norm", "to_qkv", "to_out", "attend")
    builder = NsysBuilder(("step 0", 0, 100_000))
    for at, side in enumerate(("downs", "ups")):
        block, start = f"model.{side}.residual_blocks_of_the_encoder", 1_000 + 40_000 * at
        builder.range(block, start, start + 30_000)
        for number, part in enumerate(parts):
            begin = start + 4_000 * number
            builder.range(f"{block}.{part}", begin, begin + 3_000)
            builder.kernel(begin + 10, 500, start=begin + 600)
    path = builder.write(tmp_path / "t.sqlite")
    for command in ("ranges", "efficiency"):
        lines = run_command(command, path).stdout.splitlines()
        names = [line.split()[0] for line in lines if line.startswith("  ….")]
        assert names == [f"….{part}" for part in parts] * 2, command
