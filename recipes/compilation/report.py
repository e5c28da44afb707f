"""What compile_speedup shows: how much faster each pair is, the kernels of a step, what was fused into what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profkit.names import OPTIMIZER
from recipes.common.recipe import LAUNCH_BOUND, Report, Row
from recipes.common.tables import Table, listed, markdown, pivot, show_digits, show_share
from recipes.compilation.cells import ATTENTION, KEYS, MODEL
from recipes.compilation.pairs import (
    PHASES,
    Pair,
    find_pairs,
    is_of_gpu,
    list_fused,
    measure_kernel_speedup,
    measure_speedup,
    outside_phases,
    share_of_kernels,
    steps_to_break_even,
)
from recipes.compilation.pictures import draw_kernels, draw_speedups
from recipes.compilation.work import GENERATED, OTHERS, PRODUCTS, Kernel, Totals, kernels_of, total, totals_by_kind
from recipes.detectors import inspect_rows
from recipes.whole_model.cells import COMPILED, FORWARD_ONLY
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
