"""The interactive timeline: one page that needs nothing but itself, and the colours that it shares with the picture.

The data stand in the page as JSON. Sizes are differences from sample to sample, in the largest unit that divides them
all (usually 512 bytes), so that eight thousand samples of twenty series take a few hundred kilobytes. uPlot, whose code
and licence are in the page, draws the chart.

The colours are Okabe and Ito's palette, which the colour-blind can distinguish, lighter or darker for the rarer
categories; all of them are visible on white and on near black.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np

from profkit.analysis.memory.bins import Bins, Series, Shape, bin_history
from profkit.analysis.memory.composition import NOT_SELECTED
from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.result import MemoryResult
from profkit.files import write_whole
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER
from profkit.report.memory import EVIDENCE_WORDS, head_lines
from profkit.snapshot.columns import Ints
from profkit.version import __version__

Stacking = Literal["category", "stack", "allocation"]
STACKINGS: tuple[Stacking, ...] = ("category", "stack", "allocation")

CATEGORY_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#009E73",
    "activations": "#E69F00",
    "temporaries": "#CC79A7",
    "inputs": "#F0E442",
    "buffers": "#4B6BDB",
    "communication": "#A6341B",
    "autocast copies": "#B58B5A",
    "workspace": "#56B4E9",
    "unknown": "#8C959F",
    NOT_SELECTED: "#C4C9CF",
}

STACK_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#7E6BAD",
    "#B58B5A",
    "#66A61E",
    "#A6341B",
    "#4B6BDB",
    "#D9A8C7",
    "#A3ABB5",
)

REST_COLOUR = "#A3ABB5"

PHASE_COLOURS = {FORWARD: "#1F77B4", LOSS: "#7E6BAD", BACKWARD: "#B3541E", OPTIMIZER: "#2E7D4F"}

OTHER_PHASE_COLOUR = "#6E7781"

_ASSETS = files("profkit.report") / "timeline_assets"

_MAX_PHASES = 4000
_FRAMES_KEPT = 20
_SHAPE_FIELDS = tuple(field for field in Shape.__dataclass_fields__ if field not in ("label", "stack"))


def write_page(
    path: Path, memory: DeviceMemory, result: MemoryResult, *, by: Stacking = "category", wanted: Filter | None = None
) -> None:
    """Write the page of one device; the file is whole, or the one that was there before stays.

    Raises:
        OSError: it cannot be written.
    """
    # A lone surrogate, which stands for an undecodable byte of a file's name, cannot be encoded.
    write_whole(path, render_page(memory, result, by=by, wanted=wanted).encode("utf-8", "replace"))


def render_page(
    memory: DeviceMemory, result: MemoryResult, *, by: Stacking = "category", wanted: Filter | None = None
) -> str:
    """Return the page as text.

    Args:
        memory: the device.
        result: its account, for the page's head.
        by: what is stacked at first; the reader can change it.
        wanted: which allocations to show; the others are added up as one.
    """
    data = json.dumps(
        build_data(bin_history(memory, wanted), memory, result, by), separators=(",", ":"), ensure_ascii=False
    )
    parts = {
        "TITLE": _escape(f"{PurePath(result.snapshot).name}, device {result.totals.device}: memory over time"),
        "STYLE": _asset("uplot.min.css") + _asset("page.css"),
        # The sequence that would end a script cannot stand in JSON once < is written as an escape.
        "DATA": data.replace("<", "\\u003c"),
        "UPLOT_LICENSE": _asset("uplot.LICENSE"),
        "UPLOT": _asset("uplot.min.js"),
        "SCRIPT": _asset("page.js"),
        "VERSION": _escape(__version__),
    }
    pieces = _asset("page.html").split("@@")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def build_data(bins: Bins, memory: DeviceMemory, result: MemoryResult, by: Stacking) -> dict[str, Any]:
    """Return what the page's script reads."""
    series = (*bins.by_category, *bins.by_stack)
    unit = _common_unit([bins.allocated, bins.lowest, bins.reserved, *(one.bytes for one in series)])
    labels: dict[tuple[str, tuple[str, ...]], int] = {}
    shapes = [_shape(shape, labels) for shape in bins.shapes]
    head, *facts = head_lines(result)
    return {
        "facts": [fact.replace("  ", " ") for fact in (facts[0], *facts[1:], head)],
        "warnings": [one.message for one in result.warnings],
        "mode": by,
        "has_times": bins.has_times,
        "prefers_events": bins.prefers_events,
        "unit": unit,
        "peak": bins.peak,
        "moments": _deltas(bins.moments, 1),
        "times_us": _deltas(bins.times_us, 1),
        "allocated": _deltas(bins.allocated, unit),
        "lowest": _deltas(bins.lowest, unit),
        "reserved": _deltas(bins.reserved, unit),
        "by_category": [_series(one, unit) for one in bins.by_category],
        "by_stack": [_series(one, unit) for one in bins.by_stack],
        "phases": _phases(memory),
        "shapes": shapes,
        "labels": [label for label, _ in labels],
        "stacks": [stack[:_FRAMES_KEPT] for _, stack in labels],
        "colours": {
            "categories": CATEGORY_COLOURS,
            "stacks": STACK_COLOURS,
            "rest": REST_COLOUR,
            "phases": PHASE_COLOURS,
            "phase": OTHER_PHASE_COLOUR,
        },
    }


def _series(one: Series, unit: int) -> dict[str, Any]:
    return {"name": one.name, "values": _deltas(one.bytes, unit), "stack": one.stack[:_FRAMES_KEPT]}


def _shape(shape: Shape, labels: dict[tuple[str, tuple[str, ...]], int]) -> dict[str, Any]:
    """Return a shape with its stack replaced by a number, because many allocations share few stacks."""
    number = labels.setdefault((shape.label, shape.stack), len(labels))
    shown = {"label": number, "evidence": EVIDENCE_WORDS[shape.evidence]}
    return {field: getattr(shape, field) for field in _SHAPE_FIELDS} | shown


def _phases(memory: DeviceMemory) -> list[dict[str, Any]]:
    """Return the phases by time and by moment; if there are very many, only the longest."""
    timeline = memory.timeline
    longest = sorted(timeline.phases, key=lambda one: one.start_us - one.end_us)[:_MAX_PHASES]
    found = []
    for phase in sorted(longest, key=lambda one: one.start_us):
        first, last = timeline.moments_of(phase)
        start = memory.device.zero_us
        times = {"start_us": phase.start_us - start, "end_us": phase.end_us - start}
        found.append({"name": phase.name, "first": first, "last": last, **times})
    return found


def _common_unit(columns: list[Ints]) -> int:
    return int(np.gcd.reduce([int(np.gcd.reduce(column)) for column in columns])) or 1


def _deltas(values: Ints, unit: int) -> list[int]:
    found: list[int] = np.diff(values // unit, prepend=0).tolist()
    return found


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").strip()


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
