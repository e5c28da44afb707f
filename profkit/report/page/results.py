"""What the commands would print of a capture, each computed when a section first asks for it."""

from __future__ import annotations

import shlex
from functools import cached_property

from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.kernels.summary import KernelsResult
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.result import MemoryResult
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.ranks.comparison import RanksResult
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import Summary
from profkit.joining import compare_opened
from profkit.report.page.markup import without_folders
from profkit.report.text import make_visible
from profkit.run.manifest import Manifest


class Results:
    """The results of one capture; None where it did not record what a result is of."""

    def __init__(self, capture: OpenedCapture) -> None:
        self.capture = capture
        self.name = without_folders(str(capture.path))
        """The capture as commands on the page name it."""

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
        return compare_opened(self.capture)

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
        """The run in ten lines, and the times of its modules."""
        return summarize_capture(self.capture)

    @property
    def steps(self) -> int | None:
        """Over how many measured steps the times of ranges are sums; None if some lie outside them."""
        return None if self.efficiency is None else self.efficiency.step_count

    def record_again(self, option: str) -> str:
        """Return the command that would record this program again, as it was and with one more option."""
        manifest = Manifest() if self.capture.run is None else self.capture.run.manifest
        known = [("--nsys", manifest.profiler == "nsys"), ("--memory", bool(manifest.argv) and self.memory is not None)]
        option = " ".join(dict.fromkeys([*(name for name, was_given in known if was_given), option]))
        if not manifest.argv and manifest.target:
            return f"profkit run {option} {without_folders(manifest.target)}"
        program = shlex.join(map(without_folders, manifest.argv)) if manifest.argv else "python train.py"
        return make_visible(f"profkit run {option} -- {program}")
