"""The guides that ``profkit help TOPIC`` shows, one Markdown file each; the first line is the topic's title."""

from __future__ import annotations

from pathlib import Path

TOPICS = (
    "start",
    "scripts",
    "summary",
    "ranges",
    "attribution",
    "efficiency",
    "memory",
    "whatif",
    "try",
    "ranks",
    "compare",
    "output",
    "python",
    "security",
)
"""In the order in which a new user needs them."""


def read_guide(topic: str) -> str:
    """Return the text of a guide, one of `TOPICS`."""
    return (Path(__file__).parent / f"{topic}.md").read_text(encoding="utf-8")


def title_of(topic: str) -> str:
    """Return what a guide is about, in its own words."""
    return read_guide(topic).partition("\n")[0].removeprefix("# ")
