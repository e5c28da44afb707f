"""Names of kernels and operators, the rules that sort them, and that no name takes a rule more than linear time."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing

import numpy as np
import pytest

from profkit.analysis.kernels.categories import (
    CATEGORIES,
    LONGEST_NAME,
    OTHER,
    _compiled_rules,
    categorize,
    read_rules,
)
from profkit.names import kind_of
from profkit.report.text import simplify_name
from profkit.trace.kineto import read_kineto
from tests.captures import capture
from tests.child import run_in_child

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


def test_every_rule_finds_its_examples_without_the_plain_part_too() -> None:
    for measure, rules in read_rules().items():
        for rule in _compiled_rules(measure):
            (examples,) = [one["examples"] for one in rules if one["rule"] == rule.category.rule]
            for pattern in rule.patterns:
                for name in examples:
                    text = name.lower() if pattern.is_caseless else name
                    assert (re.search(pattern.text, text) is not None) == pattern.fits(name, name.lower())


# -- no name takes more time than in proportion to its length --------------------------------------------------------


PATTERNS = [
    (rule["rule"], pattern) for rules in read_rules().values() for rule in rules for pattern in rule["patterns"]
]
WORDS = sorted({word for _, pattern in PATTERNS for word in re.findall(r"[A-Za-z_]{3,}", re.sub(r"\\.", "", pattern))})
BEGINNINGS = ("", "triton_red_fused", "triton_poi_fused", "triton_", "void multi_tensor_apply_kernel<", "cpp_fused")


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
