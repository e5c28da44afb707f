"""What an edit returns: the changed stream, and how far it can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from profkit.analysis.whatif.stream import Stream
from profkit.errors import UsageError

Bound = Literal["least", "likely", "most"]
"""What is taken for that which nobody knows of an edit: what needs least memory, what was seen mostly, or most."""


@dataclass(frozen=True)
class Change:
    """An edited stream; ``rests_on`` and each line of ``unknown`` are sentences for people."""

    stream: Stream
    rests_on: str
    unknown: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    """Ranges whose forward pass runs a second time."""


class CannotModelError(UsageError):
    """An edit that this snapshot says too little about, or that would change nothing."""
