"""Fixtures shared by the tests: where real captures lie, and how to run the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.captures import CAPTURES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def captures() -> Path:
    """Return the folder of captures that are too large for the repository; tests that need them skip without it."""
    if not CAPTURES.is_dir():
        pytest.skip(f"the large captures are not here ({CAPTURES}); set PROFKIT_CAPTURES")
    return CAPTURES


@pytest.fixture(scope="session")
def profkit() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command line as its own process."""

    def run(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "profkit", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)  # type: ignore[call-overload, no-any-return]

    return run
