"""Every error that profkit raises on purpose, with its exit code, and `Finding`: what a result says against itself.

::

    ProfkitError                1   something could not be done; its message is one line: what, where, what to do next
    ├── CaptureError            1   a capture cannot be read or lacks what was asked of it
    │   ├── TraceError          1   … of time: an nsys export, a Kineto trace
    │   └── SnapshotError       1   … of memory: a PyTorch snapshot
    ├── RunError                1   a run directory cannot be read, made or written
    ├── ToolError               1   a program or library that is needed is missing or failed
    ├── UsageError              2   the request itself is off: an unknown range, an impossible option
    └── CheckError              3   a self-check, check or budget was not met
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["failed", "warning", "note"]


class ProfkitError(Exception):
    """Base of all of them; ``str(error)`` is one line fit for a person."""

    exit_code = 1


class CaptureError(ProfkitError):
    """A capture cannot be read, or lacks what was asked of it."""


class TraceError(CaptureError):
    """A trace (nsys SQLite export or Kineto JSON) cannot be read, or lacks what was asked of it."""


class SnapshotError(CaptureError):
    """A PyTorch memory snapshot cannot be read, or lacks what was asked of it."""


class RunError(ProfkitError):
    """A run directory cannot be read, made or written."""


class ToolError(ProfkitError):
    """A program or library that the command needs is missing, or it failed."""


class UsageError(ProfkitError):
    """The request is off: an unknown range, a malformed path, options that exclude each other."""

    exit_code = 2


class CheckError(ProfkitError):
    """A self-check under ``--strict``, a check or a budget was not met."""

    exit_code = 3


@dataclass(frozen=True)
class Finding:
    """One thing to know about a result: a stable ``code`` for programs, one sentence with its numbers for people.

    ``failed``: the result must not be trusted as a whole. ``warning``: odd; a person should look. ``note``: normal for
    captures of this kind; only JSON shows it.
    """

    code: str
    message: str
    verdict: Verdict = "warning"
