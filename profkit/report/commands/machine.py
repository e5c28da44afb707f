"""What a machine is, in words: the documents of ``profkit doctor`` and ``ceilings``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import TextWrapper
from typing import TYPE_CHECKING

from profkit.report import screen_width
from profkit.report.document import Column, Document, Lines, Row, Table
from profkit.report.units import SHARE, TEXT, Unit, four_digits
from profkit.run.work import Ceilings

if TYPE_CHECKING:
    from profkit.analysis.efficiency import Datasheet


_CHECK, _STATE = Column("check", "check", TEXT), Column("state", "state", TEXT)
_FOUND, _ADVICE = Column("found", "found", TEXT), Column("advice", "to do", TEXT)
_BESIDE_FOUND = len("temporary directory") + 2 + len("warning") + 2


def build_doctor_document(rows: Sequence[Row], *, can_record: bool, on_screen: bool) -> Document:
    """Return the checks; ``on_screen`` what to do stands below what was found, after an arrow, and both are wrapped."""
    exact = Table((_CHECK, _STATE, _FOUND, _ADVICE), rows)
    lines = [line for row in rows for line in _lines(row)]
    shown = (
        Table((_CHECK, _STATE, _FOUND), lines, is_wrong=lambda row: row["state"] == "failed") if on_screen else exact
    )
    answer = "this machine can record" if can_record else "this machine can record nothing"
    return Document("doctor", {"can_record": can_record, "findings": rows}, (shown, Lines([answer])), exact)


def _lines(row: Row) -> list[Row]:
    text = TextWrapper(screen_width() - _BESIDE_FOUND, break_long_words=False, break_on_hyphens=False)
    wrapped = text.wrap(row["found"])
    if row["advice"] is not None:
        text.initial_indent, text.subsequent_indent = "→ ", "  "
        wrapped += text.wrap(row["advice"])
    first = {"check": row["check"], "state": row["state"], "found": wrapped[0]}
    return [first, *({"check": "", "state": "", "found": line} for line in wrapped[1:])]


def _rate(value: float) -> str:
    divisor, prefix = (10**12, "T") if value >= 10**12 else (10**9, "G")
    return f"{four_digits(value / divisor)} {prefix}"


def _size(value: str) -> str:
    return f"{int(value.removesuffix(' B')) // 2**20:,} MiB" if value.endswith(" B") else value


_RATE = Unit(_rate)
_COLUMNS = (
    Column("of", "of", TEXT),
    Column("size", "size", Unit(_size)),
    Column("best_per_s", "best", _RATE),
    Column("median_per_s", "median", _RATE),
    Column("unit", "unit", TEXT),
    Column("datasheet_per_s", "datasheet", _RATE),
    Column("share", "% of datasheet", SHARE),
)


def build_ceilings_document(ceilings: Ceilings) -> Document:
    """Return the table of matrix products by type and of the copy; what a datasheet does not say is null."""
    from profkit.analysis.efficiency import find_datasheet  # loads numpy, which doctor does without

    device = ceilings.device
    table = Table(_COLUMNS, list(_rows(ceilings, find_datasheet(device.name))))
    facts = {
        **vars(device),
        "torch": ceilings.torch,
        "driver": ceilings.driver,
        "measured_utc": ceilings.measured_utc,
    }
    return Document("ceilings", {"device": facts, "rows": table.rows}, [table, Lines(_notes(ceilings))], table)


def _rows(ceilings: Ceilings, sheet: Datasheet | None) -> Iterator[Row]:
    measured = []
    for gemm in ceilings.gemm:
        peak = None if sheet is None else sheet.flops_per_s.get(gemm.dtype)
        size = f"{gemm.m}×{gemm.n}×{gemm.k}"
        measured.append((gemm.dtype, size, gemm.best_flops_per_s, gemm.median_flops_per_s, "FLOP/s", peak))
    copy, peak = ceilings.copy, None if sheet is None else sheet.bytes_per_s
    measured.append(("copy", f"{copy.bytes} B", copy.best_bytes_per_s, copy.median_bytes_per_s, "B/s", peak))
    for figures in measured:
        best, peak = figures[2], figures[-1]
        share = None if peak is None else best / peak
        yield dict(zip((column.key for column in _COLUMNS), (*figures, share), strict=True))


def _notes(ceilings: Ceilings) -> Iterator[str]:
    device = ceilings.device
    parts = [device.name]
    if device.clock_mhz is not None:
        parts.append(f"at {device.clock_mhz} MHz of {device.clock_max_mhz} under load")
    parts.append(f"torch {ceilings.torch}")
    if ceilings.driver is not None:
        parts.append(f"driver {ceilings.driver}")
    yield ", ".join([*parts, ceilings.measured_utc])
    yield "the matrices hold random normal numbers; the copy counts each byte twice, read and written"
