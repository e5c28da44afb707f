"""Names of kernels and operators, the rules that sort them, and that no name takes a rule more than linear time."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType

import numpy as np
import pytest

import profkit
from profkit.analysis.kernels.categories import (
    CATEGORIES,
    LONGEST_NAME,
    OTHER,
    _compiled_rules,
    _plain_part,
    categorize,
    read_rules,
)
from profkit.names import kind_of
from profkit.report.text import simplify_name
from profkit.trace.kineto import read_kineto
from tests.captures import capture
from tests.child import run_in_child
from tests.linear_patterns import explain_not_linear

RULES = [(measure, rule) for measure, rules in read_rules().items() for rule in rules]


def kernels_of(name: str) -> dict[str, tuple[int, int]]:
    """Return kernel time and count by demangled name, by a route of the test's own."""
    path = capture(name)
    if path.suffix == ".gz":
        trace = read_kineto(path)
        times, counts = np.bincount(trace.work.name, trace.work.duration_ns), np.bincount(trace.work.name)
        return {trace.names[i]: (int(times[i]), int(counts[i])) for i in np.flatnonzero(counts)}
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
        rows = database.execute(
            "SELECT s.value, sum(k.end - k.start), count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k"
            " JOIN StringIds s ON s.id = k.demangledName GROUP BY 1"
        )
        return {name: (time, count) for name, time, count in rows}


def test_every_example_gets_the_rule_it_is_listed_under_and_no_counterexample_does() -> None:
    for measure, rule in RULES:
        for name in rule["examples"]:
            found = categorize(name, measure)
            assert (found.rule, found.name) == (rule["rule"], rule["category"]), name
        for name in rule.get("counterexamples", []):
            found = categorize(name, measure)
            assert found.rule != rule["rule"], name
            assert found != OTHER, name


@pytest.mark.parametrize(
    "capture",
    [
        "small.nsys2023.sqlite",
        "small.nsys2025.sqlite",
        "ddp.nsys2025.sqlite",
        "graph_nodes.nsys2023.sqlite",
        "graph_whole.nsys2023.sqlite",
        "lossy.nsys2023.sqlite",
        "hooks.nsys2025.sqlite",
        "small.kineto.json.gz",
    ],
)
def test_almost_no_time_of_the_shared_captures_is_other(capture: str) -> None:
    times = {name: ns for name, (ns, _) in kernels_of(capture).items()}
    other = {name: ns for name, ns in times.items() if categorize(name).name == "other"}
    assert sum(other.values()) < 0.01 * sum(times.values()), other


def test_half_of_a_compiled_runs_multi_tensor_kernels_are_copies() -> None:
    names = [name for name in kernels_of("graph_nodes.nsys2023.sqlite") if "multi_tensor_apply_kernel" in name]
    found = {categorize(name).name for name in names}
    assert found == {"copy/cast", "optimizer"}


def test_both_demanglers_spellings_get_one_verdict() -> None:
    # One workload, recorded thrice; torch.profiler spells names in its own way.
    counts = [
        Counter({category: sum(n for name, (_, n) in kernels.items() if categorize(name).name == category)
                 for category in CATEGORIES})
        for kernels in map(kernels_of, ("small.nsys2023.sqlite", "small.nsys2025.sqlite", "small.kineto.json.gz"))
    ]  # fmt: skip
    assert counts[0] == counts[1] == counts[2]
    assert counts[0].total() == 3008


@pytest.mark.parametrize("name", ["aten::empty", "some_kernel_of_mine", "", "triton_", "spawn_pool_thread_kernel"])
def test_a_name_without_a_rule_is_other(name: str) -> None:
    assert categorize(name) == OTHER


def test_each_rule_has_its_own_name_and_a_known_category() -> None:
    for measure in read_rules():
        names = [rule["rule"] for m, rule in RULES if m == measure]
        assert len(names) == len(set(names))
    given = {rule["category"] for _, rule in RULES}
    assert given == set(CATEGORIES) - {"other"}
    for _, rule in RULES:
        assert set(rule) <= {"category", "rule", "patterns", "examples", "counterexamples"}
        assert rule["examples"], rule["rule"]


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        (r"\bflash::", "flash::"),
        (r"flash_?(?:attn|mla)", "flash"),
        (r"(?:roll|flip)\w{0,60}kernel", "kernel"),
        (r"^triton_\w*softmax", "triton_"),
        (r"unpack|pack_kernel", ""),
        (r"(?:max|avg)(?:_a|b)?", ""),
        (r"ab{0,3}c(?!de)", "a"),
        (r"[gemm]+\(gemv\)x", "gemv"),
    ],
)
def test_the_plain_part_of_a_pattern_is_in_every_match(pattern: str, part: str) -> None:
    assert _plain_part(pattern) == part


def test_every_rule_finds_its_examples_without_the_plain_part_too() -> None:
    for measure, rules in read_rules().items():
        for rule in _compiled_rules(measure):
            (examples,) = [one["examples"] for one in rules if one["rule"] == rule.category.rule]
            for pattern in rule.patterns:
                for name in examples:
                    text = name.lower() if pattern.is_caseless else name
                    assert (re.search(pattern.text, text) is not None) == pattern.fits(name, name.lower())


# -- no name takes more time than in proportion to its length --------------------------------------------------------


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

PATTERNS = [
    (rule["rule"], pattern) for rules in read_rules().values() for rule in rules for pattern in rule["patterns"]
]
WORDS = sorted({word for _, pattern in PATTERNS for word in re.findall(r"[A-Za-z_]{3,}", re.sub(r"\\.", "", pattern))})
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
    assert [rule for rule, pattern in PATTERNS if explain_not_linear(pattern) is not None] == []


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
