"""What each rank saved by coming late, step by step: from exact accounts of full traces, or from waits alone.

A rank saves what it waited less than the median one of the other ranks: all of what nothing hid, where that is known,
else its longest wait. That is what it costs them: negative where it
waited for others itself, so that ranks which take turns in being late save nothing on the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from profkit.analysis.collectives.accounts import (
    Account,
    Floats,
    Parts,
    longest_wait_by_step,
    median_of_parts,
    named_steps,
    step_times,
    waited_by_step,
)
from profkit.analysis.collectives.matching import Matched
from profkit.run.light_record import LightRecord, StepRecord


@dataclass(frozen=True, eq=False)
class Cost:
    """Who may be late and who is the median rank (positions), and what the former costs in each step.

    ``saved_ns`` is what each rank saved in each step, as (ranks, steps). ``accounts`` are what the ranks did;
    ``ordinary`` are the usual parts of a step, ``ordinary_steps`` those of the median rank in each. ``quick`` are the
    least that they took on other ranks: a host whose launches stand in a full queue for its GPU, which waits for a
    collective, seems to do more than it does.
    """

    accounts: tuple[Account, ...]
    late: int
    usual: int
    each_ns: Floats
    saved_ns: Floats
    step_ns: float
    ordinary: Parts
    ordinary_steps: tuple[Parts, ...]
    quick: Parts | None = None


def cost_by_accounts(accounts: Sequence[Account], records: Sequence[LightRecord], matched: Sequence[Matched]) -> Cost:
    """Return who did most by itself, compared with the rank that did the median amount.

    Kernels next to a collective that waits are slower: what the kernels of a place took longer than those of the
    quickest rank there counts as waiting, as far as their rank waited meanwhile.
    """
    count = min(len(one.steps) for one in accounts)
    exposed = np.array([one.exposed_ns[:count] for one in accounts])
    waited = waited_by_step(records, matched)
    hidden = np.array([waited[one.rank][-len(one.steps) :][:count] for one in accounts]) - exposed
    corrected = _without_slow_kernels(accounts, count, np.maximum(hidden, 0.0))
    own = np.array([[one.own_ns(step) for step in range(count)] for one in corrected])
    exposed += np.array([[one.own_ns(step) for step in range(count)] for one in accounts]) - own
    order = np.argsort(np.median(own, axis=1), kind="stable")
    late, usual = int(order[-1]), int(order[(len(accounts) - 1) // 2])
    return Cost(
        accounts=tuple(accounts),
        late=late,
        usual=usual,
        each_ns=exposed[usual] - exposed[late],
        saved_ns=_saved(exposed),
        step_ns=float(np.median(own[usual] + exposed[usual])),
        ordinary=corrected[usual].median_parts(),
        ordinary_steps=corrected[usual].steps,
    )


def _without_slow_kernels(accounts: Sequence[Account], count: int, hidden_ns: Floats) -> list[Account]:
    """Return the accounts of so many steps without what kernels were slower next to collectives that waited."""
    keys = sorted({key for one in accounts for step in one.steps for key in step if key[0] == "kernels"})
    kernels = np.array([[[step.get(key, 0.0) for key in keys] for step in one.steps[:count]] for one in accounts])
    slower = kernels - kernels.min(axis=0)
    total = slower.sum(axis=2)
    slower *= (np.minimum(total, hidden_ns) / np.maximum(total, 1.0))[:, :, None]
    return [
        replace(
            one,
            steps=tuple(
                step | {key: step[key] - less for key, less in zip(keys, places, strict=True) if key in step}
                for step, places in zip(one.steps, mine, strict=False)
            ),
        )
        for one, mine in zip(accounts, slower.tolist(), strict=True)
    ]


def cost_by_waits(
    accounts: Sequence[Account],
    records: Sequence[LightRecord],
    matched: Sequence[Matched],
    lateness: Mapping[int, Sequence[float]],
    *,
    is_untimed: bool,
) -> Cost:
    """Return who made the median rank wait longest, compared with the medians of the others' phases.

    A step costs the longest wait; or what phases took longer on the median rank's GPU, as far as it waited meanwhile,
    if that is more: many short waits, and kernels next to them that are slower. The first step is left out: what was
    before it is not known. If ``is_untimed`` some waits are unknown: then a rank also saves what its host was late.
    """
    count = min(len(one.steps) for one in accounts)
    compared = slice(min(1, count - 1), count)
    accounts = [replace(one, steps=one.steps[compared]) for one in accounts]
    first = latest(lateness)
    late = next(at for at, record in enumerate(records) if record.rank == first)
    others = [account.median_parts() for at, account in enumerate(accounts) if at != late]
    totals = [sum(parts.values()) for parts in others]
    middle = int(np.argsort(totals, kind="stable")[(len(totals) - 1) // 2])
    usual = middle + (middle >= late)
    slow, ordinary = records[late], records[usual]
    waited = waited_by_step(records, matched)
    longest = longest_wait_by_step(records, matched)
    cost = [
        max(wait, min(_sum_longer_phases(theirs, mine), total))
        for wait, total, theirs, mine in zip(
            lateness[first], waited[ordinary.rank], named_steps(ordinary), named_steps(slow), strict=False
        )
    ]
    saved = _saved(np.array([longest[record.rank][compared] for record in records]))
    if is_untimed:
        by_hosts = late_hosts(records)[:, compared]
        saved = np.where(np.abs(by_hosts) > np.abs(saved), by_hosts, saved)
    return Cost(
        accounts=tuple(accounts),
        late=late,
        usual=usual,
        each_ns=np.array(cost[compared]),
        saved_ns=saved,
        step_ns=float(np.median([time for record in records for time in step_times(record)] or [0.0])),
        ordinary=median_of_parts(others),
        ordinary_steps=accounts[usual].steps,
        quick=median_of_parts([one.quickest_parts() for at, one in enumerate(accounts) if at != late]),
    )


def late_hosts(records: Sequence[LightRecord]) -> Floats:
    """Return how late each rank's host was in each step, as (ranks, steps); negative where others were.

    It was late by what its GPU had nothing to do for longer than theirs between two phases, or by what it took longer
    for a phase than their hosts, as far as their GPUs were farther behind their hosts than its own at the phase's end:
    they waited, and its own had nothing to wait for. The longest of these counts.
    """
    steps = list(zip(*map(named_steps, records), strict=False))
    found = -_saved(
        np.array([[float(one.launch_wait_ns or 0) for one in step] for step in steps]).reshape(-1, len(records)).T
    )
    phases = [[_hosts_and_lags(one) for one in step] for step in steps]
    names = {name for step in phases for one in step for name in one}
    for name in sorted(names):
        both = np.array([[one.get(name, (0.0, 0.0)) for one in step] for step in phases])
        longer, behind = -_saved(both[:, :, 0].T), _saved(both[:, :, 1].T)
        late = np.where(longer * behind > 0, np.sign(longer) * np.minimum(np.abs(longer), np.abs(behind)), 0.0)
        found = np.where(np.abs(late) > np.abs(found), late, found)
    return found


def _hosts_and_lags(step: StepRecord) -> dict[str, tuple[float, float]]:
    """Return how long the host was in each phase, and how far the GPU was behind it at its end."""
    ends = {name: end for name, _, end in step.gpu_phases}
    found: dict[str, tuple[float, float]] = {}
    for name, start, end in step.phases:
        if name in ends:
            found[name] = found.get(name, (0.0, 0.0))[0] + end - start, float(ends[name] - end)
    return found


def _saved(waited_ns: Floats) -> Floats:
    """Return what each rank waited less than the median one of the others, as (ranks, steps)."""
    count = len(waited_ns)
    ordered = np.sort(waited_ns, axis=0)
    # Without itself a rank's others are the same rows but for one: where it stands decides which are the middle ones.
    place = np.argsort(np.argsort(waited_ns, axis=0, kind="stable"), axis=0, kind="stable")
    low, high = (count - 2) // 2, (count - 1) // 2
    steps = np.arange(waited_ns.shape[1])
    middle: list[Floats] = [ordered[at + (place <= at), steps] for at in (low, high)]
    saved: Floats = (middle[0] + middle[1]) / 2 - waited_ns
    return saved


def _sum_longer_phases(one: StepRecord, other: StepRecord) -> float:
    """Return how much longer phases took on the GPU of the one rank, without those that took less."""
    sums: list[dict[str, int]] = [{}, {}]
    for times, step in zip(sums, (one, other), strict=True):
        for name, start, end in step.gpu_phases:
            times[name] = times.get(name, 0) + end - start
    return float(sum(max(time - sums[1].get(name, time), 0) for name, time in sums[0].items()))


def latest(lateness: Mapping[int, Sequence[float]]) -> int:
    """Return the rank for which the others typically wait longest."""
    return max(lateness, key=lambda rank: float(np.median(lateness[rank])) if len(lateness[rank]) else 0.0)
