"""The document of ``profkit memory``: the peaks, what a moment was made of, why memory ran out; two peaks compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, Literal

from profkit.analysis.memory.compare import Comparison, Part
from profkit.analysis.memory.device import Composition
from profkit.analysis.memory.failures import LeakCheck, OomVerdict
from profkit.analysis.memory.opened_snapshot import FAILURE, PEAK, MemoryResult, Totals
from profkit.analysis.memory.places import NO_MODULE_KNOWN, PLACE_EVIDENCE, PartRow, fold, names_modules
from profkit.report import shorten
from profkit.report.document import UNKNOWN, Column, Document, Lines, Row, Table
from profkit.report.units import (
    BYTES,
    SHARE,
    SIGNED_BYTES,
    TEXT,
    Unit,
    format_after,
    format_bytes,
    format_count,
    format_exactly,
    format_share,
)

TOP_STACKS = 6

EVIDENCE_WORDS = {
    "identity": "known tensor",
    "stack": "call stack",
    "lifetime": "guessed from lifetime",
    "none": "unknown",
}
"""How a category is known: key of the JSON → what people read."""

_LEAK_STEPS = 10
_PIN_WIDTH = 50
_EXACT = ("section", "name", "bytes", "share", "count", "requested_bytes", "phase", "owner")
_EVIDENCE = Unit(lambda kinds: ", ".join(EVIDENCE_WORDS[kind] for kind in kinds), right=False)


_EQUAL = Unit(lambda equal: f"{equal[0]:,} × {format_bytes(equal[1])}" if equal[0] > 1 else format_bytes(equal[1]))
"""Equal allocations: how many, and the bytes of each."""


By = Literal["module", "category", "stack", "phase"]
BY: tuple[By, ...] = ("module", "category", "stack", "phase")


def build_memory_document(
    result: MemoryResult, *, by: By | None = None, top: int | None = None, leaks: bool = False
) -> Document:
    """Return the account of one device's memory.

    With ``by`` it shows that table alone, and CSV holds it; else those of categories, stacks and the largest. Stacks
    beyond ``top`` are added up in one more line. JSON always holds all, also what each step left behind (``leaks``).
    """
    parts: list[Table | Lines] = [Lines(_head_lines(result), "head")]
    if result.oom is not None:
        parts.append(_oom_lines(result.oom, result.history.zero_us))
    parts += _tables(result, by, top)
    if leaks and result.leaks.steps:
        parts.append(_leak_table(result.leaks))
    hint = by is None and names_modules(result.composition.by_module)
    parts.append(Lines([*_notes(result, hint=hint), *(_leak_lines(result.leaks) if leaks else ())]))
    exact = _exact_parts(result.composition, by) if by in ("module", "phase") else _exact_table(result, leaks, by)
    return Document("memory", result.to_dict(), parts, exact, result.warnings)


def _tables(result: MemoryResult, by: By | None, top: int | None) -> list[Table | Lines]:
    if by == "module":
        return _build_module_parts(result.composition, _moment(result), top)
    if by == "phase":
        phases = result.composition.by_phase
        return [_cross_table(Column("name", "allocated in", TEXT, flexible=True), phases, phases, _moment(result))]
    stacks = _stack_table(result, top or TOP_STACKS, "" if by is None else _moment(result))
    if by is None:
        return [_category_table(result), stacks, _largest_table(result)]
    return [_category_table(result) if by == "category" else stacks]


def _head_lines(result: MemoryResult) -> list[str]:
    totals, history = result.totals, result.history
    recorded = f"{history.events:,} events"
    if history.start_us is not None:
        recorded += f" over {format_after(history.end_us, history.start_us)}"
    whole = "complete" if history.complete else "incomplete"
    when = format_after(totals.peak_time_us, history.zero_us)
    return [
        f"{PurePath(result.snapshot).name}, device {totals.device}: {recorded}, history {whole}",
        f"allocated  peak {format_exactly(totals.allocated_peak_bytes)}, {_proof(totals)}, at {when}",
        f"requested  peak {format_exactly(totals.requested_peak_bytes)}",
        f"reserved   peak {format_exactly(totals.reserved_peak_bytes)}",
        f"at the end {format_bytes(totals.allocated_end_bytes)} allocated of "
        f"{format_bytes(totals.reserved_end_bytes)} reserved",
        *(
            f"device {other.device}: peak {format_bytes(other.allocated_peak_bytes)} allocated, {_proof(other)}, "
            f"{format_bytes(other.reserved_peak_bytes)} reserved"
            for other in result.others
        ),
    ]


def _proof(totals: Totals) -> str:
    if totals.bounds is None:
        return "exact"
    low, high = totals.bounds
    if high is None:
        return "a lower bound: the true peak may be higher"
    return f"not proven: between {low:,} and {high:,} B"


_MOMENTS = {PEAK: "At the peak", FAILURE: "When the allocation failed"}


def _moment(result: MemoryResult) -> str:
    at = result.composition
    what = _MOMENTS.get(at.what, f"At {at.what}")
    phase = f" in {at.phase}" if at.phase else ""
    when = format_after(at.time_us, result.history.zero_us)
    return f"{what}, {when}{phase}: {format_bytes(at.allocated_bytes)} allocated"


def _category_table(result: MemoryResult) -> Table:
    columns = (
        Column("category", "category", TEXT),
        Column("bytes", "bytes", BYTES),
        Column("share", "share", SHARE),
        Column("count", "count"),
        Column("evidence", "known from", _EVIDENCE, flexible=True),
    )
    at = result.composition
    count = sum(row.count for row in at.by_category)
    whole = {"category": "all", "bytes": at.allocated_bytes, "share": 1.0, "count": count}
    return Table(columns, [vars(row) for row in at.by_category], _moment(result), rest=whole)


def _stack_table(result: MemoryResult, top: int, title: str) -> Table:
    columns = (
        Column("bytes", "bytes", BYTES),
        Column("share", "share", SHARE),
        Column("count", "count"),
        Column("label", "your line ← called from", TEXT, flexible=True),
    )
    rows: list[Row] = [vars(row) for row in result.composition.by_stack]
    rest: dict[str, Any] = {key: sum(row[key] for row in rows[top:]) for key in ("bytes", "share", "count")}
    rest["label"] = format_count(len(rows) - top, "smaller place")
    return Table(columns, rows[:top], title, rest=rest if rows[top:] else None)


def _largest_table(result: MemoryResult) -> Table:
    columns = (
        Column("equal", "largest", _EQUAL),
        Column("category", "category", TEXT),
        Column("phase", "phase", TEXT),
        Column("name", "tensor, or your line", TEXT, flexible=True),
    )
    rows = [
        {
            "equal": (row.count, row.bytes),
            "category": row.category,
            "phase": "(before)" if row.is_from_before else row.phase,
            "name": row.owner or row.label,
        }
        for row in result.composition.largest_groups
    ]
    return Table(columns, rows)


def _notes(result: MemoryResult, *, hint: bool) -> Iterator[str]:
    at, history, check, some = result.composition, result.history, result.allocator_check, result.fragmentation
    if result.phases:
        yield "Peak by phase: " + ", ".join(f"{phase.name} {format_bytes(phase.peak_bytes)}" for phase in result.phases)
    if at.allocated_bytes:
        shares = [(EVIDENCE_WORDS[kind], size / at.allocated_bytes) for kind, size in at.evidence.items() if size]
        yield "Categories are known from: " + ", ".join(f"{words} {format_share(share)}" for words, share in shares)
    when = "the peak" if at.what == PEAK else "this moment"
    yield (
        f"At {when} PyTorch held {format_bytes(some.reserved_bytes)} from CUDA, {format_bytes(some.free_bytes)} of it"
        f" unused ({format_share(some.free_share)}); {format_bytes(some.padding_bytes)} lost to rounding"
    )
    if check is not None and check.agrees and not check.is_from_before:
        yield "PyTorch's own peaks, recorded by the run, agree to the byte"
    if check is not None and check.earlier_peak_bytes and not history.complete:
        yield f"Before recording began PyTorch's own peak was {format_exactly(check.earlier_peak_bytes)}"
    if check is not None and check.unread_saved_tensors:
        tensors = format_count(check.unread_saved_tensors, "tensor")
        yield f"{tensors} kept for backward could not be found while recording; such memory is guessed from lifetime"
    if hint:
        yield "--by module shows what each module held"


def _oom_lines(oom: OomVerdict, zero_us: int) -> Lines:
    limit = "up to " if oom.is_limited else ""
    lines = [
        oom.message,
        f"asked for {format_exactly(oom.requested_bytes)}, for which PyTorch requested a segment of"
        f" {format_bytes(oom.needed_bytes)} from CUDA; it needed {limit}{format_exactly(oom.short_bytes)} more",
        f"CUDA had {format_bytes(oom.device_free_bytes)} free; PyTorch had {format_bytes(oom.allocated_bytes)}"
        f" allocated and {format_bytes(oom.free_bytes)} unused",
    ]
    if oom.fitting_settings:
        names = ", ".join(name or "the default settings" for name in oom.fitting_settings)
        lines.append(f"simulated, the request fits under other settings of the allocator: {names}")
    elif oom.fitting_settings is not None:
        lines.append("simulated, no other setting of the allocator lets the request fit")
    if oom.outside_bytes is not None:
        lines.append(f"used outside PyTorch: {format_bytes(oom.outside_bytes)}")
    for candidate in oom.largest_free:
        usable = "" if candidate.is_usable else " (this request could not use it)"
        pins = [
            f"{format_bytes(pin.bytes)} {shorten(pin.owner or pin.label, _PIN_WIDTH)}" for pin in candidate.pinned_by
        ]
        pinned = f"; kept by {', '.join(pins)}" if pins else ""
        lines.append(
            f"largest unused block, {candidate.pool} pool, stream {candidate.stream}:"
            f" {format_bytes(candidate.bytes)}{usable}{pinned}"
        )
    times = format_count(oom.count, "time")
    return Lines(lines, title=f"Out of memory {times}, last at {format_after(oom.time_us, zero_us)}:")


def _leak_table(check: LeakCheck) -> Table:
    columns = (
        Column("bytes", "left behind", BYTES),
        Column("began_in", "began in", TEXT),
        Column("step", "alive after", TEXT),
        Column("stack", "most of it from", TEXT, flexible=True),
    )
    rows = [
        {**vars(step), "stack": step.by_stack[0].label if step.by_stack else ""} for step in check.steps[-_LEAK_STEPS:]
    ]
    return Table(columns, rows)


def _leak_lines(check: LeakCheck) -> Iterator[str]:
    if len(check.steps) < 2:
        yield "Leaks: unknown, the history has fewer than three whole steps"
    elif not check.suspects:
        yield "Leaks: none; no line keeps more from step to step"
    for row in check.suspects:
        often = "per step" if row.every == 1 else f"every {row.every} steps"
        yield f"May leak: {format_bytes(row.bytes)} in {format_count(row.count, 'allocation')} {often}, {row.label}"


def _exact_table(result: MemoryResult, leaks: bool, by: By | None) -> Table:
    at = result.composition
    rows: list[Row] = []
    if by != "stack":
        rows += [{"section": "category", "name": row.category, **vars(row)} for row in at.by_category]
    if by != "category":
        rows += [{"section": "stack", "name": row.label, **vars(row)} for row in at.by_stack]
    if by is None:
        whole = at.allocated_bytes
        rows += [
            {"section": "largest", "name": row.label, "share": row.bytes * (1 / whole) if whole else 0.0, **vars(row)}
            for row in at.largest
        ]
    if leaks:
        rows += [
            # The phase is the step after which the memory is still there.
            {"section": "left behind", "name": row.label, **vars(row), "phase": step.step}
            for step in result.leaks.steps
            for row in step.by_stack
        ]
    return Table((), rows, exact=_EXACT)


TOP_MODULES = 30

_COLUMNS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer state": "optim.",
    "activations": "activ.",
    "temporaries": "temp.",
    "other": "other",
    "unknown": "unknown",
}
"""Use of memory → heading; with a module's name they must fit a screen."""

_MANY_COLUMNS = 6
"""With this many uses there is no room for shares."""

_PLACE_WORDS = {
    "identity": "known tensor",
    "code": "recorded with the compiled code",
    "metadata": "recorded with the allocation",
    "range": "ranges open at that time",
    "none": "unknown",
}
"""How a module is known: key of the JSON → what people read."""


def _mebibytes(value: int) -> str:
    if not value:
        return UNKNOWN
    size = value / 2**20
    if size < 0.05:
        return "<0.1"
    return f"{size:,.0f}" if round(size, 1) >= 1000 else f"{size:.1f}"


_MIB = Unit(_mebibytes)


def _build_module_parts(at: Composition, title: str, top: int | None) -> list[Table | Lines]:
    rows = fold(at.by_module)
    # A module is never larger than the one around it, so the largest rows are a tree too.
    largest = sorted(rows, key=lambda row: (-row.bytes, len(row.path)))[: top or TOP_MODULES]
    shown = [row for row in rows if row in largest or len(row.path) == 1]
    name = Column("name", "module", TEXT, flexible=True, on_screen=_tree_name)
    table = _cross_table(name, shown, (row for row in rows if len(row.path) == 1), title)
    return [table, Lines(_module_notes(at, shown, len(rows) - len(shown)))]


def _exact_parts(at: Composition, by: str) -> Table:
    rows = at.by_module if by == "module" else at.by_phase
    categories = list(dict.fromkeys(name for row in rows for name in row.categories))
    sizes = ("bytes", "own_bytes", "share", "count") if by == "module" else ("bytes", "share", "count")
    exact: list[Row] = [
        {
            by: "/".join(row.path),
            **{key: getattr(row, key) for key in sizes},
            **{name: row.categories.get(name, 0) for name in categories},
        }
        for row in rows
    ]
    return Table((), exact, exact=(by, *sizes, *categories))


def _cross_table(name: Column, shown: Sequence[PartRow], top: Iterable[PartRow], title: str) -> Table:
    rows = [{**vars(row), **_uses(row)} for row in shown]
    whole: Counter[str] = Counter()
    for row in top:
        whole.update({"bytes": row.bytes, **_uses(row)})
    used = [Column(use, heading, _MIB) for use, heading in _COLUMNS.items() if whole[use]]
    columns = (
        name,
        *used,
        Column("bytes", "total", _MIB),
        Column("share", "share", SHARE, wide=len(used) >= _MANY_COLUMNS),
    )
    rest = {name.key: "all", **{column.key: whole[column.key] for column in (*used, columns[-2])}, "share": 1.0}
    return Table(columns, rows, f"{title}; figures in MiB", rest=rest)


def _uses(row: PartRow) -> Counter[str]:
    uses: Counter[str] = Counter()
    for category, size in row.categories.items():
        uses[category if category in _COLUMNS else "other"] += size
    return uses


def _tree_name(row: Row) -> str:
    path: tuple[str, ...] = row["path"]
    times = f" ×{row['number']}" if row["number"] > 1 else ""
    return f"{' ' * (len(path) - 1)}{path[-1]}{times}"


def _module_notes(at: Composition, shown: Sequence[PartRow], hidden: int) -> Iterator[str]:
    if hidden:
        yield f"{format_count(hidden, 'smaller row')} counted in those around them; --top shows more"
    if any(len(row.path) > 1 or row.number > 1 for row in shown):
        yield "A module includes the modules inside it; × is how many a row stands for"
    known: Counter[str] = Counter()
    for row in at.by_module:
        if len(row.path) == 1:
            known.update(row.evidence)
    if at.allocated_bytes:
        shares = [(_PLACE_WORDS[kind], known[kind] / at.allocated_bytes) for kind in PLACE_EVIDENCE if known[kind]]
        yield "Modules are known from: " + ", ".join(f"{words} {format_share(share)}" for words, share in shares)
    if any(row.path == (NO_MODULE_KNOWN,) for row in shown) and not known["identity"]:
        yield "`profkit run --memory` records which module each tensor belongs to"


TOP_PARTS = 15

_KIND = Unit(lambda kind: "lost to rounding" if kind == "padding" else kind, right=False)
_PART_COLUMNS = (
    Column("bytes", "change", SIGNED_BYTES),
    Column("kind", "kind", _KIND),
    Column("count", "count"),
    Column("stack", "tensor, or your line", TEXT, flexible=True),
)


def memory_parts(comparison: Comparison, top: int) -> list[Table | Lines]:
    """Return what ``profkit compare`` shows of two peaks, and the ``top`` largest parts of their difference."""
    if _is_same(comparison):
        return [_compared_head(comparison)]
    kinds = [{"bytes": size, "kind": kind} for kind, size in comparison.by_kind.items()]
    kinds.append({"bytes": comparison.difference_bytes, "kind": "all"})
    changed = [part for part in comparison.parts if part.bytes]
    rest: dict[str, Any] | None = None
    if hidden := changed[top:]:
        rest = {
            "bytes": sum(part.bytes for part in hidden),
            "count": sum(part.count for part in hidden),
            "stack": format_count(len(hidden), "smaller place"),
        }
    parts = Table(_PART_COLUMNS, [_part_row(part) for part in changed[:top]], rest=rest)
    return [_compared_head(comparison), Table(_PART_COLUMNS[:2], kinds), parts]


def memory_table(comparison: Comparison) -> Table:
    return Table(_PART_COLUMNS, [_part_row(part) for part in comparison.parts])


def _compared_head(comparison: Comparison) -> Lines:
    difference = f"{SIGNED_BYTES.show(comparison.difference_bytes)} ({comparison.difference_bytes:+,} B)"
    change = f"the peak changed by {difference}"
    if _is_same(comparison):
        count = format_count(sum(part.count for part in comparison.parts), "allocation")
        change = f"no change in {count}: both peaks consist of the same ones"
    return Lines(
        [
            f"before {format_bytes(comparison.before_peak_bytes):>11}  {PurePath(comparison.before).name}",
            f"after  {format_bytes(comparison.after_peak_bytes):>11}  {PurePath(comparison.after).name}",
            f"{change}{'' if comparison.exact else '; at least one of the peaks is not proven'}",
        ],
        "head",
    )


def _is_same(comparison: Comparison) -> bool:
    return all(part.kind == "same" for part in comparison.parts)


def _part_row(part: Part) -> dict[str, Any]:
    name = f"{part.label} and {part.owner_count - 1:,} more" if part.owner_count > 1 else part.label
    return {"bytes": part.bytes, "kind": part.kind, "count": part.count, "stack": name}
