"""Detectors of mistakes in the times of one table, and of a forward pass timed inside backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import median

from recipes.detectors.tables import BenchmarkTable, Finding, Phase

SPREAD = 0.3
RATIO = (1.2, 3.0)
LAUNCH_BOUND_S = 1e-3
"""A shorter forward pass probably waits for its launches: its time says little about the work."""
JUDGED_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
LARGER = 1.5
"""The least ratio of two sizes that are compared."""
_FASTER = 0.9
_ABOUT_ONE = (0.7, 1.3)


def find_negative_times(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield times below zero, and how they came about if the other columns show it."""
    for heading in table.columns("time"):
        for row, value in enumerate(table.values(heading)):
            if value is not None and value < 0:
                said = f"{heading} is {table.rows[row][heading].strip()} at {table.describe(row)}: no time is negative"
                yield Finding("negative-time", table.name, said + _explain_difference(table, heading, row))


def find_spread(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield columns with a standard deviation over 30 % of the mean somewhere, with the worst rows."""
    for heading in _means(table):
        wide = [(_relative(table, heading, row), row) for row in range(len(table.rows))]
        over = sorted(((share, row) for share, row in wide if share is not None and share > SPREAD), reverse=True)
        if over:
            worst = "; ".join(_show(table, heading, row) for _, row in over[:3])
            counted = sum(share is not None for share, _ in wide)
            said = (
                f"{heading}: the standard deviation is over {SPREAD:.0%} of the mean in {len(over)} of {counted} rows"
            )
            why = "a first pass without warm-up, a compilation inside, or another user of the device"
            yield Finding("spread", table.name, f"{said}, most: {worst}; {why}")


def find_ratio(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield a median of backward over forward outside 1.2 to 3, over rows with a forward pass of 1 ms and more.

    Backward does two matrix products for each one of forward. Rows under 1 ms are noted, never judged.
    """
    ratios = ratios_by_row(table)
    short = [row for row, (_, seconds) in ratios.items() if seconds < LAUNCH_BOUND_S]
    if short:
        yield Finding(
            "launch-bound",
            table.name,
            f"forward is under 1 ms in {len(short)} of {len(ratios)} rows: launches may limit them; not in the ratio",
            is_note=True,
        )
    counted = [ratio for ratio, seconds in ratios.values() if seconds >= LAUNCH_BOUND_S]
    if counted and not RATIO[0] <= median(counted) <= RATIO[1]:
        yield Finding(
            "backward-ratio",
            table.name,
            f"backward takes {median(counted):.2f} times as long as forward (median of {len(counted)} rows with "
            f"forward of 1 ms and more); {RATIO[0]} to {RATIO[1]:g} is usual: did forward run again inside?",
        )


def find_subtraction(table: BenchmarkTable) -> Iterator[Finding]:
    """Note that backward was never timed: in every row it is the difference of two means to the last digit."""
    pairs = [_difference(table, row) for row in range(len(table.rows))]
    if len(pairs) > 1 and all(pairs):
        yield Finding(
            "subtracted",
            table.name,
            "backward is forward+backward minus forward to the last digit in every row: a difference, not timed",
            is_note=True,
        )


def find_identical_columns(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield columns of measurements that agree in every row, where the rows differ."""
    measured = [heading for heading, role in table.roles.items() if not role.is_label and role.statistic == "location"]
    for place, heading in enumerate(measured):
        values = table.values(heading)
        counted = [value for value in values if value is not None]
        for other in measured[place + 1 :]:
            if len(counted) > 2 and len(set(counted)) > 1 and values == table.values(other):
                said = f"{heading} and {other} are identical in all {len(counted)} rows"
                yield Finding("identical-columns", table.name, said)


def find_falling_times(table: BenchmarkTable) -> Iterator[Finding]:
    """Note times that fall by over 10 % where only one size grows, by half or more.

    Times under 1 ms are left out: launches probably limit them, whatever the size.
    """
    for heading in (name for phase in JUDGED_PHASES for name in table.columns("time", phase)[:1]):
        pairs = list(_pairs_by_size(table, heading))
        least = LAUNCH_BOUND_S / table.roles[heading].seconds
        found = sorted(
            (after / before, f"{before:.4g} at {table.describe(row)}, {after:.4g} at {grown}")
            for row, before, grown, after in pairs
            if before >= least and after < _FASTER * before
        )
        if found:
            worst = "; ".join(pair for _, pair in found[:3])
            yield Finding(
                "falls-with-size",
                table.name,
                f"{heading} falls as a size grows, in {len(found)} of {len(pairs)} pairs of rows that differ in it "
                f"alone, most: {worst}; launches limit the smaller one, or something disturbed it",
                is_note=True,
            )


def _pairs_by_size(table: BenchmarkTable, heading: str) -> Iterator[tuple[int, float, str, float]]:
    """Yield each row and its time, with the size and time of the next row that is large enough."""
    values = table.values(heading)
    for line in lines_by_size(table):
        timed = [(size, row, value) for size, row in line.points if (value := values[row]) is not None and value > 0]
        for size, row, before in timed:
            larger = next(((other, after) for grown, other, after in timed if grown >= LARGER * size), None)
            if larger is not None:
                yield row, before, f"{line.named_by} {table.rows[larger[0]][line.named_by].strip()}", larger[1]


def seconds_by_phase(table: BenchmarkTable, row: int) -> dict[Phase, float]:
    """Return the seconds of forward, backward and the step, as far as the row has them."""
    found: dict[Phase, float] = {}
    for phase in JUDGED_PHASES:
        for heading in table.columns("time", phase)[:1]:
            value = table.values(heading)[row]
            if value is not None and value > 0:
                found[phase] = value * table.roles[heading].seconds
    return found


def ratios_by_row(table: BenchmarkTable) -> dict[int, tuple[float, float]]:
    """Return backward over forward and forward in seconds, of the rows that have both, by row."""
    forward, backward = table.columns("time", "forward"), table.columns("time", "backward")
    if not forward or not backward:
        return {}
    unit = table.roles[forward[0]].seconds
    scale = table.roles[backward[0]].seconds / unit
    found = {}
    for row, (one, two) in enumerate(zip(table.values(forward[0]), table.values(backward[0]), strict=True)):
        if one is not None and two is not None and one > 0:
            found[row] = (two * scale / one, one * unit)
    return found


def differs_at_first(samples: Sequence[float]) -> bool:
    """Return whether the first sample is an outlier, as after a warm-up that was missing or too short.

    It lies farther from the median of the others than five times their median absolute deviation and 30 % of it.
    """
    if len(samples) < 4:
        return False
    middle = median(samples[1:])
    deviation = median(abs(sample - middle) for sample in samples[1:])
    return abs(samples[0] - middle) > max(5 * deviation, SPREAD * middle)


def _means(table: BenchmarkTable) -> list[str]:
    """Return the columns of means; of a kind without a mean, the columns of its location."""
    times = table.columns("time")
    with_mean = {table.roles[heading].base for heading in times if table.roles[heading].is_mean}
    return [name for name in times if table.roles[name].is_mean or table.roles[name].base not in with_mean]


def _relative(table: BenchmarkTable, heading: str, row: int) -> float | None:
    value, deviation = table.values(heading)[row], table.deviation_of(heading, row)
    return None if not value or value < 0 or deviation is None else deviation / value


def _show(table: BenchmarkTable, heading: str, row: int) -> str:
    value, deviation = table.values(heading)[row], table.deviation_of(heading, row)
    return f"{value:g} ± {deviation:g} at {table.describe(row)}"


def _difference(table: BenchmarkTable, row: int) -> bool:
    """Return whether backward = forward+backward - forward within rounding."""
    names = [table.columns("time", phase) for phase in ("forward", "backward", "forward+backward")]
    if not all(names):
        return False
    one, two, both = (table.numbers[headings[0]][row] for headings in names)
    if one is None or two is None or both is None:
        return False
    return abs(one.value + two.value - both.value) <= 0.5 * (one.ulp + two.ulp + both.ulp)


def _explain_difference(table: BenchmarkTable, heading: str, row: int) -> str:
    if table.roles[heading].phase != "backward" or not _difference(table, row):
        return ""
    forward = table.columns("time", "forward")[0]
    share = _relative(table, forward, row)
    why = "" if share is None or share <= SPREAD else f", and forward spreads by {share:.0%}: it held the first pass"
    return f"; it is forward+backward minus forward, a difference of means{why}"


_NAMES_OF_MODELS = {"size", "model", "preset", "layers", "heads", "ff", "hidden", "depth"}
"""Words in headings of a model's name and of what varies with its size."""


@dataclass(frozen=True)
class Line:
    """Rows that agree in all labels except ``heading`` and what varies with it: sizes and rows, by rising size."""

    heading: str
    points: tuple[tuple[float, int], ...]
    named_by: str
    """The column that names the sizes: a model's name if ``heading`` counts its parameters."""


def lines_by_size(table: BenchmarkTable) -> Iterator[Line]:
    """Yield lines of rows that differ only in one size, if there are two sizes or more.

    Models differ in name, width and number of layers at once: they are ordered by their parameters, or by their width
    if the table lacks parameters.
    """
    roles = table.roles
    models = [name for name, role in roles.items() if role.quantity == "width" or _names_model(table, name)]
    by_model = table.columns("parameters") or table.columns("width")
    batches = [name for name, role in roles.items() if role.quantity == "label" and "batch" in role.base]
    for heading in (*by_model, *table.columns("length"), *batches):
        aside = [*models, heading] if heading in by_model else [heading]
        named_by = next((name for name in models if heading in by_model and _names_model(table, name)), heading)
        found: dict[tuple[str, ...], list[tuple[float, int]]] = {}
        for row, size in enumerate(table.values(heading)):
            if size is not None and size > 0:
                found.setdefault(tuple(table.labels(row, without=aside).values()), []).append((size, row))
        for points in found.values():
            if len({size for size, _ in points}) > 1:
                yield Line(heading, tuple(sorted(points)), named_by)


def _names_model(table: BenchmarkTable, heading: str) -> bool:
    role = table.roles[heading]
    return role.quantity == "label" and bool(_NAMES_OF_MODELS & set(role.base))


def find_forward_in_backward(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Yield tables with a forward pass inside backward: backward over forward is higher by 1 than in another table.

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
            yield Finding(
                "forward-in-backward",
                table.name,
                f"backward over forward is {mine[last]:.2f} at width {last[0]:g} and length {last[1]:g}, where "
                f"{other.name} has {theirs[last]:.2f} ({more:.2f} more, median of {len(shared)} cells): forward was "
                "timed inside backward",
            )
            return


def _ratios_by_cell(table: BenchmarkTable) -> dict[tuple[float, float], float]:
    lengths, widths = table.columns("length"), table.columns("width")
    if not lengths or not widths:
        return {}
    found = {}
    for row, (ratio, forward_s) in ratios_by_row(table).items():
        width, length = table.values(widths[0])[row], table.values(lengths[0])[row]
        if forward_s >= LAUNCH_BOUND_S and width and length and _is_eager(table.rows[row]):
            found[width, length] = ratio
    return found


def _is_eager(row: Mapping[str, str]) -> bool:
    compiled = next((value for key, value in row.items() if key.lower() in ("compile", "compiled", "mode")), "False")
    return compiled.strip().lower() in ("false", "no", "none", "eager", "0")
