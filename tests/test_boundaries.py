"""Where a step begins in a script with ranges of its own: outside those that belong to one step."""

from __future__ import annotations

import pytest

from profkit.capture.steps.boundaries import Boundaries


class Loop:
    """A script's ranges as a number, and the steps that begin, each with how many ranges are open there."""

    def __init__(self) -> None:
        self.depth = 0
        self.begun: list[tuple[int, int]] = []
        self.with_range: int | None = None
        """The number of the step that a range opens with, and closes with."""
        self.boundaries = Boundaries(self._begin, lambda: self.depth)

    def _begin(self, number: int) -> None:
        if self.with_range is not None and number == self.with_range + 1:
            self.close()
        self.begun.append((number, self.depth))
        if number == self.with_range:
            self.open()

    def open(self) -> None:
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.boundaries.range_closed()

    def work(self) -> None:
        self.boundaries.work_begins()


@pytest.fixture
def loop() -> Loop:
    return Loop()


def _train(loop: Loop, first: int, last: int, *, ranges: int = 0) -> None:
    for number in range(first, last):
        for _ in range(ranges):
            loop.open()
        loop.work()
        if number == 0:
            loop.boundaries.due(0)
        loop.boundaries.due(number + 1)
        for _ in range(ranges):
            loop.close()


def test_without_ranges_a_step_begins_where_it_is_due(loop: Loop) -> None:
    _train(loop, 0, 3)
    assert loop.begun == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("ranges", [1, 2])
def test_a_step_begins_after_the_ranges_around_the_one_before_it(ranges: int, loop: Loop) -> None:
    _train(loop, 0, 3, ranges=ranges)
    assert loop.begun == [(0, ranges), (1, 0), (2, 0), (3, 0)]


def test_a_range_that_opens_with_a_step_and_closes_with_it_holds_that_step_alone(loop: Loop) -> None:
    """As the range around the step whose work is counted, which the recording opens and closes at its boundaries."""
    loop.with_range = 1
    _train(loop, 0, 3, ranges=1)
    assert loop.begun == [(0, 1), (1, 0), (2, 0), (3, 0)]


def test_a_range_around_the_whole_loop_holds_all_steps(loop: Loop) -> None:
    loop.open()
    _train(loop, 0, 3)
    loop.work()
    assert loop.begun == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_range_around_an_epoch_costs_one_boundary_and_no_more(loop: Loop) -> None:
    _train(loop, 0, 2)
    loop.open()
    _train(loop, 2, 5)
    assert loop.begun == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)], "its first two steps are one"


def test_counting_anew_forgets_what_waited(loop: Loop) -> None:
    loop.boundaries.due(0)
    loop.open()
    loop.boundaries.due(1)
    loop.boundaries.due(1)
    loop.close()
    assert loop.begun == [(0, 0), (1, 0)]
