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

LONGEST_NAME = 4096
"""A longer name is judged by its first characters; real ones stay below 3,000."""


@dataclass(frozen=True)
class Category:
    """A verdict: one of `CATEGORIES`, and the rule that gave it (``no rule`` for ``other``)."""

    name: str
    rule: str


OTHER = Category("other", "no rule")

_CASELESS = "(?i)"
_Find = Callable[[str], re.Match[str] | None]


@cache
def categorize(name: str, measure: Measure = "gpu-kernel") -> Category:
    """Return the category of a kernel by its demangled name, or of a CPU operator by its own, and why.

    The first rule of ``categories.toml`` that fits decides; of a name longer than `LONGEST_NAME`, its beginning.
    """
    name = name[:LONGEST_NAME]
    lowered = name.lower()
    for rule in _compiled_rules(measure):
        if rule.fits(name, lowered):
            return rule.category
    return OTHER


def read_rules() -> dict[Measure, list[dict[str, Any]]]:
    """Return the rules as the file has them, in order."""
    document = tomllib.loads(_RULES.read_text(encoding="utf-8"))
    return {"gpu-kernel": document["kernel"], "cpu-operator": document["operator"]}


@dataclass(frozen=True)
class _Rule:
    """One rule: its patterns that heed case, those that do not, which are tried on the name in small letters."""

    category: Category
    exact: _Find | None
    caseless: _Find | None

    def fits(self, name: str, lowered: str) -> bool:
        """Return whether one of the patterns is found in the name."""
        return bool((self.exact and self.exact(name)) or (self.caseless and self.caseless(lowered)))


@cache
def _compiled_rules(measure: Measure) -> list[_Rule]:
    rules = []
    for rule in read_rules()[measure]:
        exact = [pattern for pattern in rule["patterns"] if not pattern.startswith(_CASELESS)]
        # Small letters on both sides: with re.IGNORECASE, Python's engine tries every alternative at every letter.
        caseless = [_lower(p.removeprefix(_CASELESS)) for p in rule["patterns"] if p.startswith(_CASELESS)]
        rules.append(_Rule(Category(rule["category"], rule["rule"]), _finder(exact), _finder(caseless)))
    return rules


def _finder(patterns: list[str]) -> _Find | None:
    if not patterns:
        return None
    expression = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    # A search would try an anchored pattern at every letter of a name that may have thousands.
    anchored = all(pattern.startswith("^") for pattern in patterns)
    return expression.match if anchored else expression.search


def _lower(pattern: str) -> str:
    """Return the pattern in small letters; an escape such as ``\\W`` keeps its own."""
    return re.sub(r"\\.|[A-Z]", lambda found: found[0] if found[0][0] == "\\" else found[0].lower(), pattern)
