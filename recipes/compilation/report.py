"""What compile_speedup says about its pairs: how much faster, how many kernels, what fused into what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profkit.names import OPTIMIZER
from profkit.report.formats import render_markdown
from profkit.report.units import format_count, format_ns, four_digits
from recipes.common.old_tables import build_pivot
from recipes.common.recipe import LAUNCH_BOUND as BUSY
from recipes.common.recipe import OK, Report, Row
from recipes.common.tables import listed
from recipes.compilation.cells import ATTENTION, KEYS, MODEL
from recipes.compilation.fusions import tell_fusions
from recipes.compilation.pairs import (
    PHASES,
    Pair,
    PhaseChange,
    Speedup,
    compare_phases,
    find_pairs,
    is_launch_bound,
    is_of_gpu,
    measure_kernel_speedup,
    measure_speedup,
    outside_phases,
    share_of_kernels,
    steps_to_break_even,
)
from recipes.compilation.pictures import draw_kernels, draw_speedups
from recipes.compilation.splits import tell_splits
from recipes.compilation.words import name_pair, name_row, noun_of, show_totals
from recipes.detectors.inspect import inspect_tables
from recipes.detectors.tables import build_table as build_benchmark
from recipes.whole_model.cells import COMPILED

_SHOWN_TO_DETECTORS = (*KEYS, *(f"{part}_{kind}_ms" for part in (*PHASES, OPTIMIZER) for kind in ("mean", "std")))


def report(rows: Sequence[Row], machine: Mapping[str, Any]) -> Report:
    """Return sentences and tables on the pairs that were measured, what to know of them, and the pictures."""
    pairs = find_pairs(rows)
    noun = noun_of(pairs[0]) if pairs else "kernel"
    sections = [
        *_pivots(rows),
        "## How much faster",
        *_how_to_read(pairs),
        listed([say_speed(pair) for pair in pairs]) or "No pair was measured.",
        *_say_control(pairs),
        f"## {noun.capitalize()}s of a step, before and after",
        listed([say_kernels(pair) for pair in pairs]) or "No pair was measured.",
        *tell_splits(pairs),
        *_say_command(pairs, machine.get("device")),
        *tell_fusions(pairs),
        "## What the detectors say",
        listed(remark(rows)) or "Nothing.",
    ]
    pictures = {"speedup.png": draw_speedups(pairs), "kernels.png": draw_kernels(pairs)}
    return Report([*filter(None, sections)], pictures)


def _how_to_read(pairs: Sequence[Pair]) -> Iterator[str]:
    if pairs:
        yield (
            "Ratios of wall time are of medians, and their intervals of the steps of one process: what differs from "
            "one process to the next is not in them."
        )
    if any(is_of_gpu(pair.eager) for pair in pairs):
        yield (
            "Kernel time is of one more step, under a profiler; a share is that over the median step without one, and "
            f"above 100 % where the profiled step was a long one. Where kernels fill less than {BUSY * 100:.0f}"
            " % a step is launch-bound: its wall time is the host's, and varies from process to process and from "
            "machine to machine, and so does the ratio of wall times."
        )


def say_speed(pair: Pair) -> str:
    """Return how long a step takes before and after, its kernels too, and after how many steps compiling has paid."""
    eager, compiled = pair.eager, pair.compiled
    speedup = measure_speedup(pair)
    assert speedup is not None
    parts = [(phase, found) for phase in PHASES if (found := measure_speedup(pair, phase)) is not None]
    told = ", ".join(f"{phase} {found.times:.2f}{_doubt(found)}" for phase, found in parts)
    phases = f"; {told}" if len(parts) > 1 else ""
    interval = "too few steps for an interval"
    if speedup.low is not None and speedup.high is not None:
        interval = f"95 % interval {speedup.low:.2f} to {speedup.high:.2f}"
        interval += "" if speedup.is_measurable else ", no measurable difference"
    counts = " and ".join(str(len(row["step_samples_ms"])) for row in (eager, compiled))
    return (
        f"{name_pair(pair)}: {four_digits(eager['step_ms'])} ms a step eager, {four_digits(compiled['step_ms'])} ms "
        f"compiled (medians of {counts} steps without a profiler), {speedup.times:.2f} times as fast ({interval})"
        f"{phases}. {_say_kernel_time(pair)}{_say_first_step(pair)}"
    )


def _doubt(speedup: Speedup) -> str:
    return "" if speedup.low is None or speedup.is_measurable else " (no measurable difference)"


def _say_kernel_time(pair: Pair) -> str:
    """Return how much faster the kernels alone are and how much of a step they fill; nothing where there are none."""
    times = measure_kernel_speedup(pair)
    if times is None:
        return ""
    sides = (("eager", pair.eager), ("compiled", pair.compiled))
    spent = ", ".join(f"{four_digits(row['kernel_ms'])} ms {mode}" for mode, row in sides)
    filled = ", ".join(
        f"{share * 100:.0f} % {mode}{' (launch-bound)' if is_launch_bound(row) else ''}"
        for mode, row in sides
        if (share := share_of_kernels(row)) is not None
    )
    return f"Kernel time is {spent}, {times:.2f} times as fast; of the step kernels fill {filled}. "


def _say_first_step(pair: Pair) -> str:
    eager, compiled = (four_digits(row["first_step_s"]) for row in (pair.eager, pair.compiled))
    steps = steps_to_break_even(pair)
    paid = "no step being measurably faster" if steps is None else f"made up for after {steps:,} steps"
    if steps is not None and (is_launch_bound(pair.eager) or is_launch_bound(pair.compiled)):
        paid += " at this host's speed"
    return f"The first step took {eager} s eager and {compiled} s compiled, {paid}."


def _say_control(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield how far the optimizer's times differ, where there are any: nothing was done to it."""
    found = [(pair, ratio.times) for pair in pairs if (ratio := measure_speedup(pair, OPTIMIZER)) is not None]
    told = "; ".join(f"{abs(times - 1) * 100:.1f} % ({name_pair(pair)})" for pair, times in found)
    if found:
        yield f"The optimizer, which is not compiled, differs between the eager and the compiled process by {told}."


def _say_command(pairs: Sequence[Pair], device: object) -> Iterator[str]:
    if pairs:
        counts = {pair.eager["steps"] for pair in pairs}
        steps = counts.pop() if len(counts) == 1 else "STEPS"
        command = f"python -m recipes.compile_speedup --device {device} --grid full -o DIRECTORY"
        options = {
            MODEL: "--what model --size SIZE --context CONTEXT",
            ATTENTION: "--what attention --d-model D_MODEL --seq-len SEQUENCE",
        }
        told = " or ".join(f"`{options[what]}`" for what in dict.fromkeys(pair.eager["what"] for pair in pairs))
        yield f"Each is measured again by `{command} --passes PASSES --dtype DTYPE --steps {steps}` with {told}."


def say_kernels(pair: Pair) -> str:
    """Return what a step launches before and after, phase by phase."""
    noun = noun_of(pair)
    before, after = (
        f"{format_count(row['kernels'], noun)} of {format_ns(round(row['kernel_ms'] * 1e6))}"
        for row in (pair.eager, pair.compiled)
    )
    phases = "; ".join([*(_say_phase(change, noun) for change in compare_phases(pair)), *_say_rest(pair)])
    whole = f"{before} in a step eager, {after} compiled, one step each"
    return f"{name_pair(pair)}: {whole}. {phases}."


def _say_rest(pair: Pair) -> Iterator[str]:
    before, after = outside_phases(pair.eager), outside_phases(pair.compiled)
    if before[0] or after[0]:
        yield f"between the phases: {show_totals(before)}, then {show_totals(after)}"


def _say_phase(change: PhaseChange, noun: str) -> str:
    whole = f"{change.phase}: {show_totals(change.eager, noun)}, then {show_totals(change.compiled)}"
    if change.eager[0] == change.compiled[0] and not change.generated[0]:
        return whole
    products = f"matrix products {show_totals(change.eager_products)}, then {show_totals(change.compiled_products)}"
    rest = f"the other {show_totals(change.eager_rest)} became {show_totals(change.generated)} generated by Inductor"
    left = f" and {show_totals(change.compiled_rest)} others" if change.compiled_rest[0] else ""
    return f"{whole}: {products}; {rest}{left}"


def remark(rows: Sequence[Row]) -> list[str]:
    """Return what to know when reading the table, mistakes first."""
    shown = [{key: row.get(key) for key in _SHOWN_TO_DETECTORS} for row in rows]
    found = [finding.message for finding in inspect_tables([build_benchmark("this table", shown)])]
    return [*_doubts(rows), *found]


def _doubts(rows: Sequence[Row]) -> Iterator[str]:
    measured = [row for row in rows if row["status"] == OK]
    for key, said in (
        ("compiled_graphs", "graphs were compiled within the timed steps: the times hold compilation"),
        ("allocator_retries", "allocations were tried again after the cache was freed: the memory was all but full"),
    ):
        found = [f"{row[key]} at {name_row(row)}" for row in measured if row.get(key)]
        if found:
            yield f"{said}; in {len(found)} of {len(measured)} rows: {'; '.join(found[:3])}"
    for row in measured:
        for failure in row.get("trace_failures") or ():  # type: ignore[attr-defined]
            yield f"{name_row(row)}: the trace failed its check, its kernels are not to be trusted: {failure}"


def _pivots(rows: Sequence[Row]) -> Iterator[str]:
    for what, down, across in (
        (MODEL, "passes", ("size", "length", "dtype")),
        (ATTENTION, "length", ("d_model", "passes", "dtype")),
    ):
        some = [row for row in rows if (row["what"], row["mode"]) == (what, COMPILED)]
        if some:
            yield f"## {what}: how many times as fast as eager, wall time of the whole step"
            yield render_markdown(build_pivot(some, down, across, "speedup", digits=3))
            if any(row.get("kernel_speedup") for row in some):
                yield "Its kernel time alone:"
                yield render_markdown(build_pivot(some, down, across, "kernel_speedup", digits=3))
