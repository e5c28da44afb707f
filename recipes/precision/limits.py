"""What is said of LayerNorm in one dtype alone, and its picture; from numbers that `find_limits` found; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from profkit.report.formats import Column, render_markdown
from profkit.report.units import format_share
from recipes.common.pictures import COLOURS, new_figure
from recipes.common.sentences import list_sentences
from recipes.common.tables import DASH, build_table
from recipes.precision.inputs import EPSILON, FEATURES, MOST, ONE_BY_ONE, ROWS, SCALES

Found = Mapping[str, Any]
"""The row of a dtype. What an earlier version did not look at, it lacks."""

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
_ALL_DIGITS = 17
"""As many tell every double from its neighbours."""
_INPUTS = (
    f"The data are {ROWS} rows of {FEATURES:,} normally distributed numbers, times "
    + ", ".join(f"{scale:g} ({name.replace('_', ' ')})" for name, scale in SCALES.items())
    + f". Each step (mean, difference, square, mean, root) is rounded to the dtype; epsilon is {EPSILON:g}; "
    "torch adds up in float32 within a mean and rounds once, one by one means rounded after each addition. An error is "
    "the greatest distance from float64's result for the same data, as a share of that result's greatest value: where "
    "all that comes out is 0, it is 1."
)


def describe_limits(rows: Sequence[Found]) -> Iterator[str]:
    """Yield how the data were made, what each dtype makes of them, and the numbers, the dtypes side by side."""
    yield _INPUTS
    sentences = [line for row in rows for line in conclude(row)]
    by_dtype = {row["dtype"]: row for row in rows}
    if {"float16", "bfloat16"} <= by_dtype.keys():
        sentences.append(compare(by_dtype["float16"], by_dtype["bfloat16"]))
    yield list_sentences(sentences)
    columns = [Column("", "what", right=False)] + [Column(str(row["dtype"]), str(row["dtype"])) for row in rows]
    lines = [{"what": what, **{str(row["dtype"]): tell(row) for row in rows}} for what, tell in _LINES.items()]
    known = [line for line in lines if set(line.values()) - {line["what"], DASH}]
    yield render_markdown(build_table(columns, known))
    yield "![layer_norm](layer_norm.png)"


def conclude(row: Found) -> list[str]:
    """Return a sentence on each of LayerNorm's weak places, from the numbers of one dtype."""
    dtype, overflow = row["dtype"], row["square_overflows_from"]
    square = f"squares overflow from {overflow} on" if overflow else f"no square overflows up to {MOST:,}"
    return [
        f"{dtype}, the square: {square}; LayerNorm of large data {_off(row, 'large')}.",
        f"{dtype}, the sum: {MOST:,} ones, added one by one in {dtype}, come to {row['ones_add_up_to']:,.0f}; "
        f"LayerNorm with such sums {_off(row, 'usual' + ONE_BY_ONE)}, with sums in float32 it {_off(row, 'usual')}.",
        f"{dtype}, epsilon: 1e-5 is stored as {_stored(row, '1e-5')}, 1e-8 as {_stored(row, '1e-8')}, and with the "
        f"latter LayerNorm of a constant row is {_finite(row)}.",
        f"{dtype}, small squares, epsilon 1e-5: {'; '.join(_small(row, name) for name in ('near_epsilon', 'small'))}.",
    ]


def _small(row: Found, name: str) -> str:
    share = SCALES[name] ** 2 / EPSILON
    lost = row.get(f"squares_lost_{name}")
    squares = (
        "how many squares become 0 is not known" if lost is None else f"{format_share(lost)} of the squares become 0"
    )
    data = f"of data × {SCALES[name]:g}, whose variance is {share:.3g} of epsilon"
    return f"{data}, {squares} and LayerNorm {_off(row, name)}"


def compare(fp16: Found, bf16: Found) -> str:
    """Return whether LayerNorm needs other care in bfloat16 than in float16, from the numbers of both."""
    gone = fp16["square_overflows_from"] and not bf16["square_overflows_from"]
    sums = bf16[f"error_usual{ONE_BY_ONE}"] / fp16[f"error_usual{ONE_BY_ONE}"]
    epsilon = fp16["constant_row_with_epsilon_1e-8"] != bf16["constant_row_with_epsilon_1e-8"]
    return (
        f"bfloat16 beside float16: the overflow of the square is {'gone' if gone else 'no other'}, a small epsilon "
        f"{'survives' if epsilon else 'fares no better'}, and the sums are {sums:.0f} times as far off: "
        f"{'these still want float32' if sums > 1 else 'these too are better'}."
    )


def _off(row: Found, data: str) -> str:
    error, zeros = row.get(f"error_{data}", DASH), row.get(f"zero_outputs_{data}")
    if error == DASH:
        return "was not measured"
    if error is None:
        return "is not finite"
    return f"is off by {error:.2g}" + ": all that comes out is 0" * (zeros == 1)


def _stored(row: Found, written: str) -> str:
    """Return what is stored of an epsilon, in 6 digits, or as many more as tell it from what was written."""
    stored = row[f"epsilon_{written}"]
    shown = (f"{stored:.{digits}g}" for digits in range(6, _ALL_DIGITS))
    return next((text for text in shown if float(text) != float(written)), repr(stored))


def _finite(row: Found) -> str:
    return "finite" if row["constant_row_with_epsilon_1e-8"] else "not finite"


def _told_error(row: Found, key: str) -> str:
    error = row.get(key, DASH)
    if error is None:
        return "not finite"
    all_zero = row.get(key.replace("error", "zero_outputs")) == 1
    return error if error == DASH else f"{error:.2g}" + ", all 0" * all_zero


def _told_share(row: Found, key: str) -> str:
    return DASH if row.get(key) is None else format_share(row[key])


_LINES: dict[str, Any] = {
    "least whole number whose square overflows": lambda row: row["square_overflows_from"] or f"none up to {MOST:,}",
    f"{MOST:,} ones come to": lambda row: f"{row['ones_add_up_to']:,.0f}",
    "1e-5 is stored as": lambda row: _stored(row, "1e-5"),
    "1e-8 is stored as": lambda row: _stored(row, "1e-8"),
    "a constant row with epsilon 1e-8": _finite,
    **{f"error: {words}": lambda row, key=key: _told_error(row, key) for key, words in ERRORS.items()},
    **{
        f"squares that become 0: {name.replace('_', ' ')}": lambda row, name=name: _told_share(
            row, f"squares_lost_{name}"
        )
        for name in SCALES
    },
}
"""What is told of a row, by how it is called."""


def draw_errors(rows: Sequence[Found]) -> Figure:
    """Draw the errors by data and way of adding up, a bar each dtype."""
    figure = new_figure("LayerNorm computed in one dtype: greatest error, as a share of its greatest value")
    axes = figure.subplots()
    measured = {key: words for key, words in ERRORS.items() if any(key in row for row in rows)}
    for place, row in enumerate(rows):
        errors = [row.get(key, DASH) for key in measured]
        ys = [line + 0.27 * (place - 1) for line in range(len(measured))]
        lengths = [error if isinstance(error, float) else 0 for error in errors]
        axes.barh(ys, lengths, height=0.25, color=COLOURS[place], label=str(row["dtype"]))
        for y, error in zip(ys, errors, strict=True):
            if not isinstance(error, float):
                said = "not finite" if error is None else "not measured"
                axes.annotate(said, (0, y), xycoords=("axes fraction", "data"), xytext=(4, 0),
                              textcoords="offset points", va="center", fontsize=8, color=COLOURS[place])  # fmt: skip
    axes.set_yticks(range(len(measured)), list(measured.values()))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("error")
    axes.legend(frameon=False)
    return figure
