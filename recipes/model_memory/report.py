"""What memory_questions shows: peaks, checkpoints, what a block saves, the largest allocations, the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from recipes.common.measuring import GIB, MIB
from recipes.common.pictures import COLOURS, new_figure
from recipes.common.recipe import Device, Report, Row, whole
from recipes.common.tables import Table, listed, markdown, pivot, select, show_bytes
from recipes.model_memory.cells import KEYS, choose_timelines, describe_cell, work_of
from recipes.model_memory.predict import KINDS, REST, describe_prediction, kinds_at_peak
from recipes.whole_model.cells import PASSES

_MAKING = "the making of the model"
_LARGEST = 10
_PHASE = ("phase", "predicted_bytes", "requested_bytes", "difference_bytes")


def add_columns(rows: Sequence[Row]) -> None:
    """Add to every row its prediction, whether it was run or not, and sizes in GiB and MiB."""
    for row in rows:
        row.update(describe_prediction(work_of(cast("Any", row)), cast("Device", row["device"])))
        for key, source, unit in (
            ("peak_GiB", "allocated_peak_bytes", GIB),
            ("reserved_GiB", "reserved_peak_bytes", GIB),
            ("requested_GiB", "requested_peak_bytes", GIB),
            ("predicted_GiB", "predicted_peak_bytes", GIB),
            ("residual_MiB", "residual_bytes", MIB),
            ("saved_block_MiB", "saved_block_bytes", MIB),
        ):
            value = row.get(source)
            row[key] = None if value is None else whole(value) / unit


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Return the tables, and pictures of peaks, checkpoints and timelines."""
    plain = [row for row in rows if not row["checkpoint_layers"]]
    blocks = [
        "## Peaks, and the phase of each",
        *_peaks(plain),
        "## Checkpoints",
        *_checkpoints(rows),
        "## What a block saves for backward",
        *_saved(plain),
        "## The tensor that a block hands to the next",
        *_residual(plain),
        "## The largest allocations at the peak",
        *_largest(plain),
        "## Predicted against measured",
        *_predicted(rows),
        *_warnings(rows),
        "## Timelines",
        *_timelines(plain),
    ]
    pictures = {"peaks.png": draw_peaks(plain), "checkpoints.png": draw_checkpoints(rows)}
    return Report(blocks, {name: figure for name, figure in pictures.items() if figure is not None})


def is_measured(row: Row) -> bool:
    """Return whether the row has a measured peak."""
    return row.get("requested_peak_bytes") is not None


def _peaks(rows: Sequence[Row]) -> Iterator[str]:
    measured = any(map(is_measured, rows))
    keys = ("allocated_peak_bytes", "peak_phase") if measured else ("predicted_peak_bytes", "predicted_phase")
    if measured:
        yield (
            "Requested is what the program asks the allocator for; allocated adds the allocator's rounding, which "
            "depends on what was freed before; reserved is what the allocator took from the device. Predictions are of "
            "requested bytes."
        )
    else:
        yield "No peak was measured: only CUDA's allocator records its history. These are predictions."
    shown = [
        {**row, "peak": None if row.get(keys[0]) is None else f"{show_bytes(row[keys[0]])}, {row[keys[1]] or _MAKING}"}
        for row in sorted(rows, key=lambda row: PASSES.index(cast("Any", row["passes"])))
    ]
    for size, batch in dict.fromkeys((row["size"], row["batch"]) for row in rows):
        here = [row for row in shown if (row["size"], row["batch"]) == (size, batch)]
        yield f"{size}, batch {batch}, {'allocated' if measured else 'requested'} at the peak, by context:"
        yield markdown(pivot(here, "context", ["passes", "dtype"], "peak"))
    yield "Requested at the peak, predicted by kind, and measured:"
    yield "![peaks](peaks.png)"


def _checkpoints(rows: Sequence[Row]) -> Iterator[str]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in KEYS if key != "checkpoint_layers"), []).append(row)
    several = [group for group in groups.values() if len(group) > 1]
    for group in several:
        yield f"{describe_cell({**group[0], 'checkpoint_layers': 0})}:"
        headings = ["layers per checkpoint", "requested at the peak", "in", "predicted", "allocated", "reserved"]
        lines = []
        for row in group:
            sizes = {kind: show_bytes(row.get(f"{kind}_peak_bytes"))
                     for kind in ("requested", "predicted", "allocated", "reserved")}  # fmt: skip
            phase = phase_of(row) if is_measured(row) else f"{row['predicted_phase']}, predicted"
            ends = [show_bytes(row["predicted_saved_bytes"]), row["status"]]
            lines.append([row["checkpoint_layers"] or "none", sizes.pop("requested"), phase, *sizes.values(), *ends])
        yield markdown(Table([*headings, "saved when the loss is made, predicted", "status"], lines))
    yield "![checkpoints](checkpoints.png)" if several else "No cell has checkpoints."


def phase_of(row: Row) -> str:
    """Return the phase in which the requested bytes peaked: the highest one, unless all are below the peak."""
    phases = cast("list[dict[str, Any]] | None", row.get("requested_phases"))
    if phases is None:
        return str(row["peak_phase"] or _MAKING)
    highest = max(int(phase["requested_bytes"]) for phase in phases)
    return str(row["requested_phase"]) if whole(row["requested_peak_bytes"]) <= highest else _MAKING


def _saved(rows: Sequence[Row]) -> Iterator[str]:
    which = ("size", "context", "dtype", "batch")
    settings: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.get("saved_parts"):
            # Autograd saves the same with and without an optimizer.
            settings.setdefault(tuple(row[key] for key in which), row)
    counted = list(settings.values())
    if not counted:
        yield "Not counted."
        return
    lines = []
    for row in counted:
        blocks = cast("list[int]", row["saved_bytes_by_block"])
        low, high = show_bytes(min(blocks)), show_bytes(max(blocks))
        each = f"{low}, each of {len(blocks)}" if low == high else f"{low} to {high}, of {len(blocks)}"
        share = f"{sum(blocks) / whole(row['saved_bytes']):.1%}"
        off = whole(row["saved_bytes"]) - whole(row["predicted_saved_bytes"])
        lines.append([*(row[key] for key in which), each, show_bytes(row["saved_bytes"]), share, off])
    yield markdown(Table([*which, "saved by a block", "saved in all", "in the blocks", "less predicted, B"], lines))
    longest = {(row["size"], row["dtype"]): row for row in sorted(counted, key=lambda row: whole(row["context"]))}
    for row in longest.values():
        yield f"The largest parts of a block, {row['size']}, context {row['context']}, {row['dtype']}:"
        parts = []
        for part in cast("list[Row]", row["saved_parts"]):
            shape = part["shape"] and " × ".join(map(str, cast("list[int]", part["shape"])))
            made_by = part["made_by"] or "all others"
            parts.append([show_bytes(part["bytes"]), part["count"], made_by, part["saved_in"], shape, part["dtype"]])
        headings = ["saved", "tensors", "made by", "first saved in", "shape of each", "dtype"]
        yield markdown(Table(headings, parts))


def _residual(rows: Sequence[Row]) -> Iterator[str]:
    seen: dict[tuple[object, ...], dict[object, None]] = {}
    for row in rows:
        if row.get("residual_bytes") is not None:
            shape = " × ".join(map(str, cast("list[int]", row["residual_shape"])))
            key = (row["size"], row["context"], shape, row["residual_dtype"], row["residual_bytes"])
            seen.setdefault(key, {})[row["dtype"]] = None
    lines = [[*key[:4], key[4], show_bytes(key[4]), " and ".join(map(str, dtypes))] for key, dtypes in seen.items()]
    headings = ["size", "context", "batch × context × d_model", "dtype", "bytes", "size in memory", "seen in"]
    yield markdown(Table(headings, lines)) if lines else "No forward pass completed."


def _largest(rows: Sequence[Row]) -> Iterator[str]:
    telling = sorted(rows, key=lambda row: (-whole(row["context"]), -whole(row["parameters"])))
    recorded = [cast("Row", row) for row in choose_timelines(cast("Any", telling)) if row.get("largest")]
    if not recorded:
        yield "Unknown: only CUDA's allocator records its history."
        return
    yield "Sizes are of the allocator's blocks, rounding included."
    for row in recorded:
        where = f"in {row['peak_phase'] or _MAKING}"
        yield f"{describe_cell(row)}, {show_bytes(row['allocated_peak_bytes'])} allocated at the peak, {where}:"
        largest = group_alike(cast("list[Row]", row["largest"])[:_LARGEST])
        yield markdown(select(largest, {"block": "size", "times": "count", "category": "category",
            "allocated in": "phase", "owner": "owner", "your line ← called from": "label"}))  # fmt: skip
        stacks = [{**one, "size": show_bytes(one["bytes"])} for one in cast("list[Row]", row["stacks"])]
        yield "The stacks that hold most of the peak:"
        yield markdown(select(stacks, {"all blocks": "size", "times": "count", "your line ← called from": "label"}))


def group_alike(largest: Sequence[Row]) -> list[Row]:
    """Return large allocations; those of one size, kind and stack are one row with their count and owners."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for one in largest:
        groups.setdefault(tuple(one[key] for key in ("bytes", "category", "phase", "label")), []).append(one)
    rows = []
    for here in groups.values():
        owners = [str(one["owner"]) for one in here if one["owner"]]
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        owner = owners[0] + more if owners else None
        rows.append({**here[0], "size": show_bytes(here[0]["bytes"]), "count": len(here), "owner": owner})
    return rows


def _predicted(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "The usual sum is, for N parameters, 4 N bytes of parameters, as much of gradients and twice as much for "
        "AdamW, as far as the step has them, and all that is saved for backward, as if it existed at once; without "
        "autocast's copies, temporaries and workspaces. The kinds are those at the predicted peak; bytes are requested."
    )
    lines = []
    for row in rows:
        peak = whole(row["requested_peak_bytes"] if is_measured(row) else row["predicted_peak_bytes"])
        usual = whole(row["added_up_bytes"])
        kinds = [show_bytes(size) for size in kinds_at_peak(row).values()]
        measured = show_bytes(row.get("requested_peak_bytes"))
        ends = [show_bytes(row["predicted_peak_bytes"]), row["predicted_phase"], measured, row.get("difference_bytes")]
        lines.append(
            [*(row[key] for key in KEYS[:5]), *kinds, *ends, show_bytes(usual), f"{(usual - peak) / peak:+.1%}"]
        )
    headings = [*KEYS[:5], *KINDS, REST, "predicted peak", "in", "measured", "difference, B", "usual sum", "off by"]
    yield markdown(Table(headings, lines))
    phases = [
        [*(row[key] for key in KEYS[:5]), *(phase[key] for key in _PHASE)]
        for row in rows
        for phase in cast("list[dict[str, Any]]", row.get("requested_phases") or ())
    ]
    off = [line for line in phases if line[-1]]
    if phases:
        yield f"{len(phases) - len(off)} of {len(phases)} measured peaks of phases are the predicted ones to the byte."
    if off:
        yield markdown(Table([*KEYS[:5], "phase", "predicted, B", "measured, B", "difference, B"], off))
    replayed = [row["replay_difference_bytes"] for row in rows if row.get("replay_difference_bytes") is not None]
    if replayed:
        exact = sum(not difference for difference in replayed)
        yield f"{exact} of {len(replayed)} replayed peaks are `torch.cuda.max_memory_allocated()` to the byte."


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    found: dict[str, int] = {}
    for row in rows:
        for message in cast("list[str]", row.get("warnings") or ()):
            found[message] = found.get(message, 0) + 1
    if found:
        yield "## Warnings about the recordings"
        yield listed(f"{message} ({count} of {len(rows)} rows)" for message, count in found.items())


def _timelines(rows: Sequence[Row]) -> Iterator[str]:
    drawn = [row for row in rows if row.get("timeline")]
    for row in drawn:
        yield f"![{describe_cell(row)}]({row['timeline']})"
    if not drawn:
        yield "None: only CUDA's allocator records its history."


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
