"""Rules on tables that contradict the text around them, or another table of the same work."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from statistics import median

from recipes.detectors.memory import last_exponent
from recipes.detectors.tables import BYTES, BenchmarkTable, Phase, Quantity
from recipes.detectors.times import LARGER, LAUNCH_BOUND_S, Line, lines_by_size, ratios_by_row, seconds_by_phase

_POWERS = {"linear": 1, "linearly": 1, "quadratic": 2, "quadratically": 2, "cubic": 3, "cubically": 3, "constant": 0}
_NEGATIONS = {"not", "never", "no", "than", "instead", "isn't", "doesn't"}
_AXES: Mapping[Quantity, set[str]] = {
    "length": {"sequence", "seq", "context", "length"},
    "width": {"width", "d_model", "dimension"},
}
_FORMULA = re.compile(r"^(?P<name>[^=()]+?)\s*\((?P<unit>[A-Za-z]+)\)\s*=\s*(?P<expression>[^=]{1,200})$")
_TOLERANCE = 0.05
"""Wider than GB for GiB of 1000 MB or MiB, narrower than a wrong example."""

_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}

_ABOUT_ONE = (0.7, 1.3)
_NARROW, _WIDE = {"bf16", "bfloat16"}, {"fp32", "float32", "tf32"}
_SLOWER = 1.05
"""The ratio from which a time is slower: on an H200 equal kernels differ by up to 1 % between processes."""
_BOUND = 0.5
"""Below this power of the size, time follows launches: work that fills the device grows with the size itself."""

Row = tuple[BenchmarkTable, int]
Labels = tuple[tuple[str, str], ...]
Across = Iterator[tuple[str, str]]
"""The name of a table, and a sentence about it."""


def find_wrong_exponents(table: BenchmarkTable) -> Iterator[str]:
    """Yield sentences that claim another growth than a column has: ``memory grows linearly with sequence length``.

    The sentence names the column by a word of its heading, the axis by one of its own, and the growth.
    """
    for sentence in re.split(r"(?<=[.!?])\s+|\n", table.text):
        words = set(re.findall(r"[\w']+", sentence.lower()))
        claimed = {power for word, power in _POWERS.items() if word in words}
        if len(claimed) != 1 or words & _NEGATIONS:
            continue
        for heading, axis in _named(table, words):
            found = last_exponent(table, heading, axis)
            if found is not None and abs(found - min(claimed)) > 0.5:
                yield f"“{sentence.strip()}”, but {heading} grows with {axis} to the power of {found:.2f}"


def _named(table: BenchmarkTable, words: set[str]) -> Iterator[tuple[str, str]]:
    axes = [axis for quantity in _AXES if words & _AXES[quantity] for axis in table.columns(quantity)[:1]]
    for axis in axes:
        for heading in (*table.columns("time"), *table.columns("memory")):
            if words & set(table.roles[heading].base):
                yield heading, axis


def find_wrong_examples(table: BenchmarkTable) -> Iterator[str]:
    """Yield cells that disagree with the formula that the text gives for their column.

    A formula stands in a line of its own, ``NAME (UNIT) = expression``, with a column's heading for a name and others
    in the expression: ``Forward Pass (MB) = B × S × (5.9375 + 0.0078125 × S)``.
    """
    for line in table.text.splitlines():
        match = _FORMULA.match(line.strip())
        heading = match and next((name for name in table.headings if name.lower() == match["name"].lower()), None)
        if match and heading and match["unit"].lower() in BYTES:
            yield from _compare_examples(table, heading, match["expression"], BYTES[match["unit"].lower()])


def _compare_examples(table: BenchmarkTable, heading: str, expression: str, formula_unit: int) -> Iterator[str]:
    python = expression.replace("×", "*").replace("·", "*").replace("²", "**2").replace("^", "**").replace("−", "-")
    try:
        tree = ast.parse(python.strip(), mode="eval").body
    except SyntaxError:
        return
    wrong, compared = [], 0
    for row, number in enumerate(table.numbers[heading]):
        sizes = {name.lower(): table.values(name)[row] for name in table.headings}
        due = _evaluate(tree, sizes)
        unit = number and (number.unit or table.roles[heading].unit)
        if number is None or due is None or unit not in BYTES:
            continue
        compared += 1
        # Whoever writes MB for MiB goes on to GB in the same steps.
        here = due * formula_unit / BYTES[unit]
        candidates = [here, *([due / 1024] if (formula_unit, unit) == (10**6, "gb") else [])]
        if all(abs(number.value - each) > 0.5 * number.ulp + _TOLERANCE * abs(each) for each in candidates):
            wrong.append(f"{table.rows[row][heading].strip('* ')} for {candidates[-1]:.1f} ({table.describe(row)})")
    if wrong:
        yield f"{heading} disagrees with its formula in {len(wrong)} of {compared} rows: {'; '.join(wrong)}"


def _evaluate(node: ast.expr, sizes: Mapping[str, float | None]) -> float | None:
    """Return the value of an expression of numbers, columns and + - * / **; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name):
        return sizes.get(node.id.lower())
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, sizes), _evaluate(node.right, sizes)
        if left is None or right is None:
            return None
        try:
            value = _OPERATORS[type(node.op)](left, right)
        except ArithmeticError:
            # Divided by a size of 0, or a power beyond every number: no example to compare with.
            return None
        return value if isinstance(value, float) else None
    return None


def find_borrowed_shares(tables: Sequence[BenchmarkTable]) -> Across:
    """Yield shares of forward that are those of forward and backward together, to the last digit, kernel by kernel."""
    shares = [(table, _phases(table), _shares(table)) for table in tables]
    for (table, phases, mine), (other, other_phases, theirs) in permutations(shares, 2):
        if phases != {"forward"} or other_phases != {"forward", "backward"}:
            continue
        same = [name for name, share in mine.items() if theirs.get(name) == share]
        if len(same) >= 2 and len(same) > len(mine) / 2:
            yield (
                table.name,
                f"{len(same)} of {len(mine)} shares of forward are those of {other.name}, forward and backward, to the "
                f"last digit (such as {same[0]}: {mine[same[0]]:g} %): they were read off the wrong range",
            )


def _phases(table: BenchmarkTable) -> set[str]:
    return {"forward", "backward"} & set(re.findall(r"[a-z]+", table.caption.lower()))


def _shares(table: BenchmarkTable) -> dict[str, float]:
    columns, names = table.columns("share"), table.columns("label")
    if not columns or not names:
        return {}
    pairs = zip(table.rows, table.values(columns[0]), strict=True)
    return {row[names[0]]: share for row, share in pairs if share is not None}


def find_forward_in_backward(tables: Sequence[BenchmarkTable]) -> Across:
    """Yield a table with a forward pass inside backward: backward over forward is higher by 1 than in another table.

    This compares cells of the same length and width with a forward pass of 1 ms and more, eager if a table says so.
    """
    by_cell = [_ratios_by_cell(table) for table in tables]
    for (table, mine), (other, theirs) in permutations(zip(tables, by_cell, strict=True), 2):
        shared = [cell for cell in mine if cell in theirs]
        if len(shared) < 3:
            continue
        more = median([mine[cell] - theirs[cell] for cell in shared])
        if _ABOUT_ONE[0] <= more <= _ABOUT_ONE[1]:
            last = shared[-1]
            yield (
                table.name,
                f"backward over forward is {mine[last]:.2f} at width {last[0]:g} and length {last[1]:g}, where "
                f"{other.name} has {theirs[last]:.2f} ({more:.2f} more, median of {len(shared)} cells): forward was "
                "timed inside backward",
            )
            return


def _ratios_by_cell(table: BenchmarkTable) -> dict[tuple[float, float], float]:
    found = {}
    for width_heading, length_heading in zip(table.columns("width")[:1], table.columns("length")[:1], strict=False):
        widths, lengths = table.values(width_heading), table.values(length_heading)
        for row, (ratio, forward_s) in ratios_by_row(table).items():
            width, length = widths[row], lengths[row]
            if forward_s >= LAUNCH_BOUND_S and width and length and _is_eager(table.rows[row]):
                found[width, length] = ratio
    return found


def _is_eager(row: Mapping[str, str]) -> bool:
    compiled = next((value for key, value in row.items() if key.lower() in ("compile", "compiled", "mode")), "False")
    return compiled.strip().lower() in ("false", "no", "none", "eager", "0")


def find_slower_in_bf16(tables: Sequence[BenchmarkTable]) -> Across:
    """Note phases that are over 5 % slower in bf16 than in float32, or otherwise than in TF32, and why."""
    narrow: list[tuple[Row, Labels]] = []
    wide: dict[Labels, list[Row]] = {}
    for table in tables:
        dtypes = _dtypes(table)
        for row in range(len(table.rows)) if dtypes else ():
            name = table.rows[row][dtypes[0]].strip().lower()
            labels = tuple(table.labels(row, without=dtypes[:1]).items())
            if name in _NARROW:
                narrow.append(((table, row), labels))
            elif name in _WIDE:
                wide.setdefault(labels, []).append((table, row))
    lines = {id(table): list(lines_by_size(table)) for table in tables}
    for (table, row), labels in narrow:
        mine = seconds_by_phase(table, row)
        slower = _slower_phases(mine, wide.get(labels, []))
        if slower:
            times = ", ".join(
                f"{phase} {mine[phase] * 1e3:.4g} ms against {seconds * 1e3:.4g} ms"
                for phase, (_, seconds) in slower.items()
            )
            where = table.describe(row, without=_dtypes(table)[:1])
            bound = [each for line in lines[id(table)] for each in _bound_pairs(table, row, slower, line)]
            why = min(bound)[1] if bound else _say_casts(any(is_tf32 for is_tf32, _ in slower.values()))
            yield table.name, f"slower in bf16 at {where}: {times}: {why}"


def _dtypes(table: BenchmarkTable) -> list[str]:
    return [heading for heading in table.headings if heading.lower() in ("dtype", "precision")]


def _slower_phases(mine: Mapping[Phase, float], others: Sequence[Row]) -> dict[Phase, tuple[bool, float]]:
    """Return the phases that are faster in a wider type: whether that is TF32 alone, and its seconds."""
    found = {}
    for phase, seconds in mine.items():
        faster = [
            (table.rows[row][_dtypes(table)[0]].strip().lower() == "tf32", theirs)
            for table, row in others
            if (theirs := seconds_by_phase(table, row).get(phase)) is not None and seconds > _SLOWER * theirs
        ]
        if faster:
            # Slower than float32 is slower than TF32 too: float32 is compared first.
            found[phase] = min(faster)
    return found


def _bound_pairs(table: BenchmarkTable, row: int, phases: Iterable[Phase], line: Line) -> Iterator[tuple[float, str]]:
    """Yield the sizes that show that a row waits for its launches: the power that time follows, and a sentence."""
    mine = seconds_by_phase(table, row)
    size = next((size for size, place in line.points if place == row), None)
    for other_size, other in line.points if size else ():
        theirs = seconds_by_phase(table, other)
        for phase in (phase for phase in phases if phase in theirs):
            pair = sorted(((size or 0.0, mine[phase], row), (other_size, theirs[phase], other)))
            growth, times = pair[1][0] / pair[0][0], pair[1][1] / pair[0][1]
            if growth >= LARGER and math.log(times) < _BOUND * math.log(growth):
                names = [table.rows[place][line.named_by].strip() for *_, place in pair]
                yield (
                    math.log(times) / math.log(growth),
                    f"launch-bound: from {line.named_by} {names[0]} to {names[1]}, {growth:.3g} times the "
                    f"{line.heading}, {phase} takes {times:.2f} times as long",
                )


def _say_casts(is_tf32: bool) -> str:
    if is_tf32:
        return "the baseline is TF32, which uses the same tensor cores, and autocast casts the weights each time"
    return "autocast casts the weights each time and launches kernels for it; no other size shows if launches limit it"
