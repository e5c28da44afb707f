"""The document of ``profkit ceilings``: what a device does at most, beside what a datasheet says."""

from __future__ import annotations

from typing import Any

from profkit.analysis.efficiency.work import Datasheet, find_datasheet
from profkit.report.document import Column, Document, Lines, Table
from profkit.report.units import SHARE, TEXT, Unit, four_digits
from profkit.run.work import Ceilings


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
    sheet = find_datasheet(ceilings.device.name)
    device = ceilings.device
    table = Table(_COLUMNS, _rows(ceilings, sheet))
    facts = {
        "name": device.name,
        "uuid": device.uuid,
        "clock_mhz": device.clock_mhz,
        "clock_max_mhz": device.clock_max_mhz,
        "torch": ceilings.torch,
        "driver": ceilings.driver,
        "measured_utc": ceilings.measured_utc,
    }
    return Document("ceilings", {"device": facts, "rows": table.rows}, [table, Lines(_notes(ceilings, sheet))], table)


def _rows(ceilings: Ceilings, sheet: Datasheet | None) -> list[dict[str, Any]]:
    measured = []
    for gemm in ceilings.gemm:
        peak = None if sheet is None else sheet.flops_per_s.get(gemm.dtype)
        size = f"{gemm.m}×{gemm.n}×{gemm.k}"
        measured.append((gemm.dtype, size, gemm.best_flops_per_s, gemm.median_flops_per_s, "FLOP/s", peak))
    copy, peak = ceilings.copy, None if sheet is None else sheet.bytes_per_s
    measured.append(("copy", f"{copy.bytes} B", copy.best_bytes_per_s, copy.median_bytes_per_s, "B/s", peak))
    return [
        {
            "of": of,
            "size": size,
            "best_per_s": best,
            "median_per_s": middle,
            "unit": unit,
            "datasheet_per_s": peak,
            "share": None if peak is None else best / peak,
        }
        for of, size, best, middle, unit, peak in measured
    ]


def _notes(ceilings: Ceilings, sheet: Datasheet | None) -> list[str]:
    device = ceilings.device
    parts = [device.name]
    if device.clock_mhz is not None:
        parts.append(f"at {device.clock_mhz} MHz of {device.clock_max_mhz} under load")
    parts.append(f"torch {ceilings.torch}")
    if ceilings.driver is not None:
        parts.append(f"driver {ceilings.driver}")
    lines = [
        ", ".join([*parts, ceilings.measured_utc]),
        "the matrices hold random normal numbers; the copy counts each byte twice, read and written",
    ]
    if sheet is not None:
        lines.append("the datasheet's rates are dense, at the clock and power that NVIDIA assumes")
    elif ceilings.driver is not None:
        lines.append("profkit has no datasheet of this GPU")
    return lines
