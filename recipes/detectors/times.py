"""Detectors of mistakes in times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profkit.analysis.sample_statistics import median, median_absolute_deviation
from recipes.detectors.columns import Phase
from recipes.detectors.finding import Finding
from recipes.detectors.sizes import lines_by_size
from recipes.detectors.tables import BenchmarkTable

SPREAD = 0.3
RATIO = (1.2, 3.0)
LAUNCH_BOUND_S = 1e-3
"""A shorter forward pass is likely to wait for its launches: what it takes says little about the work."""
JUDGED_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
LARGER = 1.5
"""How many times as large a size must be for its time to say something."""
_FASTER = 0.9


def find_negative_times(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield times below zero, and how they came about where the other columns tell."""
    for heading in table.columns("time"):
        for row, value in enumerate(table.values(heading)):
            if value is not None and value < 0:
                said = f"{heading} is {table.rows[row][heading].strip()} at {table.describe(row)}: no time is negative"
                yield Finding("negative-time", table.name, said + _explain_difference(table, heading, row))


def find_spread(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield columns whose standard deviation is over 30 % of the mean somewhere, with the worst rows."""
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

    Backward does two matrix products for each of forward's. Rows under 1 ms are noted, never judged.
    """
    ratios = ratios_by_row(table)
    short = [row for row, (_, seconds) in ratios.items() if seconds < LAUNCH_BOUND_S]
    if short:
        yield Finding(
            "launch-bound",
            table.name,
            f"forward is under 1 ms in {len(short)} of {len(ratios)} rows: launches may bound them; not in the ratio",
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
    """Note that backward was never timed: it is the difference of two means to the last digit, in every row."""
    pairs = [_difference(table, row) for row in range(len(table.rows))]
    if len(pairs) > 1 and all(pairs):
        yield Finding(
            "subtracted",
            table.name,
            "backward is forward+backward less forward to the last digit in every row: a difference, not timed",
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
    """Note times that fall by over 10 % to the next row that is half as large again and more in one size alone.

    Times under 1 ms on both sides are left out: launches are likely to bound them whatever the size.
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
            told = "; ".join(said for _, said in found[:3])
            yield Finding(
                "falls-with-size",
                table.name,
                f"{heading} falls as a size grows, in {len(found)} of {len(pairs)} pairs of rows that differ in it "
                f"alone, most: {told}; launches bound the smaller one, or something disturbed it",
                is_note=True,
            )


def _pairs_by_size(table: BenchmarkTable, heading: str) -> Iterator[tuple[int, float, str, float]]:
    """Yield each row and its time with the size and the time of the next row that is large enough beside it."""
    values = table.values(heading)
    for line in lines_by_size(table):
        timed = [(size, row, value) for size, row in line.points if (value := values[row]) is not None and value > 0]
        for size, row, before in timed:
            larger = next(((other, after) for grown, other, after in timed if grown >= LARGER * size), None)
            if larger is not None:
                yield row, before, f"{line.named_by} {table.rows[larger[0]][line.named_by].strip()}", larger[1]


def seconds_by_phase(table: BenchmarkTable, row: int) -> dict[Phase, float]:
    """Return what forward, backward and the step of a row take, of those that it has, in seconds."""
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
    """Return whether the first of some samples is an outlier: a warm-up that was missing or too short.

    It lies further from the others' median than five times their median absolute deviation, and than 30 % of it.
    """
    if len(samples) < 4:
        return False
    others = samples[1:]
    distance = abs(samples[0] - median(others))
    return distance > max(5 * median_absolute_deviation(others), SPREAD * median(others))


def _means(table: BenchmarkTable) -> list[str]:
    """Return the columns of means; where there is none of its kind, what stands for it."""
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
    return f"; it is forward+backward less forward, a difference of means{why}"
