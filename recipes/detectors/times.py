"""Rules on the times of one table, and of several tables of the same work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from statistics import median

from recipes.detectors.tables import BenchmarkTable

SPREAD = 0.3
RATIO = (1.2, 3.0)
LAUNCH_BOUND_S = 1e-3
"""A shorter forward pass probably waits for its launches: its time says little about the work."""
_ABOUT_ONE = (0.7, 1.3)
Across = Iterator[tuple[str, str]]
"""The name of a table, and a sentence about it."""


def find_negative_times(table: BenchmarkTable) -> Iterator[str]:
    """Yield times below zero, and how they came about if the other columns show it."""
    for heading in table.columns("time"):
        for row, value in enumerate(table.values(heading)):
            if value is None or value >= 0:
                continue
            said = f"{heading} is {table.rows[row][heading].strip()} at {table.describe(row)}: no time is negative"
            if table.roles[heading].phase == "backward" and _is_difference(table, row):
                said += "; it is forward+backward minus forward, a difference of means"
                share = _relative(table, table.columns("time", "forward")[0], row)
                if share is not None and share > SPREAD:
                    said += f", and forward spreads by {share:.0%}: it held the first pass"
            yield said


def find_spread(table: BenchmarkTable) -> Iterator[str]:
    """Yield columns with a standard deviation over 30 % of the mean somewhere, with the worst rows."""
    times = table.columns("time")
    with_mean = {table.roles[heading].base for heading in times if table.roles[heading].is_mean}
    for heading in times:
        if table.roles[heading].base in with_mean and not table.roles[heading].is_mean:
            continue
        shares = [(share, row) for row in range(len(table.rows))
                  if (share := _relative(table, heading, row)) is not None]  # fmt: skip
        over = sorted((entry for entry in shares if entry[0] > SPREAD), reverse=True)
        worst = "; ".join(
            f"{table.values(heading)[row]:g} ± {table.deviation_of(heading, row):g} at {table.describe(row)}"
            for _, row in over[:3]
        )
        if over:
            yield (
                f"{heading}: the standard deviation is over {SPREAD:.0%} of the mean in {len(over)} of {len(shares)} "
                f"rows, most: {worst}; a first pass without warm-up, a compilation inside, or another user of the "
                "device"
            )


def find_ratio(table: BenchmarkTable) -> Iterator[str]:
    """Yield a median of backward over forward outside 1.2 to 3, over rows with a forward pass of 1 ms and more.

    Backward does two matrix products for each one of forward.
    """
    counted = [ratio for ratio, forward_s in ratios_by_row(table).values() if forward_s >= LAUNCH_BOUND_S]
    if counted and not RATIO[0] <= median(counted) <= RATIO[1]:
        yield (
            f"backward takes {median(counted):.2f} times as long as forward (median of {len(counted)} rows with "
            f"forward of 1 ms and more); {RATIO[0]} to {RATIO[1]:g} is usual: did forward run again inside?"
        )


def find_launch_bound(table: BenchmarkTable) -> Iterator[str]:
    """Note the rows that `find_ratio` does not judge."""
    ratios = ratios_by_row(table)
    short = sum(forward_s < LAUNCH_BOUND_S for _, forward_s in ratios.values())
    if short:
        yield f"forward is under 1 ms in {short} of {len(ratios)} rows: launches may limit them; not in the ratio"


def ratios_by_row(table: BenchmarkTable) -> dict[int, tuple[float, float]]:
    """Return backward over forward and forward in seconds, of the rows that have both, by row."""
    pairs = enumerate(zip(table.seconds("forward"), table.seconds("backward"), strict=True))
    return {row: (two / one, one) for row, (one, two) in pairs if one is not None and two is not None and one > 0}


def find_subtraction(table: BenchmarkTable) -> Iterator[str]:
    """Note that backward was never timed: in every row it is the difference of two means to the last digit."""
    if len(table.rows) > 1 and all(_is_difference(table, row) for row in range(len(table.rows))):
        yield "backward is forward+backward minus forward to the last digit in every row: a difference, not timed"


def find_identical_columns(table: BenchmarkTable) -> Iterator[str]:
    """Yield columns of measurements that agree in every row, where the rows differ."""
    measured = [heading for heading, role in table.roles.items() if not role.is_label and role.statistic == "location"]
    for place, heading in enumerate(measured):
        values = table.values(heading)
        counted = [value for value in values if value is not None]
        for other in measured[place + 1 :]:
            if len(counted) > 2 and len(set(counted)) > 1 and values == table.values(other):
                yield f"{heading} and {other} are identical in all {len(counted)} rows"


def differs_at_first(samples: Sequence[float]) -> bool:
    """Return whether the first sample is an outlier, as after a warm-up that was missing or too short.

    It lies farther from the median of the others than five times their median absolute deviation and 30 % of it.
    """
    if len(samples) < 4:
        return False
    middle = median(samples[1:])
    deviation = median(abs(sample - middle) for sample in samples[1:])
    return abs(samples[0] - middle) > max(5 * deviation, SPREAD * middle)


def _relative(table: BenchmarkTable, heading: str, row: int) -> float | None:
    value, deviation = table.values(heading)[row], table.deviation_of(heading, row)
    return None if not value or value < 0 or deviation is None else deviation / value


def _is_difference(table: BenchmarkTable, row: int) -> bool:
    headings = [table.columns("time", phase)[:1] for phase in ("forward", "backward", "forward+backward")]
    numbers = [table.numbers[heading][row] for found in headings for heading in found]
    one, two, both = [*numbers, None, None, None][:3]
    if one is None or two is None or both is None:
        return False
    return abs(one.value + two.value - both.value) <= 0.5 * (one.ulp + two.ulp + both.ulp)


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
