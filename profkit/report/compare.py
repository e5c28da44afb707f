"""Print what changed between two captures: the wholes, then by phase, category and kernel, then the books."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from textwrap import fill
from typing import Literal

from profkit.analysis.compare.bootstrap import LEVEL
from profkit.analysis.compare.clean_compare import CleanChange, CleanComparison
from profkit.analysis.compare.comparison import CaptureComparison
from profkit.analysis.compare.time_compare import Change, KernelTotal, Line, Part, TimeComparison
from profkit.report.compare_csv import render_compare_csv
from profkit.report.formats import (
    Column,
    Format,
    Table,
    escape_markdown,
    make_visible,
    render_json,
    render_latex,
    render_markdown,
    render_table,
    screen_width,
)
from profkit.report.kernel_names import simplify_name
from profkit.report.memory_compare import TOP_PARTS, render_comparison
from profkit.report.units import format_count, format_interval, format_ns, format_signed_ns

View = Literal["phase", "category", "range", "kernel"]
VIEWS: tuple[View, ...] = ("phase", "category", "range", "kernel")
TOP = 10

_CHANGE = Column("change", "change_ns")
_BEFORE = Column("before", "before_ns")
_AFTER = Column("after", "after_ns")
_INTERVAL = Column(f"{LEVEL:.0%} interval", "interval")
_NONE = "no measurable difference"


def render_compare(
    result: CaptureComparison,
    style: Format = "table",
    *,
    by: View | None = None,
    top: int | None = TOP,
    full_names: bool = False,
) -> str:
    """Return the comparison as text; ``by`` shows one view alone, CSV holds one table: that of ``by``, or the kernels.

    ``top`` limits each table's lines; the rest are summed in one.
    """
    if style == "json":
        return render_json(result.to_dict())
    if style == "csv":
        return render_compare_csv(result, by)
    blocks: list[str | Table] = ["\n".join(head_lines(result))]
    if result.clean is not None:
        blocks += [_describe_clean(result.clean), _clean_table(result.clean)]
    if result.time is not None:
        blocks.append(_whole_table(result.time))
        blocks += [_view_table(result.time, view, top) for view in ((by,) if by else ("phase", "category", "kernel"))]
        blocks.append("\n".join(books(result.time)))
    text = _render_blocks(blocks, style, full_names=full_names)
    if result.memory is not None:
        text += "\n\n" + render_comparison(result.memory, style, top=top or TOP_PARTS, full_names=full_names)
    return text


def head_lines(result: CaptureComparison) -> list[str]:
    """Return what is compared, what differs in where they come from, and what is not known of that."""
    provenance = result.provenance
    names = [PurePath(path).name for path in (result.before, result.after)]
    names = [result.before, result.after] if names[0] == names[1] else names
    lines = [f"before  {names[0]}", f"after   {names[1]}"]
    lines += [f"differs {one.fact}: {one.before} | {one.after}" for one in provenance.differences]
    for who, facts in (
        ("before", provenance.unknown_before),
        ("after", provenance.unknown_after),
        ("both", provenance.unknown_both),
    ):
        if facts:
            lines.append(f"unknown of {who}: {', '.join(facts)}")
    return lines


def books(time: TimeComparison) -> list[str]:
    """Return the lines that close the books: what a change is per, what the lines sum to, what was left out."""
    whole, rounding = time.kernel_time, time.rounding_ns
    unit = "capture" if time.unit == "capture" else "step"
    within = f" under {time.range!r}" if time.range is not None else ""
    lines = [
        f"changes are per {unit}, of {time.samples[0]:,} before and {time.samples[1]:,} after",
        f"totals{within}: {whole.before_ns:,} and {whole.after_ns:,} ns",
        f"kernels change by {whole.change_ns - rounding:,} + rounding {rounding:,} = {whole.change_ns:,} ns",
        f"left out: {time.left_out_ns[0]:,} and {time.left_out_ns[1]:,} ns (warm-up, outside steps or the range)",
    ]
    if whole.low_ns is not None and not _is_unchanged(time):
        lines.append(f"intervals: bootstrap over each side's {unit}s; run-to-run variation is not in them")
        by_chance = round((1 - LEVEL) * len(time.parts))
        if by_chance:
            lines.append(
                f"one interval a kernel: were all {len(time.parts)} unchanged, {by_chance} would seem changed by chance"
            )
    return lines


def _render_blocks(blocks: Sequence[str | Table], style: Format, *, full_names: bool) -> str:
    if style == "latex":
        lines = [
            render_latex(block)
            if isinstance(block, Table)
            else "\n".join(f"% {make_visible(line)}" for line in block.split("\n"))
            for block in blocks
        ]
        return "\n\n".join(lines)
    if style == "markdown":
        return "\n\n".join(
            render_markdown(block)
            if isinstance(block, Table)
            else "\n".join(f"- {escape_markdown(line)}" for line in block.split("\n"))
            for block in blocks
        )
    return "\n\n".join(
        render_table(block, full=full_names) if isinstance(block, Table) else "\n".join(map(_wrap, block.split("\n")))
        for block in blocks
    )


def _wrap(line: str) -> str:
    return fill(make_visible(line), screen_width(), subsequent_indent="        ", break_on_hyphens=False)


def _describe_clean(clean: CleanComparison) -> str:
    labels = " and ".join(dict.fromkeys(clean.labels))
    return f"unprofiled steps ({labels}), medians of {clean.samples[0]} and {clean.samples[1]}"


def _clean_table(clean: CleanComparison) -> Table:
    has_interval = any(change.low_ns is not None for change in clean.changes)
    cells = [
        [
            format_signed_ns(change.change_ns),
            format_ns(change.before_ns),
            format_ns(change.after_ns),
            *([_interval(change)] if has_interval else []),
            change.name,
        ]
        for change in clean.changes
    ]
    return Table((*_columns(has_interval), Column("unprofiled", "name", right=False, flexible=True)), cells, [])


def _whole_table(time: TimeComparison) -> Table:
    work = "kernel time" if time.measure == "gpu-kernel" else "operator self time"
    wholes = [Line(work, time.kernel_time), Line("busy", time.busy)]
    wholes += [] if time.wall is None else [Line("wall, profiled", time.wall)]
    cells = [_line_cells(time, line) for line in wholes]
    counts = [_per_sample(count, size) for count, size in zip(time.kernel_count, time.samples, strict=True)]
    change = counts[1] - counts[0]
    noun = "kernels" if time.measure == "gpu-kernel" else "operators"
    unknown = [""] if _has_interval(time) else []
    cells.append([f"{change:+,}" if change else "0", *(f"{count:,}" for count in counts), *unknown, noun])
    return _lines_table(time, f"per {time.unit}", cells)


def _view_table(time: TimeComparison, view: View, top: int | None) -> str | Table:
    if view == "kernel":
        return _say_unchanged(time) if _is_unchanged(time) else _part_table(time, top)
    lines = {"phase": time.by_phase, "category": time.by_category, "range": time.by_range}[view]
    cells = [_line_cells(time, line) for line in lines[:top]]
    if top is not None and lines[top:]:
        cells.append(_rest_cells(time, [line.change for line in lines[top:]], "more"))
    return _lines_table(time, view, cells)


def _lines_table(time: TimeComparison, heading: str, cells: list[list[str]]) -> Table:
    name = Column(heading, "name", right=False, flexible=True)
    return Table((*_columns(_has_interval(time)), name), cells, [])


def _is_unchanged(time: TimeComparison) -> bool:
    """Whether both captures have the same kernels, and each took as long in one as in the other, to the nanosecond."""
    return bool(time.parts) and all((part.kind, part.change.verdict) == ("same", "unchanged") for part in time.parts)


def _say_unchanged(time: TimeComparison) -> str:
    noun = "kernel" if time.measure == "gpu-kernel" else "operator"
    return f"no change in {format_count(len(time.parts), noun)}: each took as long in both"


def _part_table(time: TimeComparison, top: int | None) -> Table:
    """Return the parts that changed measurably, where each is and which kernels it was and is; then the others' sum."""
    told = [part for part in time.parts if part.change.verdict not in (_NONE, "unchanged")]
    quiet = [part.change for part in time.parts if part.change.verdict in (_NONE, "unchanged")]
    has_interval = _has_interval(time)
    cells = []
    for part in told[:top]:
        interval = [_interval(part.change)] if has_interval else []
        before = format_ns(_per_sample(part.change.before_ns, time.samples[0]))
        cells.append([format_signed_ns(part.change.change_ns), *interval, before, f"{part.range}, {part.category}"])
        cells += [["", *([""] if has_interval else []), "", f" {line}"] for line in _describe_kernels(time, part)]
    rest = [part.change for part in told[top:]] if top is not None else []
    for changes, what in ((rest, "more"), (quiet, f"more: {_NONE}" if has_interval else "more: unchanged")):
        if changes:
            change, before, _, *interval, name = _rest_cells(time, changes, what)
            cells.append([change, *interval, before, name])
    interval_column = [_INTERVAL] if has_interval else []
    where = Column("range, category, kernels", "name", right=False, flexible=True)
    return Table((_CHANGE, *interval_column, _BEFORE, where), cells, [])


def _describe_kernels(time: TimeComparison, part: Part) -> list[str]:
    """Return a part's kernels in a line, or those that went and those that came in two."""
    before, after = (_name_kernels(time, kernels) for kernels in (part.before, part.after))
    return [before] if part.kind == "same" else [f"was {before}", f"now {after}"]


def _name_kernels(time: TimeComparison, kernels: Sequence[KernelTotal]) -> str:
    if not kernels:
        return "nothing"
    name = simplify_name(kernels[0].name) if time.measure == "gpu-kernel" else kernels[0].name
    return name + (f" (+{len(kernels) - 1})" if len(kernels) > 1 else "")


def _line_cells(time: TimeComparison, line: Line) -> list[str]:
    change = line.change
    before, after = _per_sample(change.before_ns, time.samples[0]), _per_sample(change.after_ns, time.samples[1])
    interval = [_interval(change)] if _has_interval(time) else []
    return [format_signed_ns(change.change_ns), format_ns(before), format_ns(after), *interval, line.name]


def _rest_cells(time: TimeComparison, changes: Sequence[Change], what: str) -> list[str]:
    """Return the cells of lines that are not shown, as one."""
    before, after = sum(change.before_ns for change in changes), sum(change.after_ns for change in changes)
    return [
        format_signed_ns(sum(change.change_ns for change in changes)),
        format_ns(_per_sample(before, time.samples[0])),
        format_ns(_per_sample(after, time.samples[1])),
        *([""] if _has_interval(time) else []),
        f"({len(changes)} {what})",
    ]


def _interval(change: Change | CleanChange) -> str:
    if change.verdict == _NONE:
        return _NONE
    if change.low_ns is None or change.high_ns is None or change.verdict == "unchanged":
        return ""
    return format_interval(change.low_ns, change.high_ns)


def _columns(has_interval: bool) -> tuple[Column, ...]:
    return (_CHANGE, _BEFORE, _AFTER, *([_INTERVAL] if has_interval else []))


def _has_interval(time: TimeComparison) -> bool:
    return time.kernel_time.low_ns is not None


def _per_sample(total: int, size: int) -> int:
    return round(total / size)
