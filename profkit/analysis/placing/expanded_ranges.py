"""Ranges that name what runs without the program's Python, expanded to those of the modules that it belongs to.

Compiled code: profkit opens a range around each launch, whose name says the modules that it computes for
(`profkit.run.compiled_code`). It becomes nested ranges: the modules of its path and, if several share the launch, one
named ``shared: a + b`` below them; modules that are open around it anyway are not repeated. Neighbours with the same
beginning of their paths lie in one range, which ends where anything else happens on the thread: so nothing comes under
a module but what its own launches did. Launches in no other range of their thread are also kept apart by other threads'
ranges: two steps never share an instance. A launch of no module leaves its work where it was; of a launch range
directly within another, the outer one is what the program called.

CUDA graphs: a replay is one call. profkit records at the capture which ranges were open when each node was made
(`profkit.run.compiled_code.CapturedGraph`), and opens a range around each replay, which names the graph. Where a graph
is traced node by node, that range becomes the ranges of the capture, and each kernel gets a moment of its own within
them (`Work.placed_ns`), a nanosecond after the one before: the modules took no Python time. What was replayed must be
what was captured, the same nodes and the same of them kernels; else the replay keeps its range, and a note says why.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from profkit.errors import TraceError
from profkit.names import LaunchPlace, graph_range, read_graph_range, read_launch_range
from profkit.trace.columns import (
    MOST_OPEN_RANGES,
    Bools,
    Copies,
    Ints,
    NamesWithNew,
    Ranges,
    Trace,
    Work,
    empty_ints,
    join_tables,
    rows_by_value,
    take_rows,
)
from profkit.trace.nesting import NO_RANGE, ancestors, build_timelines, innermost_at_launch, mark_nested

if TYPE_CHECKING:
    from profkit.run.compiled_code import CapturedGraph
    from profkit.run.directory import Run

INDUCTOR = "inductor"
"""What Dynamo calls the backend whose launches are known."""


def nest_compiled_launches(trace: Trace) -> Trace:
    """Return the trace with modules in place of the ranges around compiled launches; itself if it has none.

    `Work.compiled_launch` then names the range that each row was launched in.
    """
    places = {index: place for index, name in enumerate(trace.names) if (place := read_launch_range(name)) is not None}
    if not places:
        return trace
    ranges = trace.ranges
    is_launch = np.isin(ranges.name, list(places))
    if not is_launch.any():
        return trace
    timelines, parent = build_timelines(ranges)
    lead = np.flatnonzero(is_launch & ~((parent != NO_RANGE) & is_launch[parent]))
    lead = lead[np.lexsort((-ranges.end_ns[lead], ranges.start_ns[lead], parent[lead], ranges.thread[lead]))]
    in_launch = [
        _launch_of(innermost_at_launch(rows, timelines), is_launch, parent) for rows in (trace.work, trace.copies)
    ]
    work = replace(trace.work, compiled_launch=np.where(in_launch[0] >= 0, ranges.name[in_launch[0]], -1))
    between = [_launched_elsewhere(trace.work, in_launch[0]), _launched_elsewhere(trace.copies, in_launch[1])]
    others = take_rows(ranges, ~is_launch & ~mark_nested(parent, is_launch))
    joined = _continues(ranges, lead, parent, others, between)
    names = NamesWithNew(trace.names)
    path, paths = _paths_below(ranges, lead, parent, places, names)
    deepest = max(map(len, paths), default=0)
    if deepest > MOST_OPEN_RANGES:
        raise TraceError(
            f"{trace.path}: compiled code names {deepest:,} nested modules; more than {MOST_OPEN_RANGES:,} are not read"
        )
    new = list(_nested(ranges, lead, joined, path, paths))
    ranges = join_tables([take_rows(ranges, ~is_launch), *new])
    return replace(trace, names=names.strings, work=work, ranges=ranges)


def explain_no_modules(run: Run, trace: Trace) -> str | None:
    """Return why kernels of a run's compiled code lie under no modules; None if all do, or none ran."""
    from profkit.run.compiled_code import FIRST_TORCH, says_origins

    manifest = run.manifest
    failures = dict.fromkeys(process.compiled_failure for process in manifest.processes if process.compiled_failure)
    if failures:
        return f"not all kernels of compiled code lie under their modules: {'; '.join(failures)}"
    if trace.work.compiled_launch is not None:
        return None
    compiled = None if manifest.conditions is None else manifest.conditions.compiled
    if compiled is None or not compiled.graphs or manifest.workload.annotate is False:
        return None
    what = "this run is compiled, and its kernels count for the phase or the compiled module:"
    backends = {str(backend.get("backend")) for backend in compiled.backends}
    if backends and INDUCTOR not in backends:
        return f"{what} modules are only known of code that Inductor made, not {', '.join(sorted(backends))}"
    torch = manifest.versions.get("torch") or ""
    if torch and not says_origins(torch):
        needed = ".".join(map(str, FIRST_TORCH))
        return f"{what} torch {torch} does not say which modules they compute for; torch {needed} does"
    # Each launch of code that the run knows has a range: none ran in the recorded steps.
    without = f"{what} it was recorded without the ranges that name the modules; record it again to have them"
    return None if run.compiled_code else without


def _launch_of(innermost: Ints, is_launch: Bools, parent: Ints) -> Ints:
    # One more entry, so that a row in no range (-1) finds none.
    above, is_launch_here = np.append(parent, NO_RANGE), np.append(is_launch, False)
    launch = innermost
    while (climbing := (launch != NO_RANGE) & ~is_launch_here[launch]).any():
        launch = np.where(climbing, above[launch], launch)
    return launch


def _launched_elsewhere(rows: Work | Copies, in_launch: Ints) -> tuple[Ints, Ints]:
    return rows.launch_thread[in_launch < 0], rows.placed_ns[in_launch < 0]


def _continues(ranges: Ranges, lead: Ints, parent: Ints, others: Ranges, between: Sequence[tuple[Ints, Ints]]) -> Bools:
    """``between`` are threads and moments at which something was launched outside of all launch ranges."""
    same = np.concatenate([[False], np.diff(ranges.thread[lead]) == 0])
    same[1:] &= np.diff(parent[lead]) == 0
    threads = np.concatenate([others.thread, others.end_thread, *(thread for thread, _ in between)])
    moments = np.concatenate([others.start_ns, others.end_ns, *(moment for _, moment in between)])
    is_top = parent[lead] == NO_RANGE
    for thread, rows in rows_by_value(ranges.thread[lead]).items():
        same[rows] &= _none_between(moments[threads == thread], ranges, lead, rows)
        top = rows[is_top[rows]]
        if len(top):
            of_process = others.process == ranges.process[lead[top[0]]]
            same[top] &= _none_between(
                np.concatenate([others.start_ns[of_process], others.end_ns[of_process]]), ranges, lead, top
            )
    return same


def _none_between(moments: Ints, ranges: Ranges, lead: Ints, rows: Ints) -> Bools:
    moments = np.sort(moments)
    before, after = ranges.end_ns[lead[np.maximum(rows - 1, 0)]], ranges.start_ns[lead[rows]]
    nothing: Bools = np.searchsorted(moments, after, side="right") <= np.searchsorted(moments, before, side="left")
    return nothing


def _paths_below(
    ranges: Ranges, lead: Ints, parent: Ints, places: dict[int, LaunchPlace], names: NamesWithNew
) -> tuple[Ints, list[tuple[int, ...]]]:
    """Return each launch's path below the ranges around it, as a number, and those paths, as indices of names."""
    ranges_around, around_of = np.unique(parent[lead], return_inverse=True)
    # Few ranges differ in what is open there: all steps are alike but for their own names.
    lists: dict[tuple[str, ...], int] = {}
    modules = {module for place in places.values() for module in place.path}
    for_range = [
        lists.setdefault(tuple(name for name in open_ if name in modules), len(lists))
        for open_ in (_open_at(range_, ranges, parent, places, names) for range_ in ranges_around.tolist())
    ]
    around = list(lists)
    known: dict[tuple[int, ...], int] = {}
    number = []
    count = len(names.strings)
    pairs, inverse = np.unique(np.array(for_range)[around_of] * count + ranges.name[lead], return_inverse=True)
    for open_there, name in zip(*(part.tolist() for part in np.divmod(pairs, count)), strict=True):
        below = places[name].below(around[open_there])
        number.append(known.setdefault(tuple(names.intern(module) for module in below), len(known)))
    return np.array(number, dtype=np.int64)[inverse], list(known)


def _open_at(
    range_: int, ranges: Ranges, parent: Ints, places: dict[int, LaunchPlace], names: NamesWithNew
) -> Iterator[str]:
    """Yield the names of a range and those around it, outermost first; of a launch the modules that it stands for."""
    for name in ranges.name[ancestors(parent, range_)[::-1]].tolist():
        yield from places[name].path if name in places else (names.strings[name],)


def _nested(
    ranges: Ranges, lead: Ints, joined: Bools, path: Ints, paths: Sequence[tuple[int, ...]]
) -> Iterator[Ranges]:
    """Yield the ranges of each level of the paths, the outermost first; those that share a beginning are one range."""
    depth = 0
    while len(lead):
        label = np.array([names[depth] if depth < len(names) else -1 for names in paths], dtype=np.int64)[path]
        # What differs here is apart at all levels below too.
        joined = joined & np.concatenate([[False], label[1:] == label[:-1]])
        kept = label >= 0
        lead, joined, path, label = lead[kept], joined[kept], path[kept], label[kept]
        first = np.flatnonzero(~joined)
        if len(first):
            begun = lead[first]
            yield replace(
                take_rows(ranges, begun),
                name=label[first],
                end_ns=np.maximum.reduceat(ranges.end_ns[lead], first),
                end_thread=ranges.thread[begun],
                is_open=np.logical_or.reduceat(ranges.is_open[lead], first),
                payload={},
            )
        depth += 1


_MOST_RANGES_EACH = 64
"""As many ranges open for each node of a graph at most; more are no program's."""

_OTHER = "it is not the {:,} kernels that were captured"
_BRANCHES = "the graph has branches, and torch.profiler does not say which node a kernel is; record with --nsys"


def place_graph_nodes(trace: Trace, graphs: Iterable[CapturedGraph]) -> Trace:
    """Return the trace with the ranges of the captures in place of the replays; itself if it has no replay."""
    known = {graph_range(graph.id): graph for graph in graphs}
    layouts = {at: _lay_out(known[name]) for at, name in enumerate(trace.names) if name in known}
    replays = np.flatnonzero(np.isin(trace.ranges.name, list(layouts)))
    trace = _note_unknown(trace, known)
    if not len(replays):
        return _note_whole(trace)
    trace = _number_chains(trace, replays, layouts)
    work_of, copies_of = (
        _replay_of(rows, _nodes(rows) >= 0, trace.ranges, replays) for rows in (trace.work, trace.copies)
    )
    work_ns, copies_ns = trace.work.placed_ns.copy(), trace.copies.placed_ns.copy()
    names = NamesWithNew(trace.names)
    placed, new, notes = np.zeros(len(replays), dtype=np.bool_), [], list(trace.notes)
    for name, layout in layouts.items():
        mine = np.flatnonzero(trace.ranges.name[replays] == name)
        fits = _which_fit(trace, replays[mine], layout, (work_of, copies_of), mine)
        placed[mine] = fits
        for node_ns, rows, replay_of in ((work_ns, trace.work, work_of), (copies_ns, trace.copies, copies_of)):
            those = np.flatnonzero(np.isin(replay_of, mine[fits]))
            begin_ns = trace.ranges.start_ns[replays[replay_of[those]]]
            node_ns[those] = begin_ns + layout.node[_nodes(rows)[those]]
        new.append(_opened(trace.ranges, replays[mine[fits]], layout, names))
        if not fits.all() and not trace.work.is_graph.any():
            left = f"the kernels of {int((~fits).sum()):,} of {len(fits):,} replays lie under no module"
            is_numbered = layout.is_chain or trace.source == "nsys" or bool(np.isin(work_of, mine).any())
            why = _OTHER.format(int(layout.is_kernel.sum())) if is_numbered else _BRANCHES
            notes.append(f"{trace.names[name]}: {left}: {why}")
    is_kept = np.ones(len(trace.ranges), dtype=np.bool_)
    is_kept[replays[placed]] = False
    marked = replace(trace.ranges, is_replayed=~trace.ranges.was_open)
    trace = replace(
        trace,
        names=names.strings,
        work=replace(trace.work, node_ns=work_ns),
        copies=replace(trace.copies, node_ns=copies_ns),
        ranges=join_tables([take_rows(marked, is_kept), *new]),
        notes=tuple(notes),
    )
    return _note_whole(trace)


@dataclass(frozen=True, eq=False)
class _Layout:
    """One captured graph in nanoseconds from the beginning of its replay: its ranges, outer ones first, and nodes."""

    name: list[str]
    begin: Ints
    end: Ints
    node: Ints
    is_kernel: Bools
    is_copy: Bools
    """Which nodes are memory copies or fills."""
    length: int
    is_chain: bool


def _lay_out(graph: CapturedGraph) -> _Layout:
    """Return when each range opens and closes and each node is launched: one nanosecond after the other."""
    runs = graph.runs
    names: list[str] = []
    begin: list[int] = []
    end: list[int] = []
    node: list[int] = []
    open_now: list[int] = []
    now = 1
    for path in [*(run.ranges for run in runs), ()]:
        same = 0
        while same < min(len(path), len(open_now)) and names[open_now[same]] == path[same]:
            same += 1
        while len(open_now) > same:
            end[open_now.pop()] = now
            now += 1
        for name in path[same:]:
            open_now.append(len(names))
            names.append(name)
            begin.append(now)
            end.append(0)
            now += 1
        node.append(now)
        now += 1
    counts = np.array([run.count for run in runs], dtype=np.int64)
    kinds = np.repeat(np.array([run.kind for run in runs], dtype=np.str_), counts)
    return _Layout(
        names,
        np.array(begin, dtype=np.int64),
        np.array(end, dtype=np.int64),
        np.repeat(np.array(node[: len(runs)], dtype=np.int64), counts),
        kinds == "kernel",
        np.isin(kinds, ["copy", "fill"]),
        now,
        graph.is_chain,
    )


def _number_chains(trace: Trace, replays: Ints, layouts: Mapping[int, _Layout]) -> Trace:
    """Return the trace with the numbers of nodes where it has none and each node waited for the one before it."""
    tables: tuple[Work | Copies, ...] = (trace.work, trace.copies)
    if any((_nodes(rows) >= 0).any() for rows in tables):
        return trace
    numbers = [np.full(len(rows), -1, dtype=np.int64) for rows in tables]
    by_replay = [rows_by_value(_replay_of(rows, rows.launch_thread >= 0, trace.ranges, replays)) for rows in tables]
    for at, replay in enumerate(replays.tolist()):
        layout = layouts[int(trace.ranges.name[replay])]
        mine = [rows_of.get(at, empty_ints()) for rows_of in by_replay]
        # CUDA may run a copy as a kernel, and then torch.profiler has it among the kernels: only together they count.
        nodes = np.flatnonzero(layout.is_kernel | layout.is_copy)
        if layout.is_chain and len(nodes) == sum(map(len, mine)):
            start_ns = np.concatenate([rows.start_ns[some] for rows, some in zip(tables, mine, strict=True)])
            numbered = np.empty_like(nodes)
            numbered[np.argsort(start_ns, kind="stable")] = nodes
            for number, some, those in zip(numbers, mine, np.split(numbered, [len(mine[0])]), strict=True):
                number[some] = those
    return replace(
        trace,
        work=replace(trace.work, graph_node=numbers[0]),
        copies=replace(trace.copies, graph_node=numbers[1]),
    )


def _nodes(rows: Work | Copies) -> Ints:
    return np.full(len(rows), -1, dtype=np.int64) if rows.graph_node is None else rows.graph_node


def _replay_of(rows: Work | Copies, wanted: Bools, ranges: Ranges, replays: Ints) -> Ints:
    replay_of_row = np.full(len(rows), -1, dtype=np.int64)
    replays_of = rows_by_value(ranges.thread[replays])
    for thread, mine in rows_by_value(np.where(wanted, rows.launch_thread, -1)).items():
        theirs = replays_of.get(thread)
        if thread < 0 or theirs is None:
            continue
        theirs = theirs[np.argsort(ranges.start_ns[replays[theirs]], kind="stable")]
        # A replay lies in no other one.
        at = np.searchsorted(ranges.start_ns[replays[theirs]], rows.launch_ns[mine], side="right") - 1
        inside = (at >= 0) & (rows.launch_ns[mine] < ranges.end_ns[replays[theirs[at]]])
        replay_of_row[mine[inside]] = theirs[at[inside]]
    return replay_of_row


def _which_fit(trace: Trace, replays: Ints, layout: _Layout, replay_of: tuple[Ints, Ints], number: Ints) -> Bools:
    """Return which replays of one graph ran the nodes that were captured: all its kernels, each once, and no others.

    A copy or fill may be in either table, or in none.
    """
    fits = trace.ranges.end_ns[replays] - trace.ranges.start_ns[replays] > layout.length
    work, copies = (rows_by_value(column) for column in replay_of)
    for at, replay in enumerate(number.tolist()):
        kernels = np.sort(_nodes(trace.work)[work.get(replay, empty_ints())])
        moved = np.sort(_nodes(trace.copies)[copies.get(replay, empty_ints())])
        both = np.sort(np.concatenate([kernels, moved]))
        fits[at] &= len(layout.name) <= _MOST_RANGES_EACH * len(both)
        fits[at] &= not len(both) or both[-1] < len(layout.node)
        fits[at] &= bool((both[1:] != both[:-1]).all())
        if fits[at]:
            is_kernel = layout.is_kernel[kernels]
            fits[at] = int(is_kernel.sum()) == int(layout.is_kernel.sum())
            fits[at] &= bool(layout.is_copy[kernels[~is_kernel]].all()) and bool(layout.is_copy[moved].all())
    return fits


def _opened(ranges: Ranges, replays: Ints, layout: _Layout, names: NamesWithNew) -> Ranges:
    count = len(layout.name)
    copied = take_rows(ranges, np.repeat(replays, count))
    begin_ns = np.repeat(ranges.start_ns[replays], count)
    return replace(
        copied,
        name=np.tile(np.array([names.intern(name) for name in layout.name], dtype=np.int64), len(replays)),
        start_ns=begin_ns + np.tile(layout.begin, len(replays)),
        end_ns=begin_ns + np.tile(layout.end, len(replays)),
        end_thread=copied.thread,
        is_open=np.zeros(len(copied), dtype=np.bool_),
        is_replayed=np.ones(len(copied), dtype=np.bool_),
        payload={},
    )


def _note(trace: Trace, count: int, what: str) -> Trace:
    return replace(trace, notes=(*trace.notes, f"{count:,} replays of CUDA graphs {what}")) if count else trace


def _note_unknown(trace: Trace, known: Container[str]) -> Trace:
    unknown = [at for at, name in enumerate(trace.names) if read_graph_range(name) is not None and name not in known]
    what = (
        "lie under no module: the ranges of their captures stand in the run's compiled.jsonl, not in the trace; open"
        " the run directory"
    )
    return _note(trace, int(np.isin(trace.ranges.name, unknown).sum()), what)


def _note_whole(trace: Trace) -> Trace:
    what = (
        "were traced whole: each is one row, without its kernels and their modules; profkit run --nsys"
        " --cuda-graph-trace node records them one by one"
    )
    return _note(trace, int(trace.work.is_graph.sum()), what)
