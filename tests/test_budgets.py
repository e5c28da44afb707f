"""Budgets hold or break by the right figure, and fail with a reason if there is no figure."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from profkit.analysis.compare import budgets as budgets_module
from profkit.analysis.compare.budgets import BudgetLine, Budgets, check_budgets
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.errors import UsageError
from profkit.reading import open_capture
from profkit.run.directory import NSYS_EXPORT, SNAPSHOT
from tests.allocator_reference import MIB, ReferenceAllocator
from tests.conftest import ROOT
from tests.efficiency_runs import make_timed_run, write_two_steps
from tests.golden import check_transcript
from tests.in_process import run_command
from tests.memory_captures import Training
from tests.step_builder import ADD, NVJET, SGEMM, SUM, Step, write_steps
from tests.test_compare_command import clean_steps
from tests.test_compare_samples import make_run
from tests.test_kernel_changes import varied

TRACE = ROOT / "traces" / "small-train.nsys2025.sqlite"

# Of 1,000 ns: 600 gemm, 250 elementwise, 150 reduction; 850 in `ffn`, 150 in `gemm`.
STEP: Step = {"forward/ffn": [(SGEMM, 600), (ADD, 250)], "forward/gemm": [(SUM, 150)]}


def lines(run: Path, budgets: Budgets, baseline: Path | None = None, **options: object) -> list[BudgetLine]:
    earlier = None if baseline is None else open_capture(baseline)
    return list(check_budgets(open_capture(run), budgets, earlier, **options).lines)  # type: ignore[arg-type]


def line(run: Path, budgets: Budgets, **options: object) -> BudgetLine:
    (only,) = lines(run, budgets, **options)
    return only


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of six unprofiled and eight profiled steps, with a snapshot."""
    made = make_run(tmp_path / "run", {"clean": clean_steps(1)}, trace=False)
    write_steps(made / NSYS_EXPORT, varied(STEP, 1))
    Training().write(made, SNAPSHOT)
    return made


@pytest.mark.parametrize(("limit_ns", "held"), [(30_017_499, False), (30_017_500, True)])
def test_the_step_time_is_the_median_of_the_unprofiled_steps(run: Path, limit_ns: int, held: bool) -> None:
    found = line(run, Budgets(max_step_ns=limit_ns))
    assert (found.held, found.measured, found.subject) == (held, 30_017_500, "step")
    assert found.detail == "median of 6 unprofiled steps (own process)"


def test_the_peak_is_of_allocated_bytes(run: Path) -> None:
    peak = open_capture(run).snapshot.memory().totals.allocated_peak_bytes  # type: ignore[union-attr]
    for limit, held in ((peak - 1, False), (peak, True)):
        found = line(run, Budgets(max_peak_bytes=limit))
        assert (found.held, found.measured, found.detail) == (held, peak, "allocated, by replay: exact")


@pytest.mark.parametrize(
    ("bounds", "held", "detail"),
    [
        ((100, 200), True, "allocated, by replay: an upper bound; the peak is at least 100 B"),
        ((100, 2000), False, "the peak is at least 100 B and at most 2,000 B"),
        ((1500, 2000), False, "allocated, by replay: an upper bound; the peak is at least 1,500 B"),
        ((100, None), False, "the peak is at least 100 B and its upper bound is unknown"),
    ],
)
def test_an_unproven_peak_holds_by_its_upper_bound(
    run: Path, monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int | None], held: bool, detail: str
) -> None:
    monkeypatch.setattr(budgets_module, "_peak_bounds", lambda snapshot: bounds)
    found = line(run, Budgets(max_peak_bytes=1000))
    assert (found.held, found.detail) == (held, detail)


@pytest.mark.parametrize(
    ("name", "share", "kind"),
    [
        ("elementwise", 0.25, "category"),
        ("ffn", 0.85, "range"),
        ("forward/*", 1.0, "range"),
        ("category:gemm", 0.6, "category"),
        ("range:gemm", 0.15, "range"),
    ],
)
def test_a_share_is_of_a_category_or_a_range(tmp_path: Path, name: str, share: float, kind: str) -> None:
    path = write_steps(tmp_path / "t.sqlite", [STEP, STEP], warmup={"forward": [(NVJET, 9999)]})
    for limit, held in ((share, True), (share - 0.01, False)):
        found = line(path, Budgets(max_shares=((name, limit),)))
        assert (found.measured, found.held) == (pytest.approx(share), held)
        assert found.detail.startswith(f"{kind} ")
        assert found.detail.endswith("2,000 ns of kernel time in 2 steps")


def test_what_a_share_is_of_is_said(tmp_path: Path, captures: Path) -> None:
    gemm = Budgets(max_shares=(("category:gemm", 1.0),))
    operators = ROOT / "traces" / "tiny-train-cpu.kineto.json.gz"
    assert " ns of operator time in " in line(operators, gemm).detail
    assert line(write_steps(tmp_path / "t.sqlite", [STEP]), gemm).detail.endswith("in 1 step")
    without_steps = line(captures / "hooks.nsys2025.sqlite", gemm).detail
    assert without_steps.endswith("of 188,895 ns of kernel time in the whole capture (it has no steps)")
    # Both processes made the same two steps.
    idle = line(captures / "ddp.nsys2025.sqlite", Budgets(max_idle=1.0))
    assert idle.detail == "of the GPUs' time in 2 steps, profiled"


def test_a_category_points_to_a_range_with_a_similar_name(tmp_path: Path) -> None:
    step = {"computing softmax": [("reduce_kernel", 150)], "loss": [("cunn_SoftMaxForward", 50)]}
    path = write_steps(tmp_path / "t.sqlite", [step, step])
    found = line(path, Budgets(max_shares=(("softmax", 0.3),)))
    assert (found.held, found.measured) == (True, pytest.approx(0.25))
    assert found.detail.endswith("in 2 steps; only kernels with such names; see also range:computing softmax")
    assert not line(path, Budgets(max_shares=(("range:computing softmax", 0.3),))).held


def test_a_name_that_can_mean_two_things_is_refused_and_the_share_of_what_no_kernel_has_fails(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "t.sqlite", [STEP, STEP])
    with pytest.raises(UsageError, match="write category:gemm or range:gemm"):
        lines(path, Budgets(max_shares=(("gemm", 0.5),)))
    budget = line(path, Budgets(max_shares=(("softmax", 1.0),)))
    assert (budget.held, budget.measured) == (False, None)
    assert "no kernel has category 'softmax', and no range has this name" in budget.detail


def efficiency(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:

    class Found:
        mfu = 0.4
        model_flops = 5
        twin = "clean"
        gpu = "NVIDIA H200"
        dtype = "bf16"
        uncounted = None

    found = Found()
    assert {name for name in vars(Found) if name[0] != "_"} <= set(EfficiencyResult.__dataclass_fields__)
    for name, value in values.items():
        setattr(found, name, value)
    monkeypatch.setattr(budgets_module.OpenedTrace, "efficiency", lambda self: found)


def test_mfu_has_a_minimum_and_idle_a_maximum(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of steps of 1,000 ns the GPU was idle for 440; without a run nobody knows the unprofiled time."""
    trace = write_two_steps(tmp_path / "t.sqlite")
    for limit, held in ((0.44, True), (0.43, False)):
        idle = line(trace, Budgets(max_idle=limit))
        assert (idle.held, idle.measured, idle.detail) == (held, 0.44, "of the GPUs' time in 2 steps, profiled")
    efficiency(monkeypatch)
    for limit, held in ((0.4, True), (0.41, False)):
        mfu = line(run, Budgets(min_mfu=limit))
        assert (mfu.budget, mfu.held) == ("min-mfu", held)


@pytest.mark.parametrize(("unprofiled_ns", "idle"), [(800, 0.3), (1_120, 0.5), (5_600, 0.9), (500, 0.0)])
def test_idle_is_judged_in_the_unprofiled_step_whether_it_is_shorter_or_longer(
    tmp_path: Path, unprofiled_ns: int, idle: float
) -> None:
    """The GPU is busy for 560 ns of every step, with the profiler and without one."""
    (line,) = lines(make_timed_run(tmp_path, clean_ns=unprofiled_ns), Budgets(max_idle=0.44))
    assert (line.measured, line.held) == (pytest.approx(idle), idle <= 0.44)
    assert line.detail == "of the GPUs' time in 2 steps, scaled to the unprofiled steps (44.0% with the profiler)"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mfu": None, "model_flops": None}, "the FLOPs of a step are unknown"),
        ({"mfu": None, "twin": None}, "no unprofiled step times"),
        ({"mfu": None}, "no datasheet peak for NVIDIA H200 in bf16, or the steps have several contexts"),
    ],
)
def test_an_unknown_mfu_fails(
    run: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, object], reason: str
) -> None:
    efficiency(monkeypatch, **values)
    found = line(run, Budgets(min_mfu=0.0))
    assert (found.held, found.measured) == (False, None)
    assert reason in found.detail


def test_budgets_of_what_was_not_recorded_are_not_judged(tmp_path: Path) -> None:
    everything = Budgets(1, 1, 1.0, 0.0, (("gemm", 1.0),))
    of_trace = {one.budget: one.detail for one in lines(TRACE, everything) if not one.held}
    assert set(of_trace) == {"max-step-ms", "max-peak", "min-mfu"}
    of_snapshot = lines(Training().write(tmp_path, "a.pickle"), everything)
    assert {one.budget for one in of_snapshot if "no trace was recorded" in one.detail} == {
        "max-idle",
        "min-mfu",
        "max-share",
    }
    assert not any(one.held for one in of_snapshot)
    operators = lines(ROOT / "traces" / "tiny-train-cpu.kineto.json.gz", Budgets(max_idle=1.0, min_mfu=0.0))
    assert all("recorded no GPU work" in one.detail for one in operators)
    assert not any(one.held for one in operators)


@pytest.mark.parametrize("name", ["lossy.nsys2023", "graph_whole.nsys2023"])
def test_a_lossy_capture_fails_every_budget(captures: Path, name: str) -> None:
    asked = Budgets(max_idle=1.0, min_mfu=0.0, max_shares=(("gemm", 1.0),))
    found = lines(captures / f"{name}.sqlite", asked)
    assert [one.held for one in found] == [False] * 3
    assert all(not one.judged and one.detail.startswith("the capture failed its self-check: ") for one in found)


def other_run(folder: Path, factor: float, **changes: object) -> Path:
    made = make_run(folder, {"clean": clean_steps(factor), **changes}, trace=False)
    write_steps(made / NSYS_EXPORT, varied(STEP, factor))
    Training().write(made, SNAPSHOT)
    return made


@pytest.mark.parametrize(
    ("factor", "allowed", "held", "said"),
    [
        (1, 0.0, True, "unchanged; "),
        (0.9, 0.0, True, "measurably faster by 3,001,750 ns; "),
        (1.00001, 0.0, True, "no measurable difference; "),
        (1.02, 0.0, False, "measurably slower by 600,350 ns; "),
        (1.02, 0.05, True, "measurably slower by 600,350 ns; "),
    ],
)
def test_only_a_measurable_slowdown_fails_against_a_baseline(
    tmp_path: Path, run: Path, factor: float, allowed: float, held: bool, said: str
) -> None:
    later = other_run(tmp_path / "later", factor)
    step, peak = lines(later, Budgets(), run, allowed_slowdown=allowed)
    assert (step.held, peak.held, peak.subject) == (held, True, "peak")
    assert step.detail.startswith(said)
    assert step.detail.endswith("medians of 6 and 6 unprofiled steps")
    assert step.limit == pytest.approx(30_017_500 * (1 + allowed), abs=1)
    assert ("% over" in step.detail) == (allowed > 0)


def test_without_unprofiled_steps_kernel_time_is_compared_with_the_baseline(tmp_path: Path) -> None:
    before, after = (write_steps(tmp_path / f"{at}.sqlite", varied(STEP, at)) for at in (1, 2))
    found = line(after, Budgets(), baseline=before)
    assert (found.subject, found.held) == ("kernel time", False)
    assert found.detail.endswith("means of 8 and 8 profiled steps")
    few = [write_steps(tmp_path / f"few{at}.sqlite", varied(STEP, at)[:2]) for at in (1, 2)]
    found = line(few[0], Budgets(), baseline=few[1])
    assert (found.held, "an interval needs 5 on each side" in found.detail) == (False, True)  # though it is faster


def snapshot_of(path: Path, *sizes: int) -> Path:
    allocator = ReferenceAllocator()
    allocator.record()
    for size in sizes:
        allocator.malloc(size)
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    return path


def test_a_higher_peak_than_the_baselines_fails(tmp_path: Path) -> None:
    before, after = (snapshot_of(tmp_path / f"{more}.pickle", 32 * MIB + more) for more in (0, 512))
    higher = line(after, Budgets(), baseline=before)
    assert not higher.held
    assert higher.detail.startswith("requested, by replay: 33,554,944 B, baseline 33,554,432 B (+512 B); allocated")
    assert line(before, Budgets(), baseline=after).held
    assert line(before, Budgets(), baseline=before).held


def placed(folder: Path, name: str, first_segment_at: int) -> Path:
    """Write a program's snapshot; its first segment, of 20 MiB, lies at a given address, all others from 2⁴⁰ on."""
    allocator = ReferenceAllocator()
    allocator.free_addresses.insert(0, (first_segment_at, first_segment_at + 20 * MIB))
    allocator.record()
    p, q, _ = (allocator.malloc(int(size * MIB)) for size in (4.5, 6, 9.5))
    s, _, _ = (allocator.malloc(int(size * MIB)) for size in (6, 4.5, 9.5))
    allocator.free(q)
    allocator.free(s)
    allocator.malloc(6 * MIB)
    allocator.free(p)
    # If s was taken p and q are one block of 10.5 MiB, too near in size to be split: it is given whole.
    allocator.malloc(int(9.8 * MIB))
    allocator.malloc(20 * MIB)
    (folder / name).write_bytes(pickle.dumps(allocator.snapshot()))
    return folder / name


def test_the_same_program_at_other_addresses_has_no_higher_peak(tmp_path: Path) -> None:
    low, high = placed(tmp_path, "low.pickle", 2**39), placed(tmp_path, "high.pickle", 2**52)
    totals = [open_capture(path).snapshot.memory().totals for path in (low, high)]  # type: ignore[union-attr]
    assert totals[1].allocated_peak_bytes > totals[0].allocated_peak_bytes
    found = line(high, Budgets(), baseline=low)
    assert (found.held, found.measured, found.limit) == (True, *(one.requested_peak_bytes for one in totals[::-1]))
    requested, allocated = totals[0].requested_peak_bytes, [one.allocated_peak_bytes for one in totals]
    assert found.detail == (
        f"requested, by replay: {requested:,} B, baseline {requested:,} B (+0 B);"
        f" allocated (depends on addresses too): {allocated[1]:,} B, baseline {allocated[0]:,} B"
    )


def test_memory_recorded_by_only_one_run_fails(tmp_path: Path, run: Path) -> None:
    bare = make_run(tmp_path / "bare", {"clean": clean_steps(1)})
    for one, other in ((run, bare), (bare, run)):
        found = lines(one, Budgets(), other)
        assert [(each.subject, each.held) for each in found] == [("step", True), ("peak", False)]


def test_a_baseline_of_other_origin_needs_force(tmp_path: Path, run: Path) -> None:
    other = other_run(tmp_path / "other", 1, gpu="NVIDIA A100")
    found = line(run, Budgets(), baseline=other)
    assert (found.held, "differ in GPU" in found.detail) == (False, True)
    assert all(one.held for one in lines(run, Budgets(), other, force=True))


def test_each_way_of_asking_prints_what_it_did(tmp_path: Path) -> None:
    """Exit 3 if a budget is broken or cannot be judged, 2 for a wrong request: each says in one line what is wrong."""
    path = write_steps(tmp_path / "t.sqlite", [STEP, STEP])
    budgets = ("--max-step-ms", "30", "--max-share", "reduction=14.9%", "--max-peak", "1GB")
    misnamed = ("sofmax", "range:forwrad", "range:elementwise", "category:forward", "§")
    calls = [
        ("--max-share", "elementwise=25%"),
        budgets,
        *((*budgets, "--format", style) for style in ("json", "csv")),
        (),
        ("--force", "--max-idle", "10%"),
        ("--max-slowdown", "2%"),
        *(("--max-share", f"{name}=15%") for name in misnamed),
    ]
    check_transcript("check", [("check", path, *words) for words in calls])


def test_a_quantity_of_another_kind_is_a_usage_error(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "t.sqlite", [STEP, STEP])
    for option, text in (("idle", "120%"), ("peak", "40XB"), ("peak", "5"), ("step-ms", "nan"), ("share", "softmax")):
        done = run_command("check", path, f"--max-{option}", text)
        assert (done.returncode, done.stdout, f"Invalid value for '--max-{option}'" in done.stderr) == (2, "", True)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, run: Path) -> None:
    done = run_command("check", tmp_path, "--max-idle", "10%")
    assert (done.returncode, "no profkit run" in done.stderr) == (1, True)
    copy = shutil.copytree(run, tmp_path / "copy")
    done = run_command("check", copy, "--max-peak", "1GB", "-o", copy / SNAPSHOT)
    assert (done.returncode, "this file is being read" in done.stderr) == (2, True)
