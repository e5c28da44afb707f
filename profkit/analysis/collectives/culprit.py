"""Which rank the others wait for, and why: the difference of what ranks did between the last collectives of steps.

Collectives end on all ranks at once, so between the last one of a step and the last one of the next step the same time
passes on every rank. That time is what the rank did by itself (`profkit.analysis.collectives.own_time`) and the
communication that nothing hid. The rank that did more by itself waited less: the difference to the median rank is what
it costs, and the parts of the difference are the cause. A light record knows no such parts: there a rank's phases, on
the host and on the GPU, are compared, and it is late by the longest wait of each step.

A rank that is late in some steps only, as one that saves or logs every few steps, is named if it is late at the same
place each time, and hardly any other rank ever is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from profkit.analysis.collectives.accounts import Account, Parts, lateness_by_step, longer_on_host
from profkit.analysis.collectives.costs import Cost, cost_by_accounts, cost_by_waits, late_hosts, latest
from profkit.analysis.collectives.light_accounts import account_before_waits, has_untimed_waits
from profkit.analysis.collectives.matching import LATE_NS, Matched
from profkit.names import kind_of
from profkit.run.light_record import Cause, LightRecord

LEAST_SHARE = 0.05
"""A rank is called late if it costs at least this share of a step: in two DDP runs on 2 × H200 with nothing injected,
ranks cost each other up to 3 % (apart from launches, see below)."""
LEAST_LAUNCH_SHARE = 0.3
"""Where launches are the cause and a profiler recorded, they must take this share of a step longer: it slows the
launches of each process by another amount, in such runs by 19 % of a step, of a step of 4 ms by 26 %. Python between
launches that is longer counts as launches, unless it is by more than `_BEYOND_LAUNCHES` times as much."""
_BEYOND_LAUNCHES = 3
CHANCE = 0.0027
"""How probable it may be at most that one of the ranks is ahead of the others in so many steps by chance, if each step
were a coin's toss: three standard errors. A rank that saves the least share in every step needs no such proof."""
_ENOUGH_STEPS = 3
LEAST_EXPLAINED = 0.5
"""The cause must account for at least this share of the cost."""
_HOST_EXPLAINS = 0.8
"""In a light record kernels are what a GPU did at most: what the host did counts first if it explains this share."""
_MOST_OF_THEM = 0.75
"""Late now and then: this share of all late steps are one rank's, and of these as many have one cause at one place."""
_APART = 3.0
"""Late now and then: by so many times as much as anybody is in the other steps, for chance leaves no such gap."""
_LEAST_ON_AVERAGE = 0.01
"""Late now and then: that costs at least this share of all steps' time."""
_LEAST_SHARE_OF_FEW = 0.1
"""Fewer than `_ENOUGH_STEPS` prove little: then it must cost this share of a step, and more than a rank that is late
in one of them only."""
_CLOCK_LOSS = 0.03
"""A clock that is lower than the median rank's by this share is held down."""


@dataclass(frozen=True)
class Culprit:
    """The rank that the others wait for.

    Times are per step. ``late_ns`` is how much later than the median rank it arrives, ``extra_ns`` how much longer than
    it the cause took, on the host if that is more: nothing hid ``idle_ns`` of it. ``gain_ns`` is how much faster steps
    would be if it were like the median rank (an estimate, coarse from light records alone).
    ``share`` is the part of the collectives with a late rank in which it came last; None where nobody timed them, and
    its host was late. Who is late in some steps only is late in ``late_steps`` of
    ``steps``: ``gain_ns`` is the mean of all steps, the other times are those of late steps.
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
    late_steps: int
    steps: int

    @property
    def is_always(self) -> bool:
        """Return whether the rank is late as a rule, not now and then."""
        return self.late_steps == self.steps


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
    turns: Mapping[int, int] = field(default_factory=dict)
    """Rank → in how many steps it cost the others at least `LEAST_SHARE` of a step."""


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
    is_untimed = len(exact) < len(every) and has_untimed_waits(records, matched)
    if is_untimed:
        by_hosts = late_hosts([record for record, _ in every])
        lateness = {
            record.rank: np.maximum(lateness[record.rank][: by_hosts.shape[1]], late_ns).tolist()
            for (record, _), late_ns in zip(every, by_hosts, strict=True)
        }
    last = latest(lateness)
    is_exact = len(exact) > 1 and (len(exact) == len(every) or any(record.rank == last for record, _ in exact))
    is_exact = is_exact and not is_untimed
    chosen = [record for record, _ in (exact if is_exact else every)]
    compared = [account for _, account in (exact if is_exact else every)]
    if is_exact:
        cost = cost_by_accounts(compared, chosen, matched)
    else:
        cost = cost_by_waits(compared, chosen, matched, lateness, is_untimed=is_untimed)
    verdict = _judge(chosen, matched, cost, lateness)
    if verdict.culprit is None and verdict.doubt in (None, "varies"):
        verdict = replace(verdict, culprit=_find_late_now_and_then(chosen, matched, cost))
    if verdict.culprit is None and is_untimed:
        return replace(verdict, doubt="untimed")
    return verdict


def _usable(records: Sequence[LightRecord], accounts: Sequence[Account | None]) -> list[tuple[LightRecord, Account]]:
    """Return the ranks with an account of more than half as many steps as the typical rank."""
    known = [(record, one) for record, one in zip(records, accounts, strict=True) if one is not None and one.steps]
    typical = float(np.median([len(one.steps) for _, one in known])) if known else 0.0
    return [(record, one) for record, one in known if len(one.steps) * 2 > typical]


def _judge(
    records: Sequence[LightRecord], matched: Sequence[Matched], cost: Cost, lateness: Mapping[int, Sequence[float]]
) -> Verdict:
    """Return whether a rank is late as a rule, and if it is, what it did more than others."""
    record, account = records[cost.late], cost.accounts[cost.late]
    typical = float(np.median(cost.each_ns)) if len(cost.each_ns) else 0.0
    extra = _extra(account.median_parts(), cost.ordinary, is_exact=account.is_exact)
    if cost.quick is not None and max(_sum_by_cause(extra).values(), default=0.0) < LEAST_EXPLAINED * typical:
        extra = _extra(account.median_parts(), cost.quick, is_exact=account.is_exact)
    by_cause = _sum_by_cause(extra)
    saved = cost.saved_ns[cost.late]
    least = LEAST_SHARE if len(saved) >= _ENOUGH_STEPS else _LEAST_SHARE_OF_FEW
    late = (cost.saved_ns >= least * cost.step_ns).sum(axis=1).tolist()
    nobody = Verdict(
        None,
        record.rank,
        round(max(typical, 0.0)),
        round(cost.step_ns),
        {cause: round(time) for cause, time in sorted(by_cause.items(), key=lambda item: -item[1])},
        least_share=least,
        turns={one.rank: count for one, count in zip(records, late, strict=True) if count},
    )
    if typical < least * cost.step_ns or not typical:
        return nobody
    cause = _main_cause(by_cause, typical, is_exact=account.is_exact)
    at_launches = _longer_with_launches(by_cause, cause) if record.source != "light" else 0.0
    if at_launches and at_launches < LEAST_LAUNCH_SHARE * cost.step_ns:
        # The rest may have a cause of its own.
        typical -= at_launches
        left = {one: time for one, time in by_cause.items() if one not in ("launch", "python")}
        cause = max(left, key=lambda one: left[one], default="launch")
        if not left or min(typical, left[cause]) < LEAST_SHARE * cost.step_ns:
            return replace(nobody, doubt="launches")
    now_and_then = [at for at, count in enumerate(late) if count < len(saved)]
    in_few = len(saved) < _ENOUGH_STEPS and cost.saved_ns[now_and_then].max(initial=0.0) > saved.min()
    if in_few or (
        late[cost.late] < len(saved) and _is_by_chance(int((saved >= LATE_NS).sum()), len(saved), len(records))
    ):
        return replace(nobody, doubt="varies")
    if by_cause.get(cause, 0.0) < LEAST_EXPLAINED * typical:
        return replace(nobody, doubt="unexplained")
    phase, module, extra_ns = _find_place({key: time for key, time in extra.items() if key[0] == cause})
    usual = records[cost.usual]
    late_ns = max(typical, float(np.median(lateness[record.rank][-len(account.steps) :])))
    if cause == "kernels" and not account.is_exact:
        extra_ns = min(extra_ns, late_ns)
    may_hide = cause in ("data", "python") and account.is_exact and record.device is not None
    on_host = longer_on_host(record, usual, phase) if may_hide else 0.0
    group, share = _arrivals(matched, record.rank)
    found = Culprit(
        rank=record.rank,
        cause="clock" if cause == "kernels" and _is_held_down(cost.accounts, cost.late) else cause,
        phase=phase,
        module=module,
        late_ns=round(late_ns),
        extra_ns=round(max(extra_ns, on_host)),
        idle_ns=round(extra_ns),
        gain_ns=round(typical),
        share=share,
        group=group,
        compared_with=usual.rank,
        late_steps=len(saved),
        steps=len(saved),
    )
    return replace(nobody, culprit=found)


def _find_late_now_and_then(records: Sequence[LightRecord], matched: Sequence[Matched], cost: Cost) -> Culprit | None:
    """Return the rank that alone is late in some of the steps, for one reason at one place; None if there is none."""
    is_late = cost.saved_ns >= LEAST_SHARE * cost.step_ns
    counts = is_late.sum(axis=1)
    at = int(np.where(is_late, cost.saved_ns, 0.0).sum(axis=1).argmax())
    steps, count = np.flatnonzero(is_late[at]).tolist(), cost.saved_ns.shape[1]
    gain_ns = float(cost.saved_ns[at, steps].sum()) / max(count, 1)
    every = int(counts.sum())
    is_rule = len(steps) * 2 > count and _is_by_chance(len(steps), every, len(records))
    if len(steps) < max(_ENOUGH_STEPS, _MOST_OF_THEM * every) or is_rule:
        return None
    others = cost.saved_ns[:, ~is_late.any(axis=0)]
    is_apart = cost.saved_ns[at, steps].min() >= _APART * others.max(initial=0.0)
    if not is_apart or gain_ns < _LEAST_ON_AVERAGE * cost.step_ns:
        return None
    usual = cost.usual if cost.usual != at else cost.late
    account, theirs = cost.accounts[at], cost.ordinary_steps if usual == cost.usual else cost.accounts[usual].steps
    causes: dict[tuple[Cause, str], int] = {}
    extras = [_extra(account.steps[step], theirs[step], is_exact=account.is_exact) for step in steps]
    for step, extra in zip(steps, extras, strict=True):
        cause = _main_cause(_sum_by_cause(extra), float(cost.saved_ns[at, step]), is_exact=account.is_exact)
        phase, _, time = _find_place({key: time for key, time in extra.items() if key[0] == cause})
        if time >= LEAST_EXPLAINED * cost.saved_ns[at, step]:
            causes[cause, phase] = causes.get((cause, phase), 0) + 1
    (cause, phase), times = max(causes.items(), key=lambda item: item[1], default=(("python", ""), 0))
    if times < max(_ENOUGH_STEPS, _MOST_OF_THEM * len(steps)):
        return None
    keys = {key for extra in extras for key in extra if key[:2] == (cause, phase)}
    usually = {key: float(np.median([extra.get(key, 0.0) for extra in extras])) for key in keys}
    _, module, extra_ns = _find_place(usually)
    late_ns = float(np.median(cost.saved_ns[at, steps]))
    if cause == "kernels" and not account.is_exact:
        extra_ns = min(extra_ns, late_ns)
    group, share = _arrivals(matched, records[at].rank)
    return Culprit(
        rank=records[at].rank,
        cause=cause,
        phase=phase,
        module=module,
        late_ns=round(late_ns),
        extra_ns=round(extra_ns),
        idle_ns=round(extra_ns),
        gain_ns=round(gain_ns),
        share=share,
        group=group,
        compared_with=records[usual].rank,
        late_steps=len(steps),
        steps=count,
    )


def _extra(mine: Parts, ordinary: Parts, *, is_exact: bool) -> Parts:
    """Return what a rank did more than usual, part by part."""
    extra = {key: mine.get(key, 0.0) - ordinary.get(key, 0.0) for key in sorted(mine.keys() | ordinary.keys())}
    # Hosts of other ranks may wait for the GPU in any phase of a light record, which makes that phase longer for them.
    return extra if is_exact else {key: max(time, 0.0) for key, time in extra.items()}


def _sum_by_cause(extra: Parts) -> dict[Cause, float]:
    by_cause: dict[Cause, float] = {}
    for (cause, *_), time in extra.items():
        by_cause[cause] = by_cause.get(cause, 0.0) + time
    return by_cause


def _main_cause(by_cause: Mapping[Cause, float], cost_ns: float, *, is_exact: bool) -> Cause:
    """Return the cause with the most extra time; in a light record that of the host if it explains the cost."""
    on_host: dict[Cause, float] = {cause: time for cause, time in by_cause.items() if cause != "kernels"}
    first: Cause = max(on_host, key=lambda one: on_host[one], default="python")
    if not is_exact and on_host.get(first, 0.0) >= _HOST_EXPLAINS * cost_ns:
        return first
    return max(by_cause, key=lambda one: by_cause[one], default="python")


def _longer_with_launches(by_cause: Mapping[Cause, float], cause: Cause) -> float:
    """Return how much longer the host took if launches are the cause, or as much a part of it as Python; else 0."""
    launches, python = (max(by_cause.get(one, 0.0), 0.0) for one in ("launch", "python"))
    is_both = cause in ("launch", "python") and python <= _BEYOND_LAUNCHES * launches
    return launches + python if is_both else 0.0


def _is_by_chance(ahead: int, count: int, rank_count: int) -> bool:
    """Return whether one of so many ranks may well be ahead in so many of the steps by chance (a sign test)."""
    tail = sum(math.comb(count, at) for at in range(ahead, count + 1)) / 2**count
    return bool(tail * rank_count > CHANCE)


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
