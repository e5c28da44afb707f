"""The steps of all ranks run together: collectives end at once, and a rank that is on time lets the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.step_replay.edits import CannotPredictError
from profkit.analysis.step_replay.ranks_together import RankStep, replay_on_time, run_together
from profkit.analysis.step_replay.replay import Constants, prepare
from tests.in_process import run_command
from tests.step_machine import LAUNCH, Doing, Machine

pytestmark = pytest.mark.usefixtures("read_once")

CONSTANTS = Constants(latency_ns=1_500, gap_ns=1_000, wake_ns=8_000)


def rank(*gaps_ns: int) -> RankStep:
    """Return a rank that computes for 10 µs and takes part in a collective, once for each pause of its host."""
    program = []
    for gap_ns in gaps_ns:
        program += [Doing(gap_ns, 4_000, LAUNCH, durations_ns=(10_000,)), Doing(0, 4_000, LAUNCH, durations_ns=(1,))]
    step = prepare(Machine(program, CONSTANTS).run().columns(), CONSTANTS)
    return RankStep(step, CONSTANTS, range(1, 2 * len(gaps_ns), 2))


def test_a_collective_ends_at_once_after_the_last_rank_has_come_to_it() -> None:
    ranks, wires = [rank(5_000, 5_000, 900_000), rank(400_000, 5_000, 5_000)], [70_000, 30_000, 50_000]
    first, second = run_together(ranks, wires)
    for at, wire in zip((1, 3, 5), wires, strict=True):
        assert first.end_ns[at] == second.end_ns[at] == max(first.start_ns[at], second.start_ns[at]) + wire
    assert first.start_ns[1] < second.start_ns[1]  # the second rank is late for the first collective
    assert first.start_ns[5] > second.start_ns[5]


def test_a_late_rank_that_is_on_time_lets_the_other_one_go_on(captures: Path) -> None:
    path = captures / "ddp.nsys2025.sqlite"
    opened = read_trace(path)
    replays = {number: opened.of_rank(number).step_replay for number in (0, 1)}
    for late, saves in ((1, True), (0, False)):
        for step in replay_on_time(replays, late):
            assert abs(step.proof.error) <= 0.005
            assert step.proof.operations_p95_ns <= 150_000
            assert (step.after_ns < 0.95 * step.before_ns) == saves
    for late in (2, -1):
        with pytest.raises(CannotPredictError, match="no rank"):
            replay_on_time(replays, late)
    data = json.loads(run_command("whatif", path, "--edit", "on-time:1", "--format", "json").stdout)["time"]
    after = data["after_ns"]
    assert after["low"] < after["expected"] < after["high"] < data["step_ns"]
    assert "on-time:1" in run_command("whatif", path, "--edit", "on-time:1").stdout


def test_of_one_process_no_rank_is_late(captures: Path) -> None:
    said = run_command("whatif", captures / "small.nsys2025.sqlite", "--edit", "on-time:0").stdout
    assert "no rank 0 beside others" in said
    refused = run_command("whatif", captures / "small.nsys2025.sqlite", "--edit", "on-time:first")
    assert refused.returncode == 2
    assert "write a rank's number" in refused.stderr
