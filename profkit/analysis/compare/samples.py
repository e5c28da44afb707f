"""Kernel time step by step, split by range, category and kernel: the samples on which two captures are compared.

A sample is one measured step (a range ``step`` or ``step N`` outside ``warmup``) over all processes: the k-th steps of
all processes, added up. A kernel belongs to the step in which it was launched. Within the step its place is the path of
ranges around it, with every number replaced by ``*`` (``forward/layer */ffn``), without the ranges around the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import union_ns
from profkit.analysis.kernels.categories import categorize
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.placing.nesting import NO_RANGE
from profkit.analysis.time_account.steps import find_contexts, find_warmup, measured_ranges
from profkit.analysis.tree.module_times import is_compiling
from profkit.analysis.tree.range_tree import refuse_long_paths
from profkit.analysis.tree.selection import KernelFilter, choose_work, lies_within, outermost, select_ranges
from profkit.names import STEP, kind_of
from profkit.run.compiled_code import COMPILING
from profkit.trace.columns import Ints, Measure, distinct_values, empty_ints, rows_by_value

RangePath = tuple[str, ...]


@dataclass(frozen=True)
class Key:
    """What kernel time is split by: the path of ranges within the step, the category, the kernel's full name."""

    path: RangePath
    category: str
    kernel: str


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
    even: bool
    """False if processes made different numbers of steps: then some samples hold fewer processes than others."""
    has_contexts: bool = False
    """True if steps of several contexts are taken together."""

    @property
    def size(self) -> int:
        """Return how many samples there are."""
        return len(self.kernel_ns)

    @property
    def total_ns(self) -> int:
        """Return the kernel time of all samples."""
        return int(self.kernel_ns.sum())


def has_measured_steps(attribution: Attribution) -> bool:
    """Return whether the capture has steps to take as samples."""
    return bool(len(measured_ranges(attribution).get(STEP, ())))


def sample_steps(attribution: Attribution, range: str | None = None, *, by_step: bool = True) -> StepSamples:
    """Return the kernel time of each measured step.

    Args:
        attribution: the trace with its work placed.
        range: only what lies under this range. If whole steps lie within the range (``context 128``), those are the
            samples, else all steps are.
        by_step: take steps as samples; else everything outside ``warmup`` is one sample.

    Raises:
        TraceError: the trace's times are impossible, or it has no ranges to choose from.
        UsageError: an unknown range.
    """
    trace = attribution.trace
    members = _choose_steps(attribution, range)
    sample, wall_ns, even = _number_samples(attribution, members) if by_step else _one_sample(attribution)
    inside = sample >= 0
    if range is not None:
        inside &= choose_work(attribution, KernelFilter(range)).rows
    rows = np.flatnonzero(inside)
    size = 1 if wall_ns is None else len(wall_ns)
    path_of_row, paths = _place_rows(attribution, rows, members)
    keys, column = _number_keys(attribution, rows, path_of_row, paths)
    kernel_ns = np.zeros((size, len(keys)), dtype=np.int64)
    np.add.at(kernel_ns, (sample[rows], column), trace.work.duration_ns[rows])
    return StepSamples(
        measure=trace.measure,
        range=range,
        has_steps=by_step,
        keys=keys,
        kernel_ns=kernel_ns,
        kernel_count=np.bincount(column, minlength=len(keys)),
        busy_ns=_busy_per_sample(attribution, rows, sample[rows], size),
        wall_ns=wall_ns if range is None else None,
        paths=frozenset(paths),
        left_out_ns=int(trace.work.duration_ns.sum()) - int(trace.work.duration_ns[rows].sum()),
        even=even,
        has_contexts=by_step and len(distinct_values(find_contexts(attribution)[members])) > 1,
    )


def _choose_steps(attribution: Attribution, range: str | None) -> Ints:
    """Return the measured steps in order of their start: those within the range if there are any, else all."""
    steps = measured_ranges(attribution).get(STEP, empty_ints())
    members = steps[np.argsort(attribution.trace.ranges.start_ns[steps], kind="stable")]
    if range is None:
        return members
    within = lies_within(attribution, select_ranges(attribution, range))[members]
    return members[within] if within.any() else members


def _number_samples(attribution: Attribution, members: Ints) -> tuple[Ints, Ints, bool]:
    """Return each row's sample (-1: in no step), each sample's time, and whether all processes made equally many."""
    trace = attribution.trace
    top = outermost(trace.ranges, members)
    number = np.full(len(trace.ranges), -1, dtype=np.int64)
    counts = []
    for mine in rows_by_value(trace.ranges.process[top]).values():
        number[top[mine]] = np.arange(len(mine))
        counts.append(len(mine))
    duration = trace.ranges.end_ns[top] - trace.ranges.start_ns[top]
    wall_ns = np.zeros(max(counts), dtype=np.int64)
    np.maximum.at(wall_ns, number[top], duration)
    under = attribution.work.under(members)
    sample = np.full(len(trace.work), -1, dtype=np.int64)
    sample[under.rows] = number[members[under.member]]
    return sample, wall_ns, len(set(counts)) == 1


def _one_sample(attribution: Attribution) -> tuple[Ints, None, bool]:
    """Return one sample that holds everything outside ``warmup``."""
    warmup = find_warmup(attribution.trace)
    sample = np.zeros(len(attribution.trace.work), dtype=np.int64)
    if warmup is not None:
        sample[attribution.work.under(select_ranges(attribution, warmup)).rows] = -1
    return sample, None, True


def _place_rows(attribution: Attribution, rows: Ints, steps: Ints) -> tuple[Ints, list[RangePath]]:
    """Return the number of each row's path, and all paths; the first is that of the step itself."""
    path_of_range, paths = _number_paths(attribution, steps)
    return path_of_range[attribution.work.innermost[rows]], paths


def _number_paths(attribution: Attribution, steps: Ints) -> tuple[Ints, list[RangePath]]:
    """Return the number of each range's path within its step, and the paths."""
    trace = attribution.trace
    ranges = trace.ranges
    # The last entry stands for no range.
    number = np.zeros(len(ranges) + 1, dtype=np.int64)
    is_step = np.zeros(len(ranges), dtype=np.bool_)
    is_step[steps] = True
    known: dict[tuple[int, str], int] = {}
    kinds = [kind_of(name) for name in trace.names]
    # What torch.compile itself runs is no part of the step that it holds up: one path for all of it.
    compiling = {at for at, name in enumerate(trace.names) if is_compiling((name,))}
    names, parents, step = ranges.name.tolist(), attribution.parent.tolist(), is_step.tolist()
    # Of ranges with one start the longest is the outermost, so a parent always comes before its children.
    for index in np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist():
        if step[index]:
            continue
        above = int(number[parents[index]]) if parents[index] != NO_RANGE else 0
        key = (0, COMPILING) if names[index] in compiling else (above, kinds[names[index]])
        is_within = above == known.get((0, COMPILING), NO_RANGE)
        number[index] = above if is_within else known.setdefault(key, len(known) + 1)
    refuse_long_paths(trace.path, [above - 1 for above, _ in known], (kind for _, kind in known))
    paths: list[RangePath] = [()]
    for above, kind in known:
        paths.append((*paths[above], kind))
    return number, paths


def _number_keys(
    attribution: Attribution, rows: Ints, path_of_row: Ints, paths: list[RangePath]
) -> tuple[tuple[Key, ...], Ints]:
    """Return the distinct keys of the rows, and the number of each row's key."""
    trace = attribution.trace
    combined, column = np.unique(path_of_row * len(trace.names) + trace.work.name[rows], return_inverse=True)
    keys = []
    for number in combined.tolist():
        path, name = divmod(number, len(trace.names))
        kernel = trace.names[name]
        is_own = is_compiling(paths[path])
        keys.append(Key(paths[path], COMPILING if is_own else categorize(kernel, trace.measure).name, kernel))
    return tuple(keys), column


def _busy_per_sample(attribution: Attribution, rows: Ints, sample: Ints, size: int) -> Ints:
    work = attribution.trace.work
    devices = int(work.device.max()) + 1 if len(work) else 1
    groups, unions = union_ns(sample * devices + work.device[rows], work.start_ns[rows], work.end_ns[rows])
    busy = np.zeros(size, dtype=np.int64)
    np.add.at(busy, groups // devices, unions)
    return busy
