"""What attention_sweep shows: times, how memory grows, one configuration tensor by tensor, where memory ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from recipes.attention.cells import BATCH, COMPILED, IMPLEMENTATIONS, ITEM_BYTES, SDPA, WRITTEN
from recipes.common.measuring import MIB
from recipes.common.pictures import COLOURS, label_plainly, new_figure, with_gaps
from recipes.common.recipe import OK, Report, Row, whole
from recipes.common.tables import Table, listed, markdown, pivot
from recipes.detectors import inspect_rows

Points = Sequence[tuple[float, float]]
"""Sequence lengths, each with a positive value."""

_PARTS = ("forward", "backward")
_SHOWN_TO_DETECTORS = (
    *("d_model", "seq_len", "implementation", "dtype"),
    *("forward_mean_ms", "forward_std_ms", "backward_mean_ms", "backward_std_ms"),
    *("mem_after_inputs_MiB", "saved_activations_MiB", "forward_peak_MiB", "backward_peak_MiB"),
)
_DIGITS = 3
"""Digits of an extrapolation: where memory really ends also depends on fragmentation, which the peaks do not show."""
_TOLERATED_MIB = 2.0
"""A library's workspace may appear one size later than the first; cuBLASLt's is 1 MiB per thread."""


def add_columns(rows: Sequence[Row]) -> None:
    """Add ``growth_factor``: what is saved, over that of the next shorter sequence; drop predictions that are bounds.

    The prediction for compiled code, and for code that chooses its kernels, is a lower bound and no peak.
    """
    for series in _by_series(rows).values():
        for before, row in zip([None, *series], series, strict=False):
            ours, theirs = row.get("saved_activations_MiB"), before and before.get("saved_activations_MiB")
            row["growth_factor"] = float(str(ours)) / float(str(theirs)) if ours and theirs else None
    for row in rows:
        if row["implementation"] in (COMPILED, SDPA):
            row["predicted_peak_bytes"] = None


def report(rows: Sequence[Row], machine: Mapping[str, Any]) -> Report:
    """Return tables of times, growth, one configuration's tensors and projected limits, with two pictures."""
    shown = [{key: row.get(key) for key in _SHOWN_TO_DETECTORS} for row in rows]
    doubts = [*chain.from_iterable(map(find_held, _by_series(rows).values()))]
    doubts += [finding.message for finding in inspect_rows(shown)]
    blocks = [*_times(rows), *_growth(rows), *_accounts(rows), *_limits(rows, machine.get("free_bytes"))]
    blocks += ["## Findings of the detectors", listed(doubts) or "None."]
    saved = ("saved_activations_MiB", "backward_peak_MiB")
    keys = saved if any(row.get("backward_peak_MiB") for row in rows) else saved[:1]
    pictures = {
        "times.png": _draw(rows, "Attention: median of the passes", ("forward_ms", "backward_ms"), "ms"),
        "memory.png": _draw(rows, "Attention: memory", keys, "MiB"),
    }
    return Report(blocks, pictures)


def _times(rows: Sequence[Row]) -> Iterator[str]:
    for part in _PARTS:
        yield f"## {part.capitalize()}, median ms by sequence length"
        for d_model, dtype in dict.fromkeys((row["d_model"], row["dtype"]) for row in rows):
            some = [row for row in rows if (row["d_model"], row["dtype"]) == (d_model, dtype)]
            yield f"d_model {d_model}, {dtype}:"
            yield markdown(pivot(some, "seq_len", ["implementation"], f"{part}_ms"))


def _growth(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for (implementation, dtype, d_model), series in _by_series(rows).items():
        saved = [(whole(row["seq_len"]), float(str(row["saved_activations_MiB"]))) for row in series
                 if row.get("saved_activations_MiB")]  # fmt: skip
        last = list(_peaks(series))[-2:]
        lengths = " to ".join(str(size) for size, _ in last) if len(last) > 1 else None
        powers = [fit_exponent([(size, peaks[place]) for size, peaks in last]) for place in range(2)]
        exponents = [None if power is None else f"{power:.2f}" for power in (fit_exponent(saved), *powers)]
        lines.append([implementation, dtype, d_model, exponents[0], lengths, *exponents[1:]])
    yield "## Memory grows with this power of the sequence length"
    yield (
        "Saved for backward: a log–log fit over all lengths. Peaks: between the two longest; in short sequences "
        "workspaces and inputs outweigh what grows with the square."
    )
    headings = ["implementation", "dtype", "d_model", "saved for backward", "peaks of", "forward peak", "backward peak"]
    yield markdown(Table(headings, lines))


def fit_exponent(points: Points) -> float | None:
    """Return the power of the sequence length that the values follow, the slope of a log–log fit; None under 2."""
    if len({size for size, _ in points}) < 2:
        return None
    slope, _ = np.polyfit([math.log(size) for size, _ in points], [math.log(value) for _, value in points], 1)
    return float(slope)


def _accounts(rows: Sequence[Row]) -> Iterator[str]:
    """Show one row: the shortest that ran out of memory, otherwise the longest; written-out attention first."""
    there = [row for row in rows if row.get("accounting")]
    ended = [row for row in there if row["status"] != OK]

    def order(row: Row) -> tuple[bool, int, int]:
        longer = whole(row["seq_len"]) * (-1 if ended else 1)
        return (row["implementation"] == WRITTEN, longer, -whole(row["d_model"]))

    row = max(ended or there, key=order, default=None)
    if row is not None:
        size = f"d_model {row['d_model']}, seq_len {row['seq_len']}, {row['implementation']}, {row['dtype']}"
        yield f"## The memory of {size}, tensor by tensor"
        for phase in _PARTS:
            yield f"At the peak of {phase}:"
            yield markdown(account(row, phase))


def account(row: Mapping[str, Any], phase: str) -> Table:
    """Return the tensors that exist at a phase's peak, their sum, the measured peak and the difference.

    The difference is rounding, and what libraries take for a moment.
    """
    live = row["accounting"][phase]
    total = sum(each["bytes"] for each in live) / MIB
    peak, workspace = row.get(f"{phase}_peak_MiB"), workspace_mib(row, phase)
    known = peak is not None and workspace is not None
    lines: list[list[object]] = [
        [each["name"], " × ".join(map(str, each["shape"])), each["bytes"] / MIB] for each in live
    ]
    lines += [["workspace", None, workspace], ["sum", None, total + (workspace or 0.0)], ["measured", None, peak]]
    lines += [["measured − sum", None, peak - total - workspace if known else None]]
    return Table(["tensor", "shape", "MiB"], lines)


def workspace_mib(row: Mapping[str, Any], phase: str) -> float | None:
    """Return the MiB of library workspaces before a phase: all that is allocated, less the known tensors.

    These are Q, K, V and dO, before backward also O and what is saved. Backward runs on a thread of its own, which has
    handles and workspaces of its own. None where memory was not measured.
    """
    each = BATCH * whole(row["seq_len"]) * whole(row["d_model"]) * ITEM_BYTES[row["dtype"]] / MIB
    if phase == "forward":
        before, known = row.get("mem_after_inputs_MiB"), each * 4
    else:
        before, known = row.get("mem_before_backward_MiB"), each * 5 + (row.get("saved_activations_MiB") or 0.0)
    return None if before is None else before - known


def find_held(series: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a finding if the unknown memory before a phase grows with the sequence length, as no workspace does.

    Args:
        series: rows of one implementation, dtype and width.
    """
    for phase in _PARTS:
        found = [(mib, row) for row in series if (mib := workspace_mib(row, phase)) is not None]
        if not found:
            continue
        least, most = min(found, key=lambda each: each[0]), max(found, key=lambda each: each[0])
        if most[0] - least[0] > _TOLERATED_MIB:
            row = most[1]
            yield (
                f"before {phase}, {most[0]:,.6g} MiB belong to no known tensor at d_model {row['d_model']}, seq_len "
                f"{row['seq_len']}, {row['implementation']}, {row['dtype']}, and {least[0]:,.6g} MiB at seq_len "
                f"{least[1]['seq_len']}: a workspace does not grow, so an earlier pass left something behind, which is "
                "part of the peaks"
            )


def _limits(rows: Sequence[Row], free_bytes: int | None) -> Iterator[str]:
    lines: list[list[object]] = []
    for (implementation, dtype, d_model), series in _by_series(rows).items():
        points = [(size, max(peaks)) for size, peaks in _peaks(series)]
        limit = None if free_bytes is None else project_limit(points, free_bytes / MIB)
        lines.append([implementation, dtype, d_model, None if limit is None else round_down(limit, _DIGITS)])
    yield "## The sequence length at which the memory would end"
    if all(line[-1] is None for line in lines):
        yield "Not projected: this takes measured peaks at three lengths."
        return
    yield (
        f"Extrapolated from the measured peaks to the {(free_bytes or 0) / 2**30:.1f} GiB that were free at first, "
        f"rounded down to {_DIGITS} digits; batch {BATCH}. Fragmentation is not included, so memory may end earlier."
    )
    yield markdown(Table(["implementation", "dtype", "d_model", "longest seq_len that would fit"], lines))


def project_limit(points: Points, limit: float) -> int | None:
    """Return the greatest sequence length with a value within ``limit``; None under 3 points, or without growth.

    The values are fitted by a polynomial of degree 2 in the length: tensors of ``(seq, seq)``, of ``(seq, d)`` and a
    constant. Each point weighs by its inverse, so that all fit to the same share of themselves.
    """
    if len({size for size, _ in points}) < 3:
        return None
    sizes, values = (np.array(each, dtype=float) for each in zip(*points, strict=True))
    square, linear, constant = np.polyfit(sizes, values, 2, w=1 / values)
    if square * sizes.max() ** 2 < 1e-3 * values.max():
        # There is no (seq, seq) tensor: fit a line.
        linear, constant = np.polyfit(sizes, values, 1, w=1 / values)
        return int((limit - constant) / linear) if linear > 0 else None
    root = math.sqrt(linear**2 + 4 * square * (limit - constant))
    return int((root - linear) / (2 * square))


def round_down(value: int, digits: int) -> int:
    """Return the greatest whole number up to ``value`` with that many significant digits: 27,800 for 27,895 and 3."""
    step = 10 ** max(len(str(abs(value))) - digits, 0)
    return int(value // step * step)


def _draw(rows: Sequence[Row], title: str, keys: Sequence[str], unit: str) -> Figure:
    least = min(whole(row["d_model"]) for row in rows)
    sizes = sorted({whole(row["seq_len"]) for row in rows})
    figure = new_figure(f"{title}, d_model {least}", width=5.0 * len(keys) + 1.5)
    panels = figure.subplots(1, len(keys), squeeze=False)[0]
    for panel, key in zip(panels, keys, strict=True):
        drawn = [series for (_, _, d_model), series in _by_series(rows).items() if d_model == least]
        for place, series in enumerate(drawn):
            # Each line is thinner than the one below it, so that of two equal lines both are visible.
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
    # A logarithmic axis has no place for 0, which is an answer too: the legend shows it.
    panel.plot(
        *with_gaps((whole(row["seq_len"]), row.get(key)) for row in series),
        "-o" if dtype == "fp32" else "--s",
        color=COLOURS[IMPLEMENTATIONS.index(implementation)],
        linewidth=thickness,
        markersize=2.5 + thickness,
        label=f"{implementation}, {dtype}{': 0' if values == {0} else ''}",
    )


def _peaks(series: Sequence[Row]) -> Iterator[tuple[int, list[float]]]:
    for row in series:
        if row["status"] == OK and row.get("forward_peak_MiB") and row.get("backward_peak_MiB"):
            yield whole(row["seq_len"]), [float(str(row[f"{part}_peak_MiB"])) for part in _PARTS]


def _by_series(rows: Sequence[Row]) -> dict[tuple[str, str, int], list[Row]]:
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: whole(row["seq_len"])):
        key = (str(row["implementation"]), str(row["dtype"]), whole(row["d_model"]))
        found.setdefault(key, []).append(row)
    return found
