"""The ranks of one machine wait for each other through files in the run's directory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from profkit.capture import local_ranks  # noqa: E402
from profkit.capture.local_ranks import LocalRanks, describe_rank, recorded_together_by_nsys  # noqa: E402


def _rank(run: Path, number: int, count: int) -> LocalRanks:
    rank = LocalRanks(run)
    rank.number, rank.count = number, count
    return rank


def test_nobody_goes_on_before_all_have_come(tmp_path: Path) -> None:
    came: list[tuple[int, float]] = []
    went: list[float] = []

    def come(number: int) -> None:
        time.sleep(0.05 * number)
        came.append((number, time.monotonic()))
        assert _rank(tmp_path, number, 3).meet("arrived")
        went.append(time.monotonic())

    threads = [threading.Thread(target=come, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(went) == 3
    assert min(went) >= max(moment for _, moment in came)
    assert all(path.name.startswith("partial.") for path in tmp_path.iterdir()), "a run that failed is cleared of them"


def test_one_that_does_not_come_is_not_waited_for_in_vain(tmp_path: Path) -> None:
    begun = time.monotonic()
    assert not _rank(tmp_path, 0, 2).meet("arrived", patience_s=0.1)
    assert 0.1 <= time.monotonic() - begun < 5


def test_a_process_knows_its_rank_by_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert describe_rank().keys() == {"pid", "rank", "local_rank"}
    assert describe_rank()["rank"] is None
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (describe_rank()["rank"], describe_rank()["local_rank"]) == (9, 1)


def test_one_nsys_starts_and_stops_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def recorder(device: object) -> object:
        from contextlib import contextmanager

        @contextmanager
        def recorded() -> object:  # type: ignore[misc]
            told.append("start")
            yield
            told.append("stop")

        return recorded()

    class Local(threading.local):
        number = 0

    here = Local()
    monkeypatch.setattr(local_ranks, "recorded_by_nsys", recorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(local_ranks, "LocalRanks", lambda run: _rank(run, here.number, 2))

    def train(number: int) -> None:
        here.number = number
        with recorded_together_by_nsys(tmp_path, torch.device("cuda")):
            told.append(f"step of {number}")
        told.append(f"after {number}")

    threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told[0] == "start"
    assert sorted(told[1:3]) == ["step of 0", "step of 1"]
    assert told[3] == "stop"
    assert sorted(told[4:]) == ["after 0", "after 1"]
