"""Time and memory of one cell, in the cell's own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from profkit.names import BACKWARD, FORWARD
from recipes.attention.arithmetic import saved_bytes, work_out
from recipes.attention.implementations import Attention, find_attention
from recipes.attention.names import BATCH, COMPILED, DTYPES, MIB, SDPA, WRITTEN
from recipes.attention.passes import Passes
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory, whole
from recipes.common.samples import summarize_parts
from recipes.common.shortage import run_short

WARMUP = 5


def predict_bytes(cell: Cell, _device: Device) -> int:
    """Return the bytes that a cell asks for at its peak; a lower bound for what compiles or chooses its kernels."""
    name, seq_len, d_model, dtype = _read(cell)
    if name == SDPA:
        # Q, K, V, O and the gradient of each, whatever the kernel.
        return 8 * BATCH * seq_len * d_model * dtype.itemsize
    arithmetic = work_out(WRITTEN if name == COMPILED else name, seq_len, d_model, dtype)
    if name == COMPILED:
        return arithmetic.input_bytes + arithmetic.saved_bytes
    return max(arithmetic.peak_bytes(phase) for phase in arithmetic.peaks)


def measure_cell(cell: Cell, device: Device) -> Row:
    """Return times, memory and what autograd keeps, as far as the memory goes; the phase in which it ended, if it did.

    Forward and backward of a pass are each timed on its own between two synchronisations; ``forward_backward`` is their
    sum, pass by pass. Memory is read in a pass of its own, after the warm-up: libraries have their workspaces by then,
    which stand in ``mem_after_inputs``.
    """
    name, seq_len, d_model, dtype = _read(cell)
    passes = whole(cell["passes"])
    torch.manual_seed(0)
    run = _Run(find_attention(name), (BATCH, seq_len, d_model), dtype, device)
    row: Row = {"status": OK}
    for phase, measure in ((FORWARD, run.measure_forward), (BACKWARD, partial(run.measure_backward, passes))):
        shortage = run_short(measure, device)
        if shortage is not None:
            row |= {"status": out_of_memory(phase), **shortage}
            if phase == BACKWARD:
                run_short(partial(run.measure_forward_alone, passes), device)
            break
    if name not in (COMPILED, SDPA):
        row["accounting"] = _account(name, seq_len, d_model, dtype)
    return {**row, **run.found, **run.summarize()}


class _Run(Passes):
    """The passes of one cell, and what they showed so far: it stays when the memory is full."""

    def __init__(self, attention: Attention, shape: tuple[int, int, int], dtype: torch.dtype, device: Device) -> None:
        super().__init__(attention, shape, dtype, device)
        self.found: Row = {}

    def measure_forward(self) -> None:
        """Make the inputs, warm forward up, read its memory and what it keeps."""
        self.make_inputs()
        for _ in range(WARMUP):
            self.forward()
        self.synchronize()
        self.found["mem_after_inputs_MiB"] = _allocated(self.device)
        self.found["forward_peak_MiB"] = self._peak_of(self.forward)
        kept = saved_bytes(self.attention, self.inputs)
        self.found |= {"saved_activations_MiB": kept / MIB, "bytes_per_seq2": kept / self.shape[1] ** 2}

    def measure_backward(self, pass_count: int) -> None:
        """Warm backward up, read its memory, time passes."""
        for _ in range(WARMUP):
            self.backward(self.forward())
        self.drop_gradients()
        outputs = [self.forward()]
        self.synchronize()
        self.found["mem_before_backward_MiB"] = _allocated(self.device)
        self.found["backward_peak_MiB"] = self._peak_of(lambda: self.backward(outputs.pop()))
        self.found["mem_after_backward_MiB"] = _allocated(self.device)
        for _ in range(pass_count):
            self.time_both()

    def measure_forward_alone(self, pass_count: int) -> None:
        """Time forward alone, for backward does not fit."""
        self.samples_ms.clear()
        self.drop_gradients()
        for _ in range(pass_count):
            self.time_forward()

    def summarize(self) -> Row:
        """Return median, mean and deviation of the samples that there are, in milliseconds, and the samples."""
        samples = dict(self.samples_ms)
        if {FORWARD, BACKWARD} <= samples.keys():
            pairs = zip(samples[FORWARD], samples[BACKWARD], strict=True)
            samples["forward_backward"] = [forward + backward for forward, backward in pairs]
        return summarize_parts(samples)

    def _peak_of(self, work: Callable[[], object]) -> float | None:
        if self.device != "cuda":
            work()
            return None
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / MIB


def _allocated(device: Device) -> float | None:
    """Return the MiB that torch's allocator has given out; the CPU's keeps no books."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / MIB
    return torch.mps.current_allocated_memory() / MIB if device == "mps" else None


def _account(name: str, seq_len: int, d_model: int, dtype: torch.dtype) -> dict[str, list[dict[str, object]]]:
    peaks = work_out(name, seq_len, d_model, dtype).peaks
    return {phase: [asdict(each) for each in live] for phase, live in peaks.items()}


def _read(cell: Cell) -> tuple[str, int, int, torch.dtype]:
    dtype = getattr(torch, DTYPES[str(cell["dtype"])])
    return str(cell["implementation"]), whole(cell["seq_len"]), whole(cell["d_model"]), dtype
