"""What attention_sweep says about its rows: pivots, growth, one configuration's accounts, where the memory ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from matplotlib.figure import Figure

from profkit.report.formats import Column, Table, render_markdown
from recipes.attention.growth import fit_exponent, project_limit, round_down
from recipes.attention.names import BATCH, COMPILED, IMPLEMENTATIONS, MIB, SDPA, WRITTEN
from recipes.attention.workspace import find_held, workspace_mib
from recipes.common.pictures import COLOURS, label_plainly, new_figure, with_gaps
from recipes.common.recipe import OK, Report, Row, whole
from recipes.common.sentences import list_sentences
from recipes.common.tables import build_pivot, build_table
from recipes.detectors.inspect import inspect_tables
from recipes.detectors.tables import build_table as build_benchmark

Series = tuple[str, str, int]
"""Implementation, dtype, d_model: what is compared over the sequence lengths."""

_SHOWN_TO_DETECTORS = (
    *("d_model", "seq_len", "implementation", "dtype"),
    *("forward_mean_ms", "forward_std_ms", "backward_mean_ms", "backward_std_ms"),
    *("mem_after_inputs_MiB", "saved_activations_MiB", "forward_peak_MiB", "backward_peak_MiB"),
)


_DIGITS = 3
"""An extrapolation's: where the memory really ends depends on the allocator too, which the peaks do not know."""


def add_growth(rows: Sequence[Row]) -> None:
    """Add ``growth_factor``: what is kept for backward over that of the next shorter sequence in the same series."""
    for series in _by_series(rows).values():
        for before, row in zip([None, *series], series, strict=False):
            known = before is not None and before.get("saved_activations_MiB") and row.get("saved_activations_MiB")
            row["growth_factor"] = row["saved_activations_MiB"] / before["saved_activations_MiB"] if known else None  # type: ignore[operator, index]


def leave_out_bounds(rows: Sequence[Row]) -> None:
    """Leave out what was predicted of what compiles or chooses its kernels: a lower bound, and no peak."""
    for row in rows:
        if row["implementation"] in (COMPILED, SDPA):
            row["predicted_peak_bytes"] = None


def report(rows: Sequence[Row], machine: Mapping[str, Any]) -> Report:
    """Return pivots, fits, accounts, projections and what the detectors say, with pictures of times and memory."""
    sections = [*_pivots(rows), *_growth(rows), *_accounts(rows), *_limits(rows, machine.get("free_bytes"))]
    shown = [{key: row.get(key) for key in _SHOWN_TO_DETECTORS} for row in rows]
    findings = inspect_tables([build_benchmark("this table", shown)])
    said = [*chain.from_iterable(map(find_held, _by_series(rows).values())), *(each.message for each in findings)]
    sections += ["## What the detectors say", list_sentences(said) or "Nothing."]
    return Report("\n\n".join(sections), {"times.png": draw_times(rows), "memory.png": draw_memory(rows)})


def _pivots(rows: Sequence[Row]) -> Iterator[str]:
    for part in ("forward", "backward"):
        yield f"## {part.capitalize()}, median ms by sequence length"
        for d_model, dtype in dict.fromkeys((row["d_model"], row["dtype"]) for row in rows):
            some = [row for row in rows if (row["d_model"], row["dtype"]) == (d_model, dtype)]
            table = build_pivot(some, "seq_len", ["implementation"], f"{part}_ms", digits=4)
            yield f"d_model {d_model}, {dtype}:\n\n{render_markdown(table)}"


def _growth(rows: Sequence[Row]) -> Iterator[str]:
    peaks, lines = ("forward_peak", "backward_peak"), []
    for (implementation, dtype, d_model), series in _by_series(rows).items():
        line: dict[str, object] = {"implementation": implementation, "dtype": dtype, "d_model": d_model}
        line["saved"] = _show_power(points_of(series, "saved_activations_MiB"))
        last = list(_peaks(series))[-2:]
        if len(last) > 1:
            line["lengths"] = " to ".join(str(size) for size, _ in last)
        for place, key in enumerate(peaks):
            line[key] = _show_power([(size, values[place]) for size, values in last])
        lines.append(line)
    columns = [Column("implementation", "implementation", right=False), Column("dtype", "dtype", right=False)]
    columns += [Column("d_model", "d_model"), Column("saved_activations", "saved"), Column("peaks of", "lengths")]
    columns += [Column(key, key) for key in peaks]
    yield "## The power of the sequence length that memory follows"
    yield (
        "What is kept for backward: a log–log fit over all lengths. Peaks: between the two longest, for in short ones "
        "workspaces and inputs outweigh what grows with the square."
    )
    yield render_markdown(build_table(columns, lines))


def _show_power(points: Sequence[tuple[float, float]]) -> str | None:
    power = fit_exponent(points)
    return None if power is None else f"{power:.2f}"


def _accounts(rows: Sequence[Row]) -> Iterator[str]:
    row = _choose(rows)
    if row is None:
        return
    size = f"d_model {row['d_model']}, seq_len {row['seq_len']}, {row['implementation']}, {row['dtype']}"
    yield f"## The memory of {size}, tensor by tensor"
    for phase in ("forward", "backward"):
        yield f"At the peak of {phase}:\n\n{render_markdown(account(row, phase))}"


def account(row: Mapping[str, Any], phase: str) -> Table:
    """Return the tensors that are live at a phase's peak, with their sum beside what was measured.

    What is left over is rounding, and what libraries take for a moment.
    """
    lines: list[dict[str, object]] = [
        {"tensor": live["name"], "shape": " × ".join(map(str, live["shape"])), "MiB": live["bytes"] / MIB}
        for live in row["accounting"][phase]
    ]
    total = sum(live["bytes"] for live in row["accounting"][phase]) / MIB
    peak, workspace = row.get(f"{phase}_peak_MiB"), workspace_mib(row, phase)
    lines.append({"tensor": "workspace", "MiB": workspace})
    lines.append({"tensor": "sum", "MiB": total + (workspace or 0.0)})
    lines.append({"tensor": "measured", "MiB": peak})
    left = None if peak is None or workspace is None else peak - total - workspace
    lines.append({"tensor": "measured − sum", "MiB": left})
    columns = [Column("tensor", "tensor", right=False), Column("shape", "shape", right=False), Column("MiB", "MiB")]
    return build_table(columns, lines)


def _limits(rows: Sequence[Row], free_bytes: int | None) -> Iterator[str]:
    lines = []
    for (implementation, dtype, d_model), series in _by_series(rows).items():
        points = [(size, max(peaks)) for size, peaks in _peaks(series)]
        limit = None if free_bytes is None else project_limit(points, free_bytes / MIB)
        limit = None if limit is None else round_down(limit, _DIGITS)
        lines.append({"implementation": implementation, "dtype": dtype, "d_model": d_model, "seq_len": limit})
    yield "## The sequence length at which the memory would end"
    if all(line["seq_len"] is None for line in lines):
        yield "Not projected: that takes measured peaks at three lengths, and this device counts none or too few ran."
        return
    columns = [Column("implementation", "implementation", right=False), Column("dtype", "dtype", right=False)]
    columns += [Column("d_model", "d_model"), Column("longest seq_len that would fit", "seq_len")]
    free = f"{(free_bytes or 0) / 2**30:.1f} GiB"
    yield (
        f"An extrapolation, rounded down to {_DIGITS} digits: from the measured peaks of forward and backward to the "
        f"{free} that were free at first; batch {BATCH}. Peaks are of what is allocated: what fragmentation takes is "
        "not in it, so the memory may end earlier."
    )
    yield render_markdown(build_table(columns, lines))


def draw_times(rows: Sequence[Row]) -> Figure:
    """Draw forward and backward over the sequence length, for the least width."""
    return _draw(rows, "Attention: median of the passes", ("forward_ms", "backward_ms"), "ms")


def draw_memory(rows: Sequence[Row]) -> Figure:
    """Draw what is kept for backward, and the peak where it was measured, over the sequence length."""
    measured = any(row.get("backward_peak_MiB") for row in rows)
    keys = ("saved_activations_MiB", "backward_peak_MiB") if measured else ("saved_activations_MiB",)
    return _draw(rows, "Attention: memory", keys, "MiB")


def points_of(series: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Return the sequence lengths at which a column has a positive value, with it."""
    return [(whole(row["seq_len"]), float(str(row[key]))) for row in series if row.get(key)]


def _draw(rows: Sequence[Row], title: str, keys: Sequence[str], unit: str) -> Figure:
    least = min(whole(row["d_model"]) for row in rows)
    sizes = sorted({whole(row["seq_len"]) for row in rows})
    figure = new_figure(f"{title}, d_model {least}", width=5.0 * len(keys) + 1.5)
    panels = figure.subplots(1, len(keys), squeeze=False)[0]
    for panel, key in zip(panels, keys, strict=True):
        drawn = [series for (_, _, d_model), series in _by_series(rows).items() if d_model == least]
        for place, series in enumerate(drawn):
            # Thinner from line to line: where two keep the same, to a few digits, the last would hide the other.
            thickness = 1.2 + 1.8 * (len(drawn) - 1 - place) / max(len(drawn) - 1, 1)
            _draw_series(panel, series, key, thickness)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set_xticks([], minor=True)
        label_plainly(panel)
        panel.set_xlabel("sequence length")
        panel.set_ylabel(f"{key.rpartition('_')[0].replace('_', ' ')}, {unit}")
        panel.grid(True, color="#E5E5E5")
    if any(panel.lines for panel in panels):
        panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _draw_series(panel: Any, series: Sequence[Row], key: str, thickness: float) -> None:
    values = {row.get(key) for row in series} - {None}
    if not values:
        return
    implementation, dtype = str(series[0]["implementation"]), series[0]["dtype"]
    # A logarithm has no place for 0, which is an answer too: it stands in the legend.
    panel.plot(
        *with_gaps((whole(row["seq_len"]), row.get(key)) for row in series),
        "-o" if dtype == "fp32" else "--s",
        color=COLOURS[IMPLEMENTATIONS.index(implementation)],
        linewidth=thickness,
        markersize=2.5 + thickness,
        label=f"{implementation}, {dtype}{': 0' if values == {0} else ''}",
    )


def _choose(rows: Sequence[Row]) -> Row | None:
    """Return the row whose accounts are shown: the smallest that ran out of memory, else the largest; written first."""
    there = [row for row in rows if row.get("accounting")]
    ended = [row for row in there if row["status"] != OK]

    def size(row: Row) -> tuple[bool, int, int]:
        longer = whole(row["seq_len"]) * (-1 if ended else 1)
        return (row["implementation"] == WRITTEN, longer, -whole(row["d_model"]))

    return max(ended or there, key=size, default=None)


def _peaks(series: Sequence[Row]) -> Iterator[tuple[int, list[float]]]:
    for row in series:
        if row["status"] == OK and row.get("forward_peak_MiB") and row.get("backward_peak_MiB"):
            yield whole(row["seq_len"]), [float(str(row[f"{part}_peak_MiB"])) for part in ("forward", "backward")]


def _by_series(rows: Sequence[Row]) -> dict[Series, list[Row]]:
    found: dict[Series, list[Row]] = {}
    for row in sorted(rows, key=lambda row: whole(row["seq_len"])):
        key = (str(row["implementation"]), str(row["dtype"]), whole(row["d_model"]))
        found.setdefault(key, []).append(row)
    return found
