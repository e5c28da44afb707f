"""The times of steps: statistics of each phase, as a run shows them, and compared with those of another run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profkit.analysis.compare.comparison import compare_unprofiled
from profkit.analysis.time_account.step_times import (
    StepTimes,
    mark_rare_steps,
    read_step_times,
    summarize_samples,
    summarize_step_times,
)
from profkit.errors import RunError
from profkit.report.commands.steps import clean_times_parts
from profkit.report.document import Document, Table, render
from profkit.run import decode
from profkit.run.manifest import Manifest, Samples
from tests.golden import check_text

TIMES = st.lists(st.integers(min_value=0, max_value=10**13), min_size=1, max_size=30)


def _steps(*times_ns: int) -> dict[str, Any]:
    return {"steps": [{"forward_ns": time // 4, "backward_ns": time // 2, "step_ns": time} for time in times_ns]}


def _summarize(manifest: dict[str, Any]) -> StepTimes | None:
    return summarize_step_times(decode(Manifest, manifest))


def test_they_can_be_read_from_a_run_and_taken_to_pandas(tmp_path: Path) -> None:
    manifest = {"clean": _steps(400, 440, 800), "profiled": _steps(500, 500)}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    times = read_step_times(tmp_path)
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


def test_a_step_that_waits_for_data_takes_its_mean_wait_and_the_median_of_the_rest() -> None:
    """Waits of 90, 0 and 0 (mean 30); the rest takes 12, 12 and 40 (median 12). The median step would be 40."""
    steps = [(102, 90), (12, 0), (40, 0)]
    manifest = {
        "attached": {"steps": [{"data_ns": wait, "step_ns": step} for step, wait in steps]},
        "profiled": {"steps": [{"data_ns": 20, "step_ns": 41}, {"data_ns": 0, "step_ns": 21}]},
    }
    times = _summarize(manifest)
    data, step = times.phases
    assert (data.phase, data.clean_ns, data.profiled_ns) == ("data", 30, 10)
    assert (step.phase, step.clean.median, step.clean_ns, step.profiled_ns) == ("step", 40, 42, 31)
    assert step.cost == 31 / 42 - 1


def test_a_wait_that_the_gpu_hides_makes_no_step_longer() -> None:
    """Python waits for 8 to 30, the GPU sets the pace of 62 to 64: with all of their mean a step would take 66.5."""
    steps = [(62, 8), (62, 10), (64, 30), (62, 8)]
    times = _summarize({"attached": {"steps": [{"data_ns": wait, "step_ns": step} for step, wait in steps]}})
    data, step = times.phases
    assert (data.clean_ns, step.clean_ns, step.unprofiled.wait_ns.tolist()) == (14, 62.5, [0, 0, 2, 0])
    assert step.clean.p10 <= step.clean_ns <= step.clean.p90


EVALUATING = {"data_ns": 20, "inference_ns": 130, "forward_ns": 45, "backward_ns": 95, "step_ns": 300}
"""A step that validates first: under twice as long as the others, and it waits for the validation's batches."""
TRAINING = {"data_ns": 5, "forward_ns": 45, "backward_ns": 95, "step_ns": 150}


def _parts_of(steps: list[dict[str, int]]) -> dict[str, float]:
    times = _summarize({"attached": {"steps": steps}})
    assert times is not None
    return {part.phase: part.typical_ns for part in times.phases}


@pytest.mark.parametrize("evaluations", [1, 3])
def test_a_step_that_evaluates_is_none_of_the_typical_ones(evaluations: int) -> None:
    """Of 11 steps 1 or 3 validate, in 130 ns: neither that time nor the wait of 20 is part of most steps."""
    parts = _parts_of([TRAINING] * (11 - evaluations) + [EVALUATING] * evaluations)
    assert parts == {"data": 5, "inference": 0, "forward": 45, "backward": 95, "step": 150}


def test_a_phase_that_most_steps_have_is_part_of_the_typical_one() -> None:
    of_each = {**TRAINING, "inference_ns": 30, "step_ns": 180}
    assert _parts_of([TRAINING] * 4 + [of_each] * 7)["inference"] == 30
    without = {phase: time_ns for phase, time_ns in TRAINING.items() if phase != "backward_ns"}
    assert _parts_of([TRAINING] * 4 + [without] * 7)["backward"] == 0, "most steps lack it"
    times = _summarize({"attached": {"steps": [TRAINING] * 4 + [without] * 7}})
    assert times.find("backward", None).clean_ns == 95, "what one takes"


def test_the_waits_of_a_step_that_writes_a_checkpoint_are_no_part_of_the_typical_step() -> None:
    """Four steps of eight wait for workers' deliveries, which is usual; the one that takes 900 ns waits for a file."""
    waiting = {**TRAINING, "data_ns": 25, "step_ns": 170}
    saving = {**TRAINING, "data_ns": 500, "step_ns": 1_400}
    parts = _parts_of([TRAINING, waiting] * 4 + [saving])
    assert (parts["data"], parts["step"]) == (15, 160)


def test_a_step_that_waits_for_data_where_others_take_none_is_no_rare_one() -> None:
    """Three batches are drawn at once before every fifth step; the others have no time for data."""
    without = {phase: time_ns for phase, time_ns in TRAINING.items() if phase != "data_ns"}
    waiting = {**TRAINING, "data_ns": 400, "step_ns": 550}
    assert not mark_rare_steps([*[without] * 4, waiting] * 2).any()
    assert mark_rare_steps([*[without] * 4, {**waiting, "data_ns": 5}] * 2).sum() == 2


def test_the_rate_of_a_step_stands_beside_a_median_that_rare_steps_are_part_of() -> None:
    times = _summarize({"attached": {"steps": [TRAINING] * 3 + [{**TRAINING, "step_ns": 160}] * 6 + [EVALUATING]}})
    (rate,) = [part["clean_rate_ns"] for part in times.to_dict()["phases"] if part["phase"] == "step"]
    assert rate == times.find("step", None).clean_ns


# -- as a run shows them ---------------------------------------------------------------------------------------------


MS = 1_000_000


def _samples(*times_ms: int, **more: int) -> Samples:
    return Samples(tuple({**more, "forward_ns": time * MS // 4, "step_ns": time * MS} for time in times_ms))


def _waiting(*steps: tuple[int, int]) -> Samples:
    return Samples(tuple({"step_ns": step * MS, "data_ns": wait * MS} for step, wait in steps))


BY_EVENTS = Samples(tuple({"forward_event_ns": 3 * MS, "step_ns": ns * MS} for ns in (40, 41)))
BY_BOTH = Samples(({**_steps(8 * MS)["steps"][0], "forward_event_ns": MS, "step_event_ns": 7 * MS},) * 2)
OF_A_SCRIPT = tuple({"backward_ns": 5 * MS, "optimizer_ns": MS, "step_ns": (10 + at) * MS} for at in range(5))
SAVING = {**OF_A_SCRIPT[0], "step_ns": 40 * MS}
OF_CONTEXTS = Samples((*_samples(1280, context=128).steps, *_samples(10240, context=1024).steps))
SHOWN = {
    "location, spread and the cost of profiling": Manifest(
        clean=_samples(40, 44, 41, 60), profiled=_samples(60, 62, 70)
    ),
    "phases by CUDA's events": Manifest(clean=BY_EVENTS, profiled=BY_EVENTS),
    # The host's clock counts; phases stand in the order in which they run.
    "phases by both clocks": Manifest(clean=BY_BOTH, profiled=BY_BOTH),
    "times of the same process": Manifest(attached=Samples(OF_A_SCRIPT[:4]), profiled=Samples(OF_A_SCRIPT[4:])),
    # A single step has no deviation.
    "contexts": Manifest(clean=OF_CONTEXTS, profiled=OF_CONTEXTS),
    # Unprofiled 10 of waiting and 2 of the rest; profiled 9 and 4: a wait costs nothing, the rest 1 of 12.
    "waits for data": Manifest(
        attached=_waiting((42, 40), *[(2, 0)] * 3),
        profiled=_waiting((22, 18), (4, 0)),
    ),
    # Two of eleven steps evaluate, and one writes a checkpoint.
    "rare steps": Manifest(
        attached=Samples((*OF_A_SCRIPT, *OF_A_SCRIPT[:3], *[{**OF_A_SCRIPT[0], "inference_ns": 4 * MS}] * 2, SAVING)),
        profiled=Samples(OF_A_SCRIPT),
    ),
    "no times": Manifest(),
    "no steps": Manifest(clean=_samples(), profiled=_samples()),
    "no profiled steps": Manifest(clean=_samples(1), profiled=_samples()),
    "no unprofiled steps": Manifest(clean=_samples(), profiled=_samples(1)),
}


def test_unprofiled_and_profiled_times_stand_side_by_side() -> None:
    said = []
    for name, manifest in SHOWN.items():
        text = render(Document("run", {}, clean_times_parts(manifest), Table((), ())), "table")
        said += ["", f"# {name}", *text.splitlines()]
    check_text("step-times", "\n".join(said).lstrip() + "\n")


# -- compared with another run ---------------------------------------------------------------------------------------


def manifest(times: list[int], source: str = "clean", **more: Any) -> dict[str, Any]:
    steps = [{"forward_ns": time // 3, "step_ns": time, **more} for time in times]
    return {source: {"steps": steps}}


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[int, int, int, str]]:
    sides = [_summarize(one) for one in (before, after)]
    assert sides[0] is not None
    assert sides[1] is not None
    result = compare_unprofiled(sides[0], sides[1])
    return {one.name: (one.before_ns, one.after_ns, one.change_ns, one.verdict) for one in result.changes}


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        # One slow step is a rare one, and no part of the typical step.
        ([300, 303, 306, 309, 9000, 312, 315, 318, 321, 324], [*range(600, 633, 3)], (312, 615, 303, "more")),
        # A half nanosecond of a median is not lost.
        ([300, 303], [301, 303], (302, 302, 0, "unknown")),
        ([300, 303, 306, 309, 312], [300, 303, 306, 309, 312], (306, 306, 0, "unchanged")),
        # Noise.
        ([300, 330, 360, 390, 420], [303, 333, 357, 399, 411], (360, 357, -3, "no measurable difference")),
    ],
)
def test_medians_are_compared(before: list[int], after: list[int], step: tuple[int, int, int, str]) -> None:
    found = compared(manifest(before), manifest(after))
    assert list(found) == ["forward", "step"]
    assert found["step"] == step


def test_each_context_is_compared_separately() -> None:
    steps = [manifest([time], context=context)["clean"]["steps"] for time, context in ((30, 128), (90, 256))]
    both = {"clean": {"steps": [*steps[0], *steps[1]]}}
    assert compared(both, manifest([33], context=128)) == {
        "context 128, forward": (10, 11, 1, "unknown"),
        "context 128, step": (30, 33, 3, "unknown"),
    }


def test_the_label_says_in_which_process_steps_were_timed() -> None:
    for source, label in (("clean", "own process"), ("attached", "same process")):
        steps = _summarize(manifest([300], source))
        assert (steps.label, list(steps.samples)) == (label, ["forward", "step"])
    assert _summarize({}) is _summarize({"clean": {"steps": []}}) is None


def test_the_interval_of_steps_holds_how_much_their_waits_differ() -> None:
    """The rest never differs, so all of the interval comes from the waits of one step in ten."""
    steps = [{"data_ns": 1_000 * (at % 10 == 0), "step_ns": 1_000 * (at % 10 == 0) + 50} for at in range(20)]
    sides = [_summarize({"attached": {"steps": steps}}), _summarize({"attached": {"steps": steps[:11]}})]
    assert sides[0] is not None
    assert sides[1] is not None
    change = compare_unprofiled(sides[0], sides[1]).changes[-1]
    assert (change.before_ns, change.after_ns, change.verdict) == (150, 232, "no measurable difference")
    assert change.low_ns is not None
    assert change.low_ns < -50


def test_a_time_says_whether_it_is_a_median_or_holds_the_mean_wait() -> None:
    for data_ns, statistic in ((0, "medians"), (40, "mean waits and medians of the rest")):
        waits = (0, 0, data_ns)
        steps = _summarize({"attached": {"steps": [{"data_ns": wait, "step_ns": 50 + wait} for wait in waits]}})
        assert steps is not None
        result = compare_unprofiled(steps, steps)
        (step,) = (change for change in result.changes if change.is_whole_step)
        assert result.describe_samples(step) == f"{statistic} of 3 and 3 unprofiled steps"
