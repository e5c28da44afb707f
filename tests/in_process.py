"""Runs a command of profkit inside the test's own process: a hundred times faster than starting Python."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from profkit.cli import main


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Return what ``profkit ARGUMENTS`` printed and its exit code."""
    given = [str(argument) for argument in arguments]
    code: object = None
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main(given)
        except SystemExit as done:
            code = done.code
    return subprocess.CompletedProcess(given, code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())
