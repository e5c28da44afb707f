"""The pictures of nsight_questions: what a profiler adds to the times, and the shares of the kernel time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from recipes.common.pictures import COLOURS, new_figure
from recipes.nsight.cells import (
    DOING,
    MATTERS,
    NSYS,
    SIZES,
    TIMED,
    TRAIN,
    UNEVEN,
    Measured,
    Ratio,
    find_ratios,
    pair_rows,
)

_ORDER = (
    *("gemm", "attention", "softmax", "normalization", "elementwise", "reduction", "copy/cast", "embedding/index"),
    *("optimizer", "loss", "communication", "random", "graph", "other"),
)
"""profkit's categories of kernels, in the order of the bars."""
_SHOWN = 6
"""How many categories get a colour of their own; the others share one."""
_READABLE = 0.06
_DARK = COLOURS[:3]
_BESIDE = 1.035
"""Each size is shifted to the right of the one before by this factor, so that points do not overlap."""


def draw_ratios(rows: Sequence[Measured]) -> Figure:
    """Draw each phase's time in the profiler's trace over Python's time without, by context and size.

    A bar reaches from the shortest recorded sample over the longest unprofiled one to the longest over the shortest.
    """
    found = {timed: find_ratios(rows, *timed) for timed in TIMED}
    drawn = [ratio for ratios in found.values() for ratio in ratios]
    names = {True: "Nsight Systems", False: "torch.profiler"}
    profiler = names[drawn[0].row["profiler"] == NSYS] if drawn else "the profiler"
    figure = new_figure(f"Time by {profiler} over Python's clock without it, bars: range of the samples", width=12)
    contexts = sorted({int(ratio.row["context"]) for ratio in drawn})
    sizes = list(dict.fromkeys(ratio.row["size"] for ratio in drawn))
    panels = figure.subplots(1, len(TIMED), sharey=True)
    for panel, (passes, phase) in zip(panels, TIMED, strict=True):
        panel.axhline(1.0, color="#999999", linewidth=1)
        for place, size in enumerate(sizes):
            some = [ratio for ratio in found[passes, phase] if ratio.row["size"] == size]
            _draw_points(panel, some, _BESIDE ** (place - (len(sizes) - 1) / 2), _colour(size))
        panel.set_xscale("log")
        panel.set_xticks(contexts, [str(context) for context in contexts])
        panel.set_xticks([], minor=True)
        panel.set_xlabel("context")
        panel.set_title(f"{phase}, {DOING[passes]}", fontsize=10)
        panel.grid(True, color="#E5E5E5")
    panels[0].set_ylabel("recorded / unprofiled")
    if drawn:
        _explain_points(panels[-1], sizes, any(ratio.busy is not None for ratio in drawn))
    return figure


def _draw_points(panel: Any, ratios: Sequence[Ratio], beside: float, colour: str) -> None:
    line = sorted(ratios, key=lambda ratio: int(ratio.row["context"]))
    places = [int(ratio.row["context"]) * beside for ratio in line]
    values = [ratio.value for ratio in line]
    reach = [[ratio.value - ratio.low for ratio in line], [ratio.high - ratio.value for ratio in line]]
    fills = ["white" if ratio.is_doubtful else colour for ratio in line]
    panel.plot(places, values, color=colour, linewidth=0.7, alpha=0.6)
    panel.errorbar(places, values, yerr=reach, fmt="none", ecolor=colour, elinewidth=1, capsize=2)
    panel.scatter(places, values, s=26, c=fills, edgecolors=colour, zorder=3)


def _explain_points(panel: Any, sizes: Sequence[str], has_kernels: bool) -> None:
    handles = [Line2D([], [], color=_colour(size), marker="o", markersize=5, label=size) for size in sizes]
    why = f"{'launch-bound, or ' * has_kernels}uneven\nby more than {UNEVEN:.0%}"
    hollow = Line2D(
        [], [], color="#333333", marker="o", markersize=5, markerfacecolor="white", linestyle="none", label=why
    )
    handles.append(hollow)
    panel.legend(handles=handles, title="size", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


def _colour(size: str) -> str:
    return COLOURS[SIZES.index(size) % len(COLOURS)]


def draw_shares(rows: Sequence[Measured]) -> Figure:
    """Draw the categories' shares of inference and of a training step, a pair of bars a size, at two contexts."""
    pairs = pair_rows(rows)
    contexts = choose_contexts([int(row["context"]) for _, row in pairs])
    pairs = [pair for pair in pairs if pair[1]["context"] in contexts]
    noun = "operator" if pairs and pairs[0][1]["measure"] == "cpu-operator" else "kernel"
    sizes = list(dict.fromkeys(row["size"] for _, row in pairs))
    figure = new_figure(f"Shares of the {noun} time", width=12, height=1.8 + 0.8 * max(len(sizes), 1))
    panels = figure.subplots(1, max(len(contexts), 1), sharey=True, squeeze=False)[0]
    names = rank_categories(pairs)
    for panel, context in zip(panels, contexts, strict=False):
        _draw_pairs(panel, [pair for pair in pairs if pair[1]["context"] == context], sizes, names)
        panel.set_title(f"context {context}", fontsize=10)
    if pairs:
        panels[0].invert_yaxis()
        handles, found = panels[0].get_legend_handles_labels()
        unique = dict(zip(found, handles, strict=True))
        panels[-1].legend(unique.values(), unique, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def choose_contexts(contexts: Sequence[int]) -> list[int]:
    """Return the shortest and the longest context among those that most sizes have."""
    most = max(map(contexts.count, contexts), default=0)
    alike = [context for context in contexts if contexts.count(context) == most]
    return sorted({min(alike), max(alike)}) if alike else []


def rank_categories(pairs: Sequence[tuple[Measured, Measured]]) -> list[str]:
    """Return the categories with the largest share in any bar, if it matters, in the order of the bars."""
    most: dict[str, float] = {}
    for row in (row for pair in pairs for row in pair):
        for each in row["step"]["rows"]:
            most[each["name"]] = max(most.get(each["name"], 0.0), each["share"])
    chosen = sorted((name for name in most if most[name] >= MATTERS), key=lambda name: -most[name])[:_SHOWN]
    return [name for name in _ORDER if name in chosen]


def _draw_pairs(
    panel: Any, pairs: Sequence[tuple[Measured, Measured]], sizes: Sequence[str], names: Sequence[str]
) -> None:
    for pair in pairs:
        for row in pair:
            at = 2.5 * sizes.index(row["size"]) + (row["passes"] == TRAIN)
            _draw_bar(panel, at, {each["name"]: each["share"] for each in row["step"]["rows"]}, names)
    places = [2.5 * place + second for place in range(len(sizes)) for second in (0, 1)]
    panel.set_yticks(places, [f"{size}, {doing}" for size in sizes for doing in ("inference", "training")])
    panel.set_xlim(0, 1)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panel.spines[["top", "right"]].set_visible(False)


def _draw_bar(panel: Any, at: float, shares: dict[str, float], names: Sequence[str]) -> None:
    parts = [(name, shares.get(name, 0.0)) for name in names]
    parts.append(("all others", max(1.0 - sum(share for _, share in parts), 0.0)))
    left = 0.0
    for number, (name, share) in enumerate(parts):
        colour = "#BBBBBB" if name == "all others" else COLOURS[number]
        panel.barh(at, share, left=left, color=colour, label=name, height=0.85)
        if share >= _READABLE:
            ink = "white" if colour in _DARK else "black"
            panel.text(left + share / 2, at, f"{share:.0%}", ha="center", va="center", color=ink, fontsize=8)
        left += share
