"""One thing that the self-check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["failed", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that the self-check has to say; ``code`` is stable, ``message`` one sentence with its numbers."""

    verdict: Verdict
    code: str
    message: str
