"""Changes by module between two captures, and what was fused into what: nothing is split, and all sums to the whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.analysis.compare.kernel_changes import ModuleComparison, compare_modules, compare_times
from tests.step_builder import samples_of

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
NORM = "void at::native::vectorized_layer_norm_kernel<float>"
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"
PRODUCT = "nvjet_tst_128x256_64x4"
FUSED = "triton_per_fused_add_native_layer_norm_0"
FUSED_GELU = "triton_poi_fused_gelu_1"
SHARED = "shared: h.* + h.*.ln_1"

Kernels = dict[tuple[str, str], tuple[int, int]]
"""Path and kernel → time and number, both per step."""


EAGER = {
    ("forward/model/h.*", ADD): (40, 2),
    ("forward/model/h.*/h.*.ln_1", NORM): (60, 2),
    ("forward/model/h.*/h.*.mlp", PRODUCT): (500, 2),
    ("forward/model/h.*/h.*.mlp", GELU): (30, 1),
    ("backward/model/h.*/h.*.mlp", PRODUCT): (900, 4),
    ("optimizer", ADD): (7, 1),
}
COMPILED = {
    (f"forward/model/h.*/{SHARED}", FUSED): (45, 1),
    ("forward/model/h.*/h.*.mlp", PRODUCT): (490, 2),
    ("forward/model/h.*/h.*.mlp", FUSED_GELU): (20, 1),
    ("backward/model/h.*/h.*.mlp", PRODUCT): (900, 4),
    ("optimizer", ADD): (7, 1),
}


def _compare(before: Kernels, after: Kernels) -> ModuleComparison:
    found = compare_modules(samples_of(before, 2), samples_of(after, 2))
    assert found is not None
    return found


def test_a_module_has_both_passes_and_what_is_shared_has_a_row_at_the_ancestor() -> None:
    found = _compare(EAGER, COMPILED)
    assert found.is_compiled
    assert [
        (one.depth, one.module, one.change.before_per_sample_ns, one.change.after_per_sample_ns)
        for one in found.modules
    ] == [
        (0, "model", 1530, 1455),
        (1, "h.*", 1530, 1455),
        (2, "h.*.mlp", 1430, 1410),
        (2, "h.*.ln_1", 60, 0),
        (2, SHARED, 0, 45),
        (0, "(no module: optimizer)", 7, 7),
    ]
    assert [(one.before_count, one.after_count) for one in found.modules][:3] == [(22, 16), (22, 16), (14, 14)]


def test_what_was_fused_counts_on_either_side_without_products() -> None:
    found = _compare(EAGER, COMPILED).fusions
    assert [(one.phase, one.modules, one.change.change_ns, one.before_count, one.after_count) for one in found] == [
        ("forward", ("h.*", "h.*.ln_1"), -55, 8, 2),
        ("forward", ("h.*.mlp",), -10, 2, 2),
    ]
    assert [kernel.name for kernel in found[0].before] == [NORM, ADD]
    assert [kernel.name for kernel in found[0].after] == [FUSED]


def test_modules_that_share_with_a_common_one_are_one_fusion() -> None:
    before = {(f"forward/m/{name}", ADD): (10, 1) for name in "abc"}
    after = {("forward/m/shared: a + b", FUSED): (5, 1), ("forward/m/shared: b + c", FUSED_GELU): (5, 1)}
    (fusion,) = _compare(before, after).fusions
    assert (fusion.modules, fusion.before_count, fusion.after_count) == (("a", "b", "c"), 6, 4)


def test_what_torch_compile_runs_to_choose_is_no_modules() -> None:
    after = {**COMPILED, ("forward/model/h.*/compiling: choosing among configurations of k", FUSED): (9000, 90)}
    found = _compare(EAGER, after)
    rows = {one.module: one.change.after_per_sample_ns for one in found.modules}
    assert rows["model"] == 1455
    assert rows["(no module: compiling)"] == 9000
    assert [one.modules for one in found.fusions] == [one.modules for one in _compare(EAGER, COMPILED).fusions]


def test_the_compiled_run_may_be_the_one_before() -> None:
    there, back = _compare(EAGER, COMPILED).fusions, _compare(COMPILED, EAGER).fusions
    assert [one.modules for one in there] == [one.modules for one in back]
    assert [one.change.change_ns for one in there] == [-one.change.change_ns for one in back]


def test_two_eager_captures_have_no_fusion() -> None:
    found = _compare(EAGER, EAGER)
    assert (found.is_compiled, found.fusions) == (False, ())


def test_captures_without_modules_have_no_rows() -> None:
    assert compare_modules(samples_of({("forward", ADD): (1, 1)}), samples_of({("forward", ADD): (2, 1)})) is None


_PATHS = [
    f"{phase}/{path}"
    for phase in ("forward", "backward", "loss")
    for path in ("m", "m/a", "m/b", "m/a/a.x", "m/shared: a + b", "m/a/shared: a + a.x", "n", "a", "a/m", "b/a")
] + ["optimizer", "elsewhere"]
_KERNELS = st.dictionaries(
    st.tuples(st.sampled_from(_PATHS), st.sampled_from([ADD, NORM, PRODUCT, FUSED])),
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
