"""What compile_speedup says about its pairs: how much faster, how many kernels, what fused into what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profkit.report.formats import Column, render_markdown
from profkit.report.units import format_count, format_ns, four_digits
from recipes.common.recipe import OK, Report, Row
from recipes.common.tables import DASH, build_pivot, build_table
from recipes.compilation.cells import ATTENTION, KEYS, MODEL
from recipes.compilation.pairs import (
    PHASES,
    Fused,
    Pair,
    PhaseChange,
    Speedup,
    Totals,
    compare_phases,
    find_pairs,
    list_fused,
    measure_speedup,
    outside_phases,
    steps_to_break_even,
)
from recipes.compilation.pictures import draw_kernels, draw_speedups
from recipes.compilation.work import Kernel, kernels_of
from recipes.detectors.inspect import inspect_tables
from recipes.detectors.tables import build_table as build_benchmark
from recipes.whole_model.cells import COMPILED, FORWARD_ONLY

_SHOWN_TO_DETECTORS = (*KEYS, *(f"{part}_{kind}_ms" for part in PHASES for kind in ("mean", "std")))
_MOST_LINES = 15
_ON_GPU = "gpu-kernel"


def report(rows: Sequence[Row], machine: Mapping[str, Any]) -> Report:
    """Return sentences and tables on the pairs that were measured, what to know of them, and the pictures."""
    pairs = find_pairs(rows)
    command = f"python -m recipes.compile_speedup --device {machine.get('device')} --grid full -o DIRECTORY"
    sections = [
        *_pivots(rows),
        "## How much faster",
        _list([say_speed(pair) for pair in pairs]) or "No pair was measured.",
        f"## {_noun(pairs[0]).capitalize() if pairs else 'Kernel'}s of a step, before and after",
        _list([say_kernels(pair) for pair in pairs]) or "No pair was measured.",
        f"Each is measured again by `{command}` with what stands in brackets behind it." if pairs else "",
        *_fusions(pairs),
        "## What the detectors say",
        _list(remark(rows)) or "Nothing.",
    ]
    pictures = {"speedup.png": draw_speedups(pairs), "kernels.png": draw_kernels(pairs)}
    return Report("\n\n".join(filter(None, sections)), pictures)


def say_speed(pair: Pair) -> str:
    """Return how long a step takes before and after, and after how many steps compiling has paid."""
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
        f"{phases}. {_say_first_step(pair)} ({name_options(pair)})"
    )


def _doubt(speedup: Speedup) -> str:
    return "" if speedup.low is None or speedup.is_measurable else " (no measurable difference)"


def _say_first_step(pair: Pair) -> str:
    eager, compiled = (four_digits(row["first_step_s"]) for row in (pair.eager, pair.compiled))
    steps = steps_to_break_even(pair)
    paid = "no step being measurably faster" if steps is None else f"made up for after {steps:,} steps"
    return f"The first step took {eager} s eager and {compiled} s compiled, {paid}."


def say_kernels(pair: Pair) -> str:
    """Return what a step launches before and after, phase by phase."""
    noun = _noun(pair)
    before, after = (
        f"{format_count(row['kernels'], noun)} of {format_ns(round(row['kernel_ms'] * 1e6))}"
        for row in (pair.eager, pair.compiled)
    )
    phases = "; ".join([*(_say_phase(change, noun) for change in compare_phases(pair)), *_say_rest(pair)])
    whole = f"{before} in a step eager, {after} compiled, one step each"
    return f"{name_pair(pair)}: {whole}. {phases}. ({name_options(pair)})"


def _say_rest(pair: Pair) -> Iterator[str]:
    before, after = outside_phases(pair.eager), outside_phases(pair.compiled)
    if before[0] or after[0]:
        yield f"between the phases: {_show(before)}, then {_show(after)}"


def _say_phase(change: PhaseChange, noun: str) -> str:
    if change.eager[0] == change.compiled[0] and not change.generated[0]:
        return f"{change.phase}: {_show(change.eager, noun)}, then {_show(change.compiled)}"
    products = f"matrix products {_show(change.eager_products)}, then {_show(change.compiled_products)}"
    rest = f"the other {_show(change.eager_rest)} became {_show(change.generated)} generated by Inductor"
    left = f" and {_show(change.compiled_rest)} others" if change.compiled_rest[0] else ""
    return f"{change.phase}: {_show(change.eager, noun)}, then {_show(change.compiled)}: {products}; {rest}{left}"


def _fusions(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the tables of one pair of attention and one of the model: the first of each that runs backward."""
    for what in (ATTENTION, MODEL):
        own = [pair for pair in pairs if pair.eager["what"] == what]
        pair = next((pair for pair in own if pair.eager["passes"] != FORWARD_ONLY), next(iter(own), None))
        if pair is None:
            continue
        noun = _noun(pair)
        yield f"## What fused into what: {name_pair(pair)}"
        yield f"What Inductor made, by the operators that its name says are in it ({name_options(pair)}):"
        yield _table_generated(pair, noun)
        yield (
            f"The operators of which compiled code launches fewer {noun}s, and the generated {noun}s that name them; "
            "one may stand for several operators, so that their times do not add up:"
        )
        yield _table_operators(pair, noun)


def _table_generated(pair: Pair, noun: str) -> str:
    made = [each for each in kernels_of(pair.compiled) if each.is_generated]
    lines = [
        {
            **{"phase": each.phase, "kernel": _shorten(each), "count": each.count, "time": format_ns(each.total_ns)},
            "fused": ", ".join(each.fused) or DASH,
        }
        for each in sorted(made, key=lambda each: -each.total_ns)[:_MOST_LINES]
    ]
    rest = len(made) - len(lines)
    columns = [Column("phase", "phase", right=False), Column(f"generated {noun}", "kernel", right=False)]
    columns += [Column("count", "count"), Column("time", "time"), Column("fused in it", "fused", right=False)]
    return render_markdown(build_table(columns, lines)) + (f"\n\n{rest} more." if rest else "")


def _table_operators(pair: Pair, noun: str) -> str:
    found = [(change.phase, each) for change in compare_phases(pair) for each in list_fused(pair, change.phase)]
    named = [(phase, each) for phase, each in found if each.kernels]
    lines = [
        {
            **{"phase": phase, "operator": each.operator, "eager": _show(each.eager), "left": _show(each.left)},
            "kernels": _name_kernels(each),
        }
        for phase, each in sorted(named, key=lambda entry: -entry[1].eager[1])[:_MOST_LINES]
    ]
    columns = [Column("phase", "phase", right=False), Column("operator", "operator", right=False)]
    columns += [Column(f"{noun}s eager", "eager"), Column("compiled, by itself", "left")]
    columns += [Column(f"in generated {noun}s", "kernels", right=False)]
    others = [each for _, each in found if not each.kernels]
    parts = [f"{len(named) - len(lines)} more."] if len(named) > len(lines) else []
    if others:
        gone = (
            sum(each.eager[0] - each.left[0] for each in others),
            sum(each.eager[1] - each.left[1] for each in others),
        )
        names = ", ".join(each.operator for each in others[:5])
        parts.append(
            f"{_show(gone, noun)} fewer of {len(others)} operators that no generated {noun} names ({names}, …)."
        )
    return "\n\n".join([render_markdown(build_table(columns, lines)), *parts])


def _name_kernels(fused: Fused) -> str:
    shown = [f"{each.count} × {_shorten(each)}" for each in fused.kernels[:2]]
    return ", ".join([*shown, *([f"{len(fused.kernels) - 2} more"] if len(fused.kernels) > 2 else [])])


def _shorten(kernel: Kernel) -> str:
    """Return a generated kernel's name without the operators, which stand elsewhere: ``triton_poi_…_0``."""
    head, _, rest = kernel.name.partition("fused_")
    return f"{head}…_{rest.rpartition('_')[2]}" if rest else kernel.name


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
        found = [f"{row[key]} at {_name_row(row)}" for row in measured if row.get(key)]
        if found:
            yield f"{said}; in {len(found)} of {len(measured)} rows: {'; '.join(found[:3])}"
    for row in measured:
        for failure in row.get("trace_failures") or ():  # type: ignore[attr-defined]
            yield f"{_name_row(row)}: the trace failed its check, its kernels are not to be trusted: {failure}"


def _pivots(rows: Sequence[Row]) -> Iterator[str]:
    for what, down, across in (
        (MODEL, "passes", ("size", "length", "dtype")),
        (ATTENTION, "length", ("d_model", "passes", "dtype")),
    ):
        some = [row for row in rows if (row["what"], row["mode"]) == (what, COMPILED)]
        if some:
            yield f"## {what}: how many times as fast as eager, the whole step"
            yield render_markdown(build_pivot(some, down, across, "speedup"))


def name_pair(pair: Pair) -> str:
    """Return what a pair is of."""
    return _name_case(pair.eager)


def _name_case(row: Mapping[str, Any]) -> str:
    if row["what"] == ATTENTION:
        size = f"d_model {row['d_model']}, sequence {row['length']}"
    else:
        size = f"{row['size']}, context {row['length']}"
    return f"{row['what']} {size}, batch {row['batch']}, {row['passes']}, {row['dtype']}"


def _name_row(row: Mapping[str, Any]) -> str:
    return f"{_name_case(row)}, {row['mode']}"


def name_options(pair: Pair) -> str:
    """Return the options of the command that measure a pair alone."""
    row = pair.eager
    own = {key: row[key] for key in ("what", "passes", "dtype", "steps")}
    if row["what"] == ATTENTION:
        own |= {"d-model": row["d_model"], "seq-len": row["length"]}
    else:
        own |= {"size": row["size"], "context": row["length"]}
    return f"`{' '.join(f'--{option} {value}' for option, value in own.items())}`"


def _noun(pair: Pair) -> str:
    """Return what is counted: with both sides measured on one device it is the same."""
    return "kernel" if pair.eager["measure"] == _ON_GPU else "operator"


def _show(totals: Totals, noun: str | None = None) -> str:
    """Return a count, if told of what, and its time."""
    if not totals[0]:
        return "none"
    count = f"{totals[0]:,}" if noun is None else format_count(totals[0], noun)
    return f"{count}, {format_ns(totals[1])}"


def _list(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
