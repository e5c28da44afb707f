"""The samples of a manifest as statistics per phase, unprofiled and profiled apart."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profkit.analysis.time_account.step_times import (
    PhaseTimes,
    StepTimes,
    read_step_times,
    summarize_samples,
    summarize_step_times,
)
from profkit.errors import RunError
from profkit.run.manifest import Manifest
from profkit.run.records import decode

TIMES = st.lists(st.integers(min_value=0, max_value=10**13), min_size=1, max_size=30)


def _steps(*times_ns: int, events: bool = False, **more: int) -> dict[str, Any]:
    steps = []
    for time_ns in times_ns:
        step = {**more, "forward_ns": time_ns // 4, "backward_ns": time_ns // 2, "step_ns": time_ns}
        if events:
            step |= {"forward_event_ns": time_ns // 8, "step_event_ns": time_ns // 2}
        steps.append(step)
    return {"steps": steps}


def _summarize(manifest: dict[str, Any]) -> StepTimes | None:
    return summarize_step_times(decode(Manifest, manifest))


def _phases(manifest: dict[str, Any]) -> dict[str, PhaseTimes]:
    times = _summarize(manifest)
    assert times is not None
    return {one.phase: one for one in times.phases}


def test_phases_are_in_order_and_the_step_is_last() -> None:
    phases = _phases({"clean": _steps(400, 440, 800, events=True), "profiled": _steps(480, 520)})
    assert list(phases) == ["forward", "backward", "step"]
    step = phases["step"]
    assert (step.clock, step.clean.median, step.clean.count) == ("wall", 440, 3)
    assert step.profiled is not None
    assert (step.profiled.median, step.profiled.count) == (500, 2)
    assert step.cost == pytest.approx(500 / 440 - 1)


def test_cuda_events_and_the_hosts_clock_are_both_read() -> None:
    attached = [{"backward_event_ns": 50, "optimizer_event_ns": 10, "step_ns": 100 + i} for i in range(4)]
    profiled = [{"backward_event_ns": 60, "optimizer_event_ns": 10, "step_ns": 130}]
    phases = _phases({"attached": {"steps": attached}, "profiled": {"steps": profiled}})
    assert {name: (one.clock, one.clean.median) for name, one in phases.items()} == {
        "backward": ("cuda-events", 50),
        "optimizer": ("cuda-events", 10),
        "step": ("wall", 101.5),
    }
    assert phases["backward"].cost == pytest.approx(0.2)


def test_contexts_are_kept_apart() -> None:
    clean, profiled = ({"steps": _steps(8, context=4)["steps"] + _steps(80, context=40)["steps"]} for _ in "ab")
    times = _summarize({"clean": clean, "profiled": profiled})
    assert times is not None
    assert [(one.context, one.phase, one.clean.median) for one in times.phases if one.phase != "backward"] == [
        (4, "forward", 2),
        (4, "step", 8),
        (40, "forward", 20),
        (40, "step", 80),
    ]


@pytest.mark.parametrize("manifest", [{}, {"clean": {"steps": []}, "profiled": None}, {"attached": {"steps": []}}])
def test_without_times_there_are_none(manifest: dict[str, Any]) -> None:
    assert _summarize(manifest) is None


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


@given(TIMES)
def test_statistics_equal_those_of_pythons_own_module(samples: list[int]) -> None:
    found = summarize_samples(samples)
    median = statistics.median(samples)
    assert found.count == len(samples)
    assert found.median == pytest.approx(median)
    assert found.median_absolute_deviation == pytest.approx(statistics.median(abs(one - median) for one in samples))
    assert found.mean == pytest.approx(statistics.fmean(samples))
    if len(samples) == 1:
        assert (found.standard_deviation, found.relative_deviation, found.p10, found.p90) == (None, None, *samples * 2)
        return
    deviation = statistics.stdev(samples)
    assert found.standard_deviation == pytest.approx(deviation, abs=1e-3)
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    assert (found.p10, found.p90) == (pytest.approx(deciles[0]), pytest.approx(deciles[-1]))
    if found.mean:
        assert found.relative_deviation == pytest.approx(deviation / found.mean, abs=1e-9)


def test_statistics_of_four_samples_worked_out_by_hand() -> None:
    found = summarize_samples([10, 12, 11, 40])
    assert found.median == 11.5
    assert found.median_absolute_deviation == 1.0  # distances 1.5, 0.5, 0.5, 28.5
    assert found.p10 == pytest.approx(10.3)  # 0.3 of the way from 10 to 11
    assert found.p90 == pytest.approx(31.6)  # 0.7 of the way from 12 to 40
    assert summarize_samples([2, 4]).standard_deviation == pytest.approx(2**0.5)


def test_no_samples_have_no_statistics() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize_samples([])


def test_a_step_that_waits_for_data_takes_its_mean_wait_and_the_median_of_the_rest() -> None:
    """Waits of 90, 0 and 0 (mean 30); the rest takes 10, 12 and 40 (median 12). The median step would be 12."""
    steps = [(100, 90), (12, 0), (40, 0)]
    manifest = {
        "attached": {"steps": [{"data_ns": wait, "step_ns": step} for step, wait in steps]},
        "profiled": {"steps": [{"data_ns": 20, "step_ns": 41}, {"data_ns": 0, "step_ns": 21}]},
    }
    times = _summarize(manifest)
    assert times is not None
    data, step = times.phases
    assert (data.phase, data.clean_ns, data.profiled_ns) == ("data", 30, 10)
    assert (step.phase, step.clean.median, step.clean_ns, step.profiled_ns) == ("step", 40, 42, 31)
    assert step.cost == 31 / 42 - 1


def test_steps_that_wait_for_nothing_keep_their_median() -> None:
    times = _summarize({"attached": {"steps": [{"data_ns": 0, "step_ns": step} for step in (1, 2, 9)]}})
    assert times is not None
    assert [(one.phase, one.clean_ns, one.clean_rate_ns) for one in times.phases] == [
        ("data", 0, None),
        ("step", 2, None),
    ]


def test_unprofiled_steps_take_their_own_waits_for_data_not_those_of_recorded_steps() -> None:
    """The queue was full before the recording: unprofiled steps waited for nothing, recorded ones for 46 on average."""
    manifest = {
        "attached": {"steps": [{"data_ns": 0, "step_ns": 2}] * 3},
        "profiled": {"steps": [{"data_ns": wait, "step_ns": wait + 3} for wait in (92, 0)]},
    }
    times = _summarize(manifest)
    assert times is not None
    assert [(one.phase, one.clean_ns, one.profiled_ns) for one in times.phases] == [("data", 0, 46), ("step", 2, 49)]
