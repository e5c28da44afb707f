"""What torch.compile did in a run: what its kernels compute for which modules, and what it compiled, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.tree.range_tree import build_nodes
from profkit.errors import Finding
from profkit.names import COMPILED_KERNEL, LaunchPlace, is_shared, kind_of, read_launch_range, sharing_modules
from profkit.run.compiled_code import Compilation, CompiledGraph, GraphBreak, Launch
from profkit.run.directory import Run
from profkit.trace.columns import Bools, Ints, NamesWithNew, Trace, distinct_values
from profkit.trace.nesting import ancestors

IN_RECORDED_STEPS = ("recompiled", "compiled")
"""Codes of findings about what the figures of recorded steps contain."""
_SHOWN = 3
_LIMIT = "recompile limit"
_SIZES = ("size mismatch", "stride mismatch", ".size()", ".shape[")


@dataclass(frozen=True)
class CompiledStep:
    """What was compiled in one recorded step: ``duration_ns`` is the time that the step spent in it."""

    step: int | None
    duration_ns: int
    first_time: tuple[Compilation, ...]
    again: tuple[Compilation, ...]


@dataclass(frozen=True)
class BreakPlace:
    """A line at which graphs break, and how often Dynamo met it; ``in_recorded_steps`` says how often there."""

    line: str
    reason: str
    explanation: str | None
    hint: str | None
    times: int
    in_recorded_steps: int


@dataclass(frozen=True)
class RunCompilations:
    """What one process of a run compiled; times of ``before_ns`` are of what no recorded step has."""

    steps: tuple[CompiledStep, ...]
    before_ns: int
    before_count: int
    breaks: tuple[BreakPlace, ...]
    not_compiled: tuple[Compilation, ...]
    without_graphs: tuple[Compilation, ...]

    @property
    def recorded_ns(self) -> int:
        return sum(step.duration_ns for step in self.steps)


def read_run_compilations(run: Run | None) -> RunCompilations | None:
    """Return what the run's processes compiled; None if nothing is known of that."""
    if run is None:
        return None
    recording = {process.pid for process in run.manifest.processes}
    of_processes: list[RunCompilations] = []
    for of_rank in run.compilations:
        compiled = [compilation for compilation in of_rank[0] if compilation.pid in recording]
        breaks = [compilation for compilation in of_rank[1] if compilation.pid in recording]
        if compiled or breaks:
            of_processes.append(sum_compilations(compiled, breaks))
    return max(of_processes, key=lambda process: process.recorded_ns, default=None)


def sum_compilations(compiled: Sequence[Compilation], breaks: Sequence[GraphBreak]) -> RunCompilations:
    steps = dict.fromkeys(compilation.step for compilation in compiled if compilation.is_recorded)
    before = [compilation for compilation in compiled if not compilation.is_recorded]
    return RunCompilations(
        steps=tuple(_sum_step(step, compiled) for step in steps),
        before_ns=sum(compilation.duration_ns or 0 for compilation in before),
        before_count=len(before),
        breaks=_break_places(breaks),
        not_compiled=_each_once(item for item in compiled if item.failure is not None),
        without_graphs=_each_once(item for item in compiled if item.cudagraphs_skipped is not None),
    )


def _sum_step(step: int | None, compiled: Sequence[Compilation]) -> CompiledStep:
    in_step = [compilation for compilation in compiled if compilation.is_recorded and compilation.step == step]
    return CompiledStep(
        step,
        sum(compilation.duration_ns or 0 for compilation in in_step),
        first_time=tuple(compilation for compilation in in_step if not compilation.is_again),
        again=tuple(compilation for compilation in in_step if compilation.is_again),
    )


def _break_places(breaks: Sequence[GraphBreak]) -> tuple[BreakPlace, ...]:
    places: dict[tuple[str, str], list[GraphBreak]] = {}
    for graph_break in breaks:
        line = graph_break.lines[0] if graph_break.lines else "an unknown line"
        places.setdefault((line, graph_break.reason), []).append(graph_break)
    return tuple(
        BreakPlace(
            line=line,
            reason=reason,
            explanation=there[0].explanation,
            hint=there[0].hint,
            times=len(there),
            in_recorded_steps=sum(graph_break.is_recorded for graph_break in there),
        )
        for (line, reason), there in places.items()
    )


def _each_once(compilations: Iterator[Compilation]) -> tuple[Compilation, ...]:
    return tuple({(item.line, item.failure, item.cudagraphs_skipped): item for item in compilations}.values())


def find_compilations(run: Run | None) -> tuple[Finding, ...]:
    """Return what a person can act on, a sentence each: recompilations, graph breaks, what was not compiled."""
    known = read_run_compilations(run)
    return () if known is None else tuple(_describe(known))


def _describe(known: RunCompilations) -> Iterator[Finding]:
    for step in known.steps:
        where = "a recorded step" if step.step is None else f"recorded step {step.step}"
        spent = f"which took {step.duration_ns / 1e9:.2f} s of {where}"
        if step.again:
            yield Finding("recompiled", f"torch.compile compiled again, {spent}: {_why_again(step.again)}")
        elif step.first_time:
            message = f"torch.compile was still compiling, {spent}: {_lines(step.first_time)}; raise --warmup"
            yield Finding("compiled", message)
    if known.breaks:
        places = [f"{compilation.line}: {compilation.reason}" for compilation in known.breaks]
        count = f"{len(places)} place" + ("s" if len(places) != 1 else "")
        message = f"graphs break at {count}, where Python runs instead: {_some(places)}"
        yield Finding("graph-break", message)
    for compilation in known.not_compiled:
        at = compilation.line or compilation.failed_line or "a function"
        if is_beyond_limit(compilation):
            message = f"{at} is compiled for no further inputs: {compilation.failure}"
            message += f" ({compilation.reason})" if compilation.reason else ""
            yield Finding("recompile-limit", message)
        else:
            where = "" if compilation.failed_line is None else f" at {compilation.failed_line}"
            yield Finding("not-compiled", f"{at} runs without torch.compile: {compilation.failure}{where}")
    for compilation in known.without_graphs:
        message = f"{compilation.line or 'a backward pass'} runs without CUDA graphs: {compilation.cudagraphs_skipped}"
        yield Finding("without-cuda-graphs", message)


def is_beyond_limit(compilation: Compilation) -> bool:
    """Return whether Dynamo compiled a function no more, since it had done so for as many inputs as it does."""
    return _LIMIT in (compilation.failure or "")


def _why_again(compilations: Sequence[Compilation]) -> str:
    reasons = list(dict.fromkeys(item.reason for item in compilations if item.reason is not None))
    because = f" ({_some(reasons)})" if reasons else ""
    is_size = any(mark in reason for reason in reasons for mark in _SIZES)
    cure = "; with torch.compile(dynamic=True), or inputs of one size, it compiles once" if is_size else ""
    return f"{_lines(compilations)}{because}{cure}"


def _lines(compilations: Sequence[Compilation]) -> str:
    return _some(list(dict.fromkeys(compilation.line or "a backward pass" for compilation in compilations)))


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


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
    """Return the trace with the names of the CPU's compiled kernels, which only the run's file knows."""
    launched_in, names = trace.work.compiled_launch, NamesWithNew(trace.names)
    if launched_in is None or COMPILED_KERNEL not in trace.names:
        return trace
    launches = _by_place(run.compiled_code)
    name = trace.work.name.copy()
    unnamed = name == trace.names.index(COMPILED_KERNEL)
    for launch in distinct_values(launched_in[unnamed]).tolist():
        place = _read_place(trace.names[launch])
        known = launches.get((place.graph, place.line))
        if known is not None:
            name[unnamed & (launched_in == launch)] = names.intern(known.kernel)
    return replace(trace, names=names.strings, work=replace(trace.work, name=name))


def find_kernel_sources(
    attribution: Attribution, rows: Bools, graphs: Mapping[str, CompiledGraph]
) -> tuple[KernelSource, ...]:
    """Return where the chosen rows of work come from, the longest first; nothing of what no compiled code launched.

    ``graphs`` are what the run knows of its compiled code, by the graphs' ids.
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
    sums: dict[KernelSource, KernelSource] = {}
    for kernel, launch, times, time_ns in zip(*pairs.tolist(), count.tolist(), total.tolist(), strict=True):
        source = _source(trace.names[kernel], trace.names[launch], launches)
        so_far = sums.get(source, source)
        sums[source] = replace(
            so_far, places=so_far.places + 1, count=so_far.count + times, total_ns=so_far.total_ns + time_ns
        )
    return tuple(sorted(sums.values(), key=lambda source: (-source.total_ns, source.kernel, source.modules)))


def _by_place(code: Mapping[str, CompiledGraph]) -> dict[tuple[str, int], Launch]:
    return {(graph.id, launch.line): launch for graph in code.values() for launch in graph.launches}


def _read_place(launch_range: str) -> LaunchPlace:
    place = read_launch_range(launch_range)
    assert place is not None  # compiled_launch names no other ranges
    return place


def _source(kernel: str, launch_range: str, launches: Mapping[tuple[str, int], Launch]) -> KernelSource:
    place = _read_place(launch_range)
    modules = tuple(dict.fromkeys(map(kind_of, place.shared or place.path[-1:])))
    launch = launches.get((place.graph, place.line))
    if launch is None:
        return KernelSource(kernel, modules, None, None, None, None, 0, 0, 0)
    return KernelSource(kernel, modules, launch.kernel, launch.is_extern, launch.operators, launch.lines, 0, 0, 0)


@dataclass(frozen=True)
class SharedKernels:
    """The kernels that a range's modules share with others: they lie in lines of their own, not under the range."""

    total_ns: int
    lines: tuple[str, ...]


def find_shared(attribution: Attribution, request: str, members: Ints, rows: Bools) -> SharedKernels | None:
    """Return what the modules of a request share with others outside of it; None if that is nothing.

    A path asks for the shared lines of its own place in the tree alone; ``members`` are the ranges that were asked for.
    ``rows`` may count: what the other filters left, and what does not lie under the range.
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
    shared = attribution.work.under(lines).rows
    shared = shared[rows[shared]]
    if not len(shared):
        return None
    held = attribution.work.count(lines) > 0
    names = dict.fromkeys(trace.names[index] for index in ranges.name[lines[held]].tolist())
    return SharedKernels(int(trace.work.duration_ns[shared].sum()), tuple(names))
