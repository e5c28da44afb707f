"""Print what a device was measured to do at most, beside what its datasheet says."""

from __future__ import annotations

from typing import Any

from profkit.analysis.efficiency.datasheet import Datasheet, find_datasheet
from profkit.report.formats import Column, Format, Table, make_visible, render_json
from profkit.report.plain_table import render_plain
from profkit.report.units import format_share, four_digits
from profkit.run.ceilings import Ceilings, Device

_COLUMNS = (
    Column("of", "of", right=False),
    Column("size", "size"),
    Column("best", "best_per_s"),
    Column("median", "median_per_s"),
    Column("unit", "unit", right=False),
    Column("datasheet", "datasheet_per_s"),
    Column("best of it", "share"),
)
_UNKNOWN = "–"


def render_ceilings(ceilings: Ceilings, style: Format = "table") -> str:
    """Return the table of matrix products by type and of the copy; JSON has the exact figures, null if unknown."""
    sheet = find_datasheet(ceilings.device.name)
    rows = _rows(ceilings, sheet)
    if style == "json":
        keys = [column.key for column in _COLUMNS]
        return render_json({"device": _device(ceilings), "rows": [dict(zip(keys, row, strict=True)) for row in rows]})
    table = Table(_COLUMNS, [_cells(row) for row in rows], [["" if v is None else v for v in row] for row in rows])
    text = render_plain(table, style)
    return text if style == "csv" else f"{text}\n\n{_note(ceilings, sheet)}"


def _rows(ceilings: Ceilings, sheet: Datasheet | None) -> list[tuple[Any, ...]]:
    """Return of what, its size, the best and the median rate, the unit, the datasheet's rate and the best's share."""
    rows = []
    for one in ceilings.gemm:
        peak = None if sheet is None else sheet.flops_per_s.get(one.dtype)
        size = f"{one.m}×{one.n}×{one.k}"
        rows.append((one.dtype, size, one.best_flops_per_s, one.median_flops_per_s, "FLOP/s", peak))
    copy, peak = ceilings.copy, None if sheet is None else sheet.bytes_per_s
    rows.append(("copy", f"{copy.bytes} B", copy.best_bytes_per_s, copy.median_bytes_per_s, "B/s", peak))
    return [(*row, None if row[5] is None else row[2] / row[5]) for row in rows]


def _cells(row: tuple[Any, ...]) -> list[str]:
    of, size, best, middle, unit, peak, share = row
    divisor, prefix = (10**12, "T") if max(best, peak or 0) >= 10**12 else (10**9, "G")
    return [
        of,
        f"{int(size.removesuffix(' B')) // 2**20:,} MiB" if unit == "B/s" else size,
        four_digits(best / divisor),
        four_digits(middle / divisor),
        prefix + unit,
        _UNKNOWN if peak is None else four_digits(peak / divisor),
        _UNKNOWN if share is None else format_share(share),
    ]


def _note(ceilings: Ceilings, sheet: Datasheet | None) -> str:
    lines = [_about(ceilings), "random normal numbers; the copy counts each byte twice, read and written"]
    if sheet is not None:
        lines.append("the datasheet's rates are dense, at the clock and power that NVIDIA assumes")
    elif ceilings.driver is not None:
        lines.append("this GPU is not in profkit's table of datasheets")
    return "\n".join(lines)


def _about(ceilings: Ceilings) -> str:
    device = ceilings.device
    parts = [make_visible(device.name), *_clock(device), f"torch {ceilings.torch}"]
    parts += [] if ceilings.driver is None else [f"driver {ceilings.driver}"]
    return ", ".join([*parts, ceilings.measured_utc])


def _clock(device: Device) -> list[str]:
    if device.clock_mhz is None:
        return []
    return [f"at {device.clock_mhz} MHz of {device.clock_max_mhz} under load"]


def _device(ceilings: Ceilings) -> dict[str, Any]:
    device = ceilings.device
    return {
        "name": device.name,
        "uuid": device.uuid,
        "clock_mhz": device.clock_mhz,
        "clock_max_mhz": device.clock_max_mhz,
        "torch": ceilings.torch,
        "driver": ceilings.driver,
        "measured_utc": ceilings.measured_utc,
    }
