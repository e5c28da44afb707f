"""The document of ``profkit efficiency --attention``: time against operations, over all layers and layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from profkit.analysis.efficiency.attention import PARTS, AttentionPart, AttentionResult
from profkit.findings import Finding
from profkit.report.document import Column, Document, Lines, Table
from profkit.report.units import NS, TEXT, Unit

_RATIO = Unit(lambda value: f"{value:.3g}")
_EXACT = tuple(field.name for field in fields(AttentionPart))
_COLUMNS = (
    Column("part", "part", TEXT, flexible=True),
    Column("instances", "times"),
    Column("kernel_time_ns", "kernel time", NS),
    Column("time_ratio", "ratio", _RATIO),
    Column("operations", "FLOPs"),
    Column("operations_ratio", "ratio", _RATIO),
)
_LAYER_COLUMNS = (
    Column("layer", "layer"),
    *(Column(part, heading, NS) for part, heading in zip(PARTS, ("scores", "softmax", "value product"), strict=True)),
    Column("softmax_ratio", "softmax ratio", _RATIO),
)


def build_attention_document(result: AttentionResult, self_check: Sequence[Finding]) -> Document:
    """Return the three parts over all layers, then their times layer by layer."""
    whole = Table(_COLUMNS, [vars(part) for part in result.parts if part.layer is None])
    layers = _layer_rows(result)
    tables = [whole, Table(_LAYER_COLUMNS, layers)] if layers else [whole]
    every = Table(_COLUMNS, [vars(part) for part in result.parts], exact=_EXACT)
    return Document("efficiency", result.to_dict(), [*tables, Lines(_notes(result))], every, (), self_check)


def _layer_rows(result: AttentionResult) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for part in result.parts:
        if part.layer is not None:
            row = rows.setdefault(part.layer, {"layer": part.layer})
            row[part.part] = part.kernel_time_ns
            if part.part == PARTS[1]:
                row["softmax_ratio"] = part.time_ratio
    return list(rows.values())


def _notes(result: AttentionResult) -> list[str]:
    where = "" if result.range is None else f" within {result.range!r}"
    lines = [f"Kernel time of the forward pass{where}, all steps together; ratios are to the scores."]
    if result.work_source == "payload":
        lines.append("FLOPs are those stored in the ranges: matrix products only; a run's work.json has the softmax's.")
    elif result.work_source is not None:
        lines.append("FLOPs are all operations: matrix products, and everything else by profkit's formulas.")
    return lines
