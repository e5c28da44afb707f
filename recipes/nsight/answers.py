"""The answers in sentences, each from the figures of its rows: the number, its range, its whole, what shows it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profkit.ranges import BACKWARD, FORWARD, SCORES, SOFTMAX, VALUE_PRODUCT
from profkit.report.units import format_count, format_ns, format_share
from recipes.nsight.cells import INFERENCE, NSYS, TRAIN
from recipes.nsight.read import GEMM, MATTERS, show_name

Measured = Mapping[str, Any]
"""A row that was measured."""

_LEAST_POINTS = 0.05
_PROFILER_NAMES = {True: "Nsight Systems", False: "torch.profiler"}
_DOING = {TRAIN: "training", INFERENCE: "inference"}


def find_answers(rows: Sequence[Measured]) -> dict[str, list[str]]:
    """Return the sentences of each question by its letter, in the rows' order; a row that lacks a figure has none."""
    timed = [row for row in rows if row.get("forward_ratio") is not None]
    trained = [row for row in rows if row["passes"] == TRAIN and row.get("forward")]
    return {
        "a": [compare_times(row) for row in timed],
        "b": [name_top(row) for row in trained],
        "c": [name_others(row) for row in trained],
        "d": [compare_shares(*pair) for pair in pair_rows(rows)],
        "e": [compare_attention(row) for row in trained],
    }


def pair_rows(rows: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Return inference and training of the same, where both have their shares."""
    shared = ("size", "context", "batch", "steps", "profiler")
    inference = {tuple(row[key] for key in shared): row for row in rows if row["passes"] == INFERENCE}
    pairs = [(inference.get(tuple(row[key] for key in shared), {}), row) for row in rows if row["passes"] == TRAIN]
    return [(one, other) for one, other in pairs if one.get("step") and other.get("step")]


def compare_times(row: Measured) -> str:
    """Return (a): each phase by the trace, by Python in the same steps, and by Python without a profiler."""
    profiler = profiler_name(row)
    parts = []
    for phase in (FORWARD, BACKWARD):
        if row.get(f"{phase}_ratio") is None:
            continue
        recorded, python, clean = (_ms(row[f"{phase}_{kind}_ms"]) for kind in ("recorded", "python", "clean"))
        parts.append(
            f"`{phase}` took {recorded} by {profiler} (wall time of the range, median of "
            f"{len(row[f'{phase}_recorded_samples_ms'])} steps), {python} by Python's clock in the same steps and "
            f"{clean} by Python's clock without a profiler (median of {len(row[f'{phase}_clean_samples_ms'])} steps "
            f"in a process of their own): {row[f'{phase}_ratio']:.3g} times that"
        )
    run = row["capture"]
    # With all of its columns pandas would leave out these.
    columns = "[['context', 'phase', 'clean_median', 'profiled_median']]"
    times = f'python -c "import profkit; print(profkit.read_step_times({run!r}).to_pandas(){columns})"'
    said = f"{describe(row)}, {_DOING[row['passes']]}: {'; '.join(parts)}"
    return f"{said}. {_shown(f'profkit ranges {run} --numbered', times)}"


def name_top(row: Measured) -> str:
    """Return (b): the kernel with most time in forward, and over forward, loss and backward."""
    noun, forward, both = measure_noun(row), row["forward"], row["forward_backward"]
    first, there, other = forward["rows"][0], both["forwards_top"], both["rows"][0]
    name, others = (_code(each, row) for each in (first, other))
    if name == others and not row["same_kernel"]:  # they read alike, but for what is left out for reading
        name, others = (f"`{each['name']}`" for each in (first, other))
    said = (
        f"{describe(row)}: {name} has the most {noun} time of forward, {_part(first, forward)} a forward "
        f"({format_share(first['share'])} of the {noun} time under `{forward['range']}`), in "
        f"{_calls(first)} a forward{_ties(forward)}. Over forward, loss and backward it is "
    )
    if row["same_kernel"]:
        said += "the same"
    else:
        said += f"another: {others}"
    said += (
        f", {_part(other, both)} a step ({format_share(other['share'])} of the {noun} time under `{both['range']}` "
        f"without `{both['exclude']}`), in {_calls(other)}{_ties(both)}"
    )
    if not row["same_kernel"]:
        said += f"; {name} has {format_share(there['share'])} there, place {there['place']}"
    lines = None if row["same_kernel"] else there["place"]
    return f"{said}. {_shown(_kernels(row, forward), _kernels(row, both, lines=lines))}"


def name_others(row: Measured) -> str:
    """Return (c): the kernels other than matrix products that matter in forward."""
    noun, forward = measure_noun(row), row["forward"]
    others = [each for each in forward["rows"] if each["category"] != GEMM and each["share"] >= MATTERS]
    listed = ", ".join(
        f"{_code(each, row)} {format_share(each['share'])} ({each['category']}, {_calls(each)})" for each in others
    )
    rest = 1 - row["gemm_forward_share"]
    found = f"there are {format_count(len(others), noun)}: {listed}" if others else "there is none"
    return (
        f"{describe(row)}: all but matrix products have {format_share(rest)} of the {noun} time under "
        f"`{forward['range']}` ({_ms(row['forward_kernel_ms'] * rest)} of {_ms(row['forward_kernel_ms'])} a forward); "
        f"with {MATTERS:.0%} or more of it {found}. "
        f"{_shown(_kernels(row, forward, '--by category'), _kernels(row, forward, lines=len(forward['rows'])))}"
    )


def compare_shares(inference: Measured, training: Measured) -> str:
    """Return (d): the share of matrix products in inference and in a training step, and what else changed."""
    noun = measure_noun(training)
    shares = [row["gemm_step_share"] for row in (inference, training)]
    changes = [change for change in change_shares(inference, training) if change[0] != GEMM]
    grew, shrank = (
        ", ".join(f"{name} {points:+.1f}" for name, points in changes[::sign] if points * sign >= _LEAST_POINTS)
        for sign in (1, -1)
    )
    wholes = [_ms(row["step"]["total_ns"] / row["step"]["instances"] / 1e6) for row in (inference, training)]
    return (
        f"{describe(training)}: matrix products have {format_share(shares[0])} of the {noun} time of an inference "
        f"({wholes[0]} a step under `{inference['step']['range']}`) and {format_share(shares[1])} of that of a "
        f"training step ({wholes[1]}): {(shares[1] - shares[0]) * 100:+.1f} percentage points. "
        f"Grew: {grew or 'none'}; shrank: {shrank or 'none'}. "
        f"{_shown(*(_kernels(row, row['step'], '--by category') for row in (inference, training)))}"
    )


def change_shares(inference: Measured, training: Measured) -> list[tuple[str, float]]:
    """Return each category's share of training less that of inference, in percentage points, the most grown first."""
    before, after = (
        {each["name"]: each["share"] * 100 for each in row["step"]["rows"]} for row in (inference, training)
    )
    changes = [(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in {**after, **before}]
    return sorted(changes, key=lambda change: -change[1])


def compare_attention(row: Measured) -> str:
    """Return (e): softmax against the two products inside attention, in time and in FLOPs."""
    softmax, scores, values = (row[f"{part}_us"] for part in ("softmax", "scores", "values"))
    flops = [row[f"{part}_flops"] for part in ("softmax", "scores", "values")]
    within = row["attention"]["range"]
    said = (
        f"{describe(row)}: of a layer's forward `{SOFTMAX}` takes {_us(softmax)} of {measure_noun(row)} time, "
        f"`{SCORES}` {_us(scores)}, `{VALUE_PRODUCT}` {_us(values)} (means of {row['softmax_instances']} instances"
        f"{f' within `{within}`' if within else ''}): softmax has {format_share(softmax / (softmax + scores + values))}"
        " of the three's time"
    )
    if all(flops):
        said += (
            f", and {format_share(flops[0] / sum(flops))} of their FLOPs ({flops[0]:,} against {flops[1]:,} and "
            f"{flops[2]:,}): {row['softmax_ratio']:.3g} times the time of the scores, for "
            f"1/{flops[1] / flops[0]:.3g} of their FLOPs"
        )
    command = ["profkit", "efficiency", row["capture"], "--attention", *(["--range", within] if within else [])]
    return f"{said}. {_shown(shlex.join(command))}"


def summarize(rows: Sequence[Measured]) -> Iterator[str]:
    """Yield what all cells together answer, with the cells in which it is least and most."""
    trained = [row for row in rows if row["passes"] == TRAIN and row.get("forward")]
    for phase in (FORWARD, BACKWARD):
        timed = [row for row in rows if row["passes"] == TRAIN and row.get(f"{phase}_ratio") is not None]
        if timed:
            apart = max(abs(row[f"{phase}_recorded_ms"] / row[f"{phase}_python_ms"] - 1) for row in timed)
            yield (
                f"(a) `{phase}` in training took {_extent(timed, f'{phase}_ratio', '{:.3g}')} times as long under "
                f"{profiler_name(timed[0])} as without; in the same steps its trace and Python's clock differ by "
                f"{format_share(apart)} at most."
            )
    if trained:
        same = sum(row["same_kernel"] for row in trained)
        noun = measure_noun(trained[0])
        yield (
            f"(b) The {noun} with the most time in forward is also that of forward and backward in {same} of "
            f"{len(trained)} cells; it has {_extent(trained, 'top_share', '{:.1%}')} of forward's {noun} time."
        )
        yield f"(c) Matrix products have {_extent(trained, 'gemm_forward_share', '{:.1%}')} of forward's {noun} time."
    pairs = pair_rows(rows)
    if pairs:
        fell = sum(one["gemm_step_share"] > other["gemm_step_share"] for one, other in pairs)
        grown = list(dict.fromkeys(change_shares(*pair)[0][0] for pair in pairs))
        shares = [_extent(list(some), "gemm_step_share", "{:.1%}") for some in zip(*pairs, strict=True)]
        yield (
            f"(d) Matrix products have {shares[0]} of the {measure_noun(pairs[0][1])} time in inference and "
            f"{shares[1]} of that of a training step, less in {fell} of {len(pairs)} cells; what grows most is "
            f"{', '.join(grown)}."
        )
    if trained:
        counted = [row for row in trained if row["softmax_flops"]]
        parts = " or ".join(sorted({f"1/{row['scores_flops'] / row['softmax_flops']:.3g}" for row in counted}))
        yield (
            f"(e) A softmax takes {_extent(trained, 'softmax_ratio', '{:.3g}')} times as long as the scores before it"
            f"{f', for {parts} of their FLOPs' if parts else ''}."
        )


def describe(row: Measured) -> str:
    """Return which cell it is."""
    return f"{row['size']}, context {row['context']}"


def measure_noun(row: Measured) -> str:
    """Return what the times are of: GPU kernels, or the CPU's operators."""
    return "operator" if row["measure"] == "cpu-operator" else "kernel"


def profiler_name(row: Measured) -> str:
    """Return the profiler of a row in full."""
    return _PROFILER_NAMES[row["profiler"] == NSYS]


def _extent(rows: Sequence[Measured], key: str, form: str) -> str:
    """Return the least and the most of a column, each with its cell; of one row its value."""
    least, most = (choose(rows, key=lambda row: row[key]) for choose in (min, max))
    low, high = (f"{form.format(row[key])} ({describe(row)})" for row in (least, most))
    return low if len(rows) == 1 else f"{low} to {high}"


def _part(line: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    each, whole = (total / table["instances"] / 1e6 for total in (line["total_ns"], table["total_ns"]))
    return f"{_ms(each)} of {_ms(whole)}"


def _ties(table: Mapping[str, Any]) -> str:
    return f" (with as much time: {table['tied'] - 1} more)" if table["tied"] > 1 else ""


def _calls(line: Mapping[str, Any]) -> str:
    count = line["per_instance_count"]
    return f"{count:g} call{'s' * (count != 1)}"


def _kernels(row: Measured, table: Mapping[str, Any], more: str = "", lines: int | None = None) -> str:
    """Return the command that prints a table, its first ``lines`` or as many as are usual."""
    words = ["profkit", "kernels", row["capture"], "--range", table["range"]]
    words += ["--exclude", table["exclude"]] if table["exclude"] else []
    words += ["--top", str(lines)] if lines else []
    return f"{shlex.join(words)} {more}".strip()


def _shown(*commands: str) -> str:
    return "; ".join(f"`{command}`" for command in commands)


def _code(line: Mapping[str, Any], row: Measured) -> str:
    return f"`{show_name(line['name'], row['measure'])}`"


def _ms(value: float) -> str:
    return format_ns(round(value * 1e6))


def _us(value: float) -> str:
    return format_ns(round(value * 1e3))
