"""What limits a step, as commands print it; its lanes before and after edits; the steps of all ranks run together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.step_replay.calibrate import AS_RECORDED, SLOWEST, find_phases
from profkit.analysis.step_replay.edits import CannotPredictError
from profkit.analysis.step_replay.lanes import CELLS
from profkit.analysis.step_replay.limits import Cause, Limit, LimitPart, StepLimits, place_lines
from profkit.analysis.step_replay.ranks_together import (
    RankStep,
    limit_ranks,
    replay_on_time,
    run_steadily_together,
    run_together,
)
from profkit.analysis.step_replay.replay import Constants, prepare, prove
from profkit.analysis.step_replay.steps import NOT_FITTED, ReplayedStep, StepReplay
from profkit.report.colours import LIMITS
from profkit.report.commands.answer import NAMES
from profkit.report.commands.efficiency import build_efficiency_document
from profkit.report.commands.steps import describe_limits, describe_line, limit_words, name_limits
from profkit.report.document import render
from profkit.report.units import format_share
from profkit.run.edits import parse_edits
from profkit.run.lines import LineTime
from tests.efficiency_runs import SMALL, notes_of
from tests.in_process import printed, run_command
from tests.step_machine import LAUNCH, Doing, Machine

pytestmark = pytest.mark.usefixtures("read_once")

KINETO = SMALL.with_name("small-train.kineto.json.gz")


@pytest.mark.parametrize("path", [SMALL, KINETO], ids=lambda path: path.name)
def test_shares_add_up_to_the_replayed_step(path: Path) -> None:
    limits = printed("efficiency", path)["step_limits"]
    assert limits["refusal"] is None
    assert sum(limits["limited_by"].values()) == limits["step_ns"]
    assert sum(part["time_ns"] for part in limits["parts"]) == limits["step_ns"]
    assert sum(limits["limits"].values()) == limits["step_ns"]
    assert sum(limits["limits"].get(name, 0) for name in ("python", "preparing", "waiting")) == limits["unplaced_ns"]
    assert any(part["module"] == "attention" and part["phase"] == "forward" for part in limits["parts"])
    assert sum(sum(causes.values()) for causes in limits["by_phase"].values()) == limits["step_ns"]
    assert set(limits["by_phase"]) >= {"forward", "backward", "optimizer"}
    assert abs(limits["replay"]["error"]) <= 0.005
    summary = printed("summary", path)
    assert summary["step_limits"] == limits


def test_of_several_ranks_all_are_taken_together_or_one(captures: Path) -> None:
    path = captures / "ddp.nsys2025.sqlite"
    together = printed("efficiency", path)["step_limits"]
    assert sum(together["by_rank"].values()) == sum(together["limited_by"].values()) == together["step_ns"] > 0
    for rank in ("0", "1"):
        limits = printed("efficiency", path, "--rank", rank)["step_limits"]
        assert limits["refusal"] is None
        assert sum(limits["limited_by"].values()) == limits["step_ns"] > 0


def test_a_capture_without_steps_or_with_losses_says_why_nothing_is_known(captures: Path) -> None:
    for name, why in (("hooks.nsys2025.sqlite", "holds no recorded step"), ("lossy.nsys2023.sqlite", "self-check")):
        limits = printed("efficiency", captures / name)["step_limits"]
        assert why in limits["refusal"]
        assert (limits["step_ns"], limits["limited_by"]) == (0, {})


def part(limit: Limit, time_ns: int, phase: str = "forward") -> LimitPart:
    return LimitPart(limit, "python", phase, None, time_ns)


def line(number: int, time_ns: int, phase: str | None = "forward", waits: float = 0.0, **more: Any) -> LineTime:
    return LineTime(
        "/a/train.py", number, "train", None, phase, more.pop("thread", "main"), 50, time_ns, 1, waits, **more
    )


def placed(pieces: list[LimitPart], lines: list[LineTime]) -> tuple[dict[tuple[str, int], int], int]:
    found, unplaced_ns = place_lines(pieces, lines)
    assert unplaced_ns >= 0
    assert sum(limit.time_ns for limit in found) + unplaced_ns == sum(
        piece.time_ns for piece in pieces if piece.limit != Limit.COMPUTING
    )
    return {(limit.limit.value, limit.line): limit.time_ns for limit in found}, unplaced_ns


def test_a_pause_goes_to_the_line_that_takes_about_as_long() -> None:
    pieces = [part(Limit.PYTHON, 2_000), part(Limit.PREPARING, 9_000), part(Limit.COMPUTING, 5_000)]
    assert placed(pieces, [line(7, 8_000), line(9, 2_100)]) == (
        {("python", 9): 2_000, ("preparing", 7): 8_000, ("preparing", 9): 100},
        900,
    )


def test_several_lines_fill_a_pause_that_none_of_them_makes_alone() -> None:
    lines = [line(7, 600), line(8, 300), line(9, 50, thread="worker")]
    assert placed([part(Limit.PYTHON, 1_000)], lines) == ({("python", 7): 600, ("python", 8): 300}, 100)


def test_lines_have_their_part_of_what_a_phase_prepares_and_no_other_phase() -> None:
    pieces = [part(Limit.PREPARING, 1_000), part(Limit.PREPARING, 500, "backward")]
    lines = [line(7, 3_000, waiting_ns=1_000), line(8, 2_000), line(9, 100, "optimizer")]
    assert placed(pieces, lines) == ({("preparing", 7): 500, ("preparing", 8): 500}, 500)


def test_waits_go_to_the_lines_that_wait_by_how_often_they_do() -> None:
    lines = [line(7, 0, waits=3.0), line(8, 0, waits=1.0), line(9, 0)]
    assert placed([part(Limit.WAITING, 400)], lines) == ({("waiting", 7): 300, ("waiting", 8): 100}, 0)


def test_the_wait_for_data_is_in_lines_outside_of_phases_if_none_knows_it() -> None:
    pause = part(Limit.PYTHON, 700, "data")
    assert placed([pause], [line(7, 700, None)]) == ({("python", 7): 700}, 0)
    assert placed([pause], [line(7, 700, None), line(8, 650, "data")]) == ({("python", 8): 650}, 50)


def test_calls_of_backward_are_no_culprits() -> None:
    called = replace(line(7, 900, "backward"), called="Tensor.backward")
    found, _ = place_lines([part(Limit.PREPARING, 900, "backward")], [called, line(8, 100, "backward")])
    limits = StepLimits(900, 900, None, AS_RECORDED, lines=found)
    assert [culprit.line for culprit in limits.lines_of(Limit.PREPARING)] == [8]


def test_a_range_is_limited_by_what_the_replay_says_of_it_as_the_summary_is() -> None:
    """Of SMALL's layers the GPU is busy most of the time, and their step waits for Python all the same."""
    trace = read_trace(SMALL)
    rows = trace.efficiency().ranges
    words = name_limits(rows, trace.step_limits)
    assert {words[path] for path in ("step *", "step */forward", "step */forward/layer */ffn")} == {"kernel launches"}
    assert limit_words(next(row for row in rows if row.path == "step */forward/layer */ffn")) != "kernel launches"
    assert name_limits(rows, None) == {row.path: limit_words(row) for row in rows}
    longer = replace(trace.step_limits, calibrated_ns=2 * trace.step_limits.step_ns)
    assert name_limits(rows, longer) == name_limits(rows, None)


def test_what_limits_a_range_in_the_table_is_not_named_again_as_what_it_also_waits_for() -> None:
    result = read_trace(SMALL).efficiency()
    forward = next(row for row in result.ranges if row.path == "step */forward")
    assert forward.idle is not None
    result = replace(result, ranges=(replace(forward, verdict="compute-bound"),))
    shown = notes_of(result)
    assert forward.launching_share > 0.2
    assert f"forward {format_share(forward.launching_share)} (kernel launches)" in shown
    limits = read_trace(SMALL).step_limits
    assert limits is not None
    with_limits = render(build_efficiency_document(result, (), limits=limits), "table")
    assert name_limits(result.ranges, limits) == {"step */forward": "kernel launches"}
    assert "Also idle" not in with_limits


@pytest.mark.parametrize(("waits", "said"), [(1.0, "(1 wait)"), (2.0, "(2 waits)"), (1.5, "(1.5 waits)")])
def test_one_wait_stands_in_the_singular(waits: float, said: str) -> None:
    assert describe_line(line(7, 600, waits=waits)).endswith(said)


# -- lanes -----------------------------------------------------------------------------------------------------------


def test_lanes_lie_within_their_step_in_order_and_show_an_edit() -> None:
    opened = read_trace(SMALL)
    lanes = opened.step_lanes(parse_edits(["cpu:×2"]))
    assert lanes is not None
    before, after = lanes
    assert before.step_ns == round(opened.account.recorded_step_ns() or 0)
    assert 0.4 * before.step_ns < after.step_ns < 0.7 * before.step_ns
    for step in lanes:
        assert list(step.lanes) == ["host", "GPU"]
        for spans in step.lanes.values():
            assert 0 < len(spans) <= CELLS
            assert all(earlier.end_ns <= later.start_ns for earlier, later in pairwise(spans))
            assert 0 <= spans[0].start_ns < spans[-1].end_ns <= step.step_ns
            assert {span.kind for span in spans} <= {*Limit}
        host = sum(span.end_ns - span.start_ns for span in step.lanes["host"])
        assert host > 0.9 * step.step_ns
    # The GPU does as much after as before, in half the time.
    assert [len(step.lanes["GPU"]) > 5 for step in lanes] == [True, True]


def test_every_limit_has_a_colour_and_a_name() -> None:
    assert set(LIMITS) == {*Limit}
    assert {*Limit} <= NAMES.keys()


def test_without_a_prediction_there_are_no_lanes() -> None:
    opened = read_trace(SMALL)
    for edit in ("cudnn-benchmark", "gradients:bf16", "no-wait:train.py:7"):
        assert opened.step_lanes(parse_edits([edit])) is None


# -- the steps of all ranks together ---------------------------------------------------------------------------------


CONSTANTS = Constants(latency_ns=1_500, gap_ns=1_000, wake_ns=8_000)


WIRE_NS, OUTSIDE_NS = 30_000, 900_000


def rank(*gaps_ns: int, computes_ns: int = 10_000) -> RankStep:
    """Return a rank that computes and takes part in a collective, once for each pause of its host."""
    program = []
    for gap_ns in gaps_ns:
        program += [
            Doing(gap_ns, 4_000, LAUNCH, durations_ns=(computes_ns,)),
            Doing(0, 4_000, LAUNCH, durations_ns=(1,)),
        ]
    step = prepare(Machine(program, CONSTANTS).run().columns(), CONSTANTS)
    return RankStep(step, CONSTANTS, range(1, 2 * len(gaps_ns), 2))


def record_together(*ranks: RankStep) -> dict[int, StepReplay]:
    """Return one step of each rank, recorded as they run together; a phase begins `OUTSIDE_NS` after the step."""
    replays = {}
    together = run_together(ranks, [WIRE_NS] * len(ranks[0].collectives))
    for number, (one, found) in enumerate(zip(ranks, together, strict=True)):
        columns = replace(
            one.columns,
            call_start_ns=found.call_start_ns,
            call_end_ns=found.call_end_ns,
            start_ns=found.start_ns,
            end_ns=found.end_ns,
            duration_ns=[end - start for start, end in zip(found.start_ns, found.end_ns, strict=True)],
        )
        # By itself the rank was fitted with Python between phases that takes half as long.
        phases = replace(find_phases(columns, {"forward": [(OUTSIDE_NS, found.host_ns)]}), outside=0.5)
        categories = {row: "communication" if row in one.collectives else "gemm" for row in columns.row.tolist()}
        calls, operations = len(columns.call_end_ns), len(columns.end_ns)
        places: list[Any] = [["forward"] * calls, [{}] * calls, [None] * calls, [None] * operations]
        step = ReplayedStep(columns, phases, prove((columns, found)), AS_RECORDED, {}, categories, *places)
        replays[number] = StepReplay(CONSTANTS, (step,), None, 0, NOT_FITTED)
    return replays


def test_a_collective_ends_at_once_after_the_last_rank_has_come_to_it() -> None:
    ranks, wires = [rank(5_000, 5_000, 900_000), rank(400_000, 5_000, 5_000)], [70_000, 30_000, 50_000]
    first, second = run_together(ranks, wires)
    for at, wire in zip((1, 3, 5), wires, strict=True):
        assert first.end_ns[at] == second.end_ns[at] == max(first.start_ns[at], second.start_ns[at]) + wire
    assert first.start_ns[1] < second.start_ns[1]  # the second rank is late for the first collective
    assert first.start_ns[5] > second.start_ns[5]


def test_what_collectives_took_at_first_makes_no_difference() -> None:
    ranks = [rank(5_000, 5_000, 900_000), rank(400_000, 5_000, 5_000)]
    ends = []
    for first_ns in (1, WIRE_NS, 5_000_000):
        columns = [replace(one.columns, duration_ns=[10_000, first_ns] * 3) for one in ranks]
        steps = [replace(one, columns=begun) for one, begun in zip(ranks, columns, strict=True)]
        ends.append([(found.end_ns, found.step_ns) for found in run_together(steps, [WIRE_NS] * 3)])
        assert all(one.columns.duration_ns == [10_000, first_ns] * 3 for one in steps)  # the recording stays
    assert ends[0] == ends[1] == ends[2]


def test_without_the_late_rank_a_host_that_was_ahead_of_its_gpu_makes_steps_at_its_own_pace() -> None:
    """Earlier collectives hold the first rank's stream for 30 ms: the second one's host takes 10 ms for a step."""
    ahead, late = rank(*[5_000] * 4, computes_ns=1_000_000), rank(*[2_500_000] * 4)
    ahead = replace(ahead, columns=replace(ahead.columns, free_ns={0: 30_000_000}))
    replays = record_together(ahead, replace(late, begin_ns=30_000_000))
    (step,), (other,) = replay_on_time(replays, 1), replay_on_time(replays, 0)
    assert step.proof.error == 0
    assert step.factor == 1
    assert (step.before_ns, other.after_ns) == (pytest.approx(10_032_000, rel=0.002),) * 2
    assert step.after_ns == pytest.approx(4 * (1_000_000 + WIRE_NS + 2 * CONSTANTS.gap_ns), rel=0.002)


def test_a_rank_that_was_many_steps_ahead_does_not_make_steps_at_the_pace_of_its_gpu() -> None:
    ahead, late = rank(*[1_000_000] * 4), rank(*[2_500_000] * 4)
    ahead = replace(ahead, columns=replace(ahead.columns, free_ns={0: 30_000_000}))
    (step,) = replay_on_time(record_together(ahead, replace(late, begin_ns=30_000_000)), 1)
    assert step.after_ns == pytest.approx(4 * 1_008_000, rel=0.002)


def test_one_factor_on_all_hosts_makes_the_step_as_long_as_unprofiled() -> None:
    """Neither pauses nor Python between phases get faster, and no rank has to be fitted by itself."""
    slow, pause_ns = 18 * 400_000, 2_000_000
    replays = record_together(rank(OUTSIDE_NS, *[200_000] * 19), rank(OUTSIDE_NS, pause_ns, *[400_000] * 18))
    stays_ns, launches_ns = OUTSIDE_NS + pause_ns, 20 * 8_000
    for factor in (0.4, 0.7):
        unprofiled_ns = round(stays_ns + factor * (slow + launches_ns))
        (step,) = replay_on_time(replays, 1, unprofiled_ns)
        assert step.factor == pytest.approx(factor, abs=0.01)
        assert step.before_ns == pytest.approx(unprofiled_ns, rel=0.01)
        assert step.after_ns == pytest.approx(OUTSIDE_NS + step.factor * (19 * 200_000 + launches_ns), rel=0.01)
    assert replay_on_time(replays, 1, 10**9)[0].factor == pytest.approx(SLOWEST, abs=0.01), "no host is that slow"
    replays[0] = replace(replays[0], refusal="it is damaged")
    with pytest.raises(CannotPredictError, match="rank 0: it is damaged"):
        replay_on_time(replays, 1)


def test_all_ranks_wait_for_the_data_that_one_waits_for_in_other_steps_than_the_recorded_ones() -> None:
    replays, late_ns = record_together(rank(*[5_000] * 4), rank(*[2_500_000] * 4)), 3_000_000
    (usual,) = replay_on_time(replays, 1)
    (step,) = replays[1].steps
    late = replace(step, columns=replace(step.columns, late_ns=late_ns))
    (waiting,) = replay_on_time({**replays, 1: replace(replays[1], steps=(late,))}, 1)
    assert waiting.before_ns == pytest.approx(usual.before_ns + late_ns, rel=0.001)
    assert waiting.after_ns == usual.after_ns


def test_where_a_gpu_sets_the_pace_hosts_are_as_fast_as_steps_without_a_profiler_say() -> None:
    """The late rank computes 30 ms; the other one's host takes 16 ms as recorded, and its GPU 4 ms."""
    waits = rank(OUTSIDE_NS, *[800_000] * 19, computes_ns=200_000)
    replays = record_together(waits, rank(OUTSIDE_NS, *[5_000] * 19, computes_ns=1_500_000))
    (step,) = replay_on_time(replays, 1, 30_000_000, 0.5)
    assert step.factor == 0.5
    (step,) = replay_on_time(replays, 1, round(1.02 * step.before_ns), 0.5)
    assert step.factor == 0.5, "tracing slows GPUs too"
    assert step.after_ns == pytest.approx(OUTSIDE_NS + 0.5 * (19 * 800_000 + 20 * 8_000), rel=0.01)
    (step,) = replay_on_time(replays, 1, 36_000_000, 0.5)
    assert step.factor == pytest.approx(SLOWEST, abs=0.01), "the GPU alone does not take as long"


def test_what_limits_the_step_of_all_ranks_is_followed_from_collective_to_the_rank_that_came_last() -> None:
    """Python of the first rank is long before the first collective, kernels of the second one before the others."""
    ranks = [rank(900_000, 5_000, 5_000), rank(5_000, 5_000, 5_000, computes_ns=200_000)]
    steady = run_steadily_together(ranks, [WIRE_NS] * 3)
    chain = steady.find_limits()
    assert all(earlier.end_ns == later.start_ns for (_, earlier), (_, later) in pairwise(chain))
    assert chain[-1][1].end_ns == steady.ended_ns + steady.step_ns
    by_rank = [[piece for at, piece in chain if at == number] for number in (0, 1)]
    python, computing = (
        sum(one.end_ns - one.start_ns for one in pieces if one.cause == cause)
        for pieces, cause in zip(by_rank, (Cause.PYTHON, Cause.OPERATION), strict=True)
    )
    assert python == pytest.approx(900_000, rel=0.02)
    assert computing == pytest.approx(2 * 200_000 + 2 * WIRE_NS, rel=0.02)


def test_of_several_ranks_a_limit_is_that_of_the_one_that_sets_the_pace() -> None:
    for python_ns, computes_ns, most in ((450_000, 10_000, Limit.PREPARING), (5_000, 400_000, Limit.COMPUTING)):
        late = rank(OUTSIDE_NS, *[python_ns] * 19, computes_ns=computes_ns)
        replays = record_together(rank(OUTSIDE_NS, *[200_000] * 19), late)
        limits = limit_ranks(replays, 20_000_000, None, None, {})
        assert limits.refusal is None
        assert (
            sum(part.time_ns for part in limits.parts) == sum(limits.by_rank.values()) == limits.step_ns == 20_000_000
        )
        assert sum(part.time_ns for part in limits.parts_of(most)) > 0.8 * limits.step_ns
        assert limits.by_rank[1] > 0.9 * limits.step_ns
        assert "of it on rank 1, which is late" in describe_limits(limits, 1)
        assert "late" not in describe_limits(limits)
    replays[0] = replace(replays[0], refusal="it is damaged")
    assert describe_limits(limit_ranks(replays, None, None, None, {})) == "unknown: rank 0: it is damaged"


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
    data = printed("whatif", path, "--edit", "on-time:1")["time"]
    after = data["after_ns"]
    assert after["low"] < after["expected"] < after["high"] < data["step_ns"]
    assert "on-time:1" in run_command("whatif", path, "--edit", "on-time:1").stdout


def test_of_one_process_no_rank_is_late(captures: Path) -> None:
    said = run_command("whatif", captures / "small.nsys2025.sqlite", "--edit", "on-time:0").stdout
    assert "no rank 0 beside others" in said
    refused = run_command("whatif", captures / "small.nsys2025.sqlite", "--edit", "on-time:first")
    assert refused.returncode == 2
    assert "write a rank's number" in refused.stderr
