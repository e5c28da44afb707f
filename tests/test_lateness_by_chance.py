"""Ranks that are late by chance are not named; one that is late in some steps for the same reason each time is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from profkit.analysis.ranks.comparison import RanksResult
from profkit.analysis.ranks.costs import Cost, chance_beside, chance_of_stalls, find_stalls, find_suspects, late_steps
from profkit.analysis.ranks.culprit import Verdict
from profkit.analysis.ranks.own_time import Cause
from profkit.cli import cli
from profkit.joining import read_ranks
from profkit.reading import open_capture
from profkit.report.commands.ranks import describe_ranks
from profkit.report.page.page import render_report
from profkit.run.directory import NSYS_EXPORT
from profkit.run.light_record import Collectives
from tests.rank_builder import (
    MS,
    PLACES,
    Delay,
    compare_records,
    compare_traced,
    in_each_step,
    late_rank,
    light_records,
    simulate,
    write_light_run,
    write_nsys,
)

pytestmark = pytest.mark.usefixtures("read_here")

STEP_NS = 1_000_000.0
DRAWN: dict[tuple[Cause, str], float] = {
    ("data", "data"): 0.05,
    ("python", "forward"): 0.25,
    ("python", "backward"): 0.55,
    ("python", "optimizer"): 0.15,
}
"""Place → its share of a step."""
_SHARES = np.array(list(DRAWN.values()))
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

    A step is 1,000,000 ns of four places. What a rank takes longer than usual in each of them is drawn; the others wait
    for the one that takes longest. What may be drawn:

    - white: each step by itself.
    - drift: neighbouring steps have a correlation of 0.8.
    - stalls: in 2 % of steps one of a third to one and a half steps, at a place in proportion to its time.
    - lead: each step by itself, but who was slow stays behind: hosts that their GPUs do not hold up keep their lead.
    - constant: each rank is quicker or slower than usual, in every step alike: those who are by 5 % of a step are late.

    ``delay`` is put into the last rank's backward in each ``every``-th step; it is a share of a step, as ``spread`` is.
    """
    longer = random.normal(size=(ranks, steps, len(DRAWN)))
    if kind == "drift":
        for step in range(1, steps):
            longer[:, step] = _CORRELATION * longer[:, step - 1] + np.sqrt(1 - _CORRELATION**2) * longer[:, step]
    longer *= spread * np.sqrt(_SHARES)
    truth = np.zeros(ranks)
    if kind == "stalls":
        stalls = random.random((ranks, steps)) < 0.02
        where = random.choice(len(DRAWN), (ranks, steps), p=_SHARES)
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
            places=tuple(DRAWN),
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


ONCE = 10**6


def _compare(folder: Path, ranks: int, steps: int, delays: Sequence[Delay]) -> list[RanksResult]:
    """Return what full traces and light records say of the same ranks."""
    lines = simulate(ranks, steps, delays)
    trace = write_nsys(folder / f"trace{len(list(folder.iterdir()))}.sqlite", lines)
    return [compare_traced(trace), compare_records(light_records(lines))]


def _noise(ranks: int, steps: int, draw: Callable[[int, int], float]) -> list[Delay]:
    """Return a delay for every rank and step, as long as ``draw`` says in milliseconds."""
    return [
        Delay(rank, "forward", round(max(draw(rank, step), 0.0) * MS), every=ONCE, first=step)
        for rank in range(ranks)
        for step in range(steps)
    ]


@pytest.mark.parametrize("steps", [3, 12])
@pytest.mark.parametrize("ranks", [2, 8])
def test_heavy_tails_name_nobody(tmp_path: Path, ranks: int, steps: int) -> None:
    random = np.random.default_rng([1, ranks, steps])
    for draw in (lambda *_: random.lognormal(0, 1.2), lambda *_: random.exponential(4), lambda *_: random.pareto(1.5)):
        for result in _compare(tmp_path, ranks, steps, _noise(ranks, steps, draw)):
            assert result.verdict.culprit is None


def test_ranks_that_take_turns_name_nobody_and_the_turns_are_said(tmp_path: Path) -> None:
    turns = [Delay(rank, "data", 15 * MS, every=2, first=rank) for rank in (0, 1)]
    for result in _compare(tmp_path, 2, 12, turns):
        assert result.verdict.culprit is None
        assert set(result.verdict.turns) == {0, 1}
    trace = write_nsys(tmp_path / "turns.sqlite", simulate(2, 12, turns))
    text = " ".join(CliRunner().invoke(cli, ["ranks", str(trace)]).stdout.split())
    assert "Steps in which the others wait at least 5.0% of a step for one rank: 6 for rank 1, 5 for rank 0" in text


def test_one_step_of_a_second_names_nobody(tmp_path: Path) -> None:
    for steps in (3, 4, 12):
        for result in _compare(tmp_path, 4, steps, [Delay(2, "data", 1000 * MS, every=ONCE, first=2)]):
            assert result.verdict.culprit is None


@pytest.mark.parametrize("place", ["data", "forward", "optimizer", "kernels"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_is_late_every_fourth_step_is_named_with_its_share(tmp_path: Path, ranks: int, place: str) -> None:
    random = np.random.default_rng(4)
    noise = _noise(ranks, 24, lambda *_: random.exponential(0.2))
    for result in _compare(tmp_path, ranks, 24, [*noise, Delay(0, place, 40 * MS, every=4, first=3)]):
        found = late_rank(result)
        # The last delay of the optimizer comes after the last collective.
        assert (found.rank, found.late_steps, found.is_always) == (0, 5 if place == "optimizer" else 6, False)
        assert found.cause == {"data": "data", "kernels": "kernels"}.get(place, "python")
        assert found.phase.endswith({"kernels": "forward"}.get(place, place))
        assert found.late_ns == pytest.approx(40 * MS, rel=0.05)
        assert found.gain_ns == pytest.approx(40 * MS * found.late_steps / found.steps, rel=0.05)


@pytest.mark.parametrize("place", PLACES)
def test_a_constant_delay_is_named_among_heavy_tails(tmp_path: Path, place: str) -> None:
    random = np.random.default_rng(5)
    noise = _noise(4, 16, lambda *_: random.lognormal(-1, 1))
    for result in _compare(tmp_path, 4, 16, [*noise, Delay(3, place, 18 * MS)]):
        assert late_rank(result).rank == 3
        assert late_rank(result).is_always


@pytest.mark.parametrize(("kind", "spread"), list(cells()))
@pytest.mark.parametrize(("ranks", "steps"), [(2, 24), (8, 8)])
def test_in_recordings_in_which_nobody_is_late_hardly_anybody_is_called_so(
    kind: str, spread: float, ranks: int, steps: int
) -> None:
    # Of 150 recordings with a chance of 1 % each, more than 6 would be called so once in 1,500 times.
    assert false_alarms(6, kind, spread, ranks, steps, 150) <= 6


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("steps", "least"), [(8, 54), (24, 57)])
def test_a_delay_of_a_tenth_of_a_step_is_found(ranks: int, steps: int, least: int) -> None:
    assert found_delays(7, "white", 0.01, ranks, steps, 60, delay=0.1) >= least


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_delay_in_every_fourth_step_is_found(ranks: int) -> None:
    assert found_delays(8, "white", 0.02, ranks, 24, 60, delay=0.5, every=4) >= 50


def test_the_chance_of_stalls_is_binomial() -> None:
    assert chance_of_stalls(3, 3, 2, 0.5) == pytest.approx(0.25**3)
    assert chance_of_stalls(1, 2, 1, 0.5) == pytest.approx(0.75)
    assert chance_of_stalls(3, 3, 2, 0.0) == pytest.approx(0.01**3)


def _behind(steps: int, behind_ms: Callable[[int], float]) -> Verdict:
    """Return who is late where rank 0 waits for rank 1 in each step, and rank 1 does nothing longer."""
    records = light_records(simulate(2, steps))
    waiting = []
    for number, step in enumerate(records[0].steps):
        starts = [start for start in step.collectives.start_ns if start is not None]
        earlier = [start - round(behind_ms(number) * MS) for start in starts]
        waiting.append(replace(step, collectives=replace(step.collectives, start_ns=earlier)))
    return compare_records([replace(records[0], steps=tuple(waiting)), *records[1:]]).verdict


def test_a_host_that_was_slow_once_and_is_still_behind_costs_nothing_in_the_steps_after() -> None:
    """The others wait for it in every step, but it does nothing longer than they."""
    verdict = _behind(16, lambda step: 9)
    assert (verdict.culprit, verdict.most_rank) == (None, 1)
    assert verdict.most_ns == pytest.approx(9 * MS, rel=0.01)
    assert verdict.doubt == "unexplained"


def test_a_rank_that_is_behind_by_chance_is_not_late_for_unknown_reasons() -> None:
    verdict = _behind(5, lambda step: (0, 12, 1, 9, 3)[step])
    assert (verdict.culprit, verdict.most_rank, verdict.doubt) == (None, 1, "few")
    assert verdict.most_ns == pytest.approx(6 * MS, rel=0.01)


@pytest.mark.parametrize(("is_late_without_it", "on_gpu"), [(False, True), (True, True), (False, False)])
def test_what_hosts_do_in_steps_that_no_profiler_recorded_tells_whether_it_slowed_one(
    tmp_path: Path, is_late_without_it: bool, on_gpu: bool
) -> None:
    slow = [Delay(1, "forward", 20 * MS)]
    records = light_records(simulate(2, 20, slow if is_late_without_it else ()))
    if not on_gpu:  # a host's phases hold its waits then, so that they say nothing of how long it would take alone
        records = [in_each_step(one, gpu_phases=()) for one in records]
    run = write_light_run(tmp_path / "run", records)
    write_nsys(run / NSYS_EXPORT, [line.part(8, 17) for line in simulate(2, 20, slow)])
    verdict = read_ranks(run).verdict
    if is_late_without_it or not on_gpu:
        assert (verdict.culprit.rank, verdict.culprit.cause, verdict.culprit.phase) == (1, "python", "forward")
    else:
        assert (verdict.culprit, verdict.doubt) == (None, "profiler")
    # The page of the run says the same.
    page = unescape(render_report(open_capture(run)))
    assert all(line in page for line in describe_ranks(read_ranks(run)))


def test_a_step_whose_collectives_one_rank_lost_does_not_count() -> None:
    records = light_records(simulate(4, 10, [Delay(1, "data", 9 * MS)]))
    steps = [replace(one, collectives=Collectives()) if at == 7 else one for at, one in enumerate(records[3].steps)]
    found = late_rank(compare_records([*records[:3], replace(records[3], steps=tuple(steps))]))
    assert (found.rank, found.late_steps, found.steps) == (1, 8, 8)


def test_ranks_that_drift_in_a_trace_name_nobody_and_it_is_said(tmp_path: Path) -> None:
    slower = [Delay(1, "forward", step * MS // 2, every=ONCE, first=step) for step in range(16)]
    for result in _compare(tmp_path, 2, 16, slower):
        assert result.verdict.culprit is None
        assert result.verdict.doubt == "varies"


def test_many_ranks_that_are_alike_show_a_small_delay_in_few_steps() -> None:
    found = late_rank(compare_records(light_records(simulate(64, 5, [Delay(1, "data", 3 * MS)]))))
    assert (found.rank, found.cause) == (1, "data")
    assert compare_records(light_records(simulate(8, 5, [Delay(1, "data", 3 * MS)]))).verdict.doubt == "few"
    assert found_delays(2, "white", 0.02, 64, 8, 10, delay=0.1) == 10


def test_beside_ranks_that_are_alike_stalls_in_half_of_few_steps_do_not_accuse() -> None:
    others = np.zeros((63, 4))
    assert chance_beside(np.array([0.5, 0.0, 0.0, 0.5]), others, 1.0) > 0.1
    assert chance_beside(np.array([0.5, 0.5, 0.0, 0.5]), others, 1.0) < 0.001
    assert chance_beside(np.array([0.5, 0.5, 0.5]), others[:, :3], 1.0) == 1.0, "too few steps to tell"


def test_a_rank_that_is_as_late_as_many_others_is_late_by_chance() -> None:
    others = np.random.default_rng(3).normal(0, 0.05, 63)[:, None] + np.zeros((63, 8))
    assert chance_beside(np.full(8, 0.1), others, 1.0) > 0.01
    assert chance_beside(np.full(8, 0.5), others, 1.0) < 1e-6
