"""Print what the parts of attention take: time against FLOPs, over all layers and layer by layer."""

from __future__ import annotations

from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.efficiency.attention import PARTS, AttentionPart, AttentionResult
from profkit.report.formats import Column, Format, Table, render_csv, render_json
from profkit.report.old_document import Document, render_document
from profkit.report.self_check import check_to_dict, check_warnings, failure_lines
from profkit.report.units import format_ns

_COLUMNS = (
    Column("part", "part", right=False, flexible=True),
    Column("count", "instances"),
    Column("time", "kernel_time_ns"),
    Column("ratio", "time_ratio"),
    Column("FLOPs", "operations"),
    Column("ratio", "operations_ratio"),
)
_EXACT = tuple(Column(field, field) for field in AttentionPart.__dataclass_fields__)
_LAYER_COLUMNS = (
    Column("layer", "layer"),
    *(Column(heading, name) for heading, name in zip(("scores", "softmax", "value product"), PARTS, strict=True)),
    Column("softmax ratio", "time_ratio"),
)


def render_attention(
    result: AttentionResult, check: SelfCheck, style: Format = "table", *, full_names: bool = False
) -> str:
    """Return the parts as text; a figure that is not known is a dash, in CSV an empty cell, in JSON null."""
    if style == "json":
        return render_json({**result.to_dict(), "warnings": check_warnings(check), "self_check": check_to_dict(check)})
    if style == "csv":
        values = [[getattr(part, column.key) for column in _EXACT] for part in result.parts]
        return render_csv(Table(_EXACT, [], values))
    tables = [_whole_table(result), *([layers] if (layers := _layer_table(result)).cells else [])]
    document = Document(tables, failure_lines(check), notes=_notes(result))
    return render_document(document, style, full_names=full_names)


def _notes(result: AttentionResult) -> list[str]:
    where = "" if result.range is None else f" within {result.range!r}"
    lines = [f"kernel time of the forward pass{where}, all steps together; ratios are to the scores"]
    if result.work_source == "payload":
        lines.append("FLOPs are what the ranges carry: matrix products alone; a softmax's are in a run's work.json")
    elif result.work_source is not None:
        lines.append("FLOPs are all operations: matrix products, and by profkit's formulas everything else")
    return lines


def _whole_table(result: AttentionResult) -> Table:
    parts = [part for part in result.parts if part.layer is None]
    cells = [[_cell(column.key, getattr(part, column.key)) for column in _COLUMNS] for part in parts]
    return Table(_COLUMNS, cells, cells)


def _layer_table(result: AttentionResult) -> Table:
    by_layer: dict[int, dict[str, AttentionPart]] = {}
    for part in result.parts:
        if part.layer is not None:
            by_layer.setdefault(part.layer, {})[part.part] = part
    cells = []
    for layer, parts in by_layer.items():
        ordered = [parts[name] for name in PARTS]
        times = [format_ns(part.kernel_time_ns) for part in ordered]
        cells.append([str(layer), *times, _cell("time_ratio", ordered[1].time_ratio)])
    return Table(_LAYER_COLUMNS, cells, cells)


def _cell(key: str, value: object) -> str:
    if value is None:
        return "–"
    if key.endswith("_ns"):
        return format_ns(int(str(value)))
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
