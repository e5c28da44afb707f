"""Which ranks are recorded in full, as ``--ranks`` says: by number, the first of each machine, or the slowest."""

from __future__ import annotations

import re
from dataclasses import dataclass

FIRST_PER_NODE = "first-per-node"
SLOWEST = "slowest"

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class RankChoice:
    """The ranks in some spans, both ends included, or those that a word stands for."""

    spans: tuple[tuple[int, int], ...] = ()
    word: str | None = None

    @classmethod
    def parse(cls, text: str) -> RankChoice:
        """Return the choice that a text makes.

        Raises:
            ValueError: it makes none.
        """
        if text in (FIRST_PER_NODE, SLOWEST):
            return cls(word=text)
        parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
        spans = tuple((int(part[1]), int(part[2] or part[1])) for part in parts if part is not None)
        if len(spans) < len(parts) or any(first > last for first, last in spans):
            raise ValueError(f"{text}: name ranks (0,7,8-15), {FIRST_PER_NODE} or {SLOWEST}")
        return cls(spans)

    def includes(self, rank: int | None, local_rank: int | None) -> bool | None:
        """Return whether a rank is one of them; None if only its steps will show. A process without ranks always is."""
        if rank is None:
            return True
        if self.word == SLOWEST:
            return None
        if self.word == FIRST_PER_NODE:
            return not local_rank
        return any(first <= rank <= last for first, last in self.spans)
