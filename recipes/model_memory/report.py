"""What memory_questions says about its rows: peaks, timelines, the largest, what a block keeps, what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from profkit.report.formats import Column, render_markdown
from profkit.report.memory_units import format_bytes
from recipes.common.recipe import Device, Report, Row, whole
from recipes.common.tables import build_pivot, build_table
from recipes.model_memory.answers import (
    answer_checkpoints,
    answer_largest,
    answer_peaks,
    answer_predicted,
    answer_residual,
    answer_saved,
)
from recipes.model_memory.cells import BUILDING, KEYS, choose_timelines, describe_cell
from recipes.model_memory.pictures import draw_checkpoints, draw_peaks
from recipes.model_memory.predicted import KINDS, REST, describe_prediction, kinds_at_peak
from recipes.whole_model.cells import PASSES

MIB, GIB = 2**20, 2**30
_LARGEST = 10


def add_columns(rows: Sequence[Row]) -> None:
    """Add to every row what arithmetic says of it, whether it was run or not, and units for people."""
    for row in rows:
        row.update(describe_prediction(cast("Any", row), cast("Device", row["device"])))
        for key, source, unit in (
            ("peak_GiB", "allocated_peak_bytes", GIB),
            ("residual_MiB", "residual_bytes", MIB),
            ("saved_block_MiB", "saved_block_bytes", MIB),
        ):
            value = row.get(source)
            row[key] = None if value is None else whole(value) / unit


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Return the answers, each with its table, and pictures of peaks and of checkpoints."""
    plain = [row for row in rows if not row["checkpoint_layers"]]
    largest = cast("list[Row]", choose_timelines(_telling(plain)))
    sections = [
        "## Peaks, and the phase that each falls in",
        *answer_peaks(plain),
        *_peaks(plain),
        "## Timelines",
        *_timelines(plain),
        "## The residual stream",
        *answer_residual(plain),
        "## The largest allocations at the peak",
        *_largest(largest),
        "## What a block keeps for backward",
        *_saved(plain),
        "## Checkpoints",
        *_checkpoints(rows),
        "## Predicted against measured",
        *answer_predicted(rows),
        *_predicted(rows),
        *_warnings(rows),
    ]
    pictures = {"peaks.png": draw_peaks(plain), "checkpoints.png": draw_checkpoints(rows)}
    return Report("\n\n".join(sections), {name: figure for name, figure in pictures.items() if figure is not None})


def _telling(rows: Sequence[Row]) -> list[Any]:
    """Return the rows as they would be run: the largest model at its longest context first."""
    return sorted(rows, key=lambda row: (-whole(row["context"]), -whole(row["parameters"])))


def _peaks(rows: Sequence[Row]) -> Iterator[str]:
    is_measured = any(row.get("allocated_peak_bytes") is not None for row in rows)
    keys = ("allocated_peak_bytes", "peak_phase") if is_measured else ("predicted_peak_bytes", "predicted_phase")
    what = "allocated at the peak" if is_measured else "requested at the predicted peak"
    told = [{**row, "peak": _told_peak(row, *keys)} for row in rows]
    told.sort(key=lambda row: PASSES.index(cast("Any", row["passes"])))
    for size, batch in dict.fromkeys((row["size"], row["batch"]) for row in rows):
        here = [row for row in told if (row["size"], row["batch"]) == (size, batch)]
        yield f"{size}, batch {batch}, {what}, by context:"
        yield render_markdown(build_pivot(here, "context", ["passes", "dtype"], "peak"))
    yield "![peaks](peaks.png)"


def _told_peak(row: Row, size: str, phase: str) -> str | None:
    if row.get(size) is None:
        return None
    return f"{format_bytes(whole(row[size]))}, {row[phase] or BUILDING}"


def _timelines(rows: Sequence[Row]) -> Iterator[str]:
    drawn = [row for row in rows if row.get("timeline")]
    if not drawn:
        yield "None: only CUDA's allocator records its history."
    for row in drawn:
        yield f"{describe_cell(row)}:"
        yield f"![{describe_cell(row)}]({row['timeline']})"


def _largest(rows: Sequence[Row]) -> Iterator[str]:
    recorded = [row for row in rows if row.get("largest")]
    if not recorded:
        yield "Not known: only CUDA's allocator records its history."
    columns = [
        Column("bytes", "bytes"),
        Column("category", "category", right=False),
        Column("asked for in", "phase", right=False),
        Column("whose", "owner", right=False),
        Column("stack, innermost first", "label", right=False),
    ]
    grouped = [Column("bytes", "bytes"), Column("allocations", "count"), Column("stack", "label", right=False)]
    for row in recorded:
        largest, stacks = cast("list[Row]", row["largest"]), cast("list[Row]", row["stacks"])
        yield from answer_largest(row)
        yield render_markdown(build_table(columns, largest[:_LARGEST]))
        yield "By stack:"
        yield render_markdown(build_table(grouped, stacks))


def _saved(rows: Sequence[Row]) -> Iterator[str]:
    counted = [row for row in rows if row.get("saved_parts")]
    seen: set[tuple[object, ...]] = set()
    columns = [
        Column("bytes", "bytes"),
        Column("tensors", "count"),
        Column("made by", "made_by", right=False),
        Column("first saved in", "saved_in", right=False),
        Column("shape of each", "shape", right=False),
        Column("dtype", "dtype", right=False),
    ]
    for row in counted:
        # Autograd keeps the same whether an optimizer follows or not.
        which = (row["size"], row["context"], row["dtype"], row["batch"])
        if which not in seen:
            seen.add(which)
            yield from answer_saved(row)
            parts = [_tell_part(part) for part in cast("list[Row]", row["saved_parts"])]
            yield render_markdown(build_table(columns, parts))
    if not counted:
        yield "Not counted."


def _tell_part(part: Row) -> Row:
    shape = cast("list[int] | None", part["shape"])
    return {**part, "made_by": part["made_by"] or "all others", "shape": shape and " × ".join(map(str, shape))}


def _checkpoints(rows: Sequence[Row]) -> Iterator[str]:
    groups = group_checkpoints(rows)
    if not groups:
        yield "None were asked for."
        return
    columns = [
        Column("layers to a checkpoint", "checkpoint_layers"),
        Column("peak", "allocated_peak_bytes"),
        Column("phase", "peak_phase", right=False),
        Column("requested", "requested_peak_bytes"),
        Column("predicted", "predicted_peak_bytes"),
        Column("difference", "difference_bytes"),
        Column("predicted in", "predicted_phase", right=False),
        Column("kept when the loss is made", "predicted_saved_bytes"),
        Column("status", "status", right=False),
    ]
    for group in groups:
        yield from answer_checkpoints(group)
        shown = [{**row, "checkpoint_layers": row["checkpoint_layers"] or "none"} for row in group]
        yield render_markdown(build_table(columns, shown))
    yield "![checkpoints](checkpoints.png)"


def group_checkpoints(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows that differ in the layers to a checkpoint alone, where there is more than one of them."""
    keys = [key for key in KEYS if key != "checkpoint_layers"]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def _predicted(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of every row's highest phase by category, and that of every phase."""
    keys = [Column(key, key, right=key not in ("size", "passes", "dtype")) for key in KEYS[:5]]
    kinds = [Column(kind, kind) for kind in (*KINDS, REST)]
    ends = [
        *(Column("predicted peak", "predicted_peak_bytes"), Column("in", "predicted_phase", right=False)),
        *(Column("measured", "requested_peak_bytes"), Column("in", "requested_phase", right=False)),
        *(Column("difference", "difference_bytes"), Column("all kinds added up", "added_up_bytes")),
    ]
    yield "At the predicted peak, in bytes as requested:"
    yield render_markdown(build_table([*keys, *kinds, *ends], [{**row, **kinds_at_peak(row)} for row in rows]))
    yield "Every phase:"
    phases = [Column("phase", "phase", right=False), Column("predicted", "predicted_bytes")]
    phases += [Column("measured", "requested_bytes"), Column("difference", "difference_bytes")]
    phases += [Column("with this new", "moment", right=False)]
    yield render_markdown(build_table([*keys, *phases], [line for row in rows for line in _phases_of(row)]))


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what profkit warned of when it read the recordings, each warning once, with the rows that have it."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for message in cast("list[str]", row.get("warnings") or ()):
            found.setdefault(message, []).append(row)
    if found:
        yield "## What the recordings warn of"
        yield "\n".join(f"- {message} ({len(here)} of {len(rows)} rows)" for message, here in found.items())


def _phases_of(row: Row) -> Iterator[Row]:
    measured = {phase["phase"]: phase for phase in cast("list[dict[str, Any]]", row.get("requested_phases") or ())}
    for phase in cast("list[dict[str, Any]]", row["predicted_phases"]):
        found = measured.get(phase["phase"], {})
        line = {key: row[key] for key in KEYS[:5]}
        line |= {"phase": phase["phase"], "moment": phase["moment"], "predicted_bytes": phase["bytes"]}
        yield {
            **line,
            "requested_bytes": found.get("requested_bytes"),
            "difference_bytes": found.get("difference_bytes"),
        }
