"""Time and memory of one cell, in the cell's own process: profkit's training step, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from profkit.analysis.efficiency.datasheet import find_datasheet
from profkit.analysis.sample_statistics import summarize_samples
from profkit.capture.clean_twin import Measured, measure_steps
from profkit.capture.step import StepObserver, TrainingStep
from profkit.models.memory import HOPPER_WORKSPACE_BYTES, predict_memory
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER
from recipes.common.measuring import run_short, summarize_parts
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory
from recipes.whole_model.cells import workload_of

MIB = 2**20
BUILDING = "model"
"""The phase before the first step: parameters, tables and the batch."""


def predict_bytes(cell: Cell, device: Device) -> int:
    """Return the bytes that a step asks for at its peak; for compiled code a lower bound."""
    workspace_bytes = HOPPER_WORKSPACE_BYTES if device == "cuda" else 0
    return predict_memory(workload_of(cell), workspace_bytes).peak.bytes


def measure_cell(cell: Cell, device: Device) -> Row:
    """Return times, rates and the peak of memory; or the phase in which the memory ended.

    Each phase is timed on its own between two synchronisations. ``forward_backward`` is, step by step, the sum of
    forward, loss and backward. Before the first step there is the model, and nothing has run.
    """
    run = _Run(cell, device)
    shortage = run_short(run.measure, device)
    if shortage is not None:
        # What was compiled or timed before says nothing about a step that does not fit.
        return {"status": out_of_memory(run.watch.phase), **shortage}
    return {"status": OK, **run.found}


class PhaseWatch(StepObserver):
    """Knows which phase is running, and waits at its end for a device that the step itself does not wait for."""

    def __init__(self, device: Device) -> None:
        self.phase = BUILDING
        self._device = device

    def phase_begun(self, name: str) -> None:
        self.phase = name

    def phase_done(self, name: str) -> None:
        del name
        if self._device == "mps":
            torch.mps.synchronize()


class _Run:
    """One cell: what it found so far, and in which phase it is."""

    def __init__(self, cell: Cell, device: Device) -> None:
        self.workload = workload_of(cell)
        self.device = device
        self.watch = PhaseWatch(device)
        self.found: Row = {}

    def measure(self) -> None:
        """Make the model, run the warm-up, time the steps."""
        step = TrainingStep(self.workload, torch.device(self.device))
        step.observe(self.watch)
        step.run_warmup()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        measured = measure_steps(step)
        peak_bytes = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        samples = split_samples(measured.times)
        self.found = {
            **summarize_parts(samples),
            **self._rates(sum(step.flops[phase] for phase in step.flops if phase in samples), samples["step"]),
            "parameters": step.parameter_count,
            "peak_MiB": None if peak_bytes is None else peak_bytes / MIB,
            **_happened(measured),
        }

    def _rates(self, flops: int, steps_ms: Sequence[float]) -> Row:
        """Return tokens a second and model FLOPs over the datasheet's peak, both from the median of the steps."""
        seconds = summarize_samples(steps_ms).median / 1e3
        sheet = find_datasheet(torch.cuda.get_device_name()) if self.device == "cuda" else None
        peak = None if sheet is None else sheet.flops_per_s.get(self.workload.dtype)
        return {
            "tokens_per_s": self.workload.batch * self.workload.context / seconds,
            "mfu": None if peak is None else flops / (seconds * peak),
        }


def split_samples(times: Sequence[Mapping[str, int]]) -> dict[str, list[float]]:
    """Return each part's samples in milliseconds, in the order of the steps."""
    samples = {
        phase: [step[f"{phase}_ns"] / 1e6 for step in times]
        for phase in (FORWARD, LOSS, BACKWARD, OPTIMIZER, "step")
        if f"{phase}_ns" in times[0]
    }
    if BACKWARD in samples:
        both = zip(samples[FORWARD], samples[LOSS], samples[BACKWARD], strict=True)
        samples["forward_backward"] = [sum(parts) for parts in both]
    return samples


def _happened(measured: Measured) -> Row:
    """Return what happened within the timed steps that makes a step slow."""
    return {key: measured.during[key] for key in ("compiled_graphs", "allocator_retries")}
