"""Print the account of ``profkit memory``: on a screen, as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import textwrap
from pathlib import PurePath

from profkit.analysis.memory.composition import LargeRow
from profkit.analysis.memory.oom import OomVerdict
from profkit.analysis.memory.opened_snapshot import PEAK
from profkit.analysis.memory.result import MemoryResult, Totals
from profkit.report.formats import (
    WIDTH,
    Column,
    Format,
    Table,
    escape_markdown,
    make_visible,
    render_csv,
    render_json,
    render_latex,
    render_markdown,
    render_table,
    shorten,
)
from profkit.report.memory_leaks import leak_lines, leak_rows, leak_table
from profkit.report.units import format_after, format_bytes, format_exactly, format_share

TOP_STACKS = 6

_GRAVE = ("no-history", "contradiction", "bounded", "ledger-disagrees")
"""Warnings that head the output, because they say how far it can be trusted."""

_EXACT = tuple(
    Column(key, key) for key in ("section", "name", "bytes", "share", "count", "requested_bytes", "phase", "owner")
)


def render_memory(
    result: MemoryResult,
    style: Format = "table",
    *,
    top: int = TOP_STACKS,
    full_names: bool = False,
    leaks: bool = False,
) -> str:
    """Return the account as text; ``top`` is how many stacks a table shows, ``leaks`` adds what steps left behind.

    JSON has all of it in any case.
    """
    if style == "json":
        return render_json(result.to_dict())
    if style == "csv":
        return render_csv(_exact_table(result, leaks))
    tables = [("by category", _category_table(result)), ("by stack", _stack_table(result, top))]
    tables.append(("largest", _largest_table(result)))
    left = leak_lines(result.leaks) if leaks else []
    if leaks and result.leaks.steps:
        tables.append(("left behind by steps", leak_table(result.leaks)))
    if style == "latex":
        heads = [f"% {line}" for line in [*grave_lines(result), *head_lines(result), *left]]
        return "\n".join([*heads, *(f"% {title}\n{render_latex(table)}" for title, table in tables)])
    if style == "markdown":
        parts = ["\n".join(f"- {escape_markdown(line)}" for line in [*grave_lines(result), *head_lines(result)])]
        parts += [
            f"**{escape_markdown(_moment(result))}, {title}**\n\n{render_markdown(table)}" for title, table in tables
        ]
        return "\n\n".join([*parts, "\n".join(f"- {escape_markdown(line)}" for line in [*foot_lines(result), *left])])
    parts = [*["\n".join(grave_lines(result))] * bool(grave_lines(result)), "\n".join(head_lines(result))]
    parts.append(f"{_moment(result)}\n{render_table(tables[0][1], full=full_names)}")
    parts += [render_table(table, full=full_names) for _, table in tables[1:]]
    feet = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in [*foot_lines(result), *left]]
    return "\n\n".join([*parts, "\n".join(feet)])


def grave_lines(result: MemoryResult) -> list[str]:
    """Return the warnings that say how far the figures can be trusted."""
    return [f"! {make_visible(warning.message)}" for warning in result.warnings if warning.code in _GRAVE]


def other_warnings(result: MemoryResult) -> list[str]:
    """Return the warnings that do not head the output."""
    return [warning.message for warning in result.warnings if warning.code not in _GRAVE]


def head_lines(result: MemoryResult) -> list[str]:
    """Return the peaks and ends, and what was recorded."""
    totals, history = result.totals, result.history
    recorded = f"{history.events:,} events"
    if history.start_us is not None:
        recorded += f" over {format_after(history.end_us, history.start_us)}"
    whole = "history complete" if history.complete else "history incomplete"
    lines = [f"{PurePath(result.snapshot).name}, device {totals.device}: {recorded}, {whole}"]
    lines.append(f"allocated  peak {format_exactly(totals.allocated_peak_bytes)}, {_proof(totals)}, {_when(result)}")
    lines.append(f"requested  peak {format_exactly(totals.requested_peak_bytes)}")
    lines.append(f"reserved   peak {format_exactly(totals.reserved_peak_bytes)}")
    lines.append(
        f"at the end {format_bytes(totals.allocated_end_bytes)} allocated of "
        f"{format_bytes(totals.reserved_end_bytes)} reserved"
    )
    lines += [
        f"device {other.device}: peak {format_bytes(other.allocated_peak_bytes)} allocated, {_proof(other)}, "
        f"{format_bytes(other.reserved_peak_bytes)} reserved"
        for other in result.others
    ]
    return list(map(make_visible, lines))


def foot_lines(result: MemoryResult) -> list[str]:
    """Return the phases, the evidence, fragmentation, and the verdicts."""
    at, history = result.composition, result.history
    lines = []
    if result.phases:
        peaks = ", ".join(f"{one.name} {format_bytes(one.peak_bytes)}" for one in result.phases)
        lines.append(f"phase peaks: {peaks}")
    if at.allocated_bytes:
        shares = [f"{kind} {format_share(size / at.allocated_bytes)}" for kind, size in at.evidence.items() if size]
        lines.append("evidence for the categories: " + ", ".join(shares))
    some = result.fragmentation
    lines.append(
        f"then reserved {format_bytes(some.reserved_bytes)}, of it {format_bytes(some.free_bytes)} free"
        f" ({format_share(some.free_share)}); padding {format_bytes(some.padding_bytes)}"
    )
    lines.append(
        f"at the end {format_bytes(some.end_free_bytes)} free in {some.end_free_blocks:,} blocks, the largest "
        f"{format_bytes(some.end_largest_free_bytes)}"
    )
    if result.allocator_check is not None and result.allocator_check.agrees:
        lines.append("the allocator's own peaks, as the run recorded them, are the same to the byte")
    if result.allocator_check is not None and result.allocator_check.earlier_peak_bytes and not history.complete:
        earlier = format_exactly(result.allocator_check.earlier_peak_bytes)
        lines.append(f"before the recording the allocator's own peak was {earlier}")
    if result.oom is not None:
        lines += oom_lines(result.oom, history.start_us)
    return list(map(make_visible, lines))


def oom_lines(oom: OomVerdict, start_us: int | None) -> list[str]:
    """Return the verdict on an out-of-memory error."""
    lines = [
        f"out of memory {oom.count}×, last at {format_after(oom.time_us, start_us)}",
        *textwrap.wrap(oom.message, WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"  asked for {format_exactly(oom.requested_bytes)}; the segment for it, {format_bytes(oom.needed_bytes)},",
        f"  was short of memory by {'at most ' if oom.is_limited else ''}{oom.short_bytes:,} B",
        f"  CUDA had {format_bytes(oom.device_free_bytes)} free; PyTorch {format_bytes(oom.allocated_bytes)} allocated"
        f" and {format_bytes(oom.free_bytes)} free",
    ]
    if oom.outside_bytes is not None:
        lines.append(f"  outside PyTorch: {format_bytes(oom.outside_bytes)}")
    for candidate in oom.largest_free:
        usable = "" if candidate.is_usable else " (of no use to this request)"
        lines.append(
            f"  largest free block of the {candidate.pool} pool, stream {candidate.stream}: "
            f"{format_bytes(candidate.bytes)}{usable}"
        )
        lines += [
            f"    pinned by {format_bytes(pin.bytes)} {shorten(pin.owner or pin.label, 50)}"
            for pin in candidate.pinned_by
        ]
    return lines


def _proof(totals: Totals) -> str:
    if totals.bounds is None:
        return "exact"
    low, high = totals.bounds
    return f"at least {low:,} B" if high is None else f"between {low:,} and {high:,} B"


def _when(result: MemoryResult) -> str:
    return f"at {format_after(result.totals.peak_time_us, result.history.start_us)}"


def _moment(result: MemoryResult) -> str:
    """Return which moment the tables are of."""
    at = result.composition
    when = format_after(at.time_us, result.history.start_us)
    phase = f" in {at.phase}" if at.phase else ""
    what = "at the peak" if at.what == PEAK else f"at {at.what}"
    return make_visible(f"{what}, {when}{phase}: {format_bytes(at.allocated_bytes)} allocated")


def _category_table(result: MemoryResult) -> Table:
    columns = (
        Column("category", "category", right=False),
        Column("bytes", "bytes"),
        Column("share", "share"),
        Column("count", "count"),
        Column("evidence", "evidence", right=False),
    )
    at = result.composition
    cells = [
        (row.category, format_bytes(row.bytes), format_share(row.share), f"{row.count:,}", ", ".join(row.evidence))
        for row in at.by_category
    ]
    count = sum(row.count for row in at.by_category)
    cells.append(("all", format_bytes(at.allocated_bytes), format_share(1.0), f"{count:,}", ""))
    return Table(columns, cells, [])


def _stack_table(result: MemoryResult, top: int) -> Table:
    columns = (
        Column("bytes", "bytes"),
        Column("share", "share"),
        Column("count", "count"),
        Column("stack, innermost line of yours first", "stack", right=False, flexible=True),
    )
    rows = result.composition.by_stack
    cells = [(format_bytes(row.bytes), format_share(row.share), f"{row.count:,}", row.label) for row in rows[:top]]
    rest = rows[top:]
    if rest:
        total, count, share = (
            sum(row.bytes for row in rest),
            sum(row.count for row in rest),
            sum(row.share for row in rest),
        )
        cells.append((format_bytes(total), format_share(share), f"{count:,}", f"({len(rest)} more stacks)"))
    return Table(columns, cells, [])


def _largest_table(result: MemoryResult) -> Table:
    columns = (
        Column("largest", "bytes"),
        Column("category", "category", right=False),
        Column("phase", "phase", right=False),
        Column("owner or stack", "owner", right=False, flexible=True),
    )
    cells = [
        (format_bytes(row.bytes), row.category, _phase(row), row.owner or row.label)
        for row in result.composition.largest
    ]
    return Table(columns, cells, [])


def _phase(row: LargeRow) -> str:
    return "(before)" if row.is_from_before else row.phase or "—"


def _exact_table(result: MemoryResult, leaks: bool) -> Table:
    at = result.composition
    values: list[tuple[object, ...]] = [
        ("category", row.category, row.bytes, row.share, row.count, "", "", "") for row in at.by_category
    ]
    values += [("stack", row.label, row.bytes, row.share, row.count, "", "", "") for row in at.by_stack]
    share = 1 / at.allocated_bytes if at.allocated_bytes else 0.0
    values += [
        ("largest", row.label, row.bytes, row.bytes * share, 1, row.requested_bytes, row.phase or "", row.owner or "")
        for row in at.largest
    ]
    values += leak_rows(result.leaks) if leaks else []
    return Table(_EXACT, [], values)
