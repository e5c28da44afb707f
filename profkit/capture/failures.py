"""What ended a rank: torchrun ends all of them when one fails, and does not say in their words why."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from profkit.capture.whole_files import write_json
from profkit.models.attachment import FAILURE_GLOB


def note_failure(run: Path) -> None:
    """At the process's end: leave the exception that ended it for the launcher, if this is a rank and there was one."""
    rank, error = os.environ.get("RANK"), getattr(sys, "last_value", None)
    if rank is None or error is None:
        return
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    write_json(run / FAILURE_GLOB.replace("*", f"rank{rank}"), {"rank": int(rank), "error": text})
