"""The one door: what a path is, which run is the newest, what Python can ask of it, and results in a notebook."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import profkit
from profkit import compare, read_snapshot, read_trace
from profkit.analysis import NotebookResult, table_of
from profkit.analysis.compare.budgets import Budgets, check_budgets
from profkit.analysis.kernels.summary import KernelRow
from profkit.analysis.step_replay.predict import Prediction
from profkit.errors import ProfkitError, RunError, SnapshotError, ToolError, TraceError, UsageError
from profkit.reading import open_capture, open_snapshot, open_trace
from profkit.run.directory import KINETO_TRACE, MANIFEST, find_newest_run
from tests.conftest import ROOT
from tests.in_process import run_command
from tests.memory_captures import Training
from tests.nsys_builder import NsysBuilder
from tests.test_compare_samples import make_run

pytestmark = pytest.mark.usefixtures("read_once")

TRACES = ROOT / "traces"
SNAPSHOT = TRACES / "small-train.snapshot.pickle.gz"
NSYS = TRACES / "small-train.nsys2025.sqlite"
KINETO = TRACES / "small-train.kineto.json.gz"
RUN = TRACES / "blocks" / "eager"


@pytest.mark.parametrize("path", [NSYS, KINETO], ids=["an nsys export", "a torch.profiler trace"])
def test_a_trace_is_known_by_its_content_and_not_by_its_name(path: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "capture.bin"
    shutil.copy(path, renamed)
    assert open_trace(renamed).kernels().kernel_time_ns == profkit.read_trace(path).kernels().kernel_time_ns
    assert open_capture(renamed).snapshot is open_capture(SNAPSHOT).trace is None


def test_a_report_is_read_through_the_export_next_to_it(tmp_path: Path) -> None:
    report = tmp_path / "trace.nsys-rep"
    report.write_bytes(b"\x00report")
    builder = NsysBuilder()
    builder.kernel(200, 50)
    export = builder.write(tmp_path / "trace.sqlite")
    assert open_trace(report).kernels().kernel_time_ns == 50
    assert sorted(tmp_path.iterdir()) == [report, export]


def test_an_export_older_than_its_report_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = NsysBuilder().write(tmp_path / "trace.sqlite")
    os.utime(export, ns=(0, 0))
    report = tmp_path / "trace.nsys-rep"
    report.write_bytes(b"\x00report")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NSYS", raising=False)
    with pytest.raises(ToolError, match="no Nsight Systems here to export it"):
        open_trace(report)


def test_a_python_error_names_no_option_of_the_command_line(tmp_path: Path) -> None:
    builder = NsysBuilder(("forward", 0, 1000))
    builder.kernel(200, 50)
    opened = open_trace(builder.write(tmp_path / "t.sqlite"))
    wrong = [
        lambda: opened.of_rank(3),
        lambda: opened.kernels(per_instance=True),
        lambda: opened.kernels(instance=0),
        lambda: opened.kernels("forward", instance=9),
        lambda: opened.kernels(device=9),
        lambda: opened.kernels(process=9),
        lambda: opened.kernels(by="operator"),
    ]
    for ask in wrong:
        with pytest.raises(UsageError) as caught:
            ask()
        assert "--" not in str(caught.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for read in (open_trace, open_snapshot, open_capture):
        with pytest.raises(RunError, match="no profkit run"):
            read(tmp_path)


@pytest.mark.parametrize("path", [NSYS, KINETO, SNAPSHOT, RUN], ids=lambda path: path.name)
def test_the_summary_is_what_the_command_prints(path: Path) -> None:
    summary = profkit.open(str(path)).summary()
    assert f"{summary}\n" == run_command("summary", path).stdout
    assert repr(summary) == str(summary)
    assert set(summary.to_pandas().columns) == {"figure", "value"}


@pytest.mark.parametrize("path", [SNAPSHOT, RUN], ids=lambda path: path.name)
def test_a_capture_shows_itself_as_its_page(path: Path) -> None:
    html = profkit.open(path)._repr_html_()
    assert html.startswith("<iframe srcdoc=")
    assert html.count("<") == html.count(">") == 2, "all of the page is escaped"


def test_questions_give_what_readers_give() -> None:
    trace, read = profkit.open(NSYS), profkit.read_trace(NSYS)
    assert trace.kernels("backward") == read.kernels("backward")
    for asked, given in ((trace.ranges(), read.ranges()), (trace.efficiency("forward"), read.efficiency("forward"))):
        assert asked.to_pandas().equals(given.to_pandas())
    memory = profkit.open(SNAPSHOT).memory(at="phase:forward")
    assert memory.to_dict() == profkit.read_snapshot(SNAPSHOT).memory(at="phase:forward").to_dict()


def test_budgets_are_judged_as_by_the_command() -> None:
    check = profkit.open(NSYS).check(max_idle=0.5, max_shares={"category:gemm": 0.75})
    assert [line.held for line in check.lines] == [False, True]
    assert not check.held
    assert profkit.open(SNAPSHOT).check(max_peak_bytes=4 * 2**30).held
    assert profkit.open(KINETO).check(baseline=NSYS, force=True).lines
    with pytest.raises(UsageError, match="nothing to check"):
        profkit.open(NSYS).check()


def test_a_capture_stands_for_its_path(tmp_path: Path) -> None:
    before, after = profkit.open(NSYS), profkit.open(KINETO)
    assert (
        profkit.compare(before, after, force=True)
        .to_pandas()
        .equals(profkit.compare(NSYS, KINETO, force=True).to_pandas())
    )
    assert repr(before) == f"Capture({str(NSYS)!r})"
    assert after.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_prediction_has_the_step_and_the_peak() -> None:
    peak = Prediction(None, profkit.read_snapshot(SNAPSHOT).whatif(allocators=["expandable_segments:True"])).to_pandas()
    assert list(peak["figure"]) == ["allocated_peak_bytes"]
    assert 3_000_000_000 < peak["expected"][0] < peak["now"][0] == 3_276_553_216
    time = profkit.open(RUN).whatif(["gpu:×2"])
    assert list(time.to_pandas().loc[0])[1:] == [
        time.time.now_ns,
        time.time.low_ns,
        time.time.expected_ns,
        time.time.high_ns,
    ]


def test_an_edit_that_is_off_is_refused_before_anything_is_predicted() -> None:
    with pytest.raises(UsageError, match=r"optimizer:fuse: no optimizer 'fuse'; it is one of .*, fused, foreach"):
        profkit.open(RUN).whatif(["optimizer:fuse"])


def _write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("place", "kind", "said"),
    [
        (lambda folder: folder / "nothing.sqlite", TraceError, "no such file"),
        (
            lambda folder: _write(folder / "notes.txt", "hello"),
            TraceError,
            "no capture: neither SQLite .* nor a pickle",
        ),
        (lambda folder: _write(folder / "empty", ""), TraceError, "the file is empty"),
        (lambda folder: folder, RunError, "a directory, but no profkit run"),
    ],
)
def test_what_is_no_capture_is_refused_at_the_door(
    tmp_path: Path, place: Any, kind: type[ProfkitError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        profkit.open(place(tmp_path))


def test_what_a_capture_does_not_hold_is_said_when_it_is_asked_for() -> None:
    with pytest.raises(TraceError, match=f"this is a memory snapshot: profkit memory {SNAPSHOT}"):
        profkit.open(SNAPSHOT).kernels()
    with pytest.raises(SnapshotError, match="this is a trace"):
        profkit.open(NSYS).memory()
    with pytest.raises(SnapshotError, match="this run holds no snapshot"):
        profkit.open(RUN).memory()
    with pytest.raises(RunError, match="a file outside a run directory"):
        profkit.open(NSYS).lines()
    with pytest.raises(UsageError, match="rank 3"):
        profkit.open(RUN, rank=3).kernels()


READING = (
    ("summary",),
    ("kernels",),
    ("ranges",),
    ("efficiency",),
    ("ranks",),
    ("memory",),
    ("report",),
    ("whatif", "--fit", "1GiB"),
    ("export", "-o", "step.json.gz"),
)


def _make(folder: Path, written_s: int, **changes: object) -> Path:
    made = make_run(folder, dict(changes))
    os.utime(made / MANIFEST, (written_s, written_s))
    return made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a directory with runs of which ``runs/new`` is the newest complete one."""
    (tmp_path / "runs").mkdir()
    _make(tmp_path / "beside", 100)
    Training().write(_make(tmp_path / "runs" / "new", 200), "snapshot.pickle")
    _make(tmp_path / "runs" / "cut off", 300, status="incomplete")
    (tmp_path / "another program").mkdir()
    (tmp_path / "another program" / MANIFEST).write_text("[]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_newest_complete_run_is_read_and_named(place: Path) -> None:
    for command in READING:
        left_out = run_command(*command)
        named = run_command(command[0], place / "runs" / "new", *command[1:])
        line, *rest = left_out.stderr.splitlines(keepends=True)
        assert line.endswith("was left out: runs/new is the newest complete run here\n")
        assert left_out.returncode == named.returncode
        assert "".join(rest) == named.stderr.replace(f"{place}/", "")


def test_a_run_beside_the_others_counts_too(place: Path) -> None:
    os.utime(place / "beside" / MANIFEST, (400, 400))
    assert find_newest_run(Path()) == Path("beside")
    assert run_command("ranges").stdout == run_command("ranges", "beside").stdout


def test_without_a_complete_run_the_request_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in READING:
        done = run_command(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert "was left out, and there is no complete run here or in runs/" in done.stderr


def test_what_judges_or_copies_a_run_is_given_one(place: Path) -> None:
    for command in ("check", "scrub", "gather", "compare"):
        done = run_command(command)
        assert done.returncode == 2
        assert "Missing argument" in done.stderr


def test_a_folder_without_a_manifest_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    shutil.copy(ROOT / "traces" / "tiny-train-cpu.kineto.json.gz", tmp_path / "folder" / KINETO_TRACE)
    assert find_newest_run(tmp_path) is None


# -- results in a notebook -------------------------------------------------------------------------------------------


RESULTS: dict[str, tuple[Callable[[], Any], int]] = {
    "kernels": (lambda: read_trace(NSYS).kernels(), 51),
    "ranges": (lambda: read_trace(NSYS).ranges(), 178),
    "efficiency": (lambda: read_trace(NSYS).efficiency(), 12),
    "self-check": (lambda: read_trace(NSYS).self_check, 2),
    "memory": (lambda: read_snapshot(SNAPSHOT).memory(), 7),
    "two traces": (lambda: compare(NSYS, KINETO, force=True), 36),
    "two snapshots": (lambda: compare(SNAPSHOT, SNAPSHOT), 0),
    "budgets": (lambda: check_budgets(open_capture(NSYS), Budgets(max_idle=0.5)), 1),
    "prediction": (lambda: profkit.open(NSYS).whatif(["gpu:×2"]), 1),
    "ranks": (lambda: profkit.open(ROOT / "tests" / "light_records" / "ddp-data").ranks(), 2),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_one_short_line_a_table_and_a_frame(name: str) -> None:
    build, rows = RESULTS[name]
    result = build()
    assert isinstance(result, NotebookResult)
    line = repr(result)
    assert line.startswith(f"{type(result).__name__}(")
    assert len(line) < 330, "a long path is cut, so this holds wherever the capture lies"
    assert "\n" not in line
    frame = result.to_pandas()
    assert len(frame) == rows or (name == "two snapshots" and frame["bytes"].sum() == 0)
    assert result._repr_html_().startswith("<table")


def test_the_frames_sum_to_the_result() -> None:
    memory = read_snapshot(SNAPSHOT).memory()
    assert memory.to_pandas()["bytes"].sum() == memory.totals.allocated_peak_bytes
    changes = compare(NSYS, KINETO, force=True)
    assert changes.to_pandas()["before_ns"].sum() == changes.time.kernel_time.before_ns


def test_a_table_without_rows_keeps_its_columns() -> None:
    assert list(table_of((), KernelRow).columns)[:3] == ["name", "category", "count"]


def test_names_from_a_capture_are_text_in_html(oddly_named: Any) -> None:
    html = read_trace(oddly_named).kernels()._repr_html_()
    assert "<float>" not in html
    assert "&lt;float&gt;" in html
