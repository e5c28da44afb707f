"""Budgets hold or break by the right figure, and fail with a reason if there is no figure."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from profkit.analysis.compare import budgets as budgets_module
from profkit.analysis.compare.budgets import MAX_STEP, BudgetLine, Budgets, check_budgets
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.errors import UsageError
from profkit.reading import open_capture
from profkit.report.commands.compare import budget_label
from profkit.run.directory import NSYS_EXPORT, SNAPSHOT
from tests.allocator_reference import MIB, ReferenceAllocator
from tests.conftest import ROOT
from tests.efficiency_runs import make_timed_run, write_two_steps
from tests.golden import check_text, check_transcript
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


def other_run(folder: Path, factor: float, **changes: object) -> Path:
    made = make_run(folder, {"clean": clean_steps(factor), **changes}, trace=False)
    write_steps(made / NSYS_EXPORT, varied(STEP, factor))
    Training().write(made, SNAPSHOT)
    return made


def snapshot_of(path: Path, *sizes: int) -> Path:
    allocator = ReferenceAllocator()
    allocator.record()
    for size in sizes:
        allocator.malloc(size)
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    return path


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


def shares(*limits: tuple[str, float]) -> Budgets:
    return Budgets(max_shares=limits)


EVERYTHING = Budgets(1, 1, 1.0, 0.0, (("gemm", 1.0),))
Asked = tuple[Path, Budgets, Path | None, dict[str, Any]]


def asked(folder: Path, run: Path) -> dict[str, Asked]:
    """Return what is judged by which budgets, or against which baseline."""
    trace = write_steps(folder / "t.sqlite", [STEP, STEP], warmup={"forward": [(NVJET, 9999)]})
    softmax = {"computing softmax": [("reduce_kernel", 150)], "loss": [("cunn_SoftMaxForward", 50)]}
    named = write_steps(folder / "softmax.sqlite", [softmax, softmax])
    peak = open_capture(run).snapshot.memory().totals.allocated_peak_bytes  # type: ignore[union-attr]
    budgets = {
        **{f"step of {ns:,} ns": (run, Budgets(max_step_ns=ns)) for ns in (30_017_499, 30_017_500)},
        **{f"peak {at}": (run, Budgets(max_peak_bytes=peak - 1 + (at == "held"))) for at in ("broken", "held")},
        **{
            f"share of {name}": (trace, shares((name, share), (name, share - 0.01)))
            for name, share in (("elementwise", 0.25), ("ffn", 0.85), ("forward/*", 1.0))
        },
        "shares of one name": (trace, shares(("category:gemm", 0.6), ("range:gemm", 0.15), ("softmax", 1.0))),
        "a range with a similar name": (named, shares(("softmax", 0.3), ("range:computing softmax", 0.3))),
        "one step": (write_steps(folder / "one.sqlite", [STEP]), shares(("category:gemm", 1.0))),
        "a trace, of everything": (TRACE, EVERYTHING),
        "a snapshot, of everything": (Training().write(folder, "a.pickle"), EVERYTHING),
        "operators": (
            ROOT / "traces" / "tiny-train-cpu.kineto.json.gz",
            Budgets(max_idle=1.0, min_mfu=0.0, max_shares=(("category:gemm", 1.0),)),
        ),
        **{
            f"idle in unprofiled steps of {ns} ns": (
                make_timed_run(folder / f"timed {ns}", clean_ns=ns),
                Budgets(max_idle=0.44),
            )
            for ns in (800, 1_120, 5_600, 500)
        },
        "idle as recorded": (write_two_steps(folder / "two.sqlite"), Budgets(max_idle=0.44)),
        "idle as recorded, broken": (folder / "two.sqlite", Budgets(max_idle=0.43)),
    }
    found: dict[str, Asked] = {name: (*one, None, {}) for name, one in budgets.items()}
    for factor in (1, 0.9, 1.00001, 1.02):
        found[f"{factor} of the baseline"] = other_run(folder / f"later {factor}", factor), Budgets(), run, {}
    steps = {at: write_steps(folder / f"{at}.sqlite", varied(STEP, at)) for at in (1, 2)}
    few = {at: write_steps(folder / f"few{at}.sqlite", varied(STEP, at)[:2]) for at in (1, 2)}
    sizes = [snapshot_of(folder / f"{more}.pickle", 32 * MIB + more) for more in (0, 512)]
    addresses = placed(folder, "low.pickle", 2**39), placed(folder, "high.pickle", 2**52)
    bare = make_run(folder / "bare", {"clean": clean_steps(1)})
    other = other_run(folder / "other", 1, gpu="NVIDIA A100")
    against = {
        "kernel time, without unprofiled steps": (steps[2], steps[1]),
        "few steps, though it is faster": (few[1], few[2]),
        "a higher peak": (sizes[1], sizes[0]),
        "a lower peak": (sizes[0], sizes[1]),
        "the same peak": (sizes[0], sizes[0]),
        "the same program at other addresses": (addresses[1], addresses[0]),
        "no memory now": (bare, run),
        "no memory in the baseline": (run, bare),
        "a baseline of another origin": (run, other),
    }
    found |= {name: (now, Budgets(), before, {}) for name, (now, before) in against.items()}
    return found | {"a baseline of another origin, by force": (run, Budgets(), other, {"force": True})}


def test_what_is_judged_and_how(tmp_path: Path, run: Path) -> None:
    """Of steps of 560 busy ns each, idle is judged in the unprofiled step, whether that is shorter or longer."""
    text = ""
    for name, (now, budgets, before, how) in asked(tmp_path, run).items():
        text += f"{name}\n"
        for one in lines(now, budgets, before, **how):
            verdict = "held" if one.held else "BROKEN" if one.judged else "NOT JUDGED"
            text += f"  {verdict} {one.budget} {one.subject}: {one.measured} for {one.limit}: {one.detail}\n"
    check_text("budgets", text.replace(f"{tmp_path}/", ""))


def test_a_name_that_can_mean_two_things_is_refused(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "t.sqlite", [STEP, STEP])
    with pytest.raises(UsageError, match="write category:gemm or range:gemm"):
        lines(path, shares(("gemm", 0.5)))


def test_what_a_share_is_of_is_said(captures: Path) -> None:
    gemm = shares(("category:gemm", 1.0))
    without_steps = line(captures / "hooks.nsys2025.sqlite", gemm).detail
    assert without_steps.endswith("of 188,895 ns of kernel time in the whole capture (it has no steps)")
    # Both processes made the same two steps.
    idle = line(captures / "ddp.nsys2025.sqlite", Budgets(max_idle=1.0))
    assert idle.detail == "of the GPUs' time in 2 steps, profiled"


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


def test_mfu_has_a_minimum(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    efficiency(monkeypatch)
    for limit, held in ((0.4, True), (0.41, False)):
        mfu = line(run, Budgets(min_mfu=limit))
        assert (mfu.budget, mfu.held) == ("min-mfu", held)


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


@pytest.mark.parametrize("name", ["lossy.nsys2023", "graph_whole.nsys2023"])
def test_a_lossy_capture_fails_every_budget(captures: Path, name: str) -> None:
    asked = Budgets(max_idle=1.0, min_mfu=0.0, max_shares=(("gemm", 1.0),))
    found = lines(captures / f"{name}.sqlite", asked)
    assert [one.held for one in found] == [False] * 3
    assert all(not one.judged and one.detail.startswith("the capture failed its self-check: ") for one in found)


def test_the_step_is_named_where_several_contexts_have_one_each(tmp_path: Path) -> None:
    shown = run_command(
        "check", make_timed_run(tmp_path, clean_ns=800), "--max-step-ms", "1", "--max-idle", "99%"
    ).stdout
    assert [row.split()[1] for row in shown.splitlines()[2:4]] == ["max-step-ms", "max-idle"]
    assert "max-step-ms: median of" in shown
    contexts = BudgetLine(MAX_STEP, "context 128, step", 1, 2, "ns", True, "")
    assert budget_label(contexts) == "max-step-ms context 128, step"


def test_a_limit_that_looks_like_what_was_measured_is_shown_exactly(tmp_path: Path) -> None:
    result = run_command("check", make_timed_run(tmp_path, clean_ns=1_000_400), "--max-step-ms", "1.0001")
    assert "BROKEN   max-step-ms  1,000,400 ns  ≤ 1,000,100 ns" in result.stdout


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
        *(("--max-share", f"{name}=15%") for name in misnamed),
    ]
    check_transcript("check", [("check", path, *words) for words in calls])


def test_a_quantity_of_another_kind_is_a_usage_error(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "t.sqlite", [STEP, STEP])
    for option, text in (("idle", "120%"), ("peak", "40XB"), ("peak", "5"), ("step-ms", "nan"), ("share", "softmax")):
        done = run_command("check", path, f"--max-{option}", text)
        assert (done.returncode, done.stdout, f"Invalid value for '--max-{option}'" in done.stderr) == (2, "", True)
