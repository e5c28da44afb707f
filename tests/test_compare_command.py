"""Two captures compared as a person does it: ``profkit compare``, its golden table, formats and refusals."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import pytest

from profkit import compare
from profkit.analysis.compare.comparison import Difference
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.placing.attribution import Attribution
from profkit.errors import UsageError
from profkit.reading import _open_trace, open_capture
from profkit.report.commands.compare import VIEWS, describe_difference, describe_differences
from profkit.run.directory import NSYS_EXPORT, SNAPSHOT
from profkit.run.lines import LineSteps, RunLines, write_lines
from tests.conftest import ROOT
from tests.golden import check_transcript
from tests.in_process import check_command, run_command
from tests.memory_captures import Training
from tests.run_builder import start_run
from tests.step_builder import NVJET, SGEMM, Step, write_steps
from tests.test_compare_samples import make_run
from tests.test_kernel_changes import EAGER, varied

pytestmark = pytest.mark.usefixtures("read_once")

OPERATORS = "tiny-train-cpu.kineto.json.gz"


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


def test_each_way_of_asking_prints_what_it_did(runs: tuple[Path, Path], tmp_path: Path) -> None:
    forced = (*runs, "--force")
    trace, operators = (ROOT / "traces" / name for name in ("small-train.nsys2025.sqlite", OPERATORS))
    before, after = Training().write(tmp_path, "a.pickle"), Training(scale=2).write(tmp_path, "b.pickle")
    calls: list[tuple[str | Path, ...]] = [
        forced,
        runs,  # captures of other origin need force
        (*forced, "--format", "json"),
        *((*forced, "--format", "csv", "--by", view) for view in VIEWS),
        (*forced, "--by", "range", "--top", "1"),
        # Only what lies under a range.
        (*forced, "--range", "forward", "--by", "phase"),
        (*forced, "--range", "layer 1", "--by", "phase"),
        (*forced, "--range", "layr 1"),
        # Without a change there is no table of kernels, and no word on intervals and chance.
        *(
            (trace, Path(shutil.copy(trace, tmp_path / "again.sqlite"))),
            (runs[0], shutil.copytree(runs[0], tmp_path / "again")),
        ),
        # Peaks of memory.
        *((before, after), (before, after, "--format", "json"), (before, after, "--format", "csv")),
        # What cannot be compared is refused in one line.
        *((before, trace), (operators, trace), (trace, tmp_path / "missing")),
        *((before, before, "--range", "forward"), (*forced, "-o", runs[1] / NSYS_EXPORT)),
    ]
    check_transcript("compare", [("compare", *words) for words in calls])
    with pytest.raises(UsageError, match="differ in precision"):
        compare(*runs)


def test_each_pair_of_runs_is_compared_as_it_was(tmp_path: Path) -> None:
    # The largest category is shown however little it changed.
    kernels = {"gemm": 90_000, "softmax": 4_000, "reduce_kernel": 3_000, "layer_norm": 2_000}
    little, more = (
        write_steps(
            tmp_path / f"{name}.sqlite",
            varied({"forward": [(kernel, ns + extra * at) for at, (kernel, ns) in enumerate(kernels.items())]}, 1),
        )
        for name, extra in (("little", 0), ("more", 100))
    )
    # Renamed kernels are a change even if no time changed.
    named, renamed = (make_run(tmp_path / name, trace=False) for name in ("named", "renamed"))
    others: Step = {path: [(NVJET if one == SGEMM else one, ns) for one, ns in EAGER[path]] for path in EAGER}
    write_steps(named / NSYS_EXPORT, varied(EAGER, 1))
    write_steps(renamed / NSYS_EXPORT, varied(others, 1))
    # Snapshots in runs are compared by their peaks, if both have one.
    without, small, large = (make_run(tmp_path / name) for name in ("no-memory", "memory", "more-memory"))
    Training().write(small, SNAPSHOT)
    Training(scale=2).write(large, SNAPSHOT)
    # A step grows by the wait for data, which one run alone timed, and no other phase does.
    step = {"forward_ns": 1_000, "step_ns": 2_000}
    untimed = start_run(tmp_path / "untimed", attached={"steps": [step] * 3})
    timed = start_run(tmp_path / "timed", attached={"steps": [{**step, "step_ns": 7_000, "data_ns": 5_000}] * 3})
    calls: list[tuple[str | Path, ...]] = [
        (little, more, "--force", "--by", "category", "--top", "1"),
        *((named, renamed), (small, without), (small, large), (untimed, timed, "--force")),
    ]
    check_transcript("compare-runs", [("compare", *words) for words in calls])


def test_rare_steps_that_no_figure_has_are_said(tmp_path: Path) -> None:
    """One run writes a checkpoint for 40 ms in every tenth step, none of which was timed; its steps are as before."""
    for name, longer_ns in (("before", 0), ("after", 40_000_000)):
        usual = {"step_ns": 5_000_000}
        run = start_run(tmp_path / name, attached={"steps": [usual] * 5})
        looked = LineSteps(([usual] * 5 + [{"step_ns": 5_000_000 + longer_ns}] + [usual] * 4) * 3)
        write_lines(run / "lines.jsonl", RunLines(looked, ()))
    printed = run_command("compare", tmp_path / "before", tmp_path / "after")
    assert "unchanged" in printed.stdout
    said = "one step in 10 takes 40.0 ms longer, and the times of steps leave that out"
    assert [line for line in printed.stderr.splitlines() if "longer" in line] == [f"warning: after: {said}"]


def test_python_returns_what_json_holds(runs: tuple[Path, Path]) -> None:
    printed = json.loads(run_command("compare", *runs, "--force", "--format", "json", "--full-names").stdout)
    result = json.loads(json.dumps(compare(*runs, force=True).to_dict()))
    assert {key: printed[key] for key in result} == result


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


def test_no_two_traces_are_in_memory_at_once(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[Attribution]] = []

    def open_alone(path: Path) -> OpenedCapture:
        assert not any(attribution() for attribution in opened)
        capture = open_capture(path)
        assert capture.trace is not None
        opened.append(weakref.ref(capture.trace.attribution))
        return capture

    monkeypatch.setattr("profkit.reading._open_trace", _open_trace)  # which remembers none
    monkeypatch.setattr("profkit.cli.compare.open_capture", open_alone)  # first, as it takes what the reader has now
    monkeypatch.setattr("profkit.reading.open_capture", open_alone)
    compare(*runs, force=True)
    check_command("compare", *runs, "--force")
    assert len(opened) == 4


def test_another_script_is_said_once() -> None:
    workload = Difference("workload", "a.py", "b.py", disturbs=True)
    command = Difference("command", "python a.py", "python b.py", disturbs=False)
    assert list(describe_differences([workload, command])) == ["workload: a.py → b.py"]
    batch = Difference("command", "python a.py --batch 4", "python a.py --batch 8", disturbs=False)
    assert list(describe_differences([workload, batch])) == ["workload: a.py → b.py", "--batch 4 → 8"]
