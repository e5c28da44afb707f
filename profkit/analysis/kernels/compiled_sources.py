"""Where the kernels of compiled code come from: the operators, lines and modules of the program that they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.placing.nesting import ancestors
from profkit.analysis.tree.range_paths import build_nodes
from profkit.names import is_shared, kind_of, sharing_modules
from profkit.run.compiled_code import COMPILED_KERNEL, CompiledGraph, Launch, read_launch_range
from profkit.run.directory import Run
from profkit.trace.columns import Bools, Ints, NamesWithNew, Trace, distinct_values


@dataclass(frozen=True)
class KernelSource:
    """What the kernels of one name compute, in all places of compiled code that compute the same.

    ``modules`` are the ranges that the launches lie under, as the trace names them, those that differ in a number as
    one (``h.*.mlp``); several share each launch. None are of no module. ``launch`` is what the generated code calls:
    a fused kernel, or with ``is_extern`` a function of a library; ``operators`` and ``lines`` (``file:line function``)
    are the program's. These four are None where the run's file does not know the launch. ``places`` is how many places
    of the generated code these are.
    """

    kernel: str
    modules: tuple[str, ...]
    launch: str | None
    is_extern: bool | None
    operators: tuple[str, ...] | None
    lines: tuple[str, ...] | None
    places: int
    count: int
    total_ns: int


def name_compiled_kernels(trace: Trace, run: Run) -> Trace:
    """Return the trace with the names of the CPU's compiled kernels, which only the run's file knows.

    Raises:
        RunError: that file cannot be read.
    """
    launched_in, names = trace.work.compiled_launch, NamesWithNew(trace.names)
    if launched_in is None or COMPILED_KERNEL not in trace.names:
        return trace
    launches = _by_place(run.compiled_code)
    name = trace.work.name.copy()
    unnamed = name == trace.names.index(COMPILED_KERNEL)
    for launch in distinct_values(launched_in[unnamed]).tolist():
        known = launches.get(_place(trace.names[launch]))
        if known is not None:
            name[unnamed & (launched_in == launch)] = names.intern(known.kernel)
    return replace(trace, names=names.strings, work=replace(trace.work, name=name))


def find_kernel_sources(
    attribution: Attribution, rows: Bools, graphs: Mapping[str, CompiledGraph]
) -> tuple[KernelSource, ...]:
    """Return where the chosen rows of work come from, the longest first; nothing of what no compiled code launched.

    Args:
        attribution: the trace with its work placed.
        rows: which rows of work.
        graphs: what the run knows of its compiled code, by the graphs' ids.
    """
    trace, work = attribution.trace, attribution.trace.work
    if work.compiled_launch is None:
        return ()
    chosen = np.flatnonzero(rows & (work.compiled_launch >= 0))
    if not len(chosen):
        return ()
    pairs, of_row = np.unique(np.stack([work.name[chosen], work.compiled_launch[chosen]]), axis=1, return_inverse=True)
    count, total = (np.zeros(pairs.shape[1], dtype=np.int64) for _ in range(2))
    np.add.at(count, of_row.reshape(-1), 1)
    np.add.at(total, of_row.reshape(-1), work.duration_ns[chosen])
    launches = _by_place(graphs)
    sums: dict[KernelSource, list[int]] = {}
    for kernel, launch, times, time_ns in zip(*pairs.tolist(), count.tolist(), total.tolist(), strict=True):
        one = sums.setdefault(_source(trace.names[kernel], trace.names[launch], launches), [0, 0, 0])
        one[0], one[1], one[2] = one[0] + 1, one[1] + times, one[2] + time_ns
    found = [replace(of, places=places, count=times, total_ns=time) for of, (places, times, time) in sums.items()]
    return tuple(sorted(found, key=lambda one: (-one.total_ns, one.kernel, one.modules)))


def _by_place(code: Mapping[str, CompiledGraph]) -> dict[tuple[str, int], Launch]:
    return {(graph.id, one.line): one for graph in code.values() for one in graph.launches}


def _place(launch_range: str) -> tuple[str, int]:
    """Return graph and line of a range that is known to be one around a launch."""
    place = read_launch_range(launch_range)
    assert place is not None
    return place.graph, place.line


def _source(kernel: str, launch_range: str, launches: Mapping[tuple[str, int], Launch]) -> KernelSource:
    """Return the source of one place without its sums."""
    place = read_launch_range(launch_range)
    assert place is not None  # compiled_launch names no other ranges
    modules = tuple(dict.fromkeys(map(kind_of, place.shared or place.path[-1:])))
    one = launches.get((place.graph, place.line))
    if one is None:
        return KernelSource(kernel, modules, None, None, None, None, 0, 0, 0)
    return KernelSource(kernel, modules, one.kernel, one.is_extern, one.operators, one.lines, 0, 0, 0)


@dataclass(frozen=True)
class SharedKernels:
    """The kernels that a range's modules share with others: they lie in lines of their own, not under the range.

    ``total_ns`` is their kernel time, ``lines`` are the ranges ``shared: a + b`` that they lie under.
    """

    total_ns: int
    lines: tuple[str, ...]


def find_shared(attribution: Attribution, request: str, members: Ints, rows: Bools) -> SharedKernels | None:
    """Return what the modules of a request share with others outside of it; None if that is nothing.

    Args:
        attribution: the trace with its work placed.
        request: the range that was asked for; a path asks for the shared lines of its own place in the tree alone.
        members: its ranges.
        rows: the work that may count: what the other filters left, and what does not lie under the range.
    """
    trace, ranges = attribution.trace, attribution.trace.ranges
    if trace.work.compiled_launch is None:
        return None
    asked = {trace.names[index] for index in distinct_values(ranges.name[members]).tolist()}
    within = tuple(f"{name}." for name in asked)
    naming = [
        index
        for index in distinct_values(ranges.name).tolist()
        if is_shared(trace.names[index])
        and any(module in asked or module.startswith(within) for module in sharing_modules(trace.names[index]))
    ]
    lines = np.flatnonzero(np.isin(ranges.name, naming))
    if "/" in request.replace("\\/", ""):
        nodes = build_nodes(attribution, numbered=True)
        parents = np.array(nodes.parent, dtype=np.int64)
        around = {above for node in set(nodes.of_range[members].tolist()) for above in ancestors(parents, node)}
        lines = lines[np.isin(parents[nodes.of_range[lines]], list(around))]
    found = attribution.work.under(lines).rows
    found = found[rows[found]]
    if not len(found):
        return None
    held = attribution.work.count(lines) > 0
    names = dict.fromkeys(trace.names[index] for index in ranges.name[lines[held]].tolist())
    return SharedKernels(int(trace.work.duration_ns[found].sum()), tuple(names))
