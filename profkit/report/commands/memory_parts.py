"""The tables of ``profkit memory --by module`` and ``--by phase``: a column for each use of the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from profkit.analysis.memory.composition import Composition
from profkit.analysis.memory.parts import NO_MODULE_KNOWN, PartRow, fold
from profkit.analysis.memory.places import PLACE_EVIDENCE
from profkit.report.document import UNKNOWN, Column, Lines, Row, Table
from profkit.report.units import SHARE, TEXT, Unit, format_count, format_share

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

_WORDS = {
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


def build_module_parts(at: Composition, title: str, top: int | None) -> list[Table | Lines]:
    """Return the tree of modules: of siblings that differ only in a number one row, and at most ``top`` rows."""
    rows = fold(at.by_module)
    # A module is never larger than the one around it, so the largest rows are a tree too.
    largest = sorted(rows, key=lambda row: (-row.bytes, len(row.path)))[: top or TOP_MODULES]
    shown = [row for row in rows if row in largest or len(row.path) == 1]
    name = Column("name", "module", TEXT, flexible=True, on_screen=_tree_name)
    table = _cross_table(name, shown, (row for row in rows if len(row.path) == 1), title)
    return [table, Lines(_notes(at, shown, len(rows) - len(shown)))]


def build_phase_part(at: Composition, title: str) -> Table:
    """Return what was allocated in each phase."""
    return _cross_table(Column("name", "allocated in", TEXT, flexible=True), at.by_phase, at.by_phase, title)


def exact_parts(at: Composition, by: str | None) -> Table:
    """Return the table of CSV: every module or phase with its bytes by category; modules include those in them."""
    rows = at.by_module if by == "module" else at.by_phase
    categories = list(dict.fromkeys(name for row in rows for name in row.categories))
    sizes = ("bytes", "own_bytes", "share", "count") if by == "module" else ("bytes", "share", "count")
    exact: list[Row] = [
        {str(by): "/".join(row.path), **{key: getattr(row, key) for key in sizes}, **_all(row, categories)}
        for row in rows
    ]
    return Table((), exact, exact=(str(by), *sizes, *categories))


def _all(row: PartRow, categories: Iterable[str]) -> dict[str, int]:
    return {name: row.categories.get(name, 0) for name in categories}


def _cross_table(name: Column, shown: Sequence[PartRow], top: Iterable[PartRow], title: str) -> Table:
    """Return rows with a column for each use that occurs; ``top`` are the rows that add up to all."""
    rows = [_cells(row) for row in shown]
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


def _cells(row: PartRow) -> dict[str, Any]:
    return {"name": row.name, "path": row.path, "number": row.number, **_uses(row), **_sizes(row)}


def _sizes(row: PartRow) -> dict[str, Any]:
    return {"bytes": row.bytes, "share": row.share}


def _uses(row: PartRow) -> Counter[str]:
    """Return a row's bytes by the uses that have a column."""
    uses: Counter[str] = Counter()
    for category, size in row.categories.items():
        uses[category if category in _COLUMNS else "other"] += size
    return uses


def _tree_name(row: Row) -> str:
    path: tuple[str, ...] = row["path"]
    times = f" ×{row['number']}" if row["number"] > 1 else ""
    return f"{' ' * (len(path) - 1)}{path[-1]}{times}"


def _notes(at: Composition, shown: Sequence[PartRow], hidden: int) -> Iterator[str]:
    if hidden:
        yield f"{format_count(hidden, 'smaller row')} counted in those around them; --top shows more"
    if any(len(row.path) > 1 or row.number > 1 for row in shown):
        yield "A module includes the modules inside it; × is how many a row stands for"
    known: Counter[str] = Counter()
    for row in at.by_module:
        if len(row.path) == 1:
            known.update(row.evidence)
    if at.allocated_bytes:
        shares = [(_WORDS[kind], known[kind] / at.allocated_bytes) for kind in PLACE_EVIDENCE if known[kind]]
        yield "Modules are known from: " + ", ".join(f"{words} {format_share(share)}" for words, share in shares)
    if any(row.path == (NO_MODULE_KNOWN,) for row in shown) and not known["identity"]:
        yield "`profkit run --memory` records which module each tensor belongs to"
