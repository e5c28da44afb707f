"""What compile_speedup shows: how much faster each pair is, the kernels of a step, what was fused into what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from profkit.names import OPTIMIZER
from recipes.common.pictures import COLOURS, new_figure
from recipes.common.recipe import LAUNCH_BOUND, Report, Row
from recipes.common.tables import Table, listed, markdown, pivot, show_digits, show_share
from recipes.compilation.cells import ATTENTION, KEYS, MODEL
from recipes.compilation.pairs import (
    PHASES,
    Pair,
    Speedup,
    find_pairs,
    is_of_gpu,
    list_fused,
    measure_kernel_speedup,
    measure_speedup,
    outside_phases,
    share_of_kernels,
    steps_to_break_even,
)
from recipes.compilation.work import (
    GENERATED,
    KINDS,
    OTHERS,
    PRODUCTS,
    Kernel,
    Totals,
    kernels_of,
    total,
    totals_by_kind,
)
from recipes.detectors import inspect_rows
from recipes.whole_model.cells import COMPILED, FORWARD_ONLY, SIZES
from recipes.whole_model.report import find_slow_events

_SHOWN_TO_DETECTORS = (*KEYS, *(f"{part}_{kind}_ms" for part in (*PHASES, OPTIMIZER) for kind in ("mean", "std")))
_MOST_LINES = 15


def report(rows: Sequence[Row], _machine: Mapping[str, Any]) -> Report:
    """Return the tables of the pairs that were measured, the findings, and the pictures."""
    pairs = find_pairs(rows)
    blocks = [*_pivots(rows), "## Each pair", *(_speedups(pairs) if pairs else ["No pair was measured."])]
    if pairs:
        blocks += ["## The kernels of a step, by phase", *_kernels(pairs), *_fusions(pairs)]
    blocks += ["## Findings of the detectors", listed(remark(rows)) or "None."]
    return Report(blocks, {"speedup.png": draw_speedups(pairs), "kernels.png": draw_kernels(pairs)})


def name_case(row: Mapping[str, Any]) -> str:
    """Return what a row measures, eager or compiled."""
    if row["what"] == ATTENTION:
        size = f"d_model {row['d_model']}, sequence {row['length']}"
    else:
        size = f"{row['size']}, context {row['length']}"
    return f"{row['what']} {size}, batch {row['batch']}, {row['passes']}, {row['dtype']}"


def _pivots(rows: Sequence[Row]) -> Iterator[str]:
    for what, down, across in (
        (MODEL, "passes", ("size", "length", "dtype")),
        (ATTENTION, "length", ("d_model", "passes", "dtype")),
    ):
        some = [row for row in rows if (row["what"], row["mode"]) == (what, COMPILED)]
        if some:
            yield f"## {what}: how many times as fast as eager, wall time of the whole step"
            yield markdown(pivot(some, down, across, "speedup", digits=3))
            if any(row.get("kernel_speedup") for row in some):
                yield "Its kernel time alone:"
                yield markdown(pivot(some, down, across, "kernel_speedup", digits=3))


def _speedups(pairs: Sequence[Pair]) -> Iterator[str]:
    yield (
        "Times are medians of the steps of one process, without a profiler; intervals are of these steps and do not "
        "include the difference between processes. The optimizer is not compiled: its ratio shows how far two "
        "processes differ. A compiled first step is made up for after the last column's number of steps."
    )
    headings = ["case", "eager ms", "compiled ms", "times as fast", "95 % interval", "forward", "backward", "optimizer"]
    lines = []
    for pair in pairs:
        parts = [measure_speedup(pair, part) for part in ("step", *PHASES, OPTIMIZER)]
        whole = parts[0]
        assert whole is not None
        interval = "too few steps" if whole.low is None else f"{whole.low:.2f} to {whole.high:.2f}"
        interval += ", no measurable difference" * (whole.low is not None and not whole.is_measurable)
        steps = [show_digits(row["step_ms"], 4) for row in (pair.eager, pair.compiled)]
        ratios = [None if part is None else f"{part.times:.2f}" for part in parts]
        first = [show_digits(row["first_step_s"], 4) for row in (pair.eager, pair.compiled)]
        line = [name_case(pair.eager), *steps, ratios[0], interval, *ratios[1:]]
        lines.append([*line, *first, steps_to_break_even(pair)])
    yield markdown(Table([*headings, "first step eager s", "compiled s", "made up for after"], lines))
    if any(measure_kernel_speedup(pair) for pair in pairs):
        yield (
            "Kernel time is of one more step, under a profiler; the share of the step is over the median step without "
            f"one. Below {LAUNCH_BOUND:.0%} launches limit the step: its wall time depends on the host, and so does "
            "the ratio of wall times."
        )
        yield markdown(Table(
            ["case", "kernels eager ms", "compiled ms", "times as fast", "share of the step, eager", "compiled"],
            [[name_case(pair.eager), *(show_digits(row["kernel_ms"], 4) for row in (pair.eager, pair.compiled)),
              f"{measure_kernel_speedup(pair):.2f}",
              *(show_share(share_of_kernels(row)) for row in (pair.eager, pair.compiled))]
             for pair in pairs if measure_kernel_speedup(pair)],
        ))  # fmt: skip


def _kernels(pairs: Sequence[Pair]) -> Iterator[str]:
    noun = "kernels" if is_of_gpu(pairs[0].eager) else "operators, by self time"
    yield f"Counts and times of {noun} of one profiled step; Inductor makes generated ones."
    headings = ["case", "phase", "eager", "compiled", "products eager", "products compiled", "others eager"]
    lines: list[list[object]] = []
    for pair in pairs:
        for phase in _phases(pair):
            rows = (pair.eager, pair.compiled)
            wholes = [total(each for each in kernels_of(row) if each.phase == phase) for row in rows]
            eager, compiled = (totals_by_kind(row, phase) for row in rows)
            parts = (eager[PRODUCTS], compiled[PRODUCTS], eager[OTHERS], compiled[GENERATED], compiled[OTHERS])
            lines.append([name_case(pair.eager), phase, *map(_show, (*wholes, *parts))])
        outside = [outside_phases(row) for row in (pair.eager, pair.compiled)]
        if outside != [(0, 0), (0, 0)]:
            lines.append([name_case(pair.eager), "between the phases", *map(_show, outside), *[None] * 5])
    yield markdown(Table([*headings, "generated", "others compiled"], lines))


def _phases(pair: Pair) -> list[str]:
    return list(dict.fromkeys(each.phase for row in (pair.eager, pair.compiled) for each in kernels_of(row)))


def _fusions(pairs: Sequence[Pair]) -> Iterator[str]:
    for what in (ATTENTION, MODEL):
        own = [pair for pair in pairs if pair.eager["what"] == what]
        pair = next((pair for pair in own if pair.eager["passes"] != FORWARD_ONLY), next(iter(own), None))
        if pair is None:
            continue
        noun = "kernel" if is_of_gpu(pair.eager) else "operator"
        made = [each for each in kernels_of(pair.compiled) if each.kind == GENERATED]
        made.sort(key=lambda each: -each.total_ns)
        yield f"## What was fused into what: {name_case(pair.eager)}"
        yield f"The generated {noun}s with most time, with the operators that their names contain ({len(made)} in all):"
        headings = ["phase", f"generated {noun}", "times", "total", "contains"]
        yield markdown(Table(headings, [
            [each.phase, shorten(each), each.count, show_ns(each.total_ns), ", ".join(each.fused) or None]
            for each in made[:_MOST_LINES]
        ]))  # fmt: skip
        found = [(phase, each) for phase in _phases(pair) for each in list_fused(pair, phase) if each.kernels]
        found.sort(key=lambda entry: -entry[1].eager[1])
        yield (
            f"The operators with fewer {noun}s in compiled code, and the generated {noun}s that contain them "
            f"({len(found)} in all). One {noun} may contain several operators, so times do not add up:"
        )
        headings = ["phase", "operator", f"{noun}s eager", "compiled, by itself", f"in generated {noun}s"]
        lines = []
        for phase, each in found[:_MOST_LINES]:
            names = [f"{kernel.count} × {shorten(kernel)}" for kernel in each.kernels[:2]]
            names += [f"{len(each.kernels) - 2} more"] if len(each.kernels) > 2 else []
            lines.append([phase, each.operator, _show(each.eager), _show(each.left), ", ".join(names)])
        yield markdown(Table(headings, lines))


def shorten(kernel: Kernel) -> str:
    """Return a generated kernel's name without the operators: ``triton_poi_…_0``."""
    head, _, rest = kernel.name.partition("fused_")
    return f"{head}…_{rest.rpartition('_')[2]}" if rest else kernel.name


def _show(totals: Totals) -> str:
    return f"{totals[0]:,}, {show_ns(totals[1])}" if totals[0] else "none"


def show_ns(value: int) -> str:
    """Return a duration with four digits in the unit that fits: ``34.50 ms``."""
    size, unit = next(((value / scale, unit) for scale, unit in ((1e6, "ms"), (1e3, "µs")) if value >= 0.99995 * scale),
                      (float(value), "ns"))  # fmt: skip
    return f"{show_digits(size, 4)} {unit}"


def remark(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the tables must know, mistakes first."""
    findings = inspect_rows([{key: row.get(key) for key in _SHOWN_TO_DETECTORS} for row in rows])
    failed = [
        f"{_name_row(row)}: the trace failed its check, do not trust its kernels: {failure}"
        for row in rows
        for failure in row.get("trace_failures") or ()  # type: ignore[attr-defined]
    ]
    return [*find_slow_events(rows, _name_row), *failed, *(finding.message for finding in findings)]


def _name_row(row: Row) -> str:
    return f"{name_case(row)}, {row['mode']}"


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
