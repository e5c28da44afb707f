"""Rules on the times of one table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from recipes.detectors.tables import BenchmarkTable, Phase, phase_of

SPREAD = 0.3
RATIO = (1.2, 3.0)
LAUNCH_BOUND_S = 1e-3
"""A shorter forward pass probably waits for its launches: its time says little about the work."""
LARGER = 1.5
"""The least ratio of two sizes that are compared."""
_FASTER = 0.9
_DISAGREES = 1.25
"""The ratio from which times differ. The same kernels stay within 1 %; launches or a disturbance cause more."""
_JUDGED: tuple[Phase, ...] = ("forward", "backward", "step")
_SAME: tuple[Phase, ...] = ("forward", "backward")
"""The phases that both kinds of step share: the same work should take the same time."""
_TRAINING = {"train", "training", "optimizer"}
_NAMES_OF_MODELS = {"size", "model", "preset", "layers", "heads", "ff", "hidden", "depth"}
"""Words in headings of a model's name and of what varies with its size."""


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


def find_falling_times(table: BenchmarkTable) -> Iterator[str]:
    """Note times that fall by over 10 % where only one size grows, by half or more.

    Times under 1 ms are left out: launches probably limit them, whatever the size.
    """
    for heading in (name for phase in _JUDGED for name in table.columns("time", phase)[:1]):
        values, compared, found = table.values(heading), 0, []
        for line in lines_by_size(table):
            timed = [
                (size, row, value) for size, row in line.points if (value := values[row]) is not None and value > 0
            ]
            for size, row, before in timed:
                larger = next((each for each in timed if each[0] >= LARGER * size), None)
                if larger is None:
                    continue
                compared += 1
                _, other, after = larger
                if before >= LAUNCH_BOUND_S / table.roles[heading].seconds and after < _FASTER * before:
                    grown = f"{line.named_by} {table.rows[other][line.named_by].strip()}"
                    said = f"{before:.4g} at {table.describe(row)}, {after:.4g} at {grown}"
                    found.append((after / before, said))
        if found:
            worst = "; ".join(pair for _, pair in sorted(found)[:3])
            yield (
                f"{heading} falls as a size grows, in {len(found)} of {compared} pairs of rows that differ in it "
                f"alone, most: {worst}; launches limit the smaller one, or something disturbed it"
            )


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
    labels = {name: set(role.base) for name, role in table.roles.items() if role.quantity == "label"}
    names = [name for name, words in labels.items() if words & _NAMES_OF_MODELS]
    by_model = table.columns("parameters") or table.columns("width")
    batches = [name for name, words in labels.items() if "batch" in words]
    for heading in (*by_model, *table.columns("length"), *batches):
        is_model = heading in by_model
        aside = [*names, *table.columns("width"), heading] if is_model else [heading]
        found: dict[tuple[str, ...], list[tuple[float, int]]] = {}
        for row, size in enumerate(table.values(heading)):
            if size is not None and size > 0:
                found.setdefault(tuple(table.labels(row, without=aside).values()), []).append((size, row))
        for points in found.values():
            if len({size for size, _ in points}) > 1:
                yield Line(heading, tuple(sorted(points)), names[0] if is_model and names else heading)


def find_disagreeing_passes(table: BenchmarkTable) -> Iterator[str]:
    """Note pairs of rows that differ only in the kind of step, with forward or backward over 25 % apart.

    This compares steps of forward and backward with whole training steps; forward alone runs without autograd and may
    be shorter. Phases under 1 ms in both rows are left out: launches probably limit them.
    """
    both_kinds = {"forward-backward", "train"}
    labels = [heading for heading, role in table.roles.items() if role.quantity == "label"]
    kinds = ((heading, [_kind_of_step(row[heading]) for row in table.rows]) for heading in labels)
    column, kind_by_row = next(((name, kinds) for name, kinds in kinds if both_kinds <= set(kinds)), (None, []))
    if column is None:
        return
    alike: dict[tuple[str, ...], dict[str | None, list[int]]] = {}
    for row, kind in enumerate(kind_by_row):
        if any(phase in seconds_by_phase(table, row) for phase in _SAME):
            key = tuple(table.labels(row, without=[column]).values())
            alike.setdefault(key, {}).setdefault(kind, []).append(row)
    pairs = [pair for rows in alike.values() for pair in product(*(rows.get(kind, []) for kind in sorted(both_kinds)))]
    found = []
    for row, other in pairs:
        apart = _apart(seconds_by_phase(table, row), seconds_by_phase(table, other))
        if apart:
            said = ", ".join(times for _, times in apart)
            found.append((max(apart)[0], f"{said} at {table.describe(row, without=[column])}"))
    if found:
        worst = "; ".join(said for _, said in sorted(found, reverse=True)[:3])
        names = " and in ".join(table.rows[row][column].strip() for row in pairs[0])
        yield (
            f"a phase takes different times in {names}, by over {_DISAGREES - 1:.0%} in {len(found)} of {len(pairs)} "
            f"pairs of rows that differ only in {column}, most: {worst}; launches limit one, or something disturbed it"
        )


def _kind_of_step(cell: str) -> str | None:
    words = set(re.findall(r"[a-z]+", cell.lower()))
    if words & _TRAINING:
        return "train"
    return "forward-backward" if phase_of(words) == "forward+backward" else None


def _apart(mine: dict[Phase, float], theirs: dict[Phase, float]) -> list[tuple[float, str]]:
    found = []
    for phase in _SAME:
        shorter, longer = sorted((mine.get(phase, 0.0), theirs.get(phase, 0.0)))
        if shorter and longer >= LAUNCH_BOUND_S and longer > _DISAGREES * shorter:
            found.append((longer / shorter, f"{phase} {mine[phase] * 1e3:.4g} ms and {theirs[phase] * 1e3:.4g} ms"))
    return found


def seconds_by_phase(table: BenchmarkTable, row: int) -> dict[Phase, float]:
    """Return the seconds of forward, backward and the step, as far as the row has them."""
    seconds = {phase: table.seconds(phase)[row] for phase in _JUDGED}
    return {phase: value for phase, value in seconds.items() if value is not None and value > 0}


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
