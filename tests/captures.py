"""Where the real captures are that are too large for the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CAPTURES = Path(os.environ.get("PROFKIT_CAPTURES") or Path(__file__).parents[2] / "shared" / "captures")


def capture(name: str) -> Path:
    """Return a real capture; skips where there is none."""
    if not (CAPTURES / name).exists():
        pytest.skip(f"{name} is not here ({CAPTURES}); set PROFKIT_CAPTURES to the folder of real captures")
    return CAPTURES / name
