"""Ranges around the launches of compiled code become modules: which kernels lie under them, and how often they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from profkit import read_trace
from profkit.analysis.placing.expanded_ranges import nest_compiled_launches
from profkit.errors import TraceError
from profkit.names import SHARED, LaunchPlace, kind_of, launch_range, read_launch_range
from profkit.trace.columns import Trace
from profkit.trace.nsys import read_nsys
from tests.nsys_builder import NsysBuilder

AUTOGRAD = 101
ATTENTION, MLP = "h.0.attn", "h.0.mlp"


def place(line: int, *path: str, shared: tuple[str, ...] = (), graph: str = "f000000000") -> str:
    return launch_range(LaunchPlace(graph, line, path, shared))


class Program:
    """Writes a compiled training run: each launch in its range, one after another on a thread."""

    def __init__(self) -> None:
        self.builder = NsysBuilder()
        self.builder.name_thread("pt_autograd_0", AUTOGRAD)
        self.now = 1000

    def launch(self, name: str | None, *, tid: int = 100, kernels: int = 1, nanoseconds: int = 10) -> None:
        start = self.now
        for number in range(kernels):
            self.builder.kernel(self.now + 2, nanoseconds, name=f"k{number}", tid=tid, start=self.now + 50)
            self.now += 10
        if name is not None:
            self.builder.range(name, start, self.now - 1, tid=tid)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        begin = self.now
        self.now += 5
        yield
        self.builder.range(name, begin, self.now)
        self.now += 5

    def step(self, number: int) -> None:
        with self.inside(f"step {number}"):
            with self.inside("forward"), self.inside("model"):
                self.launch(place(10, "model", "h.0", ATTENTION))
                self.launch(place(11, "model", "h.0", ATTENTION), kernels=2)
                self.launch(place(12, "model", "h.0", shared=(ATTENTION, MLP)))
                self.launch(place(13, "model", "h.0", MLP))
                self.launch(place(14, "model", "h.1", "h.1.attn"))
                self.launch(place(15, "model"))
                self.launch(place(16))
            with self.inside("backward"):
                self.launch(place(20, "model", "h.1", "h.1.attn", graph="b000000000"), tid=AUTOGRAD)
                self.launch(place(21, "model", "h.0", MLP, graph="b000000000"), tid=AUTOGRAD)
                self.launch(place(22, "model", "h.0", ATTENTION, graph="b000000000"), tid=AUTOGRAD)
                self.now += 5
            self.builder.kernel(self.now + 2, 7, name="zero", start=self.now + 20)
            self.now += 30

    def write(self, folder: Path) -> Path:
        return self.builder.write(folder / "trace.sqlite")


def whole_run(folder: Path) -> Path:
    program = Program()
    for number in range(2):
        program.step(number)
    return program.write(folder)


def tree(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return path → (times, kernel time, kernels)."""
    return {
        row.path: (row.instances, row.kernel_time_ns, row.kernel_count)
        for row in read_trace(path).ranges(numbered=False).ranges
    }


def tree_launch_by_launch(trace: Trace) -> dict[str, tuple[int, int]]:
    """Return path → (kernel time, kernels) of a trace as its reader leaves it: launches placed one by one in Python."""
    found: Counter[str] = Counter()
    count: Counter[str] = Counter()
    spans = [
        (int(start), int(end), int(thread), trace.names[name])
        for start, end, thread, name in zip(
            trace.ranges.start_ns, trace.ranges.end_ns, trace.ranges.thread, trace.ranges.name, strict=True
        )
    ]
    main = next(iter(trace.main_threads))
    for row in range(len(trace.work)):
        moment, thread = int(trace.work.launch_ns[row]), int(trace.work.launch_thread[row])
        names: list[str] = []
        for _, _, _, name in sorted(
            (one for one in spans if one[0] <= moment < one[1] and one[2] in (thread, main)),
            key=lambda one: one[0] - one[1],
        ):
            at = read_launch_range(name)
            if at is None:
                names.append(name)
            else:
                names += [module for module in at.path if module not in names]
                names += (
                    [SHARED + " + ".join(sorted(set(at.shared), key=lambda one: one.split(".")))] if at.shared else []
                )
        for depth in range(1, len(names) + 1):
            found["/".join(names[:depth])] += int(trace.work.duration_ns[row])
            count["/".join(names[:depth])] += 1
    return {one: (time, count[one]) for one, time in found.items()}


def rows_of(path: Path) -> dict[str, tuple[int, int]]:
    return {
        row.path: (row.kernel_time_ns, row.kernel_count)
        for row in read_trace(path).ranges(numbered=True).ranges
        if row.kernel_count
    }


def test_a_compiled_run_has_the_tree_of_modules(tmp_path: Path) -> None:
    assert tree(whole_run(tmp_path)) == {
        "step *": (2, 234, 24),
        "step */forward": (2, 160, 16),
        "step */forward/model": (2, 160, 16),
        "step */forward/model/h.*": (4, 120, 12),
        "step */forward/model/h.*/h.*.attn": (4, 80, 8),
        "step */forward/model/h.*/shared: h.0.attn + h.0.mlp": (2, 20, 2),
        "step */forward/model/h.*/h.0.mlp": (2, 20, 2),
        "step */backward": (2, 60, 6),
        "step */backward/model": (2, 60, 6),
        "step */backward/model/h.*": (4, 60, 6),
        "step */backward/model/h.*/h.*.attn": (4, 40, 4),
        "step */backward/model/h.*/h.0.mlp": (2, 20, 2),
    }


def test_a_random_order_of_launches_gives_each_module_its_own(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    program = Program()
    modules = [("h.0", ATTENTION), ("h.0", MLP), ("h.0",), ("h.1", "h.1.attn"), (), ("h.0", ATTENTION, "h.0.attn.proj")]
    with program.inside("forward"):
        for line in range(200):
            module = modules[random.integers(len(modules))]
            shared = (ATTENTION, MLP) if module == ("h.0",) and random.integers(2) else ()
            program.launch(None if random.integers(8) == 0 else place(line, "model", *module, shared=shared))
            if random.integers(10) == 0:
                with program.inside("mine"):
                    pass
    path = program.write(tmp_path)
    assert rows_of(path) == tree_launch_by_launch(read_nsys(path))
    opened = read_trace(path)
    assert sum(row.kernel_time_ns for row in opened.ranges().ranges if row.path == "forward") == 2000
    by_range = opened.kernels(by="range")
    assert sum(row.total_ns for row in by_range.kernels) == by_range.total_ns == 2000


def test_a_module_has_one_instance_for_launches_in_a_row_and_a_new_one_after_anything_else(tmp_path: Path) -> None:
    program = Program()
    mine = place(10, "model", "h.0")
    with program.inside("forward"):
        # Between them: a kernel that no launch range holds, another range, another module's launch.
        for name in (mine, mine, mine, None, mine):
            program.launch(name)
        with program.inside("print"):
            pass
        for name in (mine, place(11, "model", "h.1"), mine):
            program.launch(name)
    path = program.write(tmp_path)
    assert tree(path) == {
        "forward": (1, 80, 8),
        "forward/model": (3, 70, 7),
        "forward/model/h.*": (5, 70, 7),
        "forward/print": (1, 0, 0),
    }
    assert read_trace(path).kernels("h.0").instances == 4


def test_what_is_open_around_a_launch_is_not_repeated_also_below_a_missing_range(tmp_path: Path) -> None:
    program = Program()
    with program.inside("model"), program.inside("h.0"):
        program.launch(place(10, "model", "h.0", ATTENTION))
        program.launch(place(11, "model", "h.0"))
        program.launch(place(12, "model"))
    with program.inside("h.0"):
        program.launch(place(10, "model", "h.0", ATTENTION))
    path = program.write(tmp_path)
    assert set(tree(path)) == {"model", "model/h.0", "model/h.0/h.0.attn", "h.0", "h.0/h.0.attn"}
    assert read_trace(path).kernels("model/h.0").total_ns == 30


def test_a_model_in_a_model_of_the_same_name_keeps_its_range(tmp_path: Path) -> None:
    program = Program()
    with program.inside("model"):
        program.launch(place(10, "model", "model", "model.layers.0"))
        with program.inside("model"):
            program.launch(place(11, "model", "model", "model.layers.1"))
    path = program.write(tmp_path)
    assert {name: count for name, (_, _, count) in tree(path).items()} == {
        "model": 2,
        "model/model": 2,
        "model/model/model.layers.*": 2,
    }


def test_other_ranges_within_a_launch_stay_in_its_module(tmp_path: Path) -> None:
    program = Program()
    start = program.now
    program.builder.range("library", start + 1, start + 8, uint64Value=5)
    program.launch(place(10, "model", "h.0"))
    program.builder.range("later", program.now, program.now + 2, uint64Value=7)
    path = program.write(tmp_path)
    trace = read_trace(path).trace
    assert tree(path)["model/h.0/library"] == (1, 10, 1)
    assert {trace.names[trace.ranges.name[at]]: number for at, number in trace.ranges.payload.items()} == {
        "library": 5,
        "later": 7,
    }


def test_a_launch_within_a_launch_belongs_to_the_outer_one(tmp_path: Path) -> None:
    program = Program()
    start = program.now
    program.builder.range(place(5, "model", "h.0", graph="0000000001"), start, start + 40)
    program.now += 5
    program.launch(place(10, "other", graph="0000000002"))
    path = program.write(tmp_path)
    assert set(tree(path)) == {"model", "model/h.0"}
    (inner,) = read_trace(path).trace.work.compiled_launch
    assert read_launch_range(read_trace(path).trace.names[inner]) == LaunchPlace("0000000002", 10, ("other",))


def test_a_trace_without_compiled_launches_is_left_as_it_is(tmp_path: Path) -> None:
    builder = NsysBuilder(("compiled model", 0, 100), ("compiled f000000000:x model", 10, 90))
    builder.kernel(20, 5)
    trace = read_nsys(builder.write(tmp_path / "trace.sqlite"))
    assert nest_compiled_launches(trace) is trace


def test_a_path_of_thousands_of_modules_is_refused(tmp_path: Path) -> None:
    builder = NsysBuilder((place(1, *(f"m{number}" for number in range(3000))), 0, 100))
    with pytest.raises(TraceError, match=r"3,000 nested modules"):
        nest_compiled_launches(read_nsys(builder.write(tmp_path / "trace.sqlite")))


def test_lines_that_name_the_same_kinds_are_one_kind_whatever_the_order_of_their_names(tmp_path: Path) -> None:
    assert kind_of("shared: h.0 + h.1 + h.1.ln_2 + h.1.mlp") == "shared: h.* + h.*.ln_* + h.*.mlp"
    assert kind_of(kind_of("shared: h.0 + h.1")) == kind_of("shared: h.0 + h.1") == "shared: h.*"
    assert kind_of("shared: h.1.mlp + h.1.ln_2 + h.1") == "shared: h.* + h.*.ln_* + h.*.mlp"
    for number, (first, second, line) in enumerate(
        (
            (("h.0", "h.1.ln_1"), ("h.0", "h.1", "h.2.ln_1"), "shared: h.* + h.*.ln_*"),
            (("h.10", "h.9.ln_1", "h.9"), ("h.9", "h.10", "h.9.ln_1"), "shared: h.9 + h.9.ln_1 + h.10"),
        )
    ):
        program = Program()
        program.launch(place(1, "model", shared=first))
        program.launch(place(2, "model", shared=second))
        path = program.builder.write(tmp_path / f"{number}.sqlite")
        assert set(tree(path)) == {"model", f"model/{line}"}
        assert read_trace(path).kernels(line).kernel_count == 2
