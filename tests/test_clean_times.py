"""The unprofiled twin beside the profiled run, as a person sees it."""

from __future__ import annotations

from typing import Any

from profkit.report.clean_times import render_clean_times

MS = 1_000_000


def _manifest(clean: list[int], profiled: list[int], **more: int) -> dict[str, Any]:
    return {
        part: {"steps": [{**more, "forward_ns": ns * MS // 4, "step_ns": ns * MS} for ns in times]}
        for part, times in (("clean", clean), ("profiled", profiled))
    }


def test_location_spread_and_the_cost_of_profiling_stand_side_by_side() -> None:
    assert render_clean_times(_manifest([40, 44, 41, 60], [60, 62, 70])) == (
        "time of    median       MAD       p10       p90  profiled  cost\n"
        "───────  ────────  ────────  ────────  ────────  ────────  ────\n"
        "forward  10.62 ms  500.0 µs  10.07 ms  13.80 ms  15.50 ms  +46%\n"
        "step     42.50 ms  2.000 ms  40.30 ms  55.20 ms  62.00 ms  +46%\n"
        "step: mean 46.25 ms ± 9.323 ms (standard deviation, 20.2%)\n"
        "\n"
        "unprofiled: 4 steps in a process of their own\n"
        "profiled: the median of 3 recorded steps"
    )


def test_cuda_events_have_a_column_and_the_table_fits() -> None:
    manifest = _manifest([404, 444], [612])
    for step in manifest["clean"]["steps"]:
        step["optimizer_ns"] = 999_900_000
        step["forward_event_ns"] = step["forward_ns"] - 3000
    text = render_clean_times(manifest)
    assert "profiled  cost" in text.splitlines()[0]
    assert "on GPU" in text.splitlines()[0]
    assert "on GPU: by CUDA events around it" in text
    assert max(map(len, text.splitlines())) <= 80


def test_unbroken_steps_have_a_line_of_their_own() -> None:
    manifest = _manifest([404, 444], [612])
    for step in manifest["clean"]["steps"]:
        step |= {"forward_event_ns": step["forward_ns"] - 3000, "backward_ns": step["forward_ns"]}
    manifest["clean"]["unbroken"] = [{"step_ns": ns * MS} for ns in (380, 390, 410)]
    text = render_clean_times(manifest)
    assert "\nunbroken step: median 390.0 ms, MAD 10.00 ms; 3 more, which wait once\n" in text
    assert "a step waits for the GPU after each phase; an unbroken one may be faster" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_script_says_where_its_times_come_from() -> None:
    steps = [{"backward_ns": 5 * MS, "optimizer_ns": MS, "step_ns": (10 + i) * MS} for i in range(5)]
    text = render_clean_times({"attached": {"label": "…", "steps": steps[:4]}, "profiled": {"steps": steps[4:]}})
    assert [line.split()[0] for line in text.splitlines()[2:6]] == ["backward", "optimizer", "rest", "step"]
    assert "attached, not recording: 4 steps of the same process, before the recording\n" in text
    assert "rest: the step less the phases above it" in text
    assert max(map(len, text.splitlines())) <= 80


def test_each_context_has_its_table() -> None:
    short, long = (_manifest([10 * n], [12 * n], context=n) for n in (128, 1024))
    manifest = {part: {"steps": short[part]["steps"] + long[part]["steps"]} for part in short}
    text = render_clean_times(manifest)
    assert [line for line in text.splitlines() if line.startswith("context")] == ["context 128", "context 1024"]
    assert text.count("time of") == 2
    assert "step: mean 10.24 s\n" in text, "a single step has no deviation"


def test_without_both_times_there_is_nothing_to_say() -> None:
    assert render_clean_times({}) == ""
    assert render_clean_times({"clean": {"steps": []}, "profiled": None}) == ""
    assert render_clean_times({**_manifest([1], []), "profiled": {"steps": []}}) == ""
