"""`profkit.open`: one door and one object for runs, traces and snapshots, which answers what the commands print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import profkit
from profkit.analysis.step_replay.predict import Prediction
from profkit.errors import ProfkitError, RunError, SnapshotError, TraceError, UsageError
from tests.conftest import ROOT
from tests.in_process import run_command

TRACES = ROOT / "traces"
NSYS, KINETO = TRACES / "small-train.nsys2025.sqlite", TRACES / "small-train.kineto.json.gz"
SNAPSHOT = TRACES / "small-train.snapshot.pickle.gz"
RUN = TRACES / "blocks" / "eager"


@pytest.mark.parametrize("path", [NSYS, KINETO, SNAPSHOT, RUN], ids=lambda path: path.name)
def test_the_summary_is_what_the_command_prints(path: Path) -> None:
    summary = profkit.open(str(path)).summary()
    assert f"{summary}\n" == run_command("summary", path).stdout
    assert repr(summary) == str(summary)
    assert set(summary.to_pandas().columns) == {"figure", "value"}
    html = profkit.open(path)._repr_html_()
    assert html.startswith("<iframe srcdoc=")
    assert html.count("<") == html.count(">") == 2, "all of the page is escaped"


def test_questions_give_what_readers_give() -> None:
    trace, snapshot = profkit.open(NSYS), profkit.open(SNAPSHOT)
    assert trace.kernels("backward") == profkit.read_trace(NSYS).kernels("backward")
    assert trace.ranges().to_pandas().equals(profkit.read_trace(NSYS).ranges().to_pandas())
    assert trace.efficiency("forward").to_pandas().equals(profkit.read_trace(NSYS).efficiency("forward").to_pandas())
    memory = profkit.read_snapshot(SNAPSHOT).memory()
    assert snapshot.memory().peak == memory.totals.allocated_peak_bytes == 3_276_553_216
    assert (
        snapshot.memory(at="phase:forward").to_dict()
        == profkit.read_snapshot(SNAPSHOT).memory(at="phase:forward").to_dict()
    )


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
    assert after.report(tmp_path / "page.html", against=before).read_text().startswith("<!doctype html>")


def test_a_prediction_has_the_step_and_the_peak() -> None:
    peak = Prediction(None, profkit.read_snapshot(SNAPSHOT).whatif(allocators=["expandable_segments:True"])).to_pandas()
    assert list(peak["figure"]) == ["allocated_peak_bytes"]
    assert 3_000_000_000 < peak["expected"][0] < peak["now"][0] == 3_276_553_216
    time = profkit.open(RUN).whatif(["gpu:×2"])
    assert time.time is not None
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
        (lambda folder: _write(folder / "notes.txt", "hello"), TraceError, "neither an nsys SQLite export nor"),
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
