"""nsys: how it is called, and a run's course under it with stand-ins for nsys and for the target."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from profkit.errors import ToolError
from profkit.launch import nsys as launched_nsys
from profkit.launch.nsys import (
    Nsys,
    build_nsys_argv,
)
from profkit.launch.passes import Pass, Target
from profkit.launch.record import Recorded, record_run
from profkit.run.manifest import Conditions, Process, Workload
from profkit.run.recording import Order
from tests.in_process import manifest_of, names_in


def _argv(*, cuda: bool = True, **how: Any) -> list[str]:
    return build_nsys_argv(Nsys(Path("nsys"), "1.0", **how), Path("run/trace"), ["python"], cuda=cuda)


@pytest.mark.nsys
def test_a_real_nsys_names_all_that_is_used() -> None:
    nsys = shutil.which("nsys")
    assert nsys, "the marker promises an nsys"
    known = subprocess.run([nsys, "profile", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(word.partition("=")[0] in known for word in _argv() if word.startswith("--"))


def test_an_nsys_of_which_nothing_is_known_gets_all_flags() -> None:
    argv = build_nsys_argv(Nsys(Path("/n/nsys"), "1.0"), Path("run/trace"), ["python", "x"], cuda=True, temporary="/t")
    assert " ".join(argv) == (
        "/n/nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --cuda-graph-trace=node "
        "--capture-range=cudaProfilerApi --capture-range-end=stop --env-var=TMPDIR=/t --output=run/trace python x"
    )


def test_the_choice_for_graphs_is_passed_on() -> None:
    assert "--cuda-graph-trace=graph" in _argv(cuda_graph_trace="graph")


def test_without_cuda_its_apis_are_left_out() -> None:
    argv = _argv(cuda=False)
    assert "--trace=nvtx" in argv
    assert not [word for word in argv if "capture-range" in word or "graph" in word]


def test_a_percent_in_the_runs_name_is_no_pattern() -> None:
    argv = build_nsys_argv(Nsys(Path("nsys"), "1.0"), Path("50%p/trace"), ["python"], cuda=False)
    assert "--output=50%%p/trace" in argv


PROCESS = Process("7", pid=7, steps_seen=1, device="cpu", torch="2.4.0", conditions=Conditions("highest"))

# Leaves what profkit would leave in the target's process; the first argument is the exit status under nsys.
TARGET = """
import json, os, sys
order = json.loads(os.environ["PROFKIT_ATTACH"])
print(f"the target: {os.environ.get('TMPDIR')}", flush=True)
print(f"with umask {os.umask(0):o}", flush=True)
process = {**json.loads(sys.argv[2]), "profiled": [{"forward_ns": 1, "step_ns": 1}]}
open(os.path.join(order["run"], "attached-7.json"), "w").write(json.dumps(process))
sys.exit(int(sys.argv[1]) if order["recorder"] == "nsys" else 0)
"""

# {leave} is what it does with ``report``, the path without suffix, when its target has ended.
NSYS = """
import os, pathlib, subprocess, sys, tempfile
options = [word for word in sys.argv[2:] if word.startswith("--")]
named = dict(option.split("=", 1) for option in options if "=" in option)
rest = sys.argv[2 + len(options):]
if sys.argv[1] == "export":
    {export}
if {saying!r}:
    print("nsys says:", {saying!r}, flush=True)
pathlib.Path(tempfile.gettempdir(), "raw.qdstrm").touch()
failures = pathlib.Path(__file__ + ".failures")
if failures.exists() and (left := int(failures.read_text())):
    failures.write_text(str(left - 1))
    print("Connection to Agent lost.", flush=True); sys.exit({early})
if {refuses}:
    print("unrecognised option '--nope'\\n\\nusage: nsys profile [<args>]", flush=True); sys.exit(1)
name, _, value = named["--env-var"].partition("=")
os.umask(0)  # as nsys does
status = subprocess.run(rest, env={{**os.environ, name: value}}, close_fds=False).returncode
report = named["--output"]
{leave}
sys.exit(status)
"""
EXPORT = "pathlib.Path(named['--output']).write_bytes(pathlib.Path(rest[0]).read_bytes()); sys.exit(0)"
IMPORTER = """
import pathlib, sys
named = dict(option.split("=", 1) for option in sys.argv[1:])
pathlib.Path(named["--output-file"]).write_text("imported " + pathlib.Path(named["--input-file"]).read_text())
"""
BARE = "pathlib.Path(report + '.qdstrm').write_text('raw')"
WHOLE = "pathlib.Path(report + '.nsys-rep').write_text('report')"


def _program(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@contextmanager
def _silent(_doing: str) -> Iterator[None]:
    yield


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Recorded]:
    """Record an unprofiled pass and one under nsys into ``tmp_path / "run"``, with the stand-ins."""

    def start(
        leave: str = WHOLE,
        *,
        status: int = 0,
        export: str = EXPORT,
        saying: str = "hello",
        failures: int = 0,
        early: int = 1,
        refuses: bool = False,
        keep_report: bool = True,
        **found: Any,
    ) -> Recorded:
        code = NSYS.format(leave=leave, export=export, saying=saying, early=early, refuses=refuses)
        nsys = Nsys(_program(tmp_path / "target-linux-x64" / "nsys", code), "1.0", keep_report=keep_report)
        (tmp_path / "target-linux-x64" / "nsys.failures").write_text(str(failures))
        left = json.dumps(asdict(replace(PROCESS, **found)))
        argv = (sys.executable, "-c", TARGET, str(status), left)
        order = Order("", "nsys", 0, 1, own_steps=True)
        passes = (Pass(argv, replace(order, recorder="none", steps=None)), Pass(argv, order))
        target = Target("model.tiny", "model", passes, Workload())
        return record_run(target, nsys, tmp_path / "run", command=["profkit", "run"], progress=_silent, say=print)

    return start


def test_a_run_holds_the_report_its_export_and_the_log(
    tmp_path: Path,
    start: Callable[..., Recorded],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target runs once without nsys and once under it, with the same streams, scratch folder and umask."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = os.umask(0o027)
    try:
        recorded = start()
    finally:
        os.umask(before)
    assert (recorded.run, recorded.exit_status, recorded.reason) == (tmp_path / "run", 0, None)
    assert (recorded.has_trace, recorded.has_kernels, len(recorded.process.profiled)) == (True, False, 1)
    assert (tmp_path / "run" / "trace.sqlite").read_text() == "report"
    assert names_in(tmp_path / "run") == ["log.txt", "manifest.json", "trace.nsys-rep", "trace.sqlite"]
    assert list(temporary.iterdir()) == []
    manifest = manifest_of(tmp_path / "run")
    assert (manifest["status"], manifest["versions"]["nsys"]) == ("complete", "1.0")
    assert manifest["clean"]["steps"] == manifest["profiled"]["steps"] == [{"forward_ns": 1, "step_ns": 1}]
    out = capfd.readouterr().out
    assert (out.count(f"the target: {temporary}\n"), out.count("with umask 27")) == (2, 2)
    assert "nsys says" not in out
    assert (tmp_path / "run" / "log.txt").read_text() == "nsys says: hello\n"


def test_the_targets_status_is_the_runs_and_lost_events_are_warned_of(
    tmp_path: Path, start: Callable[..., Recorded]
) -> None:
    recorded = start(status=5, saying="Errors occurred while processing the raw events.")
    assert recorded.exit_status == 5
    (warning,) = recorded.warnings
    assert "lossy" in warning
    manifest = manifest_of(tmp_path / "run")
    assert (manifest["status"], manifest["exit_status"], manifest["warnings"]) == ("failed", 5, [warning])


def test_on_a_gpu_there_are_kernels_and_a_report_may_go(start: Callable[..., Recorded], tmp_path: Path) -> None:
    assert start(device="cuda").has_kernels
    shutil.rmtree(tmp_path / "run")
    assert start(device="cuda", keep_report=False).has_kernels
    assert names_in(tmp_path / "run") == ["log.txt", "manifest.json", "trace.sqlite"], (
        "the report goes once it is exported"
    )


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ({"leave": ""}, r"nsys left no report: nsys says: hello; its output is in .*log.txt"),
        ({"export": "sys.exit(0)"}, r"could not export .*trace.nsys-rep: exit status 0"),
        ({"export": "sys.exit(3)"}, r"could not export .*trace.nsys-rep: exit status 3"),
        ({"export": "pathlib.Path(named['--output']).touch(); sys.exit(0)"}, r"could not export .*trace.nsys-rep"),
    ],
)
def test_a_failure_of_nsys_fails_the_run_and_keeps_the_report(
    tmp_path: Path, start: Callable[..., Recorded], failing: dict[str, Any], message: str
) -> None:
    with pytest.raises(ToolError, match=message) as error:
        start(keep_report=False, **failing)
    assert (manifest_of(tmp_path / "run")["status"], manifest_of(tmp_path / "run")["reason"]) == (
        "failed",
        str(error.value),
    )
    report = ["trace.nsys-rep"] * ("leave" not in failing)
    assert names_in(tmp_path / "run") == ["log.txt", "manifest.json", *report]


@pytest.mark.parametrize("left", [BARE, f"{BARE}; {WHOLE}"], ids=["alone", "beside a report"])
def test_a_bare_qdstrm_is_imported_and_exported(tmp_path: Path, start: Callable[..., Recorded], left: str) -> None:
    _program(tmp_path / "host-linux-x64" / "QdstrmImporter", IMPORTER)
    assert start(left).exit_status == 0
    assert names_in(tmp_path / "run") == ["log.txt", "manifest.json", "trace.nsys-rep", "trace.sqlite"]
    assert (tmp_path / "run" / "trace.nsys-rep").read_text() == "imported raw"


def test_a_killed_nsys_fails_the_run(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    with pytest.raises(ToolError, match=r"nsys was killed \(SIGKILL\): its child processes were ended") as error:
        start("import os; os.kill(os.getpid(), 9)")
    assert manifest_of(tmp_path / "run")["reason"] == str(error.value)
    assert names_in(tmp_path / "run") == ["log.txt", "manifest.json"]


def test_an_nsys_that_does_not_understand_its_flags_is_quoted(start: Callable[..., Recorded]) -> None:
    with pytest.raises(ToolError, match=r"nsys did not start the target: unrecognised option '--nope'$"):
        start(saying="", refuses=True)


@pytest.mark.parametrize("early", [0, 1])
def test_an_nsys_that_ends_before_the_target_begins_is_started_again(
    tmp_path: Path, start: Callable[..., Recorded], capfd: pytest.CaptureFixture[str], early: int
) -> None:
    assert start(failures=2, early=early).exit_status == 0
    assert (tmp_path / "run" / "log.txt").read_text().count("Connection to Agent lost.") == 2
    assert capfd.readouterr().out.count("the target: ") == 2, "once without nsys, once under it"


def test_an_nsys_that_never_starts_the_target_is_quoted(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    with pytest.raises(ToolError, match=r"nsys did not start the target: Connection to Agent lost\.; its output is in"):
        start(failures=3)
    assert manifest_of(tmp_path / "run")["status"] == "failed"


Usage = namedtuple("Usage", "total used free")


def test_where_there_is_no_room_nsys_is_not_started(
    tmp_path: Path, start: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {str(tmp_path / "run"): 10**12}
    monkeypatch.setattr(launched_nsys.shutil, "disk_usage", lambda path: Usage(0, 0, free.get(str(path), 5 * 2**20)))
    with pytest.raises(ToolError, match=r"the disk is full: 5\.0 MiB are free, and nsys needs 100; .*TMPDIR"):
        start()
    free[str(tmp_path / "run")] = 0
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ToolError, match=r"run: the disk is full: 0\.0 MiB are free, .*name another with -o"):
        start()


@pytest.mark.parametrize(("leave", "said"), [(WHOLE, "then export .*nsys-rep again"), ("", "nsys left no report")])
def test_a_disk_that_fills_up_meanwhile_fails_the_run(
    tmp_path: Path, start: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch, leave: str, said: str
) -> None:
    monkeypatch.setattr(launched_nsys, "_FULL_BYTES", 2**80)
    with pytest.raises(ToolError, match=f"run: the disk is full.*{said}"):
        start(leave)
    assert "trace.sqlite" not in names_in(tmp_path / "run")
