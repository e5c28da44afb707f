"""`Finding`: one thing that a person must know about a result before they trust it or act on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["failed", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """A stable ``code`` for programs and one sentence with its numbers for people.

    ``failed``: the result must not be trusted as a whole. ``warning``: odd; a person should look. ``note``: normal for
    captures of this kind; only JSON shows it.
    """

    code: str
    message: str
    verdict: Verdict = "warning"
