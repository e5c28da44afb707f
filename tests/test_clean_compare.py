"""The unprofiled steps of two runs: medians, phase by phase, of one context by itself."""

from __future__ import annotations

from typing import Any

import pytest

from profkit.analysis.compare.clean_compare import compare_clean, read_clean_steps


def manifest(times: list[int], source: str = "clean", **more: Any) -> dict[str, Any]:
    steps = [{"forward_ns": time // 3, "step_ns": time, **more} for time in times]
    return {source: {"steps": steps}}


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[int, int, int, str]]:
    sides = [read_clean_steps(one) for one in (before, after)]
    assert sides[0] is not None
    assert sides[1] is not None
    result = compare_clean(sides[0], sides[1])
    return {one.name: (one.before_ns, one.after_ns, one.change_ns, one.verdict) for one in result.changes}


def test_medians_do_not_mind_a_slow_step() -> None:
    before = [300, 303, 306, 309, 9000, 312, 315, 318, 321, 324, 327]
    found = compared(manifest(before), manifest([time + 300 for time in range(300, 333, 3)]))
    assert list(found) == ["forward", "step"]
    assert found["step"] == (315, 615, 300, "more")


def test_a_half_nanosecond_of_a_median_is_not_lost() -> None:
    assert compared(manifest([300, 303]), manifest([301, 303]))["step"] == (302, 302, 0, "unknown")


def test_the_same_steps_are_unchanged() -> None:
    one = manifest([300, 303, 306, 309, 312])
    assert {change[2:] for change in compared(one, one).values()} == {(0, "unchanged")}


def test_noise_is_no_measurable_difference() -> None:
    before, after = manifest([300, 330, 360, 390, 420]), manifest([303, 333, 357, 399, 411])
    assert compared(before, after)["step"][3] == "no measurable difference"


def test_each_context_by_itself() -> None:
    both = {
        "clean": {
            "steps": [*manifest([30], context=128)["clean"]["steps"], *manifest([90], context=256)["clean"]["steps"]]
        }
    }
    assert compared(both, manifest([33], context=128)) == {
        "context 128, forward": (10, 11, 1, "unknown"),
        "context 128, step": (30, 33, 3, "unknown"),
    }


@pytest.mark.parametrize(
    ("source", "label"), [("clean", "in a process of their own"), ("attached", "attached, not recording")]
)
def test_where_they_were_timed_is_said(source: str, label: str) -> None:
    steps = read_clean_steps(manifest([300], source))
    assert steps is not None
    assert steps.label == label
    assert list(steps.times_ns) == (["forward", "step"] if source == "clean" else ["forward", "rest", "step"])


def test_a_manifest_may_have_none() -> None:
    assert read_clean_steps({}) is None
    assert read_clean_steps({"clean": {"steps": []}}) is None
