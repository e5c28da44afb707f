"""What memory_questions says about its rows: peaks, timelines, the largest, what a block keeps, what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from profkit.report.formats import Column, render_markdown
from profkit.report.units import format_bytes, format_count
from recipes.common.old_tables import build_pivot, build_table
from recipes.common.recipe import Device, Report, Row, whole
from recipes.common.tables import listed
from recipes.model_memory.answers import (
    MAKING,
    answer_checkpoints,
    answer_growth,
    answer_padding,
    answer_peaks,
    answer_predicted,
    answer_residual,
    is_measured,
    phase_of,
    usual_sum_off,
)
from recipes.model_memory.cells import KEYS, choose_timelines, describe_cell
from recipes.model_memory.contents import show_largest, show_saved, tell_size
from recipes.model_memory.pictures import draw_checkpoints, draw_peaks
from recipes.model_memory.predicted import KINDS, REST, describe_prediction, kinds_at_peak
from recipes.model_memory.repeating import tell_command
from recipes.whole_model.cells import PASSES

MIB, GIB = 2**20, 2**30


def add_columns(rows: Sequence[Row]) -> None:
    """Add to every row what arithmetic says of it, whether it was run or not, and units for people."""
    for row in rows:
        row.update(describe_prediction(cast("Any", row), cast("Device", row["device"])))
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
    """Return the answers, each with its table, and pictures of peaks and of checkpoints."""
    plain = [row for row in rows if not row["checkpoint_layers"]]
    largest = cast("list[Row]", choose_timelines(_telling(plain)))
    groups = group_checkpoints(rows)
    in_short = [*answer_peaks(plain), *(line for group in groups for line in answer_checkpoints(group))]
    sections = [
        "## In short",
        listed([*in_short, *answer_predicted(rows)]),
        tell_command(rows, recorded=bool(is_measured(rows))),
        "## Peaks, and the phase that each falls in",
        *_peaks(plain),
        "## Checkpoints",
        *_checkpoints(groups),
        "## What a block keeps for backward",
        *show_saved(plain),
        "## The residual stream",
        listed(answer_residual(plain)) or "Not seen: no forward pass came to its end.",
        "## The largest allocations at the peak",
        *show_largest(largest),
        "## Predicted against measured",
        *_predicted(rows),
        "## Timelines",
        *_timelines(plain),
        *_warnings(rows),
    ]
    pictures = {"peaks.png": draw_peaks(plain), "checkpoints.png": draw_checkpoints(rows)}
    return Report(sections, {name: figure for name, figure in pictures.items() if figure is not None})


def _telling(rows: Sequence[Row]) -> list[Any]:
    """Return the rows as they would be run: the largest model at its longest context first."""
    return sorted(rows, key=lambda row: (-whole(row["context"]), -whole(row["parameters"])))


def _peaks(rows: Sequence[Row]) -> Iterator[str]:
    measured = bool(is_measured(rows))
    if measured:
        yield answer_padding(rows)
        yield listed(answer_growth(rows))
    keys = ("allocated_peak_bytes", "peak_phase") if measured else ("predicted_peak_bytes", "predicted_phase")
    what = "allocated at the peak" if measured else "requested at the predicted peak"
    told = [{**row, "peak": _told_peak(row, *keys)} for row in rows]
    told.sort(key=lambda row: PASSES.index(cast("Any", row["passes"])))
    for size, batch in dict.fromkeys((row["size"], row["batch"]) for row in rows):
        here = [row for row in told if (row["size"], row["batch"]) == (size, batch)]
        yield f"{size}, batch {batch}, {what}, by context:"
        yield render_markdown(build_pivot(here, "context", ["passes", "dtype"], "peak"))
    yield "Requested bytes: each predicted peak by kind, and the measured ones:"
    yield "![peaks](peaks.png)"


def _told_peak(row: Row, size: str, phase: str) -> str | None:
    if row.get(size) is None:
        return None
    return f"{format_bytes(whole(row[size]))}, {row[phase] or MAKING}"


def _timelines(rows: Sequence[Row]) -> Iterator[str]:
    drawn = [row for row in rows if row.get("timeline")]
    if not drawn:
        yield "None: only CUDA's allocator records its history."
    for row in drawn:
        yield f"{describe_cell(row)}:"
        yield f"![{describe_cell(row)}]({row['timeline']})"


def _checkpoints(groups: Sequence[Sequence[Row]]) -> Iterator[str]:
    if not groups:
        yield "None were asked for."
        return
    columns = [Column("layers to a checkpoint", "layers"), Column("requested at the peak", "requested")]
    columns += [Column("in", "phase", right=False), Column("predicted", "predicted")]
    columns += [Column("allocated", "allocated"), Column("reserved", "reserved")]
    columns += [Column("kept when the loss is made, predicted", "kept"), Column("status", "status", right=False)]
    for group in groups:
        yield f"{describe_cell({**group[0], 'checkpoint_layers': 0})}:"
        yield render_markdown(build_table(columns, [_tell_checkpoints(row) for row in group]))
    yield "![checkpoints](checkpoints.png)"


def _tell_checkpoints(row: Row) -> Row:
    sizes = {
        kind: tell_size(row.get(f"{kind}_peak_bytes")) for kind in ("requested", "predicted", "allocated", "reserved")
    }
    measured = row.get("requested_peak_bytes") is not None
    return {
        **sizes,
        "layers": row["checkpoint_layers"] or "none",
        "phase": phase_of(row) if measured else f"{row['predicted_phase']}, predicted",
        "kept": tell_size(row["predicted_saved_bytes"]),
        "status": row["status"],
    }


def group_checkpoints(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows that differ in the layers to a checkpoint alone, where there is more than one of them."""
    keys = [key for key in KEYS if key != "checkpoint_layers"]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def _predicted(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of every row's highest phase by category, and the phases that are off."""
    keys = [Column(key, key, right=key not in ("size", "passes", "dtype")) for key in KEYS[:5]]
    kinds = [Column(kind, kind) for kind in (*KINDS, REST)]
    ends = [
        *(Column("predicted peak", "predicted"), Column("in", "predicted_phase", right=False)),
        *(Column("measured", "measured"), Column("usual sum", "usual"), Column("off by", "off")),
    ]
    yield (
        "The usual sum is, for N parameters, 4 N bytes of parameters, as much of gradients and twice as much for "
        "AdamW, as far as the step has them, and all that is kept for backward, as if all were there at once; without "
        "autocast's copies, temporaries and workspaces. It is no sum of the kinds beside it: these are at the peak."
    )
    yield "Requested bytes at the predicted peak, by kind:"
    yield render_markdown(build_table([*keys, *kinds, *ends], [_tell_predicted(row) for row in rows]))
    yield from _phases(rows, keys)


def _tell_predicted(row: Row) -> Row:
    measured = row.get("requested_peak_bytes")
    return {
        **{key: row[key] for key in (*KEYS, "predicted_phase")},
        **{kind: tell_size(size) for kind, size in kinds_at_peak(row).items()},
        "predicted": tell_size(row["predicted_peak_bytes"]),
        "measured": tell_size(measured),
        "usual": tell_size(row["added_up_bytes"]),
        "off": f"{usual_sum_off(row, 'predicted' if measured is None else 'requested'):+.1%}",
    }


def _phases(rows: Sequence[Row], keys: Sequence[Column]) -> Iterator[str]:
    """Yield which phases' peaks differ from the predicted ones, in bytes."""
    measured = [line for row in rows for line in _phases_of(row) if line["difference_bytes"] is not None]
    off = [line for line in measured if line["difference_bytes"]]
    if not measured:
        return
    if not off:
        of = ", ".join(
            f"{count} of {phase}" for phase, count in Counter(str(line["phase"]) for line in measured).items()
        )
        yield f"Each phase has a peak: all {len(measured)} measured ones are the predicted ones to the byte ({of})."
        return
    yield f"{format_count(len(off), 'phase')} of {len(measured)} measured have another peak than predicted, in bytes:"
    phases = [Column("phase", "phase", right=False), Column("predicted", "predicted_bytes")]
    phases += [Column("measured", "requested_bytes"), Column("difference", "difference_bytes")]
    phases += [Column("with this new", "moment", right=False)]
    yield render_markdown(build_table([*keys, *phases], off))


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what profkit warned of when it read the recordings, each warning once, with the rows that have it."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for message in cast("list[str]", row.get("warnings") or ()):
            found.setdefault(message, []).append(row)
    if found:
        yield "## What the recordings warn of"
        yield listed(f"{message} ({len(here)} of {len(rows)} rows)" for message, here in found.items())


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
