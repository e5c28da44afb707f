"""What kind of work a kernel or a CPU operator does, told by its name.

The rules are data: ``categories.toml`` beside this file, read once, when first asked.
"""

from __future__ import annotations

import re
import tomllib
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
    for pattern, category in _compiled_rules()[measure]:
        if pattern.search(name):
            return category
    return OTHER


def read_rules() -> dict[Measure, list[dict[str, Any]]]:
    """Return the rules as the file has them, in order."""
    document = tomllib.loads(_RULES.read_text(encoding="utf-8"))
    return {"gpu-kernel": document["kernel"], "cpu-operator": document["operator"]}


@cache
def _compiled_rules() -> dict[Measure, list[tuple[re.Pattern[str], Category]]]:
    return {
        measure: [
            # A flag such as (?i) may only stand at the start of a whole expression: scope it to its own pattern.
            (re.compile("|".join(map(_scoped, rule["patterns"]))), Category(rule["category"], rule["rule"]))
            for rule in rules
        ]
        for measure, rules in read_rules().items()
    }


def _scoped(pattern: str) -> str:
    if pattern.startswith("(?i)"):
        return f"(?i:{pattern[4:]})"
    return f"(?:{pattern})"
