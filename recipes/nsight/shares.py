"""(d): the share of matrix products in inference and in a training step, and what else changed."""

from __future__ import annotations

from collections.abc import Sequence

from profkit.report.units import format_count, format_share
from recipes.nsight.commands import find_templates, show_kernels
from recipes.nsight.read import GEMM
from recipes.nsight.words import (
    Answer,
    Measured,
    describe,
    measure_noun,
    ms,
    pair_rows,
    render_lines,
    tell_extent,
)

_LEAST_POINTS = 0.05
"""What changed by less than this many percentage points is left out."""

Pair = tuple[Measured, Measured]
"""Inference and training of one size and context."""


def answer_shares(rows: Sequence[Measured]) -> Answer:
    """Return what is said to (d)."""
    pairs = [pair for pair in pair_rows(rows) if pair[1].get("forward_backward")]
    if not pairs:
        return Answer([], [], [])
    told = [row for pair in pairs for row in pair]
    ends = {id(pair): pair for pair in (choose(pairs, key=_fall) for choose in (min, max))}
    return Answer(
        short=_summarize(pairs),
        blocks=[
            "Shares of matrix products in inference, in a training step, and in that step without what ran in its "
            "optimizer's range; each difference is from inference, in percentage points, and so is what grew or shrank "
            "beside products, by category, from inference to the training step. The category softmax is the loss's: "
            "attention's is written out, and counts as elementwise and reduction.",
            _tabulate(pairs),
            *(compare_shares(*pair) for pair in ends.values()),
        ],
        commands=[
            *find_templates(told, lambda row: [show_kernels(row, row["step"], "--by", "category")]),
            *find_templates(
                (row for _, row in pairs),
                lambda row: [show_kernels(row, row["forward_backward"], "--by", "category")],
            ),
        ],
    )


def share_without_optimizer(row: Measured) -> float:
    """Return the share of matrix products in a training step less its optimizer, which makes none."""
    products = sum(line["total_ns"] for line in row["step"]["rows"] if line["name"] == GEMM)
    return float(products / row["forward_backward"]["total_ns"])


def share_of_optimizer(row: Measured) -> float:
    """Return the share of a training step that ran in its optimizer's range."""
    return float(1 - row["forward_backward"]["total_ns"] / row["step"]["total_ns"])


def change_shares(inference: Measured, training: Measured) -> list[tuple[str, float]]:
    """Return each category's share of training less that of inference, in percentage points, the most grown first."""
    before, after = (
        {each["name"]: each["share"] * 100 for each in row["step"]["rows"]} for row in (inference, training)
    )
    changes = [(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in {**after, **before}]
    return sorted(changes, key=lambda change: -change[1])


def compare_shares(inference: Measured, training: Measured) -> str:
    """Return the share of matrix products in inference and in a training step, and what else changed."""
    shares = [row["gemm_step_share"] for row in (inference, training)]
    wholes = [ms(row["step"]["total_ns"] / row["step"]["instances"] / 1e6) for row in (inference, training)]
    grew, shrank = (_tell_changes(inference, training, sign) for sign in (1, -1))
    return (
        f"{describe(training)}: matrix products have {format_share(shares[0])} of the {measure_noun(training)} time of "
        f"an inference ({wholes[0]} a step under `{inference['step']['range']}`) and {format_share(shares[1])} of that "
        f"of a training step ({wholes[1]}): {(shares[1] - shares[0]) * 100:+.1f} percentage points. "
        f"Grew: {grew}; shrank: {shrank}. Without the optimizer, which has "
        f"{format_share(share_of_optimizer(training))}, it is {format_share(share_without_optimizer(training))}."
    )


def _summarize(pairs: Sequence[Pair]) -> list[str]:
    falls = [one["gemm_step_share"] > other["gemm_step_share"] for one, other in pairs]
    trained = [training for _, training in pairs]
    inference, training = (tell_extent(list(some), _product_share, "{:.1%}") for some in zip(*pairs, strict=True))
    least, largest = (choose(pairs, key=_fall) for choose in (min, max))
    within = max(abs(_difference_without(pair)) for pair in pairs)
    return [
        f"Matrix products have {inference} of the {measure_noun(trained[0])} time in inference and {training} of "
        f"that of a training step, less in {sum(falls)} of {format_count(len(pairs), 'cell')}, by {_fall(least):.1f} "
        f"({describe(least[1])}) to {_fall(largest):.1f} percentage points ({describe(largest[1])}).",
        f"Without the optimizer, which has {tell_extent(trained, share_of_optimizer, '{:.1%}')} of a step, their "
        f"share is that of inference within {within:.1f} percentage points in every cell ({describe(largest[1])}: "
        f"{share_without_optimizer(largest[1]):.1%} against {largest[0]['gemm_step_share']:.1%}).",
    ]


def _product_share(row: Measured) -> float:
    share: float = row["gemm_step_share"]
    return share


def _fall(pair: Pair) -> float:
    """Return by how many percentage points products have less of training."""
    return 100 * (_product_share(pair[0]) - _product_share(pair[1]))


def _difference_without(pair: Pair) -> float:
    return 100 * (share_without_optimizer(pair[1]) - _product_share(pair[0]))


def _tell_changes(inference: Measured, training: Measured, sign: int) -> str:
    """Return the categories beside products that grew, or that shrank, the most first."""
    changes = [change for change in change_shares(inference, training)[::sign] if change[0] != GEMM]
    return ", ".join(f"{name} {points:+.1f}" for name, points in changes if points * sign >= _LEAST_POINTS) or "none"


def _tabulate(pairs: Sequence[Pair]) -> str:
    lines = [
        [
            *(training["size"], str(training["context"])),
            *(f"{_product_share(row):.1%}" for row in (inference, training)),
            _points(-_fall((inference, training))),
            f"{share_without_optimizer(training):.1%}",
            _points(_difference_without((inference, training))),
            *(_tell_changes(inference, training, sign) for sign in (1, -1)),
        ]
        for inference, training in pairs
    ]
    headings = [
        "size",
        "context",
        "inference",
        "step",
        "difference",
        "without optimizer",
        "its difference",
        "grew",
        "shrank",
    ]
    return render_lines(headings, lines, ("size", "grew", "shrank"))


def _points(difference: float) -> str:
    """Return percentage points with their sign; what rounds to nothing has none that counts."""
    return f"{round(difference, 1) + 0.0:+.1f}"
