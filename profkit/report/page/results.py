"""What the commands would print: of a capture, each when a section first asks for it, and of two captures."""

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
from profkit.analysis.memory.result import MemoryResult
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.ranks.comparison import RanksResult
from profkit.analysis.step_replay.lanes import StepLanes
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import Summary
from profkit.findings import Finding
from profkit.report.commands.compare import build_compare_document, describe_difference
from profkit.report.document import Column, Lines, Table
from profkit.report.page.markup import view_parts, without_folders
from profkit.report.text import make_visible
from profkit.report.units import CHANGE
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
