"""Work that is placed by more than its thread: by the nodes of CUDA graphs, and by torch.profiler's operator links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profkit import read_trace
from profkit.analysis.kernels.summary import summarize_kernels
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import attribute_work
from profkit.analysis.placing.expanded_ranges import nest_compiled_launches, place_graph_nodes
from profkit.analysis.ranks import Ranks
from profkit.analysis.time_account import measured_ranges
from profkit.analysis.tree import KernelFilter
from profkit.analysis.tree.range_tree import summarize_ranges
from profkit.errors import UsageError
from profkit.names import LaunchPlace, graph_range, launch_range
from profkit.run.compiled_code import CapturedGraph, NodeRun
from profkit.trace.columns import Trace
from profkit.trace.nsys import read_nsys
from tests.captures import capture
from tests.golden import check_transcript
from tests.in_process import check_command
from tests.kineto_builder import AUTOGRAD, TID, flow, kernel, launch, read, row, thread_name, written
from tests.nsys_builder import NsysBuilder, process_of

FORWARD, BACKWARD = ("forward", "model"), ("backward", "model")
GRAPH = CapturedGraph.of(
    [
        NodeRun(1, "fill", FORWARD),
        NodeRun(2, "kernel", (*FORWARD, "h.0")),
        NodeRun(1, "other", FORWARD),
        NodeRun(1, "kernel", (*FORWARD, "h.1")),
        NodeRun(1, "kernel", (*BACKWARD, "h.1")),
        NodeRun(1, "copy", ()),
        NodeRun(1, "kernel", ("optimizer",)),
    ]
)
KERNELS = {1: 10, 2: 20, 4: 40, 5: 50, 7: 70}
"""Which nodes of `GRAPH` are kernels, and their times."""


def replay(
    builder: NsysBuilder, begin: int, kernels: dict[int, int] = KERNELS, name: str = graph_range(GRAPH.id)
) -> None:
    """Add a replay of `GRAPH`, 1,000 ns long, and what it ran."""
    builder.range(name, begin, begin + 1000)
    call = builder.call(begin + 100, name="cudaGraphLaunch_v10000", duration=800)
    for node, duration in kernels.items():
        builder.kernel(None, duration, start=begin + 2000 + node * 100, correlation=call, name=f"k{node}")
        builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["graphNodeId"] = 8 << 32 | node
    place = {"deviceId": 0, "streamId": 7, "correlationId": call, "globalPid": process_of(100), "bytes": 64}
    builder.add("CUPTI_ACTIVITY_KIND_MEMSET", start=begin + 1900, end=begin + 1901, graphNodeId=8 << 32, **place)
    copied = {"start": begin + 2600, "end": begin + 2603, "graphNodeId": 8 << 32 | 6, "copyKind": 8}
    builder.add("CUPTI_ACTIVITY_KIND_MEMCPY", **copied, **place)


def two_steps() -> NsysBuilder:
    builder = NsysBuilder()
    for step in range(2):
        builder.range(f"step {step}", 10_000 * step, 10_000 * step + 9000)
        replay(builder, 10_000 * step + 1000)
        builder.kernel(10_000 * step + 5000, 1000, name="launched by itself")
    return builder


def placed(builder: NsysBuilder, folder: Path, *graphs: CapturedGraph) -> Trace:
    return place_graph_nodes(read_nsys(builder.write(folder / "trace.sqlite")), graphs)


def time_under(trace: Trace, name: str | None = None) -> int:
    return summarize_kernels(attribute_work(trace), KernelFilter(name), Ranks()).kernel_time_ns


def tree(trace: Trace) -> dict[str, tuple[int, int]]:
    """Return each path of the tree of ranges with its instances and kernel time."""
    nodes = summarize_ranges(attribute_work(trace)).ranges
    return {node.path: (node.instances, node.kernel_time_ns) for node in nodes}


def test_the_nodes_of_a_replay_lie_under_the_ranges_of_their_capture(tmp_path: Path) -> None:
    trace = placed(two_steps(), tmp_path, GRAPH)
    below = {
        "": 1190,
        "/forward": 70,
        "/forward/model": 70,
        "/forward/model/h.0": 30,
        "/forward/model/h.1": 40,
        "/backward": 50,
        "/backward/model": 50,
        "/backward/model/h.1": 50,
        "/optimizer": 70,
    }
    assert tree(trace) == {f"step {step}{path}": (1, time) for step in range(2) for path, time in below.items()}
    assert trace.notes == ()
    ledger = attribute_work(trace).ledger
    assert ledger.direct_ns == ledger.total_ns == 2 * 1190


def test_copies_and_fills_of_a_graph_lie_under_its_ranges_too(tmp_path: Path) -> None:
    attribution = attribute_work(placed(two_steps(), tmp_path, GRAPH))
    name = [attribution.trace.names[at] for at in attribution.trace.ranges.name[attribution.copies.innermost].tolist()]
    assert sorted(name) == ["model", "model", "step 0", "step 1"]
    assert attribution.trace.work.launch_ns.tolist().count(1100) == len(KERNELS)  # one call launched them all


@pytest.mark.parametrize(
    "kernels",
    [
        {node: time for node, time in KERNELS.items() if node != 4},
        {**KERNELS, 3: 1},
        {**{node: time for node, time in KERNELS.items() if node != 7}, 8: 70},
    ],
    ids=["one is missing", "one too many", "another one"],
)
def test_a_replay_that_ran_other_kernels_than_were_captured_keeps_its_range(
    tmp_path: Path, kernels: dict[int, int]
) -> None:
    builder = two_steps()
    builder.range("step 2", 20_000, 29_000)
    replay(builder, 21_000, kernels)
    trace = placed(builder, tmp_path, GRAPH)
    assert time_under(trace, "optimizer") == 2 * 70
    assert time_under(trace, graph_range(GRAPH.id)) == sum(kernels.values())
    assert (
        "the kernels of 1 of 3 replays lie under no module: it is not the 5 kernels that were captured"
        in trace.notes[0]
    )


def test_a_replay_of_a_graph_that_nothing_is_known_of_stays_as_it_is(tmp_path: Path) -> None:
    trace = placed(two_steps(), tmp_path)
    assert time_under(trace, f"step 0/{graph_range(GRAPH.id)}") == 190
    assert trace.work.node_ns is None
    assert "2 replays of CUDA graphs lie under no module" in trace.notes[0]
    assert "open the run directory" in trace.notes[0]


def test_ranges_around_compiled_launches_at_the_capture_become_modules_too(tmp_path: Path) -> None:
    one, two = (
        launch_range(LaunchPlace("3f9a1c22e0", line, ("model", *path))) for line, path in ((7, ["h.0"]), (9, ["h.1"]))
    )
    graph = CapturedGraph.of([NodeRun(2, "kernel", (one,)), NodeRun(1, "kernel", (two,)), NodeRun(1, "kernel", ())])
    builder = NsysBuilder(("forward", 0, 9000), ("model", 10, 8000))
    replay(builder, 1000, {0: 1, 1: 2, 2: 4, 3: 8}, graph_range(graph.id))
    builder.rows["CUPTI_ACTIVITY_KIND_MEMSET"] = builder.rows["CUPTI_ACTIVITY_KIND_MEMCPY"] = []
    trace = nest_compiled_launches(placed(builder, tmp_path, graph))
    assert {path: time for path, (_, time) in tree(trace).items()} == {
        "forward": 15,
        "forward/model": 15,
        "forward/model/h.0": 3,
        "forward/model/h.1": 4,
    }


def test_graphs_that_were_traced_whole_are_said_with_the_command_that_records_their_kernels(tmp_path: Path) -> None:
    builder = NsysBuilder((graph_range(GRAPH.id), 0, 9000))
    call = builder.call(100, name="cudaGraphLaunch_v10000")
    place = {"deviceId": 0, "streamId": 7, "correlationId": call, "globalPid": process_of(100)}
    builder.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=200, end=300, graphId=3, graphExecId=4, **place)
    (note,) = placed(builder, tmp_path, GRAPH).notes
    assert "1 replays of CUDA graphs were traced whole" in note
    assert "profkit run --nsys --cuda-graph-trace node" in note


def kineto_replay(folder: Path, graph: CapturedGraph, *others: CapturedGraph) -> Trace:
    """Return a trace of torch.profiler in which a graph of two kernels is replayed; no row says which node it is.

    Other graphs, of one kernel each, are replayed after it.
    """
    events = []
    for at, one in enumerate(others):
        begin = 100 + 100 * at
        events += [row("user_annotation", graph_range(one.id), begin, 20), launch(begin + 2, 3 + at)]
        events += [kernel("c", begin + 30, 8, 3 + at)]
    events += [
        row("user_annotation", "step 0", 0, 90),
        row("user_annotation", graph_range(graph.id), 10, 20),
        launch(12, 1, name="cudaGraphLaunch"),
        kernel("b", 50, 4, 1),
        kernel("a", 40, 1, 1),
        launch(70, 2),
        kernel("launched by itself", 80, 2, 2),
    ]
    return place_graph_nodes(read(folder, events), [graph, *others])


TWO = (NodeRun(1, "kernel", ("forward",)), NodeRun(1, "kernel", ("backward",)))


def test_nodes_that_ran_one_after_the_other_are_known_without_their_numbers(tmp_path: Path) -> None:
    trace = kineto_replay(tmp_path, CapturedGraph.of(TWO, is_chain=True))
    assert (time_under(trace, "forward"), time_under(trace, "backward"), time_under(trace)) == (1000, 4000, 7000)
    assert trace.notes == ()
    # A copy that ran as a kernel is one of the nodes.
    graph = CapturedGraph.of([NodeRun(1, "copy", ("data",)), TWO[0]], is_chain=True)
    trace = kineto_replay(tmp_path, graph)
    assert (time_under(trace, "data"), time_under(trace, "forward")) == (1000, 4000)


def test_no_python_ran_in_the_ranges_of_a_replay(tmp_path: Path) -> None:
    builder = two_steps()
    builder.range("optimizer", 7000, 7500)
    opened = OpenedTrace(placed(builder, tmp_path, GRAPH), ranks=Ranks())
    python_ns = {row.path: row.wall_ns for row in opened.ranges(numbered=False).ranges}
    assert python_ns == {
        "step *": 18_000,
        **{path: None for path in python_ns if path not in ("step *", "step */optimizer")},
        "step */optimizer": 500,
    }
    assert opened.kernels("backward").wall_ns is None
    (row, *_) = opened.kernels("backward", per_instance=True).per_instance
    assert row.wall_ns is None
    assert {row.path: row.wall_ns for row in opened.efficiency().ranges}["step */forward"] is None
    assert not [one.message for one in opened.self_check.findings if "hold no CUDA call" in one.message]


def test_without_their_numbers_the_nodes_of_a_graph_with_branches_are_not_guessed(tmp_path: Path) -> None:
    graph = CapturedGraph.of(TWO)
    trace = kineto_replay(tmp_path, graph)
    assert time_under(trace, graph_range(graph.id)) == 5000
    assert "the kernels of 1 of 1 replays lie under no module: the graph has branches" in trace.notes[0]
    chain = CapturedGraph.of([NodeRun(1, "kernel", ("inference",))], is_chain=True)
    trace = kineto_replay(tmp_path, graph, chain)
    assert time_under(trace, "inference") == 8000
    assert ["the graph has branches" in note for note in trace.notes] == [True]
    assert "record with --nsys" in trace.notes[0]


def test_the_nodes_of_a_real_capture_are_numbered_from_0_each_once_in_the_order_in_which_they_ran() -> None:
    trace = read_nsys(capture("graph_nodes.nsys2023.sqlite"))
    launches: dict[int, list[tuple[int, int]]] = {}
    for rows in (trace.work, trace.copies):
        of_graphs = np.flatnonzero(rows.graph_node >= 0)
        columns = (rows.launch_ns[of_graphs], rows.start_ns[of_graphs], rows.graph_node[of_graphs])
        for launch_ns, start_ns, node in zip(*(column.tolist() for column in columns), strict=True):
            launches.setdefault(launch_ns, []).append((start_ns, node))
    ran = [[node for _, node in sorted(nodes)] for nodes in launches.values()]
    assert len(ran) == 244
    assert all(nodes == sorted(set(nodes)) for nodes in ran)
    # Nodes that do nothing leave no row.
    assert sum(nodes == list(range(len(nodes))) for nodes in ran) > 200


# -- operator links ------------------------------------------------------------------------------------------------


Events = list[dict[str, Any]]


def span(name: str, start: int, end: int, tid: int = TID) -> dict[str, Any]:
    return row("user_annotation", name, start, end - start, tid)


def linked(number: int, forward: int, backward: int, duration: int, tid: int = TID) -> Events:
    """Return a forward operator with a kernel of 1 µs, and its backward operator with one of ``duration``."""
    return [
        row("cpu_op", "aten::mm", forward, 10, tid),
        launch(forward + 2, 2 * number, tid),
        kernel("k", forward + 7, 1, 2 * number),
        flow("s", number, forward, tid),
        row("cpu_op", "autograd::engine::evaluate_function: MmBackward0", backward, 10, AUTOGRAD),
        row("cpu_op", "MmBackward0", backward + 1, 8, AUTOGRAD),
        launch(backward + 2, 2 * number + 1, AUTOGRAD),
        kernel("k", backward + 7, duration, 2 * number + 1),
        flow("f", number, backward + 1, AUTOGRAD),
    ]


def model(forward: str = "forward", backward: str = "backward") -> Events:
    ranges = [
        ("step 0", 0, 1000),
        (forward, 10, 400),
        ("layer 0", 20, 100),
        ("layer 1", 120, 200),
        (backward, 500, 900),
    ]
    return [*(span(*range_) for range_ in ranges), *linked(1, 30, 700, 100), *linked(2, 130, 600, 50)]


def write_linked(folder: Path, events: Events) -> Path:
    threads = [thread_name(TID, "thread 100 (python)"), thread_name(AUTOGRAD, "thread 117 (pt_autograd_0)")]
    folder.mkdir(exist_ok=True)
    return written(folder, [*threads, *events], f"{folder.name}.json")


STEP = [("step 0", 0, 1000), ("layer 0", 20, 100), ("backward", 500, 900)]
AGAIN = [span("recompute", 510, 600, AUTOGRAD), span("layer 0", 520, 590, AUTOGRAD)]
IN_LAYER = linked(1, 30, 700, 100)
LINKED: dict[str, tuple[Events, Sequence[str]]] = {
    "linked": (
        model(),
        [
            *("step 0", "forward", "backward", "layer 0", "layer *", "forward/layer 0", "backward/layer 0"),
            # Only a path through the backward range selects linked work.
            *("/step 0/backward/layer 1", "*/layer 0", "back*/lay*"),
        ],
    ),
    "otherwise-named": (model("model_fwd", "model_bwd"), ["model_fwd", "model_bwd", "layer 0", "model_bwd/layer 0"]),
    # What a checkpoint ran again has a backward pass of its own, which is no recomputation.
    "again": (
        [
            *(span(*one) for one in [*STEP, ("forward", 10, 400)]),
            *(*AGAIN, launch(30, 1), kernel("k", 35, 1, 1), *linked(5, 530, 700, 100, AUTOGRAD)),
        ],
        (),
    ),
    # A path of mirrors alone matches nothing.
    "nested": (
        [*model(), span("attention", 25, 60)],
        ["layer 0/attention", "backward/layer 0/attention", "layer 1/attention"],
    ),
    # No phase is needed around the module, and no backward range; nothing was open when autograd launched it there.
    "without-forward": ([*(span(*one) for one in STEP), *IN_LAYER], ["backward/layer 0"]),
    "without-phases": ([span(*STEP[1]), *IN_LAYER], ["layer 0", "backward/layer 0", "backward"]),
    # Work with ranges of its own inside backward keeps them.
    "with-its-own": ([*model(), span("layer 0", 695, 720, AUTOGRAD)], ["backward/layer 0"]),
}


def test_linked_work_lies_under_the_backward_range_and_not_in_the_forward_one(tmp_path: Path) -> None:
    """The tree shows it once, and its children sum to their parents."""
    calls: list[tuple[str | Path, ...]] = []
    for name, (events, asked) in LINKED.items():
        path = write_linked(tmp_path / name, events)
        calls.append(("ranges", path, "--numbered", "--totals"))
        calls += [("kernels", path, "--range", one, "--totals") for one in asked]
    check_transcript("placed-by-links", calls)


def test_thread_only_follows_no_links(tmp_path: Path) -> None:
    opened = read_trace(write_linked(tmp_path, model()), thread_only=True)
    with pytest.raises(UsageError):
        opened.kernels("backward/layer 0")


def test_every_command_reads_a_trace_whose_links_add_ranges(tmp_path: Path) -> None:
    steps = [span("ProfilerStep#1", 0, 1000), span("ProfilerStep#2", 1000, 1010)]
    path = write_linked(tmp_path, [*model(), *steps])
    for command in ("summary", "kernels", "efficiency", "ranges"):
        check_command(command, path)


def test_a_step_that_links_repeat_under_its_backward_pass_is_one_step(tmp_path: Path) -> None:
    events = [
        row("user_annotation", "step 5", 100, 900),
        flow("s", 1, 200, TID),
        row("cpu_op", "DivBackward0", 300, 50, AUTOGRAD),
        flow("f", 1, 300, AUTOGRAD),
        launch(310, 7, AUTOGRAD),
        kernel("k", 320, 5, 7),
    ]
    opened = read_trace(written(tmp_path, events))
    assert [opened.trace.names[name] for name in opened.trace.ranges.name].count("step 5") == 2
    assert measured_ranges(opened.attribution)["step"].tolist() == [0]
    check_command("report", tmp_path / "trace.json", "-o", tmp_path / "page.html")
