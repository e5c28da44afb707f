"""Ranks that are late by chance are not named; one that is late in some steps for the same reason each time is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from profkit.analysis.collectives.comparison import RanksResult, compare_records
from profkit.analysis.collectives.reduce import reduce_ranks
from profkit.cli import cli
from profkit.reading import open_trace
from tests.rank_builder import MS, PLACES, Delay, light_records, simulate, write_kineto_run, write_nsys

ONCE = 10**6


def _compare(folder: Path, ranks: int, steps: int, delays: Sequence[Delay]) -> list[RanksResult]:
    """Return what full traces and light records say of the same ranks."""
    lines = simulate(ranks, steps, delays)
    trace = write_nsys(folder / f"trace{len(list(folder.iterdir()))}.sqlite", lines)
    return [compare_records(reduce_ranks(open_trace(trace), {})), compare_records(light_records(lines))]


def _noise(ranks: int, steps: int, draw: Callable[[int, int], float], place: str = "forward") -> list[Delay]:
    """Return a delay for every rank and step, as long as ``draw`` says in milliseconds."""
    return [
        Delay(rank, place, round(max(draw(rank, step), 0.0) * MS), every=ONCE, first=step)
        for rank in range(ranks)
        for step in range(steps)
    ]


@pytest.mark.parametrize("steps", [3, 5, 12, 40])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_heavy_tails_name_nobody(tmp_path: Path, ranks: int, steps: int, seed: int) -> None:
    random = np.random.default_rng([seed, ranks, steps])
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
    assert "Single steps in which others wait that long for a rank: rank 1 6 times, rank 0 5 times" in text


@pytest.mark.parametrize("steps", [3, 4, 12])
def test_one_step_of_a_second_names_nobody(tmp_path: Path, steps: int) -> None:
    for result in _compare(tmp_path, 4, steps, [Delay(2, "data", 1000 * MS, every=ONCE, first=2)]):
        assert result.verdict.culprit is None


def test_batches_of_uneven_length_name_nobody(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    for result in _compare(tmp_path, 8, 20, _noise(8, 20, lambda *_: random.uniform(0, 12), "kernels")):
        assert result.verdict.culprit is None
        assert len(result.verdict.turns) > 3


@pytest.mark.parametrize("place", ["data", "forward", "optimizer", "kernels"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_is_late_every_fourth_step_is_named_with_its_share(tmp_path: Path, ranks: int, place: str) -> None:
    random = np.random.default_rng(4)
    noise = _noise(ranks, 24, lambda *_: random.exponential(0.2))
    for result in _compare(tmp_path, ranks, 24, [*noise, Delay(0, place, 40 * MS, every=4, first=3)]):
        found = result.verdict.culprit
        assert found is not None
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
        assert result.verdict.culprit is not None
        assert result.verdict.culprit.rank == 3
        assert result.verdict.culprit.is_always


def test_what_people_read_of_a_rank_that_saves_every_fourth_step(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", simulate(2, 13, [Delay(0, "optimizer", 40 * MS, every=4)]))
    text = " ".join(CliRunner().invoke(cli, ["ranks", str(run)]).stdout.split())
    assert "Rank 0 is late in 3 of 12 steps (25.0%), by 40.0" in text
    assert "Its extra time in these steps: 40.0" in text
    assert "less on average" in text
