"""The log of ranges in the program's process: what threads write, when it is full, and who else is shown a range."""

from __future__ import annotations

from collections.abc import Iterator
from time import time_ns

import pytest

torch = pytest.importorskip("torch")

from profkit.annotation import RangeObserver, annotate, ignore_ranges, observe_ranges  # noqa: E402
from profkit.capture.hooks.open_ranges import OpenRanges  # noqa: E402
from profkit.capture.hooks.range_log import LiveLog  # noqa: E402
from profkit.run.range_log import LEFT  # noqa: E402


class Observer(RangeObserver):
    """Notes what it is shown."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def opening(self, name: str) -> None:
        self.seen.append(name)

    def closed(self) -> None:
        self.seen.append("closed")


@pytest.fixture
def observer() -> Iterator[Observer]:
    observer = Observer()
    observe_ranges(observer)
    yield observer
    ignore_ranges(observer)


@pytest.fixture
def log() -> LiveLog:
    log = LiveLog(most_entries=8)
    log.is_on = True
    return log


def _entries(log: LiveLog) -> list[list[str]]:
    content = log.content()
    named = [
        ["left" if one == LEFT else content.names[one] for one in thread.entries[::2]] for thread in content.threads
    ]
    for thread in content.threads:
        assert thread.entries[1::2] == sorted(thread.entries[1::2])
        assert all(time_ns <= content.ended_ns for time_ns in thread.entries[1::2])
    return named


def test_it_is_full_after_as_many_entries_as_it_may_hold(log: LiveLog) -> None:
    opened = OpenRanges(RangeObserver(), None, log)
    for _ in range(2):
        assert not log.is_full
        opened.open("key", "range")
        opened.close("key")
    assert log.is_full


def test_a_range_that_began_before_the_log_is_not_left_in_it(log: LiveLog) -> None:
    opened = OpenRanges(RangeObserver(), None, log)
    log.is_on = False
    opened.open("before", "before")
    log.is_on = True
    opened.open("within", "within")
    opened.close("before")
    assert _entries(log) == [["within", "left"]]


def test_other_observers_are_shown_what_is_logged(log: LiveLog, observer: Observer) -> None:
    opened = OpenRanges(RangeObserver(), None, log)
    opened.open("key", "range")
    opened.close("key")
    assert observer.seen == ["range", "closed"]
    with annotate("the script's own"):
        pass
    assert observer.seen[2:] == ["the script's own", "closed"]


def test_the_scripts_own_ranges_are_logged_under_their_names(log: LiveLog) -> None:
    opened = OpenRanges(RangeObserver(), None, log)
    opened.note_opening(None, "epoch")
    opened.note_opening(None)
    opened.note_closed()
    opened.note_closed()
    assert _entries(log) == [["epoch", "left"]]
    assert opened.scripts == 0


def test_the_clock_is_read_around_waits_for_the_gpu(log: LiveLog, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(time_ns()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    log.read_clock()
    (readings,) = log.content().readings
    assert all(one.before_ns <= wait <= one.after_ns for one, wait in zip(readings, waits, strict=True))
    assert [thread.handle for thread in log.content().threads] == [readings[0].handle]


def test_a_capture_into_a_cuda_graph_is_not_waited_for(log: LiveLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("waited"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    log.read_clock()
    assert log.content().readings == []
