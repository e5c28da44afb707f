"""Kernel time step by step, split by range, category and kernel: the samples on which two captures are compared.

A sample is one measured step (a range ``step`` or ``step N`` outside ``warmup``) over all processes: the k-th steps of
all processes, added up. A kernel belongs to the step in which it was launched. Within the step it lies under a path of
the tree of ranges (``forward/layer */ffn``) that begins in the step; siblings of one kind in either capture are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import BusyTime
from profkit.analysis.kernels import categorize
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account import find_warmup, measured_ranges
from profkit.analysis.tree import KernelFilter, choose_work, lies_within, outermost, select_ranges
from profkit.analysis.tree.modules import Place, read_place
from profkit.analysis.tree.range_tree import RangeNodes, join_kinds, nodes_within
from profkit.names import COMPILING, STEP
from profkit.trace.columns import Ints, Measure, Work, distinct_values, empty_ints, rows_by_value
from profkit.trace.nesting import NO_RANGE

RangePath = tuple[str, ...]


@dataclass(frozen=True)
class Key:
    """What kernel time is split by: the path of ranges within the step, the category, the kernel's full name."""

    path: RangePath
    category: str
    kernel: str
    place: Place


@dataclass(frozen=True, eq=False)
class StepSamples:
    """The kernel time of one capture, one row per sample and one column per key, in nanoseconds.

    ``kernel_count`` counts each column's kernels over all samples. ``busy_ns`` is the union per GPU of each sample,
    summed over GPUs; ``wall_ns`` is the step's Python time while it was profiled (the longest of several processes),
    None without steps. ``range`` is the range they were limited to; ``paths`` are all of the capture. ``left_out_ns``
    is the kernel time in no sample: under other ranges, in the warm-up, outside every step. Samples and ``left_out_ns``
    sum to the capture's kernel time.
    """

    measure: Measure
    range: str | None
    has_steps: bool
    keys: tuple[Key, ...]
    kernel_ns: Ints
    kernel_count: Ints
    busy_ns: Ints
    wall_ns: Ints | None
    paths: frozenset[RangePath]
    left_out_ns: int
    gpu_count: int = 1

    @property
    def size(self) -> int:
        return len(self.kernel_ns)

    @property
    def total_ns(self) -> int:
        return int(self.kernel_ns.sum())


def has_measured_steps(attribution: Attribution) -> bool:
    return bool(len(measured_ranges(attribution).get(STEP, ())))


@dataclass(frozen=True, eq=False)
class _Numbering:
    """Each row's sample, -1 for none, and what `StepSamples` says of the samples."""

    sample: Ints
    wall_ns: Ints | None = None


@dataclass(frozen=True, eq=False)
class ReducedWork:
    """The work of one capture and all that samples are taken by, so that its trace can be forgotten.

    Samples are its ``steps``, or the ``whole`` of it where it or the other capture has none. ``innermost`` is each
    row's innermost range, ``nodes`` the tree of ranges within the steps.
    """

    measure: Measure
    names: list[str]
    work: Work
    range: str | None
    steps: _Numbering | None
    whole: _Numbering
    innermost: Ints
    nodes: RangeNodes


def reduce_work(attribution: Attribution, range: str | None = None) -> ReducedWork:
    trace = attribution.trace
    members = _choose_steps(attribution, range)
    steps, whole = _number_steps(attribution, members) if len(members) else None, _number_whole(attribution)
    if range is not None:
        outside = ~choose_work(attribution, KernelFilter(range)).rows
        for numbering in (whole,) if steps is None else (steps, whole):
            numbering.sample[outside] = -1
    nodes = nodes_within(attribution, members)
    return ReducedWork(trace.measure, trace.names, trace.work, range, steps, whole, attribution.work.innermost, nodes)


def sample_both(before: ReducedWork, after: ReducedWork) -> tuple[StepSamples, StepSamples]:
    """Return the samples of two captures, in paths that mean the same in both; steps, if both have any."""
    by_step = before.steps is not None and after.steps is not None
    trees = join_kinds(before.nodes, after.nodes)
    return _sample(before, trees[0], by_step=by_step), _sample(after, trees[1], by_step=by_step)


def sample_steps(attribution: Attribution, range: str | None = None, *, by_step: bool = True) -> StepSamples:
    """Return the kernel time of each measured step; not ``by_step``, everything outside ``warmup`` is one sample.

    If ``range`` is given, only what lies under it counts. If whole steps lie within the range (``context 128``), those
    are the samples, else all steps are.
    """
    reduced = reduce_work(attribution, range)
    (nodes,) = join_kinds(reduced.nodes)
    return _sample(reduced, nodes, by_step=by_step)


def _sample(reduced: ReducedWork, nodes: RangeNodes, *, by_step: bool) -> StepSamples:
    work = reduced.work
    numbering = reduced.steps if by_step and reduced.steps is not None else reduced.whole
    rows = np.flatnonzero(numbering.sample >= 0)
    sample = numbering.sample[rows]
    size = 1 if numbering.wall_ns is None else len(numbering.wall_ns)
    keys, column = _number_keys(reduced, rows, nodes)
    kernel_ns = np.zeros((size, len(keys)), dtype=np.int64)
    np.add.at(kernel_ns, (sample, column), work.duration_ns[rows])
    return StepSamples(
        measure=reduced.measure,
        range=reduced.range,
        has_steps=by_step,
        keys=keys,
        kernel_ns=kernel_ns,
        kernel_count=np.bincount(column, minlength=len(keys)),
        busy_ns=BusyTime(work).sum_by(sample, rows, size),
        wall_ns=numbering.wall_ns if reduced.range is None else None,
        paths=_paths_of(nodes),
        left_out_ns=int(work.duration_ns.sum()) - int(work.duration_ns[rows].sum()),
        gpu_count=len(distinct_values(work.device[rows])),
    )


def _choose_steps(attribution: Attribution, range: str | None) -> Ints:
    steps = measured_ranges(attribution).get(STEP, empty_ints())
    members = steps[np.argsort(attribution.trace.ranges.start_ns[steps], kind="stable")]
    if range is None:
        return members
    within = lies_within(attribution, select_ranges(attribution, range))[members]
    return members[within] if within.any() else members


def _number_steps(attribution: Attribution, members: Ints) -> _Numbering:
    trace = attribution.trace
    top = outermost(trace.ranges, members)
    number = np.full(len(trace.ranges), -1, dtype=np.int64)
    by_process = rows_by_value(trace.ranges.process[top]).values()
    for mine in by_process:
        number[top[mine]] = np.arange(len(mine))
    duration = trace.ranges.end_ns[top] - trace.ranges.start_ns[top]
    wall_ns = np.zeros(max(map(len, by_process)), dtype=np.int64)
    np.maximum.at(wall_ns, number[top], duration)
    under = attribution.work.under(members)
    sample = np.full(len(trace.work), -1, dtype=np.int64)
    sample[under.rows] = number[members[under.member]]
    return _Numbering(sample, wall_ns)


def _number_whole(attribution: Attribution) -> _Numbering:
    warmup = find_warmup(attribution.trace)
    sample = np.zeros(len(attribution.trace.work), dtype=np.int64)
    if warmup is not None:
        sample[attribution.work.under(select_ranges(attribution, warmup)).rows] = -1
    return _Numbering(sample)


def _number_keys(reduced: ReducedWork, rows: Ints, nodes: RangeNodes) -> tuple[tuple[Key, ...], Ints]:
    paths = _read_paths(nodes)
    number: dict[tuple[RangePath, Place], int] = {}
    # The last node stands for the step itself, in which work without a node lies.
    of_node = np.array([number.setdefault(path, len(number)) for path in paths], dtype=np.int64)
    node = np.append(nodes.of_range, NO_RANGE)[reduced.innermost[rows]]
    names = reduced.names
    combined, column = np.unique(of_node[node] * len(names) + reduced.work.name[rows], return_inverse=True)
    distinct, keys = list(number), []
    for key in combined.tolist():
        at, name = divmod(key, len(names))
        (path, place), kernel = distinct[at], names[name]
        category = COMPILING if place.phase == COMPILING else categorize(kernel, reduced.measure).name
        keys.append(Key(path, category, kernel, place))
    return tuple(keys), column


def _paths_of(nodes: RangeNodes) -> frozenset[RangePath]:
    """Return the paths that a capture's own ranges have: its nodes may be those of two captures."""
    paths = _read_paths(nodes)
    return frozenset({(), *(paths[node][0] for node in distinct_values(nodes.of_range).tolist())})


def _read_paths(nodes: RangeNodes) -> list[tuple[RangePath, Place]]:
    """What torch.compile itself runs is no part of the step that it holds up: all of it lies under one path."""
    paths: list[tuple[RangePath, Place]] = []
    for labels in nodes.labels_above():
        place = read_place(labels)
        paths.append(((COMPILING,) if place.phase == COMPILING else tuple(name for name, _ in labels), place))
    return [*paths, ((), Place(None))]
