"""What kind of work a kernel or a CPU operator does, by its name.

The rules are data: ``categories.toml`` next to this file, read once, when they are first needed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from profkit.trace.columns import Measure

CATEGORIES = (
    "gemm",
    "attention",
    "softmax",
    "normalization",
    "elementwise",
    "reduction",
    "copy/cast",
    "embedding/index",
    "optimizer",
    "loss",
    "communication",
    "random",
    "graph",
    "other",
)

_RULES = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Category:
    """A verdict: one of `CATEGORIES`, and the rule that gave it (``no rule`` for ``other``)."""

    name: str
    rule: str


OTHER = Category("other", "no rule")


@cache
def categorize(name: str, measure: Measure = "gpu-kernel") -> Category:
    """Return the category of a kernel by its demangled name, or of a CPU operator by its own, and why.

    The first rule of ``categories.toml`` that fits decides.
    """
    for find, category in _compiled_rules(measure):
        if find(name):
            return category
    return OTHER


def read_rules() -> dict[Measure, list[dict[str, Any]]]:
    """Return the rules as the file has them, in order."""
    document = tomllib.loads(_RULES.read_text(encoding="utf-8"))
    return {"gpu-kernel": document["kernel"], "cpu-operator": document["operator"]}


@cache
def _compiled_rules(measure: Measure) -> list[tuple[Callable[[str], re.Match[str] | None], Category]]:
    compiled: list[tuple[Callable[[str], re.Match[str] | None], Category]] = []
    for rule in read_rules()[measure]:
        patterns = rule["patterns"]
        expression = re.compile("|".join(map(_scoped, patterns)))
        # A search would try an anchored pattern at every letter of a name that may have thousands.
        anchored = all(pattern.startswith("^") for pattern in patterns)
        compiled.append((expression.match if anchored else expression.search, Category(rule["category"], rule["rule"])))
    return compiled


def _scoped(pattern: str) -> str:
    """Return the pattern as one alternative of several; ``(?i)`` alone may only stand at the start of the whole."""
    return f"(?i:{pattern.removeprefix('(?i)')})" if pattern.startswith("(?i)") else f"(?:{pattern})"
