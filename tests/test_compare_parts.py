"""Which kernels of two captures stand against each other: every one once, renamed ones as a move in their place."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.analysis.categories import categorize
from profkit.analysis.compare.compare_parts import Match, match_parts, nearest
from profkit.analysis.compare.step_samples import Key, RangePath, StepSamples
from tests.step_builder import ADD, FUSED, FUSED_SUM, MUL, NVJET, SGEMM, SUM

FLASH = "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)"


def samples(*kernels: tuple[str, str]) -> StepSamples:
    """Return one sample with these kernels, (path, name), of 1 ns each."""
    keys = [Key(tuple(path.split("/")) if path else (), categorize(name).name, name) for path, name in kernels]
    paths: set[RangePath] = {()}
    for key in keys:
        paths |= {key.path[:depth] for depth in range(len(key.path) + 1)}
    ones = np.ones((1, len(keys)), dtype=np.int64)
    return StepSamples(
        measure="gpu-kernel",
        range=None,
        has_steps=True,
        keys=tuple(keys),
        kernel_ns=ones,
        kernel_count=ones[0],
        busy_ns=ones.sum(axis=1),
        wall_ns=None,
        paths=frozenset(paths),
        left_out_ns=0,
        even=True,
    )


def told(before: StepSamples, after: StepSamples) -> set[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    def name(match: Match) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
        old = tuple(sorted(before.keys[column].kernel for column in match.before))
        return "/".join(match.path), match.kind, old, tuple(sorted(after.keys[column].kernel for column in match.after))

    return {name(match) for match in match_parts(before, after)}


def test_a_kernel_is_matched_by_its_name_within_range_and_category() -> None:
    one = samples(("forward", SGEMM), ("backward", SGEMM))
    assert told(one, one) == {("forward", "same", (SGEMM,), (SGEMM,)), ("backward", "same", (SGEMM,), (SGEMM,))}


def test_another_name_in_the_same_range_and_category_is_a_move() -> None:
    before = samples(("forward/ffn", SGEMM), ("forward/ffn", ADD), ("forward/attention", SGEMM))
    after = samples(("forward/ffn", NVJET), ("forward/ffn", ADD), ("forward/attention", SGEMM))
    assert told(before, after) == {
        ("forward/ffn", "renamed", (SGEMM,), (NVJET,)),
        ("forward/ffn", "same", (ADD,), (ADD,)),
        ("forward/attention", "same", (SGEMM,), (SGEMM,)),
    }


def test_a_chain_that_became_one_kernel_is_a_move() -> None:
    before, after = samples(("ffn", ADD), ("ffn", MUL), ("ffn", SGEMM)), samples(("ffn", FUSED), ("ffn", SGEMM))
    assert told(before, after) == {
        ("ffn", "renamed", tuple(sorted((ADD, MUL))), (FUSED,)),
        ("ffn", "same", (SGEMM,), (SGEMM,)),
    }


def test_a_fused_kernel_stands_for_several_categories() -> None:
    """Inductor's reduction swallowed the additions: the reductions' move would leave those as a loss."""
    before = samples(("ffn", ADD), ("ffn", MUL), ("ffn", SUM), ("ffn", SGEMM))
    after = samples(("ffn", FUSED_SUM), ("ffn", NVJET))
    assert told(before, after) == {
        ("ffn", "replaced", tuple(sorted((ADD, MUL, SUM))), (FUSED_SUM,)),
        ("ffn", "renamed", (SGEMM,), (NVJET,)),
    }


def test_other_categories_may_replace_what_is_gone_of_a_range() -> None:
    assert told(samples(("sdpa", SGEMM), ("sdpa", SUM)), samples(("sdpa", FLASH))) == {
        ("sdpa", "replaced", tuple(sorted((SGEMM, SUM))), (FLASH,))
    }


def test_what_has_no_counterpart_is_new_or_gone() -> None:
    one, other = samples(("a", SGEMM), ("a", ADD), ("b", SUM)), samples(("a", SGEMM), ("b", SUM), ("b", NVJET))
    assert told(one, other) == {
        ("a", "same", (SGEMM,), (SGEMM,)),
        ("b", "same", (SUM,), (SUM,)),
        ("a", "gone", (ADD,), ()),
        ("b", "new", (), (NVJET,)),
    }


def test_ranges_of_one_side_alone_are_told_at_the_range_around_them() -> None:
    """Compiled code has no ranges within the phase."""
    eager = samples(("forward/layer */ffn", SGEMM), ("forward/layer */attention", SGEMM), ("forward", ADD))
    compiled = samples(("forward", NVJET), ("forward", FUSED))
    assert told(eager, compiled) == {
        ("forward", "renamed", (SGEMM, SGEMM), (NVJET,)),
        ("forward", "renamed", (ADD,), (FUSED,)),
    }
    assert nearest(("a", "b", "c"), frozenset({(), ("a",)})) == ("a",)


PLACES = st.sampled_from(["", "forward", "forward/ffn", "forward/attention", "backward"])
KERNELS = st.sampled_from([SGEMM, NVJET, ADD, MUL, SUM, FUSED, FUSED_SUM, FLASH])
SIDES = st.sets(st.tuples(PLACES, KERNELS)).map(lambda keys: samples(*sorted(keys)))


@settings(deadline=None)
@given(SIDES, SIDES)
def test_every_kernel_is_in_one_part(before: StepSamples, after: StepSamples) -> None:
    matches = match_parts(before, after)
    assert sorted(column for match in matches for column in match.before) == list(range(len(before.keys)))
    assert sorted(column for match in matches for column in match.after) == list(range(len(after.keys)))
    for match in matches:
        assert bool(match.before) == (match.kind != "new")
        assert bool(match.after) == (match.kind != "gone")
        assert (match.categories[0] == match.categories[1]) or match.kind not in ("same", "renamed")


@settings(deadline=None)
@given(SIDES)
def test_a_capture_is_the_same_as_itself(one: StepSamples) -> None:
    assert {match.kind for match in match_parts(one, one)} <= {"same"}
    assert all(match.before == match.after for match in match_parts(one, one))
