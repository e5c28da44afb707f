"""What one rank hands over so that it can be compared: all that is known of it without the others, in little memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from profkit.analysis.ranks.accounts import Account, StepParts, exact_account, longer_on_gpu
from profkit.analysis.ranks.matching import Calls, KnownColumns, tabulate_calls
from profkit.run.light_columns import LightColumns, StepColumns
from profkit.run.light_record import NO_COLLECTIVE, P2P, LightRecord


@dataclass(frozen=True, eq=False)
class ReducedRank:
    """A rank's record, whose steps stand in ``steps``, and its collectives in ``calls``: the number of their group →
    columns; and so does ``sent``, what it sends to and receives from one other rank.

    ``exact`` is what it did by its full trace; of a rank without one, None. ``on_gpu`` is what phases of each measured
    step took longer on its GPU. ``between_ns`` is what its sends and receives in a group took in its last steps, as
    many as ``exact`` has, that nothing hid.
    """

    record: LightRecord
    steps: StepColumns
    calls: Mapping[int, Calls]
    sent: Mapping[int, Calls]
    exact: Account | None
    on_gpu: StepParts
    between_ns: Mapping[int, int]


def reduce_columns(rank: LightColumns, known: KnownColumns | None = None) -> ReducedRank:
    """Return what a rank hands over of its record; ``known`` are columns of other ranks (`tabulate_calls`)."""
    exact = exact_account(rank)
    calls, sent = tabulate_calls(rank, known)
    return ReducedRank(
        record=rank.record,
        steps=rank.steps,
        calls=calls,
        sent=sent,
        exact=exact,
        on_gpu=longer_on_gpu(rank.steps, rank.calls),
        between_ns={} if exact is None else _between(rank, len(exact.own)),
    )


def _between(rank: LightColumns, steps: int) -> dict[int, int]:
    """Return for each group what its sends and receives took over the last ``steps`` that nothing hid."""
    since, calls = rank.since, rank.calls
    talks = np.array([cause == "communication" for cause, *_ in since.parts], dtype=np.bool_)[since.part]
    rows = np.flatnonzero(talks & (since.row != NO_COLLECTIVE) & np.isin(since.step, rank.steps.named[-steps:]))
    called = np.searchsorted(calls.step, since.step[rows]) + since.row[rows]
    is_sent = np.array([kind in P2P for kind, _ in calls.names], dtype=np.bool_)[calls.what[called]]
    groups, number = np.unique(calls.group[called[is_sent]], return_inverse=True)
    sums = np.zeros(len(groups), dtype=np.int64)
    np.add.at(sums, number, since.time_ns[rows[is_sent]])
    return dict(zip(groups.tolist(), sums.tolist(), strict=True))


def of_one_kind(ranks: Sequence[ReducedRank], written: Mapping[int, ReducedRank]) -> list[ReducedRank]:
    """Return the ranks so that their steps can be compared: where only some left full traces, all by light records.

    What a trace knows of a step and what a light record knows are not the same. Light records have those steps alone
    that are in a trace: the third step of a trace is another than the third of theirs. They keep the trace's source,
    for a profiler slowed these ranks. So too with traces without collectives that light records know, and with traces
    of ranges alone, as nsys leaves them without a GPU.

    Args:
        ranks: by its trace each rank that has one, else by its light record.
        written: the light records of ranks with a trace.
    """
    traced = [one for one in ranks if one.record.source != "light"]
    is_known = any(one.exact is not None and (one.calls or one.sent) for one in traced)
    is_alike = len(traced) == len(ranks) and (is_known or not any(one.calls for one in written.values()))
    if is_alike or not traced:
        return list(ranks)
    named = {name for one in traced for name in one.steps.names if name is not None}
    sources = [one.record.source for one in ranks]
    limited = [_limit(written.get(one.record.rank, one), named) for one in ranks]
    return [replace(one, record=replace(one.record, source=of)) for one, of in zip(limited, sources, strict=True)]


def _limit(one: ReducedRank, named: Set[str]) -> ReducedRank:
    """Return a rank with its steps of these names alone."""
    kept = [at for at, name in enumerate(one.steps.names) if name in named]
    numbers = np.full(len(one.steps), -1)
    numbers[kept] = np.arange(len(kept))
    calls, sent = (
        {group: some for group, whole in columns.items() if len(some := whole.of_steps(numbers))}
        for columns in (one.calls, one.sent)
    )
    return replace(
        one,
        steps=one.steps.only(kept),
        calls=calls,
        sent=sent,
        on_gpu=one.on_gpu.within(numbers[one.steps.named] >= 0),
    )
