"""How ranges are named in a request and in a tree: names, globs, kinds and paths, and the tree of all ranges by path.

A name that exists means exactly that name. A kind that the tree of ranges shows (``layer *`` for ``layer 0`` and
``layer 1``) means those ranges, and any other glob (``l*``) matches whole names. A path (``forward/layer 3``) names
consecutive ancestors and, last, the range itself; each part is a name or a glob, ``\\/`` is a slash that belongs to a
name, and a leading slash begins at the top. Mirrors of forward ranges (`placing.backward_links`) were never
open: only a path that starts above them selects them (``backward/layer 3``).
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.placing.nesting import NO_RANGE
from profkit.errors import TraceError, UsageError
from profkit.names import BACKWARD, kind_of
from profkit.trace.columns import Bools, Ints, Trace, distinct_values


def split_path(request: str) -> list[str]:
    """Return the parts of a path; ``\\/`` is a slash within a part."""
    return [part.replace("\\/", "/") for part in re.split(r"(?<!\\)/", request)]


def join_path(parts: Iterable[str]) -> str:
    """Return a path as it is written: parts joined by slashes; a slash within a part is ``\\/``."""
    return "/".join(part.replace("/", "\\/") for part in parts)


def select_ranges(
    attribution: Attribution,
    request: str,
    *,
    instance: int | None = None,
    processes: frozenset[int] | None = None,
) -> Ints:
    """Return the ranges that ``request`` names, in order of their start.

    Args:
        attribution: the trace with its work placed.
        request: a name, a glob or a path, as above.
        instance: only the n-th of them, counted from 0.
        processes: only those of these processes.

    Raises:
        TraceError: the trace holds no ranges at all.
        UsageError: nothing matches (with the nearest names), or there is no such instance.
    """
    ranges = attribution.trace.ranges
    if not len(ranges):
        raise TraceError(f"{attribution.trace.path}: {explain_no_ranges(attribution.trace)}")
    chosen = _match(attribution, request)
    if processes is not None:
        chosen &= np.isin(ranges.process, list(processes))
    members = np.flatnonzero(chosen)
    members = members[np.argsort(ranges.start_ns[members], kind="stable")]
    if not len(members):
        raise UsageError(_explain_unknown(attribution, request, limited=processes is not None))
    if instance is not None:
        if not 0 <= instance < len(members):
            raise UsageError(f"no instance {instance}: {request!r} has {len(members)} instances, counted from 0")
        members = members[instance : instance + 1]
    return members


def explain_no_ranges(trace: Trace) -> str:
    """Return why a trace may hold no ranges, in one line, without the name of the file."""
    if trace.has_invisible_ranges:
        return (
            "NVTX domains were recorded but no range: this nsys cannot see the ranges of the"
            " `nvtx` package ≥ 0.2.12; install 'nvtx<0.2.12' or use nsys 2025.3 or newer"
        )
    if trace.source == "kineto":
        return "no ranges were recorded: wrap the parts of the step in profkit.annotate or record_function"
    return (
        "no ranges were recorded: nsys ran without --trace=nvtx, the program opened none, or they opened before"
        " the capture began (nsys 2023.4.4 also cannot see those of the `nvtx` package ≥ 0.2.12)"
    )


def _match(attribution: Attribution, request: str) -> Bools:
    ranges, names = attribution.trace.ranges, attribution.trace.names
    used = distinct_values(ranges.name).tolist()
    by_name = _nameable(attribution)
    exact = [index for index in used if names[index] == request]
    if exact:
        return np.asarray(np.isin(ranges.name, exact) & by_name)
    parts = split_path(request.removeprefix("/"))
    chosen = np.isin(ranges.name, _match_names(names, used, parts[-1]))
    reached = by_name.copy()
    above = np.where(chosen, attribution.parent, NO_RANGE)
    for part in reversed(parts[:-1]):
        matching = np.isin(ranges.name, _match_names(names, used, part))
        chosen &= (above != NO_RANGE) & matching[above]
        reached |= (above != NO_RANGE) & by_name[above]
        above = np.where(chosen, attribution.parent[above], NO_RANGE)
    if request.startswith("/"):
        chosen &= above == NO_RANGE
    return np.asarray(chosen & reached)


def _nameable(attribution: Attribution) -> Bools:
    """Return which ranges a bare name may select: those that were open, and mirrors named ``backward``."""
    names, is_mirror = attribution.trace.names, attribution.is_mirror
    backward = np.array([name.lower() == BACKWARD for name in names], dtype=np.bool_)[attribution.trace.ranges.name]
    is_outer = attribution.parent < attribution.mirrors.first
    return np.asarray(~is_mirror | (is_outer & backward))


def _match_names(names: list[str], used: list[int], pattern: str) -> list[int]:
    """Return the matching names: the exact one, else those of a kind that the tree shows, else by the glob."""
    exact = [index for index in used if names[index] == pattern]
    if exact:
        return exact
    kind = [index for index in used if kind_of(names[index]) == pattern] if "*" in pattern else []
    if len(kind) > 1:
        return kind
    return [index for index in used if fnmatch.fnmatchcase(names[index], pattern)]


def _explain_unknown(attribution: Attribution, request: str, *, limited: bool) -> str:
    trace = attribution.trace
    known = sorted({trace.names[index] for index in distinct_values(trace.ranges.name).tolist()})
    last = split_path(request)[-1]
    near = difflib.get_close_matches(last, known, n=3, cutoff=0.5)
    near += [name for name in known if last.lower() in name.lower() and name not in near][: 3 - len(near)]
    hint = f"nearest: {', '.join(map(repr, near))}" if near else f"there are {', '.join(map(repr, known[:5]))}"
    hint += "" if near or len(known) <= 5 else f" and {len(known) - 5} more"
    where = " in the chosen processes" if limited else ""
    return f"{trace.path}: no range {request!r}{where}; {hint} (`profkit ranges` lists them)"


_MOST_PATH_CHARACTERS = 2**25
_LONG_PATH = 400
"""As long as this is no program's path on average, and all paths of a small trace are shorter than the number above."""


@dataclass(frozen=True)
class NodePath:
    """One node in its place: its number, its path (a slash within a name is ``\\/``), its name and domain."""

    node: int
    path: str
    name: str
    domain: str


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
    """Return the nodes of the tree; without ``numbered``, ``step 0`` and ``step 1`` are one node ``step *``.

    Raises:
        TraceError: the paths of the nodes are longer than any program's.
    """
    ranges, names = attribution.trace.ranges, attribution.trace.names
    node = np.full(len(ranges), NO_RANGE, dtype=np.int64)
    known: dict[tuple[int, int, int], int] = {}
    parents: list[int] = []
    labels: list[tuple[str, str]] = []
    parent, name, domain = attribution.parent.tolist(), ranges.name.tolist(), ranges.domain.tolist()
    # Of two that start together the longer is the outer one, so a parent is always seen before its children.
    for index in np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist():
        above = int(node[parent[index]]) if parent[index] != NO_RANGE else NO_RANGE
        key = (above, name[index], domain[index])
        if key not in known:
            known[key] = len(parents)
            parents.append(above)
            labels.append((names[name[index]], names[domain[index]]))
        node[index] = known[key]
    refuse_long_paths(attribution.trace.path, parents, (label for label, _ in labels))
    if numbered or not parents:
        return RangeNodes(node, parents, labels)
    kind, parents, labels = _join_kinds(parents, labels)
    return RangeNodes(kind[node], parents, labels)


def refuse_long_paths(file: str, parents: Sequence[int], names: Iterable[str]) -> None:
    """Raise if the paths are longer than any program's: ranges nested thousands deep, or with names of megabytes.

    Args:
        file: for the message.
        parents: each node's, `NO_RANGE` at the top; a parent is numbered before its children.
        names: each node's own.

    Raises:
        TraceError: they are.
    """
    lengths: list[int] = []
    for parent, name in zip(parents, names, strict=True):
        lengths.append(len(name) + 1 + (lengths[parent] if parent != NO_RANGE else 0))
    total = sum(lengths)
    if total > max(_MOST_PATH_CHARACTERS, _LONG_PATH * len(lengths)):
        raise TraceError(
            f"{file}: the paths of its ranges are {total // len(lengths):,} characters long on average; captures with"
            f" more than {_LONG_PATH} are not read"
        )


def kind_paths(attribution: Attribution) -> list[str]:
    """Return each range's path in the tree of kinds."""
    nodes = build_nodes(attribution, numbered=False)
    path = {place.node: place.path for place in nodes.depth_first()}
    return [path[index] for index in nodes.of_range.tolist()]


def _join_kinds(parents: list[int], labels: list[tuple[str, str]]) -> tuple[Ints, list[int], list[tuple[str, str]]]:
    """Put siblings of one kind under one node; returns each node's new one, and the new nodes as `build_nodes` does.

    A node without a sibling of its kind keeps its name: a single ``conv2`` does not become ``conv*``.
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
