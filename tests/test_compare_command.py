"""Two captures compared as a person does it: ``profkit compare``, its golden table, formats and refusals."""

from __future__ import annotations

import csv
import io
import json
import weakref
from pathlib import Path

import pytest

from profkit import compare
from profkit.analysis.compare.provenance import Difference
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.placing.attribution import Attribution
from profkit.errors import UsageError
from profkit.reading import open_capture
from profkit.report.commands.compare import describe_difference, describe_differences
from profkit.run.directory import NSYS_EXPORT, SNAPSHOT
from tests.allocator_reference import MIB
from tests.conftest import ROOT
from tests.in_process import run_command
from tests.memory_captures import Training
from tests.step_builder import NVJET, SGEMM, Step, write_steps
from tests.test_compare_samples import make_run
from tests.test_kernel_changes import EAGER, varied

pytestmark = pytest.mark.usefixtures("read_once")

GOLDEN = """\
step 30.02 ms → 21.01 ms: -30.0%, speed × 1.43, 95% interval -9.022 … -8.989 ms
  (medians of 6 and 6 unprofiled steps, own process)
before  fp32
after   bf16
changed: precision (autocast): fp32 → bf16

unprofiled steps (own process), medians of 6 and 6
   change    before     after        95% interval  unprofiled
─────────  ────────  ────────  ──────────────────  ──────────
-2.701 ms  9.002 ms  6.302 ms  -2.703 … -2.698 ms  forward
-9.005 ms  30.02 ms  21.01 ms  -9.022 … -8.989 ms  step

   change    before     after        95% interval  per step
─────────  ────────  ────────  ──────────────────  ─────────────────────
-6.000 µs  10.70 µs  4.700 µs  -6.017 … -5.983 µs  kernel time
-6.000 µs  10.70 µs  4.700 µs  -6.017 … -5.983 µs  GPU busy
-6.000 µs  11.54 µs  5.540 µs  -6.017 … -5.983 µs  Python time, profiled

   change    before     after        95% interval  phase
─────────  ────────  ────────  ──────────────────  ─────────
-6.000 µs  10.40 µs  4.400 µs  -6.014 … -5.986 µs  forward
     0 ns    300 ns    300 ns                      optimizer

   change    before     after        95% interval  category
─────────  ────────  ────────  ──────────────────  ───────────
-6.000 µs  8.000 µs  2.000 µs  -6.005 … -5.995 µs  gemm
     0 ns  2.700 µs  2.700 µs                      elementwise

   change        95% interval    before  range, category, kernels
─────────  ──────────────────  ────────  ───────────────────────────────────────
-6.000 µs  -6.005 … -5.995 µs  8.000 µs  forward/layer */ffn, gemm
                                          was sm80_xmma_gemm…32_f32_tn_n_64x64x8
                                          now nvjet_tst_128x…_1x2_h_bz_coopA_TNT
     0 ns                      2.700 µs  (3 more: no measurable difference)

times are per step: 8 steps before, 8 after
kernels per step: 7 before, 7 after
totals: 85,600 and 37,600 ns; sum of the changes: -6,000 ns
not compared: 0 and 0 ns (warm-up, or outside the steps or the range)
intervals: from how the steps of each side vary; they do not include variation
  from run to run
"""


def clean_steps(factor: float) -> dict[str, list[dict[str, int]]]:
    times = ((9_000_000 + 1000 * step, 30_000_000 + 7000 * step) for step in range(6))
    return {"steps": [{"forward_ns": round(factor * f), "step_ns": round(factor * s)} for f, s in times]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a run in fp32 and one in bf16, whose matrix products take a quarter of the time in other kernels."""
    folder = tmp_path_factory.mktemp("runs")
    half: Step = {
        path: [(NVJET, ns // 4) if name == SGEMM else (name, ns) for name, ns in kernels]
        for path, kernels in EAGER.items()
    }
    before = make_run(folder / "fp32", {"clean": clean_steps(1)}, trace=False)
    after = make_run(folder / "bf16", {"clean": clean_steps(0.7), "workload.dtype": "bf16"}, trace=False)
    write_steps(before / NSYS_EXPORT, varied(EAGER, 1))
    write_steps(after / NSYS_EXPORT, varied(half, 1))
    return before, after


def test_the_table_equals_the_golden_one(runs: tuple[Path, Path]) -> None:
    done = run_command("compare", *runs, "--force")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == GOLDEN
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_captures_of_other_origin_need_force(runs: tuple[Path, Path]) -> None:
    done = run_command("compare", *runs)
    assert (done.returncode, done.stdout) == (2, "")
    changed, refused = done.stderr.splitlines()
    assert changed == "warning: changed: precision (autocast): fp32 → bf16"
    assert refused.endswith("record both under the same conditions, or pass --force")
    with pytest.raises(UsageError, match="differ in precision"):
        compare(*runs)


def test_python_returns_what_json_holds(runs: tuple[Path, Path]) -> None:
    printed = json.loads(run_command("compare", *runs, "--force", "--format", "json", "--full-names").stdout)
    result = json.loads(json.dumps(compare(*runs, force=True).to_dict()))
    assert {key: printed[key] for key in result} == result
    assert printed["time"]["kernel_time"] == {
        "before_ns": 85_600,
        "after_ns": 37_600,
        "before_per_sample_ns": 10_700,
        "after_per_sample_ns": 4_700,
        "change_ns": -6000,
        "low_ns": -6017,
        "high_ns": -5983,
        "verdict": "less",
    }
    assert (printed["time"]["unit"], printed["time"]["samples"], printed["time"]["rounding_ns"]) == ("step", [8, 8], 0)
    part = printed["time"]["parts"][0]
    assert (part["range"], part["category"], part["kind"]) == ("forward/layer */ffn", "gemm", "renamed")
    assert part["after"] == [{"name": NVJET, "count": 16, "total_ns": 16_000}]
    assert printed["clean"]["changes"][-1]["name"] == "step"
    assert printed["provenance"]["differences"][0]["disturbs"] is True
    assert printed["memory"] is None


@pytest.mark.parametrize("view", ["phase", "category", "range", "kernel"])
def test_csv_holds_every_line_of_a_view(runs: tuple[Path, Path], view: str) -> None:
    done = run_command("compare", *runs, "--force", "--format", "csv", "--by", view)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert sum(int(row["before_ns"]) for row in rows) == 85_600
    assert sum(int(row["change_ns"]) for row in rows) == -6000
    assert {row["before_samples"] for row in rows} == {"8"}
    assert done.stderr.splitlines() == ["warning: changed: precision (autocast): fp32 → bf16"]


def test_by_shows_one_table(runs: tuple[Path, Path]) -> None:
    one = run_command("compare", *runs, "--force", "--by", "range", "--top", "1").stdout
    assert "forward/layer */ffn" in one
    assert "(1 more)" in one
    assert "phase" not in one


def test_the_largest_category_is_shown_however_little_it_changed(tmp_path: Path) -> None:
    kernels = {"gemm": 90_000, "softmax": 4_000, "reduce_kernel": 3_000, "layer_norm": 2_000}
    before, after = (
        {"forward": [(name, ns + extra * at) for at, (name, ns) in enumerate(kernels.items())]} for extra in (0, 100)
    )
    paths = [write_steps(tmp_path / f"{name}.sqlite", varied(side, 1)) for name, side in (("a", before), ("b", after))]
    out = run_command("compare", *paths, "--force", "--by", "category", "--top", "1").stdout
    lines = [line.split()[-1] for line in out.split("category\n")[1].splitlines()[1:4]]
    assert lines == ["normalization", "gemm", "more)"]


def test_the_first_line_says_how_long_a_step_takes(runs: tuple[Path, Path]) -> None:
    headline = json.loads(run_command("compare", *runs, "--force", "--format", "json").stdout)["headlines"][0]
    assert headline["change_ns"] == pytest.approx(headline["after_ns"] - headline["before_ns"], abs=1)
    assert headline["speed_factor"] == headline["before_ns"] / headline["after_ns"]
    same = run_command("compare", runs[0], runs[0]).stdout.splitlines()[0]
    assert same.startswith("step 30.02 ms → 30.02 ms: unchanged (medians of 6 and 6 unprofiled steps")
    traces = [path / NSYS_EXPORT for path in runs]
    first = run_command("compare", *traces, "--force", "--range", "forward").stdout.splitlines()[0]
    assert first.startswith("kernel time under 'forward' 10.40 µs → 4.400 µs: -57.7%, speed × 2.36")


def test_range_compares_only_what_lies_under_it(runs: tuple[Path, Path]) -> None:
    data = json.loads(run_command("compare", *runs, "--force", "--range", "layer 1", "--format", "json").stdout)
    assert (data["time"]["kernel_time"]["change_ns"], data["time"]["range"]) == (-3000, "layer 1")
    assert (data["clean"], data["memory"]) == (None, None)
    done = run_command("compare", *runs, "--force", "--range", "layr 1")
    assert done.returncode == 2
    assert "no range 'layr 1'; nearest: 'layer 1'" in done.stderr


@pytest.mark.parametrize(
    ("after", "text"),
    [
        ("python train.py --compile=True --lr 1", "--compile=False → True"),
        ("python train.py --compile=False --lr 2", "--lr 1 → 2"),
        ("python train.py --compile=False --lr 1 --amp", "nothing → --amp"),
        ("python train.py --lr 1", "--compile=False → nothing"),
        ("python train.py --compile=True --lr 2", "--compile=False → True, --lr 1 → 2"),
    ],
)
def test_only_the_changed_words_of_a_command_are_printed(after: str, text: str) -> None:
    difference = Difference("command", "python train.py --compile=False --lr 1", after, disturbs=False)
    assert describe_difference(difference) == text


def test_what_is_compared_with_itself_has_no_change(runs: tuple[Path, Path]) -> None:
    """There is no table without kernels, and no word on intervals and chance where chance could do nothing."""
    trace = ROOT / "traces" / "small-train.nsys2025.sqlite"
    done = run_command("compare", trace, trace)
    assert done.returncode == 0
    assert "\nno change in 74 kernels: each took equally long in both\n" in done.stdout
    assert "more" not in done.stdout
    assert "sum of the changes: 0 ns" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == (
        "warning: 2 steps before, 2 after: intervals need 5 on each side; record more with --steps\n"
    )
    of_run = run_command("compare", runs[0], runs[0]).stdout
    assert "\nno change in 4 kernels: each took equally long in both\n" in of_run
    assert not any(words in of_run for words in ("no measurable difference", "intervals"))
    assert of_run.endswith("(warm-up, or outside the steps or the range)\n")


def test_renamed_kernels_are_a_change_even_if_no_time_changed(tmp_path: Path) -> None:
    before, after = make_run(tmp_path / "a", trace=False), make_run(tmp_path / "b", trace=False)
    renamed = {
        path: [(NVJET if name == SGEMM else name, ns) for name, ns in kernels] for path, kernels in EAGER.items()
    }
    write_steps(before / NSYS_EXPORT, varied(EAGER, 1))
    write_steps(after / NSYS_EXPORT, varied(renamed, 1))
    out = run_command("compare", before, after).stdout
    assert "no change in" not in out
    assert "range, category, kernels" in out


def test_no_two_traces_are_in_memory_at_once(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[Attribution]] = []

    def open_alone(path: Path) -> OpenedCapture:
        assert not any(attribution() for attribution in opened)
        capture = open_capture(path)
        assert capture.trace is not None
        opened.append(weakref.ref(capture.trace.attribution))
        return capture

    monkeypatch.setattr("profkit.reading.open_capture", open_alone)
    monkeypatch.setattr("profkit.cli.compare.open_capture", open_alone)
    compare(*runs, force=True)
    assert run_command("compare", *runs, "--force").returncode == 0
    assert len(opened) == 4


def test_snapshots_alone_or_in_runs_with_traces_are_compared_by_their_peaks(tmp_path: Path) -> None:
    before, after = Training().write(tmp_path, "a.pickle"), Training(scale=2).write(tmp_path, "b.pickle")
    done = run_command("compare", before, after)
    assert done.returncode == 0
    assert "the peak changed by +12.00 MiB (+12,582,912 B)" in done.stdout
    data = json.loads(run_command("compare", before, after, "--format", "json").stdout)
    assert (data["time"], data["memory"]["difference_bytes"]) == (None, 12 * MIB)
    assert run_command("compare", before, after, "--format", "csv").stdout.startswith("bytes,kind,count,stack\n")
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    Training().write(runs[0], SNAPSHOT)
    one_sided = run_command("compare", *runs)
    assert one_sided.returncode == 0
    assert "warning: memory snapshots: only before has them; not compared" in one_sided.stderr
    Training(scale=2).write(runs[1], SNAPSHOT)
    both = run_command("compare", *runs).stdout
    assert "kernel time" in both
    assert "the peak changed by +12.00 MiB" in both


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    snapshot = Training().write(tmp_path, "a.pickle")
    trace = ROOT / "traces" / "small-train.nsys2025.sqlite"
    operators = ROOT / "traces" / "tiny-train-cpu.kineto.json.gz"
    by_range = "only the kernel times of two traces can be compared by range"
    for words, status, message in (
        ((snapshot, trace), 2, "holds a memory snapshot"),
        ((operators, trace), 2, "measures the self time of CPU operators"),
        ((trace, tmp_path / "missing"), 1, "no such file"),
        ((snapshot, snapshot, "--range", "forward"), 2, by_range),
        ((*runs, "--force", "-o", runs[1] / NSYS_EXPORT), 2, "this file is being read"),
    ):
        done = run_command("compare", *words)
        assert (done.returncode, message in done.stderr) == (status, True)
        assert "\n" not in done.stderr.removeprefix("warning: changed: precision (autocast): fp32 → bf16\n")[:-1]


def test_another_script_is_said_once() -> None:
    workload = Difference("workload", "a.py", "b.py", disturbs=True)
    command = Difference("command", "python a.py", "python b.py", disturbs=False)
    assert list(describe_differences([workload, command])) == ["workload: a.py → b.py"]
    batch = Difference("command", "python a.py --batch 4", "python a.py --batch 8", disturbs=False)
    assert list(describe_differences([workload, batch])) == ["workload: a.py → b.py", "--batch 4 → 8"]


def test_a_phase_that_one_side_alone_timed_is_named(tmp_path: Path) -> None:
    """The step grows by the wait for data, and no other phase does."""
    runs = []
    for name, more in (("a", {}), ("b", {"data_ns": 5_000})):
        steps = [{"forward_ns": 1_000, "step_ns": 2_000 + sum(more.values()), **more}] * 3
        runs.append(tmp_path / name)
        runs[-1].mkdir()
        (runs[-1] / "manifest.json").write_text(json.dumps({"status": "complete", "attached": {"steps": steps}}))
    result = compare(*runs, force=True)
    assert [warning.message for warning in result.warnings if warning.code == "one-sided-phases"] == [
        "only the run after timed data: part of its step, not compared"
    ]
