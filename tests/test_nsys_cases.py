"""What comes of the several ways in which an nsys can do half of its work; stand-ins for it, real processes."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import stat
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from profkit.errors import ToolError
from profkit.launch import nsys_run, record
from profkit.launch.importer import _PACKAGES, lacking_libraries
from profkit.launch.nsys import Nsys
from profkit.launch.nsys_options import NsysOptions
from profkit.launch.record import Recorded, record_run
from profkit.models.workload import CallableWorkload, Order
from tests.test_launch_record import RESULT

WORKER = """
import json, sys
json.dump(json.loads(sys.argv[2]), open(json.loads(sys.argv[1])["result_path"], "w"))
"""

# {leave} is what it does with ``report``, the path without suffix, when its target has ended.
NSYS = """
import pathlib, subprocess, sys
options = [word for word in sys.argv[2:] if word.startswith("--")]
named = dict(option.split("=", 1) for option in options)
rest = sys.argv[2 + len(options):]
if sys.argv[1] == "export":
    pathlib.Path(named["--output"]).write_bytes({export})
    sys.exit(0)
subprocess.run(rest, check=True, close_fds=False)
report = named["--output"]
{leave}
"""
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
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorded]:
    """Record into ``tmp_path / "run"`` with a stand-in for nsys, and one for the worker."""

    def start(leave: str, *, export: str = "b'exported'", options: NsysOptions | None = None) -> Recorded:
        result = json.dumps(RESULT)
        monkeypatch.setattr(
            record, "_worker_argv", lambda order: [sys.executable, "-c", WORKER, Order.to_json(order), result]
        )
        path = _program(tmp_path / "target-linux-x64" / "nsys", NSYS.format(leave=leave, export=export))
        nsys = Nsys(path, "1.0", options=options or NsysOptions())
        return record_run(CallableWorkload("a:b"), nsys, tmp_path / "run", ["profkit"], _silent)

    return start


def _manifest(tmp_path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((tmp_path / "run" / "manifest.json").read_text())
    return manifest


def _names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run").iterdir())


def test_a_bare_qdstrm_is_imported_and_exported(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    _program(tmp_path / "host-linux-x64" / "QdstrmImporter", IMPORTER)
    assert start(BARE).exit_status == 0
    assert _names(tmp_path) == ["log.txt", "manifest.json", "trace.nsys-rep", "trace.sqlite"]
    assert (tmp_path / "run" / "trace.nsys-rep").read_text() == "imported raw"
    assert _manifest(tmp_path)["status"] == "complete"


@pytest.fixture
def lacking_library() -> str:
    for library in _PACKAGES:
        try:
            ctypes.CDLL(library)
        except OSError:
            return library
    pytest.skip("all libraries that an importer may lack are here")


def _program_that_lacks(library: str, path: Path) -> Path:
    """Make a real program that needs ``library``: a shell whose need of another library is written over."""
    content = Path("/bin/bash").resolve().read_bytes()
    needed = next((word for word in re.findall(rb"lib[\w+-]+\.so\.\d+", content) if len(word) >= len(library)), None)
    if needed is None:
        pytest.skip("no program here needs a library of so long a name")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.replace(needed, library.encode().ljust(len(needed), b"\0")))
    path.chmod(0o755)
    if lacking_libraries(path) == []:
        pytest.skip("this loader does not list what it does not find")
    return path


def test_an_importer_that_lacks_a_library_names_it_and_its_package(
    tmp_path: Path, start: Callable[..., Recorded], lacking_library: str
) -> None:
    importer = _program_that_lacks(lacking_library, tmp_path / "host-linux-x64" / "QdstrmImporter")
    with pytest.raises(ToolError) as error:
        start(BARE)
    assert str(error.value).startswith(f"{importer} lacks {lacking_library}")
    assert f"install {_PACKAGES[lacking_library]}" in str(error.value)
    assert str(error.value).endswith(f"the raw capture is {tmp_path / 'run' / 'trace.qdstrm'}")
    assert _names(tmp_path) == ["log.txt", "manifest.json", "trace.qdstrm"]
    assert (_manifest(tmp_path)["status"], _manifest(tmp_path)["reason"]) == ("failed", str(error.value))


def test_the_report_goes_once_it_is_exported(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    start(WHOLE, options=NsysOptions(keep_report=False))
    assert _names(tmp_path) == ["log.txt", "manifest.json", "trace.sqlite"]


def test_the_report_stays_if_its_export_fails(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    with pytest.raises(ToolError, match=r"could not export .*trace.nsys-rep"):
        start(WHOLE, export="b''", options=NsysOptions(keep_report=False))
    assert _names(tmp_path) == ["log.txt", "manifest.json", "trace.nsys-rep"]


def test_an_nsys_that_is_killed(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    with pytest.raises(ToolError, match=r"nsys was killed \(SIGKILL\): what it had started was ended") as error:
        start("import os; os.kill(os.getpid(), 9)")
    assert _manifest(tmp_path)["reason"] == str(error.value)
    assert _names(tmp_path) == ["log.txt", "manifest.json"]


def test_an_nsys_that_does_not_understand_its_flags(tmp_path: Path, start: Callable[..., Recorded]) -> None:
    with pytest.raises(ToolError, match=r"nsys did not start the target: unrecognised option '--nope'$"):
        start("print(\"unrecognised option '--nope'\\n\\nusage: nsys profile [<args>]\", flush=True); sys.exit(1)")
    assert _manifest(tmp_path)["status"] == "failed"


Usage = namedtuple("Usage", "total used free")


def test_where_there_is_no_room_nsys_is_not_started(
    tmp_path: Path, start: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {str(tmp_path / "run"): 10**12}
    monkeypatch.setattr(nsys_run.shutil, "disk_usage", lambda path: Usage(0, 0, free.get(str(path), 5 * 2**20)))
    with pytest.raises(ToolError, match=r"the disk is full: 5\.0 MiB are free and nsys wants 100; .*TMPDIR"):
        start(WHOLE)
    free[str(tmp_path / "run")] = 0
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ToolError, match=r"run: the disk is full: 0\.0 MiB are free .*name another with -o"):
        start(WHOLE)


@pytest.mark.parametrize(("leave", "said"), [(WHOLE, "then export .*nsys-rep again"), ("", "nsys left no report")])
def test_a_disk_that_fills_up_meanwhile(
    tmp_path: Path, start: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch, leave: str, said: str
) -> None:
    monkeypatch.setattr(nsys_run, "_FULL_BYTES", 2**80)
    with pytest.raises(ToolError, match=f"run: the disk is full.*{said}"):
        start(leave)
    assert "trace.sqlite" not in _names(tmp_path)
