"""On a busy machine steps vary, and profkit says so: tests of what else is said leave that out."""

from __future__ import annotations

_DOUBTS = ("profkit: warning: the ", "profkit: warning: recorded steps were faster")


def without_doubts(stderr: str) -> str:
    """Return what was said beside the warnings about the times of steps."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not (line.startswith(_DOUBTS) and " steps" in line))
