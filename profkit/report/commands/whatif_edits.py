"""What ``profkit whatif`` shows of edits: what they rest on, and what the peak is made of after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profkit.analysis.whatif.answers import WhatIf
from profkit.analysis.whatif.outcome import EditedPeak, PartChange
from profkit.report.document import Column, Lines, Row, Table
from profkit.report.units import BYTES, TEXT, Unit, format_bytes, format_ns

_TOP_MODULES = 8
_SIGNED = Unit(lambda value: format_bytes(value) if value <= 0 else f"+{format_bytes(value)}")


def edited_parts(result: WhatIf) -> Iterator[Table | Lines]:
    """Yield the lines and tables of an edited program."""
    if result.search is not None:
        yield Lines(_found(result))
    if result.edited is None:
        return
    yield Lines(_evidence(result.edited))
    peak = result.edited
    if peak.by_category:
        yield Lines(_where(result, peak))
        yield _table("category", peak.by_category, len(peak.by_category))
        yield _table("module", peak.by_module, _TOP_MODULES)


def _found(result: WhatIf) -> Iterator[str]:
    size = format_bytes(result.capacity_bytes or 0)
    if result.edited is None:
        yield f"It fits in {size} as it is."
    elif result.search:
        yield f"The cheapest that fits in {size} (least time added, then fewest edits): {_command(result)}"
    else:
        yield f"Nothing that was tried fits in {size}. The least is needed by: {_command(result)}"


def _command(result: WhatIf) -> str:
    case = result.cases[-1]
    words = [f"--edit '{text}'" for text in case.edits]
    words += [f"--allocator {case.allocator}"] if case.allocator != result.cases[0].allocator else []
    return " ".join(words) or "no change"


def _evidence(peak: EditedPeak) -> Iterator[str]:
    for edit in peak.edits:
        yield f"{edit.text}: {edit.rests_on}"
        for line in edit.unknown:
            yield f"  not known: {line}"
    if peak.added_kernel_ns is not None:
        yield f"Computing again adds at least {format_ns(peak.added_kernel_ns)} to a step: its kernels alone"
    elif any(edit.recomputed for edit in peak.edits):
        yield "What computing again takes is not known: the run has no trace of these ranges"


def _where(result: WhatIf, peak: EditedPeak) -> Iterator[str]:
    phase = result.cases[1].phase
    place = f" at {peak.place}" if peak.place else ""
    yield f"The edited program's peak lies in {phase or 'no phase'}{place}"


def _table(what: str, parts: Sequence[PartChange], top: int) -> Table:
    columns = [
        Column("name", what, TEXT, flexible=True),
        Column("before_bytes", "today's peak", BYTES),
        Column("after_bytes", "edited peak", BYTES),
        Column("change", "change", _SIGNED),
    ]
    changed = [part for part in parts if part.before_bytes != part.after_bytes]
    shown = parts if what == "category" else changed[:top]
    rows: list[Row] = [{**vars(part), "change": part.after_bytes - part.before_bytes} for part in shown]
    return Table(columns, rows)
