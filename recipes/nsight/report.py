"""What nsight_questions shows: a table or two for each of five questions, two pictures, the commands behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from profkit import simplify_name
from profkit.models import PRESETS
from recipes.common.recipe import LAUNCH_BOUND, OK, Report, Row
from recipes.common.tables import Table, listed, markdown, show_share
from recipes.nsight.cells import (
    DOING,
    GEMM,
    INFERENCE,
    MATTERS,
    NSYS,
    TIMED,
    TRAIN,
    UNEVEN,
    Measured,
    pair_rows,
    show_ratio,
)
from recipes.nsight.pictures import draw_ratios, draw_shares

_SAME_WORK, _APART = 0.02, 0.20
"""Kernel times that differ by less are of the same work; times that differ by more are apart."""
_NEAR_TIE = 0.01
"""Shares that differ by less are practically equal."""
_LEAST_POINTS = 0.05
"""Changes of fewer percentage points are left out."""
_COUNTED = (
    "The scores include the division by the root of the head's width, the softmax the masking before it. FLOPs are by "
    "profkit's formulas: 2 for each multiplication and addition of a product, 1 per element for the division, 5 for "
    "softmax (maximum, difference, exp, sum, division), none for the masking. This softmax is written out: in (c) and "
    "(d) it counts as elementwise and reduction, and the category softmax is the loss's."
)
_QUESTIONS = {
    "a": "Do forward and backward take as long by the profiler as by Python's clock?",
    "b": "Which kernel has the most time in forward, how often is it called, and is it the same with backward?",
    "c": "Which kernels other than matrix products matter in forward?",
    "d": "What share have matrix products in inference and in a training step, and what grew?",
    "e": "What does a softmax take compared with the two matrix products around it, in time and in FLOPs?",
}


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Return the tables of the five questions, for the batch, steps and profiler that most rows have."""
    settings = Counter((row["batch"], row["steps"], row["profiler"]) for row in rows)
    chosen = settings.most_common(1)[0][0] if settings else None
    alike = [row for row in rows if (row["batch"], row["steps"], row["profiler"]) == chosen]
    compared = [row for row in alike if row["status"] == OK]
    if not compared:
        return Report(["Not measured."], {"ratios.png": draw_ratios([]), "shares.png": draw_shares([])})
    profiler = "Nsight Systems" if compared[0]["profiler"] == NSYS else "torch.profiler"
    left_out = len(rows) - len(alike)
    blocks = [f"Batch {compared[0]['batch']}, {compared[0]['steps']} steps recorded by {profiler}."]
    if any(row.get("measure") == "cpu-operator" for row in compared):
        blocks.append("Recorded on a CPU: kernels are operators here, and kernel time is their self time.")
    blocks += [f"{left_out} cells of another batch, steps or profiler are only in the CSV."] * bool(left_out)
    blocks += ["![Times with the profiler over those without](ratios.png)", "![Shares of the time](shares.png)"]
    sections = (_times(alike), _top_kernels(compared), _others(compared), _shares(compared), _attention(compared))
    for (letter, question), section in zip(_QUESTIONS.items(), sections, strict=True):
        blocks += [f"## ({letter}) {question}", *(list(section) or ["Not measured."])]
    blocks += ["## The commands", *_commands(compared)]
    warnings = list(dict.fromkeys(_warnings(rows)))
    blocks += ["## Warnings about the captures", listed(warnings)] if warnings else []
    return Report(blocks, {"ratios.png": draw_ratios(compared), "shares.png": draw_shares(compared)})


def _times(rows: Sequence[Measured]) -> Iterator[str]:
    timed = [row for row in rows if row.get("forward_ratio") is not None or row.get("backward_ratio") is not None]
    if not timed:
        return
    yield (
        "The time of a phase's range in the trace over its time by Python's clock without a profiler, in a process of "
        "its own; both are medians. In brackets the share of the unprofiled time that kernels fill (≤: of backward "
        f"together with the loss). \\*: below {LAUNCH_BOUND:.0%}, so launches limit the step and the host's speed "
        f"decides. ‡: only the recorded time is filled below {LAUNCH_BOUND:.0%}: the profiler slowed the launches. "
        f"†: recorded or unprofiled samples range over more than {UNEVEN:.0%} of their median."
    )
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = []
    for passes, phase in TIMED:
        some = {(row["size"], row["context"]): row for row in rows if row["passes"] == passes}
        for context in sorted({context for _, context in some}):
            cells = [show_ratio(some.get((size, context)), phase) for size in sizes]
            lines.append([f"{DOING[passes]}, {phase}", context, *cells])
    yield markdown(Table(["steps, phase", "context", *sizes], lines))
    apart = max(abs(row[f"{phase}_recorded_ms"] / row[f"{phase}_python_ms"] - 1)
                for row in timed for phase in ("forward", "backward") if row.get(f"{phase}_ratio"))  # fmt: skip
    yield f"In the same steps the trace and Python's clock differ by {show_share(apart)} at most."
    pairs = [pair for pair in pair_rows(rows) if is_apart(*pair)]
    if pairs:
        yield f"Cells with forward times of training and inference more than {_APART:.0%} apart, for the same kernels:"
        headings = ["size", "context", "training, unprofiled ms", "inference, unprofiled ms", "kernel time, ms"]
        keys = ("forward_clean_ms", "forward_kernel_ms")
        yield markdown(Table(headings, [
            [other["size"], other["context"], other[keys[0]], one[keys[0]], other[keys[1]]] for one, other in pairs
        ]))  # fmt: skip


def is_apart(inference: Measured, training: Measured) -> bool:
    """Return whether unprofiled forward takes different times in training and inference, for the same kernel time."""
    if training.get("forward_clean_ms") is None or inference.get("forward_clean_ms") is None:
        return False
    shorter, longer = sorted([training["forward_clean_ms"], inference["forward_clean_ms"]])
    same = abs(training["forward_kernel_ms"] / inference["forward_kernel_ms"] - 1) <= _SAME_WORK
    return bool(same and longer > (1 + _APART) * shorter)


def _top_kernels(rows: Sequence[Measured]) -> Iterator[str]:
    lines = []
    for row in rows:
        if row["passes"] != TRAIN or not row.get("forward_backward"):
            continue
        first, both = row["forward"]["rows"][0], row["forward_backward"]
        there = both["rows"][0]
        names = [show_name(line["name"], row) for line in (first, there)]
        if names[0] == names[1] and not row["same_kernel"]:
            names = [first["name"], there["name"]]
        share = show_share(there["share"])
        if not row["same_kernel"]:
            share = f"{share} against {show_share(both['forwards_top']['share'])}" + ", near tie" * is_near_tie(row)
        name = "the same" if row["same_kernel"] else names[1]
        calls = [f"{line['per_instance_count']:g}" for line in (first, there)]
        line = [row["size"], row["context"], names[0], show_share(first["share"]), calls[0]]
        lines.append([*line, name, share, calls[1]])
    if lines:
        yield "Shares of the kernel time of forward, and of forward, loss and backward together."
        headings = ["size", "context", "kernel of forward", "share", "calls per forward", "with loss and backward"]
        yield markdown(Table([*headings, "its share", "calls per step"], lines))


def is_near_tie(row: Measured) -> bool:
    """Return whether another kernel leads with backward, by less than a percentage point."""
    both = row["forward_backward"]
    return bool(not row["same_kernel"] and both["rows"][0]["share"] - both["forwards_top"]["share"] < _NEAR_TIE)


def _others(rows: Sequence[Measured]) -> Iterator[str]:
    forwards = choose_forwards(rows)
    if not forwards:
        return
    shares = [{line["name"]: line["share"] for line in _forward_categories(row)["rows"]} for row in forwards]
    most = {name: max(one.get(name, 0.0) for one in shares) for one in shares for name in one if name != GEMM}
    names = [name for name in sorted(most, key=lambda name: -most[name]) if most[name] >= MATTERS]
    lines = []
    for row, one in zip(forwards, shares, strict=True):
        parts = [one.get(name, 0.0) for name in (GEMM, *names)]
        shown = [show_share(part) for part in (*parts, max(1 - sum(parts), 0.0))]
        lines.append([row["size"], row["context"], *shown, _gemm_kernels(row)])
    yield (
        "Shares of the kernel time of forward. The last column is the number of kernels of category gemm for each "
        "matrix product (nine per layer, one for the head): a product that is split along its inner dimension needs "
        "another kernel to add its parts."
    )
    yield markdown(Table(["size", "context", "products", *names, "all others", "kernels per product"], lines))
    found: dict[tuple[str, str], list[tuple[float, float, Measured]]] = {}
    for row in forwards:
        for key, (share, calls) in _add_others(row).items():
            found.setdefault(key, []).append((share, calls, row))
    peaks = {key: max(cells, key=lambda cell: cell[0]) for key, cells in found.items()}
    yield f"Each kernel with {MATTERS:.0%} or more in some cell; equal short names are added up:"
    headings = ["kernel", "category", f"cells of {len(forwards)}", "largest share", "in", "calls there"]
    yield markdown(Table(headings, [
        [*key, len(found[key]), show_share(share), f"{row['size']}, context {row['context']}", f"{calls:g}"]
        for key, (share, calls, row) in sorted(peaks.items(), key=lambda item: -item[1][0])
    ]))  # fmt: skip


def choose_forwards(rows: Sequence[Measured]) -> list[Measured]:
    """Return for each size and context a row with the categories of forward: training's, otherwise inference's."""
    found: dict[tuple[object, ...], Measured] = {}
    for passes in (TRAIN, INFERENCE):
        for row in rows:
            if row["passes"] == passes and row.get("forward") and _forward_categories(row):
                found.setdefault((row["size"], row["context"]), row)
    return list(found.values())


def _forward_categories(row: Measured) -> Mapping[str, Any]:
    """Return the categories of a row's forward; an inference step is only forward. Empty if unknown."""
    found: Mapping[str, Any] = row.get("forward_categories") or (row["step"] if row["passes"] == INFERENCE else {})
    return found


def _gemm_kernels(row: Measured) -> str | None:
    if row["measure"] != "gpu-kernel":
        return None
    kernels = sum(line["per_instance_count"] for line in _forward_categories(row)["rows"] if line["name"] == GEMM)
    return f"{kernels / (9 * PRESETS[row['size']].num_layers + 1):.2f}"


def _add_others(row: Measured) -> dict[tuple[str, str], tuple[float, float]]:
    """Return share and calls per forward of the kernels that matter besides products, by short name and category."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for line in row["forward"]["rows"]:
        if line["category"] != GEMM and line["share"] >= MATTERS:
            key = show_name(line["name"], row), line["category"]
            share, calls = found.get(key, (0.0, 0.0))
            found[key] = share + line["share"], calls + line["per_instance_count"]
    return found


def _shares(rows: Sequence[Measured]) -> Iterator[str]:
    lines = []
    for inference, training in pair_rows(rows):
        if not training.get("forward_backward"):
            continue
        before, after = inference["gemm_step_share"], training["gemm_step_share"]
        without = share_without_optimizer(training)
        changes = [change for change in change_shares(inference, training) if change[0] != GEMM]
        sides = [
            ", ".join(f"{name} {points:+.1f}" for name, points in changes[::sign] if points * sign >= _LEAST_POINTS)
            for sign in (1, -1)
        ]
        line = [training["size"], training["context"], show_share(before), show_share(after), _points(after - before)]
        lines.append([*line, show_share(without), _points(without - before), *(side or "none" for side in sides)])
    if lines:
        yield (
            "Shares of matrix products in inference, in a training step, and in that step without its optimizer. "
            "Differences are from inference, in percentage points; so is what grew or shrank besides products."
        )
        headings = ["size", "context", "inference", "step", "difference", "without optimizer", "its difference"]
        yield markdown(Table([*headings, "grew", "shrank"], lines))


def share_without_optimizer(row: Measured) -> float:
    """Return the share of matrix products in a training step without its optimizer, which has none."""
    products = sum(line["total_ns"] for line in row["step"]["rows"] if line["name"] == GEMM)
    return float(products / row["forward_backward"]["total_ns"])


def change_shares(inference: Measured, training: Measured) -> list[tuple[str, float]]:
    """Return each category's share of training less that of inference, in percentage points, the most grown first."""
    before, after = (
        {each["name"]: each["share"] * 100 for each in row["step"]["rows"]} for row in (inference, training)
    )
    changes = [(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in {**after, **before}]
    return sorted(changes, key=lambda change: -change[1])


def _points(difference: float) -> str:
    return f"{round(100 * difference, 1) + 0.0:+.1f}"


def _attention(rows: Sequence[Measured]) -> Iterator[str]:
    lines = []
    for row in rows:
        if row["passes"] == TRAIN and row.get("softmax_ratio") is not None:
            times = [row[f"{part}_us"] for part in ("scores", "softmax", "values")]
            flops = f"1/{row['scores_flops'] / row['softmax_flops']:.3g}" if row["softmax_flops"] else None
            ends = [f"{row['softmax_ratio']:.2f}", show_share(times[1] / sum(times)), flops]
            lines.append([row["size"], row["context"], *(f"{time:.1f}" for time in times), *ends])
    if lines:
        yield f"Means over the layers in forward of training, kernel time in µs. {_COUNTED}"
        headings = ["size", "context", "scores", "softmax", "values", "softmax over scores", "of all three"]
        yield markdown(Table([*headings, "FLOPs over scores'"], lines))


def _commands(rows: Sequence[Measured]) -> Iterator[str]:
    yield "In the directory of results; SIZE, CONTEXT and PASSES (`forward` for inference) are those of a row:"
    made: dict[str, None] = {}
    for row in rows:
        size, passes = row["size"], row["passes"]
        text = row["made_by"].replace(f"/{size}-{passes}-", "/SIZE-PASSES-").replace(f"model.{size}", "model.SIZE")
        made[text.replace(f"--passes {passes}", "--passes PASSES")] = None
    several = any("context" in str(row["forward"]["range"]) for row in rows if row.get("forward"))
    within = "context CONTEXT/" if several else ""
    yield "```sh\n" + "\n".join([*made, *show_commands("CAPTURE", within)]) + "\n```"


def show_commands(capture: str, within: str) -> list[str]:
    """Return the commands that print the figures of a capture; ``within`` is the path of the enclosing range."""
    kernels = f"profkit kernels {capture} --range '{within}step *"
    within_it = f" --range '{within.rstrip('/')}'" if within else ""
    return [
        f"{kernels}/forward' --per-instance --top 1",
        f"{kernels}' --exclude optimizer",
        f"{kernels}' --by category",
        f"profkit efficiency {capture}{within_it}",
    ]


def show_name(name: str, row: Measured) -> str:
    """Return the short name of a kernel; an operator's name is short already."""
    return name if row["measure"] == "cpu-operator" else simplify_name(name)


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        for key in ("recorder_warnings", "self_check_warnings"):
            yield from (f"`{row.get('capture')}`: {message}" for message in cast("list[str]", row.get(key) or []))
