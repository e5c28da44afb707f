"""What the launcher asks of a target's processes, and what they leave for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from profkit.run.manifest import Process
from profkit.run.recording import (
    COMPLETE,
    CUT_SHORT,
    NOT_REACHED,
    VARIABLE,
    Failure,
    MemoryOptions,
    Order,
    has_recorded,
    leave_failure,
    leave_process,
    take_failures,
    take_processes,
)


@pytest.mark.parametrize("memory", [None, MemoryOptions("all", 5)])
def test_an_order_survives_the_environment(memory: MemoryOptions | None) -> None:
    order = Order("/a b", "memory", 1, None, depth=None, flops="any", memory=memory, own_steps=True)
    assert Order.from_environment({VARIABLE: order.to_json()}) == order


def test_the_first_rank_comes_first_and_the_files_go(tmp_path: Path) -> None:
    for rank in (10, 0, 1):
        leave_process(tmp_path, Process(f"rank{rank}", rank=rank, profiled=({"step_ns": rank},)))
    assert has_recorded(tmp_path)
    assert [one.profiled[0]["step_ns"] for one in take_processes(tmp_path)] == [0, 1, 10]
    assert list(tmp_path.iterdir()) == []
    assert not has_recorded(tmp_path)


def test_without_ranks_the_process_that_recorded_most_comes_first(tmp_path: Path) -> None:
    for name, state in (("1", NOT_REACHED), ("2", CUT_SHORT), ("3", COMPLETE)):
        leave_process(tmp_path, Process(name, state=state))
    assert [one.process for one in take_processes(tmp_path)] == ["3", "2", "1"]


def test_failures_are_taken_once_and_in_their_order_with_the_files_by_which_ranks_met(tmp_path: Path) -> None:
    for second, rank in enumerate((10, 2)):
        leave_failure(tmp_path, f"rank{rank}", Failure(f"ValueError: {rank}", rank))
        os.utime(tmp_path / f"failed-rank{rank}.json", (second, second))
    (tmp_path / "partial.meeting-arrived-0").touch()
    assert take_failures(tmp_path) == (Failure("ValueError: 10", 10), Failure("ValueError: 2", 2))
    assert list(tmp_path.iterdir()) == []
