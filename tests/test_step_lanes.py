"""The lanes of a step before and after edits: in the picture of what-if, and on the page."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from profkit import read_trace
from profkit.analysis.step_replay.lanes import CELLS
from profkit.analysis.step_replay.limits import Limit
from profkit.report.colours import LIMITS
from profkit.report.commands.answer import NAMES
from profkit.run.edits import parse_edits
from tests.efficiency_runs import SMALL
from tests.in_process import run_command


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
    for edit in ("compile", "gradients:bf16", "no-wait:train.py:7"):
        assert opened.step_lanes(parse_edits([edit])) is None


def test_what_if_draws_them(tmp_path: Path) -> None:
    path = tmp_path / "lanes.png"
    assert run_command("whatif", SMALL, "--edit", "cpu:×2", "--plot", path).returncode == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    refused = run_command("whatif", SMALL, "--edit", "compile", "--plot", tmp_path / "none.png")
    assert refused.returncode == 2
    assert "its time is not predicted" in refused.stderr
