"""The unprofiled twin beside the profiled run."""

from __future__ import annotations

from profkit.report.clean_times import render_clean_times


def _manifest(clean: list[int], profiled: list[int]) -> dict[str, object]:
    return {
        part: {"steps": [{"forward_ns": ns // 4, "step_ns": ns} for ns in times]}
        for part, times in (("clean", clean), ("profiled", profiled))
    }


def test_medians_and_the_cost_of_profiling_stand_side_by_side() -> None:
    text = render_clean_times(_manifest([40_000_000, 44_000_000, 41_000_000], [60_000_000, 61_500_000, 62_000_000]))
    lines = text.splitlines()
    assert lines[2].split() == ["forward", "10.25", "ms", "10.00", "ms", "11.00", "ms", "15.38", "ms", "+50%"]
    assert lines[3].split() == ["step", "41.00", "ms", "40.00", "ms", "44.00", "ms", "61.50", "ms", "+50%"]
    assert "medians of 3 steps" in text
    assert "differ widely" not in text


def test_samples_that_differ_widely_are_named() -> None:
    assert "differ widely" in render_clean_times(_manifest([40_000_000, 90_000_000], [60_000_000, 60_000_000]))


def test_without_times_there_is_nothing_to_say() -> None:
    assert render_clean_times({}) == ""
    assert render_clean_times({"clean": {"steps": []}, "profiled": None}) == ""
