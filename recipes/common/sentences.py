"""What a report says in sentences."""

from __future__ import annotations

from collections.abc import Iterable


def list_sentences(sentences: Iterable[str]) -> str:
    """Return sentences as a Markdown list; "" of none."""
    return "\n".join(f"- {sentence}" for sentence in sentences)
