"""The documents of ``profkit export`` and ``profkit scrub``: what was written, for a viewer or to share."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

from profkit.analysis.opened import OpenedTrace
from profkit.analysis.self_check import SelfCheck
from profkit.names import kind_of
from profkit.report.document import Column, Document, Lines, Table
from profkit.report.units import BYTES, TEXT, format_count
from profkit.sharing import SharedCopy
from profkit.text_kinds import KERNEL, OPERATOR

_COLUMNS = (
    Column("file", "written", TEXT, flexible=True),
    Column("bytes", "size", BYTES),
    Column("open_with", "open it with", TEXT),
)
_VIEWERS = "ui.perfetto.dev, chrome://tracing"


def build_export_document(capture: Path, output: Path, opened: OpenedTrace, check: SelfCheck) -> Document:
    """Return which file was written, what opens it, and what stands in it."""
    rows = [{"file": str(output), "bytes": output.stat().st_size, "open_with": _VIEWERS}]
    table, counted = Table(_COLUMNS, rows), _count(opened)
    what = "kernel" if opened.recorded.measure == "gpu-kernel" else "CPU operator"
    streams = f" on {format_count(counted['stream_count'], 'stream')}" if what == "kernel" else ""
    line = (
        f"{format_count(counted['work_count'], what)}, {counted['work_ns']:,} ns in all{streams},"
        f" {counted['copy_count']:,} copies and fills,"
        f" {format_count(counted['call_count'], 'CUDA call')}, {format_count(counted['range_count'], 'range')}"
    )
    data = {"capture": str(capture), "files": rows, "time": counted}
    return Document("export", data, [table, Lines([line])], table, self_check=check.findings)


def _count(opened: OpenedTrace) -> dict[str, int]:
    trace = opened.recorded
    places = np.stack([trace.work.process, trace.work.device, trace.work.stream])
    return {
        "work_count": len(trace.work),
        "work_ns": int(trace.work.duration_ns.sum()),
        "stream_count": np.unique(places, axis=1).shape[1],
        "copy_count": len(trace.copies),
        "call_count": len(trace.calls),
        "range_count": len(trace.ranges),
    }


_KEPT_COLUMNS = (
    Column("kind", "kind", TEXT),
    Column("name", "names that stay", TEXT, flexible=True),
    Column("count", "names"),
)
_CODE = (KERNEL.title, OPERATOR.title)
_ALL = "all: --format json lists them"
_TOOLS = {"export": "nsys stats", "chrome": "Perfetto", "snapshot": "PyTorch's MemoryViz"}


def build_scrub_document(copy: SharedCopy) -> Document:
    """Return the names that stay in a copy, what of a run is not in it, and which programs open it.

    A name stands for all that differ from it in a number; those of kernels and operators, of which most are libraries',
    are counted. ``names`` in the JSON has every one.
    """
    counts = Counter(
        (kind, _ALL if kind in _CODE else kind_of(name)) for kind, names in copy.names.items() for name in names
    )
    rows = [{"kind": kind, "name": name, "count": count} for (kind, name), count in sorted(counts.items())]
    table = Table(_KEPT_COLUMNS, rows)
    lines = [f"{name}: not copied, {why}" for name, why in copy.left_out_files.items()]
    texts = format_count(copy.left_out_text_count, "text")
    lines.append(f"{copy.output} holds numbers and the names above; {texts} left out")
    tools = [_TOOLS[capture] for capture in copy.captures]
    if tools:
        lines.append(f"profkit opens the copy, and so does {' and '.join(tools)}")
    data = {**asdict(copy), "opens_in": ["profkit", *tools]}
    return Document("scrub", data, [table, Lines(lines)], table)
