"""The one door: what each kind of file is opened as, and what the error for a wrong file says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import profkit
from profkit.errors import RunError, SnapshotError, ToolError, TraceError, UsageError
from profkit.reading import open_capture, open_snapshot, open_trace
from tests.conftest import ROOT
from tests.nsys_builder import NsysBuilder

TRACES = ROOT / "traces"
SNAPSHOT = TRACES / "small-train.snapshot.pickle.gz"
EXPORT = TRACES / "small-train.nsys2025.sqlite"
KINETO = TRACES / "small-train.kineto.json.gz"


@pytest.mark.parametrize("path", [EXPORT, KINETO], ids=["an nsys export", "a torch.profiler trace"])
def test_a_trace_is_known_by_its_content_and_not_by_its_name(path: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "capture.bin"
    shutil.copy(path, renamed)
    assert open_trace(renamed).kernels().kernel_time_ns == profkit.read_trace(path).kernels().kernel_time_ns


def test_a_snapshot_named_as_a_trace_gets_the_command_that_reads_it() -> None:
    with pytest.raises(TraceError, match=f"this is a memory snapshot: profkit memory {SNAPSHOT}"):
        open_trace(SNAPSHOT)


@pytest.mark.parametrize("path", [EXPORT, KINETO], ids=["an nsys export", "a torch.profiler trace"])
def test_a_trace_named_as_a_snapshot_gets_the_command_that_reads_it(path: Path) -> None:
    with pytest.raises(SnapshotError, match=f"this is a trace: profkit kernels {path}"):
        open_snapshot(path)


def test_a_capture_is_a_trace_or_a_snapshot_by_its_content() -> None:
    assert open_capture(SNAPSHOT).trace is None
    assert open_capture(KINETO).snapshot is None


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
    builder = NsysBuilder()
    builder.range("forward", 0, 1000)
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
