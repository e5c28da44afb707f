"""What end_to_end shows: times by size and context, findings of the detectors, two pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from recipes.common.pictures import COLOURS, label_plainly, new_figure, with_gaps
from recipes.common.recipe import NOT_RUN, OK, Report, Row, whole
from recipes.common.tables import listed, markdown, pivot
from recipes.detectors import inspect_rows
from recipes.detectors.times import differs_at_first
from recipes.whole_model.cells import COMPILED, EAGER, FORWARD_BACKWARD, FORWARD_ONLY, KEYS, SIZES, TRAIN

PARTS = ("forward", "loss", "backward", "optimizer", "forward_backward", "step")
_SHOWN_TO_DETECTORS = (*KEYS, "parameters", *(f"{part}{kind}_ms" for part in PARTS for kind in ("", "_mean", "_std")))
_TABLES = ((FORWARD_BACKWARD, "forward"), (FORWARD_BACKWARD, "backward"), (FORWARD_ONLY, "step"), (TRAIN, "step"))
_WORST = 3
_STYLES: dict[tuple[str, str], tuple[Any, str]] = {
    ("fp32", EAGER): ("-", "o"),
    ("bf16", EAGER): ("--", "s"),
    ("fp32", COMPILED): (":", "^"),
    ("bf16", COMPILED): ("-.", "D"),
}
"""Lines and markers. TF32 is only in the tables: six lines per size would be too many for a picture."""


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Return times by size and context, findings, and pictures of times and of the first steps."""
    blocks = [*_times(rows), "## Findings of the detectors", listed(remark(rows)) or "None."]
    return Report(blocks, {"times.png": draw_times(rows), "warmup.png": draw_warmup(rows)})


def remark(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the tables must know, mistakes first."""
    findings = inspect_rows([{key: row.get(key) for key in _SHOWN_TO_DETECTORS} for row in rows])
    mistakes = [finding.message for finding in findings if not finding.is_note]
    notes = [finding.message for finding in findings if finding.is_note]
    return [*mistakes, *_first_samples(rows), *find_slow_events(rows, _name), *notes]


def _times(rows: Sequence[Row]) -> Iterator[str]:
    for passes, part in _TABLES:
        some = [row for row in rows if row["passes"] == passes]
        if not some:
            continue
        yield f"## {passes}: {part}, median ms by context"
        for setting in dict.fromkeys((row["dtype"], row["mode"], row["warmup"]) for row in some):
            here = [row for row in some if (row["dtype"], row["mode"], row["warmup"]) == setting]
            dtype, mode, warmup = setting
            if all(row["status"] == NOT_RUN for row in here):
                yield f"{dtype}, {mode}, warm-up {warmup}: not run ({len(here)} cells)."
            else:
                yield f"{dtype}, {mode}, warm-up {warmup}:"
                yield markdown(pivot(here, "context", ["size"], f"{part}_ms"))


def _first_samples(rows: Sequence[Row]) -> Iterator[str]:
    """Yield for each part the rows with a first sample that is an outlier, the farthest from the median first."""
    for part in ("forward", "backward", "optimizer"):
        found, timed = [], 0
        for row in rows:
            samples = row.get(f"{part}_samples_ms")
            timed += isinstance(samples, list)
            if isinstance(samples, list) and differs_at_first(samples):
                found.append((samples[0] / float(str(row[f"{part}_ms"])), samples[0], row))
        worst = sorted(found, key=lambda entry: entry[0], reverse=True)[:_WORST]
        shown = "; ".join(f"{first:.4g} ms at {_name(row)} ({times:.3g} × the median)" for times, first, row in worst)
        if found:
            causes = ["the warm-up was missing or too short"] * any(times > 1 for times, _, _ in found)
            causes += ["where it is the fastest, something slowed the later samples"] * any(t < 1 for t, _, _ in found)
            outliers = f"{part}: the first sample is an outlier in {len(found)} of {timed} rows"
            yield f"{outliers}: {shown}; {'; '.join(causes)}"


def find_slow_events(rows: Sequence[Row], name: Callable[[Row], str]) -> Iterator[str]:
    """Yield what happened in the timed steps that makes them slow, with the first rows, called by ``name``."""
    measured = sum(row["status"] == OK for row in rows)
    for key, what in (
        ("compiled_graphs", "the times include compilation: graphs were compiled in the timed steps"),
        ("allocator_retries", "memory was almost full: allocations were retried in the timed steps"),
    ):
        found = [f"{row[key]} at {name(row)}" for row in rows if row.get(key)]
        if found:
            yield f"{what} in {len(found)} of {measured} rows: {'; '.join(found[:_WORST])}"


def _name(row: Row) -> str:
    size, context, passes, dtype, mode, warmup = (row[key] for key in KEYS[:6])
    return f"{size} {context} {passes} {dtype} {mode}, warm-up {warmup}"


def draw_times(rows: Sequence[Row]) -> Figure:
    """Draw forward and backward over the context, after the longest warm-up."""
    drawn = _of_both(rows)
    longest = max((whole(row["warmup"]) for row in drawn), default=0)
    drawn = [row for row in drawn if row["warmup"] == longest]
    asked = [row for row in rows if (row["passes"], row["warmup"]) == (FORWARD_BACKWARD, longest)]
    figure = new_figure(f"A whole model: median of the steps, {longest} steps of warm-up", width=11.5)
    contexts = sorted({whole(row["context"]) for row in drawn})
    panels = figure.subplots(1, 2)
    for panel, part in zip(panels, ("forward", "backward"), strict=True):
        for series in dict.fromkeys((row["size"], row["dtype"], row["mode"]) for row in drawn):
            _draw_series(panel, asked, series, f"{part}_ms")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(contexts, [str(context) for context in contexts])
        panel.set_xticks([], minor=True)
        label_plainly(panel)
        panel.set_xlabel("context")
        panel.set_ylabel(f"{part}, ms")
        panel.grid(True, color="#E5E5E5")
    _add_legend(panels[-1], drawn)
    return figure


def draw_warmup(rows: Sequence[Row]) -> Figure:
    """Draw each forward sample of fp32 eager in its order: a panel per size at the least context, a line per warm-up.

    If no cell without warm-up was measured the picture says so, and replaces that of an earlier run.
    """
    drawn = [row for row in _of_both(rows) if (row["dtype"], row["mode"]) == ("fp32", EAGER)]
    least = min((whole(row["context"]) for row in drawn if not row["warmup"]), default=None)
    if least is None:
        figure = new_figure("Forward by timed step, by warm-up: fp32, eager", width=8.0, height=1.2)
        figure.text(0.01, 0.3, "Not run: no cell of forward and backward without warm-up was measured.", fontsize=10)
        return figure
    drawn = [row for row in drawn if row["context"] == least]
    sizes = list(dict.fromkeys(row["size"] for row in drawn))
    title = f"Forward by timed step, by warm-up: fp32, eager, context {least}"
    figure = new_figure(title, width=2.6 * len(sizes) + 3.5)
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    warmups = sorted({whole(row["warmup"]) for row in drawn})
    for panel, size in zip(panels, sizes, strict=True):
        for row in (row for row in drawn if row["size"] == size):
            samples: Any = row["forward_samples_ms"]
            colour = COLOURS[warmups.index(whole(row["warmup"])) % len(COLOURS)]
            panel.plot(range(1, len(samples) + 1), samples, "-o", markersize=3, color=colour)
        panel.set_yscale("log")
        panel.set_title(str(size), fontsize=10)
        panel.set_xlabel("timed step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        label_plainly(panel)
        panel.grid(True, color="#E5E5E5")
    panels[0].set_ylabel("forward, ms")
    handles = [Line2D([], [], color=COLOURS[place], marker="o", label=str(n)) for place, n in enumerate(warmups[:7])]
    panels[-1].legend(handles=handles, title="warm-up", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _of_both(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["passes"] == FORWARD_BACKWARD and row.get("forward_samples_ms")]


def _draw_series(panel: Any, rows: Sequence[Row], series: tuple[object, ...], key: str) -> None:
    style = _STYLES.get((str(series[1]), str(series[2])))
    own = [row for row in rows if (row["size"], row["dtype"], row["mode"]) == series]
    points = with_gaps((whole(row["context"]), row.get(key)) for row in own)
    if style is not None:
        line, marker = style
        panel.plot(*points, line, marker=marker, markersize=4, color=_colour(series[0]))


def _add_legend(panel: Any, rows: Sequence[Row]) -> None:
    sizes = dict.fromkeys(row["size"] for row in rows)
    handles = [Line2D([], [], color=_colour(size), linewidth=3, label=str(size)) for size in sizes]
    for setting, (line, marker) in _STYLES.items():
        if any((row["dtype"], row["mode"]) == setting for row in rows):
            label = ", ".join(setting)
            handles.append(Line2D([], [], color="#333333", linestyle=line, marker=marker, markersize=4, label=label))
    if handles:
        panel.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _colour(size: object) -> str:
    return COLOURS[SIZES.index(str(size)) % len(COLOURS)]
