"""The document of ``profkit scrub``: what is in a copy, so that a person can look before they share it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from profkit.names import kind_of
from profkit.report.document import Column, Document, Lines, Table
from profkit.report.units import TEXT, format_count
from profkit.sharing import SharedCopy
from profkit.text_kinds import KERNEL, OPERATOR

_COLUMNS = (
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
    table = Table(_COLUMNS, rows)
    lines = [f"{name}: not copied, {why}" for name, why in copy.left_out_files.items()]
    texts = format_count(copy.left_out_text_count, "text")
    lines.append(f"{copy.output} holds numbers and the names above; {texts} left out")
    tools = [_TOOLS[capture] for capture in copy.captures]
    if tools:
        lines.append(f"profkit opens the copy, and so does {' and '.join(tools)}")
    data = {**asdict(copy), "opens_in": ["profkit", *tools]}
    return Document("scrub", data, [table, Lines(lines)], table)
