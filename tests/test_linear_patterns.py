"""No name from a file makes a regular expression take more than time in proportion to its length."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

import profkit
from profkit.analysis.kernels.categories import LONGEST_NAME, categorize, read_rules
from profkit.names import kind_of
from profkit.report.text import simplify_name
from tests.child import run_in_child
from tests.linear_patterns import explain_not_linear

# What a user types is read by patterns of its own; these rooms read what a file holds.
ROOMS = ("trace", "snapshot", "allocator", "analysis", "report", "run", "names")
TYPED_BY_THE_USER = {
    "profkit.allocator.rules._DIVISION",
    "profkit.analysis.whatif.checkpoint._FORM",
    "profkit.run.edits._FACTOR",
    "profkit.analysis.memory.opened_snapshot._TIME",
}
# Matched where a value ends or an item begins, not searched for.
MATCHED_AT_A_PLACE = {
    "profkit.allocator.rules._ITEM",
    "profkit.snapshot.shared_copy._MADE_LINE",
    "profkit.trace.json_stream._COMMA",
}
# These read the patterns of our own rules.
READ_OUR_RULES = {"profkit.analysis.kernels.categories._NOT_PLAIN", "profkit.analysis.kernels.categories._PERHAPS"}

RULES = [(rule["rule"], pattern) for rules in read_rules().values() for rule in rules for pattern in rule["patterns"]]
WORDS = sorted({word for _, pattern in RULES for word in re.findall(r"[A-Za-z_]{3,}", re.sub(r"\\.", "", pattern))})
BEGINNINGS = ("", "triton_red_fused", "triton_poi_fused", "triton_", "void multi_tensor_apply_kernel<", "cpp_fused")


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(profkit.__path__, "profkit."):
        if found.name.split(".")[1] in ROOMS:
            yield importlib.import_module(found.name)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"^(?:a|b)*c", None),
        (r"^(?:ab|a)*c", "several lengths"),
        (r"^(?:_(?:t|t_copy|copy))+$", "several lengths"),
        (r"^\w*(?:\w+_)?x", "2 unbounded"),
        (r"^\w*x", None),
        (r"\w*x", "anywhere"),
        (r"a\w*x", "anywhere"),
        (r"\ba\w*x", None),
        (r"\ba.*x", "anywhere"),
        (r"::\w+$", None),
        (r"a:\w+$", None),
        (r"(?<!\d)\d+$", None),
        (r"\d+$", "anywhere"),
        (r"\w{0,60}x", None),
        (r"\w{0,60}a\w{0,60}x", "multiply to 3600"),
        (r"^(?=\w*a)(?=\w*b)", None),
        (r"^\w*(?=\w*b)", "2 unbounded"),
        (r"a\d++x", None),
        (r"\d++x", "anywhere"),
    ],
)
def test_the_judge_knows_what_is_linear(pattern: str, reason: str | None) -> None:
    found = explain_not_linear(pattern)
    assert found is None if reason is None else found is not None and reason in found


def test_every_pattern_of_a_category_is_linear() -> None:
    assert [rule for rule, pattern in RULES if explain_not_linear(pattern) is not None] == []


def test_every_other_pattern_that_reads_a_file_is_linear() -> None:
    patterns = {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str)
    }
    assert len(patterns) > 20
    reasons = {
        name: explain_not_linear(pattern.pattern, pattern.flags & ~re.UNICODE) for name, pattern in patterns.items()
    }
    slow = {
        name: reason
        for name, reason in reasons.items()
        if reason is not None and name not in TYPED_BY_THE_USER | MATCHED_AT_A_PLACE | READ_OUR_RULES
    }
    assert slow == {}


def test_names_made_of_every_rules_own_words_are_soon_judged() -> None:
    def judge() -> int:
        some = WORDS[::3]
        for number, word in enumerate(some):
            name = (BEGINNINGS[number % len(BEGINNINGS)] + f"_{word}" * LONGEST_NAME)[: LONGEST_NAME - 1] + "!"
            categorize(name)
            categorize(name, "cpu-operator")
            simplify_name(name)
            kind_of(name)
        return len(some)

    assert run_in_child(judge, cpu_seconds=60) > 200


def test_names_that_once_took_minutes_are_soon_judged() -> None:
    names = [
        "a" * 50_000,
        "triton_red_fused" + "_exp_max_sub" * 300,
        "triton_poi_fused" + "_t_copy" * 300 + "!",
        "triton_red_fused" + "_mm_mm" * 300 + "!",
        "1" * 50_000 + "x",
    ]
    found = run_in_child(lambda: [(categorize(name).name, kind_of(name)[-1]) for name in names], cpu_seconds=20)
    assert [category for category, _ in found] == ["other", "reduction", "elementwise", "reduction", "other"]


def test_a_long_name_is_judged_by_its_first_4096_characters() -> None:
    assert categorize("x" * (LONGEST_NAME - 4) + "gemm").name == "gemm"
    assert categorize("x" * (LONGEST_NAME - 3) + "gemm").name == "other"
