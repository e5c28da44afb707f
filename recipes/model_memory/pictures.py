"""The pictures of memory_questions: peaks by context with what they are made of, and peaks by size of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from recipes.common.pictures import COLOURS, new_figure
from recipes.common.recipe import Row, whole
from recipes.model_memory.predict import KINDS, REST, kinds_at_peak
from recipes.whole_model.cells import PASSES

_GIB = 2**30
_INK = "#333333"
_KIND_COLOURS = {
    "parameters": "#0072B2",
    "optimizer state": "#009E73",
    "gradients": "#D55E00",
    "activations": "#E69F00",
    "autocast copies": "#B58B5A",
    "temporaries": "#CC79A7",
    "workspace": "#56B4E9",
    REST: "#999999",
}
"""The colours that a timeline gives to these categories."""


def draw_peaks(rows: Sequence[Row]) -> Figure | None:
    """Draw the largest size: a panel each extent of a step, a bar each context and precision, measured as a mark."""
    if not rows:
        return None
    largest = max(rows, key=lambda row: whole(row["parameters"]))
    size, batch = largest["size"], largest["batch"]
    here = [row for row in rows if (row["size"], row["batch"]) == (size, batch)]
    extents = [passes for passes in PASSES if any(row["passes"] == passes for row in here)]
    measured = ", and measured" * any(row.get("requested_peak_bytes") is not None for row in here)
    title = f"{size}, batch {batch}: bytes requested at the peak, predicted by kind, with its phase{measured}"
    most = max(sum(row["passes"] == passes for row in here) for passes in extents)
    figure = new_figure(title, width=max(3.4, 0.57 * most) * len(extents) + 2.6)
    panels = figure.subplots(1, len(extents), squeeze=False, sharey=True)[0]
    for panel, passes in zip(panels, extents, strict=True):
        bars = sorted((row for row in here if row["passes"] == passes), key=_order)
        for place, row in enumerate(bars):
            _draw_bar(panel, place, row)
        panel.set_xticks(range(len(bars)), [f"{row['context']}\n{row['dtype']}" for row in bars], fontsize=8)
        panel.set_title(passes, fontsize=10)
        panel.set_xlabel("context, precision")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("GiB (2³⁰ B), requested")
    panels[0].set_ylim(top=1.08 * max(whole(row["predicted_peak_bytes"]) for row in here) / _GIB)
    _add_legend(figure, here)
    return figure


def _order(row: Row) -> tuple[int, str]:
    return whole(row["context"]), {"fp32": "0"}.get(str(row["dtype"]), "1")


def _draw_bar(panel: Any, place: int, row: Row) -> None:
    bottom = 0.0
    for kind, size in kinds_at_peak(row).items():
        panel.bar(place, size / _GIB, bottom=bottom, width=0.72, color=_KIND_COLOURS[kind])
        bottom += size / _GIB
    measured = row.get("requested_peak_bytes")
    if measured is not None:
        panel.plot([place], [whole(measured) / _GIB], marker="_", markersize=22, markeredgewidth=1.6, color=_INK)
    panel.annotate(
        str(row["predicted_phase"]), (place, bottom), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=7
    )


def _add_legend(figure: Figure, rows: Sequence[Row]) -> None:
    drawn = {kind for row in rows for kind, size in kinds_at_peak(row).items() if size}
    handles: list[Any] = [Patch(color=_KIND_COLOURS[kind], label=kind) for kind in (*KINDS, REST) if kind in drawn]
    if any(row.get("requested_peak_bytes") is not None for row in rows):
        handles.append(Line2D([], [], color=_INK, marker="_", markersize=14, linestyle="", label="measured"))
    figure.legend(handles=handles[::-1], loc="outside right upper", frameon=False, fontsize=8)


def draw_checkpoints(rows: Sequence[Row]) -> Figure | None:
    """Draw the peaks over the layers to a checkpoint, a colour each setting: predicted lines, measured marks."""
    drawn = [row for row in rows if row["checkpoint_layers"]]
    settings = list(dict.fromkeys(map(_setting, drawn)))
    if not settings:
        return None
    figure = new_figure("Requested at the peak, by the layers to a checkpoint", width=9.5)
    panel = figure.subplots()
    for colour, setting in zip(COLOURS * len(settings), settings, strict=False):
        series = sorted((row for row in drawn if _setting(row) == setting), key=_layers)
        panel.plot(*_points(series, "predicted_peak_bytes"), "-", color=colour, label=", ".join(map(str, setting)))
        panel.plot(*_points(series, "requested_peak_bytes"), "o", color=colour, markersize=5)
        plain = next((row for row in rows if not row["checkpoint_layers"] and _setting(row) == setting), None)
        if plain is not None:
            panel.axhline(whole(plain["predicted_peak_bytes"]) / _GIB, color=colour, linestyle=":", linewidth=1.2)
    sizes = sorted({_layers(row) for row in drawn})
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()
    everything = [row for row in rows if _setting(row) in settings]
    panel.set_ylim(0, 1.06 * max(whole(row["predicted_peak_bytes"]) for row in everything) / _GIB)
    panel.set_xlabel("layers to a checkpoint")
    panel.set_ylabel("GiB (2³⁰ B), requested")
    panel.grid(True, color="#E5E5E5")
    panel.spines[["top", "right"]].set_visible(False)
    handles = [*panel.get_legend_handles_labels()[0]]
    handles += [Line2D([], [], color=_INK, label="predicted")]
    if any(row.get("requested_peak_bytes") is not None for row in drawn):
        handles += [Line2D([], [], color=_INK, marker="o", markersize=5, linestyle="", label="measured")]
    handles += [Line2D([], [], color=_INK, linestyle=":", label="no checkpoints, predicted")]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _setting(row: Row) -> tuple[str, ...]:
    lengths = (f"batch {row['batch']}", f"context {row['context']}")
    return str(row["size"]), *lengths, str(row["passes"]), str(row["dtype"])


def _layers(row: Row) -> int:
    return whole(row["checkpoint_layers"])


def _points(series: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    there = [row for row in series if row.get(key) is not None]
    return [_layers(row) for row in there], [whole(row[key]) / _GIB for row in there]
