"""Choose ranges by name, glob or path, and the work that lies under them."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from profkit.analysis.attribution import Attribution, Placement
from profkit.analysis.busy import running_maximum
from profkit.analysis.nesting import NO_RANGE, mark_nested, ranges_by_thread
from profkit.errors import TraceError, UsageError
from profkit.ranges import PHASES, WARMUP
from profkit.trace.columns import Bools, Copies, Ints, Ranges, Trace, Work, distinct_values, rows_by_value

_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])|\d+$")

DIRECT_EVIDENCE, INFERRED_EVIDENCE, SEQUENCE_EVIDENCE, NOT_UNDER = range(4)


@dataclass(frozen=True, eq=False)
class Selection:
    """The instances of a range that a request names.

    ``members`` are all of them by start. Instances are numbered in order of
    their start, the first member by ``first_number``: 0, or the one instance that was asked for. ``by_phase`` is set
    when the request itself names a phase (``forward/layer 3``): work of another phase then does not belong to it.
    """

    request: str
    members: Ints
    first_number: int = 0
    by_phase: bool = False


@dataclass(frozen=True)
class RangeEvidence:
    """How the work came under the selected range; the parts sum to its kernel and graph time.

    ``sequence_ns`` is nonzero for Kineto traces alone: backward work placed by its forward operator.
    """

    direct_ns: int
    inferred_ns: int
    sequence_ns: int


@dataclass(frozen=True, eq=False)
class Selected:
    """Which rows lie under a selection: by what evidence, and in which outermost instance (-1: none)."""

    evidence: Ints
    instance: Ints

    @property
    def rows(self) -> Bools:
        """Return the rows that lie under the selection."""
        return np.asarray(self.evidence != NOT_UNDER)

    def take(self, rows: Ints, found: Ints, kind: int) -> None:
        """Put each of the rows for which an instance was found (not -1) under it, by this kind of evidence."""
        hit = rows[found >= 0]
        self.instance[hit] = found[found >= 0]
        self.evidence[hit] = kind


def select_ranges(
    attribution: Attribution,
    request: str,
    *,
    instance: int | None = None,
    processes: frozenset[int] | None = None,
) -> Selection:
    """Return the ranges that ``request`` names.

    A name that exists is meant exactly. Else a kind that the tree of ranges shows (``layer *`` for ``layer 0`` and
    ``layer 1``) is just those, and any other glob (``l*``) matches whole names. A path (``forward/layer 3``)
    names consecutive ancestors, the last being the range itself; each part is a name or a glob, and ``\\/`` is a slash
    that belongs to a name.

    Raises:
        TraceError: the trace holds no ranges at all.
        UsageError: nothing matches (with the nearest names), or there is no such instance.
    """
    trace = attribution.trace
    if not len(trace.ranges):
        raise TraceError(explain_no_ranges(trace))
    chosen = _match(attribution, request)
    if processes is not None:
        chosen &= np.isin(trace.ranges.process, list(processes))
    members = np.flatnonzero(chosen)
    members = members[np.argsort(trace.ranges.start_ns[members], kind="stable")]
    if not len(members):
        raise UsageError(_explain_unknown(attribution, request, limited=processes is not None))
    if instance is not None:
        if not 0 <= instance < len(members):
            raise UsageError(f"--instance {instance}: {request!r} has {len(members)} instances, counted from 0")
        members = members[instance : instance + 1]
    return Selection(
        request,
        members,
        first_number=instance or 0,
        by_phase=any(part.lower() in PHASES for part in split_path(request)),
    )


def select_work(attribution: Attribution, rows: Work | Copies, placed: Placement, selection: Selection) -> Selected:
    """Return which rows were launched under the selected ranges.

    A row counts once, however many of the ranges enclose it. `direct`: one was open on the launching thread;
    `inferred`: on the thread that it worked for; `sequence`: on the thread of the forward operator that the trace
    links this backward operator with.
    """
    ranges = attribution.trace.ranges
    covers = _cover_by_thread(ranges, selection)
    selected = Selected(
        evidence=np.full(len(rows), NOT_UNDER, dtype=np.int64), instance=np.full(len(rows), -1, dtype=np.int64)
    )
    for thread, cover in covers.items():
        own = np.flatnonzero(rows.launch_thread == thread)
        selected.take(own, cover.find(rows.launch_ns[own]), DIRECT_EVIDENCE)
    for thread, cover in covers.items():
        hosted = np.flatnonzero((placed.host_thread == thread) & ~selected.rows)
        selected.take(hosted, cover.find(rows.launch_ns[hosted]), INFERRED_EVIDENCE)
    if isinstance(rows, Work) and rows.sequence is not None and not selection.by_phase:
        for thread, cover in covers.items():
            _take_by_sequence(attribution, selection, selected, thread, cover)
    return selected


def explain_no_ranges(trace: Trace) -> str:
    """Return why a trace may hold no ranges, in one line."""
    if trace.has_invisible_ranges:
        return (
            f"{trace.path}: NVTX domains were recorded but not one range: this nsys cannot see the ranges of the"
            " `nvtx` package ≥ 0.2.12; install 'nvtx<0.2.12' or use nsys 2025.3 or newer"
        )
    if trace.source == "kineto":
        return f"{trace.path}: holds no ranges: wrap the parts of the step in profkit.annotate or record_function"
    return (
        f"{trace.path}: holds no ranges: nsys ran without --trace=nvtx, the program opened none, or they opened before"
        " the capture began (nsys 2023.4.4 also cannot see those of the `nvtx` package ≥ 0.2.12)"
    )


@dataclass(frozen=True, eq=False)
class _Cover:
    """The stretches of time that the selected ranges cover on one thread, each named by its outermost instance."""

    start_ns: Ints
    end_ns: Ints
    instance: Ints

    def find(self, time_ns: Ints) -> Ints:
        """Return the outermost instance that covers each time, or -1."""
        at = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        inside = (at >= 0) & (time_ns < self.end_ns[at])
        return np.where(inside, self.instance[at], -1)


def _cover_by_thread(ranges: Ranges, selection: Selection) -> dict[int, _Cover]:
    chosen = np.zeros(len(ranges), dtype=np.bool_)
    chosen[selection.members] = True
    position = np.full(len(ranges), -1, dtype=np.int64)
    position[selection.members] = np.arange(len(selection.members))
    covers = {}
    for thread, rows in ranges_by_thread(ranges).items():
        mine = rows[chosen[rows]]
        if len(mine):
            covers[thread] = _merge(ranges.start_ns[mine], ranges.end_ns[mine], position[mine])
    return covers


def _merge(start: Ints, end: Ints, instance: Ints) -> _Cover:
    """Return disjoint stretches from intervals sorted by start: what overlaps goes to the one that began first."""
    latest = np.maximum.accumulate(end)
    covered_until = np.concatenate([[start[0]], latest[:-1]])
    keep = end > covered_until
    keep[0] = True
    return _Cover(np.maximum(start, covered_until)[keep], end[keep], instance[keep])


def outermost(ranges: Ranges, members: Ints, group: Ints | None = None) -> Ints:
    """Return the members that lie within no other member of their thread (and group), in order of their start."""
    keys = [-ranges.end_ns[members], ranges.start_ns[members], ranges.thread[members]]
    keys += [] if group is None else [group]
    order = members[np.lexsort(keys)]
    if not len(order):
        return order
    changes = ranges.thread[order][1:] != ranges.thread[order][:-1]
    if group is not None:
        changes |= np.sort(group)[1:] != np.sort(group)[:-1]
    first = np.flatnonzero(np.concatenate([[True], changes]))
    reach = running_maximum(ranges.end_ns[order], first)
    before = np.concatenate([[0], reach[:-1]])
    keep = ranges.end_ns[order] > before
    keep[first] = True
    kept = order[keep]
    return kept[np.argsort(ranges.start_ns[kept], kind="stable")]


def _take_by_sequence(
    attribution: Attribution, selection: Selection, selected: Selected, thread: int, cover: _Cover
) -> None:
    """Give backward work the ranges of its forward operator, but not the forward phase itself.

    The forward operator lay in ``step / forward / layer 3``; its backward operator runs in ``step / backward`` and
    belongs to ``layer 3`` too, never to ``forward``. So of the selected ranges those that are phases do not count, nor
    does the outermost range that encloses the forward operator and not the backward one, where that one has a range of
    its own in its place.
    """
    trace = attribution.trace
    origins, sequence = trace.origins, trace.work.sequence
    if origins is None or sequence is None:
        return
    linked = np.flatnonzero((sequence >= 0) & ~selected.rows)
    linked = linked[origins.thread[sequence[linked]] == thread]
    found = cover.find(origins.start_ns[sequence[linked]])
    for at in np.flatnonzero(found >= 0).tolist():
        forward = int(selection.members[found[at]])
        is_phase = trace.names[int(trace.ranges.name[forward])].lower() in PHASES
        if is_phase or _is_counterpart(attribution, int(linked[at]), forward):
            found[at] = -1
    selected.take(linked, found, SEQUENCE_EVIDENCE)


def _is_counterpart(attribution: Attribution, row: int, forward: int) -> bool:
    """Return whether ``forward`` and a range around the backward row are siblings: two parts of one whole."""
    placed = attribution.work
    around = int(placed.own[row]) if placed.own[row] != NO_RANGE else int(placed.host[row])
    mine = set(ancestors(attribution.parent, around)) if around >= 0 else set()
    parent = int(attribution.parent[forward])
    if parent == NO_RANGE:
        return bool(mine)
    return parent in mine and around != parent


def ancestors(parent: Ints, index: int) -> list[int]:
    """Return a range and all ranges around it, innermost first."""
    chain = []
    while index != NO_RANGE:
        chain.append(index)
        index = int(parent[index])
    return chain


def split_path(request: str) -> list[str]:
    """Return the parts of a path; ``\\/`` is a slash within a part."""
    return [part.replace("\\/", "/") for part in re.split(r"(?<!\\)/", request)]


def join_path(parts: Iterable[str]) -> str:
    """Return a path as it is written: parts joined by slashes; a slash within a part is ``\\/``."""
    return "/".join(part.replace("/", "\\/") for part in parts)


def _match(attribution: Attribution, request: str) -> Bools:
    ranges, names = attribution.trace.ranges, attribution.trace.names
    used = distinct_values(ranges.name).tolist()
    exact = [index for index in used if names[index] == request]
    if exact:
        return np.asarray(np.isin(ranges.name, exact))
    parts = split_path(request)
    chosen = np.isin(ranges.name, _match_names(names, used, parts[-1]))
    above = np.where(chosen, attribution.parent, NO_RANGE)
    for part in reversed(parts[:-1]):
        matching = np.isin(ranges.name, _match_names(names, used, part))
        chosen &= (above != NO_RANGE) & matching[above]
        above = np.where(chosen, attribution.parent[above], NO_RANGE)
    return np.asarray(chosen)


def kind_of(name: str) -> str:
    """Return ``layer *`` for ``layer 3``: names that differ in numbers that stand alone or end them are one kind."""
    return _NUMBER.sub("*", name)


def _match_names(names: list[str], used: list[int], pattern: str) -> list[int]:
    """Return the names meant: the exact one, else those of a kind that the tree shows, else what the glob matches."""
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


def find_warmup(trace: Trace) -> str | None:
    """Return how this trace spells the name of its range ``warmup`` (letter case aside), if it has one."""
    return next((trace.names[i] for i in distinct_values(trace.ranges.name) if is_warmup(trace.names[i])), None)


def is_warmup(name: str) -> bool:
    """Return whether a range of this name holds steps that are not to be measured."""
    return name.lower() == WARMUP


def count_in_warmup(attribution: Attribution, members: Ints) -> tuple[int, str]:
    """Return how many members lie inside a range named ``warmup``, being none themselves, and how it is spelled."""
    trace = attribution.trace
    name = find_warmup(trace)
    if name is None:
        return 0, WARMUP
    warm = np.array([is_warmup(string) for string in trace.names], dtype=np.bool_)[trace.ranges.name]
    inside = mark_nested(attribution.parent, warm) & ~warm
    return int(inside[members].sum()), name


def lies_within(attribution: Attribution, without: Selection) -> Bools:
    """Return which ranges lie within one of a selection: under it in the tree, or at the same time on its thread."""
    ranges = attribution.trace.ranges
    marked = np.zeros(len(ranges), dtype=np.bool_)
    marked[without.members] = True
    inside = mark_nested(attribution.parent, marked)
    for thread, which in rows_by_value(ranges.thread[without.members]).items():
        around = without.members[which]
        mine = np.flatnonzero((ranges.thread == thread) & (ranges.end_thread == thread))
        begun = np.searchsorted(ranges.start_ns[around], ranges.start_ns[mine], side="right") - 1
        reach = np.maximum.accumulate(ranges.end_ns[around])
        inside[mine] |= (begun >= 0) & (reach[begun] >= ranges.end_ns[mine])
    return inside
