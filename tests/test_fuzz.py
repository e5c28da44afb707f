"""Some mutants of every class; ``python -m tests.fuzz --count 50000`` reads as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.judge import judge, judge_all
from tests.fuzz.mutants import CLASSES, make

SEEDS = 25


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", CLASSES)
def test_no_mutant_stops_a_reader(kind: str, scratch: Path) -> None:
    verdicts = judge_all([(kind, seed) for seed in range(SEEDS)], scratch)
    assert [verdict for verdict in verdicts if verdict[1].is_failure] == []


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param("export bytes", 3749, id="a table's name is bytes"),
        pytest.param("snapshot order", 6634, id="a rest merges with free memory in front of it"),
        pytest.param("chrome names", 3075, id="a step's number has thousands of digits"),
        pytest.param("snapshot objects", 1528, id="the frames of an allocation are no list"),
        pytest.param("snapshot values", 3282, id="a mark is neither a start nor an end"),
        pytest.param("export bytes", 3234, id="two queries find different rows"),
        pytest.param("run directory", 6658, id="the allocator's own peak is negative"),
        pytest.param("export values", 701118, id="a time is a text of spaces"),
        pytest.param("export bytes", 801223, id="ranges are found in another number by rows and by all"),
        pytest.param("snapshot objects", 900778, id="the history of a block is no list of records"),
        pytest.param("run ranks", 800514, id="names of modules are missing in a light record"),
    ],
)
def test_a_mutant_that_once_failed_is_read_or_refused(kind: str, seed: int, scratch: Path) -> None:
    verdict = judge(kind, seed, scratch)
    assert not verdict.is_failure, verdict


def test_mutants_differ_and_come_again(tmp_path: Path) -> None:
    def content(seed: int) -> bytes:
        return make("export values", seed, tmp_path).path.read_bytes()

    assert content(1) == content(1)
    assert len({content(seed) for seed in range(8)}) > 4


def test_the_judge_sees_what_must_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by hand")

    assert not judge("export names", 0, tmp_path).is_failure
    monkeypatch.setattr("profkit.reading.open_trace", broken)
    monkeypatch.setattr("profkit.cli.kernels.open_trace", broken, raising=False)
    assert judge("export names", 0, tmp_path).outcome == "internal error"
