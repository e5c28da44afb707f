"""The document of ``profkit doctor``: what a machine can record."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import TextWrapper
from typing import Protocol

from profkit.report.document import Column, Document, Lines, Row, Table
from profkit.report.text import screen_width
from profkit.report.units import TEXT


class Checked(Protocol):
    """What a check of `profkit.launch.doctor` found; this layer may not import it."""

    @property
    def check(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def found(self) -> str: ...
    @property
    def advice(self) -> str | None: ...


_CHECK, _STATE = Column("check", "check", TEXT), Column("state", "state", TEXT)
_FOUND, _ADVICE = Column("found", "found", TEXT), Column("advice", "to do", TEXT)
_BESIDE_FOUND = len("temporary directory") + 2 + len("warning") + 2


def build_doctor_document(checks: Sequence[Checked], *, can_record: bool, on_screen: bool) -> Document:
    """Return the checks; ``on_screen`` what to do stands below what was found, after an arrow, and both are wrapped."""
    keys = ("check", "state", "found", "advice")
    rows: list[Row] = [{key: getattr(check, key) for key in keys} for check in checks]
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
