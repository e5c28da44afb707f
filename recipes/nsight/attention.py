"""(e): softmax against the two matrix products around it, in time and in FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

from profkit.names import SCORES, SOFTMAX, VALUE_PRODUCT
from profkit.report.units import format_share
from recipes.common.old_tables import DASH
from recipes.nsight.cells import TRAIN
from recipes.nsight.commands import find_templates, show_attention
from recipes.nsight.words import Answer, Measured, describe, measure_noun, render_lines, tell_extent, us

_COUNTED = (
    f"`{SCORES}` holds the product and the division by the root of the head's width, `{SOFTMAX}` also the masking "
    "before it. FLOPs are by profkit's formulas: 2 for each multiplication and addition of a product, 1 an element for "
    "the division, 5 an element for softmax (greatest, less it, exp, sum, divide), none for the masking. This softmax "
    "is written out: in (c) and (d) it counts as elementwise and reduction, and the category softmax is the loss's."
)


def answer_attention(rows: Sequence[Measured]) -> Answer:
    """Return what is said to (e)."""
    trained = [row for row in rows if row["passes"] == TRAIN and row.get("softmax_ratio") is not None]
    if not trained:
        return Answer([], [], [])
    counted = [row for row in trained if row["softmax_flops"]]
    parts = " or ".join(sorted({_fraction(row) for row in counted}))
    ends = {id(row): row for row in (choose(trained, key=_ratio) for choose in (min, max))}
    return Answer(
        short=[
            f"A softmax takes {tell_extent(trained, _ratio, '{:.2f}')} times as long as the scores before it"
            f"{f', for {parts} of their FLOPs' if parts else ''}; it has {tell_extent(trained, _share, '{:.1%}')} of "
            f"the {measure_noun(trained[0])} time of both products and itself."
        ],
        blocks=[
            f"Means of a layer's ranges in forward of training, {measure_noun(trained[0])} time in µs. {_COUNTED}",
            _tabulate(trained),
            *(compare_attention(row) for row in ends.values()),
        ],
        commands=find_templates(trained, lambda row: [show_attention(row)]),
    )


def compare_attention(row: Measured) -> str:
    """Return softmax against the two products inside attention, in time and in FLOPs."""
    softmax, scores, values = (us(row[f"{part}_us"]) for part in ("softmax", "scores", "values"))
    flops = [row[f"{part}_flops"] for part in ("softmax", "scores", "values")]
    within = row["attention"]["range"]
    said = (
        f"{describe(row)}: of a layer's forward `{SOFTMAX}` takes {softmax} of {measure_noun(row)} time, `{SCORES}` "
        f"{scores}, `{VALUE_PRODUCT}` {values} (means of {row['softmax_instances']} instances"
        f"{f' within `{within}`' if within else ''}): softmax has {format_share(_share(row))} of the three's time"
    )
    if all(flops):
        said += (
            f", and {format_share(flops[0] / sum(flops))} of their FLOPs ({flops[0]:,} against {flops[1]:,} and "
            f"{flops[2]:,}): {_ratio(row):.2f} times the time of the scores, for {_fraction(row)} of their FLOPs"
        )
    return f"{said}."


def _ratio(row: Measured) -> float:
    ratio: float = row["softmax_ratio"]
    return ratio


def _share(row: Measured) -> float:
    softmax, scores, values = (row[f"{part}_us"] for part in ("softmax", "scores", "values"))
    return float(softmax / (softmax + scores + values))


def _fraction(row: Measured) -> str:
    return f"1/{row['scores_flops'] / row['softmax_flops']:.3g}"


def _tabulate(rows: Sequence[Measured]) -> str:
    headings = [
        "size",
        "context",
        "scores",
        "softmax",
        "values",
        "softmax over scores",
        "of all three",
        "FLOPs over scores'",
    ]
    lines = [
        [
            *(row["size"], str(row["context"])),
            *(f"{row[f'{part}_us']:.1f}" for part in ("scores", "softmax", "values")),
            *(f"{_ratio(row):.2f}", format_share(_share(row)), _fraction(row) if row["softmax_flops"] else DASH),
        ]
        for row in rows
    ]
    return render_lines(headings, lines)
