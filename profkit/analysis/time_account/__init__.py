"""Steps, phases and idle time of a run: the only source of every step time.

Here what a step and a phase are: which ranges are measured, and which only warm up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import numpy as np

from profkit.analysis.placing.attribution import Attribution, mark_members
from profkit.names import CONTEXT, PHASES, STEP, UNFINISHED, WARMUP, phase_of
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, empty_ints, rows_by_value
from profkit.trace.nesting import NO_RANGE, ancestors, find_marked, mark_nested

_STEP = re.compile(rf"{STEP}( (\d{{1,18}}|\*))?", re.I)
_CONTEXT = re.compile(rf"{CONTEXT} (\d{{1,18}})")

# Many questions of one command begin with the steps.
_MEASURED: WeakKeyDictionary[Attribution, dict[str, Ints]] = WeakKeyDictionary()
_STEP_AROUND: WeakKeyDictionary[Attribution, Ints] = WeakKeyDictionary()


def measured_ranges(attribution: Attribution) -> dict[str, Ints]:
    """Return the ranges that are steps, forward passes, …, by label: those that ended, outside ``warmup``.

    A step within another step, as where a program and a recorder each open one, is part of the outer one. A step in
    which the program ended is none.
    """
    if attribution not in _MEASURED:
        _MEASURED[attribution] = _find_measured(attribution)
    return _MEASURED[attribution]


def _find_measured(attribution: Attribution) -> dict[str, Ints]:
    trace = attribution.trace
    names = {i: trace.names[i] for i in distinct_values(trace.ranges.name).tolist()}
    label_of = {i: kind for i, name in names.items() if (kind := STEP if is_step(name) else phase_of(name))}
    if not label_of:
        return {}
    labels = [*dict.fromkeys(label_of.values())]
    table = np.full(len(trace.names), -1, dtype=np.int64)
    table[list(label_of)] = [labels.index(label) for label in label_of.values()]
    label = table[trace.ranges.name]
    warm = np.zeros(len(trace.names), dtype=np.bool_)
    warm[[i for i, name in names.items() if is_warmup(name)]] = True
    measured = ~mark_nested(attribution.parent, warm[trace.ranges.name]) & ~trace.ranges.is_open
    if STEP in labels:
        # What links repeat of a step under its backward pass is no further step.
        measured &= ~(attribution.is_mirror & (label == labels.index(STEP)))
        steps, parent = measured & (label == labels.index(STEP)), attribution.parent
        measured &= ~(steps & (parent != NO_RANGE) & mark_nested(parent, steps)[parent])
        measured[_unfinished_steps(attribution, steps)] = False
    by_label = {name: np.flatnonzero(measured & (label == index)) for index, name in enumerate(labels)}
    return {name: by_label[name] for name in (STEP, *PHASES) if name in by_label}


def _unfinished_steps(attribution: Attribution, is_step: Bools) -> list[int]:
    names, unfinished = attribution.trace.names, []
    for mark in np.flatnonzero(attribution.trace.ranges.name == names.index(UNFINISHED)) if UNFINISHED in names else ():
        unfinished += [around for around in ancestors(attribution.parent, int(mark)) if is_step[around]][:1]
    return unfinished


def count_steps(attribution: Attribution, rows: Bools) -> int | None:
    """Return in how many measured steps the given work ran; None if some of it ran in no measured step."""
    steps = measured_ranges(attribution).get(STEP)
    if steps is None or not rows.any():
        return None
    under = attribution.work.under(steps, np.arange(len(steps)))
    inside = rows[under.rows]
    if int(inside.sum()) != int(rows.sum()):
        return None
    used = steps[distinct_values(under.member[inside])]
    counts = {len(mine) for mine in rows_by_value(attribution.trace.ranges.process[used]).values()}
    return counts.pop() if len(counts) == 1 else None


def mark_work_of_steps(attribution: Attribution) -> Bools:
    """Return which work ran in a measured step: all of it where there is no step."""
    steps = measured_ranges(attribution).get(STEP, empty_ints())
    count = len(attribution.trace.work)
    return mark_members(count, attribution.work.under(steps).rows) if len(steps) else np.ones(count, dtype=np.bool_)


def find_steps(attribution: Attribution) -> Ints:
    """Return for each range the measured step that it is or lies in, `NO_RANGE` for none."""
    if attribution not in _STEP_AROUND:
        steps = mark_members(len(attribution.parent), measured_ranges(attribution).get(STEP, empty_ints()))
        _STEP_AROUND[attribution] = find_marked(attribution.parent, steps)
    return _STEP_AROUND[attribution]


def number_in_step(attribution: Attribution, members: Ints, label: Ints) -> Ints:
    """Return for each member which of its label it is in its step, counted from 0 by start; 0 outside all steps."""
    step = find_steps(attribution)[members]
    order = np.lexsort((attribution.trace.ranges.start_ns[members], label, step))
    is_first = np.ones(len(members), dtype=np.bool_)
    is_first[1:] = (step[order][1:] != step[order][:-1]) | (label[order][1:] != label[order][:-1])
    position = np.arange(len(members))
    number = np.empty(len(members), dtype=np.int64)
    number[order] = position - np.maximum.accumulate(np.where(is_first, position, 0))
    number[step == NO_RANGE] = 0
    return number


def find_contexts(attribution: Attribution) -> Ints:
    """Return for each range the number of the context that it lies in, in a run of several; 0 for none."""
    ranges, names = attribution.trace.ranges, attribution.trace.names
    context = np.zeros(len(ranges), dtype=np.int64)
    for index in distinct_values(ranges.name).tolist():
        if _CONTEXT.fullmatch(names[index]):
            context[mark_nested(attribution.parent, ranges.name == index)] = index + 1
    return context


def find_warmup(trace: Trace) -> str | None:
    """Return how this trace spells the name of its range ``warmup`` (letter case aside), if it has one."""
    return next((trace.names[i] for i in distinct_values(trace.ranges.name) if is_warmup(trace.names[i])), None)


def is_step(name: str) -> bool:
    """Return whether profkit gives this name to steps: ``step``, ``step 3``, or ``step *`` for all of them."""
    return _STEP.fullmatch(name) is not None


def context_of(names: Iterable[str]) -> int | None:
    """Return the context length that a range lies in, from the names above it, if the run has several."""
    matches = (_CONTEXT.fullmatch(name) for name in names)
    return next((int(match[1]) for match in matches if match), None)


def is_warmup(name: str) -> bool:
    return name.lower() == WARMUP


def count_in_warmup(attribution: Attribution, members: Ints) -> tuple[int, str]:
    """Return how many members lie inside a range named ``warmup``, and how the trace spells that name."""
    trace = attribution.trace
    name = find_warmup(trace)
    if name is None:
        return 0, WARMUP
    warm = np.array([is_warmup(string) for string in trace.names], dtype=np.bool_)[trace.ranges.name]
    inside = mark_nested(attribution.parent, warm) & ~warm
    return int(inside[members].sum()), name
