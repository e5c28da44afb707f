"""Names of kernels and operators, and the rules that sort them."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing

import numpy as np
import pytest

from profkit.analysis.kernels.categories import CATEGORIES, OTHER, _compiled_rules, _plain_part, categorize, read_rules
from profkit.trace.kineto import read_kineto
from tests.captures import capture

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
