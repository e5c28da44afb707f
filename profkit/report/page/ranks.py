"""Section 4, of a run of several ranks: who is late and why, who waits for whom as a picture, groups and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from profkit.analysis.ranks.comparison import RanksResult
from profkit.report.commands.late_rank import describe_ranks
from profkit.report.commands.ranks import build_ranks_document
from profkit.report.page.markup import view_parts, view_table, without_folders
from profkit.report.text import make_visible
from profkit.report.units import format_ns

MOST_IN_MATRIX = 64
"""A matrix of more ranks than this is no picture: the table names those that others wait for most."""

MOST_UNFOLDED = 16
"""So many ranks, the most unusual ones, are shown at once."""

_WIDEST, _LARGEST_CELL = 640, 64


def build_ranks(result: RanksResult, run: str) -> dict[str, Any]:
    """Return the sentences, the matrix of waits and the tables of ``profkit ranks``; most of many ranks are folded."""
    document = build_ranks_document(result, run, top=None)
    table = document.csv
    unfolded = replace(table, rows=table.rows[:MOST_UNFOLDED])
    return {
        "lines": describe_ranks(result),
        "matrix": _matrix(result) if len(result.ranks) <= MOST_IN_MATRIX else None,
        "parts": view_parts([unfolded if part is table else part for part in document.parts[1:]]),
        "folded": view_table(replace(table, rows=table.rows[MOST_UNFOLDED:], title="")),
        "lost": [without_folders(make_visible(finding.message)) for finding in document.findings],
    }


def _matrix(result: RanksResult) -> dict[str, Any] | None:
    """Return the cells of the matrix, each as dark as its wait is long; None if nobody waits."""
    waits, steps = result.waits_ns, max(result.step_count, 1)
    longest = int(waits.max())
    if not longest:
        return None
    size = min(_WIDEST // len(result.ranks), _LARGEST_CELL)
    numbers = [rank.rank for rank in result.ranks]
    cells = [
        {
            "x": to * size,
            "y": here * size,
            "share": round(int(waits[here, to]) / longest, 3),
            "text": f"rank {numbers[here]} waits {format_ns(round(int(waits[here, to]) / steps))} a step"
            f" for rank {numbers[to]}",
        }
        for here in range(len(numbers))
        for to in range(len(numbers))
        if waits[here, to]
    ]
    # Where there are many ranks, not every one has room for its number.
    every = -(-24 // size)
    labels = [{"at": at * size + size // 2, "rank": rank} for at, rank in enumerate(numbers) if at % every == 0]
    return {"size": size, "whole": size * len(numbers), "cells": cells, "labels": labels}
