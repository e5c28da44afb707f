"""The tree of ranges as nodes: all ranges of one path together, and siblings that differ in a number, if wanted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.nesting import NO_RANGE
from profkit.analysis.selection import join_path, kind_of
from profkit.trace.columns import Ints


@dataclass(frozen=True)
class NodePath:
    """One node in its place: its number, its path (a slash within a name is ``\\/``), its name and domain."""

    node: int
    path: str
    name: str
    domain: str


@dataclass(frozen=True, eq=False)
class RangeNodes:
    """Each range's node; each node's parent node (`NO_RANGE` at the top) and its (name, domain), by first start."""

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

    def depth_first(self) -> list[NodePath]:
        """Return the nodes as a tree is read."""
        children = _children(self.parent)
        found, stack = [], [(index, "") for index in reversed(children.get(NO_RANGE, []))]
        while stack:
            index, prefix = stack.pop()
            name, domain = self.labels[index]
            path = prefix + join_path([name])
            found.append(NodePath(index, path, name, domain))
            stack += [(child, path + "/") for child in reversed(children.get(index, []))]
        return found

    def names_above(self) -> list[tuple[str, ...]]:
        """Return for each node the names from the top down to its own."""
        found: list[tuple[str, ...]] = []
        for parent, (name, _) in zip(self.parent, self.labels, strict=True):
            found.append((*(found[parent] if parent != NO_RANGE else ()), name))
        return found


def build_nodes(attribution: Attribution, *, numbered: bool) -> RangeNodes:
    """Return the nodes of the tree; without ``numbered``, ``step 0`` and ``step 1`` are one node ``step *``."""
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
        return RangeNodes(node, parents, labels)
    kind, parents, labels = _join_kinds(parents, labels)
    return RangeNodes(kind[node], parents, labels)


def _join_kinds(parents: list[int], labels: list[tuple[str, str]]) -> tuple[Ints, list[int], list[tuple[str, str]]]:
    """Put siblings of one kind under one node; returns each node's new one, and the new nodes as `build_nodes` does.

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


def _children(parent_node: list[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(parent_node):
        children.setdefault(parent, []).append(index)
    return children
