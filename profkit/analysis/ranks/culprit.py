"""Which rank the others wait for, and why: the difference of what ranks did between the last collectives of steps.

Collectives end on all ranks at once, so between the last one of a step and the last one of the next step the same time
passes on every rank. That time is what the rank did by itself (`profkit.analysis.ranks.own_time`) and the
communication that nothing hid. The rank that did more by itself waited less: the difference to the median rank is what
it costs, and the parts of the difference are the cause. A light record knows no such parts: there a rank's phases, on
the host and on the GPU, are compared, and it is late by the longest wait of each step.

A rank is named if what it costs (`profkit.analysis.ranks.costs`) is clearly more than chance: as a rule, or in some
steps only, as one that saves or logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from profkit.analysis.ranks.costs import (
    LEAST_SHARE,
    Cost,
    cost_by_accounts,
    cost_of_kernels,
    find_stalls,
    find_suspects,
    late_steps,
    typical,
)
from profkit.analysis.ranks.light_costs import (
    account_before_waits,
    cost_by_waits,
    has_untimed_waits,
    keep_unrecorded,
    longer_unrecorded,
)
from profkit.analysis.ranks.matching import LATE_NS, Matched, lateness_by_step, match_collectives
from profkit.analysis.ranks.own_time import BEFORE, Account, Cause, Floats, Parts, ReducedRank
from profkit.names import kind_of
from profkit.run.light_record import WAITS_FOR_ALL
from profkit.trace.columns import Bools

LEAST_LAUNCH_SHARE = 0.3
"""Where launches are the cause and a profiler recorded, they must take this share of a step longer: it slows the
launches of each process by another amount, in such runs by 19 % of a step, of a step of 4 ms by 26 %. Python between
launches that is longer counts as launches, unless it is by more than `_BEYOND_LAUNCHES` times as much."""
LEAST_EXPLAINED = 0.5
"""In light records a rank must take longer by at least this share of what the others wait for it. In 146 recordings of
24 steps of two hosts that set the pace, without any delay, a rank is otherwise called late in 30: its host was slower
for a while, and then as far behind the other's GPU as the queue of launches lets it. It is in one with this rule."""
_SEEN = 0.5
"""A host takes longer without a profiler too if it does so by this share of what it does with one."""
_BEYOND_LAUNCHES = 3
_ENOUGH_STEPS = 3
"""In fewer recorded steps a profiler may slow launches by any amount."""
_FEW = 8
"""With this number of steps or more, a rank that costs a tenth of a step in each of them can be told from chance."""
_CLOCK_LOSS = 0.03
"""A clock that is lower than the median rank's by this share is held down."""


@dataclass(frozen=True)
class Culprit:
    """The rank that the others wait for.

    Times are per step. ``late_ns`` is how much later than the median rank it arrives. ``extra_ns`` is how much longer
    the cause took on this rank than on the median rank, on the host if that is more; nothing hid the part ``idle_ns``
    of this time. ``gain_ns`` is how much faster steps would be without it (an estimate, rough from light records
    alone). ``share`` is the part of the collectives with a late rank in which it came last; None where nobody timed
    them, and its host was late. A rank that is late in some steps only is late in ``late_steps`` of
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
    unrecorded_ns: int | None = None
    """What a step takes without a profiler, if only such steps show that the rank is late: all times are of these."""

    @property
    def is_always(self) -> bool:
        return self.late_steps == self.steps


NOT_COMPARED = "no two ranks recorded the same collectives in which all ranks wait for each other"
"""Why nobody can be judged, where `Verdict.most_rank` is None: ranks of a pipeline only send and receive."""

Doubt = Literal["varies", "few", "unexplained", "launches", "profiler", "untimed"]
_DOUBTS_OF_PROFILER: tuple[Doubt, ...] = ("launches", "profiler")


@dataclass(frozen=True)
class Verdict:
    """Who is late, or the figure that shows that nobody is: the most that a rank cost the others, and its share."""

    culprit: Culprit | None
    most_rank: int | None = None
    most_ns: int = 0
    doubt: Doubt | None = None
    """Why a rank that costs much is not named: it may be chance, since its arrivals vary much or steps are few; its
    cause is unknown; or it may be the profiler.

    ``untimed``: ranks may have waited where nobody timed it.
    """
    turns: Mapping[int, int] = field(default_factory=dict)
    """Rank → in how many steps it cost the others at least `LEAST_SHARE` of a step."""


def find_culprit(
    ranks: Sequence[ReducedRank],
    accounts: Sequence[Account],
    matched: Sequence[Matched],
    *,
    is_untimed: bool,
) -> Verdict:
    """Return which rank the others wait for; ``accounts`` are those of ``ranks``, in their order.

    ``is_untimed``: ranks may have waited where nobody timed it (`profkit.analysis.ranks.light_costs`).

    All ranks left full traces, or all are known by light records (`profkit.analysis.ranks.comparison`).
    """
    if not any(np.isin(match.kind, WAITS_FOR_ALL).any() for match in matched):
        return Verdict(None)
    # Nobody can wait for a rank that calls no collective.
    members = {rank for match in matched if len(match) for rank in match.ranks}
    pairs = zip(ranks, accounts, strict=True)
    usable = _usable((rank, account) for rank, account in pairs if rank.record.rank in members)
    if len(usable) < 2:
        return Verdict(None)
    chosen, compared = zip(*usable, strict=True)
    is_exact = all(account.is_exact for account in compared)
    court = partial(_Court, chosen, matched, is_untimed and not is_exact)
    if is_exact:
        verdict = court(cost_by_accounts(chosen, compared, matched)).judge()
        return verdict if verdict.culprit is not None else _judge_unrecorded(chosen, matched) or verdict
    kept = _kept_steps(chosen, matched)
    cost, estimate, tied = cost_by_waits(compared, chosen, matched, kept=kept, is_untimed=is_untimed)
    verdict = court(cost).judge()
    if verdict.culprit is None and tied:
        estimated = court(estimate).judge()
        if estimated.culprit is not None and estimated.culprit.cause == "python" and estimated.culprit.phase in tied:
            return estimated
    return verdict


def _judge_unrecorded(ranks: Sequence[ReducedRank], matched: Sequence[Matched]) -> Verdict | None:
    """A profiler slows the launches of all ranks, which may hide that one computes more. Light records say who makes
    the others wait, and full traces what each rank computes.
    """
    unrecorded = keep_unrecorded(ranks)
    if unrecorded is None:
        return None
    matched_there = match_collectives(unrecorded)
    if has_untimed_waits(unrecorded, matched_there):
        return None
    accounts = [account_before_waits(rank, matched_there) for rank in unrecorded]
    kept = _kept_steps(unrecorded, matched_there)
    cost, _, _ = cost_by_waits(accounts, unrecorded, matched_there, kept=kept, is_untimed=False)
    cost = cost_of_kernels(cost, ranks, matched)
    verdict = _Court(unrecorded, matched_there, False, cost).judge()
    if verdict.culprit is None:
        return None
    return replace(verdict, culprit=replace(verdict.culprit, unrecorded_ns=round(cost.step_ns)))


def _kept_steps(ranks: Sequence[ReducedRank], matched: Sequence[Matched]) -> Bools:
    lost = [_lost_steps(rank, matched) for rank in ranks]
    kept: Bools = ~np.any([steps[: min(map(len, lost))] for steps in lost], axis=0)
    return kept


def _lost_steps(rank: ReducedRank, matched: Sequence[Matched]) -> Bools:
    """Return in which measured steps a rank called collectives that other ranks lost from their records."""
    called, matched_there = np.zeros((2, len(rank.steps)), dtype=np.bool_)
    for match in matched:
        if rank.record.rank in match.ranks:
            key = match.group.name, match.group.ranks
            numbers = [group.number for group in rank.record.groups if (group.name, group.ranks) == key]
            called[rank.calls.step[(rank.calls.group == numbers[-1]) & ~rank.calls.is_pairwise]] = True
            matched_there[match.step[match.ranks.index(rank.record.rank)]] = True
    lost: Bools = (called & ~matched_there)[rank.steps.named]
    return lost


def _usable(pairs: Iterable[tuple[ReducedRank, Account]]) -> list[tuple[ReducedRank, Account]]:
    """Ranks with an account of more than half as many steps as the typical rank: others are too short to compare."""
    known = [(rank, account) for rank, account in pairs if len(account)]
    middle = float(np.median([len(account) for _, account in known])) if known else 0.0
    return [(rank, account) for rank, account in known if len(account) * 2 > middle]


@dataclass(frozen=True, eq=False)
class _Court:
    """Judges ranks, given by their position in ``ranks``, by what they cost each other."""

    ranks: Sequence[ReducedRank]
    matched: Sequence[Matched]
    is_untimed: bool
    cost: Cost

    def judge(self) -> Verdict:
        nobody = self._nobody_late()
        doubts: list[Doubt] = []
        for late, cause, late_ns in find_suspects(self.cost):
            weighed = self._weigh(late, cause, late_ns)
            if isinstance(weighed, Culprit):
                if weighed.is_always:
                    (arrives_ns,) = lateness_by_step([self.ranks[late]], self.matched)
                    usually_ns = round(float(np.median(arrives_ns[-weighed.steps :])))
                    weighed = replace(weighed, late_ns=max(weighed.late_ns, usually_ns))
                return replace(nobody, doubt=None, culprit=weighed)
            doubts.append(weighed)
        stalls = find_stalls(self.cost)
        if stalls is not None:
            late, place, steps = stalls
            cause, phase = self.cost.places[place]
            cost_ns = np.minimum(self.cost.saved_ns[late], self.cost.longer_ns[late, :, place])
            stalled = self._describe(late, cause, cost_ns, steps, phases={phase})
            return replace(nobody, doubt=None, culprit=stalled)
        # That a profiler makes one suspect late says nothing of another one: those doubts count last.
        others = [doubt for doubt in doubts if doubt not in _DOUBTS_OF_PROFILER]
        return replace(nobody, doubt="untimed" if self.is_untimed else next(iter(others or doubts), nobody.doubt))

    def _nobody_late(self) -> Verdict:
        cost = self.cost
        usually = np.median(cost.saved_ns, axis=1)
        most = int(usually.argmax())
        late = (cost.saved_ns >= LEAST_SHARE * cost.step_ns).sum(axis=1).tolist()
        return Verdict(
            None,
            self.ranks[most].record.rank,
            round(float(usually[most])) if usually[most] >= LATE_NS else 0,
            doubt=self._doubt_level(most) if usually[most] >= LEAST_SHARE * cost.step_ns else None,
            turns={rank.record.rank: times for rank, times in zip(self.ranks, late, strict=True) if times},
        )

    def _weigh(self, late: int, cause: Cause, late_ns: Floats) -> Culprit | Doubt:
        cost, doubt = self.cost, self._doubt_profiler(late, cause)
        if doubt is not None:
            return doubt
        if cause == "launch" and cost.is_exact:
            late_ns = late_ns - self._launches_that_others_hid(late)
        if typical(late_ns) < LEAST_SHARE * cost.step_ns:
            return "launches"
        if not cost.is_exact and typical(late_ns) < LEAST_EXPLAINED * typical(cost.saved_ns[late]):
            return self._doubt_level(late)
        steps = late_steps(late_ns, cost, late, cause)
        return self._doubt_chance() if steps is None else self._describe(late, cause, late_ns, steps)

    def _doubt_level(self, rank: int) -> Doubt:
        is_rule = late_steps(self.cost.saved_ns[rank], self.cost, rank, None) is not None
        return "unexplained" if is_rule else self._doubt_chance()

    def _doubt_chance(self) -> Doubt:
        return "few" if self.cost.saved_ns.shape[1] < _FEW else "varies"

    def _describe(
        self, late: int, cause: Cause, cost_ns: Floats, steps: Bools, phases: Set[str] | None = None
    ) -> Culprit:
        """``cost_ns`` is its cost in each step, ``steps`` are those in which it is late. If ``phases`` are given, they
        alone count.
        """
        cost = self.cost
        record, account = self.ranks[late].record, cost.accounts[late]
        middle = cost.usual_beside(late)
        beside = [other for other in cost.accounts if other is not account]
        mine = account.median(steps)
        usual = [other.median() for other in ([cost.accounts[middle]] if cost.is_exact else beside)]
        extra = {
            key: mine.get(key, 0.0) - float(np.median([row.get(key, 0.0) for row in usual]))
            for key in sorted(set(mine).union(*usual))
            if key[0] == cause and (phases is None or key[1] in phases)
        }
        phase, module, extra_ns = _find_place(extra)
        is_always = bool(steps.all())
        late_ns = float(np.median(cost.saved_ns[late][steps]))
        if cause == "kernels" and not cost.is_exact:
            extra_ns = min(extra_ns, late_ns)
        may_hide = is_always and phase and cause in ("data", "python") and cost.is_exact and record.device is not None
        on_host = self._longer_on_host("outside_cuda", late, phase) if may_hide else 0.0
        gain_ns = typical(cost_ns) if is_always else float(np.maximum(cost_ns[steps], 0.0).sum()) / len(steps)
        if is_always and phase:  # what its cause costs in other phases is not named
            gain_ns = min(gain_ns, max(extra_ns, on_host))
        clocks = [other.sm_mhz for other in beside if other.sm_mhz is not None]
        is_held_down = (
            account.sm_mhz is not None
            and bool(clocks)
            and account.sm_mhz <= float(np.median(clocks)) * (1 - _CLOCK_LOSS)
        )
        group, share = _arrivals(self.matched, record.rank)
        return Culprit(
            rank=record.rank,
            cause="clock" if cause == "kernels" and is_held_down else cause,
            phase=phase,
            module=module,
            late_ns=round(late_ns),
            extra_ns=round(max(extra_ns, on_host)),
            idle_ns=round(extra_ns),
            gain_ns=round(gain_ns),
            share=share,
            group=group,
            compared_with=self.ranks[middle].record.rank,
            late_steps=int(steps.sum()),
            steps=len(steps),
        )

    def _longer_on_host(self, table: Literal["phases", "outside_cuda"], late: int, phase: str) -> float:
        both = [self.ranks[at].steps for at in (late, self.cost.usual_beside(late))]
        times = [getattr(steps, table).times_of(phase, len(steps))[steps.named] for steps in both]
        mine_ns, usual_ns = (float(np.median(each)) if len(each) else 0.0 for each in times)
        return mine_ns - usual_ns

    def _launches_that_others_hid(self, late: int) -> float:
        """A rank launches longer by no more than its host takes longer for a phase, without what Python took longer
        there.
        """
        cost = self.cost
        longer = {place: float(np.median(cost.longer_ns[late, :, at])) for at, place in enumerate(cost.places)}
        hidden = 0.0
        for cause, phase in cost.places:
            if cause == "launch" and longer[cause, phase] > 0:
                python = max(longer.get(("python", phase), 0.0), 0.0)
                launched = max(self._longer_on_host("phases", late, phase) - python, 0.0)
                hidden += max(longer[cause, phase] - launched, 0.0)
        return hidden

    def _doubt_profiler(self, late: int, cause: Cause) -> Doubt | None:
        """Where enough steps were not recorded, they tell: there the same phases must take longer too, by half as much.
        They do not tell of time between phases, of which lines of source do that were looked for without a profiler.
        """
        cost = self.cost
        if self.ranks[late].record.source == "light" or cause not in ("launch", "python"):
            return None
        launch, python = (max(typical(cost.of_cause(why)[late]), 0.0) for why in ("launch", "python"))
        longer = {
            phase: max(float(np.median(cost.longer_ns[late, :, at])), 0.0)
            for at, (why, phase) in enumerate(cost.places)
            if why == cause
        }
        unrecorded = longer_unrecorded(self.ranks, late) if cost.is_exact else None
        if unrecorded is not None:
            within = sum(time for phase, time in longer.items() if phase in unrecorded)
            seen = sum(min(longer.get(phase, 0.0), max(typical(time), 0.0)) for phase, time in unrecorded.items())
            is_mostly_within = within * 2 >= sum(longer.values())
            if is_mostly_within and seen < _SEEN * within:
                return "profiler"
        if cause == "python" and (python > _BEYOND_LAUNCHES * launch or self._lines_show(late, longer)):
            return None
        is_enough = launch + python >= LEAST_LAUNCH_SHARE * cost.step_ns and cost.saved_ns.shape[1] >= _ENOUGH_STEPS
        return None if is_enough else "launches"

    def _lines_show(self, late: int, longer: Mapping[str, float]) -> bool:
        between = sum(time for phase, time in longer.items() if phase.startswith(BEFORE))
        known = [rank.between_phases_ns for rank in self.ranks]
        mine_ns, others_ns = known[late], [time for at, time in enumerate(known) if at != late and time is not None]
        if mine_ns is None or len(others_ns) + 1 < len(known) or between * 2 < sum(longer.values()):
            return False
        return mine_ns - float(np.median(others_ns)) >= _SEEN * between


def _find_place(extra: Parts) -> tuple[str, str, float]:
    """Return the phase with half of the extra time, the module (or kind) with half of that, and the phase's time.

    Where no phase has half, both are "", and the time is that of all phases with extra time.
    """
    by_phase: dict[str, float] = {}
    for (_, phase, _), time in sorted(extra.items()):
        by_phase[phase] = by_phase.get(phase, 0.0) + time
    phase, whole = max(by_phase, key=lambda name: by_phase[name]), sum(max(time, 0.0) for time in by_phase.values())
    if by_phase[phase] * 2 < whole:
        return "", "", whole
    for name in (str, kind_of):
        by_module: dict[str, float] = {}
        for (_, there, module), time in sorted(extra.items()):
            if there == phase and module:
                by_module[name(module)] = by_module.get(name(module), 0.0) + time
        module = max(by_module, key=lambda name: by_module[name], default="")
        if module and by_module[module] * 2 >= by_phase[phase]:
            return phase, module, by_phase[phase]
    return phase, "", by_phase[phase]


def _arrivals(matched: Sequence[Matched], rank: int) -> tuple[Matched, float | None]:
    waited, last, late = -1, 0, 0
    group = matched[0]
    for match in matched:
        if rank not in match.ranks:
            continue
        mine = match.last == match.ranks.index(rank)
        last, late = last + int(mine.sum()), late + int((match.last >= 0).sum())
        total = int(match.wait_ns[:, mine].sum())
        if total > waited:
            waited, group = total, match
    return group, last / late if late else None
