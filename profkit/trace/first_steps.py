"""A trace without its first steps, where a run knows that they do not count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profkit.trace.columns import NO_LAUNCH, Bools, Copies, Ints, Trace, Work, rows_by_value, take_calls, take_rows


def begin_at(trace: Trace, name: str) -> Trace:
    """Return what each process did from where its first range ``name`` opened.

    Work counts by its launch. A range that was open then begins there. A process without such a range stays as it is.
    """
    ranges = trace.ranges
    opened = np.flatnonzero(np.array([text == name for text in trace.names] or [False], dtype=np.bool_)[ranges.name])
    begin = {process: int(ranges.start_ns[opened[rows]].min()) for process, rows in _by_process(ranges.process, opened)}
    if not begin:
        return trace
    kept = ranges.end_ns > _moments(begin, ranges.process)
    number = np.cumsum(kept) - 1
    left = take_rows(ranges, kept)
    return replace(
        take_calls(trace, trace.calls.start_ns >= _moments(begin, trace.calls.process)),
        work=take_rows(trace.work, _launched_from(trace.work, begin)),
        copies=take_rows(trace.copies, _launched_from(trace.copies, begin)),
        ranges=replace(
            left,
            start_ns=np.maximum(left.start_ns, _moments(begin, left.process)),
            payload={int(number[index]): value for index, value in ranges.payload.items() if kept[index]},
        ),
    )


def _by_process(process: Ints, rows: Ints) -> list[tuple[int, Ints]]:
    return list(rows_by_value(process[rows]).items())


def _moments(begin: dict[int, int], process: Ints) -> Ints:
    found = np.full(len(process), np.iinfo(np.int64).min, dtype=np.int64)
    for number, moment in begin.items():
        found[process == number] = moment
    return found


def _launched_from(rows: Work | Copies, begin: dict[int, int]) -> Bools:
    launched_ns = np.where(rows.launch_thread == NO_LAUNCH, rows.start_ns, rows.launch_ns)
    kept: Bools = launched_ns >= _moments(begin, rows.process)
    return kept
