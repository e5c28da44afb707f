"""The tree of ranges by path, with the work launched under each: the result behind ``profkit ranges``."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.busy import union_ns
from profkit.analysis.launches import Launches
from profkit.analysis.limits import refuse_impossible_times
from profkit.analysis.nesting import NO_RANGE
from profkit.analysis.selection import explain_no_ranges, kind_of, outermost
from profkit.analysis.warnings import Caution, warn_of_placement
from profkit.trace.columns import Ints, rows_by_value

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RangeRow:
    """All ranges of one path together.

    ``path`` joins the names of a range and those around it, outermost first; a slash within a name is ``\\/``. Times
    are in nanoseconds; work counts in every range that was open when it was launched, as it does for ``--range``.
    """

    path: str
    name: str
    domain: str
    instances: int
    wall_ns: int
    kernel_time_ns: int
    busy_ns: int
    kernel_count: int


@dataclass(frozen=True)
class RangesResult:
    """The tree, depth first, siblings by their first start; ``total_ns`` is all kernel time of the capture."""

    trace: str
    measure: str
    total_ns: int
    ranges: tuple[RangeRow, ...]
    warnings: tuple[Caution, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return asdict(self)

    def to_pandas(self) -> pd.DataFrame:
        """Return the tree as a DataFrame, one row a path."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.ranges], columns=list(RangeRow.__dataclass_fields__))


def kind_paths(attribution: Attribution) -> list[str]:
    """Return each range's path in the tree of kinds, as ``summarize_ranges(numbered=False)`` has it."""
    node, parent_node, labels = _build_nodes(attribution, numbered=False)
    path = {index: path for index, path, _, _ in _depth_first(parent_node, labels)}
    return [path[index] for index in node.tolist()]


def summarize_ranges(attribution: Attribution, *, numbered: bool = True) -> RangesResult:
    """Return the tree of ranges.

    Args:
        attribution: the trace with its work placed.
        numbered: keep ``step 0`` and ``step 1`` apart; else both stand under ``step *``, a kind; as a
            request it selects the same ranges.

    Raises:
        TraceError: the trace's times are impossible.
    """
    trace = attribution.trace
    refuse_impossible_times(trace)
    node, parent_node, labels = _build_nodes(attribution, numbered)
    kernel_time, busy, count = _accumulate(attribution, node, parent_node)
    wall = np.zeros(len(parent_node), dtype=np.int64)
    instances = np.bincount(node, minlength=len(parent_node)) if len(node) else np.zeros(0, dtype=np.int64)
    top = outermost(trace.ranges, np.arange(len(node)), node)
    np.add.at(wall, node[top], trace.ranges.end_ns[top] - trace.ranges.start_ns[top])
    rows = tuple(
        RangeRow(path, name, domain, int(instances[i]), int(wall[i]), int(kernel_time[i]), int(busy[i]), int(count[i]))
        for i, path, name, domain in _depth_first(parent_node, labels)
    )
    return RangesResult(
        trace=trace.path,
        measure=trace.measure,
        total_ns=attribution.ledger.total_ns,
        ranges=rows,
        warnings=tuple(_warnings(attribution)),
    )


def _build_nodes(attribution: Attribution, numbered: bool) -> tuple[Ints, list[int], list[tuple[str, str]]]:
    """Return each range's node, each node's parent node, and each node's (name, domain), by first start."""
    ranges, names = attribution.trace.ranges, attribution.trace.names
    node = np.full(len(ranges), NO_RANGE, dtype=np.int64)
    known: dict[tuple[int, int, int], int] = {}
    parents: list[int] = []
    labels: list[tuple[str, str]] = []
    parent, name, domain = attribution.parent.tolist(), ranges.name.tolist(), ranges.domain.tolist()
    # Within equal starts the longer range is the outer one, so a parent is always seen before its children.
    for index in np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist():
        above = int(node[parent[index]]) if parent[index] != NO_RANGE else NO_RANGE
        key = (above, name[index], domain[index])
        if key not in known:
            known[key] = len(parents)
            parents.append(above)
            labels.append((names[name[index]], names[domain[index]]))
        node[index] = known[key]
    if numbered or not parents:
        return node, parents, labels
    kind, parents, labels = _join_kinds(parents, labels)
    return kind[node], parents, labels


def _join_kinds(parents: list[int], labels: list[tuple[str, str]]) -> tuple[Ints, list[int], list[tuple[str, str]]]:
    """Put siblings of one kind under one node; returns each node's new one, and the new nodes as `_build_nodes` does.

    One that has no sibling of its kind keeps its name: a single ``conv2`` is no ``conv*``.
    """
    children = _children(parents)
    joined = np.full(len(parents), NO_RANGE, dtype=np.int64)
    new_parents: list[int] = []
    new_labels: list[tuple[str, str]] = []
    waiting = deque([(NO_RANGE, children.get(NO_RANGE, []))])
    while waiting:
        above, siblings = waiting.popleft()
        kinds: dict[tuple[str, str], list[int]] = {}
        for node in sorted(siblings):
            kinds.setdefault((kind_of(labels[node][0]), labels[node][1]), []).append(node)
        for (kind, domain), members in kinds.items():
            names = {labels[node][0] for node in members}
            joined[members] = len(new_parents)
            waiting.append((len(new_parents), [child for node in members for child in children.get(node, [])]))
            new_parents.append(above)
            new_labels.append((kind if len(names) > 1 else names.pop(), domain))
    return joined, new_parents, new_labels


def _accumulate(attribution: Attribution, node: Ints, parent_node: list[int]) -> tuple[Ints, Ints, Ints]:
    """Return kernel time, busy time and kernel count per node, of the work that lies under the node's ranges."""
    work, ranges = attribution.trace.work, attribution.trace.ranges
    kernel_time, busy, count = (np.zeros(len(parent_node), dtype=np.int64) for _ in range(3))
    if not len(work):
        return kernel_time, busy, count
    launches = Launches(work, attribution.work)
    devices, device = np.unique(work.device, return_inverse=True)
    depth = _depths(parent_node)[node]
    # One level of the tree at a time, so that what is held at once grows with the work and not with the tree.
    for members in rows_by_value(depth).values():
        rows, nodes = launches.under(ranges, members, node[members])
        np.add.at(kernel_time, nodes, work.duration_ns[rows])
        np.add.at(count, nodes, 1)
        groups, unions = union_ns(nodes * len(devices) + device[rows], work.start_ns[rows], work.end_ns[rows])
        np.add.at(busy, groups // len(devices), unions)
    return kernel_time, busy, count


def _depths(parent_node: list[int]) -> Ints:
    """Return how many nodes stand above each; a parent is numbered before its children."""
    depth: list[int] = []
    for parent in parent_node:
        depth.append(0 if parent == NO_RANGE else depth[parent] + 1)
    return np.array(depth, dtype=np.int64)


def _children(parent_node: list[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(parent_node):
        children.setdefault(parent, []).append(index)
    return children


def _depth_first(parent_node: list[int], labels: list[tuple[str, str]]) -> list[tuple[int, str, str, str]]:
    children = _children(parent_node)
    found, stack = [], [(index, "") for index in reversed(children.get(NO_RANGE, []))]
    while stack:
        index, prefix = stack.pop()
        name, domain = labels[index]
        path = prefix + name.replace("/", "\\/")
        found.append((index, path, name, domain))
        stack += [(child, path + "/") for child in reversed(children.get(index, []))]
    return found


def _warnings(attribution: Attribution) -> list[Caution]:
    trace = attribution.trace
    found = []
    if not len(trace.ranges):
        found.append(Caution("no-ranges", explain_no_ranges(trace)))
    if not len(trace.work):
        found.append(
            Caution("no-kernels", f"{trace.path}: no GPU kernels were recorded; wall times are all there is to show")
        )
    return found + warn_of_placement(attribution)
