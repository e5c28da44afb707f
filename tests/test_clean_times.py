"""Unprofiled beside profiled times, as a person sees them at the end of a run."""

from __future__ import annotations

import pytest

from profkit.report.commands.steps import clean_times_parts
from profkit.report.document import Document, Table, render
from profkit.run.manifest import Manifest, Samples

MS = 1_000_000


def _steps(times: list[int], **more: int) -> tuple[dict[str, int], ...]:
    return tuple({**more, "forward_ns": ns * MS // 4, "step_ns": ns * MS} for ns in times)


def _manifest(clean: list[int], profiled: list[int]) -> Manifest:
    return Manifest(clean=Samples(_steps(clean)), profiled=Samples(_steps(profiled)))


def _shown(manifest: Manifest) -> str:
    parts = clean_times_parts(manifest)
    text = render(Document("run", {}, parts, Table((), ())), "table")
    assert max(map(len, text.splitlines()), default=0) <= 80
    return text


def test_location_spread_and_the_cost_of_profiling_stand_side_by_side() -> None:
    assert _shown(_manifest([40, 44, 41, 60], [60, 62, 70])) == (
        "time of  unprofiled       MAD       p10       p90  profiled  cost\n"
        "───────  ──────────  ────────  ────────  ────────  ────────  ────\n"
        "forward    10.62 ms  500.0 µs  10.07 ms  13.80 ms  15.50 ms  +46%\n"
        "step       42.50 ms  2.000 ms  40.30 ms  55.20 ms  62.00 ms  +46%\n"
        "\n"
        "step: mean 46.25 ms ± 9.323 ms (standard deviation, 20.2%)\n"
        "\n"
        "unprofiled, own process: 4 steps\n"
        "profiled: 3 recorded steps\n"
        "times are medians"
    )


def test_phases_by_cuda_events_say_so() -> None:
    steps = tuple({"forward_event_ns": 3 * MS, "step_ns": ns * MS} for ns in (40, 41))
    text = _shown(Manifest(clean=Samples(steps), profiled=Samples(steps)))
    assert "phases: by CUDA events around them; the step: by the host's clock" in text


def test_a_script_says_that_its_times_are_of_the_same_process() -> None:
    steps = tuple({"backward_ns": 5 * MS, "optimizer_ns": MS, "step_ns": (10 + i) * MS} for i in range(5))
    text = _shown(Manifest(attached=Samples(steps[:4]), profiled=Samples(steps[4:])))
    assert "unprofiled, same process: 4 steps before the recording\n" in text
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["backward", "optimizer"]


def test_each_context_has_its_table() -> None:
    clean = (*_steps([1280], context=128), *_steps([10240], context=1024))
    text = _shown(Manifest(clean=Samples(clean), profiled=Samples(clean)))
    assert [line for line in text.splitlines() if line.startswith("context")] == ["context 128", "context 1024"]
    assert text.count("time of") == 2
    assert "step: mean 10.24 s\n" in text, "a single step has no deviation"


@pytest.mark.parametrize("manifest", [Manifest(), _manifest([], []), _manifest([1], []), _manifest([], [1])])
def test_without_both_times_nothing_is_shown(manifest: Manifest) -> None:
    assert clean_times_parts(manifest) == []


def test_a_step_that_waits_for_data_is_compared_by_its_mean_wait() -> None:
    """Unprofiled 10 of waiting and 2 of the rest; profiled 9 and 4: a wait costs nothing, the rest 1 of 12."""
    bursts = {"attached": [(42, 40), (2, 0), (2, 0), (2, 0)], "profiled": [(22, 18), (4, 0)]}
    parts = {
        part: Samples(tuple({"data_ns": wait * MS, "step_ns": step * MS} for step, wait in steps))
        for part, steps in bursts.items()
    }
    text = _shown(Manifest(attached=parts["attached"], profiled=parts["profiled"]))
    rows = {line.split()[0]: line.split()[-1] for line in text.splitlines()[2:4]}
    assert rows == {"data": "–", "step": "+8%"}
    assert [line.split()[1:3] for line in text.splitlines()[2:4]] == [["10.00", "ms"], ["12.00", "ms"]]


def test_the_count_of_steps_is_not_that_of_a_phase_of_some_of_them() -> None:
    steps = tuple({"step_ns": MS} | ({"inference_ns": MS} if number == 3 else {}) for number in range(4))
    text = _shown(Manifest(attached=Samples(steps), profiled=Samples(steps)))
    assert "unprofiled, same process: 4 steps before the recording" in text
    assert "profiled: 4 recorded steps" in text
