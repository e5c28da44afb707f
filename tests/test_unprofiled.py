"""Unprofiled times in `profkit efficiency`: what they leave of idle time, and when they are in doubt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.efficiency.summary import EfficiencyRow
from tests.efficiency_runs import make_timed_run, notes_of, rows_by_path, write_two_steps
from tests.nsys_builder import NsysBuilder


def test_idle_time_without_a_profiler_decides_verdicts(tmp_path: Path) -> None:
    """Forward: 160 ns busy, 240 idle of 400 profiled; unprofiled 200 leave 40, a sixth."""
    result = read_trace(make_timed_run(tmp_path)).efficiency()
    rows = rows_by_path(result)
    assert rows["step */forward"].idle_factor == rows["step */forward/layer *"].idle_factor == pytest.approx(40 / 240)
    # 560 ns busy, 440 idle of 1,000 profiled; unprofiled 800 leave 240.
    assert rows["step *"].idle_factor == pytest.approx(240 / 440)
    # Not timed by itself, so it has the rest of the step's idle time: 200 of 200.
    assert rows["step */backward"].idle_factor == pytest.approx(1)
    assert rows["step */forward"].verdict == "compute-bound"
    # 240 ns idle beside 160 busy; unprofiled 40.
    assert rows["step */forward"].idle_share == pytest.approx(240 / 400)
    assert rows["step */forward"].clean_idle_share == pytest.approx(40 / 200)
    assert (result.idle_share, result.clean_idle_share) == (pytest.approx(440 / 1000), pytest.approx(240 / 800))
    recorded = read_trace(write_two_steps(tmp_path / "t.sqlite")).efficiency()
    bare = rows_by_path(recorded)
    assert bare["step */forward"].verdict == "launch-bound"
    assert bare["step */forward"].clean_idle_share is None
    estimated = ["Idle is scaled to the unprofiled step (estimate)" in notes_of(one) for one in (result, recorded)]
    assert estimated == [True, False]
    (one, step) = result.inflation
    assert (one.phase, one.clean_ns, one.profiled_ns, one.cost) == ("forward", 200, 400, 1.0)
    assert (step.phase, step.cost) == ("step", 0.25)


def _micro_batches(folder: Path, *, devices: int = 1, **clean_ns: int) -> dict[str, EfficiencyRow]:
    """Two steps of 1,000 ns on each GPU: work that no phase holds, two backward calls of 400 ns, work again.

    ``clean_ns`` are unprofiled times of a step and of its phases. GPUs compute for half of the time.
    """
    builder = NsysBuilder()
    for at in (0, 10_000):
        builder.range("step", at, at + 1_000)
        builder.range("train", at, at + 900)
        for begin, name in ((0, "data"), (100, "backward"), (500, "backward"), (900, "log")):
            length = 400 if name == "backward" else 100
            builder.range(name, at + begin, at + begin + length)
            for device in range(devices):
                start = at + begin + length // 2
                builder.kernel(at + begin + 1, length // 2, start=start, device=device)
    times = {f"{phase}_ns" if phase == "step" else f"{phase}_event_ns": time for phase, time in clean_ns.items()}
    manifest = {"status": "complete", "device": "cuda", "workload": {}, "clean": {"steps": [times] * 2}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    builder.write(folder / "trace.sqlite")
    return rows_by_path(read_trace(folder).efficiency())


def _idle_ns(row: EfficiencyRow) -> float:
    """Return the idle time a step without a profiler."""
    assert row.gpu is not None
    assert row.idle_factor is not None
    return row.gpu.idle_ns * row.idle_factor / 2


def test_a_phases_unprofiled_time_is_that_of_all_its_instances_in_a_step(tmp_path: Path) -> None:
    """Backward: 400 ns busy and 400 idle a step; unprofiled 500 leave 100. The step: 500 idle, 200 left."""
    rows = _micro_batches(tmp_path, step=700, backward=500)
    left = {path: round(_idle_ns(row), 6) for path, row in rows.items()}
    assert left == {"step": 200, "step/train": 150, "step/train/data": 50, "step/train/backward": 100, "step/log": 50}
    # By its own clock backward would keep 300 ns of idle time, the step only 200: it is cut to fit.
    (tmp_path / "longer").mkdir()
    rows = _micro_batches(tmp_path / "longer", step=700, backward=700)
    left = {path: round(_idle_ns(row), 6) for path, row in rows.items()}
    assert left == {"step": 200, "step/train": 200, "step/train/data": 0, "step/train/backward": 200, "step/log": 0}


def test_the_unprofiled_step_holds_for_each_of_several_gpus_but_not_a_longer_phase(tmp_path: Path) -> None:
    """Nothing says which of the GPUs was idle in a phase that took longer than recorded."""
    folders = [tmp_path / name for name in ("shorter", "longer", "phase", "alone")]
    for folder in folders:
        folder.mkdir()
    shorter = _micro_batches(folders[0], devices=2, step=700)["step"]
    longer = _micro_batches(folders[1], devices=2, step=2_000)["step"]
    assert shorter.clean_idle_share == pytest.approx(200 / 700)
    assert longer.idle_share == pytest.approx(0.5)
    assert longer.clean_idle_share == pytest.approx(1_500 / 2_000)
    assert _micro_batches(folders[2], devices=2, backward=2_000)["step/train/backward"].clean_idle_share is None
    alone = _micro_batches(folders[3], backward=2_000)["step/train/backward"]
    assert alone.clean_idle_share == pytest.approx(1_600 / 2_000)


def test_waiting_for_launches_is_named_if_it_is_much_but_not_the_most(tmp_path: Path) -> None:
    """Of 1,600 ns without a profiler the steps are idle for 480; 865 of 880 recorded idle ns were launching."""
    result = read_trace(make_timed_run(tmp_path)).efficiency()
    rows = rows_by_path(result)
    assert rows["step *"].launching_share == pytest.approx(480 * 865 / 880 / 1_600, abs=1 / 1_600)
    assert rows["step */forward"].launching_share == pytest.approx(475 / 6 / 400, abs=1 / 400)
    assert "\nAlso idle for more than 20 % for one reason: step * 29.5% (kernel launches)\n" in notes_of(result)
    bare = read_trace(write_two_steps(tmp_path / "t.sqlite")).efficiency()
    assert rows_by_path(bare)["step */forward"].verdict == "launch-bound"
    assert notes_of(bare).endswith("% for one reason: step * 43.2% (kernel launches)"), (
        "neither forward nor ranges within a step"
    )


def test_launch_bound_ranges_without_unprofiled_times_carry_a_warning(tmp_path: Path) -> None:
    bare = read_trace(write_two_steps(tmp_path / "t.sqlite")).efficiency()
    assert [warning.code for warning in bare.warnings] == ["no-clean-twin"]
    run = read_trace(make_timed_run(tmp_path, clean_ns=1_600)).efficiency()
    assert rows_by_path(run)["step */forward"].verdict == "launch-bound"
    assert not run.warnings, "the unprofiled times decide"


def test_unprofiled_steps_that_vary_widely_give_a_warning(tmp_path: Path) -> None:
    run = make_timed_run(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    for slow, expected in ((1_000, []), (1_600, ["uneven-clean-steps"])):
        manifest["clean"] = {"steps": [{"step_ns": slow}, {"step_ns": 800}]}
        (run / "manifest.json").write_text(json.dumps(manifest))
        found = read_trace(run).efficiency().warnings
        assert [one.code for one in found] == expected
    assert "2 unprofiled steps vary widely: their standard deviation is 47% of their mean" in found[0].message


def test_phases_with_uneven_unprofiled_times_give_a_warning(tmp_path: Path) -> None:
    """Of forward, 4 of 10 times are half as long again: its median is one of the others. The loss is too short."""
    run = make_timed_run(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    for slow, expected in ((1_380_000, []), (1_500_000, ["uneven-clean-phases"])):
        forward = [1_000_000] * 6 + [slow] * 4
        step = {"backward_ns": 85_000_000, "step_ns": 110_000_000}
        steps = [step | {"forward_ns": 15 * ns, "loss_ns": ns // 100} for ns in forward]
        manifest["clean"] = {"steps": steps}
        (run / "manifest.json").write_text(json.dumps(manifest))
        found = [one for one in read_trace(run).efficiency().warnings if one.code.startswith("uneven")]
        assert [one.code for one in found] == expected
    assert found[0].message == (
        "forward took 15.0 to 22.5 ms unprofiled (10th to 90th percentile); its verdict and idle share use the median"
    )
    manifest["clean"] = {"steps": [one | {"backward_ns": 8 * one["forward_ns"]} for one in steps]}
    (run / "manifest.json").write_text(json.dumps(manifest))
    (both,) = [one for one in read_trace(run).efficiency().warnings if one.code.startswith("uneven")]
    assert both.message.startswith("forward took 15.0 to 22.5 ms, backward took 120 to 180 ms unprofiled (10th to 90th")
    assert both.message.endswith("; their verdicts and idle shares use the median")
