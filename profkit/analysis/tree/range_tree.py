"""The tree of ranges: all ranges of one path are one node, with the work launched under each.

Siblings that differ only in a number are one kind (``layer *`` for ``layer 0`` and ``layer 1``) unless numbers are
asked for. A node without a sibling of its kind keeps its name: a single ``conv2`` does not become ``conv*``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from profkit.analysis import NotebookResult
from profkit.analysis.intervals import BusyTime
from profkit.analysis.placing.attribution import Attribution, mark_members, warn_of_placement
from profkit.analysis.time_account import measured_ranges
from profkit.analysis.tree import explain_no_ranges, join_path, outermost
from profkit.errors import Finding, TraceError
from profkit.names import STEP, kind_of
from profkit.trace.columns import Ints, empty_ints, rows_by_value
from profkit.trace.nesting import NO_RANGE

_PLACES_AT_A_TIME = 2**22
_MOST_PATH_CHARACTERS = 2**25
_LONG_PATH = 400
"""As long as this is no program's path on average, and all paths of a small trace are shorter than the number above."""


@dataclass(frozen=True, eq=False)
class RangeNodes:
    """The tree of ranges: all ranges of one path are one node.

    Each range's node; each node's parent node (`NO_RANGE` at the top) and its (name, domain), by first start.
    """

    of_range: Ints
    parent: list[int]
    labels: list[tuple[str, str]]

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def depth(self) -> Ints:
        """Return how many nodes stand above each; a parent is numbered before its children."""
        depth: list[int] = []
        for parent in self.parent:
            depth.append(0 if parent == NO_RANGE else depth[parent] + 1)
        return np.array(depth, dtype=np.int64)

    def depth_first(self) -> list[tuple[int, str]]:
        """Return the nodes as a tree is read, each with its path (a slash within a name is ``\\/``)."""
        children = _children(self.parent)
        ordered, stack = [], [(index, "") for index in reversed(children.get(NO_RANGE, []))]
        while stack:
            index, prefix = stack.pop()
            path = prefix + join_path([self.labels[index][0]])
            ordered.append((index, path))
            stack += [(child, path + "/") for child in reversed(children.get(index, []))]
        return ordered

    def labels_above(self) -> list[tuple[tuple[str, str], ...]]:
        paths: list[tuple[tuple[str, str], ...]] = []
        for parent, label in zip(self.parent, self.labels, strict=True):
            paths.append((*(paths[parent] if parent != NO_RANGE else ()), label))
        return paths

    def names_above(self) -> list[tuple[str, ...]]:
        return [tuple(name for name, _ in path) for path in self.labels_above()]


def build_nodes(attribution: Attribution, *, numbered: bool) -> RangeNodes:
    """Return the nodes of the tree; without ``numbered``, ``step 0`` and ``step 1`` are one node ``step *``."""
    nodes = nodes_within(attribution, empty_ints())
    return nodes if numbered else join_kinds(nodes)[0]


def nodes_within(attribution: Attribution, roots: Ints) -> RangeNodes:
    """Return the nodes of the tree with every number kept; in each of the ranges ``roots``, paths begin anew."""
    ranges, names = attribution.trace.ranges, attribution.trace.names
    node = [NO_RANGE] * len(ranges)
    known: dict[tuple[int, int, int], int] = {}
    parents: list[int] = []
    labels: list[tuple[str, str]] = []
    parent, name, domain = attribution.parent.tolist(), ranges.name.tolist(), ranges.domain.tolist()
    is_root = mark_members(len(ranges), roots).tolist()
    # Of two that start together the longer is the outer one, so a parent is always seen before its children.
    for index in np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist():
        if is_root[index]:
            continue
        above = node[parent[index]] if parent[index] != NO_RANGE else NO_RANGE
        key = (above, name[index], domain[index])
        if key not in known:
            known[key] = len(parents)
            parents.append(above)
            labels.append((names[name[index]], names[domain[index]]))
        node[index] = known[key]
    _refuse_long_paths(attribution.trace.path, parents, labels)
    return RangeNodes(np.array(node, dtype=np.int64), parents, labels)


def join_kinds(*trees: RangeNodes) -> list[RangeNodes]:
    """Return the trees with siblings of one kind as one node, and all with the same nodes.

    A node without a sibling of its kind, in its own tree and in the others, keeps its name.
    """
    parents: list[int] = []
    labels: list[tuple[str, str]] = []
    first: list[int] = []
    for tree in trees:
        first.append(len(parents))
        parents += [above if above == NO_RANGE else above + first[-1] for above in tree.parent]
        labels += tree.labels
    joined, parents, labels = _join_siblings(parents, labels)
    # One more entry, so that a range without a node stays without one.
    return [
        RangeNodes(np.append(joined[begin : begin + len(tree)], NO_RANGE)[tree.of_range], parents, labels)
        for begin, tree in zip(first, trees, strict=True)
    ]


def kind_paths(attribution: Attribution) -> list[str]:
    nodes = build_nodes(attribution, numbered=False)
    path = dict(nodes.depth_first())
    return [path[index] for index in nodes.of_range.tolist()]


def _join_siblings(parents: list[int], labels: list[tuple[str, str]]) -> tuple[Ints, list[int], list[tuple[str, str]]]:
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


def _refuse_long_paths(file: str, parents: Sequence[int], labels: Sequence[tuple[str, str]]) -> None:
    """Raise if paths are longer than any program's: ranges nested thousands deep, or with names of megabytes."""
    lengths: list[int] = []
    for parent, (name, _) in zip(parents, labels, strict=True):
        lengths.append(len(name) + 1 + (lengths[parent] if parent != NO_RANGE else 0))
    total = sum(lengths)
    if total > max(_MOST_PATH_CHARACTERS, _LONG_PATH * len(lengths)):
        raise TraceError(
            f"{file}: the paths of its ranges are {total // len(lengths):,} characters long on average; captures with"
            f" more than {_LONG_PATH} are not read"
        )


def _children(parent_node: list[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(parent_node):
        children.setdefault(parent, []).append(index)
    return children


@dataclass(frozen=True)
class RangeRow:
    """All ranges of one path together.

    ``path`` joins the names of a range and those around it, outermost first; a slash within a name is ``\\/``. Times
    are in nanoseconds: ``wall_ns`` is Python time, None if the range was never open; ``kernel_time_ns`` and ``busy_ns``
    (the union per GPU) cover the kernels and graphs launched under it. Work counts in every range that was open when it
    was launched, as it does for ``--range``.
    """

    path: str
    name: str
    domain: str
    instances: int
    wall_ns: int | None
    kernel_time_ns: int
    busy_ns: int
    kernel_count: int


@dataclass(frozen=True, repr=False)
class RangesResult(NotebookResult, rows="ranges", row_type=RangeRow):
    """The tree, depth first, siblings by their first start; ``total_ns`` is all kernel time of the capture.

    ``rank`` is the one that was asked for, if any. ``steps`` is in how many measured steps all ranges lie, None if some
    lie in none.
    """

    trace: str
    measure: str
    total_ns: int
    ranges: tuple[RangeRow, ...]
    warnings: tuple[Finding, ...]
    rank: int | None = None
    steps: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_ranges(attribution: Attribution, *, numbered: bool = True) -> RangesResult:
    """Return the tree of ranges; ``numbered`` keeps ``step 0`` and ``step 1`` apart."""
    trace = attribution.trace
    rows = build_rows(attribution, build_nodes(attribution, numbered=numbered), np.arange(len(trace.ranges)))
    return RangesResult(
        trace=trace.path,
        measure=trace.measure,
        total_ns=attribution.ledger.total_ns,
        ranges=tuple(rows.values()),
        warnings=tuple(_warnings(attribution)),
        steps=_count_steps(attribution),
    )


def build_rows(attribution: Attribution, nodes: RangeNodes, members: Ints) -> dict[int, RangeRow]:
    """Return node → its row, of its ranges of ``members``; nodes without any are left out, others as a tree is read."""
    kernel_time, busy, count = _sum_work(attribution, nodes, members)
    wall = _sum_wall(attribution, nodes, members)
    instances = np.bincount(nodes.of_range[members], minlength=len(nodes)).tolist()
    return {
        node: RangeRow(
            path,
            *nodes.labels[node],
            instances[node],
            wall[node],
            *(int(column[node]) for column in (kernel_time, busy, count)),
        )
        for node, path in nodes.depth_first()
        if instances[node]
    }


def _count_steps(attribution: Attribution) -> int | None:
    steps = measured_ranges(attribution).get(STEP, empty_ints())
    top = np.flatnonzero((attribution.parent == NO_RANGE) & ~attribution.is_mirror)
    if not np.array_equal(np.sort(steps), top):
        return None
    counts = {len(mine) for mine in rows_by_value(attribution.trace.ranges.process[steps]).values()}
    return counts.pop() if len(counts) == 1 else None


def _sum_work(attribution: Attribution, nodes: RangeNodes, members: Ints) -> tuple[Ints, Ints, Ints]:
    work = attribution.trace.work
    kernel_time, busy, count = (np.zeros(len(nodes), dtype=np.int64) for _ in range(3))
    times = BusyTime(work)
    for rows, node in work_by_node(attribution, nodes, members):
        np.add.at(kernel_time, node, work.duration_ns[rows])
        np.add.at(count, node, 1)
        busy += times.sum_by(node, rows, len(nodes))
    return kernel_time, busy, count


def work_by_node(attribution: Attribution, nodes: RangeNodes, members: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield rows of work and the nodes that they lie under, by ranges of ``members``; every such pair once.

    Some nodes at a time, so that what is held at once does not grow with the tree.
    """
    if not len(attribution.trace.work):
        return
    node, placed, count = nodes.of_range[members], attribution.work, 0
    for level in rows_by_value(nodes.depth[node]).values():
        for some in _portions(level, node[level], placed.count_places(members[level])):
            under = placed.under(members[some], node[some])
            count += len(under.rows)
            placed.refuse_many(count)
            yield under.rows, node[some][under.member]


def _portions(rows: Ints, node: Ints, size: Ints) -> list[Ints]:
    if size.sum() <= _PLACES_AT_A_TIME:
        return [rows]
    order = np.argsort(node, kind="stable")
    is_first = np.concatenate([[True], np.diff(node[order]) != 0])
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    portion = (np.cumsum(size[order]) // _PLACES_AT_A_TIME)[first]
    return np.split(rows[order], np.flatnonzero(np.diff(portion)) + 1)


def _sum_wall(attribution: Attribution, nodes: RangeNodes, members: Ints) -> list[int | None]:
    """None of a node whose ranges all stand in replayed CUDA graphs, where no Python runs."""
    ranges = attribution.trace.ranges
    wall = np.zeros(len(nodes), dtype=np.int64)
    top = outermost(ranges, members, nodes.of_range[members])
    real = top[ranges.was_open[top]]
    np.add.at(wall, nodes.of_range[real], ranges.end_ns[real] - ranges.start_ns[real])
    has_any, has_real = (np.bincount(nodes.of_range[rows], minlength=len(nodes)) > 0 for rows in (top, real))
    return [
        ns if is_known else None for ns, is_known in zip(wall.tolist(), (has_real | ~has_any).tolist(), strict=True)
    ]


def _warnings(attribution: Attribution) -> list[Finding]:
    trace = attribution.trace
    findings = []
    if not len(trace.ranges):
        findings.append(Finding("no-ranges", explain_no_ranges(trace)))
    if not len(trace.work):
        findings.append(Finding("no-kernels", "no GPU kernels were recorded; Python times are all there is to show"))
    return findings + warn_of_placement(attribution)
