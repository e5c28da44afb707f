"""What kind of work a kernel or a CPU operator does, by its name.

The rules are data: ``categories.toml`` next to this file, read once, when they are first needed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
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

_RULES = Path(__file__).with_name("categories.toml")

LONGEST_NAME = 4096
"""A longer name is judged by its first characters; real ones stay below 3,000."""


@dataclass(frozen=True)
class Category:
    """A verdict: one of `CATEGORIES`, and the rule that gave it (``no rule`` for ``other``)."""

    name: str
    rule: str


OTHER = Category("other", "no rule")

_IN_16_BITS = re.compile(r"(?<![a-z])b?f16_s1688|bfloat16|__half")
_CASELESS = "(?i)"
_GAP = "\0"
_NOT_PLAIN = re.compile(r"\\.|\[[^]]*\]")
_GROUP = re.compile(r"\([^()]*\)")
_PERHAPS = re.compile(r".(?:[?*]|\{[^}]*\})")
_PLAIN = re.compile(r"[A-Za-z0-9_:]+")
_Find = Callable[[str], re.Match[str] | None]


@cache
def categorize(name: str, measure: Measure = "gpu-kernel") -> Category:
    """Return the category of a kernel by its demangled name, or of a CPU operator by its own, and why.

    The first rule of ``categories.toml`` that fits decides; of a name longer than `LONGEST_NAME`, its beginning.
    """
    name = name[:LONGEST_NAME]
    lowered = name.lower()
    for category, patterns in _compiled_rules(measure):
        if any(pattern.fits(name, lowered) for pattern in patterns):
            return category
    return OTHER


def read_rules() -> dict[Measure, list[dict[str, Any]]]:
    document = tomllib.loads(_RULES.read_text(encoding="utf-8"))
    return {"gpu-kernel": document["kernel"], "cpu-operator": document["operator"]}


@dataclass(frozen=True)
class _Pattern:
    """One pattern; one that does not heed case is in small letters, and tried on the name in small letters.

    ``holds`` is plain text that every match contains: to look for it first is a hundred times faster than to search.
    """

    text: str
    holds: str
    is_caseless: bool

    @cached_property
    def _find(self) -> _Find:
        expression = re.compile(self.text)
        # A search would try an anchored pattern at every letter of a name that may have thousands.
        return expression.match if self.text.startswith("^") else expression.search

    def fits(self, name: str, lowered: str) -> bool:
        where = lowered if self.is_caseless else name
        return self.holds in where and self._find(where) is not None


@cache
def _compiled_rules(measure: Measure) -> list[tuple[Category, tuple[_Pattern, ...]]]:
    return [
        (Category(rule["category"], rule["rule"]), tuple(map(_read_pattern, rule["patterns"])))
        for rule in read_rules()[measure]
    ]


def _read_pattern(pattern: str) -> _Pattern:
    is_caseless = pattern.startswith(_CASELESS)
    # Small letters on both sides: with re.IGNORECASE, Python's engine tries every alternative at every letter.
    text = _lower(pattern.removeprefix(_CASELESS)) if is_caseless else pattern
    return _Pattern(text, _plain_part(text), is_caseless)


def _plain_part(pattern: str) -> str:
    rest, before = _NOT_PLAIN.sub(_GAP, pattern), ""
    while rest != before:
        rest, before = _GROUP.sub(_GAP, rest), rest
    return "" if "|" in rest else max(_PLAIN.findall(_PERHAPS.sub(_GAP, rest)), key=len, default="")


def _lower(pattern: str) -> str:
    """Return the pattern in small letters; an escape such as ``\\W`` keeps its own."""
    return re.sub(r"\\.|[A-Z]", lambda found: found[0] if found[0][0] == "\\" else found[0].lower(), pattern)


def product_dtype(name: str) -> str | None:
    """Return fp32 (without tensor cores) or tf32 for a matrix product whose kernel's name says so, else None.

    Kernels whose factors have 16 bits may have the names of either, too: ``bf16_s1688gemm_bf16``.
    """
    lowered = name.lower()
    if categorize(name).name != "gemm" or _IN_16_BITS.search(lowered):
        return None
    if "tf32" in lowered or "s1688gemm" in lowered:
        return "tf32"
    return "fp32" if "sgemm" in lowered or "f32f32_f32f32_f32" in lowered else None
