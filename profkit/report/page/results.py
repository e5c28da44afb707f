"""What the commands would print: of a capture, each when a section first asks for it, its ranks, and two captures."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cached_property
from typing import Any

from profkit.analysis.causes.advice import AdviceResult, find_advice
from profkit.analysis.compare.comparison import CaptureComparison, compare_captures
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.kernels.summary import KernelsResult
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.ranks.comparison import RanksResult
from profkit.analysis.step_replay.lanes import StepLanes
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import Summary
from profkit.findings import Finding
from profkit.report.commands.compare import build_compare_document, describe_difference
from profkit.report.commands.late_rank import describe_ranks
from profkit.report.commands.ranks import build_ranks_document
from profkit.report.document import Column, Lines, Table
from profkit.report.page.markup import view_parts, view_table, without_folders
from profkit.report.text import make_visible
from profkit.report.units import CHANGE, format_ns
from profkit.run.edits import parse_edits
from profkit.run.manifest import Manifest

_MOST = 200


class Results:
    """The results of one capture; None where it did not record what a result is of."""

    def __init__(self, capture: OpenedCapture) -> None:
        self.capture = capture
        self.name = without_folders(str(capture.path))
        """The capture as commands on the page name it."""

    @property
    def manifest(self) -> Manifest:
        """What the run says of itself; nothing for a file outside a run directory."""
        return Manifest() if self.capture.run is None else self.capture.run.manifest

    @cached_property
    def kernels(self) -> KernelsResult | None:
        """The whole capture's kernels, or CPU operators."""
        trace = self.capture.trace
        return trace.kernels() if trace is not None and len(trace.trace.work) else None

    @cached_property
    def efficiency(self) -> EfficiencyResult | None:
        """How well the GPUs were used; None without GPU work."""
        trace = self.capture.trace
        is_on_gpu = self.kernels is not None and self.kernels.measure == "gpu-kernel"
        return trace.efficiency() if trace is not None and is_on_gpu else None

    @cached_property
    def ranks(self) -> RanksResult | None:
        """Its ranks side by side; None of a capture of one rank."""
        return self.summary.compared

    @cached_property
    def device(self) -> DeviceMemory | None:
        """The device with the highest peak."""
        return None if self.capture.snapshot is None else self.capture.snapshot.device()

    @cached_property
    def memory(self) -> MemoryResult | None:
        """That device's account at its peak."""
        return None if self.capture.snapshot is None else self.capture.snapshot.memory()

    @cached_property
    def summary(self) -> Summary:
        """What the run says, and the times of its modules."""
        return summarize_capture(self.capture)

    @cached_property
    def advice(self) -> AdviceResult:
        """What to try."""
        return find_advice(self.capture, self.summary)

    @cached_property
    def lanes(self) -> tuple[StepLanes, StepLanes] | None:
        """The lanes of a step as it is and after the first Try; None where that is no edit, or nothing is expected."""
        edit = next((proposal.edit for proposal in self.advice.tries), None)
        trace = self.capture.trace
        return None if trace is None or edit is None else trace.step_lanes(parse_edits([edit]))

    @property
    def steps(self) -> int | None:
        """Over how many measured steps the times of ranges are sums; None if some lie outside them."""
        return None if self.efficiency is None else self.efficiency.step_count

    def record_again(self, option: str) -> str:
        """Return the command that would record this program again, as it was and with one more option.

        A block of a program is recorded by the program itself, by torch.profiler alone and without the work of ranges.
        """
        manifest = self.manifest
        if manifest.kind == "block":
            return "profkit.record(memory=True)" if option == "--memory" else "profkit run -- python train.py"
        known = [("--nsys", manifest.profiler == "nsys"), ("--memory", bool(manifest.argv) and self.memory is not None)]
        option = " ".join(dict.fromkeys([*(name for name, was_given in known if was_given), option]))
        if not manifest.argv and manifest.target:
            return f"profkit run {option} {without_folders(manifest.target)}"
        program = shlex.join(map(without_folders, manifest.argv)) if manifest.argv else "python train.py"
        return make_visible(f"profkit run {option} -- {program}")


def compare_runs(before: OpenedCapture, after: OpenedCapture) -> tuple[CaptureComparison, list[Finding]]:
    """Return what changed, and a caution for each difference that may change times by itself.

    Raises:
        UsageError: the two have nothing that could be compared.
    """
    result = compare_captures(before, after, force=True)
    cautions = [
        Finding(
            "provenance", f"compared with another {describe_difference(difference)}: this may change times by itself"
        )
        for difference in result.provenance.disturbances
    ]
    return result, [*cautions, *result.warnings]


def build_comparison(result: CaptureComparison) -> dict[str, Any]:
    """Return the tables and sentences of ``profkit compare``, each change in per cent too."""
    document = build_compare_document(result, top=_MOST)
    heads = [next(iter(part.lines)) for part in document.parts if isinstance(part, Lines) and part.role == "head"]
    return {
        "headline": heads[0],
        "parts": view_parts(_with_percent(part) if isinstance(part, Table) else part for part in document.parts),
    }


def _with_percent(table: Table) -> Table:
    keys = [column.key for column in table.columns]
    pairs = {"change_ns": "before_ns", "change_bytes": "before_bytes"}
    change = next((key for key in pairs if key in keys and pairs[key] in keys), None)
    if change is None:
        return table
    rows = [{**row, "percent": _part(row.get(change), row.get(pairs[change]))} for row in table.rows]
    at = keys.index(change) + 1
    columns = [*table.columns[:at], Column("percent", "%", CHANGE), *table.columns[at:]]
    return replace(table, columns=columns, rows=rows)


def _part(change: Any, before: Any) -> float | str | None:
    """Return a change as a part of what was there; None where nothing was, and nothing in a row without numbers."""
    if not isinstance(change, int | float) or not isinstance(before, int | float):
        return ""
    return change / before if before else None


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
            "text": f"rank {numbers[here]} waits {format_ns(int(waits[here, to]) / steps)} a step"
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
