"""What is captured into a CUDA graph: for each of its nodes, the ranges that were open when it was made.

A replay runs no Python, so the capture is the only moment at which this can be seen. While one runs, the driver is
asked how many nodes the graph has, whenever a range opens or closes; what was added in between was made within the
ranges open there. The driver is only asked: the graph is the same as without profkit. Outside of captures this costs
nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, pairwise
from threading import get_ident
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from profkit.annotation import RangeObserver, ignore_ranges, observe_ranges
from profkit.capture import describe_error, say
from profkit.capture.hooks import RangeHooks
from profkit.capture.patches import Function, patch
from profkit.capture.steps.policy import StepPolicy
from profkit.capture.work.operator_work import CapturedOperators, GraphPart, GraphWork, OperatorWork, replay_observers
from profkit.names import graph_range
from profkit.run.compiled_code import CapturedGraph, NodeKind, NodeRun

# CUgraphNodeType
_KINDS: dict[int, NodeKind] = {0: "kernel", 1: "copy", 2: "fill"}
_IS_ACTIVE = 1  # CUstreamCaptureStatus

Method = TypeVar("Method", bound=Callable[..., None])


class Driver:
    """What CUDA's driver says of the graph that a stream is captured into. All else is left to torch."""

    def __init__(self) -> None:
        """Load the driver: OSError without one, AttributeError if it is older than CUDA 11.3 and cannot be asked."""
        library = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        self._capture_info = library.cuStreamGetCaptureInfo_v2
        self._capture_info.argtypes = [pointer] * 6
        self._nodes = library.cuGraphGetNodes
        self._nodes.argtypes = [pointer] * 3
        # Edges that hold more than their two ends, as those of programmatic launches do, are refused: no chain.
        self._edges = library.cuGraphGetEdges
        self._edges.argtypes = [pointer] * 4
        self._node_type = library.cuGraphNodeGetType
        self._node_type.argtypes = [pointer] * 2

    def count(self, stream: int) -> int | None:
        """Return how many nodes the graph has so far; None if the stream is not being captured."""
        graph = self._graph(stream)
        return None if graph is None else self._count(graph)

    def kinds(self, stream: int) -> tuple[list[NodeKind], bool]:
        """Return what the nodes are, in the order in which they were made, and whether each waits for the one before.

        There are none if the stream is not being captured.
        """
        graph = self._graph(stream)
        count = None if graph is None else self._count(graph)
        if graph is None or not count:
            return [], False
        nodes, size = (ctypes.c_void_p * count)(), ctypes.c_size_t(count)
        if self._nodes(graph, nodes, ctypes.byref(size)):
            return [], False
        found: list[NodeKind] = []
        kind = ctypes.c_int(-1)
        for node in nodes:
            is_known = self._node_type(node, ctypes.byref(kind)) == 0
            found.append(_KINDS.get(kind.value, "other") if is_known else "other")
        return found, self._is_chain(graph, nodes[:])

    def _is_chain(self, graph: ctypes.c_void_p, nodes: list[int | None]) -> bool:
        count = ctypes.c_size_t()
        if self._edges(graph, None, None, ctypes.byref(count)) or count.value != len(nodes) - 1:
            return False
        ends = [(ctypes.c_void_p * count.value)() for _ in range(2)]
        if self._edges(graph, *ends, ctypes.byref(count)):
            return False
        return set(zip(*ends, strict=True)) == set(pairwise(nodes))

    def _graph(self, stream: int) -> ctypes.c_void_p | None:
        # Asked anew each time: a capture that has failed may have no graph any more.
        status, number, graph = ctypes.c_int(-1), ctypes.c_uint64(), ctypes.c_void_p()
        result = self._capture_info(stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None)
        return graph if result == 0 and status.value == _IS_ACTIVE and graph.value else None

    def _count(self, graph: ctypes.c_void_p) -> int | None:
        count = ctypes.c_size_t()
        return None if self._nodes(graph, None, ctypes.byref(count)) else count.value


def _harmless(method: Method) -> Method:
    """End the notes on the graph if something fails, say so, and let the script go on."""

    @functools.wraps(method)
    def guarded(self: GraphNodes, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.fail(error)

    return guarded  # type: ignore[return-value]


class GraphNodes(RangeObserver):
    """Writes down what each graph is made of, and puts a range around its replays.

    Args:
        hooks: they open ranges during a capture, whether or not something records.
        keep: is called with each captured graph; None: nothing is written down.
        counts_work: whether somebody may ask what a replay computes.
    """

    def __init__(self, hooks: RangeHooks, keep: Callable[[CapturedGraph], None] | None, *, counts_work: bool) -> None:
        self._hooks = hooks
        self._keep = keep
        self._counts_work = counts_work
        self._driver: Driver | None = None
        self._captured: WeakKeyDictionary[Any, tuple[str, GraphWork | None]] = WeakKeyDictionary()
        """Graph → the name of the range around its replays, and what one does; None if nobody counts work."""
        self._kept: set[str] = set()
        self._capturing: ref[Any] | None = None
        self._operators: CapturedOperators | None = None
        self._stream = 0
        self._open: list[tuple[int, str]] = []
        self._parts: list[GraphPart] = []
        self._noted = 0
        self._has_failed = False

    @_harmless
    def capture_began(self, graph: Any) -> None:
        self._forget()
        if self._keep is None:
            return
        driver = self._driver = self._driver or Driver()
        stream = self._stream = torch.cuda.current_stream().cuda_stream
        if driver.count(stream) is None:
            return
        self._capturing = ref(graph)
        observe_ranges(self)
        self._hooks.capture_runs(True)
        if self._counts_work:
            self._operators = CapturedOperators(lambda: driver.count(stream), self.fail)
            self._operators.__enter__()

    @_harmless
    def capture_ends(self) -> None:
        graph = None if self._capturing is None else self._capturing()
        try:
            if graph is not None and self._driver is not None:
                self._note()
                kinds, is_chain = self._driver.kinds(self._stream)
                if kinds and len(kinds) == self._noted:
                    buffers = {} if self._operators is None else self._operators.buffers
                    record = CapturedGraph.of(_runs(kinds, self._parts), is_chain=is_chain)
                    work = GraphWork(tuple(self._parts), buffers)
                    self._captured[graph] = graph_range(record.id), work if self._counts_work else None
                    self._write(record)
        finally:
            self._forget()
            if self._operators is not None:
                operators, self._operators = self._operators, None
                operators.__exit__(None, None, None)

    def _forget(self) -> None:
        if self._capturing is not None:
            self._capturing = None
            ignore_ranges(self)
            self._hooks.capture_runs(False)
        self._open, self._parts, self._noted = [], [], 0

    def fail(self, error: Exception) -> None:
        """Take no more notes on the capture that runs, and say once that something failed."""
        self._forget()
        if not self._has_failed:
            self._has_failed = True
            say(f"kernels of a CUDA graph may lie under no module ({describe_error(error)})")

    @_harmless
    def opening(self, name: str) -> None:
        self._note()
        self._open.append((get_ident(), name))

    @_harmless
    def closing(self) -> None:
        self._note()
        thread = get_ident()
        for at in range(len(self._open) - 1, -1, -1):
            if self._open[at][0] == thread:
                del self._open[at]
                return

    @_harmless
    def replay_begins(self, graph: Any) -> None:
        work = None
        if graph in self._captured and self._hooks.is_recording:
            name, work = self._captured[graph]
            self._hooks.on_thread.ranges.open(_REPLAY, name)
        for observer in replay_observers:
            observer(work)

    @_harmless
    def replay_ends(self, _graph: Any) -> None:
        self._hooks.on_thread.ranges.close(_REPLAY)

    def _note(self) -> None:
        """A thread that works for another, as autograd's do, has its ranges within those of the one that waits."""
        count = None if self._driver is None or self._capturing is None else self._driver.count(self._stream)
        if count is not None and count > self._noted:
            operators: tuple[OperatorWork, ...] = ()
            if self._operators is not None:
                operators, self._operators.since = tuple(self._operators.since), []
            self._parts.append(GraphPart(count - self._noted, tuple(name for _, name in self._open), operators))
            self._noted = count

    def _write(self, record: CapturedGraph) -> None:
        if self._keep is not None and record.id not in self._kept:
            self._kept.add(record.id)
            self._keep(record)


_REPLAY = object()


def _runs(kinds: list[NodeKind], parts: Iterable[GraphPart]) -> list[NodeRun]:
    path_of = [part.ranges for part in parts for _ in range(part.node_count)]
    groups = groupby(zip(kinds, path_of, strict=True))
    return [NodeRun(len(list(nodes)), kind, path) for (kind, path), nodes in groups]


_Event = Callable[[Any], None]


def watch_graphs(steps: StepPolicy, show: Callable[..., None], nodes: GraphNodes) -> None:
    """Begin to watch where the script captures CUDA graphs and where it replays them.

    Args:
        steps: what sees them, and says which step begins there, if any.
        show: calls the policy's method that it is given with the rest of its arguments; it never raises.
        nodes: what notes the nodes of the graphs, while a capture runs and within a step.
    """
    events: dict[str, tuple[list[_Event], list[_Event]]] = {
        "capture_begin": ([partial(show, steps.capture_begins)], [nodes.capture_began]),
        "capture_end": ([lambda _graph: nodes.capture_ends()], [lambda _graph: show(steps.capture_ends)]),
        "replay": (
            [partial(show, steps.replay_begins), nodes.replay_begins],
            [nodes.replay_ends, partial(show, steps.replay_ends)],
        ),
    }
    for name, (begins, ends) in events.items():
        patch(f"torch.cuda.CUDAGraph.{name}", partial(_around, begins, ends))


def _around(begins: Sequence[_Event], ends: Sequence[_Event], method: Function) -> Function:
    def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for event in begins:
            event(graph)
        try:
            return method(graph, *args, **kwargs)
        finally:
            for event in ends:
                event(graph)

    return watched
