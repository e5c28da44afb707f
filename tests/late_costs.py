"""What ranks cost each other in recordings in which nobody is late, or one is: drawn at random, seeded.

A step is 1,000,000 ns of four places. What a rank takes longer than usual in each of them is drawn; the others wait for
the one that takes longest. What may be drawn:

- white: each step by itself.
- drift: neighbouring steps have a correlation of 0.8.
- stalls: in 2 % of steps one of a third to one and a half steps, at a place in proportion to its time.
- lead: each step by itself, but who was slow stays behind: hosts that their GPUs do not hold up keep their lead.
- constant: each rank is quicker or slower than usual, in every step alike: those who are by 5 % of a step are late.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from profkit.analysis.ranks.costs import Cost, find_stalls, find_suspects, late_steps
from profkit.analysis.ranks.own_time import Cause

STEP_NS = 1_000_000.0
PLACES: dict[tuple[Cause, str], float] = {
    ("data", "data"): 0.05,
    ("python", "forward"): 0.25,
    ("python", "backward"): 0.55,
    ("python", "optimizer"): 0.15,
}
"""Place → its share of a step."""
_SHARES = np.array(list(PLACES.values()))
_CORRELATION = 0.8
_BACKWARD = 2


def draw(
    random: np.random.Generator,
    kind: str,
    spread: float,
    ranks: int,
    steps: int,
    *,
    delay: float = 0.0,
    every: int = 1,
) -> tuple[Cost, np.ndarray]:
    """Return what ranks cost, and by what share of a step each is later than the median of the others in truth.

    ``delay`` is put into the last rank's backward in each ``every``-th step; it is a share of a step, as ``spread`` is.
    """
    longer = random.normal(size=(ranks, steps, len(PLACES)))
    if kind == "drift":
        for step in range(1, steps):
            longer[:, step] = _CORRELATION * longer[:, step - 1] + np.sqrt(1 - _CORRELATION**2) * longer[:, step]
    longer *= spread * np.sqrt(_SHARES)
    truth = np.zeros(ranks)
    if kind == "stalls":
        stalls = random.random((ranks, steps)) < 0.02
        where = random.choice(len(PLACES), (ranks, steps), p=_SHARES)
        at, when = np.nonzero(stalls)
        longer[at, when, where[at, when]] += random.uniform(0.3, 1.5, len(at))
    if kind == "constant":
        truth = random.normal(0, 0.02, ranks)
        longer += truth[:, None, None] * _SHARES
    longer[-1, every - 1 :: every, _BACKWARD] += delay
    truth[-1] += delay
    late = longer.sum(axis=2)
    if kind == "lead":
        late = np.clip(np.cumsum(late, axis=1), -1.0, 1.0)
    return (
        Cost(
            accounts=(),
            saved_ns=_beyond_others(late) * STEP_NS,
            places=tuple(PLACES),
            times_ns=(_SHARES + longer) * STEP_NS,
            longer_ns=_beyond_others(longer) * STEP_NS,
            step_ns=STEP_NS,
            is_exact=False,
        ),
        _beyond_others(truth),
    )


def _beyond_others(values: np.ndarray) -> np.ndarray:
    return np.stack([values[at] - np.median(np.delete(values, at, axis=0), axis=0) for at in range(len(values))])


def who_is_late(cost: Cost) -> tuple[int, bool] | None:
    """Return who is called late, and whether as a rule; None if nobody is."""
    for rank, cause, late_ns in find_suspects(cost):
        if late_steps(late_ns, cost, rank, cause) is not None:
            return rank, True
    stalls = find_stalls(cost)
    return None if stalls is None else (stalls[0], False)


def false_alarms(seed: int, kind: str, spread: float, ranks: int, steps: int, count: int) -> int:
    """Return in how many of ``count`` recordings a rank is called late that is not late by even 3 % of a step."""
    random = np.random.default_rng([seed, ranks, steps])
    found = 0
    for _ in range(count):
        cost, truth = draw(random, kind, spread, ranks, steps)
        named = who_is_late(cost)
        found += named is not None and truth[named[0]] < 0.03
    return found


def found_delays(
    seed: int, kind: str, spread: float, ranks: int, steps: int, count: int, *, delay: float, every: int = 1
) -> int:
    """Return in how many of ``count`` recordings the rank with a delay is called late."""
    random = np.random.default_rng([seed, ranks, steps])
    return sum(
        named is not None and named[0] == ranks - 1
        for named in (
            who_is_late(draw(random, kind, spread, ranks, steps, delay=delay, every=every)[0]) for _ in range(count)
        )
    )


def cells() -> Iterator[tuple[str, float]]:
    """Yield what is drawn, and its standard deviation as a share of a step."""
    yield from (("white", 0.03), ("white", 0.1), ("drift", 0.02), ("drift", 0.03), ("stalls", 0.02))
    yield from (("lead", 0.05), ("constant", 0.01))
