"""What each rank did in each step, and what it cost the others by coming late; and both exactly, by full traces.

A rank saves what it waited less than the median one of the other ranks: that is what they wait for it, negative where
it waited for others itself. But who waits does not know for what: a host that once got ahead of another keeps its lead,
and its GPU waits in every step although both hosts take the same time. So a step costs no more than what the rank did
longer in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from profkit.analysis.ranks.matching import Matched
from profkit.analysis.ranks.own_time import Cause, Part
from profkit.names import BACKWARD, DATA
from profkit.run.light_columns import UNKNOWN, CallColumns, Phases, StepColumns
from profkit.trace.columns import Bools, Ints

Floats = npt.NDArray[np.float64]
Parts = dict[Part, float]
"""Part → nanoseconds."""


@dataclass(frozen=True, eq=False)
class StepParts:
    """What one rank did by itself in each step: nanoseconds as (steps, parts)."""

    parts: tuple[Part, ...]
    times_ns: Floats

    def __len__(self) -> int:
        return len(self.times_ns)

    def sums(self) -> Floats:
        """Return how long each step took."""
        total: Floats = self.times_ns.sum(axis=1)
        return total

    def median(self) -> Parts:
        """Return each part's median over the steps, which one strange step does not move."""
        return self._by_part(np.median(self.times_ns, axis=0)) if len(self) else {}

    def mean(self) -> Parts:
        """Return each part per step."""
        return self._by_part(self.times_ns.sum(axis=0) / len(self)) if len(self) else {}

    def within(self, steps: slice | Bools) -> StepParts:
        """Return some of the steps alone."""
        return StepParts(self.parts, self.times_ns[steps])

    def beside(self, other: StepParts) -> StepParts:
        """Return these parts and those, which are others, of the same steps."""
        return StepParts(self.parts + other.parts, np.hstack([self.times_ns, other.times_ns]))

    def _by_part(self, values: Floats) -> Parts:
        return dict(zip(self.parts, values.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Account:
    """What one rank did in each step: its own parts, and the communication that nothing hid."""

    rank: int
    own: StepParts
    exposed_ns: Floats
    is_exact: bool
    sm_mhz: float | None = None

    def usual(self) -> Parts:
        """Return what it does in a step: the mean of a full trace, so that parts sum up, else the median."""
        return self.own.mean() if self.is_exact else self.own.median()


def part_on_host(phase: str) -> Part:
    """Return what a host's time in a phase counts as."""
    return ("data", DATA, "") if phase == DATA else ("python", phase, "")


def longer_on_gpu(steps: StepColumns, calls: CallColumns) -> StepParts:
    """Return what phases of the measured steps took on the GPU beyond their time on the host, without collectives.

    A phase's collectives are those that the host called in it, for their start on the GPU is not known. What is longer
    than the phase itself was waited for in the next one. Where nobody timed the collectives of a step, what is known of
    them is how long the GPU waited at a backward pass's end.
    """
    host, gpu = steps.phases, steps.gpu_phases
    names = tuple(sorted({*host.names, *gpu.names, BACKWARD}))
    on_host, talking = np.zeros((2, len(steps), len(names)))
    host_name, gpu_name = (
        np.array([names.index(name) for name in phases.names], dtype=np.int64) for phases in (host, gpu)
    )
    on_host[:, host_name] = host.times(len(steps))
    timed = (calls.called_ns != UNKNOWN) & (calls.start_ns != UNKNOWN) & (calls.end_ns != UNKNOWN)
    called = (steps.start_ns[calls.step] + calls.called_ns)[timed]
    order = np.argsort(called, kind="stable")
    until = np.concatenate([[0], np.cumsum((calls.end_ns - calls.start_ns)[timed][order])])
    first, last = (
        np.searchsorted(called[order], steps.start_ns[host.step] + times) for times in (host.start_ns, host.end_ns)
    )
    np.add.at(talking, (host.step, host_name[host.name]), until[np.maximum(first, last)] - until[first])
    is_timed = np.bincount(calls.step[timed], minlength=len(steps)) > 0
    known = calls.exposed_ns != UNKNOWN
    waited = np.bincount(calls.step[known], calls.exposed_ns[known], minlength=len(steps))
    talking[~is_timed] = 0
    talking[~is_timed, names.index(BACKWARD)] = waited[~is_timed]
    longer, is_there = np.zeros(on_host.shape), np.zeros(on_host.shape, dtype=np.bool_)
    left = np.zeros(len(steps))
    # The first phase of each step, then the second ones, and so on: what was left waits for the next one.
    place = np.arange(len(gpu.step)) - np.searchsorted(gpu.step, gpu.step)
    for number in range(int(place.max(initial=-1)) + 1):
        rows = np.flatnonzero(place == number)
        step, name, time = gpu.step[rows], gpu_name[gpu.name[rows]], (gpu.end_ns - gpu.start_ns)[rows]
        left[step] += talking[step, name]
        talking[step, name] = 0
        longer[step, name] += np.maximum(time - left[step] - on_host[step, name], 0)
        left[step] = np.maximum(left[step] - time, 0)
        is_there[step, name] = True
    used = np.flatnonzero(is_there[steps.named].any(axis=0))
    return StepParts(tuple(("kernels", names[at], "") for at in used.tolist()), longer[steps.named][:, used])


def clock_of(steps: StepColumns, which: Ints) -> float | None:
    """Return the median clock of the GPU in these steps, None if nobody recorded it."""
    clocks = steps.sm_mhz[which]
    known = clocks[(clocks != UNKNOWN) & (clocks != 0)]
    return float(np.median(known)) if len(known) else None


def waits_by_step(
    steps: Mapping[int, StepColumns], matched: Sequence[Matched], join: np.ufunc = np.add
) -> dict[int, Floats]:
    """Return for each rank how long it waited in the collectives of each measured step: in all, or as ``join`` says."""
    waits = {rank: np.zeros(len(columns)) for rank, columns in steps.items()}
    for match in matched:
        for here, rank in enumerate(match.ranks):
            if rank in waits:
                join.at(waits[rank], match.step[here], match.wait_ns[here].astype(np.float64))
    return {rank: values[steps[rank].named] for rank, values in waits.items()}


def lateness_by_step(steps: Mapping[int, StepColumns], matched: Sequence[Matched]) -> dict[int, Floats]:
    """Return for each rank and each of its measured steps the longest time that the median other rank waited for it."""
    lateness = {rank: np.zeros(len(columns)) for rank, columns in steps.items()}
    for match in matched:
        for to in np.unique(match.last[match.last >= 0]).tolist():
            if match.ranks[to] in lateness:
                mine = match.last == to
                np.maximum.at(
                    lateness[match.ranks[to]], match.step[to][mine], match.median_wait_ns[mine].astype(np.float64)
                )
    return {rank: values[steps[rank].named] for rank, values in lateness.items()}


def step_times(steps: StepColumns) -> list[float]:
    """Return the time from each measured step to the next; of one step, its own."""
    starts, ends = steps.start_ns[steps.named], steps.end_ns[steps.named]
    times: list[float] = (np.diff(starts) if len(starts) > 1 else ends - starts).astype(np.float64).tolist()
    return times


def median_of_parts(parts: Sequence[Parts]) -> Parts:
    """Return each part's median over ranks or steps."""
    keys = list({key for row in parts for key in row})
    table = np.array([[row.get(key, 0.0) for key in keys] for row in parts]).reshape(len(parts), len(keys))
    return dict(zip(keys, np.median(table, axis=0).tolist(), strict=True)) if keys else {}


def usual_time(phases: Phases, steps: StepColumns, phase: str) -> float:
    """Return how long a phase takes in the median measured step, by one of the tables of ``steps``."""
    times = phases.times_of(phase, len(steps))[steps.named]
    return float(np.median(times)) if len(times) else 0.0


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
        """Return the causes of its places."""
        return {cause for cause, _ in self.places}

    def of_cause(self, cause: Cause) -> Floats:
        """Return what each rank cost in each step by doing longer what has this cause, as (ranks, steps)."""
        longer = self.longer_ns[:, :, [at for at, (why, _) in enumerate(self.places) if why == cause]]
        cost: Floats = np.minimum(self.saved_ns, longer.sum(axis=2))
        return cost

    def of_place(self, rank: int, place: int) -> Floats:
        """Return what a rank cost in each step by taking longer at one place (both by position)."""
        cost: Floats = np.minimum(self.saved_ns[rank], self.longer_ns[rank, :, place])
        return cost

    def usual_beside(self, late: int) -> int:
        """Return the median one of the other ranks by what they did (its position)."""
        own = np.median(self.times_ns.sum(axis=2), axis=1)
        others: list[int] = [at for at in np.argsort(own, kind="stable").tolist() if at != late]
        return others[len(others) // 2] if self.is_exact else others[(len(others) - 1) // 2]


def sum_cost(accounts: Sequence[Account], saved_ns: Floats, step_ns: float) -> Cost:
    """Return what accounts of the same steps say that ranks cost, if ``saved_ns`` is what they saved (ranks, steps)."""
    places = sorted({part[:2] for account in accounts for part in account.own.parts})
    number = {place: at for at, place in enumerate(places)}
    times = np.zeros((*saved_ns.shape, len(places)))
    for mine, account in zip(times, accounts, strict=True):
        columns = np.array([number[part[:2]] for part in account.own.parts], dtype=np.int64)
        np.add.at(mine.T, columns, account.own.times_ns.T)
    longer = -saved_beside(times.reshape(len(accounts), -1)).reshape(times.shape)
    return Cost(tuple(accounts), saved_ns, tuple(places), times, longer, step_ns, accounts[0].is_exact)


def cost_by_accounts(accounts: Sequence[Account], steps: Mapping[int, StepColumns], matched: Sequence[Matched]) -> Cost:
    """Return what each rank cost by what each did by itself, and the communication that nothing hid.

    Kernels next to a collective that waits are slower: what the kernels of a place took longer than those of the
    quickest rank there counts as waiting, as far as their rank waited meanwhile.
    """
    waited = waits_by_step(steps, matched)
    # A damaged record may say less of its collectives than of what the rank did.
    count = min(min(len(account.own), len(waited[account.rank])) for account in accounts)
    exposed = np.array([account.exposed_ns[:count] for account in accounts])
    hidden = np.array([waited[account.rank][-len(account.own) :][:count] for account in accounts]) - exposed
    corrected = _subtract_slowed_kernels(accounts, count, np.maximum(hidden, 0.0))
    own = np.array([account.sums() for account in corrected])
    exposed += np.array([account.own.sums()[:count] for account in accounts]) - own
    usual = int(np.argsort(np.median(own, axis=1), kind="stable")[(len(accounts) - 1) // 2])
    did = [replace(account, own=own) for account, own in zip(accounts, corrected, strict=True)]
    return sum_cost(did, saved_beside(exposed), float(np.median(own[usual] + exposed[usual])))


def _subtract_slowed_kernels(accounts: Sequence[Account], count: int, hidden_ns: Floats) -> list[StepParts]:
    """Return what ranks did in the first steps, without what kernels were slower beside waiting collectives."""
    keys = sorted({key for account in accounts for key in account.own.parts if key[0] == "kernels"})
    kept = [account.own.within(slice(count)) for account in accounts]
    at = [[part.parts.index(key) if key in part.parts else -1 for key in keys] for part in kept]
    padded = [np.pad(part.times_ns, ((0, 0), (0, 1))) for part in kept]
    kernels = np.array([times[:, columns] for times, columns in zip(padded, at, strict=True)])
    slower = kernels - kernels.min(axis=0)
    total = slower.sum(axis=2)
    slower *= (np.minimum(total, hidden_ns) / np.maximum(total, 1.0))[:, :, None]
    for times, columns, less in zip(padded, at, slower, strict=True):
        times[:, columns] -= less
    return [replace(part, times_ns=times[:, :-1]) for part, times in zip(kept, padded, strict=True)]


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
