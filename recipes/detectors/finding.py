"""What a detector says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A mistake that the numbers give away; a note says what to know when reading them, and is no mistake."""

    code: str
    table: str
    message: str
    is_note: bool = False
