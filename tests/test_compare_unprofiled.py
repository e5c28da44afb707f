"""The unprofiled steps of two runs: their medians are compared phase by phase and context by context."""

from __future__ import annotations

from typing import Any

import pytest

from profkit.analysis.compare.comparison import compare_unprofiled
from profkit.analysis.time_account.step_times import UnprofiledSteps, read_unprofiled_steps
from profkit.run.manifest import Manifest
from profkit.run.records import decode


def manifest(times: list[int], source: str = "clean", **more: Any) -> dict[str, Any]:
    steps = [{"forward_ns": time // 3, "step_ns": time, **more} for time in times]
    return {source: {"steps": steps}}


def steps_of(written: dict[str, Any]) -> UnprofiledSteps | None:
    return read_unprofiled_steps(decode(Manifest, written))


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[int, int, int, str]]:
    sides = [steps_of(one) for one in (before, after)]
    assert sides[0] is not None
    assert sides[1] is not None
    result = compare_unprofiled(sides[0], sides[1])
    return {one.name: (one.before_ns, one.after_ns, one.change_ns, one.verdict) for one in result.changes}


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        # One slow step does not move the median.
        ([300, 303, 306, 309, 9000, 312, 315, 318, 321, 324, 327], [*range(600, 633, 3)], (315, 615, 300, "more")),
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
        steps = steps_of(manifest([300], source))
        assert steps is not None
        assert (steps.label, list(steps.samples)) == (label, ["forward", "step"])
    assert steps_of({}) is steps_of({"clean": {"steps": []}}) is None


def test_steps_that_wait_for_data_are_compared_by_their_mean_wait_and_the_median_of_the_rest() -> None:
    """One of four waits for 40 ns, later for 80; the rest takes 2. The medians of whole steps are 2 both times."""
    sides = [
        {"attached": {"steps": [{"data_ns": wait, "step_ns": wait + 2} for wait in (burst, 0, 0, 0)]}}
        for burst in (40, 80)
    ]
    changes = {name: change[:3] for name, change in compared(*sides).items()}
    assert changes == {"data": (10, 20, 10), "step": (12, 22, 10)}


def test_the_interval_of_steps_holds_how_much_their_waits_differ() -> None:
    """The rest never differs, so all of the interval comes from the waits of one step in ten."""
    steps = [{"data_ns": 1_000 * (at % 10 == 0), "step_ns": 1_000 * (at % 10 == 0) + 50} for at in range(20)]
    sides = [steps_of({"attached": {"steps": steps}}), steps_of({"attached": {"steps": steps[:11]}})]
    assert sides[0] is not None
    assert sides[1] is not None
    change = compare_unprofiled(sides[0], sides[1]).changes[-1]
    assert (change.before_ns, change.after_ns, change.verdict) == (150, 232, "no measurable difference")
    assert change.low_ns is not None
    assert change.low_ns < -50


def test_a_time_says_whether_it_is_a_median_or_holds_the_mean_wait() -> None:
    for data_ns, statistic in ((0, "medians"), (40, "mean waits and medians of the rest")):
        steps = steps_of({"attached": {"steps": [{"data_ns": data_ns, "step_ns": 50}] * 3}})
        assert steps is not None
        result = compare_unprofiled(steps, steps)
        (step,) = (change for change in result.changes if change.is_whole_step)
        assert result.describe_samples(step) == f"{statistic} of 3 and 3 unprofiled steps"
