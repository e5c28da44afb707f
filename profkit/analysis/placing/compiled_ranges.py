"""Compiled code in a trace: the ranges around its launches become the tree of modules that an eager run has.

While a compiled model runs, profkit opens a range around each launch, whose name says the modules that it computes for
(`profkit.run.compiled_code`). Each becomes nested ranges: the modules of its path and, if several share the launch,
one named ``shared: a + b`` below them. The modules that are open around it anyway are not repeated.

Neighbours with the same beginning of their paths lie in one range, so that a module's launches in a row are one
instance of it. A range ends where anything else happens on the thread: another module's launch, the beginning or end of
another range, a kernel launched between. So nothing comes under a module but what its own launches did. Launches that
lie in no other range of their thread, as those of an autograd thread may, are also kept apart by other threads' ranges:
two steps never share an instance.

A launch of no module leaves its work where it was. A launch range directly within another says nothing: the outer one
is what the program called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from profkit.analysis.placing.nesting import NO_RANGE, ancestors, build_timelines, innermost_at_launch, mark_nested
from profkit.errors import TraceError
from profkit.names import LaunchPlace, read_launch_range
from profkit.trace.columns import (
    MOST_OPEN_RANGES,
    Bools,
    Copies,
    Ints,
    NamesWithNew,
    Ranges,
    Trace,
    Work,
    join_tables,
    rows_by_value,
    take_rows,
)

if TYPE_CHECKING:
    from profkit.run.directory import Run

INDUCTOR = "inductor"
"""What Dynamo calls the backend whose launches are known."""


def nest_compiled_launches(trace: Trace) -> Trace:
    """Return the trace with modules in place of the ranges around compiled launches; itself if it has none.

    `Work.compiled_launch` then names the range that each row was launched in.

    Raises:
        TraceError: a path is deeper than programs nest.
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
    _refuse_deep(trace, paths)
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
    """Return which launches follow the one before them, in one range and with nothing in between.

    ``between`` are threads and moments at which something was launched outside of all launch ranges.
    """
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


def _refuse_deep(trace: Trace, paths: Sequence[tuple[int, ...]]) -> None:
    deepest = max(map(len, paths), default=0)
    if deepest > MOST_OPEN_RANGES:
        raise TraceError(
            f"{trace.path}: compiled code names {deepest:,} nested modules; more than {MOST_OPEN_RANGES:,} are not read"
        )


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
