"""Categories of kernels, and compiled ones: their modules, what they compute, and steps of an H200."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profkit import read_trace
from profkit.analysis.kernels import (
    CATEGORIES,
    LONGEST_NAME,
    OTHER,
    _compiled_rules,
    categorize,
    read_rules,
)
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.tree.modules import modules_of_ranges
from profkit.names import kind_of
from profkit.report import simplify_name
from profkit.run.compiled_code import CompiledGraph, Launch, append_records
from profkit.trace.kineto import read_kineto
from tests import kineto_builder as kineto
from tests.captures import capture
from tests.child import run_in_child
from tests.conftest import ROOT
from tests.golden import check_transcript
from tests.in_process import check_command
from tests.nsys_builder import NsysBuilder
from tests.run_builder import start_run
from tests.test_compiled_ranges import ATTENTION, MLP, place, whole_run

Run = Callable[..., "subprocess.CompletedProcess[str]"]

FORWARD = CompiledGraph(
    "f000000000",
    "cabc",
    "2.11.0",
    "Model.forward model.py:20",
    is_backward=False,
    launches=(
        Launch(10, "extern_kernels.mm", is_extern=True, operators=("aten.mm",), lines=("model.py:5 forward",)),
        Launch(12, "triton_poi_0", is_extern=False, operators=("aten.gelu", "aten.add"), lines=("model.py:7 forward",)),
    ),
)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    folder = start_run(tmp_path / "run")
    whole_run(folder)
    append_records(folder / "compiled.jsonl", [FORWARD])
    return folder


def cpu_run(folder: Path) -> Path:
    """Write a run whose compiled code ran on the CPU: a library's product and a fused kernel in C++."""
    annotation, graph = "user_annotation", "## Call CompiledFxGraph"
    events = [
        kineto.row(annotation, "step 0", 0, 100),
        kineto.row(annotation, "forward", 1, 90),
        kineto.row(annotation, "model", 2, 80),
        kineto.row("cpu_op", graph, 5, 70),
        kineto.row(annotation, place(10, "model", "h.0", ATTENTION), 10, 20),
        kineto.row("cpu_op", "aten::mm", 12, 15),
        kineto.row(annotation, place(12, "model", "h.0", shared=(ATTENTION, MLP)), 40, 10),
        kineto.row(annotation, place(13, "model", "h.0", MLP), 55, 10),
    ]
    append_records(start_run(folder) / "compiled.jsonl", [FORWARD])
    kineto.written(folder, events, "trace.json.gz")
    return folder


def compiled_run(folder: Path, torch: str, backend: str) -> Path:
    """Write a run of a compiled model without the ranges of its launches."""
    compiled = {"graphs": 2, "backends": [{"backend": backend, "options": {}}]}
    builder = NsysBuilder(("forward", 0, 100))
    builder.kernel(10, 5)
    run = start_run(folder, versions={"torch": torch}, conditions={"compiled": compiled})
    builder.write(run / "trace.sqlite")
    return run


def test_each_way_of_asking_for_compiled_kernels_prints_what_it_did(run_directory: Path, tmp_path: Path) -> None:
    """A module has its own kernels and says what it shares; what is known of launches, or why nothing is."""
    (tmp_path / "alone").mkdir()
    path, on_cpu = whole_run(tmp_path / "alone"), cpu_run(tmp_path / "on-cpu")
    modules = (MLP, ATTENTION, f"forward/model/h.0/{MLP}", f"backward/model/h.0/{MLP}", "h.0", "h.1.attn")
    kinds = ("2.8.0+cu128", "inductor"), ("2.11.0+cu130", "inductor"), ("2.11.0+cu130", "aot_eager")
    unplaced = [compiled_run(tmp_path / f"{backend}-{torch}", torch, backend) for torch, backend in kinds]
    # Where the code of a graph is known it ran in no recorded step, and nothing would be recorded again.
    known = [compiled_run(tmp_path / f"known-{backend}-{torch}", torch, backend) for torch, backend in kinds]
    for run in known:
        append_records(run / "compiled.jsonl", [replace(FORWARD, launches=())])
    # With launch ranges only the reason that the recording noted is said.
    process = {"process": "python", "compiled_failure": "1 of 4 compiled graphs came from Inductor's cache"}
    whole, noted = (Path(shutil.copytree(run_directory, tmp_path / name)) for name in ("whole", "noted"))
    shutil.copy(known[1] / "manifest.json", whole)
    start_run(noted, processes=[process])
    calls: list[tuple[str | Path, ...]] = [
        *(("kernels", one, "--by", by, "--format", "csv") for one in (path, on_cpu) for by in ("kernel", "module")),
        ("kernels", run_directory, "--range", "forward", "--explain", "--full-names", "--totals"),
        *(("kernels", path, "--explain"), ("kernels", path, "--format", "json")),
        *(("kernels", path, "--range", name, "--totals") for name in (*modules, "shared: h.0.attn + h.0.mlp")),
        ("kernels", path, "--range", MLP, "--exclude", "step 0", "--totals"),
        *((command, run) for run in unplaced for command in ("kernels", "ranges", "efficiency")),
        *(("ranges", run) for run in (*known, whole, noted)),
    ]
    check_transcript("kernels-compiled", calls)


def test_a_shared_copy_of_a_run_says_what_its_compiled_kernels_compute(run_directory: Path, tmp_path: Path) -> None:
    check_command("scrub", run_directory, "-o", tmp_path / "copy", "--keep-frames")
    found, copied = (read_trace(path).kernels(explain=True).sources for path in (run_directory, tmp_path / "copy"))
    assert copied == found


# -- a step on an H200, eager, compiled and replayed as CUDA graphs ------------------------------------------------


BLOCKS = ROOT / "traces" / "blocks"
RUNS = ("eager", "compiled", "reduce-overhead")
PASSES = ("forward", "backward")


def _open(run: str) -> OpenedTrace:
    return read_trace(BLOCKS / run)


def _paths(opened: OpenedTrace) -> Counter[tuple[str, ...]]:
    """Return how many kernels lie under each path of ranges, by climbing from the innermost of each kernel."""
    attribution = opened.attribution
    names, ranges, parent = attribution.trace.names, attribution.trace.ranges, attribution.parent
    found: Counter[tuple[str, ...]] = Counter()
    for innermost in attribution.work.innermost.tolist():
        path: list[str] = []
        around = innermost
        while around >= 0:
            name = names[ranges.name[around]]
            # The replayed run was recorded when a compiled model still had two ranges at its first capture.
            path += [name] if path[-1:] != [name] else []
            around = parent[around]
        found[tuple(reversed(path[:-1]))] += 1  # without the step
    return found


def _products(opened: OpenedTrace) -> Counter[tuple[str, str]]:
    """Return the time of the matrix products and fused attentions of each module."""
    attribution = opened.attribution
    work, names = attribution.trace.work, attribution.trace.names
    modules = modules_of_ranges(attribution)
    kinds = {at: categorize(names[at], "gpu-kernel").name for at in set(work.name.tolist())}
    found: Counter[tuple[str, str]] = Counter()
    for row, innermost in enumerate(attribution.work.innermost.tolist()):
        kind = kinds[int(work.name[row])]
        if kind in ("gemm", "attention"):
            found[modules[innermost], kind] += int(work.duration_ns[row])
    return found


@pytest.mark.parametrize("run", RUNS[1:])
def test_compiled_or_replayed_each_module_makes_the_products_that_it_makes_eagerly(run: str) -> None:
    eager, other = _products(_open("eager")), _products(_open(run))
    assert other.keys() == eager.keys()
    for module, time_ns in eager.items():
        assert other[module] == pytest.approx(time_ns, rel=0.15), module


def test_a_replay_has_the_kernels_of_the_compiled_run_under_the_same_ranges() -> None:
    """Before a replay its inputs are copied to where the graph reads them: once a step and pass, for no module."""
    compiled, replayed = (_paths(_open(run)) for run in RUNS[1:])
    assert any(path[-1].startswith("shared: ") for path in compiled)
    assert replayed - compiled == {("forward", "model"): 4, ("backward", "model"): 4}
    assert not compiled - replayed


@pytest.mark.parametrize("run", RUNS)
def test_nearly_all_time_of_both_passes_lies_under_a_module_or_a_shared_line(run: str) -> None:
    opened = _open(run)
    rows = opened.kernels(by="module").kernels
    assert sum(row.total_ns for row in rows) == opened.kernels().total_ns
    bare = sum(row.total_ns for row in rows if row.name in {f"(no module: {name})" for name in PASSES})
    assert bare <= 0.02 * sum(opened.kernels(name).total_ns for name in PASSES)


@pytest.mark.parametrize("run", RUNS[1:])
def test_what_a_fused_kernel_computes_is_known_by_its_operators_and_lines(run: str) -> None:
    sources = _open(run).kernels(explain=True).sources
    assert sources is not None
    assert all(one.operators and one.lines for one in sources if not one.is_extern)


# -- categories ----------------------------------------------------------------------------------------------------


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
        for category, patterns in _compiled_rules(measure):
            (examples,) = [one["examples"] for one in rules if one["rule"] == category.rule]
            for pattern in patterns:
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
