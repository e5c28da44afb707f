"""Self-check of the ranges' instances: which of them hold less than the others of their name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.checks.launch_check import is_thin
from profkit.analysis.nesting import mark_nested
from profkit.analysis.selection import is_warmup
from profkit.findings import Finding
from profkit.names import BACKWARD, CONTEXT, FORWARD, PHASES, STEP
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, rows_by_value

_LABEL = re.compile(rf"({'|'.join((STEP, *PHASES))})(?: \d+)?", re.I)
_CONTEXT = re.compile(rf"{CONTEXT} \d+")

# A step without work is none. An optimizer may skip a step, as it does while gradients accumulate.
_NEVER_EMPTY = (STEP, FORWARD, BACKWARD)


def check_idle_instances(attribution: Attribution) -> list[Finding]:
    """Find names of which some instances launched work and others made not one CUDA call.

    A whole capture has such names too (a branch not taken); together with a thin one it is loss.
    """
    trace, was_open = attribution.trace, ~attribution.is_mirror
    if trace.measure != "gpu-kernel" or not len(trace.calls) or not len(trace.ranges):
        return []
    name = trace.ranges.name
    silent = _without_calls(trace) & was_open
    every, idle = (np.bincount(name[which], minlength=len(trace.names)) for which in (was_open, silent))
    idle[idle == every] = 0
    worst = int(np.argmax(idle))
    if not idle[worst]:
        return []
    thin = is_thin(trace)
    return [
        Finding(
            "idle-instances",
            f"{idle[worst]:,} of {every[worst]:,} instances of {trace.names[worst]!r} hold not one CUDA call while the"
            " others do" + (": in a capture this thin, events were lost" if thin else ""),
            "failed" if thin else "warning",
        )
    ]


def check_steps(attribution: Attribution, *, even: bool = False) -> list[Finding]:
    """Compare the kernel counts of steps and phases outside ``warmup``, of each process and each context apart.

    Args:
        even: every step is known to do the same work, so that a difference is loss.
    """
    trace = attribution.trace
    labels = find_measured(attribution)
    if not labels:
        return []
    findings = []
    for label, members in labels.items():
        counts = attribution.work.count(members)
        for process, which in _alike(attribution, members):
            some = counts[which]
            if len(some) < 2 or some.min() == some.max():
                continue
            pid = trace.process_ids.get(process, process)
            empty = members[which][some == 0]
            of_gpu = trace.measure == "gpu-kernel"
            is_empty = of_gpu and label in _NEVER_EMPTY and bool(_without_launches(trace, empty).any())
            lost = is_empty or (of_gpu and even)
            findings.append(
                Finding(
                    "empty-steps" if is_empty else "unequal-steps",
                    f"{label}: kernels per instance range from {some.min():,} to {some.max():,} over {len(some)}"
                    f" instances of process {pid}" + (": kernels are missing" if lost else ""),
                    "failed" if lost else "warning",
                )
            )
    return findings


def find_contexts(attribution: Attribution) -> Ints:
    """Return of each range a number for the context (of a run of several) that it lies in, 0 for none."""
    ranges, names = attribution.trace.ranges, attribution.trace.names
    context = np.zeros(len(ranges), dtype=np.int64)
    for index in distinct_values(ranges.name).tolist():
        if _CONTEXT.fullmatch(names[index]):
            context[mark_nested(attribution.parent, ranges.name == index)] = index + 1
    return context


def _alike(attribution: Attribution, members: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield which of ``members`` (rows of ranges) did the same work, with their process: those of one context."""
    ranges, context = attribution.trace.ranges, find_contexts(attribution)
    for process, mine in rows_by_value(ranges.process[members]).items():
        for some in rows_by_value(context[members[mine]]).values():
            yield process, mine[some]


def _without_calls(trace: Trace) -> Bools:
    """Return during which ranges their process made no CUDA call, on any thread."""
    calls, ranges = trace.calls, trace.ranges
    silent = np.ones(len(ranges), dtype=np.bool_)
    mine = rows_by_value(ranges.process)
    for process, rows in rows_by_value(calls.process).items():
        members = mine.get(process)
        if members is not None:
            times = calls.start_ns if len(rows) == len(calls) else calls.start_ns[rows]
            low, high = (np.searchsorted(times, edge[members]) for edge in (ranges.start_ns, ranges.end_ns))
            silent[members] = low >= high
    return silent


def _without_launches(trace: Trace, members: Ints) -> Bools:
    """Return during which ranges nothing was launched by any thread of their process, whoever it worked for."""
    work, ranges = trace.work, trace.ranges
    return np.array(
        [
            not (
                (work.process == ranges.process[index])
                & (work.launch_ns >= ranges.start_ns[index])
                & (work.launch_ns < ranges.end_ns[index])
            ).any()
            for index in members.tolist()
        ],
        dtype=np.bool_,
    )


def find_measured(attribution: Attribution) -> dict[str, Ints]:
    """Return the rows of steps, forwards, backwards, …, by label: those that are whole and outside ``warmup``."""
    trace = attribution.trace
    names = {i: trace.names[i] for i in distinct_values(trace.ranges.name).tolist()}
    label_of = {i: match[1].lower() for i, name in names.items() if (match := _LABEL.fullmatch(name))}
    if not label_of:
        return {}
    labels = [*dict.fromkeys(label_of.values())]
    table = np.full(len(trace.names), -1, dtype=np.int64)
    table[list(label_of)] = [labels.index(label) for label in label_of.values()]
    label = table[trace.ranges.name]
    warm = np.zeros(len(trace.names), dtype=np.bool_)
    warm[[i for i, name in names.items() if is_warmup(name)]] = True
    measured = ~mark_nested(attribution.parent, warm[trace.ranges.name]) & ~trace.ranges.is_open
    found = {name: np.flatnonzero(measured & (label == index)) for index, name in enumerate(labels)}
    return {name: found[name] for name in (STEP, *PHASES) if name in found}
