"""What two captures are compared by: their origin, kernel time by step, and intervals that hold the true difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from profkit import read_trace
from profkit.analysis.compare import StepSamples, has_measured_steps, reduce_work, sample_both, sample_steps
from profkit.analysis.compare.comparison import Provenance, compare_provenance, find_origin
from profkit.analysis.compare.kernel_changes import compare_times
from profkit.analysis.statistics import FEWEST, interval_of_means, interval_of_step_times, value_exceeded
from profkit.analysis.tree import join_path
from profkit.errors import UsageError
from profkit.reading import open_capture
from profkit.run.directory import NSYS_EXPORT, SNAPSHOT
from tests.conftest import ROOT
from tests.golden import check_text
from tests.kineto_builder import kernel, launch, row, written
from tests.memory_captures import Training
from tests.nsys_builder import NsysBuilder
from tests.run_builder import start_run
from tests.step_builder import ADD, SGEMM, Step, add_steps, write_steps

pytestmark = pytest.mark.usefixtures("read_once")

STEP = {"": [(ADD, 7)], "forward/layer 0/ffn": [(SGEMM, 100)], "forward/layer 1/ffn": [(SGEMM, 50), (ADD, 10)]}


def sampled(path: Path, range: str | None = None, *, by_step: bool = True) -> StepSamples:
    return sample_steps(read_trace(path).attribution, range, by_step=by_step)


def totals(samples: StepSamples) -> dict[tuple[str, str], list[int]]:
    return {
        (join_path(key.path), key.kernel): samples.kernel_ns[:, column].tolist()
        for column, key in enumerate(samples.keys)
    }


def test_each_measured_step_is_a_sample_and_warm_up_is_not(tmp_path: Path) -> None:
    later = {**STEP, "": [(ADD, 9)]}
    samples = sampled(write_steps(tmp_path / "t.sqlite", [STEP, later], warmup={"forward": [(SGEMM, 1000)]}))
    assert totals(samples) == {
        ("", ADD): [7, 9],
        ("forward/layer */ffn", SGEMM): [150, 150],
        ("forward/layer */ffn", ADD): [10, 10],
    }
    assert samples.left_out_ns == 1000
    assert samples.busy_ns.tolist() == [167, 169]
    assert {join_path(path) for path in samples.paths} >= {"", "forward", "forward/layer *", "forward/layer */ffn"}
    assert {key.category for key in samples.keys} == {"gemm", "elementwise"}


def test_the_steps_of_several_processes_are_added_up(tmp_path: Path) -> None:
    builder = NsysBuilder()
    add_steps(builder, [STEP, STEP, STEP], pid=100)
    add_steps(builder, [STEP, STEP], pid=200)
    samples = sampled(builder.write(tmp_path / "t.sqlite"))
    assert samples.kernel_ns.sum(axis=1).tolist() == [334, 334, 167]


def test_without_steps_the_capture_is_one_sample(tmp_path: Path) -> None:
    builder = NsysBuilder(("warmup", 0, 100))
    builder.kernel(10, 1000)
    builder.range("forward", 200, 300)
    builder.kernel(210, 5)
    builder.kernel(400, 6)
    path = builder.write(tmp_path / "t.sqlite")
    assert not has_measured_steps(read_trace(path).attribution)
    samples = sampled(path, by_step=False)
    assert totals(samples) == {("", "k"): [6], ("forward", "k"): [5]}
    assert (samples.size, samples.left_out_ns, samples.wall_ns) == (1, 1000, None)


def test_a_range_limits_the_samples(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "t.sqlite", [STEP, STEP])
    samples = sampled(path, "layer 1")
    assert samples.kernel_ns.sum(axis=1).tolist() == [60, 60]
    assert samples.left_out_ns == 2 * 107
    with pytest.raises(UsageError, match="no range 'layr 1'"):
        sampled(path, "layr 1")


def test_a_range_can_select_the_steps_of_one_context(tmp_path: Path) -> None:
    builder = NsysBuilder()
    end = add_steps(builder, [STEP, STEP])
    builder.range("context 128", 0, end - 1)
    later = add_steps(builder, [STEP, STEP, STEP], begin=end)
    builder.range("context 256", end, later)
    path = builder.write(tmp_path / "t.sqlite")
    mixed, one = sampled(path), sampled(path, "context 256")
    assert mixed.size == 5
    assert one.size == 3
    assert totals(one)["forward/layer */ffn", SGEMM] == [150, 150, 150]


def test_the_kth_steps_of_all_ranks_are_one_sample(captures: Path) -> None:
    opened = read_trace(captures / "ddp.nsys2025.sqlite")
    samples = sample_steps(opened.attribution)
    assert samples.size == 2
    assert samples.total_ns == opened.kernels("step *").total_ns


def test_what_torch_compile_runs_is_apart_from_the_step_that_it_holds_up(tmp_path: Path) -> None:
    held_up = {**STEP, "forward/compiling f/layer 0": [(SGEMM, 3000)], "compiling f": [(ADD, 500)]}
    plain = sampled(write_steps(tmp_path / "plain.sqlite", [STEP, STEP]))
    after = sampled(write_steps(tmp_path / "after.sqlite", [STEP, held_up]))
    assert {key.category for key in after.keys if key.path == ("compiling",)} == {"compiling"}
    found = compare_times(plain, after)
    phases = {line.name: (line.change.before_ns, line.change.after_ns) for line in found.by_phase}
    assert phases == {"compiling": (0, 3500), "forward": (320, 320), "(in no inner range)": (14, 14)}
    assert {line.name: line.change.after_ns for line in found.by_category}["compiling"] == 3500
    assert sum(part.change.after_ns for part in found.parts) == found.kernel_time.after_ns


def _both(folder: Path, *steps: Step) -> tuple[StepSamples, StepSamples]:
    before, after = (
        reduce_work(read_trace(write_steps(folder / f"{at}.sqlite", [one, one])).attribution)
        for at, one in enumerate(steps)
    )
    return sample_both(before, after)


def test_paths_of_two_captures_are_kinds_if_either_has_several(tmp_path: Path) -> None:
    """As in the tree of ranges, a single ``conv2`` is no ``conv*``; what both are called must be the same."""
    one = {"forward/conv2": [(SGEMM, 5)], "forward/layer 0": [(ADD, 1)]}
    two = {"forward/conv2": [(SGEMM, 5)], "forward/layer 0": [(ADD, 1)], "forward/layer 1": [(ADD, 2)]}
    sides = _both(tmp_path, one, two)
    assert [{join_path(key.path) for key in side.keys} for side in sides] == [{"forward/conv2", "forward/layer *"}] * 2
    alone = sampled(tmp_path / "0.sqlite")
    assert {join_path(key.path) for key in alone.keys} == {"forward/conv2", "forward/layer 0"}
    assert {line.name for line in compare_times(*sides).by_range} == {"forward/conv2", "forward/layer *"}


def test_a_path_that_one_capture_lacks_counts_in_the_range_around_it(tmp_path: Path) -> None:
    sides = _both(tmp_path, {"forward": [(SGEMM, 5)], "forward/layer 0": [(ADD, 1)]}, {"forward": [(SGEMM, 6)]})
    assert [{join_path(path) for path in side.paths} for side in sides] == [
        {"", "forward", "forward/layer 0"},
        {"", "forward"},
    ]
    (line,) = compare_times(*sides).by_range
    assert (line.name, line.change.before_ns, line.change.after_ns) == ("forward", 12, 12)


# -- intervals -----------------------------------------------------------------------------------------------------


Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

# Times of steps: even, skewed, and with a slow one now and then; the medians and means of both sides are the same.
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda random, shape: random.normal(100, 5, shape),
    "lognormal": lambda random, shape: np.exp(random.normal(0, 0.5, shape)),
    "spikes": lambda random, shape: random.normal(100, 1, shape) + 10 * (random.random(shape) < 0.1),
}


def coverage_of_means(draw: Draw, sizes: tuple[int, int], trials: int) -> float:
    random = np.random.default_rng(7)
    interval = interval_of_means(*(draw(random, (size, trials)) for size in sizes))
    assert interval is not None
    low, high = interval
    return float(((low <= 0) & (high >= 0)).mean())


def coverage_of_step_times(draw: Draw, size: int, trials: int) -> float:
    random = np.random.default_rng(7)
    intervals = [interval_of_step_times(*(draw(random, (size, 2)) for _ in range(2))) for _ in range(trials)]
    return sum(low <= 0 <= high for low, high in intervals) / trials  # type: ignore[misc]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("sizes", [(5, 5), (5, 20), (10, 10), (30, 30)])
def test_an_interval_of_means_holds_the_true_difference(name: str, sizes: tuple[int, int]) -> None:
    """Of 1,500 trials at 95 % the share that holds it has a standard error of 0.6 %."""
    assert 0.92 <= coverage_of_means(DISTRIBUTIONS[name], sizes, 1500) <= 0.99


@pytest.mark.parametrize(("name", "size"), [("normal", 10), ("lognormal", 5), ("spikes", 5)])
def test_an_interval_of_step_times_holds_the_true_difference(name: str, size: int) -> None:
    assert 0.9 <= coverage_of_step_times(DISTRIBUTIONS[name], size, 150) <= 1


def test_too_few_samples_have_no_interval() -> None:
    few, enough = np.ones((FEWEST - 1, 2)), np.ones((FEWEST, 2))
    for interval in (interval_of_means, interval_of_step_times):
        assert interval(few, enough) is None
        assert interval(enough, few) is None
        assert interval(enough, enough) is not None


SAMPLES = st.integers(FEWEST, 9).flatmap(lambda size: arrays(np.int64, (size, 2), elements=st.integers(0, 10**6)))


@given(SAMPLES, SAMPLES)
@settings(max_examples=60, deadline=None)
def test_exchanging_the_sides_negates_the_interval(before: np.ndarray, after: np.ndarray) -> None:
    for interval in (interval_of_means, interval_of_step_times):
        there, back = interval(before, after), interval(after, before)
        assert np.all(there[0] == -back[1])
        assert np.all(there[1] == -back[0])


def test_a_shift_moves_the_interval_which_has_no_width_where_samples_do_not_vary() -> None:
    samples = np.random.default_rng(0).normal(100, 1, (10, 2))
    low, high = interval_of_means(samples, samples + 50)  # type: ignore[misc]
    assert 47 < low[0] < 50 < high[0] < 53
    low, high = interval_of_step_times(samples, samples + np.array([50, 0]))  # type: ignore[misc]
    assert 47 < low < 50 < high < 53
    before, after = np.full((5, 2), 10**12), np.full((6, 2), 10**12 + 1)
    low, high = interval_of_means(before, after)  # type: ignore[misc]
    assert (low[0], high[0]) == (1, 1)
    assert interval_of_step_times(before, after) == (2, 2)


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (9, 2.262), (29, 2.045), (1000, 1.962)])
def test_students_quantiles_equal_those_in_tables(freedom: int, quantile: float) -> None:
    assert value_exceeded(0.025, freedom) == pytest.approx(quantile, abs=0.0006)


# -- origin --------------------------------------------------------------------------------------------------------


SMALL_STEP = {"forward": [(SGEMM, 100), (ADD, 20)]}

MANIFEST_OF_A_RUN: dict[str, Any] = {
    "status": "complete",
    "target": "model.small",
    "workload": {
        **{"preset_name": "small", "batch": 4, "context": 256, "steps": 2, "warmup_steps": 0},
        **{"dtype": "fp32", "compile_mode": "none", "passes": "train", "seed": 0},
    },
    "profiler": "nsys",
    "versions": {"profkit": "1", "python": "3.12", "torch": "2.11", "cuda": "13.0"},
    "driver": "580.1",
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "conditions": {"float32_matmul_precision": "highest"},
    "git_revision": "abc",
    "clean": {"steps": [{"forward_ns": 90, "step_ns": 100}, {"forward_ns": 91, "step_ns": 102}]},
}


def make_run(folder: Path, changes: dict[str, Any] | None = None, *, trace: bool = True) -> Path:
    """Make a run directory whose manifest says something else at these dotted keys; None takes a key out."""
    manifest = copy.deepcopy(MANIFEST_OF_A_RUN)
    for key, value in (changes or {}).items():
        *above, last = key.split(".")
        part = manifest
        for name in above:
            part = part[name]
        part[last] = value
        if value is None:
            del part[last]
    start_run(folder, **manifest)
    if trace:
        write_steps(folder / NSYS_EXPORT, [SMALL_STEP, SMALL_STEP])
    return folder


def compared(before: Path, after: Path) -> Provenance:
    return compare_provenance(find_origin(open_capture(before)), find_origin(open_capture(after)))


CHANGED: dict[str, dict[str, Any]] = {
    "another gpu": {"gpu": "NVIDIA A100"},
    "another driver": {"driver": "590.2"},
    "another torch": {"versions.torch": "2.12"},
    "another CUDA": {"versions.cuda": "12.8"},
    "another target": {"target": "model.xl"},
    "another batch": {"workload.batch": 8},
    "another context": {"workload.context": 512},
    "another passes": {"workload.passes": "forward"},
    "another dtype": {"workload.dtype": "bf16"},
    "another matmul precision": {"conditions.float32_matmul_precision": "high"},
    "another compile mode": {"workload.compile_mode": "default"},
    "another seed": {"workload.seed": 1},
    "another revision": {"git_revision": "def"},
    "another status": {"status": "failed"},
    # What disturbs comes first; where steps were timed is a difference too.
    "several": {"workload.compile_mode": "default", "workload.dtype": "bf16", "gpu": "NVIDIA A100"},
    "attached": {
        "clean": None,
        "attached": {"label": "attached, not recording", "steps": MANIFEST_OF_A_RUN["clean"]["steps"]},
    },
}


def test_each_difference_of_origin_is_named_and_whether_it_disturbs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    pairs = {name: (run, make_run(tmp_path / name, changes)) for name, changes in {"alike": {}, **CHANGED}.items()}
    commands = {"lr 1": "python train.py --lr 1", "lr 2": "python train.py --lr 2", "eval": "python eval.py --lr 1"}
    scripts = {name: make_run(tmp_path / name, {"target": one, "argv": one.split()}) for name, one in commands.items()}
    module = make_run(tmp_path / "module", {"target": "python -m train.py", "argv": ["python", "-m", "train"]})
    pairs |= {f"a script with {name}": (scripts["lr 1"], scripts[name]) for name in ("lr 2", "eval")}
    pairs["a module and itself"] = module, module
    one, four = ({"processes": [{"process": "1", "step": "optimizer", "step_times": times}]} for times in (1, 4))
    pairs["steps and iterations"] = make_run(tmp_path / "steps", one), make_run(tmp_path / "iterations", four)
    # What one side lacks is unknown, which is no difference.
    bare = write_steps(tmp_path / "bare.sqlite", [SMALL_STEP, SMALL_STEP])
    on_cpu = {"device": "cpu", "gpu": None, "driver": None, "versions.cuda": None}
    operators, nsys, kineto = (
        ROOT / "traces" / name
        for name in ("tiny-train-cpu.kineto.json.gz", "small-train.nsys2025.sqlite", "small-train.kineto.json.gz")
    )
    pairs["no driver, and a trace alone"] = make_run(tmp_path / "driverless", {"driver": None}), bare
    pairs["on a CPU"] = make_run(tmp_path / "cpu a", on_cpu), make_run(tmp_path / "cpu b", on_cpu)
    pairs |= {"operators and themselves": (operators, operators), "two profilers": (nsys, kineto)}
    # Facts come from the traces themselves.
    builder = NsysBuilder()
    builder.rows["META_DATA_EXPORT"][1]["value"] = "2025.3.2.0"
    for pid in (100, 200):
        add_steps(builder, [SMALL_STEP, SMALL_STEP], pid=pid)
    builder.add("TARGET_INFO_GPU", id=0, name="NVIDIA A100")
    builder.graph(None, 150, 160)
    pairs["two exports"] = bare, builder.write(tmp_path / "graphs.sqlite")
    launched = [launch(12, 1), kernel("gemm", 20, 5, 1)]
    lean = written(tmp_path, launched, "lean.json")
    full = written(tmp_path, [row("cpu_op", "aten::mm", 10, 8), *launched], "full.json")
    pairs |= {"with operators and without": (full, lean), "without operators": (lean, lean)}
    said = []
    for name, pair in pairs.items():
        found = compared(*pair)
        assert found.disturbances == [one for one in found.differences if one.disturbs]
        said += ["", f"# {name}", *map(str, found.differences)]
    check_text("provenance", "\n".join(said).lstrip() + "\n")


def test_a_failed_self_check_on_either_side_disturbs(captures: Path) -> None:
    whole, lossy = captures / "small.nsys2023.sqlite", captures / "lossy.nsys2023.sqlite"
    for pair in ((whole, lossy), (lossy, whole), (lossy, lossy)):
        (check,) = [one for one in compared(*pair).disturbances if one.fact == "self-check"]
        for side, said in zip(pair, (check.before, check.after), strict=True):
            assert ("kernels are missing" in said) == (side is lossy)
            assert (said == "passed") == (side is whole)


def test_files_of_a_run_keep_its_manifest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    Training().write(run, SNAPSHOT)
    for path in (run, run / NSYS_EXPORT, run / SNAPSHOT):
        opened = open_capture(path)
        assert opened.run.manifest.driver == "580.1"
        assert (opened.trace is not None, opened.snapshot is not None) == (
            path.name != SNAPSHOT,
            path != run / NSYS_EXPORT,
        )
    elsewhere = write_steps(run / "other.sqlite", [SMALL_STEP])
    assert open_capture(elsewhere).run is None
