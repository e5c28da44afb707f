"""Which rank the others wait for, and why: the difference of what ranks did between the last collectives of steps.

Collectives end on all ranks at once, so between the last one of a step and the last one of the next step the same time
passes on every rank. That time is what the rank did by itself (`profkit.analysis.collectives.own_time`) and the
communication that nothing hid. The rank that did more by itself waited less: the difference to the median rank is what
it costs, and the parts of the difference are the cause. (Kernels next to a collective that waits are slower: what a
waiting rank's kernels took longer than those of the quickest rank counts as waiting, as far as it waited meanwhile.) A
light record knows no such parts: there a rank's phases, on the host and on the GPU, are compared, and it is late by
the longest wait of each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from profkit.analysis.collectives.accounts import (
    Account,
    Floats,
    Parts,
    lateness_by_step,
    longer_on_host,
    median_of_parts,
    named_steps,
    step_times,
    waited_by_step,
)
from profkit.analysis.collectives.light_accounts import (
    account_before_waits,
    has_untimed_waits,
    lateness_of_launches,
)
from profkit.analysis.collectives.matching import LATE_NS, Matched
from profkit.names import kind_of
from profkit.run.light_record import Cause, LightRecord, StepRecord

LEAST_SHARE = 0.05
"""A rank is called late if it costs at least this share of a step: in two DDP runs on 2 × H200 with nothing injected,
ranks cost each other up to 3 % (apart from launches, see below)."""
LEAST_LAUNCH_SHARE = 0.25
"""Where launches are the cause and a profiler recorded, they must take this share of a step longer: it slows the
launches of each process by another amount, in such a run by up to 19 % of a step."""
LEAST_ERRORS = 3.0
"""The median wait for a rank must be this many standard errors above 0, so that nobody is named who is late by chance;
the error is that of a median, from the median distance of the steps from it. A rank that is late by `LEAST_SHARE` in
every one of at least three steps needs no such proof."""
_ENOUGH_STEPS = 3
LEAST_EXPLAINED = 0.5
"""The cause must account for at least this share of the cost."""
_ERROR_OF_MEDIAN = 1.4826 * 1.2533
_LEAST_SHARE_OF_ONE = 0.1
"""With one step there is no standard error: then it must cost this share of the step."""
_CLOCK_LOSS = 0.03
"""A clock that is lower than the median rank's by this share is held down."""


@dataclass(frozen=True)
class Culprit:
    """The rank that the others wait for.

    Times are per step. ``late_ns`` is how much later than the median rank it arrives, ``extra_ns`` how much longer than
    it the cause took, on the host if that is more: nothing hid ``idle_ns`` of it. ``gain_ns`` is how much faster steps
    would be if it were like the median rank (an estimate).
    ``share`` is the part of the collectives with a late rank in which it came last; None where nobody timed them, and
    it is late by how long its GPU had nothing to do.
    """

    rank: int
    cause: Cause
    phase: str
    module: str
    late_ns: int
    extra_ns: int
    idle_ns: int
    gain_ns: int
    share: float | None
    group: Matched
    compared_with: int


Doubt = Literal["varies", "unexplained", "launches", "untimed"]


@dataclass(frozen=True)
class Verdict:
    """Who is late, or the figure that shows that nobody is: the most that a rank cost the others, and its share."""

    culprit: Culprit | None
    most_rank: int | None = None
    most_ns: int = 0
    step_ns: int = 0
    differences: Mapping[Cause, int] = field(default_factory=dict)
    """Cause → how much more than the median rank that rank took, per step."""
    least_share: float = LEAST_SHARE
    """The share of a step from which on a rank is called late."""
    doubt: Doubt | None = None
    """Why a rank that costs much is not called late: its arrivals vary much, nothing explains it, or launches do.

    ``untimed``: ranks may have waited where nobody timed it.
    """


@dataclass(frozen=True, eq=False)
class _Cost:
    """Who may be late and who is the median rank (positions), what the former costs in each step, and usual parts."""

    late: int
    usual: int
    each_ns: Floats
    step_ns: float
    ordinary: Parts


def find_culprit(records: Sequence[LightRecord], accounts: Sequence[Account], matched: Sequence[Matched]) -> Verdict:
    """Return which rank the others wait for; ``accounts`` are those of ``records``, in their order.

    If some ranks left full traces and others light records alone, the rank that made others wait longest decides which
    of the two are compared.
    """
    exact = _usable(records, [one if one.is_exact else None for one in accounts])
    alike = [
        account_before_waits(record, matched) if one.is_exact else one
        for record, one in zip(records, accounts, strict=True)
    ]
    every = _usable(records, alike)
    if len(every) < 2 or not matched:
        return Verdict(None)
    lateness = lateness_by_step([record for record, _ in every], matched)
    if len(exact) < len(every) and has_untimed_waits(records, matched):
        launches = lateness_of_launches([record for record, _ in every])
        lateness = {rank: np.maximum(waits, launches[rank]).tolist() for rank, waits in lateness.items()}
        verdict = _judge(every, matched, _cost_by_waits(every, matched, lateness), lateness)
        return verdict if verdict.culprit is not None else replace(verdict, doubt="untimed")
    latest = _latest(lateness)
    if len(exact) > 1 and (len(exact) == len(every) or any(record.rank == latest for record, _ in exact)):
        return _judge(exact, matched, _cost_by_accounts(exact, matched), lateness)
    return _judge(every, matched, _cost_by_waits(every, matched, lateness), lateness)


def _usable(records: Sequence[LightRecord], accounts: Sequence[Account | None]) -> list[tuple[LightRecord, Account]]:
    """Return the ranks with an account of more than half as many steps as the typical rank."""
    known = [(record, one) for record, one in zip(records, accounts, strict=True) if one is not None and one.steps]
    typical = float(np.median([len(one.steps) for _, one in known])) if known else 0.0
    return [(record, one) for record, one in known if len(one.steps) * 2 > typical]


def _cost_by_accounts(ranks: Sequence[tuple[LightRecord, Account]], matched: Sequence[Matched]) -> _Cost:
    """Return who did most by itself, compared with the rank that did the median amount."""
    accounts = [account for _, account in ranks]
    count = min(len(one.steps) for one in accounts)
    own = np.array([[one.own_ns(step) for step in range(count)] for one in accounts])
    exposed = np.array([one.exposed_ns[:count] for one in accounts])
    kernels = np.array([[one.own_ns(step, "kernels") for step in range(count)] for one in accounts])
    waited = waited_by_step([record for record, _ in ranks], matched)
    hidden = np.array([waited[one.rank][-len(one.steps) :][:count] for one in accounts]) - exposed
    slowed = np.minimum(kernels - kernels.min(axis=0), np.maximum(hidden, 0.0))
    own, exposed = own - slowed, exposed + slowed
    order = np.argsort(np.median(own, axis=1), kind="stable")
    late, usual = int(order[-1]), int(order[(len(accounts) - 1) // 2])
    step_ns = float(np.median(own[usual] + exposed[usual]))
    ordinary = accounts[usual].median_parts()
    ordinary["kernels", "", ""] = ordinary.get(("kernels", "", ""), 0.0) - float(np.median(slowed[usual]))
    return _Cost(late, usual, exposed[usual] - exposed[late], step_ns, ordinary)


def _cost_by_waits(
    ranks: Sequence[tuple[LightRecord, Account]], matched: Sequence[Matched], lateness: Mapping[int, Sequence[float]]
) -> _Cost:
    """Return who made the median rank wait longest, compared with the medians of the others' phases.

    A step costs the longest wait; or what phases took longer on the median rank's GPU, as far as it waited meanwhile,
    if that is more: many short waits, and kernels next to them that are slower.
    """
    latest = _latest(lateness)
    late = next(at for at, (record, _) in enumerate(ranks) if record.rank == latest)
    others = [account.median_parts() for at, (_, account) in enumerate(ranks) if at != late]
    totals = [sum(parts.values()) for parts in others]
    middle = int(np.argsort(totals, kind="stable")[(len(totals) - 1) // 2])
    usual = middle + (middle >= late)
    slow, ordinary = ranks[late][0], ranks[usual][0]
    waited = waited_by_step([ordinary], matched)[ordinary.rank]
    cost = [
        max(wait, min(_sum_longer_phases(theirs, mine), total))
        for wait, total, theirs, mine in zip(
            lateness[latest], waited, named_steps(ordinary), named_steps(slow), strict=False
        )
    ]
    step_ns = float(np.median([time for record, _ in ranks for time in step_times(record)] or [0.0]))
    return _Cost(late, usual, np.array(cost), step_ns, median_of_parts(others))


def _sum_longer_phases(one: StepRecord, other: StepRecord) -> float:
    """Return how much longer phases took on the GPU of the one rank, without those that took less."""
    sums: list[dict[str, int]] = [{}, {}]
    for times, step in zip(sums, (one, other), strict=True):
        for name, start, end in step.gpu_phases:
            times[name] = times.get(name, 0) + end - start
    return float(sum(max(time - sums[1].get(name, time), 0) for name, time in sums[0].items()))


def _judge(
    ranks: Sequence[tuple[LightRecord, Account]],
    matched: Sequence[Matched],
    cost: _Cost,
    lateness: Mapping[int, Sequence[float]],
) -> Verdict:
    """Return whether a rank is late, and if it is, what it did more than others."""
    record, account = ranks[cost.late]
    mine = account.median_parts()
    keys = sorted(mine.keys() | cost.ordinary.keys())
    extra = {key: mine.get(key, 0.0) - cost.ordinary.get(key, 0.0) for key in keys}
    if not account.is_exact:
        # Hosts of other ranks may wait for the GPU in any phase, which makes that phase longer for them.
        extra = {key: max(time, 0.0) for key, time in extra.items()}
    by_cause: dict[Cause, float] = {}
    for (cause, *_), time in extra.items():
        by_cause[cause] = by_cause.get(cause, 0.0) + time
    typical = float(np.median(cost.each_ns)) if len(cost.each_ns) else 0.0
    arrival = lateness[record.rank][-len(account.steps) :] if record.rank in lateness else []
    differences = {cause: round(time) for cause, time in sorted(by_cause.items(), key=lambda item: -item[1])}
    least = LEAST_SHARE if len(arrival) > 1 else _LEAST_SHARE_OF_ONE
    nobody = Verdict(None, record.rank, round(max(typical, 0.0)), round(cost.step_ns), differences, least_share=least)
    if typical < least * cost.step_ns or not typical:
        return nobody
    always = len(arrival) >= _ENOUGH_STEPS and min(arrival) >= LEAST_SHARE * cost.step_ns
    if not always and not _stands_out(arrival):
        return replace(nobody, doubt="varies")
    cause = max(by_cause, key=lambda one: by_cause[one], default="python")
    slow_launches = by_cause.get("launch", 0.0)
    if cause == "launch" and record.source != "light" and slow_launches < LEAST_LAUNCH_SHARE * cost.step_ns:
        # The rest may have a cause of its own.
        typical -= slow_launches
        cause = max((one for one in by_cause if one != "launch"), key=lambda one: by_cause[one], default="launch")
        if cause == "launch" or min(typical, by_cause[cause]) < LEAST_SHARE * cost.step_ns:
            return replace(nobody, doubt="launches")
    if by_cause.get(cause, 0.0) < LEAST_EXPLAINED * typical:
        return replace(nobody, doubt="unexplained")
    phase, module, extra_ns = _find_place({key: time for key, time in extra.items() if key[0] == cause})
    if cause == "kernels" and _is_held_down([account for _, account in ranks], cost.late):
        cause = "clock"
    on_host = (
        longer_on_host(record, ranks[cost.usual][0], phase) if cause in ("data", "python") and account.is_exact else 0.0
    )
    group, share = _arrivals(matched, record.rank)
    found = Culprit(
        rank=record.rank,
        cause=cause,
        phase=phase,
        module=module,
        late_ns=round(max(typical, float(np.median(arrival)))),
        extra_ns=round(max(extra_ns, on_host)),
        idle_ns=round(extra_ns),
        gain_ns=round(typical),
        share=share,
        group=group,
        compared_with=ranks[cost.usual][0].rank,
    )
    return replace(nobody, culprit=found)


def _stands_out(arrival_ns: Sequence[float]) -> bool:
    """Return whether the waits for a rank are longer than chance makes them."""
    middle = float(np.median(arrival_ns)) if arrival_ns else 0.0
    apart = float(np.median(np.abs(np.array(arrival_ns) - middle))) if arrival_ns else 0.0
    error = apart * _ERROR_OF_MEDIAN / max(len(arrival_ns), 1) ** 0.5
    return bool(middle >= max(LATE_NS, LEAST_ERRORS * error))


def _latest(lateness: Mapping[int, Sequence[float]]) -> int:
    """Return the rank for which the others typically wait longest."""
    return max(lateness, key=lambda rank: float(np.median(lateness[rank])) if len(lateness[rank]) else 0.0)


def _find_place(extra: Parts) -> tuple[str, str, float]:
    """Return the phase with the most of the extra time, the module (or kind) with half of it, and the phase's time."""
    by_phase: dict[str, float] = {}
    for (_, phase, _), time in sorted(extra.items()):
        by_phase[phase] = by_phase.get(phase, 0.0) + time
    phase = max(by_phase, key=lambda one: by_phase[one])
    for name in (str, kind_of):
        by_module: dict[str, float] = {}
        for (_, there, module), time in sorted(extra.items()):
            if there == phase and module:
                by_module[name(module)] = by_module.get(name(module), 0.0) + time
        module = max(by_module, key=lambda one: by_module[one], default="")
        if module and by_module[module] * 2 >= by_phase[phase]:
            return phase, module, by_phase[phase]
    return phase, "", by_phase[phase]


def _is_held_down(accounts: Sequence[Account], late: int) -> bool:
    """Return whether the GPU of a rank ran on a lower clock than those of the others."""
    mine = accounts[late].sm_mhz
    others = [one.sm_mhz for at, one in enumerate(accounts) if at != late and one.sm_mhz is not None]
    return mine is not None and bool(others) and mine <= float(np.median(others)) * (1 - _CLOCK_LOSS)


def _arrivals(matched: Sequence[Matched], rank: int) -> tuple[Matched, float | None]:
    """Return the group whose ranks waited longest for this one, and in what share of those that waited it was last."""
    waited, last, late = -1, 0, 0
    group = matched[0]
    for one in matched:
        if rank not in one.ranks:
            continue
        mine = one.last == one.ranks.index(rank)
        last, late = last + int(mine.sum()), late + int((one.last >= 0).sum())
        total = int(one.wait_ns[:, mine].sum())
        if total > waited:
            waited, group = total, one
    return group, last / late if late else None
