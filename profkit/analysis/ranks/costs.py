"""What each rank did in each step, what it cost the others by coming late, and whether that may be chance.

A rank saves what it waited less than the median one of the other ranks: that is what they wait for it, negative where
it waited for others itself. But who waits does not know for what: a host that once got ahead of another keeps its lead,
and its GPU waits in every step although both hosts take the same time. So a step costs no more than what the rank did
longer in it.

Two tests judge whether a rank is late by chance. Both allow a false alarm in a share `CHANCE` of recordings, divided by
the number of ranks, places and stretches of steps among which the one that looks latest was chosen (Bonferroni).

**As a rule.** Null hypothesis: in the long run a rank is as late as it is early, but it drifts; neighbouring steps are
correlated (AR(1)). The statistic is Student's t, of a trimmed mean with Winsorized variance (Tukey and McLaughlin
1963), so that strange steps neither accuse nor acquit. A mean of n steps with correlation ρ of neighbours has the
variance V = (n + 2 Σ (n − k) ρᵏ) / n² of one step, and n such steps seem to vary by 1 − V of their variance. What is
known of ranks beforehand, `KNOWN_SPREAD` and `KNOWN_CORRELATION`, counts as steps that were seen (a moderated t, Smyth
2004): few steps must be much clearer. With many ranks another test is how far a rank is from their median, over two
errors: their median absolute deviation as a standard deviation (it counts as 37 % of the ranks: its efficiency), and
the rank's own standard error. The clearer of the two counts.

**Now and then.** Null hypothesis: stalls hit each rank alike, and each place of the program in proportion to the time
spent there. How many hit one rank at one place is binomial. Steps in a row count as one stall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from profkit.analysis.ranks.matching import Matched, waits_by_step
from profkit.analysis.ranks.own_time import Account, Cause, Floats, ReducedRank
from profkit.analysis.statistics import chance_beyond
from profkit.trace.columns import Bools


@dataclass(frozen=True, eq=False)
class Cost:
    """What each rank cost the others: what it saved as (ranks, steps), and what it did longer there as (…, places).

    A place is a cause and a phase. ``accounts`` are what the ranks did in these steps, without what only waiting made
    longer.
    """

    accounts: tuple[Account, ...]
    saved_ns: Floats
    places: tuple[tuple[Cause, str], ...]
    times_ns: Floats
    longer_ns: Floats
    step_ns: float
    is_exact: bool

    @property
    def causes(self) -> set[Cause]:
        return {cause for cause, _ in self.places}

    def of_cause(self, cause: Cause) -> Floats:
        """Return what each rank cost in each step by doing longer what has this cause, as (ranks, steps)."""
        longer = self.longer_ns[:, :, [at for at, (why, _) in enumerate(self.places) if why == cause]]
        cost: Floats = np.minimum(self.saved_ns, longer.sum(axis=2))
        return cost

    def usual_beside(self, late: int) -> int:
        """Return the median one of the other ranks by what they did (its position)."""
        own = np.median(self.times_ns.sum(axis=2), axis=1)
        others: list[int] = [at for at in np.argsort(own, kind="stable").tolist() if at != late]
        return others[len(others) // 2] if self.is_exact else others[(len(others) - 1) // 2]


def sum_cost(accounts: Sequence[Account], saved_ns: Floats, step_ns: float) -> Cost:
    """Return what accounts of the same steps say that ranks cost, if ``saved_ns`` is what they saved (ranks, steps)."""
    places = sorted({part[:2] for account in accounts for part in account.parts})
    number = {place: at for at, place in enumerate(places)}
    times = np.zeros((*saved_ns.shape, len(places)))
    for mine, account in zip(times, accounts, strict=True):
        columns = np.array([number[part[:2]] for part in account.parts], dtype=np.int64)
        np.add.at(mine.T, columns, account.times_ns.T)
    longer = -saved_beside(times.reshape(len(accounts), -1)).reshape(times.shape)
    return Cost(tuple(accounts), saved_ns, tuple(places), times, longer, step_ns, accounts[0].is_exact)


def cost_by_accounts(ranks: Sequence[ReducedRank], accounts: Sequence[Account], matched: Sequence[Matched]) -> Cost:
    """Return what each rank cost by what each did by itself, and the communication that nothing hid.

    Kernels next to a collective that waits are slower: what the kernels of a place took longer than those of the
    quickest rank there counts as waiting, as far as their rank waited meanwhile.
    """
    exposed, hidden = _sum_exposed_and_hidden(ranks, accounts, matched)
    count = exposed.shape[1]
    did = _subtract_slowed_kernels(accounts, count, hidden)
    own = np.array([account.sums() for account in did])
    exposed += np.array([account.sums()[:count] for account in accounts]) - own
    usual = int(np.argsort(np.median(own, axis=1), kind="stable")[(len(accounts) - 1) // 2])
    return sum_cost(did, saved_beside(exposed), float(np.median(own[usual] + exposed[usual])))


def cost_of_kernels(cost: Cost, ranks: Sequence[ReducedRank], matched: Sequence[Matched]) -> Cost:
    """Return what ranks cost in steps without a profiler, by what their kernels took longer in recorded ones.

    ``matched`` are the recorded collectives. There a rank's kernels were slower by at most `_SLOWED` of what it waited
    beside them.
    """
    recorded = [rank.exact for rank in ranks if rank.exact is not None]
    kernels = []
    for account in recorded:
        rows = [at for at, part in enumerate(account.parts) if part[0] == "kernels"]
        parts = tuple(account.parts[at] for at in rows)
        kernels.append(replace(account, parts=parts, times_ns=account.times_ns[:, rows], is_exact=False))
    exposed, hidden = _sum_exposed_and_hidden(ranks, recorded, matched)
    did = _subtract_slowed_kernels(kernels, exposed.shape[1], _SLOWED * hidden)
    steps = cost.saved_ns.shape[1]

    def in_all_steps(account: Account) -> Account:
        return replace(account, times_ns=np.tile(account.times_ns.mean(axis=0), (steps, 1)))

    return replace(
        sum_cost([in_all_steps(account) for account in did], cost.saved_ns, cost.step_ns),
        accounts=tuple(in_all_steps(account) for account in kernels),
    )


def _sum_exposed_and_hidden(
    ranks: Sequence[ReducedRank], accounts: Sequence[Account], matched: Sequence[Matched]
) -> tuple[Floats, Floats]:
    waited = waits_by_step(ranks, matched)
    # A damaged record may say less of its collectives than of what the rank did.
    count = min(min(len(account), len(waits)) for account, waits in zip(accounts, waited, strict=True))
    exposed = np.array([account.exposed_ns[:count] for account in accounts])
    waits = np.array([each[-len(account) :][:count] for account, each in zip(accounts, waited, strict=True)])
    return exposed, np.maximum(waits - exposed, 0.0)


def _subtract_slowed_kernels(accounts: Sequence[Account], count: int, hidden_ns: Floats) -> list[Account]:
    keys = sorted({key for account in accounts for key in account.parts if key[0] == "kernels"})
    at = [[account.parts.index(key) if key in account.parts else -1 for key in keys] for account in accounts]
    padded = [np.pad(account.times_ns[:count], ((0, 0), (0, 1))) for account in accounts]
    kernels = np.array([times[:, columns] for times, columns in zip(padded, at, strict=True)])
    slower = kernels - kernels.min(axis=0)
    total = slower.sum(axis=2)
    slower *= (np.minimum(total, hidden_ns) / np.maximum(total, 1.0))[:, :, None]
    for times, columns, less in zip(padded, at, slower, strict=True):
        times[:, columns] -= less
    return [replace(account, times_ns=times[:, :-1]) for account, times in zip(accounts, padded, strict=True)]


def saved_beside(waited_ns: Floats) -> Floats:
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


LEAST_SHARE = 0.05
"""A rank is called late if it costs at least this share of a step: in two DDP runs on 2 × H200 with nothing injected,
ranks cost each other up to 3 % (apart from launches, see below)."""
CHANCE = 0.01
"""The share of recordings without a late rank in which one may be called late."""
KNOWN_SPREAD, SPREAD_STEPS = 0.025, 8.0
"""How late ranks are varies by 1 to 3 % of a step (2 × H200, where the GPUs set the pace)."""
KNOWN_CORRELATION, CORRELATION_STEPS = 0.85, 32.0
"""Hosts that set the pace are quick or slow for tens of steps in a row (2 × H200, 1,500 steps of 17 ms)."""
HOSTS_VARY = 0.3
"""Such a host takes up to this share of a step longer than another one, for no reason in the program. So one took 21.0
ms for each backward pass and the other 14.5, in 24 steps of 30 ms; its GPU was never behind it, and the other's waited.
In the next ones both took 18."""
_SLOWED = 0.4
"""Kernels take longer by at most this share of the time in which a collective waits beside them: on 4 × H200 it is 0.19
to 0.29."""
_TRIMMED = 0.2
_MOST_ALIKE = 0.98
_OF_DEVIATION = 1.4826
_EFFICIENCY = 0.37
_MANY = 15
"""Fewer other ranks tell too little of how ranks vary."""
_LEAST_APART = 0.005
"""Ranks that are late are taken to vary by at least this share of a step, however alike the others are."""
_LEAST_PROBABILITY = 0.02
"""Stalls hit each place at least with this probability, even if hardly any time is spent there."""

_HOST_EXPLAINS = 0.8
"""In a light record kernels are what a GPU did at most: what the host did counts first if it explains this share."""
_APART = 3.0
"""Late now and then: what the rank takes longer there is at least this multiple of what any rank takes longer in the
other steps. Noise leaves no such gap."""
_LEAST_ON_AVERAGE = 0.01
"""Late now and then: that costs at least this share of all steps' time."""
_FEWEST_STALLS = 3


def typical(values: Floats) -> float:
    """Return the mean without the fifth of the values at either end."""
    cut = _cut(len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean()) if len(values) else 0.0


def _cut(count: int) -> int:
    return math.ceil(count * _TRIMMED) if count > 2 else 0


def _winsorized(values: Floats) -> tuple[Floats, int]:
    """Return how far values are from their mean, the fifth at either end as the next ones, and how many are neither."""
    cut = _cut(len(values))
    ordered = np.sort(values)
    apart: Floats = np.clip(values, ordered[cut], ordered[len(values) - 1 - cut])
    return apart - apart.mean(), len(values) - 2 * cut


def _chance_of_level(late_ns: Floats, step_ns: float, known_spread: float) -> float:
    """``known_spread`` is by what share of a step ranks are known to vary."""
    count = len(late_ns)
    if not count or not step_ns:
        return 1.0
    late = late_ns / step_ns
    apart, kept = _winsorized(late)
    squares = float((apart**2).sum())
    alike = float((apart[1:] * apart[:-1]).sum()) / squares if squares else 0.0
    alike = max(alike + (1 + 3 * alike) / count, 0.0)  # without its bias (Kendall 1954)
    alike = (CORRELATION_STEPS * KNOWN_CORRELATION + count * alike) / (CORRELATION_STEPS + count)
    alike = min(alike, _MOST_ALIKE)
    steps = np.arange(1, count)
    of_mean = (count + 2 * float(((count - steps) * alike**steps).sum())) / count**2
    seen = max(kept - 1, 0) * (1 - of_mean)
    spread = squares / (count * (1 - of_mean)) / (kept / count) ** 2 if count > 1 else 0.0
    freedom = SPREAD_STEPS + seen
    spread = (SPREAD_STEPS * known_spread**2 + seen * spread) / freedom
    return chance_beyond(typical(late) / math.sqrt(spread * of_mean), freedom)


def chance_of_stalls(count: int, of_all: int, rank_count: int, share: float) -> float:
    """Return how often at least ``count`` of all stalls hit one rank at a place where it spends that share of time."""
    each = max(share, _LEAST_PROBABILITY) / rank_count
    return sum(math.comb(of_all, at) * each**at * (1 - each) ** (of_all - at) for at in range(count, of_all + 1))


def find_suspects(cost: Cost) -> list[tuple[int, Cause, Floats]]:
    """Return who typically costs the others enough to be called late, why, and how much in each step, most first."""
    suspects = []
    for cause in cost.causes:
        for rank, late_ns in enumerate(cost.of_cause(cause)):
            time = typical(late_ns)
            if time >= LEAST_SHARE * cost.step_ns and time > 0:
                is_coarse = cause == "kernels" and not cost.is_exact
                suspects.append((time * (_HOST_EXPLAINS if is_coarse else 1.0), rank, cause, late_ns))
    suspects.sort(key=lambda suspect: (-suspect[0], *suspect[1:3]))
    return [suspect[1:] for suspect in suspects]


def _typical_spread(cost: Cost) -> float:
    """The median of ranks' median absolute deviations, as a standard deviation. Two ranks vary alike, and what one is
    late says nothing new of the other.
    """
    if len(cost.saved_ns) == 2:
        return KNOWN_SPREAD
    apart = np.abs(cost.saved_ns - np.median(cost.saved_ns, axis=1)[:, None])
    return max(_OF_DEVIATION * float(np.median(np.median(apart, axis=1))) / max(cost.step_ns, 1.0), KNOWN_SPREAD)


def chance_beside(late_ns: Floats, others_ns: Floats, step_ns: float) -> float:
    """Return how often a rank is typically as late as this beside others, late by ``others_ns`` (ranks, steps).

    1 beside fewer than `_MANY`, or in fewer than four steps: they tell too little.
    """
    count = len(late_ns)
    if len(others_ns) < _MANY or count < 4 or not step_ns:
        return 1.0
    usual = np.array([typical(rank_ns) for rank_ns in others_ns])
    middle = float(np.median(usual))
    apart = max(_OF_DEVIATION * float(np.median(np.abs(usual - middle))), _LEAST_APART * step_ns)
    own_ns, kept = _winsorized(late_ns)
    own = float(own_ns.var(ddof=1)) / count / (kept / count) ** 2
    return chance_beyond((typical(late_ns) - middle) / math.sqrt(apart**2 + own), _EFFICIENCY * (len(usual) - 1))


def late_steps(late_ns: Floats, cost: Cost, rank: int, cause: Cause | None) -> Bools | None:
    """Return in which steps a rank is late as a rule: in all, or in a stretch of most of them; None if by chance.

    Stretches are tested too, since what one costs may be hidden in the others: of n steps there are n (n + 1) / 2.
    ``late_ns`` is how late the rank, given by position, is in each step; a ``cause`` of None means for whatever reason.
    """
    count, step_ns, spread = len(late_ns), cost.step_ns, _typical_spread(cost)
    tests = (2 + (len(cost.saved_ns) > _MANY)) * len(cost.saved_ns) * len(cost.causes)
    all_ns = cost.saved_ns if cause is None else cost.of_cause(cause)
    beside = chance_beside(late_ns, np.delete(all_ns, rank, axis=0), step_ns)
    if min(_chance_of_level(late_ns, step_ns, spread), beside) * tests <= CHANCE:
        return np.ones(count, dtype=np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], late_ns >= LEAST_SHARE * step_ns, [0]]).astype(np.int64)))
    begin, end = max(edges.reshape(-1, 2).tolist(), key=lambda stretch: stretch[1] - stretch[0], default=(0, 0))
    chance = _chance_of_level(late_ns[begin:end], step_ns, spread) * count * (count + 1) / 2
    if (end - begin) * 2 <= count or chance * tests > CHANCE:
        return None
    return np.isin(np.arange(count), np.arange(begin, end))


def _count_stalls(is_late: Bools) -> int:
    return int((is_late & ~np.pad(is_late, (1, 0))[:-1]).sum())


def find_stalls(cost: Cost) -> tuple[int, int, Bools] | None:
    """Return who is late now and then, at which place and in which steps; None if nobody is, or by chance."""
    if not cost.places:
        return None
    costs = np.minimum(cost.saved_ns[:, :, None], cost.longer_ns)
    least = LEAST_SHARE * cost.step_ns
    where = costs.argmax(axis=2)
    is_late = costs.max(axis=2, initial=0.0) >= least
    of_all = sum(map(_count_stalls, is_late))
    tests = cost.saved_ns.shape[0] * len(cost.places)
    shares = np.median(cost.times_ns, axis=(0, 1)) / max(cost.step_ns, 1.0)
    stalls = []
    for rank, place in {(rank, int(where[rank, step])) for rank, step in np.argwhere(is_late).tolist()}:
        steps, longer = costs[rank, :, place] >= least, cost.longer_ns[:, :, place]
        steps &= longer[rank] >= float(np.median(longer[rank, steps])) / _APART
        count = _count_stalls(steps)
        mean = float(costs[rank, steps, place].sum()) / len(steps)
        is_apart = longer[rank, steps].min() >= _APART * longer[:, ~steps].max(initial=0.0)
        if not is_apart or mean < _LEAST_ON_AVERAGE * cost.step_ns or count < _FEWEST_STALLS:
            continue
        chance = chance_of_stalls(count, max(of_all, count), len(cost.saved_ns), float(shares[place]))
        if chance * tests <= CHANCE:
            stalls.append((mean, -rank, -place, steps))
    if not stalls:
        return None
    _, rank, place, steps = max(stalls, key=lambda stall: stall[:3])
    return -rank, -place, steps
