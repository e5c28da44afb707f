"""Detectors of tables that contradict the text around them or another table: growth, formulas, borrowed shares."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations

from recipes.detectors.memory import last_exponent
from recipes.detectors.tables import BYTES, BenchmarkTable, Finding

_POWERS = {"linear": 1, "linearly": 1, "quadratic": 2, "quadratically": 2, "cubic": 3, "cubically": 3, "constant": 0}
_NEGATIONS = {"not", "never", "no", "than", "instead", "isn't", "doesn't"}
_LENGTH_WORDS = {"sequence", "seq", "context", "length"}
_WIDTH_WORDS = {"width", "d_model", "dimension"}
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


def find_wrong_exponents(table: BenchmarkTable) -> Iterator[Finding]:
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
                said = f"“{sentence.strip()}”, but {heading} grows with {axis} to the power of {found:.2f}"
                yield Finding("exponent-claim", table.name, said)


def find_wrong_examples(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield cells that disagree with the formula that the text gives for their column.

    A formula stands in a line of its own, ``NAME (UNIT) = expression``, with a column's heading for a name and others
    in the expression: ``Forward Pass (MB) = B × S × (5.9375 + 0.0078125 × S)``.
    """
    for line in table.text.splitlines():
        match = _FORMULA.match(line.strip())
        heading = match and next((name for name in table.headings if name.lower() == match["name"].lower()), None)
        if match and heading and match["unit"].lower() in BYTES:
            yield from _compare_examples(table, heading, match["expression"], BYTES[match["unit"].lower()])


def _named(table: BenchmarkTable, words: set[str]) -> Iterator[tuple[str, str]]:
    for quantity, axis_words in (("length", _LENGTH_WORDS), ("width", _WIDTH_WORDS)):
        axes = table.columns(quantity) if words & axis_words else []  # type: ignore[arg-type]
        for axis in axes[:1]:
            for heading, role in table.roles.items():
                if role.quantity in ("time", "memory") and role.statistic == "location" and words & set(role.base):
                    yield heading, axis


def _compare_examples(table: BenchmarkTable, heading: str, expression: str, formula_unit: int) -> Iterator[Finding]:
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
        said = f"{heading} disagrees with its formula in {len(wrong)} of {compared} rows: {'; '.join(wrong)}"
        yield Finding("formula-examples", table.name, said)


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


def find_borrowed_shares(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Yield shares of forward that are those of forward and backward together, to the last digit, kernel by kernel."""
    shares = [(table, _phases(table), _shares(table)) for table in tables]
    for (table, phases, mine), (other, other_phases, theirs) in permutations(shares, 2):
        if phases != {"forward"} or other_phases != {"forward", "backward"}:
            continue
        same = [name for name, share in mine.items() if theirs.get(name) == share]
        if len(same) >= 2 and len(same) > len(mine) / 2:
            yield Finding(
                "borrowed-shares",
                table.name,
                f"{len(same)} of {len(mine)} shares of forward are those of {other.name}, forward and backward, to the "
                f"last digit (such as {same[0]}: {mine[same[0]]:g} %): they were read off the wrong range",
            )


def _phases(table: BenchmarkTable) -> set[str]:
    words = set(re.findall(r"[a-z]+", table.caption.lower()))
    return words & {"forward", "backward"}


def _shares(table: BenchmarkTable) -> dict[str, float]:
    columns = table.columns("share")
    names = [heading for heading, role in table.roles.items() if role.quantity == "label"]
    if not columns or not names:
        return {}
    pairs = zip(table.rows, table.values(columns[0]), strict=True)
    return {row[names[0]]: share for row, share in pairs if share is not None}
