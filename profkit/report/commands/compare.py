"""The documents of ``profkit compare`` and ``check``: what differs in origin, time and memory; which budgets held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import PurePath
from typing import Any, Literal

from profkit.analysis.compare.budgets import BASELINE, MAX_STEP, MIN_MFU, BudgetCheck, BudgetLine
from profkit.analysis.compare.comparison import CaptureComparison, CleanChange, CleanComparison, Difference, Headline
from profkit.analysis.compare.kernel_changes import (
    Change,
    KernelTotal,
    Line,
    ModuleComparison,
    Part,
    TimeComparison,
    larger_time,
)
from profkit.analysis.ranks.comparison import RanksResult
from profkit.analysis.statistics import LEVEL
from profkit.analysis.time_account.step_times import name_statistic
from profkit.names import SHARED, STEP, is_shared, sharing_modules
from profkit.report import simplify_name
from profkit.report.commands.memory import TOP_PARTS, memory_parts, memory_table
from profkit.report.commands.ranks import verdict_beside
from profkit.report.document import UNKNOWN, Column, Document, Lines, Row, Table
from profkit.report.units import (
    BYTES,
    NS,
    PLAIN,
    SHARE,
    SIGNED_NS,
    TEXT,
    Unit,
    format_change,
    format_count,
    format_interval,
    format_ns,
)

View = Literal["phase", "category", "module", "range", "kernel"]
VIEWS: tuple[View, ...] = ("phase", "category", "module", "range", "kernel")
TOP = 10

_SHOWN: tuple[View, ...] = ("phase", "category", "kernel")
_SHOWN_COMPILED: tuple[View, ...] = ("phase", "module", "category", "kernel")
_NAMED = 2
_NO_DIFFERENCE = "no measurable difference"
_LEAST_SPEED = 0.01
"""A speed below it, or above its inverse, says that one of the two times is next to nothing."""
_QUIET = (_NO_DIFFERENCE, "unchanged")

_EXACT_CHANGE = ("before_ns", "after_ns", "change_ns", "low_ns", "high_ns", "verdict")
_EXACT_PER_SAMPLE = ("before_per_sample_ns", "after_per_sample_ns")
_EXACT_SAMPLES = ("before_samples", "after_samples")
_EXACT_MODULE = ("module", "parent", "before_count", "after_count")
_EXACT_PART = ("range", "category", "kind", "before_kernels", "after_kernels")


def _or_empty(unit: Unit) -> Unit:
    return Unit(lambda value: "" if value == "" else unit.show(value), unit.right)


_INTERVAL = Unit(lambda value: value if isinstance(value, str) else format_interval(*value))
_CHANGE_COLUMN = Column("change_ns", "change", _or_empty(SIGNED_NS))
_BEFORE_COLUMN = Column("before_ns", "before", _or_empty(NS))
_AFTER_COLUMN = Column("after_ns", "after", _or_empty(NS))
_INTERVAL_COLUMN = Column("interval", f"{LEVEL:.0%} interval", _INTERVAL)


def build_compare_document(result: CaptureComparison, *, by: View | None, top: int | None) -> Document:
    """Return the comparison, of kernel time only this view; CSV holds it, or the kernels."""
    parts: list[Table | Lines] = [Lines(_head(result), "head")]
    if result.clean is not None:
        parts.append(_clean_table(result.clean))
    if result.time is not None:
        parts.append(_line_table(result.time, f"per {result.time.unit}", _wholes(result.time)))
        is_compiled = result.modules is not None and result.modules.is_compiled
        for view in (by,) if by else _SHOWN_COMPILED if is_compiled else _SHOWN:
            if view == "module":
                parts += _module_parts(result.time, result.modules, top or TOP)
            else:
                parts.append(_view(result.time, view, top or TOP))
        parts.append(Lines(_sums(result.time)))
    if result.memory is not None:
        parts += memory_parts(result.memory, top or TOP_PARTS)
    return Document("compare", result.to_dict(), parts, _csv_table(result, by), result.warnings)


def describe_differences(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield each difference; not the command's where another fact says the same, as the workload does of a script."""
    others = {f"{difference.before} → {difference.after}" for difference in differences if difference.fact != "command"}
    yield from (text for text in map(describe_difference, differences) if text not in others)


def describe_difference(difference: Difference) -> str:
    """Return a difference in origin as ``batch: 4 → 8``; of a command only the words that changed."""
    if difference.fact == "command":
        return ", ".join(_changed_words(difference.before.split(), difference.after.split()))
    return f"{difference.fact}: {difference.before} → {difference.after}"


def _changed_words(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Yield ``--compile=False → True`` for each stretch of words that changed."""
    for kind, i, i_end, j, j_end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        old, new = " ".join(before[i:i_end]), " ".join(after[j:j_end])
        option = old.partition("=")[0]
        if "=" in old and new.startswith(f"{option}="):
            new = new.removeprefix(f"{option}=")
        elif i and before[i - 1].startswith("-") and old and not old.startswith("-"):
            old = f"{before[i - 1]} {old}"
        yield f"{old or 'nothing'} → {new or 'nothing'}"


def _head(result: CaptureComparison) -> Iterator[str]:
    yield from map(_describe_headline, result.headlines)
    names = [PurePath(path).name for path in (result.before, result.after)]
    names = [result.before, result.after] if names[0] == names[1] else names
    yield f"before  {names[0]}"
    yield f"after   {names[1]}"
    yield from (f"changed: {text}" for text in describe_differences(result.provenance.differences))


def _describe_headline(headline: Headline) -> str:
    """Return ``step 30.02 → 21.01 ms: -30.0%, speed × 1.43, -9.022 … -8.989 ms (…)``."""
    times = f"{headline.what} {format_ns(headline.before_ns)} → {format_ns(headline.after_ns)}"
    said: list[str] = []
    if headline.verdict in _QUIET:
        said.append(headline.verdict)
    elif headline.change_share is not None and headline.speed_factor is not None:
        said.append(format_change(headline.change_share, 1))
        if _LEAST_SPEED < headline.speed_factor < 1 / _LEAST_SPEED:
            said.append(f"speed × {headline.speed_factor:.2f}")
    if headline.low_ns is not None and headline.high_ns is not None and headline.verdict != "unchanged":
        said.append(f"{LEVEL:.0%} interval {format_interval(headline.low_ns, headline.high_ns)}")
    return f"{times}: {', '.join(said)} ({headline.source})"


def _sums(time: TimeComparison) -> Iterator[str]:
    whole, unit = time.kernel_time, time.unit
    noun = _noun(time)
    within = "" if time.range is None else f" under {time.range!r}"
    counts = [_per_sample(count, size) for count, size in zip(time.kernel_count, time.samples, strict=True)]
    together = ""
    if max(time.gpu_counts) > 1:
        gpus = " and ".join(f"{count:,}" for count in dict.fromkeys(time.gpu_counts))
        together = f"; those of {noun}s are sums over {gpus} GPUs"
    yield f"times are per {unit}: {format_count(time.samples[0], unit)} before, {time.samples[1]:,} after{together}"
    yield f"{noun}s per {unit}: {counts[0]:,} before, {counts[1]:,} after"
    yield f"totals{within}: {whole.before_ns:,} and {whole.after_ns:,} ns; sum of the changes: {whole.change_ns:,} ns"
    left_before, left_after = time.left_out_ns
    yield f"not compared: {left_before:,} and {left_after:,} ns (warm-up, or outside the steps or the range)"
    if whole.low_ns is not None and not _is_unchanged(time):
        yield f"intervals: from how the {unit}s of each side vary; they do not include variation from run to run"
        by_chance = round((1 - LEVEL) * len(time.parts))
        if by_chance:
            yield f"if all {len(time.parts)} {noun}s were unchanged, about {by_chance} would look changed by chance"


def _clean_table(clean: CleanComparison) -> Table:
    labels = " and ".join(dict.fromkeys(clean.labels))
    has_interval = any(change.low_ns is not None for change in clean.changes)
    rows = [{**vars(change), "interval": _interval(change)} for change in clean.changes]
    statistic = name_statistic(waits=any(change.waits for change in clean.changes), several=True)
    title = f"unprofiled steps ({labels}), {statistic} of {clean.samples[0]} and {clean.samples[1]}"
    return Table(_columns("unprofiled", has_interval), rows, title=title)


def _wholes(time: TimeComparison) -> list[Line]:
    on_gpu = time.measure == "gpu-kernel"
    wholes = [Line("kernel time" if on_gpu else "operator self time", time.kernel_time)]
    wholes.append(Line("GPU busy" if on_gpu else "busy", time.busy))
    return wholes if time.wall is None else [*wholes, Line("Python time, profiled", time.wall)]


def _line_table(time: TimeComparison, heading: str, lines: Sequence[Line], more: Sequence[Row] = ()) -> Table:
    rows = [{**_change_row(line.change), "name": line.name} for line in lines]
    return Table(_columns(heading, _has_interval(time)), [*rows, *more])


def _view(time: TimeComparison, view: View, top: int) -> Table | Lines:
    if view == "kernel":
        if _is_unchanged(time):
            count = format_count(len(time.parts), _noun(time))
            return Lines([f"no change in {count}: each took equally long in both"])
        return _part_table(time, top)
    lines = _lines_of(time, view)
    shown, hidden = list(lines[:top]), list(lines[top:])
    if hidden:
        # A table that hides the largest part of the whole in "2 more" would mislead, however little that changed.
        largest = max(lines, key=lambda line: larger_time(line.change))
        if largest in hidden:
            hidden.remove(largest)
            shown.append(largest)
    more = [_sum_row(time, [line.change for line in hidden], "more")] if hidden else []
    return _line_table(time, view, shown, more)


def _lines_of(time: TimeComparison, view: View) -> Sequence[Line]:
    return {"phase": time.by_phase, "category": time.by_category, "range": time.by_range}[view]


def _module_parts(time: TimeComparison, modules: ModuleComparison | None, top: int) -> Iterator[Table | Lines]:
    if modules is None:
        yield Lines(["neither capture has ranges of modules"])
        return
    # A module holds those below it, so the largest rows come with the modules around them.
    kept = sorted(modules.modules, key=lambda row: (-larger_time(row.change), row.depth))[: 2 * top]
    shown = [row for row in modules.modules if row in kept]
    rows = [
        {
            **_change_row(row.change),
            "kernels": _counts(time, row.before_count, row.after_count),
            "name": " " * row.depth
            + (SHARED + _name_several(sharing_modules(row.module)) if is_shared(row.module) else row.module),
        }
        for row in shown
    ]
    name = "module (holds those below it)"
    more = len(modules.modules) - len(shown)
    rows += [{**_blank_row(), "name": f"({more} more: --format json)"}] if more else []
    yield Table(_columns(name, _has_interval(time), kernels=_noun(time)), rows)
    if modules.fusions:
        rows = []
        for fusion in modules.fusions[:top]:
            row = {**_change_row(fusion.change), "kernels": _counts(time, fusion.before_count, fusion.after_count)}
            rows.append({**row, "name": f"{fusion.phase}: {_name_several(fusion.modules)}"})
            for word, kernels in (("was", fusion.before), ("now", fusion.after)):
                rows.append({**_blank_row(), "name": f" {word} {_name_kernels(time, kernels)}"})
        hidden = modules.fusions[top:]
        rows += [_sum_row(time, [row.change for row in hidden], "more")] if hidden else []
        yield Table(_columns("fused, without matrix products", _has_interval(time), kernels=_noun(time)), rows)


def _name_several(modules: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(modules))
    more = len(distinct) - _NAMED
    return " + ".join(distinct[:_NAMED]) + (f" + {more} more" if more > 0 else "")


def _counts(time: TimeComparison, before: int, after: int) -> str:
    old, new = (
        f"{count / size:,.1f}".removesuffix(".0") for count, size in zip((before, after), time.samples, strict=True)
    )
    return f"{old} → {new}"


def _blank_row() -> Row:
    return {"change_ns": "", "before_ns": "", "after_ns": "", "interval": "", "kernels": ""}


def _part_table(time: TimeComparison, top: int) -> Table:
    changed = [part for part in time.parts if part.change.verdict not in _QUIET]
    quiet = [part.change for part in time.parts if part.change.verdict in _QUIET]
    rows: list[Row] = []
    for part in changed[:top]:
        rows.append({**_change_row(part.change), "name": f"{part.range}, {part.category}"})
        before, after = (_name_kernels(time, kernels) for kernels in (part.before, part.after))
        names = [before] if part.kind == "same" else [f"was {before}", f"now {after}"]
        rows += [{**_blank_row(), "name": f" {name}"} for name in names]
    hidden = [part.change for part in changed[top:]]
    unchanged = f"more: {_NO_DIFFERENCE if _has_interval(time) else 'unchanged'}"
    rows += [_sum_row(time, some, what) for some, what in ((hidden, "more"), (quiet, unchanged)) if some]
    interval = [_INTERVAL_COLUMN] if _has_interval(time) else []
    name = Column("name", f"range, category, {_noun(time)}s", TEXT, flexible=True)
    return Table((_CHANGE_COLUMN, *interval, _BEFORE_COLUMN, name), rows)


def _name_kernels(time: TimeComparison, kernels: Sequence[KernelTotal]) -> str:
    if not kernels:
        return "nothing"
    name = simplify_name(kernels[0].name) if time.measure == "gpu-kernel" else kernels[0].name
    return name + (f" (+{len(kernels) - 1})" if len(kernels) > 1 else "")


def _columns(heading: str, has_interval: bool, kernels: str | None = None) -> tuple[Column, ...]:
    more = [_INTERVAL_COLUMN] if has_interval else []
    more += [] if kernels is None else [Column("kernels", f"{kernels}s", PLAIN)]
    return (_CHANGE_COLUMN, _BEFORE_COLUMN, _AFTER_COLUMN, *more, Column("name", heading, TEXT, flexible=True))


def _change_row(change: Change) -> dict[str, Any]:
    return {
        "change_ns": change.change_ns,
        "before_ns": change.before_per_sample_ns,
        "after_ns": change.after_per_sample_ns,
        "interval": _interval(change),
    }


def _sum_row(time: TimeComparison, changes: Sequence[Change], what: str) -> dict[str, Any]:
    return {
        "change_ns": sum(change.change_ns for change in changes),
        "before_ns": _per_sample(sum(change.before_ns for change in changes), time.samples[0]),
        "after_ns": _per_sample(sum(change.after_ns for change in changes), time.samples[1]),
        "interval": "",
        "name": f"({len(changes)} {what})",
    }


def _interval(change: Change | CleanChange) -> str | tuple[int, int]:
    if change.verdict == _NO_DIFFERENCE:
        return _NO_DIFFERENCE
    if change.low_ns is None or change.high_ns is None or change.verdict == "unchanged":
        return ""
    return change.low_ns, change.high_ns


def _is_unchanged(time: TimeComparison) -> bool:
    return bool(time.parts) and all((part.kind, part.change.verdict) == ("same", "unchanged") for part in time.parts)


def _has_interval(time: TimeComparison) -> bool:
    return time.kernel_time.low_ns is not None


def _noun(time: TimeComparison) -> str:
    return "kernel" if time.measure == "gpu-kernel" else "operator"


def _per_sample(total: int, size: int) -> int:
    return round(total / size)


def _csv_table(result: CaptureComparison, by: View | None) -> Table:
    """Of kernel time ``before_ns`` and ``after_ns`` are totals over all samples and the others are per sample; those of
    unprofiled steps are `PhaseSamples.time_ns`.
    """
    time, clean = result.time, result.clean
    names: Sequence[str]
    changes: Sequence[tuple[Change | CleanChange, Mapping[str, Any]]]
    if time is not None and by in (None, "kernel"):
        names, changes = _EXACT_PART, [(part.change, vars(part) | _kernel_names(part)) for part in time.parts]
    elif time is not None and by == "module":
        modules = () if result.modules is None else result.modules.modules
        names, changes = _EXACT_MODULE, [(module.change, vars(module)) for module in modules]
    elif time is not None and by is not None:
        names, changes = (by,), [(line.change, {by: line.name}) for line in _lines_of(time, by)]
    elif clean is not None:
        names, changes = ("name",), [(change, {}) for change in clean.changes]
    else:
        return memory_table(result.memory) if result.memory is not None else Table((), [])
    measured = time or clean
    assert measured is not None
    samples = dict(zip(_EXACT_SAMPLES, measured.samples, strict=True))
    exact = (*names, *samples, *_EXACT_CHANGE, *(() if time is None else _EXACT_PER_SAMPLE))
    return Table((), [{**vars(change), **samples, **cells} for change, cells in changes], exact=exact)


def _kernel_names(part: Part) -> dict[str, str]:
    sides = {"before_kernels": part.before, "after_kernels": part.after}
    return {key: "; ".join(kernel.name for kernel in kernels) for key, kernels in sides.items()}


_BUDGET_UNITS = {
    "ns": NS,
    "bytes": Unit(lambda value: BYTES.show(round(value))),
    "share": SHARE,
}
_BUDGET_COLUMNS = (
    Column("verdict", "verdict", TEXT),
    Column("label", "budget", TEXT, flexible=True),
    Column("measured_text", "measured", PLAIN),
    Column("limit_text", "limit", PLAIN),
)
_EXACT_TEXTS = {"ns": "{:,.0f} ns", "bytes": "{:,.0f} B", "share": "{:.4%}"}
"""For a quantity and a limit that would look the same."""
_EXACT_BUDGET = ("budget", "subject", "measured", "limit", "unit", "held", "judged", "detail")


def build_check_document(check: BudgetCheck, ranks: RanksResult | None = None, answer: str = "") -> Document:
    """Return the verdict on each budget, and under the table each one's detail.

    ``ranks`` are the ranks that budgets were judged by: which of them is late is said too. ``answer`` is what the
    summary says of the run first.
    """
    rows = [_budget_row(line) for line in check.lines]
    table = Table(_BUDGET_COLUMNS, rows, exact=_EXACT_BUDGET, is_wrong=lambda row: not row["held"])
    details = [
        f"{budget_label(line)}: {'' if line.judged else 'NOT JUDGED (counts as failed): '}{line.detail}"
        for line in check.lines
    ]
    late = [] if ranks is None else verdict_beside(answer, ranks)
    return Document(
        "check",
        {**check.to_dict(), **({"answer": answer} if answer else {})},
        [table, Lines([*details, *late, *([answer] if answer else [])])],
        table,
    )


def budget_label(line: BudgetLine) -> str:
    is_said = line.subject is None or (line.budget, line.subject) == (MAX_STEP, STEP)
    return line.budget if is_said else f"{line.budget} {line.subject}"


def _budget_row(line: BudgetLine) -> dict[str, Any]:
    sign = "" if line.limit is None or line.budget == BASELINE else "≥ " if line.budget == MIN_MFU else "≤ "
    measured, limit = (_show_quantity(line, value) for value in (line.measured, line.limit))
    if measured == limit and line.measured != line.limit:
        measured, limit = (_EXACT_TEXTS[line.unit].format(value) for value in (line.measured, line.limit))
    return {
        **vars(line),
        "verdict": "held" if line.held else "BROKEN" if line.judged else "NOT JUDGED",
        "label": budget_label(line),
        "measured_text": measured,
        "limit_text": sign + limit,
    }


def _show_quantity(line: BudgetLine, value: float | None) -> str:
    return UNKNOWN if value is None else _BUDGET_UNITS[line.unit].show(value)
