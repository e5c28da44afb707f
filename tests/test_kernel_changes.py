"""Changes of kernel time per step, by kernel and by module: parts match and sum to the whole in integers."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.compare import StepSamples, sample_steps
from profkit.analysis.compare.kernel_changes import (
    IN_NO_RANGE,
    TimeComparison,
    compare_modules,
    compare_times,
    match_parts,
)
from tests.conftest import ROOT
from tests.golden import check_text
from tests.step_builder import ADD, FUSED, FUSED_SUM, MUL, NVJET, SGEMM, SUM, Step, samples_of, write_steps

TRACES = ROOT / "traces"


def sampled(path: Path, *, by_step: bool = True) -> StepSamples:
    return sample_steps(read_trace(path).attribution, by_step=by_step)


def compared(folder: Path, before: list[Step], after: list[Step]) -> TimeComparison:
    folder.mkdir(exist_ok=True)
    paths = [write_steps(folder / f"{name}.sqlite", steps) for name, steps in (("a", before), ("b", after))]
    return checked(*map(sampled, paths))


def checked(before: StepSamples, after: StepSamples) -> TimeComparison:
    """Return the comparison; check that every view sums to the totals and, except for rounding, to the change."""
    result = compare_times(before, after)
    whole = result.kernel_time
    assert (whole.before_ns, whole.after_ns) == (before.total_ns, after.total_ns)
    exact = Fraction(whole.after_ns, after.size) - Fraction(whole.before_ns, before.size)
    assert whole.change_ns == round(exact)
    for changes in (
        [part.change for part in result.parts],
        *([line.change for line in view] for view in (result.by_phase, result.by_range, result.by_category)),
    ):
        assert sum(change.before_ns for change in changes) == whole.before_ns
        assert sum(change.after_ns for change in changes) == whole.after_ns
        assert abs(sum(change.change_ns for change in changes) - exact) <= Fraction(len(changes), 2)
        assert [abs(change.change_ns) for change in changes] == sorted(
            (abs(change.change_ns) for change in changes), reverse=True
        )
    assert result.rounding_ns + sum(part.change.change_ns for part in result.parts) == whole.change_ns
    for part in result.parts:
        assert sum(kernel.total_ns for kernel in part.before) == part.change.before_ns
        assert sum(kernel.total_ns for kernel in part.after) == part.change.after_ns
    before_count = sum(kernel.count for part in result.parts for kernel in part.before)
    after_count = sum(kernel.count for part in result.parts for kernel in part.after)
    assert (before_count, after_count) == result.kernel_count
    return result


PLACES = st.sampled_from(["", "forward", "forward/layer 0", "forward/layer 1/ffn", "backward", "optimizer"])
KERNELS = st.lists(st.tuples(st.sampled_from([SGEMM, NVJET, ADD, MUL, FUSED]), st.integers(0, 10_000)), max_size=3)
STEPS = st.lists(st.dictionaries(PLACES, KERNELS, max_size=3), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(STEPS, STEPS)
def test_the_parts_sum_to_the_whole_and_a_capture_does_not_differ_from_itself(
    before: list[Step], after: list[Step]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_steps(Path(folder) / name, steps) for name, steps in (("a", before), ("b", after))]
        sides = [sampled(path) for path in paths]
    checked(*sides)
    assert_nothing_changed(checked(sides[0], sides[0]))


def assert_nothing_changed(result: TimeComparison) -> None:
    lines = [line.change for view in (result.by_phase, result.by_range, result.by_category) for line in view]
    for change in (result.kernel_time, result.busy, *lines, *(part.change for part in result.parts)):
        assert (change.change_ns, change.verdict, change.before_ns) == (0, "unchanged", change.after_ns)
        assert change.low_ns is None or change.high_ns is None or change.low_ns <= 0 <= change.high_ns
    assert {part.kind for part in result.parts} <= {"same"}


def test_nsys_and_kineto_put_a_kernel_in_the_same_place() -> None:
    result = checked(*(sampled(TRACES / f"small-train.{kind}") for kind in ("nsys2025.sqlite", "kineto.json.gz")))
    assert [line.name for line in result.by_phase if not line.change.before_ns] == []
    for part in result.parts:
        assert [kernel.count for kernel in part.before] == [kernel.count for kernel in part.after]


def varied(base: Step, factor: float) -> list[Step]:
    """Return eight steps of this kind, each kernel a little longer or shorter from step to step."""
    wobble = (0, 3, -2, 1, -1, 2, -3, 0)
    return [
        {path: [(name, round(ns * factor) + shift) for name, ns in kernels] for path, kernels in base.items()}
        for shift in wobble
    ]


EAGER: Step = {
    "forward/layer 0/ffn": [(SGEMM, 4000), (ADD, 500), (MUL, 700)],
    "forward/layer 1/ffn": [(SGEMM, 4000), (ADD, 500), (MUL, 700)],
    "optimizer": [(ADD, 300)],
}


def test_noise_is_no_measurable_difference(tmp_path: Path) -> None:
    before = varied(EAGER, 1)
    after = [*before[1:], before[3]]
    result = compared(tmp_path / "noise", before, after)
    assert result.kernel_time.change_ns != 0
    assert result.kernel_time.verdict == "no measurable difference"
    slower = compared(tmp_path / "slower", before, varied(EAGER, 1.01))
    assert slower.kernel_time.verdict == "more"
    assert slower.kernel_time.low_ns is not None
    assert 0 < slower.kernel_time.low_ns <= slower.kernel_time.change_ns <= (slower.kernel_time.high_ns or 0)


def test_different_numbers_of_steps_are_compared_per_step(tmp_path: Path) -> None:
    result = compared(tmp_path, [{"": [(SGEMM, 100)]}] * 3, [{"": [(SGEMM, 101)]}] * 5)
    assert (result.samples, result.kernel_time.before_ns, result.kernel_time.after_ns) == ((3, 5), 300, 505)
    assert result.kernel_time.change_ns == 1
    assert result.parts[0].range == IN_NO_RANGE


def test_the_rounding_of_the_parts_is_reported(tmp_path: Path) -> None:
    """Of three steps three kernels each lose a third of a nanosecond: one nanosecond, of which no part shows any."""
    before = [{"": [(SGEMM, 100), (ADD, 100), (MUL, 100)]}] * 3
    after = [*before[:2], {"": [(SGEMM, 99), (ADD, 99), (MUL, 99)]}]
    result = compared(tmp_path, before, after)
    assert [part.change.change_ns for part in result.parts] == [0, 0, 0]
    assert (result.kernel_time.change_ns, result.rounding_ns) == (-1, -1)


FLASH = "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)"


def one_sample(*kernels: tuple[str, str]) -> StepSamples:
    """Return one sample with these kernels, (path, name), of 1 ns each."""
    return samples_of(dict.fromkeys(kernels, (1, 1)))


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        pytest.param(
            {"forward": [SGEMM], "backward": [SGEMM]},
            {"forward": [SGEMM], "backward": [SGEMM]},
            [("forward", "same", [SGEMM], [SGEMM]), ("backward", "same", [SGEMM], [SGEMM])],
            id="a kernel is matched by name within its range and category",
        ),
        pytest.param(
            {"forward/ffn": [SGEMM, ADD], "forward/attention": [SGEMM]},
            {"forward/ffn": [NVJET, ADD], "forward/attention": [SGEMM]},
            [
                ("forward/ffn", "renamed", [SGEMM], [NVJET]),
                ("forward/ffn", "same", [ADD], [ADD]),
                ("forward/attention", "same", [SGEMM], [SGEMM]),
            ],
            id="another name in the same range and category is renamed",
        ),
        pytest.param(
            {"ffn": [ADD, MUL, SGEMM]},
            {"ffn": [FUSED, SGEMM]},
            [("ffn", "renamed", [ADD, MUL], [FUSED]), ("ffn", "same", [SGEMM], [SGEMM])],
            id="a chain that became one kernel is renamed",
        ),
        pytest.param(
            # Inductor's reduction contains the additions too; matched with the reductions alone, they would look lost.
            {"ffn": [ADD, MUL, SUM, SGEMM]},
            {"ffn": [FUSED_SUM, NVJET]},
            [("ffn", "replaced", [ADD, MUL, SUM], [FUSED_SUM]), ("ffn", "renamed", [SGEMM], [NVJET])],
            id="a fused kernel replaces kernels of several categories",
        ),
        pytest.param(
            {"sdpa": [SGEMM, SUM]},
            {"sdpa": [FLASH]},
            [("sdpa", "replaced", [SGEMM, SUM], [FLASH])],
            id="kernels of another category replace those gone from a range",
        ),
        pytest.param(
            {"a": [SGEMM, ADD], "b": [SUM]},
            {"a": [SGEMM], "b": [SUM, NVJET]},
            [
                ("a", "same", [SGEMM], [SGEMM]),
                ("b", "same", [SUM], [SUM]),
                ("a", "gone", [ADD], []),
                ("b", "new", [], [NVJET]),
            ],
            id="a kernel without a counterpart is new or gone",
        ),
        pytest.param(
            {"forward/layer */ffn": [SGEMM], "forward/layer */attention": [SGEMM], "forward": [ADD]},
            {"forward": [NVJET, FUSED]},
            [("forward", "renamed", [SGEMM, SGEMM], [NVJET]), ("forward", "renamed", [ADD], [FUSED])],
            id="kernels in ranges that compiled code has not count in the enclosing range",
        ),
    ],
)
def test_parts_of_two_captures_are_matched(
    before: dict[str, list[str]],
    after: dict[str, list[str]],
    parts: list[tuple[str, str, list[str], list[str]]],
) -> None:
    sides = [one_sample(*((path, name) for path in side for name in side[path])) for side in (before, after)]
    found = [
        (
            "/".join(match.path),
            match.kind,
            *(sorted(sides[at].keys[one].kernel for one in match.sides[at]) for at in (0, 1)),
        )
        for match in match_parts(*sides)
    ]
    assert sorted(found) == sorted((path, kind, sorted(old), sorted(new)) for path, kind, old, new in parts)


PART_PLACES = st.sampled_from(["", "forward", "forward/ffn", "forward/attention", "backward"])
NAMES = st.sampled_from([SGEMM, NVJET, ADD, MUL, SUM, FUSED, FUSED_SUM, FLASH])
SIDES = st.sets(st.tuples(PART_PLACES, NAMES)).map(lambda keys: one_sample(*sorted(keys)))


@settings(deadline=None)
@given(SIDES, SIDES)
def test_every_kernel_is_in_exactly_one_part(before: StepSamples, after: StepSamples) -> None:
    matches = match_parts(before, after)
    assert sorted(column for match in matches for column in match.sides[0]) == list(range(len(before.keys)))
    assert sorted(column for match in matches for column in match.sides[1]) == list(range(len(after.keys)))
    for match in matches:
        assert bool(match.sides[0]) == (match.kind != "new")
        assert bool(match.sides[1]) == (match.kind != "gone")
        assert (match.categories[0] == match.categories[1]) or match.kind not in ("same", "renamed")


# -- by module, and what was fused into what -------------------------------------------------------------------------


VECTOR_ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
NORM = "void at::native::vectorized_layer_norm_kernel<float>"
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"
PRODUCT = "nvjet_tst_128x256_64x4"
FUSED_NORM = "triton_per_fused_add_native_layer_norm_0"
FUSED_GELU = "triton_poi_fused_gelu_1"
SHARED = "shared: h.* + h.*.ln_1"

Kernels = dict[tuple[str, str], tuple[int, int]]
"""Path and kernel → time and number, both per step."""


MODULES = {
    ("forward/model/h.*", VECTOR_ADD): (40, 2),
    ("forward/model/h.*/h.*.ln_1", NORM): (60, 2),
    ("forward/model/h.*/h.*.mlp", PRODUCT): (500, 2),
    ("forward/model/h.*/h.*.mlp", GELU): (30, 1),
    ("backward/model/h.*/h.*.mlp", PRODUCT): (900, 4),
    ("optimizer", VECTOR_ADD): (7, 1),
}
COMPILED = {
    (f"forward/model/h.*/{SHARED}", FUSED_NORM): (45, 1),
    ("forward/model/h.*/h.*.mlp", PRODUCT): (490, 2),
    ("forward/model/h.*/h.*.mlp", FUSED_GELU): (20, 1),
    ("backward/model/h.*/h.*.mlp", PRODUCT): (900, 4),
    ("optimizer", VECTOR_ADD): (7, 1),
}


PAIRS: dict[str, tuple[Kernels, Kernels]] = {
    # A module has both passes, and what is shared has a row at the ancestor; fusions count without products.
    "an eager run and a compiled one": (MODULES, COMPILED),
    "a compiled run and an eager one": (COMPILED, MODULES),
    "two eager runs": (MODULES, MODULES),
    # Modules that share with a common one are one fusion.
    "modules that share with a common one": (
        {(f"forward/m/{name}", VECTOR_ADD): (10, 1) for name in "abc"},
        {("forward/m/shared: a + b", FUSED_NORM): (5, 1), ("forward/m/shared: b + c", FUSED_GELU): (5, 1)},
    ),
    # What torch.compile runs to choose is of no module.
    "a run that compiles": (
        MODULES,
        {**COMPILED, ("forward/model/h.*/compiling: choosing among configurations of k", FUSED_NORM): (9000, 90)},
    ),
    "no modules": ({("forward", VECTOR_ADD): (1, 1)}, {("forward", VECTOR_ADD): (2, 1)}),
}


def test_modules_and_what_was_fused_into_what_are_compared() -> None:
    """Times are per step, numbers are of both steps."""
    said = []
    for name, (before, after) in PAIRS.items():
        found = compare_modules(samples_of(before, 2), samples_of(after, 2))
        said += ["", f"# {name}: {'no modules' if found is None else 'compiled' if found.is_compiled else 'eager'}"]
        for row in () if found is None else found.modules:
            times = f"{row.change.before_per_sample_ns} → {row.change.after_per_sample_ns} ns"
            said.append(f"{'  ' * row.depth}{row.module}: {times}, {row.before_count} → {row.after_count} kernels")
        for one in () if found is None else found.fusions:
            kernels = [[kernel.name for kernel in side] for side in (one.before, one.after)]
            said.append(f"fused in {one.phase}: {', '.join(one.modules)}: {one.change.change_ns} ns")
            said += [f"  {one.before_count} {kernels[0]}", f"  → {one.after_count} {kernels[1]}"]
    check_text("fusions", "\n".join(said).lstrip() + "\n")


_PATHS = [
    f"{phase}/{path}"
    for phase in ("forward", "backward", "loss")
    for path in ("m", "m/a", "m/b", "m/a/a.x", "m/shared: a + b", "m/a/shared: a + a.x", "n", "a", "a/m", "b/a")
] + ["optimizer", "elsewhere"]
_KERNELS = st.dictionaries(
    st.tuples(st.sampled_from(_PATHS), st.sampled_from([VECTOR_ADD, NORM, PRODUCT, FUSED_NORM])),
    st.tuples(st.integers(0, 1000), st.integers(1, 5)),
    min_size=1,
)


@given(before=_KERNELS, after=_KERNELS)
@settings(max_examples=60, deadline=None)
def test_rows_without_a_parent_sum_to_the_kernel_time(before: Kernels, after: Kernels) -> None:
    sides = samples_of(before, 2), samples_of(after, 2)
    found, whole = compare_modules(*sides), compare_times(*sides).kernel_time
    if found is None:
        return
    top = [one for one in found.modules if one.parent is None]
    assert sum(one.change.before_ns for one in top) == whole.before_ns
    assert sum(one.change.after_ns for one in top) == whole.after_ns
    for fusion in found.fusions:
        assert fusion.change.before_ns == sum(one.total_ns for one in fusion.before)
        assert fusion.change.after_ns == sum(one.total_ns for one in fusion.after)
