"""The pictures of nsight_questions: what a profiler adds to the times, and the shares of the kernel time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from profkit.analysis.categories import CATEGORIES
from recipes.common.pictures import COLOURS, new_figure
from recipes.nsight.answers import Measured, measure_noun, pair_rows, profiler_name
from recipes.nsight.cells import SIZES, TRAIN

_SHOWN = 6
"""As many categories get a colour of their own; the others are one."""
_READABLE = 0.04
_DARK = COLOURS[:3]


def draw_ratios(rows: Sequence[Measured]) -> Figure:
    """Draw what forward and backward take in the profiler's trace, over Python's time without, by context and size."""
    drawn = [row for row in rows if row["passes"] == TRAIN and row.get("backward_ratio") is not None]
    profiler = profiler_name(drawn[0]) if drawn else "the profiler"
    figure = new_figure(f"A training step by {profiler} over Python's clock without it", width=10.5)
    contexts = sorted({int(row["context"]) for row in drawn})
    panels = figure.subplots(1, 2, sharey=True)
    for panel, phase in zip(panels, ("forward", "backward"), strict=True):
        panel.axhline(1.0, color="#999999", linewidth=1)
        for size in dict.fromkeys(row["size"] for row in drawn):
            points = sorted((row["context"], row[f"{phase}_ratio"]) for row in drawn if row["size"] == size)
            colour = COLOURS[SIZES.index(size) % len(COLOURS)]
            panel.plot(*zip(*points, strict=True), "-o", markersize=4, color=colour, label=size)
        panel.set_xscale("log")
        panel.set_xticks(contexts, [str(context) for context in contexts])
        panel.set_xticks([], minor=True)
        panel.set_xlabel("context")
        panel.set_title(phase, fontsize=10)
        panel.grid(True, color="#E5E5E5")
    panels[0].set_ylabel("recorded / unprofiled")
    if drawn:
        panels[-1].legend(title="size", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_shares(rows: Sequence[Measured]) -> Figure:
    """Draw the categories' shares of inference and of a training step, a pair of bars a size, at one context."""
    pairs = pair_rows(rows)
    context = choose_context([int(row["context"]) for _, row in pairs])
    pairs = [pair for pair in pairs if pair[1]["context"] == context]
    noun = measure_noun(pairs[0][1]) if pairs else "kernel"
    where = f", context {context}" if pairs else ""
    figure = new_figure(f"Shares of the {noun} time{where}", width=10.5, height=1.6 + 0.8 * max(len(pairs), 1))
    panel = figure.subplots()
    names = rank_categories(pairs)
    labels = []
    for place, row in enumerate(row for pair in pairs for row in pair):
        at = place + 0.5 * (place // 2)
        labels.append((at, f"{row['size']}, {'training' if row['passes'] == TRAIN else 'inference'}"))
        _draw_bar(panel, at, {each["name"]: each["share"] for each in row["step"]["rows"]}, names)
    panel.set_yticks([at for at, _ in labels], [label for _, label in labels])
    panel.invert_yaxis()
    panel.set_xlim(0, 1)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panel.spines[["top", "right"]].set_visible(False)
    if pairs:
        handles, found = panel.get_legend_handles_labels()
        unique = dict(zip(found, handles, strict=True))
        panel.legend(unique.values(), unique, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def choose_context(contexts: Sequence[int]) -> int | None:
    """Return the context that most sizes have; of several the longest."""
    return max(contexts, key=lambda context: (contexts.count(context), context), default=None)


def rank_categories(pairs: Sequence[tuple[Measured, Measured]]) -> list[str]:
    """Return the categories that have the most in any bar, in profkit's order."""
    most: dict[str, float] = {}
    for row in (row for pair in pairs for row in pair):
        for each in row["step"]["rows"]:
            most[each["name"]] = max(most.get(each["name"], 0.0), each["share"])
    chosen = sorted(most, key=lambda name: -most[name])[:_SHOWN]
    return [name for name in CATEGORIES if name in chosen]


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
