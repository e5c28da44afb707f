"""What the commands would print of a capture, each computed when a section first asks for it."""

from __future__ import annotations

from functools import cached_property

from profkit.analysis.compare.capture import OpenedCapture
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.kernels import KernelsResult
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.result import MemoryResult
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import Summary
from profkit.report.page.markup import without_folders


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
