"""Fixtures shared by the tests: where real captures lie, and how to run the command line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from profkit.cli import main
from tests.captures import CAPTURES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def captures() -> Path:
    """Return the folder of captures that are too large for the repository; tests that need them skip without it."""
    if not CAPTURES.is_dir():
        pytest.skip(f"the large captures are not here ({CAPTURES}); set PROFKIT_CAPTURES")
    return CAPTURES


ANALYZERS = ("kernels", "ranges", "efficiency", "memory", "compare", "check", "scrub", "help")
"""Commands that only read files and print: they need no process of their own."""


@pytest.fixture(scope="session")
def profkit() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command line: in this process if possible, which takes a tenth of the time."""

    def run(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        argv = [str(argument) for argument in arguments]
        if argv and argv[0] in ANALYZERS and options.keys() <= {"env", "cwd"}:
            with chdir(options.get("cwd", ".")):  # type: ignore[arg-type]
                return call_main(argv, options.get("env"))  # type: ignore[arg-type]
        command = [sys.executable, "-m", "profkit", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)  # type: ignore[call-overload, no-any-return]

    return run


def call_main(argv: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Call the command line in this process; the result is what a process of its own would have left."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with (
        redirect_stdout(streams[0]),
        redirect_stderr(streams[1]),
        mock.patch.dict(os.environ, env or {}, clear=env is not None),
        pytest.raises(SystemExit) as caught,
    ):
        main(argv)
    code = caught.value.code
    out, err = (stream.buffer.getvalue().decode().replace("\r\n", "\n") for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(argv, code if isinstance(code, int) else int(code is not None), out, err)
