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


def test_one_slow_step_does_not_move_the_median() -> None:
    before = [300, 303, 306, 309, 9000, 312, 315, 318, 321, 324, 327]
    found = compared(manifest(before), manifest([time + 300 for time in range(300, 333, 3)]))
    assert list(found) == ["forward", "step"]
    assert found["step"] == (315, 615, 300, "more")


def test_a_half_nanosecond_of_a_median_is_not_lost() -> None:
    assert compared(manifest([300, 303]), manifest([301, 303]))["step"] == (302, 302, 0, "unknown")


def test_equal_steps_are_unchanged() -> None:
    one = manifest([300, 303, 306, 309, 312])
    assert {change[2:] for change in compared(one, one).values()} == {(0, "unchanged")}


def test_noise_is_no_measurable_difference() -> None:
    before, after = manifest([300, 330, 360, 390, 420]), manifest([303, 333, 357, 399, 411])
    assert compared(before, after)["step"][3] == "no measurable difference"


def test_each_context_is_compared_separately() -> None:
    both = {
        "clean": {
            "steps": [*manifest([30], context=128)["clean"]["steps"], *manifest([90], context=256)["clean"]["steps"]]
        }
    }
    assert compared(both, manifest([33], context=128)) == {
        "context 128, forward": (10, 11, 1, "unknown"),
        "context 128, step": (30, 33, 3, "unknown"),
    }


@pytest.mark.parametrize(("source", "label"), [("clean", "own process"), ("attached", "same process")])
def test_the_label_says_in_which_process_steps_were_timed(source: str, label: str) -> None:
    steps = steps_of(manifest([300], source))
    assert steps is not None
    assert steps.label == label
    assert list(steps.samples) == ["forward", "step"]


def test_a_manifest_without_unprofiled_steps_gives_none() -> None:
    assert steps_of({}) is None
    assert steps_of({"clean": {"steps": []}}) is None


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
