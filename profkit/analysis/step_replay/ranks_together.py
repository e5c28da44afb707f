"""The steps of all ranks run together, and what is left of them if one rank is no longer late.

A rank comes to a collective when its stream does. The collective ends on all ranks at once: after the last one has come
to it, as long as it took that rank in the recording. No rank's clock is held against another's: their recorded steps
are laid side by side so that collectives end together. One factor on the time of all hosts makes the steps together as
long as unprofiled: how long a rank waited in collectives says nothing of its own speed. Where a GPU sets the pace many
factors do: then it is by how much hosts were quicker in steps without a profiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from profkit.analysis.step_replay.calibrate import AS_RECORDED, FASTEST, SLOWER_GPU, SLOWEST, USUAL_HOST, Fit
from profkit.analysis.step_replay.columns import StepColumns
from profkit.analysis.step_replay.edits import CannotPredictError
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
from profkit.analysis.step_replay.steps import LARGEST_ERROR, NOT_FITTED, ReplayedStep, StepReplay

ON_TIME = "on-time"
"""The edit that removes a rank's lateness."""

_MOST_ROUNDS = 16
"""A host that is ahead of its GPU fills the queue of launches in fewer steps."""
_HALVED = 7
"""A factor is found to a hundredth."""
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
    replays: Mapping[int, StepReplay],
    late: int,
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
        return TimeAnswer(edits, now_ns, unprofiled_ns, None, AS_RECORDED, str(error))
    factors = [step.factor for step in steps]
    fit = Fit(min(factors), median(factors), max(factors))
    proof = max((step.proof for step in steps), key=lambda proof: abs(proof.error))
    if now_ns is None:
        return TimeAnswer(edits, now_ns, unprofiled_ns, proof, fit, "how long a step takes is not known")
    after = [round(now_ns * step.after_ns / step.before_ns) for step in steps]
    expected_ns, reach_ns = round(median(after)), (max(after) - min(after)) / 2 / math.sqrt(len(after))
    spread_ns = _SPREAD * expected_ns
    width_ns = round(math.hypot(spread_ns, reach_ns))
    return TimeAnswer(
        edits,
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
    for rank, replay in replays.items():
        if replay.refusal not in (None, NOT_FITTED):
            raise CannotPredictError(f"rank {rank}: {replay.refusal}")
    if len(replays) < 2 or late not in replays:
        raise CannotPredictError(f"there is no rank {late} beside others in this trace")
    count = min(len(replay.steps) for replay in replays.values())
    by_step = [{rank: (r.steps[at - count], r.constants) for rank, r in replays.items()} for at in range(count)]
    return [_replay_step(steps, late, unprofiled_ns, host_factor) for steps in by_step]


def _replay_step(
    steps: Mapping[int, tuple[ReplayedStep, Constants]], late: int, unprofiled_ns: int | None, host_factor: float
) -> OnTime:
    recorded = _lay_side_by_side([_rank_step(step, constants) for step, constants in steps.values()])
    wires = find_wires(recorded)
    together = run_together(recorded, wires)
    proof = prove(*((rank.columns, found) for rank, found in zip(recorded, together, strict=True)))
    if abs(proof.error) > LARGEST_ERROR:
        raise CannotPredictError(f"the replay of all ranks together ends {abs(proof.error):.1%} off")

    def take_ns(factor: float, ranks: Collection[int]) -> int:
        numbered = zip(recorded, steps.items(), strict=True)
        at_speed = [
            # Between phases Python takes as long as recorded: what fits a rank by itself knows nothing of its waits.
            replace(rank, columns=replace(step.phases, outside=1.0).scale_host(step.columns, factor))
            for rank, (number, (step, _)) in numbered
            if number in ranks
        ]
        return _steady_step_ns(at_speed, wires)

    factor = 1.0
    if unprofiled_ns is not None:
        sets_pace = take_ns(FASTEST, steps) > (1 - SLOWER_GPU) * unprofiled_ns
        factor = host_factor if sets_pace else _find_factor(lambda by: take_ns(by, steps), unprofiled_ns)
    return OnTime(take_ns(factor, steps), take_ns(factor, steps.keys() - {late}), proof, factor)


def _find_factor(take_ns: Callable[[float], int], unprofiled_ns: int) -> float:
    """Return the factor on the hosts' time with which a step takes as long as unprofiled, or the nearest to it."""
    least, most = FASTEST, SLOWEST
    for _ in range(_HALVED):
        middle = (least + most) / 2
        least, most = (least, middle) if take_ns(middle) > unprofiled_ns else (middle, most)
    return (least + most) / 2


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


def _steady_step_ns(ranks: Sequence[RankStep], wires: Sequence[int]) -> int:
    """Return how long a step takes on all ranks that they make again and again, each as soon as its host can.

    All ranks begin them at once, with idle GPUs: what one was ahead of another in the recording would be worked off at
    the pace of its GPU first, for as many steps as its queue holds.
    """
    ended_ns = step_ns = 0
    ranks = [replace(rank, columns=replace(rank.columns, free_ns={}, backlog_ns={}), begin_ns=0) for rank in ranks]
    for _ in range(_MOST_ROUNDS):
        together = run_together(ranks, wires)
        before_ns, last_ns = step_ns, ended_ns
        ended_ns = max(rank.begin_ns + found.step_ns for rank, found in zip(ranks, together, strict=True))
        step_ns = ended_ns - last_ns
        if abs(step_ns - before_ns) <= STEADY * step_ns:
            break
        ranks = [
            replace(rank, columns=follow(rank.columns, found), begin_ns=rank.begin_ns + found.host_ns)
            for rank, found in zip(ranks, together, strict=True)
        ]
    return step_ns
