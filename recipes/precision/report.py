"""What autocast_dtypes shows: dtypes of the toy model, of each operator, and LayerNorm in one dtype. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from recipes.common.pictures import COLOURS, new_figure
from recipes.common.recipe import OK, Report, Row
from recipes.common.tables import Table, listed, markdown, select, show_share
from recipes.precision import EPSILON, FEATURES, FLOAT32, KEEPS, LOWER, MIXED, MOST, ONE_BY_ONE, ROWS, SCALES

Found = Mapping[str, Any]
"""The row of one dtype."""

PARTS = (
    *("parameters", "fc1_output", "relu_output", "ln_output", "fc2_output", "logits", "loss"),
    *("logits_gradient", "parameter_gradients"),
)
ERRORS = {
    f"error_{name}{how}": f"{name.replace('_', ' ')}, × {scale:g}{words}"
    for name, scale in SCALES.items()
    for how, words in (("", ""), (ONE_BY_ONE, ", summed one by one"))
}
LIMITS = (
    *("square_overflows_from", "ones_add_up_to", "epsilon_1e-5", "epsilon_1e-8", "constant_row_with_epsilon_1e-8"),
    *ERRORS,
    *(f"{share}_{name}" for share in ("zero_outputs", "squares_lost") for name in SCALES),
)
_INPUTS = (
    f"The data are {ROWS} rows of {FEATURES:,} normally distributed numbers, times "
    + ", ".join(f"{scale:g} ({name.replace('_', ' ')})" for name, scale in SCALES.items())
    + f"; epsilon is {EPSILON:g}. Each step (mean, difference, square, mean, root) is rounded to the dtype. A mean of "
    "torch adds in float32 and rounds once; summed one by one means rounded after each addition. An error is the "
    "greatest distance from float64's result for the same data, as a share of that result's greatest value: it is 1 "
    "if every result is 0."
)
_WHERE = {LOWER: LOWER, FLOAT32: FLOAT32, KEEPS: "their input's dtype", MIXED: "several dtypes"}


def report(rows: Sequence[Row], machine: Mapping[str, object]) -> Report:
    """Return the dtypes side by side, the operators by what autocast does, and the limits of LayerNorm."""
    there: list[dict[str, Any]] = [row for row in rows if row["status"] == OK]
    dtypes = [str(row["dtype"]) for row in there]
    blocks = [
        f"## The toy model on {machine['device']}",
        markdown(Table(["", *dtypes], [[part, *(row.get(part) for row in there)] for part in PARTS])),
        "## Operators by what autocast does with them",
        *describe_classes(there),
        "## LayerNorm in one dtype alone",
        _INPUTS,
        markdown(limits_table(there)),
        *(["![layer_norm](layer_norm.png)"] if there else []),
        "## Operators of the step, as they ran below autocast",
        *_steps([row for row in there if row["classes"]]),
    ]
    return Report(blocks, {"layer_norm.png": draw_errors(there)} if there else {})


def describe_classes(rows: Sequence[Found]) -> Iterator[str]:
    """Yield which operators run in which dtype."""
    lists: dict[str, list[str]] = {}
    for row in rows:
        found: dict[str, list[str]] = {}
        for entry in row["classes"]:
            within = ""
            if entry["runs_in"] == MIXED:
                each = ", ".join(f"`{name}` in {_name(dtype, row)}" for name, dtype in entry["ran_low"])
                within = f" ({each}, for an input in lower precision)"
            found.setdefault(_WHERE[entry["runs_in"]], []).append(entry["operator"] + within)
        for what, operators in found.items():
            lists.setdefault(f"{what}: {', '.join(operators)}", []).append(str(row["dtype"]))
    yield listed(f"Autocast to {' and '.join(dtypes)}, run in {line}." for line, dtypes in lists.items())
    yield "Judged by the operators that ran below autocast for inputs in float32 and in the lower precision."


def _name(dtypes: str, row: Found) -> str:
    return ", ".join(LOWER if each == row["dtype"] else each for each in dtypes.split(", "))


def _steps(rows: Sequence[Found]) -> Iterator[str]:
    """Yield the operators of each row; rows that differ only in the lower dtype share a table."""
    keys = ("phase", "operator", "inputs", "output", "count")
    steps: dict[str, list[Found]] = {}
    for row in rows:
        lines = [
            {**entry, **{key: _name(entry[key], row) for key in ("inputs", "output")}} for entry in row["operators"]
        ]
        steps.setdefault(markdown(select(lines, keys)), []).append(row)
    for shown, here in steps.items():
        yield f"Autocast to {' and '.join(str(row['dtype']) for row in here)}, called {LOWER} here:"
        yield shown


def limits_table(rows: Sequence[Found]) -> Table:
    """Return what is known of LayerNorm, one dtype per column."""
    lines: list[Sequence[object]] = [
        ["least whole number whose square overflows",
         *(row["square_overflows_from"] or f"none up to {MOST:,}" for row in rows)],
        [f"{MOST:,} ones come to", *(f"{row['ones_add_up_to']:,.0f}" for row in rows)],
        *([f"{text} is stored as", *(_stored(row, text) for row in rows)] for text in ("1e-5", "1e-8")),
        ["a constant row with epsilon 1e-8",
         *("finite" if row["constant_row_with_epsilon_1e-8"] else "not finite" for row in rows)],
        *([f"error: {words}", *(_show_error(row, key) for row in rows)] for key, words in ERRORS.items()),
        *(
            [f"squares that become 0: {name.replace('_', ' ')}",
             *(show_share(row[f"squares_lost_{name}"]) for row in rows)]
            for name in SCALES
        ),
    ]  # fmt: skip
    return Table(["", *(str(row["dtype"]) for row in rows)], lines)


def _stored(row: Found, written: str) -> str:
    """Return the stored value of an epsilon in 6 digits, or in as many more as distinguish it from what was written."""
    stored = row[f"epsilon_{written}"]
    shown = (f"{stored:.{digits}g}" for digits in range(6, 17))
    return next((text for text in shown if float(text) != float(written)), repr(stored))


def _show_error(row: Found, key: str) -> str:
    if row[key] is None:
        return "not finite"
    return f"{row[key]:.2g}" + ", all 0" * (row.get(key.replace("error", "zero_outputs")) == 1)


def draw_errors(rows: Sequence[Found]) -> Figure:
    """Draw the errors by data and kind of sum, a bar for each dtype."""
    figure = new_figure("LayerNorm computed in one dtype: greatest error, as a share of its greatest value")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        errors = [row[key] for key in ERRORS]
        ys = [line + 0.27 * (place - 1) for line in range(len(errors))]
        axes.barh(ys, [error or 0 for error in errors], height=0.25, color=COLOURS[place], label=str(row["dtype"]))
        for y, error in zip(ys, errors, strict=True):
            if error is None:
                axes.annotate("not finite", (0, y), xycoords=("axes fraction", "data"), xytext=(4, 0),
                              textcoords="offset points", va="center", fontsize=8, color=COLOURS[place])  # fmt: skip
    axes.set_yticks(range(len(ERRORS)), list(ERRORS.values()))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("error")
    axes.legend(frameon=False)
    return figure
