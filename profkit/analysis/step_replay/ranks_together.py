"""The steps of all ranks run together, and what is left of them if one rank is no longer late.

A rank comes to a collective when its stream does. The collective ends on all ranks at once: after the last one has come
to it, as long as it took that rank in the recording. No rank's clock is held against another's: their recorded steps
are laid side by side so that collectives end together. One factor on the time of all hosts makes the steps together as
long as unprofiled: how long a rank waited in collectives says nothing of its own speed. Where a GPU sets the pace many
factors do: then it is by how much hosts were quicker in steps without a profiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from profkit.analysis.step_replay import StepColumns
from profkit.analysis.step_replay.calibrate import AS_RECORDED, FASTEST, SLOWER_GPU, SLOWEST, USUAL_HOST, Fit
from profkit.analysis.step_replay.edits import CannotPredictError
from profkit.analysis.step_replay.limits import (
    Piece,
    RankRun,
    StepLimits,
    cut_before,
    find_limits,
    join_parts,
    place_lines,
)
from profkit.analysis.step_replay.predict import TimeAnswer
from profkit.analysis.step_replay.replay import (
    STEADY,
    Constants,
    Proof,
    Replayed,
    follow,
    prepare_result,
    prove,
    run_on,
)
from profkit.analysis.step_replay.steps import NOT_FITTED, ReplayedStep, StepReplay
from profkit.analysis.time_account.account import share_out
from profkit.run.lines import LineTime, lines_of_trainers

MOST_RANKS = 8
"""Each of so many ranks is replayed."""

ON_TIME = "on-time"
"""The edit that removes a rank's lateness."""

_MOST_ROUNDS = 16
"""A host that is ahead of its GPU fills the queue of launches in fewer steps."""
_HALVED = 7
"""A factor is found to a hundredth."""
_LARGEST_ERROR = 0.005
"""Ranks whose replay together ends further off than this share of the step: their prediction is not widened by it."""
_SPREAD = 0.08
"""By how much ranks' steps, of which the GPUs limit a part, are taken to differ from one run to the next."""


@dataclass(frozen=True, eq=False)
class RankStep:
    """One rank's step, its collectives in order, and when it began after the first rank's."""

    columns: StepColumns
    constants: Constants
    collectives: Sequence[int]
    begin_ns: int = 0


@dataclass(frozen=True)
class OnTime:
    """A step of all ranks by their replay, as it is and without the late rank; ``proof`` is of the step as recorded.

    ``factor`` is on the hosts' time, as unprofiled.
    """

    before_ns: int
    after_ns: int
    proof: Proof
    factor: float = 1.0


def predict_on_time(
    late: int,
    replays: Mapping[int, StepReplay],
    now_ns: int | None,
    unprofiled_ns: int | None,
    host_factor: float | None = None,
) -> TimeAnswer:
    """Return how long a step would take if rank ``late`` came to no collective after all others.

    ``now_ns`` is the measured step of all ranks, ``unprofiled_ns`` the same; None if it is as recorded. ``host_factor``
    is what makes the hosts' recorded time in phases that of steps without a profiler; the usual one if None.
    """
    edits = (f"{ON_TIME}:{late}",)
    try:
        steps = replay_on_time(replays, late, unprofiled_ns, host_factor or median(USUAL_HOST))
    except CannotPredictError as error:
        return TimeAnswer(now_ns, unprofiled_ns, None, AS_RECORDED, str(error), edits=edits)
    factors = [step.factor for step in steps]
    fit = Fit(min(factors), median(factors), max(factors))
    proof = max((step.proof for step in steps), key=lambda proof: abs(proof.error))
    if now_ns is None:
        return TimeAnswer(now_ns, unprofiled_ns, proof, fit, "how long a step takes is not known", edits=edits)
    after = [round(now_ns * step.after_ns / step.before_ns) for step in steps]
    expected_ns, reach_ns = round(median(after)), (max(after) - min(after)) / 2 / math.sqrt(len(after))
    spread_ns = _SPREAD * expected_ns
    width_ns = round(math.hypot(spread_ns, reach_ns))
    return TimeAnswer(
        now_ns,
        unprofiled_ns,
        proof,
        fit,
        low_ns=max(0, expected_ns - width_ns),
        expected_ns=expected_ns,
        high_ns=expected_ns + width_ns,
        assumptions=(
            f"the ranks' speed differs by ±{_SPREAD:.0%} from one run to the next",
            f"rank {late} comes to no collective after all others; its own work stays",
        ),
        widths_ns={
            "how speed differs between two processes": round(2 * spread_ns),
            "how recorded steps differ": round(2 * reach_ns),
        },
        edits=edits,
    )


def replay_on_time(
    replays: Mapping[int, StepReplay], late: int, unprofiled_ns: int | None = None, host_factor: float = 1.0
) -> list[OnTime]:
    """Return what each recorded step takes if rank ``late`` comes to no collective after all others.

    The hosts are as fast as makes it take ``unprofiled_ns`` before that; as recorded where it is None. Where the speed
    of no host does, since a GPU sets the pace, their time is scaled by ``host_factor``.

    Raises:
        CannotPredictError: a rank cannot be replayed, ranks do not make the same collectives, or the replay of all
            ranks together does not end as they did.
    """
    if len(replays) < 2 or late not in replays:
        raise CannotPredictError(f"there is no rank {late} beside others in this trace")
    found = []
    for step in _steps_of_ranks(replays):
        factor = step.find_factor(unprofiled_ns, host_factor)
        found.append(OnTime(step.run(factor).step_ns, step.run(factor, without=late).step_ns, step.proof, factor))
    return found


def _steps_of_ranks(replays: Mapping[int, StepReplay]) -> list[_StepOfRanks]:
    for rank, replay in replays.items():
        if replay.refusal not in (None, NOT_FITTED):
            raise CannotPredictError(f"rank {rank}: {replay.refusal}")
    count = min(len(replay.steps) for replay in replays.values())
    return [
        _join_steps({rank: (replay.steps[at - count], replay.constants) for rank, replay in replays.items()})
        for at in range(count)
    ]


@dataclass(frozen=True, eq=False)
class _StepOfRanks:
    """One recorded step of all ranks, laid side by side, what its collectives take, and its replay's proof."""

    steps: Mapping[int, ReplayedStep]
    recorded: Sequence[RankStep]
    wires: Sequence[int]
    proof: Proof

    def run(self, factor: float, without: int | None = None) -> SteadyRanks:
        at_speed = [
            # Between phases Python takes as long as recorded: what fits a rank by itself knows nothing of its waits.
            replace(rank, columns=_wait_longer(replace(step.phases, outside=1.0).scale_host(step.columns, factor)))
            for rank, (number, step) in zip(self.recorded, self.steps.items(), strict=True)
            if number != without
        ]
        return run_steadily_together(at_speed, self.wires)

    def find_factor(self, unprofiled_ns: int | None, host_factor: float) -> float:
        if unprofiled_ns is None:
            return 1.0
        if self.run(FASTEST).step_ns > (1 - SLOWER_GPU) * unprofiled_ns:
            return host_factor
        least, most = FASTEST, SLOWEST
        for _ in range(_HALVED):
            middle = (least + most) / 2
            is_slow = self.run(middle).step_ns > unprofiled_ns
            least, most = (least, middle) if is_slow else (middle, most)
        return (least + most) / 2


def _wait_longer(columns: StepColumns) -> StepColumns:
    """Return a step that begins with what the mean one waits longer for data: other ranks wait for that, too."""
    first_ns, *others_ns = columns.gap_ns
    return replace(columns, gap_ns=[first_ns + columns.late_ns, *others_ns], late_ns=0)


def _join_steps(steps: Mapping[int, tuple[ReplayedStep, Constants]]) -> _StepOfRanks:
    recorded = _lay_side_by_side([_rank_step(step, constants) for step, constants in steps.values()])
    wires = find_wires(recorded)
    together = run_together(recorded, wires)
    proof = prove(*((rank.columns, found) for rank, found in zip(recorded, together, strict=True)))
    if abs(proof.error) > _LARGEST_ERROR:
        raise CannotPredictError(f"the replay of all ranks together ends {abs(proof.error):.1%} off")
    return _StepOfRanks({rank: step for rank, (step, _) in steps.items()}, recorded, wires, proof)


def _rank_step(step: ReplayedStep, constants: Constants) -> RankStep:
    rows = [at for at, row in enumerate(step.columns.row.tolist()) if step.categories[row] == "communication"]
    return RankStep(step.columns, constants, rows)


def _lay_side_by_side(ranks: Sequence[RankStep]) -> list[RankStep]:
    if not ranks[0].collectives or len({len(rank.collectives) for rank in ranks}) > 1:
        raise CannotPredictError("the ranks do not make the same collectives in a step")
    ends = [[rank.columns.end_ns[row] for row in rank.collectives] for rank in ranks]
    begins = [round(median(a - b for a, b in zip(ends[0], own, strict=True))) for own in ends]
    return [replace(rank, begin_ns=begin) for rank, begin in zip(ranks, begins, strict=True)]


def find_wires(ranks: Sequence[RankStep]) -> list[int]:
    """Return how long each collective takes once all ranks have come to it: the shortest time of any rank."""
    durations = [[rank.columns.duration_ns[row] for row in rank.collectives] for rank in ranks]
    return [min(of_all) for of_all in zip(*durations, strict=True)]


def run_together(ranks: Sequence[RankStep], wires: Sequence[int]) -> list[Replayed]:
    """Run the steps of ranks side by side, each up to a collective before any goes on."""
    # What the collectives took in the recording counts for nothing.
    steps = [replace(rank.columns, duration_ns=list(rank.columns.duration_ns)) for rank in ranks]
    together = [prepare_result(step) for step in steps]
    running = [
        run_on(step, rank.constants, found, frozenset(rank.collectives))
        for step, rank, found in zip(steps, ranks, together, strict=True)
    ]
    # After the last collective, zip asks for another one: so all steps run to their ends.
    for at, (starts_ns, wire_ns) in enumerate(zip(zip(*running, strict=True), wires, strict=True)):
        begins_ns = [rank.begin_ns + start_ns for rank, start_ns in zip(ranks, starts_ns, strict=True)]
        end_ns = max(begins_ns) + wire_ns
        for rank, step, begin_ns in zip(ranks, steps, begins_ns, strict=True):
            step.duration_ns[rank.collectives[at]] = end_ns - begin_ns
    return together


@dataclass(frozen=True, eq=False)
class SteadyRanks:
    """A step of all ranks among others like it, as `profkit.analysis.step_replay.replay.Steady` is of one.

    Times count from when the first of these steps began on all ranks: it begins on each at its ``begin_ns``.
    """

    ranks: Sequence[RankStep]
    together: Sequence[Replayed]
    step_ns: int
    ended_ns: int

    def find_limits(self) -> list[tuple[int, Piece]]:
        pairs = zip(self.ranks, self.together, strict=True)
        return find_limits([RankRun(rank.columns, found, rank.collectives, rank.begin_ns) for rank, found in pairs])


def run_steadily_together(ranks: Sequence[RankStep], wires: Sequence[int]) -> SteadyRanks:
    """Run a step on all ranks again and again, each as soon as its host can.

    All ranks begin them at once, with idle GPUs: what one was ahead of another in the recording would be worked off at
    the pace of its GPU first, for as many steps as its queue holds.
    """
    ended_ns = step_ns = 0
    ranks = [replace(rank, columns=replace(rank.columns, free_ns={}, backlog_ns={}), begin_ns=0) for rank in ranks]
    for number in range(_MOST_ROUNDS):
        together = run_together(ranks, wires)
        before_ns, last_ns = step_ns, ended_ns
        ended_ns = max(rank.begin_ns + found.step_ns for rank, found in zip(ranks, together, strict=True))
        step_ns = ended_ns - last_ns
        if abs(step_ns - before_ns) <= STEADY * step_ns or number + 1 == _MOST_ROUNDS:
            break
        ranks = [
            replace(rank, columns=follow(rank.columns, found), begin_ns=rank.begin_ns + found.host_ns)
            for rank, found in zip(ranks, together, strict=True)
        ]
    return SteadyRanks(ranks, together, step_ns, last_ns)


def limit_ranks(
    replays: Mapping[int, StepReplay],
    now_ns: int | None,
    unprofiled_ns: int | None,
    host_factor: float | None,
    lines: Mapping[int, Sequence[LineTime]],
) -> StepLimits:
    """Return what limits the step of all ranks together, the middle one of the recorded ones by its length.

    ``lines`` are those of source of each rank; for the rest see `predict_on_time`.
    """
    try:
        steps = sorted(_steps_of_ranks(replays), key=lambda step: step.proof.recorded_ns)
    except CannotPredictError as error:
        return StepLimits(0, unprofiled_ns, None, AS_RECORDED, str(error))
    step = steps[len(steps) // 2]
    factor = step.find_factor(unprofiled_ns, host_factor or median(USUAL_HOST))
    steady = step.run(factor)
    step_ns = now_ns or steady.step_ns
    chain = steady.find_limits()
    of_step = [(at, left) for at, piece in chain for left in cut_before([piece], steady.ended_ns)]
    recorded = list(step.steps.items())
    parts = [
        (recorded[at][0], part)
        for at, piece in of_step
        for part in recorded[at][1].place(steady.ranks[at].columns, piece)
    ]
    times = share_out(step_ns, [part.time_ns for _, part in parts])
    parts = [(rank, part._replace(time_ns=time_ns)) for (rank, part), time_ns in zip(parts, times, strict=True)]
    by_rank = {rank: [part for of, part in parts if of == rank] for rank in replays}
    placed = {rank: place_lines(mine, lines.get(rank, ())) for rank, mine in by_rank.items()}
    return StepLimits(
        step_ns,
        unprofiled_ns,
        step.proof,
        Fit(factor, factor, factor),
        parts=join_parts(part for _, part in parts),
        lines=tuple(sorted((line for found, _ in placed.values() for line in found), key=lambda line: -line.time_ns)),
        unplaced_ns=sum(unplaced_ns for _, unplaced_ns in placed.values()),
        trainers=lines_of_trainers(line for of_rank in lines.values() for line in of_rank),
        calibrated_ns=steady.step_ns,
        by_rank={rank: sum(part.time_ns for part in mine) for rank, mine in by_rank.items()},
    )
