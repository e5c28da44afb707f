"""The command line called in this process, and what its runs leave.

What a process of its own costs is left out; what it starts is real.
"""

from __future__ import annotations

import csv
import fcntl
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from profkit.cli import main
from tests.conftest import call_main


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Return what ``profkit ARGUMENTS`` printed and its exit code, for a command that starts no process."""
    return call_main([str(argument) for argument in arguments])


def run_profkit(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``profkit ARGUMENTS`` in ``cwd`` with further environment variables, as `subprocess.run` would.

    Its own output and that of the processes it starts go to the same two files.
    """
    with tempfile.TemporaryFile("a+", errors="replace") as out, tempfile.TemporaryFile("a+", errors="replace") as err:
        before = os.getcwd()
        kept = [os.dup(number) for number in (1, 2)]
        try:
            for file, number in ((out, 1), (err, 2)):
                fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # a process that opens them anew appends too
                os.dup2(file.fileno(), number)
            os.chdir(cwd)
            argv = ["profkit", *arguments]
            with (
                patch.dict(os.environ, variables),
                patch.multiple(sys, stdout=out, stderr=err, argv=argv),
            ):
                status = _status_of(arguments)
        finally:
            os.chdir(before)
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
        said = []
        for file in (out, err):
            file.flush()
            file.seek(0)
            said.append(file.read())
    return subprocess.CompletedProcess(argv, status, *said)


def ended(done: subprocess.CompletedProcess[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    """Return what a process left, which must have ended with this status."""
    assert done.returncode == status, done.stderr
    return done


def check_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Do as `run_command`, with a command that must end well."""
    return ended(run_command(*arguments))


def check_profkit(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Do as `run_profkit`, with a command that must end well."""
    return ended(run_profkit(*arguments, cwd=cwd, **variables))


def printed(*arguments: str | Path) -> Any:
    """Return what a command that must end well prints as JSON."""
    return json.loads(check_command(*arguments, "--format", "json").stdout)


def manifest_of(run: Path) -> dict[str, Any]:
    """Return the manifest of a run directory as JSON has it."""
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return manifest


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def names_in(folder: Path) -> list[str]:
    """Return the names of what lies in a folder, in order."""
    return sorted(path.name for path in folder.iterdir())


def range_names(trace: Path) -> list[str]:
    """Return the names of the ranges that a trace of torch.profiler holds, in its order."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def _status_of(arguments: tuple[str, ...]) -> int:
    try:
        main(list(arguments))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
