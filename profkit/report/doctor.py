"""Print what a machine can record."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import TextWrapper
from typing import Protocol

from profkit.report.formats import Column, Format, Table, make_visible, render_json, screen_width
from profkit.report.plain_table import render_plain


class Found(Protocol):
    """A finding of `profkit.launch.doctor`, which this layer may not import."""

    @property
    def check(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def found(self) -> str: ...
    @property
    def advice(self) -> str | None: ...


_COLUMNS = (
    Column("check", "check", right=False),
    Column("state", "state", right=False),
    Column("found", "found", right=False),
)
_BESIDE_FOUND = len("temporary directory") + 2 + len("warning") + 2
_ADVICE = Column("to do", "advice", right=False)


def render_findings(findings: Sequence[Found], *, can_record: bool, style: Format = "table") -> str:
    """Return the findings; on a screen what to do stands under the finding, after an arrow."""
    rows = [(finding.check, finding.state, finding.found, finding.advice) for finding in findings]
    if style == "json":
        keys = ("check", "state", "found", "advice")
        return render_json({"can_record": can_record, "findings": [dict(zip(keys, row, strict=True)) for row in rows]})
    if style != "table":
        cells = [(check, state, found, advice or "") for check, state, found, advice in rows]
        return render_plain(Table((*_COLUMNS, _ADVICE), cells, rows), style)
    lines = [line for finding in findings for line in _lines(finding)]
    return render_plain(Table(_COLUMNS, lines, lines), style)


def _lines(finding: Found) -> list[tuple[str, str, str]]:
    """Return a finding as rows of a screen: its text and what to do wrapped, nothing left out."""
    text = TextWrapper(screen_width() - _BESIDE_FOUND, break_long_words=False, break_on_hyphens=False)
    wrapped = text.wrap(make_visible(finding.found))
    if finding.advice is not None:
        text.initial_indent, text.subsequent_indent = "→ ", "  "
        wrapped += text.wrap(make_visible(finding.advice))
    heads = [(finding.check, finding.state), *[("", "")] * (len(wrapped) - 1)]
    return [(check, state, text) for (check, state), text in zip(heads, wrapped, strict=True)]
