"""What is to be doubted about the times of unprofiled steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profkit.launch.gpu_state import warn_of_gpus
from profkit.launch.manifest import warn_of_gain, warn_of_times
from profkit.run.manifest import Gpu

MS = 1_000_000
GIB = 1024**3

IDLE = Gpu(0, "GPU-1", "NVIDIA H200", "P0", 1980, 3201, 34, 0, ("gpu_idle",), {"sw_power_cap": 700}, 0, 0)


def _steps(*times_ms: float, **more: int) -> list[dict[str, int]]:
    return [{**more, "forward_ns": 2 * MS, "step_ns": round(time_ms * MS)} for time_ms in times_ms]


def test_even_steps_are_not_doubted() -> None:
    assert warn_of_times(_steps(10, 11, 10.5, 10, 12), {"compiled_graphs": 0}, "unprofiled") == []
    assert warn_of_times([], {}, "unprofiled") == []


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((20, 10, 11, 10, 10.5), "the first of the 5 unprofiled steps took up to 1.9 times"),
        ((30, 15, 10, 10, 10.5, 10.1), "the first 2 of the 6 unprofiled steps took up to 3.0 times"),
        ((10, 20, 10, 10, 10, 10), None),
        ((11, 10, 10, 10), None),
        ((20, 10, 10), None),
        ((20, 16, 20, 16, 20, 16), None),  # the later ones are like it
    ],
)
def test_first_steps_that_stand_out_were_not_warmed_up(times: tuple[float, ...], said: str | None) -> None:
    found = [text for text in warn_of_times(_steps(*times), {}, "unprofiled") if "raise --warmup" in text]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_steps_that_were_faster_while_recorded_show_what_the_others_suffered() -> None:
    (warning,) = warn_of_gain(_steps(26, 54), _steps(27, 26, 28))
    assert "faster than unprofiled ones, 27 ms against 40 ms (medians of 3 and 2)" in warning
    assert warn_of_gain(_steps(10, 10), _steps(9.1, 9.1)) == [], "a tenth is chance"
    assert warn_of_gain(_steps(10, 10), []) == []
    steps = _steps(10, context=128) + _steps(50, context=1024)
    (warning,) = warn_of_gain(steps, _steps(11, context=128) + _steps(40, context=1024))
    assert "unprofiled ones (context 1024)" in warning
    waiting = [{"step_ns": 30 * MS, "data_ns": 10 * MS}]
    (warning,) = warn_of_gain(waiting, _steps(10))
    assert "10 ms against 20 ms (medians of 1 and 1 without waits for data)" in warning


def test_contexts_are_judged_apart() -> None:
    steps = _steps(10, 10, 10, 10, context=128) + _steps(100, 50, 50, 50, context=1024)
    found = warn_of_times(steps, {}, "unprofiled")
    assert any("the first of the 4 unprofiled steps (context 1024)" in text for text in found)
    assert not any("128" in text for text in found)


@pytest.mark.parametrize(
    ("during", "said"),
    [
        ({"compiled_graphs": 1}, "1 graph was compiled within the unprofiled steps"),
        ({"compiled_graphs": 3}, "3 graphs were compiled within the unprofiled steps"),
        ({"allocator_retries": 2}, "2 cudaMalloc calls had to be retried within the unprofiled steps"),
        ({"out_of_memory_errors": 1}, "1 out-of-memory error fell within the unprofiled steps"),
    ],
)
def test_events_within_the_steps_are_counted(during: dict[str, int], said: str) -> None:
    (warning,) = warn_of_times(_steps(10, 10, 10), during, "unprofiled")
    assert said in warning


def test_a_quiet_gpu_is_not_doubted() -> None:
    assert warn_of_gpus([IDLE], [IDLE]) == []
    unknown = replace(IDLE, process_count=None, process_bytes=None, throttle_reasons=None, throttled_us={})
    assert warn_of_gpus([unknown], [unknown]) == []
    assert warn_of_gpus([], [replace(IDLE, process_count=3)]) == []


def test_other_processes_are_counted() -> None:
    (warning,) = warn_of_gpus([IDLE], [replace(IDLE, process_count=2, process_bytes=3 * GIB)])
    assert "GPU 0 was shared during the run: 2 other processes used it, with 3.0 GiB" in warning
    (warning,) = warn_of_gpus([replace(IDLE, process_count=1, process_bytes=None)], [IDLE])
    assert "1 other process used it;" in warning


def test_clocks_that_were_held_down() -> None:
    (warning,) = warn_of_gpus([IDLE], [replace(IDLE, throttled_us={"sw_power_cap": 1_500_700})])
    assert "GPU 0's clocks were held down during the run (sw_power_cap 1.5 s)" in warning
    (warning,) = warn_of_gpus([IDLE], [replace(IDLE, throttle_reasons=("hw_thermal_slowdown", "sync_boost"))])
    assert "when the run ended (hw_thermal_slowdown)" in warning
