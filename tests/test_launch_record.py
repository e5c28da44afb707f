"""A run's course with a stand-in for nsys and for the worker: streams, scratch folder, failures, warnings."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from profkit.errors import ToolError
from profkit.launch import record
from profkit.launch.nsys import Nsys
from profkit.launch.record import Recorded, record_run
from profkit.models.workload import Order, Workload

RESULT = {
    "device": "cpu",
    "gpu": None,
    "torch": "2.4.0",
    "cuda": None,
    "parameter_count": 7,
    "conditions": {"float32_matmul_precision": "highest", "cuda_matmul_fp32_precision": None, "gpu_uuid": None},
    "during": {"compiled_graphs": 0, "allocator_retries": 0, "out_of_memory_errors": 0},
    "losses": [],
    "steps": [{"forward_ns": 1, "step_ns": 1}],
    "work": None,
}

WORKER = """
import json, os, sys
order = json.loads(sys.argv[1])
out = (order["output_fds"] or [1])[0]
os.write(out, f"the target: {os.environ.get('TMPDIR')}\\n".encode())
open(order["result_path"], "w").write(json.dumps(json.loads(sys.argv[2])))
sys.exit(int(sys.argv[3]))
"""

PROFILE = """
import os, pathlib, subprocess, sys, tempfile
options = [word for word in sys.argv[2:] if word.startswith("--")]
target = sys.argv[2 + len(options):]
named = dict(option.split("=", 1) for option in options)
if sys.argv[1] == "export":
    if {export}: pathlib.Path(named["--output"]).write_bytes(pathlib.Path(target[0]).read_bytes())
    sys.exit({export_status})
print("nsys says:", {saying!r})
pathlib.Path(tempfile.gettempdir(), "raw.qdstrm").touch()
name, _, value = named["--env-var"].partition("=")
status = subprocess.run(target, env={{**os.environ, name: value}}, close_fds=False).returncode
if {report}: pathlib.Path(named["--output"] + ".nsys-rep").write_text("report")
sys.exit(status)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorded]:
    """Run into ``tmp_path / "run"`` with the stand-ins."""

    def start(
        *,
        status: int = 0,
        report: bool = True,
        export: bool = True,
        export_status: int = 0,
        saying: str = "hello",
        **found: Any,
    ) -> Recorded:
        code = PROFILE.format(report=report, export=export, export_status=export_status, saying=saying)
        nsys = tmp_path / "nsys"
        nsys.write_text(f"#!{sys.executable}\n{code}")
        nsys.chmod(nsys.stat().st_mode | stat.S_IXUSR)

        def argv(order: Order) -> list[str]:
            failing = status if order.recorder == "nsys" else 0
            return [sys.executable, "-c", WORKER, order.to_json(), json.dumps({**RESULT, **found}), str(failing)]

        monkeypatch.setattr(record, "_worker_argv", argv)
        return record_run(Workload("tiny"), Nsys(nsys, "1.0"), tmp_path / "run", ["profkit", "run"], _silent)

    return start


@contextmanager
def _silent(doing: str) -> Iterator[None]:
    yield


def _manifest(tmp_path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((tmp_path / "run" / "manifest.json").read_text())
    return manifest


@pytest.mark.parametrize(
    ("device", "older", "newer", "tf32"),
    [
        ("cuda", "highest", None, False),
        ("cuda", "high", None, True),
        ("cuda", "highest", "none", False),
        ("cuda", None, "tf32", True),
        ("cuda", "high", "ieee", False),
        ("cpu", "high", "tf32", False),
    ],
)
def test_products_in_tf32(device: str, older: str | None, newer: str | None, tf32: bool) -> None:
    conditions = {"float32_matmul_precision": older, "cuda_matmul_fp32_precision": newer}
    assert record.uses_tf32({"device": device, "conditions": conditions}) is tf32


def test_a_run_under_nsys(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    recorded = start()
    run = tmp_path / "run"
    assert recorded == Recorded(run, 0, has_kernels=False, warnings=())
    assert (run / "trace.sqlite").read_text() == "report"
    names = sorted(path.name for path in run.iterdir())
    assert names == ["log.txt", "manifest.json", "trace.nsys-rep", "trace.sqlite", "work.json"]
    manifest = _manifest(tmp_path)
    assert (manifest["status"], manifest["versions"]["nsys"]) == ("complete", "1.0")


def test_the_targets_words_go_through_and_nsys_own_go_to_the_log(
    tmp_path: Path, start: Callable[..., Recorded], capfd: pytest.CaptureFixture[str]
) -> None:
    start()
    out = capfd.readouterr().out
    assert out.count("the target") == 2
    assert "nsys says" not in out
    assert (tmp_path / "run" / "log.txt").read_text() == "nsys says: hello\n"


def test_raw_data_lies_in_a_scratch_folder_and_the_targets_own_is_untouched(
    tmp_path: Path,
    start: Callable[..., Recorded],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(record.tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    start()
    assert capfd.readouterr().out == f"the target: {temporary}\n" * 2
    assert list(temporary.iterdir()) == []


def test_the_targets_status_is_the_runs(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    assert start(status=5) == Recorded(tmp_path / "run", 5)
    assert (_manifest(tmp_path)["status"], _manifest(tmp_path)["exit_status"]) == ("failed", 5)


def test_on_a_gpu_products_of_fp32_may_be_tf32(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    told = {"float32_matmul_precision": "high", "cuda_matmul_fp32_precision": "tf32", "gpu_uuid": "GPU-1"}
    assert start(device="cuda", gpu="NVIDIA H200", conditions=told).has_kernels
    assert json.loads((tmp_path / "run" / "work.json").read_text())["dtype"] == "tf32"
    assert _manifest(tmp_path)["conditions"] == told


def test_lost_events_are_warned_of(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    (warning,) = start(saying="Errors occurred while processing the raw events.").warnings
    assert "lossy" in warning
    assert _manifest(tmp_path)["warnings"] == [warning]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ({"report": False}, r"nsys left no report; what it said is in .*log.txt"),
        ({"export": False}, r"could not export .*trace.nsys-rep: exit status 0"),
        ({"export_status": 3}, r"could not export .*trace.nsys-rep: exit status 3"),
    ],
)
def test_nsys_own_failures(
    tmp_path: Path, start: Callable[..., Recorded], failing: dict[str, Any], message: str
) -> None:
    with pytest.raises(ToolError, match=message) as error:
        start(**failing)
    assert (_manifest(tmp_path)["status"], _manifest(tmp_path)["reason"]) == ("failed", str(error.value))
    assert not [path.name for path in (tmp_path / "run").iterdir() if "sqlite" in path.name]


def test_compiled_code_is_warned_of(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "run")
    (warning,) = record._warnings(tmp_path / "run", Workload("tiny", compile_mode="default"))
    assert "carries no ranges" in warning
