"""The samples of a manifest as statistics per phase, clean and profiled apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profkit.analysis.step_times import PhaseTimes, read_step_times, summarize_step_times
from profkit.errors import RunError


def _steps(*times_ns: int, events: bool = False, **more: int) -> dict[str, Any]:
    steps = []
    for time_ns in times_ns:
        step = {**more, "forward_ns": time_ns // 4, "backward_ns": time_ns // 2, "step_ns": time_ns}
        if events:
            step |= {"forward_event_ns": time_ns // 8, "step_event_ns": time_ns // 2}
        steps.append(step)
    return {"steps": steps}


def _phases(manifest: dict[str, Any]) -> dict[str, PhaseTimes]:
    times = summarize_step_times(manifest)
    assert times is not None
    return {one.phase: one for one in times.phases}


def test_phases_stand_beside_each_other_in_order_the_step_last() -> None:
    phases = _phases({"clean": _steps(400, 440, 800, events=True), "profiled": _steps(480, 520)})
    assert list(phases) == ["forward", "backward", "step"]
    step = phases["step"]
    assert (step.clock, step.clean.median, step.clean.count) == ("wall", 440, 3)
    assert step.profiled is not None
    assert (step.profiled.median, step.profiled.count) == (500, 2)
    assert step.cost == pytest.approx(500 / 440 - 1)
    assert step.on_gpu is not None
    assert step.on_gpu.median == 220
    assert phases["backward"].on_gpu is None


def test_a_scripts_backward_and_optimizer_leave_the_rest() -> None:
    attached = [{"backward_event_ns": 50, "optimizer_event_ns": 10, "step_ns": 100 + i} for i in range(4)]
    profiled = [{"backward_event_ns": 60, "optimizer_event_ns": 10, "step_ns": 130}]
    phases = _phases({"attached": {"label": "…", "steps": attached}, "profiled": {"steps": profiled}})
    assert {name: (one.clock, one.clean.median) for name, one in phases.items()} == {
        "backward": ("cuda-events", 50),
        "optimizer": ("cuda-events", 10),
        "rest": ("wall", 41.5),
        "step": ("wall", 101.5),
    }
    assert phases["backward"].cost == pytest.approx(0.2)
    assert phases["rest"].profiled is not None
    assert phases["rest"].profiled.median == 60


def test_steps_alone_have_no_rest() -> None:
    assert list(_phases({"attached": {"steps": [{"step_ns": 3}]}, "profiled": {"steps": []}})) == ["step"]


def test_contexts_are_kept_apart() -> None:
    clean, profiled = ({"steps": _steps(8, context=4)["steps"] + _steps(80, context=40)["steps"]} for _ in "ab")
    times = summarize_step_times({"clean": clean, "profiled": profiled})
    assert times is not None
    assert [(one.context, one.phase, one.clean.median) for one in times.phases if one.phase != "backward"] == [
        (4, "forward", 2),
        (4, "step", 8),
        (40, "forward", 20),
        (40, "step", 80),
    ]


@pytest.mark.parametrize("manifest", [{}, {"clean": {"steps": []}, "profiled": None}, {"attached": {"steps": []}}])
def test_without_times_there_are_none(manifest: dict[str, Any]) -> None:
    assert summarize_step_times(manifest) is None


def test_they_can_be_read_from_a_run_and_taken_to_pandas(tmp_path: Path) -> None:
    manifest = {"clean": _steps(400, 440, 800), "profiled": _steps(500, 500)}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    times = read_step_times(tmp_path)
    assert times is not None
    table = times.to_pandas().set_index("phase")
    assert table.loc["step", "clean_median"] == 440
    assert table.loc["forward", "profiled_p90"] == 125
    assert json.loads(json.dumps(times.to_dict()))["phases"][2]["clean"]["median_absolute_deviation"] == 40
    with pytest.raises(RunError):
        read_step_times(tmp_path / "elsewhere")
