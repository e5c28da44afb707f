"""The time account of a run: idle time in unprofiled steps, per GPU and per step of the program, and its doubts."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from profkit import compare, read_trace
from profkit.analysis.causes.advice import AdviceResult
from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import Summary, WorkUse, divide_step
from profkit.analysis.time_account import is_step
from profkit.analysis.time_account.account import IdleCauses, divide_idle
from profkit.analysis.time_account.gpu_time import DataWait, GpuParts
from profkit.errors import Finding
from profkit.reading import open_capture
from profkit.report.commands.efficiency import build_efficiency_document
from profkit.report.commands.steps import limit_words
from profkit.report.commands.summary import build_summary_document
from profkit.report.document import render
from tests.efficiency_runs import change_manifest, make_timed_run, notes_of, rows_by_path, write_run, write_two_steps
from tests.nsys_builder import NsysBuilder
from tests.run_builder import start_run
from tests.second_method import overlap, union
from tests.step_builder import ADD, NVJET

MS = 1_000_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)"
FOREACH = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<float>>(T1)"
FUSED_ADAM = "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float>>(T1)"


def _steps(*times: int, **more: int) -> dict[str, Any]:
    return {"steps": [{"step_ns": time, **more} for time in times]}


def _summarize(run: Path) -> Summary:
    return summarize_capture(open_capture(run))


def _screen(run: Path) -> str:
    summary = _summarize(run)
    return " ".join(render(build_summary_document(summary, AdviceResult(), with_all=True), "table").split())


def count_idle_slowly(opened: OpenedTrace) -> tuple[int, int, Fraction, Fraction]:
    """Return recorded span and idle time, and unprofiled span and idle time, of all steps on all GPUs.

    The second method: row by row in Python, nanosecond edges in a sorted list, no columns. A step's window on a GPU is
    that of `find_windows`, written out again.
    """
    trace, attribution = opened.trace, opened.attribution
    all_steps, rows = _find_steps_slowly(opened), []
    for table, placed in ((trace.work, attribution.work), (trace.copies, attribution.copies)):
        under = {step: set(placed.under(np.array([step])).rows.tolist()) for step in all_steps}
        for row in range(len(table.start_ns)):
            steps = [step for step in all_steps if row in under[step]]
            rows.append((int(table.device[row]), int(table.start_ns[row]), int(table.end_ns[row]), steps))
    recorded, idle = 0, 0
    busy_of: defaultdict[int, list[int]] = defaultdict(list)
    manifest = None if opened.run is None else opened.run.manifest
    unprofiled = None if manifest is None or manifest.unprofiled is None else median(manifest.unprofiled.step_ns())
    for step in sorted({step for row in rows for step in row[3]}):
        opened_ns, closed_ns = int(trace.ranges.start_ns[step]), int(trace.ranges.end_ns[step])
        ends = [end for _, _, end, steps in rows if step in steps]
        for device in sorted({device for device, _, _, steps in rows if step in steps}):
            here = sorted((start, end) for at, start, end, _ in rows if at == device)
            mine = [(start, end) for at, start, end, steps in rows if at == device and step in steps]
            first, last = min(mine)[0], max(end for _, end in mine)
            before = max((end for start, end in here if start < first), default=opened_ns)
            begin, finish = min(first, max(opened_ns, before)), max(closed_ns, last)
            following = min((start for start, _ in here if start >= finish), default=max(ends))
            finish = max(finish, min(max(ends), following))
            busy = overlap(union(here), begin, finish)
            recorded, idle = recorded + finish - begin, idle + finish - begin - busy
            busy_of[device].append(busy)
    if unprofiled is None:
        return recorded, idle, Fraction(0), Fraction(0)
    # A GPU that is busy for longer than its unprofiled steps take is never idle, and another one no less for it.
    left = [max(Fraction(unprofiled) * len(steps) - sum(steps), Fraction(0)) for steps in busy_of.values()]
    span = Fraction(unprofiled) * sum(map(len, busy_of.values()))
    return recorded, idle, span, sum(left, Fraction(0))


def _find_steps_slowly(opened: OpenedTrace) -> list[int]:
    """Return the ranges ``step`` and ``step N`` that ended and lie in no other and in no ``warmup``."""
    trace, parent = opened.trace, opened.attribution.parent
    names = [trace.names[number].lower() for number in trace.ranges.name.tolist()]
    steps = []
    for index, name in enumerate(names):
        above, around = int(parent[index]), []
        while above >= 0:
            around.append(names[above])
            above = int(parent[above])
        is_inner = any(other == "warmup" or re.fullmatch(r"step( \d+)?", other) for other in around)
        if re.fullmatch(r"step( \d+)?", name) and not is_inner and not trace.ranges.is_open[index]:
            steps.append(index)
    return steps


@pytest.mark.parametrize(("unprofiled_ns", "share"), [(800, 240 / 800), (1_000, 0.44), (5_600, 0.9), (300, 0.0)])
def test_idle_time_is_what_the_unprofiled_step_leaves_beside_busy_time(
    tmp_path: Path, unprofiled_ns: int, share: float
) -> None:
    """Busy for 560 of 1,000 ns recorded; unprofiled steps may be shorter or longer, and never idle for less than 0."""
    opened = read_trace(make_timed_run(tmp_path, clean_ns=unprofiled_ns))
    idle = opened.account.idle_time()
    assert idle.share == pytest.approx(share)
    assert idle.is_unprofiled
    assert sum(vars(idle.causes).values()) == idle.idle_ns
    if unprofiled_ns >= 560:
        assert count_idle_slowly(opened)[2:] == (idle.span_ns, idle.idle_ns)


def _write_ranks(folder: Path, exposed: tuple[int, int], **manifest: Any) -> Path:
    """Two ranks with two steps of 100 ms each: 40 ms of products, then communication that nothing hides."""
    builder = NsysBuilder()
    for rank, pid in enumerate((100, 200)):
        for step in range(2):
            at = step * 100 * MS
            builder.range(f"step {step}", at, at + 100 * MS, tid=pid, pid=pid)
            builder.kernel(at + MS, 40 * MS, start=at + 2 * MS, tid=pid, pid=pid, device=rank, name=NVJET)
            builder.kernel(
                at + 2 * MS, exposed[rank], start=at + 42 * MS, tid=pid, pid=pid, device=rank, name=ALL_REDUCE
            )
    return write_run(folder, builder, **manifest)


def test_rows_follow_one_another_in_time_with_the_ranks_of_their_processes(tmp_path: Path) -> None:
    account = read_trace(_write_ranks(tmp_path, (4 * MS, 36 * MS))).account
    assert account.windows.device.tolist() == [0, 1, 0, 1]
    assert account.rank.tolist() == [0, 1, 0, 1]
    assert account.parts[:, 2].tolist() == [4 * MS, 36 * MS] * 2


def test_a_recorded_step_of_several_ranks_takes_as_long_as_the_longest_of_them(tmp_path: Path) -> None:
    """Steps of 100 ms, but one of 140: on one rank the first, on the other the second. compare says the same."""
    builder = NsysBuilder()
    for rank, lengths in enumerate(((140, 100), (100, 140))):
        for step, length in enumerate(lengths):
            at, thread = step * 200 * MS, 100 * (rank + 1)
            builder.range(f"step {step}", at, at + length * MS, tid=thread, pid=thread)
            builder.kernel(at + MS, MS, tid=thread, pid=thread, device=rank)
    path = builder.write(tmp_path / "t.sqlite")
    assert read_trace(path).account.recorded_step_ns() == 140 * MS
    (headline,) = compare(path, path).headlines
    assert headline.before_ns == 140 * MS


@pytest.mark.parametrize(("profiled", "recorded_ns"), [((120 * MS, 140 * MS), 130 * MS), ((), 100 * MS)])
def test_a_recorded_step_takes_what_the_host_timed_else_its_time_on_the_gpus(
    tmp_path: Path, profiled: tuple[int, ...], recorded_ns: int
) -> None:
    """Unprofiled steps of 80 ms: busy for 60 ms on average, 20 of them communication, and idle for 20."""
    run = _write_ranks(tmp_path, (20 * MS, 20 * MS), attached=_steps(80 * MS, 80 * MS), profiled=_steps(*profiled))
    assert read_trace(run).account.recorded_step_ns() == recorded_ns
    assert _summarize(run).steps[0].recorded_ns == recorded_ns
    assert "GPU busy 75.0% · idle 25.0% = 20.00 ms a step, " in _screen(run)
    assert "communication not hidden 25.0%" in _screen(run)


def test_a_gpu_that_is_busy_beyond_the_unprofiled_step_makes_no_other_less_idle(tmp_path: Path) -> None:
    """Unprofiled steps of 60 ms: one GPU is busy for 44 ms of them, the other for 76 as recorded, with waits."""
    run = _write_ranks(tmp_path, (4 * MS, 36 * MS), attached=_steps(60 * MS))
    opened = read_trace(run)
    idle = opened.account.idle_time()
    assert (idle.span_ns, idle.idle_ns) == (2 * (60 + 60) * MS, 2 * 16 * MS)
    assert count_idle_slowly(opened)[2:] == (idle.span_ns, idle.idle_ns)
    assert rows_by_path(opened.efficiency())["step *"].clean_idle_share == idle.share
    # The parts of a GPU's time are those of the step that is named: 66.7 % of it computing.
    tree = divide_step(opened.account, None, (), 60 * MS)
    assert tree is not None
    assert {part.kind: part.time_ns for part in tree.parts if part.kind in ("computing", "communicating")} == {
        "computing": 40 * MS,
        "communicating": 12 * MS,
    }
    assert "GPU busy 86.7% · idle 13.3% = 8.000 ms a step, " in _screen(run)
    assert "communication not hidden 20.0%" in _screen(run)


def test_a_recorded_step_that_is_rare_takes_no_idle_time_from_the_others(tmp_path: Path) -> None:
    """Three steps are busy for 40 ms of 100; the second evaluates a model for 300 ms more, as few do."""
    builder, at = NsysBuilder(), 0
    for step, busy in enumerate((40 * MS, 340 * MS, 40 * MS, 40 * MS)):
        builder.range(f"step {step}", at, at + busy + 60 * MS, tid=100, pid=100)
        builder.kernel(at + MS, busy, start=at + 2 * MS, tid=100, pid=100, name=NVJET)
        at += busy + 60 * MS
    usual, rare = 80 * MS, 380 * MS
    run = write_run(
        tmp_path, builder, attached=_steps(*[usual] * 10, rare), profiled=_steps(100 * MS, 400 * MS, *[100 * MS] * 2)
    )
    idle = read_trace(run).account.idle_time()
    assert (idle.span_ns, idle.idle_ns) == (4 * usual, 4 * (usual - 40 * MS))
    assert sum(vars(idle.causes).values()) == idle.idle_ns
    assert "GPU busy 50.0% · idle 50.0% = 40.00 ms a step" in _screen(run)
    tree = divide_step(read_trace(run).account, None, (), usual)
    assert tree is not None
    assert {part.kind: part.time_ns for part in tree.parts}["computing"] == 40 * MS
    assert "4 steps recorded, 1 rare one among them, which WORK and MODULE count" in _screen(run)


def test_a_step_that_begins_while_the_one_before_runs_counts_no_time_twice(tmp_path: Path) -> None:
    """The second step's batch is copied on a stream of its own while the first one's kernel runs, until 1,000."""
    builder = NsysBuilder()
    for number, begin in enumerate((0, 300)):
        builder.range(f"step {number}", begin, begin + 200)
        builder.copy(begin + 10, 20, start=begin + 20)
        builder.kernel(begin + 50, 900, start=100 + 950 * number)
    run = write_run(tmp_path, builder, attached=_steps(1_000, 1_000, 1_000))
    opened = open_capture(run).trace
    assert opened is not None
    account = opened.account
    assert account.windows.start_ns.tolist() == [0, 1_000]
    assert account.windows.end_ns.tolist() == [1_000, 1_950]
    parts, _ = account.sum_parts()
    assert (parts.span_ns, parts.computing_ns) == (1_950, 1_800)
    assert account.idle_time().idle_ns == 2_000 - parts.busy_ns


def test_things_are_counted_per_step_of_the_program_not_of_a_gpu(tmp_path: Path) -> None:
    """One process on two GPUs: six launches of the optimizer and two waits in each of its two steps."""
    builder = NsysBuilder()
    for step in range(2):
        at = step * 100 * MS
        builder.ranges((f"step {step}", at, at + 90 * MS), ("forward", at, at + 40 * MS))
        for device in (0, 1):
            builder.kernel(at + MS + device, 30 * MS, start=at + 2 * MS, device=device, name=NVJET)
            builder.call(at + 45 * MS + device * MS, duration=1_000, name="cudaStreamSynchronize_v3020")
        builder.range("optimizer", at + 50 * MS, at + 89 * MS)
        for launch in range(6):
            begin = at + 60 * MS + launch * 4 * MS
            builder.kernel(begin, 3 * MS, start=begin + 10_000, device=launch % 2, name=FOREACH)
    summary = _summarize(write_run(tmp_path, builder))
    assert (summary.step_count, summary.program_steps) == (4, 2)
    assert summary.optimizer.launch_count == 6 * summary.program_steps


def test_the_shares_of_work_are_one_partition(tmp_path: Path) -> None:
    """Products and communication in the optimizer, as Muon has them, and the optimizer's kernels outside its phase."""
    builder, at = NsysBuilder(), 0
    builder.range("step 0", 0, 2_000 * MS)
    for phase, names in {
        "forward": (NVJET, ADD),
        "backward": (ALL_REDUCE, FUSED_ADAM),
        "optimizer": (NVJET, ADD, FUSED_ADAM, ALL_REDUCE),
    }.items():
        builder.range(phase, at, at + 90 * MS)
        for name in names:
            at += 10 * MS
            builder.kernel(at, 10 * MS, start=at + 10, name=name)
        at += 100 * MS
    run = write_run(tmp_path, builder)
    work = _summarize(run).work
    parts = (work.product_ns, work.small_ns, work.optimizer_ns, work.communication_ns, work.graph_ns)
    assert parts == (10 * MS, 20 * MS, 30 * MS, 20 * MS, 0)
    assert sum(parts) == work.kernel_time_ns
    said = "matmul 12.5% of 80.00 ms of kernel time · optimizer 37.5%"
    assert f"{said} · other kernels 25.0% · communication 25.0%" in _screen(run)


def test_phases_of_timed_steps_that_no_recorded_step_has_are_named(tmp_path: Path) -> None:
    """An evaluation in every eighth step: one of eight timed steps had it, and neither of the two recorded ones."""
    common = {"forward_event_ns": 4 * MS, "step_ns": 10 * MS}
    attached = [common] * 7 + [{**common, "inference_event_ns": 30 * MS, "step_ns": 40 * MS}]
    builder = NsysBuilder(("step 0", 0, 10 * MS))
    builder.kernel(10, 4 * MS)
    run = write_run(tmp_path, builder, attached={"steps": attached}, profiled={"steps": [common] * 2})
    (warning,) = [one for one in read_trace(run).efficiency().warnings if one.code == "phases-not-recorded"]
    assert warning.message.startswith("the unprofiled steps had inference in 1 of 8 steps (30.0 ms); no recorded step")
    assert "inference in 1 of 8 steps" in _screen(run)
    start_run(run, attached={"steps": attached}, profiled={"steps": attached[-2:]})
    assert "phases-not-recorded" not in {one.code for one in _summarize(run).findings}


def test_recorded_steps_that_waited_longer_for_data_are_said_not_used(tmp_path: Path) -> None:
    builder = NsysBuilder(("step 0", 0, 50 * MS), ("data", 0, 45 * MS))
    builder.kernel(46 * MS, 2 * MS)
    timed = {
        part: {"steps": [{"data_ns": wait * MS, "step_ns": (wait + 3) * MS}] * 3}
        for part, wait in (("attached", 0), ("profiled", 45))
    }
    opened = read_trace(write_run(tmp_path, builder, **timed))
    assert opened.account.step_ns() == 3 * MS
    assert (opened.account.idle_time().idle_ns, opened.account.idle_time().causes.data_ns) == (MS, 0)
    assert "data-waits-grew" in {one.code for one in opened.efficiency().warnings}
    process = {"process": "1", "pid": 1, "rank": None, "state": "complete", "is_recorded": True, "loading": None}
    without_workers = read_trace(write_run(tmp_path / "alone", builder, **timed, processes=[process]))
    assert "data-waits-grew" not in {one.code for one in without_workers.efficiency().warnings}


def _time_loader(
    place: Path,
    *,
    waits: list[int],
    workers: int,
    busy: int = 3,
    recorded_busy: int = 3,
    timed: int = 6,
    later: int | None = None,
) -> tuple[float | None, list[Finding]]:
    """Return an unprofiled step of a loader whose queue was full before the recording, and what is said of it."""
    builder = NsysBuilder(("step 0", 0, 50 * MS))
    builder.kernel(46 * MS, 2 * MS)
    steps = {
        part: {"steps": [{"data_ns": wait * MS, "step_ns": max(wait + python, shown) * MS} for wait in times]}
        for part, times, python, shown in (("attached", [0] * timed, busy, 0), ("profiled", waits, recorded_busy, busy))
    }
    loading = {"workers": workers, "queue_batches": 2 * workers, "batches_per_step": 1.0}
    loading["later_wait_ns"] = None if later is None else later * MS
    process = {"process": "1", "pid": 1, "rank": None, "state": "complete", "is_recorded": True, "loading": loading}
    opened = read_trace(write_run(place, builder, **steps, processes=[process]))
    return opened.account.step_ns(), [one for one in opened.efficiency().warnings if one.code == "data-waits-grew"]


@pytest.mark.parametrize(
    ("how", "expected_ms", "said"),
    [
        ({"waits": [0, 0, 180, 0], "workers": 4}, 48, "first hid the wait, which is counted in the unprofiled step"),
        # The wait of the last recorded step counts, where few unprofiled ones were timed.
        ({"waits": [0, 0, 0, 180], "workers": 4, "timed": 3}, 48, "counted in the unprofiled step"),
        # Workers set the pace however much the profiler slows Python.
        ({"waits": [0, 0, 164, 0], "workers": 4, "recorded_busy": 7}, 48, "counted in the unprofiled step"),
        # An epoch began among the recorded ones: the steps after them waited less, on average.
        ({"waits": [180, 0, 0, 0], "workers": 4, "later": 9}, 12, "counted in the unprofiled step"),
        (
            {"waits": [180, 0, 0, 0], "workers": 4, "later": 90, "recorded_busy": 7},
            52,
            "counted in the unprofiled step",
        ),
        # Fewer recorded steps than workers deliver at once say nothing.
        ({"waits": [0, 0, 180, 0], "workers": 8}, 3, "time more steps"),
        # Work of the GPU, 60 ms of it, hides a wait of 45 ms in recorded steps and in unprofiled ones.
        ({"waits": [45] * 4, "workers": 4, "busy": 60, "recorded_busy": 3}, 60, "time more steps"),
    ],
)
def test_a_wait_that_a_full_queue_hid_is_counted_in_the_unprofiled_step(
    tmp_path: Path, how: dict[str, Any], expected_ms: int, said: str
) -> None:
    step_ns, (warning,) = _time_loader(tmp_path, **how)
    assert step_ns == pytest.approx(expected_ms * MS, rel=1e-6)
    assert said in warning.message


def test_steps_that_waited_while_an_epoch_began_say_nothing_of_those_that_never_wait(tmp_path: Path) -> None:
    assert _time_loader(tmp_path, waits=[180, 0, 0, 0], workers=4, later=0) == (3 * MS, [])


def test_each_context_has_its_own_unprofiled_step(tmp_path: Path) -> None:
    """Busy for 4 of 10 ms in every step; an unprofiled step takes 5 ms in one context and 20 in the other."""
    builder, steps = NsysBuilder(), []
    for number, (context, unprofiled) in enumerate(((128, 5 * MS), (256, 20 * MS), (256, 20 * MS))):
        at = number * 20 * MS
        builder.ranges((f"context {context}", at, at + 10 * MS), ("step 0", at + 1, at + 10 * MS))
        builder.kernel(at + 10, 4 * MS)
        steps.append({"context": context, "step_ns": unprofiled})
    account = read_trace(write_run(tmp_path, builder, clean={"steps": steps})).account
    assert account.context.tolist() == [128, 256, 256]
    assert [account.idle_time(account.context == one).idle_ns for one in (128, 256)] == [MS, 32 * MS]
    assert account.idle_time().share == 33 / 45


@pytest.mark.parametrize(
    ("name", "known"), [("step 0", True), ("Step 128", True), ("step *", True), (f"step {'9' * 19}", False)]
)
def test_a_numbered_step_is_a_step(name: str, known: bool) -> None:
    assert is_step(name) == known


def test_where_the_optimizers_phase_is_known_no_other_kernel_is_the_optimizers() -> None:
    """Clipping gradients and averaging weights launch kernels with the names of an optimizer's."""
    by_category = {"optimizer": 30, "elementwise": 50, "gemm": 20}
    work = WorkUse("gpu-kernel", 100, by_category, {"optimizer": 10, "elementwise": 5}, None, None)
    assert (work.optimizer_ns, work.product_ns, work.small_ns) == (15, 20, 65)
    without = replace(work, in_optimizer={})
    assert (without.optimizer_ns, without.product_ns, without.small_ns) == (30, 20, 50)


# -- unprofiled times in profkit efficiency --------------------------------------------------------------------------


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
    estimated = [
        "Idle of ranges is scaled to the unprofiled step (estimate)" in notes_of(one) for one in (result, recorded)
    ]
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
        builder.ranges(("step", at, at + 1_000), ("train", at, at + 900))
        for begin, name in ((0, "data"), (100, "backward"), (500, "backward"), (900, "log")):
            length = 400 if name == "backward" else 100
            builder.range(name, at + begin, at + begin + length)
            for device in range(devices):
                start = at + begin + length // 2
                builder.kernel(at + begin + 1, length // 2, start=start, device=device)
    times = {f"{phase}_ns" if phase == "step" else f"{phase}_event_ns": time for phase, time in clean_ns.items()}
    run = write_run(folder, builder, workload={}, clean={"steps": [times] * 2})
    return rows_by_path(read_trace(run).efficiency())


def _idle_ns(row: EfficiencyRow) -> float:
    """Return the idle time a step without a profiler."""
    assert row.idle_factor is not None
    return row.gpu.idle_ns * row.idle_factor / 2


def test_a_phases_unprofiled_time_is_that_of_all_its_instances_in_a_step(tmp_path: Path) -> None:
    """Backward: 400 ns busy and 400 idle a step; unprofiled 500 leave 100. The step: 500 idle, 200 left."""
    rows = _micro_batches(tmp_path, step=700, backward=500)
    left = {path: round(_idle_ns(row), 6) for path, row in rows.items()}
    assert left == {"step": 200, "step/train": 150, "step/train/data": 50, "step/train/backward": 100, "step/log": 50}
    # By its own clock backward would keep 300 ns of idle time, the step only 200: it is cut to fit.
    rows = _micro_batches(tmp_path / "longer", step=700, backward=700)
    left = {path: round(_idle_ns(row), 6) for path, row in rows.items()}
    assert left == {"step": 200, "step/train": 200, "step/train/data": 0, "step/train/backward": 200, "step/log": 0}


def test_the_unprofiled_step_holds_for_each_of_several_gpus_but_not_a_longer_phase(tmp_path: Path) -> None:
    """Nothing says which of the GPUs was idle in a phase that took longer than recorded."""
    shorter = _micro_batches(tmp_path / "shorter", devices=2, step=700)["step"]
    longer = _micro_batches(tmp_path / "longer", devices=2, step=2_000)["step"]
    assert shorter.clean_idle_share == pytest.approx(200 / 700)
    assert longer.idle_share == pytest.approx(0.5)
    assert longer.clean_idle_share == pytest.approx(1_500 / 2_000)
    phase = _micro_batches(tmp_path / "phase", devices=2, backward=2_000)["step/train/backward"]
    assert phase.clean_idle_share is None
    alone = _micro_batches(tmp_path / "alone", backward=2_000)["step/train/backward"]
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
    for slow, expected in ((1_000, []), (1_600, ["uneven-clean-steps"])):
        change_manifest(run, clean={"steps": [{"step_ns": slow}, {"step_ns": 800}]})
        found = read_trace(run).efficiency().warnings
        assert [one.code for one in found] == expected
    assert "2 unprofiled steps vary widely: their standard deviation is 47% of their mean" in found[0].message


# -- steps that wait for data ----------------------------------------------------------------------------------------


OVERLAPPED = {"overlapped_communication_ns": 0}


def _step(builder: NsysBuilder, number: int, at: int, wait: int, *, pid: int = 100, device: int = 0) -> int:
    """Add a step: wait for data, a copy of 300 µs in which nothing else runs, 2 ms of kernels. Return its end."""
    options = {"tid": pid, "pid": pid}
    end = at + wait + 2_400_000
    builder.ranges((f"step {number}", at, end), ("data", at, at + wait), **options)
    copied = at + wait + 10_000
    builder.copy(copied, 300_000, start=copied + 10_000, device=device, **options)
    builder.range("forward", copied + 1_000, end - 1_000, **options)
    for part in range(4):
        launched = copied + 2_000 + part * 500_000
        builder.kernel(launched, 500_000, start=copied + 310_000 + part * 500_000, device=device, **options)
    return end


def _efficiency(builder: NsysBuilder, folder: Path) -> EfficiencyResult:
    return read_trace(builder.write(folder / "t.sqlite")).efficiency()


def _shown(result: EfficiencyResult) -> str:
    return " ".join(render(build_efficiency_document(result, []), "table").split())


def test_a_step_that_waits_for_its_batch_is_limited_by_data_loading(tmp_path: Path) -> None:
    """Of 48 ms: 45.6 waiting, 20 µs until the copy begins, 0.3 copying, 2 computing, 80 µs until the step ends."""
    builder, at = NsysBuilder(), 0
    for number in range(2):
        at = _step(builder, number, at, 45_600_000)
    result = _efficiency(builder, tmp_path)
    step = rows_by_path(result)["step *"]
    assert (step.gpu.span_ns, step.gpu.computing_ns) == (2 * 48 * MS, 4 * MS)
    assert (step.data_loading_ns, step.input_copy_ns) == (2 * 45_600_000, 600_000)
    assert (step.verdict, limit_words(step)) == ("host-bound", "data loading")
    assert [one.data_wait_ns for one in result.steps] == [45_600_000] * 2
    assert result.steps[0].data == DataWait(0, 0, 45_600_000, 300_000)
    said = _shown(result)
    assert "waiting for data: 45.60 ms per step, then 300.0 µs to copy it to the GPU" in said
    assert "idle while Python waited for data 95.0%" in said


def test_a_short_wait_between_two_launches_is_no_launching(tmp_path: Path) -> None:
    """A wait of 0.4 ms is shorter than the pauses that count as launching; of 1 ms the GPU computes 0.3."""
    builder = NsysBuilder()
    for number in range(2):
        at = number * MS
        builder.ranges((f"step {number}", at, at + MS), ("data", at + 10_000, at + 410_000))
        builder.kernel(at + 1_000, 300_000, start=at + 700_000)
        builder.kernel(at + 420_000, 1_000, start=at + 430_000)
    step = rows_by_path(_efficiency(builder, tmp_path))["step *"]
    assert step.gpu.launching_ns >= 800_000
    assert step.data_loading_ns == 800_000
    assert limit_words(step) == "data loading"


def test_steps_in_bursts_are_judged_by_their_mean(tmp_path: Path) -> None:
    """Eight workers deliver at once: 80 ms of waiting in one step of eight, 10 ms a step, beside 2 ms of computing."""
    builder, at = NsysBuilder(), 0
    for number in range(16):
        at = _step(builder, number, at, 80 * MS if number % 8 == 0 else 0)
    result = _efficiency(builder, tmp_path)
    step = rows_by_path(result)["step *"]
    assert (step.data_loading_ns, limit_words(step)) == (160 * MS, "data loading")
    assert "waiting for data: 10.00 ms per step (0 ns to 80.00 ms)" in _shown(result)


def _run(folder: Path, unprofiled: list[tuple[int, int]], recorded: int, workers: int = 8) -> EfficiencyResult:
    """Steps that take 2.4 ms, of which every eighth waits 80 ms; ``unprofiled`` are steps and their waits."""
    builder, at = NsysBuilder(), 0
    for number in range(recorded):
        at = _step(builder, number, at, 80 * MS if number % 8 == 0 else 0)
    steps = [{"step_ns": step, "data_ns": wait} for step, wait in unprofiled]
    loading = {"workers": workers, "queue_batches": 2 * workers, "batches_per_step": 1.0}
    run = write_run(folder, builder, attached={"steps": steps}, processes=[{"loading": loading}])
    return read_trace(run).efficiency()


BURST = [(82 * MS, 80 * MS), *[(2 * MS, 0)] * 7]


def test_unprofiled_steps_in_bursts_count_with_their_mean_wait(tmp_path: Path) -> None:
    """The median of 2 ms would leave no idle time. The rate is 10 + 2 ms, of which the GPU is busy for 2.3."""
    result = _run(tmp_path, BURST, 8)
    step = rows_by_path(result)["step *"]
    assert step.clean_idle_share == pytest.approx(9.7 / 12)
    assert limit_words(step) == "data loading"
    costs = {one.phase: (one.clean_ns, one.profiled_ns) for one in result.inflation}
    assert costs == {}, "no recorded step was timed by the host"
    assert "use their mean wait for data and median of the rest" in _shown(result)


@pytest.mark.parametrize(
    ("unprofiled", "recorded", "workers", "found"),
    [
        (BURST, 4, 8, True),
        (BURST, 8, 8, False),
        ([(2 * MS, 0)] * 4, 4, 8, True),  # what is recorded waits
        (BURST, 4, 4, False),
    ],
)
def test_fewer_steps_than_workers_say_little_of_waiting(
    tmp_path: Path, unprofiled: list[tuple[int, int]], recorded: int, workers: int, found: bool
) -> None:
    result = _run(tmp_path, unprofiled, recorded, workers)
    said = [one.message for one in result.warnings if one.code == "few-steps-for-data"]
    assert len(said) == found
    assert all("record 8 or more" in message for message in said)


def test_few_steps_of_a_program_that_does_not_wait_are_enough(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _step(builder, 0, 0, 100_000)
    run = write_run(tmp_path, builder, processes=[{"loading": {"workers": 8, "batches_per_step": 1.0}}])
    assert "few-steps-for-data" not in {one.code for one in read_trace(run).efficiency().warnings}


def test_waiting_while_the_gpu_computes_costs_nothing(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for number in range(2):
        at = number * 10 * MS
        builder.range(f"step {number}", at, at + 10 * MS)
        builder.kernel(at, 9_900_000, start=at + 10_000)
        builder.range("data", at + MS, at + 9 * MS)
    result = _efficiency(builder, tmp_path)
    assert rows_by_path(result)["step *"].data_loading_ns == 0
    assert [one.data_wait_ns for one in result.steps] == [8 * MS] * 2


def test_each_rank_waits_for_its_own_data(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _step(builder, 0, 0, 10 * MS, pid=100, device=0)
    builder.range("step 0", 0, 12 * MS, tid=200, pid=200)
    builder.kernel(11 * MS, MS, start=11 * MS + 10, tid=200, pid=200, device=1)
    waits = {one.device: (one.data.idle_ns, one.data_wait_ns) for one in _efficiency(builder, tmp_path).steps}
    assert waits == {0: (10 * MS, 10 * MS), 1: (0, 0)}
    (tmp_path / "t.sqlite").unlink()
    builder = NsysBuilder()  # at the same time one waits for 5 ms of a step, the other for 1
    for rank, wait in ((0, 5), (1, 1)):
        thread = 100 * (rank + 1)
        builder.ranges(("step 0", 0, 20 * MS), ("data", MS, (1 + wait) * MS), tid=thread, pid=thread)
        builder.kernel(10 * MS, MS, tid=thread, pid=thread, device=rank)
    assert {one.device: one.data_wait_ns for one in _efficiency(builder, tmp_path).steps} == {0: 5 * MS, 1: MS}


@pytest.mark.parametrize(
    ("at", "kind", "thread", "expected"),
    [
        (150, 1, 100, 50),  # after the wait
        (50, 1, 100, 50),  # before it, as accelerate does, which fetches one batch ahead
        (150, 2, 100, 0),  # to the host
        (250, 1, 100, 0),  # in forward
        (450, 1, 100, 0),  # after it, where nobody waits for data
        (150, 1, 101, 0),  # on another thread
    ],
)
def test_input_copies_are_those_between_phases_with_a_wait(
    tmp_path: Path, at: int, kind: int, thread: int, expected: int
) -> None:
    builder = NsysBuilder(("step 0", 0, 1_000), ("data", 100, 120), ("forward", 200, 400))
    builder.range("optimizer", 600, 700)
    builder.kernel(300, 10, start=990)
    builder.copy(at, 50, kind=kind, tid=thread, start=800)
    assert rows_by_path(_efficiency(builder, tmp_path))["step 0"].input_copy_ns == expected


def test_a_wait_that_is_less_than_half_of_the_hosts_time_is_pythons(tmp_path: Path) -> None:
    builder = NsysBuilder(("step 0", 0, 10 * MS), ("data", 0, 4 * MS))
    builder.kernel(9 * MS, MS, start=9 * MS + 10)
    step = rows_by_path(_efficiency(builder, tmp_path))["step 0"]
    assert (step.verdict, limit_words(step)) == ("host-bound", "Python")


def _with_launches(folder: Path, manifest: dict[str, Any]) -> EfficiencyRow:
    """Two steps of 10 ms: 1 of waiting for data, 6 in which the host launches, 3 of computing; return their row."""
    builder = NsysBuilder()
    for number in range(2):
        at = number * 10 * MS
        builder.ranges((f"step {number}", at, at + 10 * MS), ("data", at, at + MS))
        for launch_at in range(MS, 7 * MS, 100_000):
            builder.call(at + launch_at, name="cudaEventRecord_v3020")
        builder.kernel(at + 7 * MS - 1_000, 3 * MS, start=at + 7 * MS)
    return rows_by_path(read_trace(write_run(folder, builder, **manifest)).efficiency())["step *"]


def test_waits_that_the_profiler_hid_count(tmp_path: Path) -> None:
    """Unprofiled 10 ms too, of which 5 are waiting: a slower host finds its data sooner. Launching keeps 2 of 6."""
    steps = {
        part: {"steps": [{"data_ns": wait * MS, "step_ns": 10 * MS}] * 3}
        for part, wait in (("attached", 5), ("profiled", 1))
    }
    row = _with_launches(tmp_path, steps)
    assert row.data_loading_ns == 2 * MS, "as recorded"
    assert (row.verdict, limit_words(row)) == ("host-bound", "data loading")
    assert row.idle.causes.data_ns / row.idle.span_ns == pytest.approx(0.5), "without a profiler"


def test_without_unprofiled_waits_the_recording_decides(tmp_path: Path) -> None:
    row = _with_launches(tmp_path, {"attached": {"steps": [{"step_ns": 10 * MS}] * 3}})
    assert limit_words(row) == "kernel launches"


@pytest.mark.parametrize(
    ("idle", "change", "expected"),
    [
        (100, None, (20, 60, 20)),
        (50, None, (10, 30, 10)),
        (200, None, (40, 120, 40)),
        (50, 0, (20, 23, 7)),  # what the profiler added was not waiting for data
        (50, 10, (30, 15, 5)),
        (50, -15, (5, 34, 11)),
        (50, -30, (0, 38, 12)),
        (50, 100, (50, 0, 0)),  # never more than all that is idle
    ],
)
def test_idle_time_without_a_profiler_is_divided(idle: int, change: int | None, expected: tuple[int, int, int]) -> None:
    """Recorded idle for 100: 70 launching, of which 10 waiting for data, and 30 outside CUDA, of which 10."""
    parts = GpuParts(140, 40, 0, 0, launching_ns=70, synchronising_ns=0, outside_cuda_ns=30, **OVERLAPPED)
    causes = divide_idle(parts, DataWait(10, 0, 10), idle, change)
    assert (causes.data_ns, causes.launching_ns, causes.outside_cuda_ns) == expected
    assert sum(expected) == idle


def test_idle_time_of_a_gpu_that_was_recorded_without_any_has_no_known_cause_but_data() -> None:
    parts = GpuParts(40, 40, 0, 0, launching_ns=0, synchronising_ns=0, outside_cuda_ns=0, **OVERLAPPED)
    assert divide_idle(parts, DataWait(), 7, None) == IdleCauses(0, 0, 0, 7)
    assert divide_idle(parts, DataWait(), 7, 3) == IdleCauses(7, 0, 0, 0)
