"""The pictures of compile_speedup: how much faster, and the kernels of a step before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from recipes.common.pictures import COLOURS, new_figure
from recipes.compilation.cells import ATTENTION, MODEL
from recipes.compilation.pairs import Pair, Speedup, is_of_gpu, measure_kernel_speedup, measure_speedup
from recipes.compilation.work import GENERATED, KINDS, OTHERS, PRODUCTS, totals_by_kind
from recipes.whole_model.cells import SIZES

_BESIDE = 1.07
_KIND_COLOURS = dict(zip(KINDS, (COLOURS[0], COLOURS[1], "#BBBBBB"), strict=True))


def draw_speedups(pairs: Sequence[Pair]) -> Figure:
    """Draw how many times as fast compiled code is: the model by size, attention by sequence length."""
    title = "How many times as fast as eager: wall time (medians of the steps of one process, 95 % interval)"
    if any(measure_kernel_speedup(pair) is not None for pair in pairs):
        title += "; diamonds: kernel time alone"
    figure = new_figure(title, width=10.5, height=5.0)
    drawn = [(what, [pair for pair in pairs if pair.eager["what"] == what]) for what in (MODEL, ATTENTION)]
    present = [(what, some) for what, some in drawn if some] or drawn[:1]
    for panel, (what, some) in zip(figure.subplots(1, len(present), squeeze=False)[0], present, strict=True):
        (_draw_model if what == MODEL else _draw_attention)(panel, some)
        panel.axhline(1, color="#333333", linewidth=1)
        panel.set_ylim(bottom=0)
        panel.set_title(what, fontsize=10)
        panel.yaxis.grid(True, color="#E5E5E5")
        panel.set_axisbelow(True)
        if some:
            panel.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def _draw_model(panel: Any, pairs: Sequence[Pair]) -> None:
    sizes = sorted({str(pair.eager["size"]) for pair in pairs}, key=SIZES.index)
    series = list(dict.fromkeys(_series(pair) for pair in pairs))
    width = 0.8 / max(len(series), 1)
    for number, name in enumerate(series):
        own = [pair for pair in pairs if _series(pair) == name]
        beside = (number - (len(series) - 1) / 2) * width
        places = [sizes.index(str(pair.eager["size"])) + beside for pair in own]
        speedups = [_speedup(pair) for pair in own]
        heights = [each.times for each in speedups]
        colour = COLOURS[number % len(COLOURS)]
        panel.bar(places, heights, width * 0.92, color=colour, label=name)
        panel.errorbar(places, heights, _errors(speedups), fmt="none", color="#333333", linewidth=1, capsize=2)
        _draw_kernel_times(panel, places, own, "#333333")
        for place, speedup in zip(places, speedups, strict=True):
            top = max(speedup.times, speedup.high or 0.0)
            panel.annotate(
                f"{speedup.times:.2f}", (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=8
            )
        for place in sorted({at + beside for at in range(len(sizes))} - set(places)):
            panel.annotate(
                "no figure", (place, 0), (0, 4), textcoords="offset points", ha="center", fontsize=8, rotation=90
            )
    panel.set_xticks(range(len(sizes)), sizes)
    panel.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
    panel.margins(y=0.12)


def _draw_attention(panel: Any, pairs: Sequence[Pair]) -> None:
    names = list(dict.fromkeys((pair.eager["d_model"], _series(pair)) for pair in pairs))
    lengths = sorted({pair.eager["length"] for pair in pairs})
    # Shifted a little, so that points at one length do not overlap.
    beside = [_BESIDE ** (number - (len(names) - 1) / 2) for number in range(len(names))]
    for number, name in enumerate(names):
        own = [pair for pair in pairs if (pair.eager["d_model"], _series(pair)) == name]
        by_length = {pair.eager["length"]: _speedup(pair) for pair in own}
        # A length that only other widths have breaks the line.
        speedups = [by_length.get(length, Speedup(math.nan, None, None)) for length in lengths]
        places, colour = [length * beside[number] for length in lengths], COLOURS[number % len(COLOURS)]
        panel.errorbar(
            places,
            [each.times for each in speedups],
            _errors(speedups),
            fmt="-o",
            markersize=4,
            capsize=2,
            color=colour,
            label=f"d_model {name[0]}, {name[1]}",
        )
        _draw_kernel_times(panel, [pair.eager["length"] * beside[number] for pair in own], own, colour)
    panel.set_xscale("log")
    panel.set_xticks(lengths, [str(length) for length in lengths])
    panel.minorticks_off()
    panel.set_xlabel("sequence length")
    panel.margins(x=0.12, y=0.12)


def _draw_kernel_times(panel: Any, places: Sequence[float], pairs: Sequence[Pair], colour: str) -> None:
    found = [
        (place, times) for place, pair in zip(places, pairs, strict=True) if (times := measure_kernel_speedup(pair))
    ]
    for place, times in found:
        panel.plot(place, times, "D", markersize=5, markerfacecolor="white", markeredgecolor=colour, zorder=3)


def draw_kernels(pairs: Sequence[Pair]) -> Figure:
    """Draw what a step launches by kind: two bars for each pair."""
    on_gpu = all(is_of_gpu(pair.eager) for pair in pairs)
    noun = "Kernels" if on_gpu else "Operators"
    drawn = [(what, [pair for pair in pairs if pair.eager["what"] == what]) for what in (MODEL, ATTENTION)]
    present = [(what, some) for what, some in drawn if some] or drawn[:1]
    most = max((len(some) for _, some in present), default=1)
    title = f"{noun} of one step, eager (upper bar) and compiled (lower bar)"
    figure = new_figure(title, width=6.0 * len(present), height=1.8 + 0.55 * max(most, 2))
    for panel, (what, some) in zip(figure.subplots(1, len(present), squeeze=False)[0], present, strict=True):
        for place, pair in enumerate(some):
            _draw_bar(panel, place - 0.2, pair.eager)
            _draw_bar(panel, place + 0.2, pair.compiled)
        panel.set_yticks(range(len(some)), [_label(pair) for pair in some], fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_xlabel(f"{noun.lower()} a step")
        panel.set_title(what, fontsize=10)
        panel.xaxis.grid(True, color="#E5E5E5")
        panel.set_axisbelow(True)
    handles = [Patch(color=colour, label=kind) for kind, colour in _KIND_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


def _draw_bar(panel: Any, place: float, row: Any) -> None:
    counts = {kind: count for kind, (count, _) in totals_by_kind(row).items()}
    counts[OTHERS] = row["kernels"] - counts[PRODUCTS] - counts[GENERATED]  # with those between the phases
    left = 0
    for kind in KINDS:
        panel.barh(place, counts[kind], 0.36, left=left, color=_KIND_COLOURS[kind])
        left += counts[kind]
    panel.annotate(f"{left:,}", (left, place), (3, 0), textcoords="offset points", va="center", fontsize=8)


def _label(pair: Pair) -> str:
    row = pair.eager
    size = f"d {row['d_model']}, {row['length']}" if row["what"] == ATTENTION else f"{row['size']}, {row['length']}"
    return f"{size}\n{_series(pair)}"


def _series(pair: Pair) -> str:
    return f"{pair.eager['passes']}, {pair.eager['dtype']}"


def _speedup(pair: Pair) -> Speedup:
    speedup = measure_speedup(pair)
    assert speedup is not None
    return speedup


def _errors(speedups: Sequence[Speedup]) -> list[list[float]]:
    return [
        [max(each.times - (each.low or each.times), 0.0) for each in speedups],
        [max((each.high or each.times) - each.times, 0.0) for each in speedups],
    ]
