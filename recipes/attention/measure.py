"""Time and memory of one cell, in the cell's own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from profkit.analysis.sample_statistics import summarize_samples
from recipes.attention.arithmetic import saved_bytes, work_out
from recipes.attention.implementations import Attention, find_attention
from recipes.attention.names import BATCH, COMPILED, DTYPES, MIB, SDPA, WRITTEN
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory
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
    passes = int(str(cell["passes"]))
    torch.manual_seed(0)
    run = _Run(device, find_attention(name), (BATCH, seq_len, d_model), dtype, passes)
    row: Row = {"status": OK}
    for phase, measure in (("forward", run.measure_forward), ("backward", run.measure_backward)):
        shortage = run_short(measure, device)
        if shortage is not None:
            row |= {"status": out_of_memory(phase), **shortage}
            if phase == "backward":
                run_short(run.time_forward, device)
            break
    if name not in (COMPILED, SDPA):
        row["accounting"] = _account(name, seq_len, d_model, dtype)
    return {**row, **run.found, **run.summarize()}


@dataclass
class _Run:
    """The passes of one cell, and what they showed so far: it stays when the memory is full."""

    device: Device
    attention: Attention
    shape: tuple[int, int, int]
    dtype: torch.dtype
    passes: int
    inputs: list[Tensor] = field(default_factory=list)
    found: Row = field(default_factory=dict)
    samples_ms: dict[str, list[float]] = field(default_factory=dict)

    def measure_forward(self) -> None:
        """Make the inputs, warm forward up, read its memory and what it keeps."""
        made = [torch.randn(self.shape, device=self.device, dtype=self.dtype) for _ in range(4)]
        self.inputs, self.gradient = [each.requires_grad_() for each in made[:3]], made[3]
        for _ in range(WARMUP):
            self._forward()
        self._synchronize()
        self.found["mem_after_inputs_MiB"] = _allocated(self.device)
        self.found["forward_peak_MiB"] = self._peak_of(self._forward)
        kept = saved_bytes(self.attention, self.inputs)
        self.found |= {"saved_activations_MiB": kept / MIB, "bytes_per_seq2": kept / self.shape[1] ** 2}

    def measure_backward(self) -> None:
        """Warm backward up, read its memory, time passes."""
        for _ in range(WARMUP):
            self._backward(self._forward())
        self._drop_gradients()
        outputs = [self._forward()]
        self._synchronize()
        self.found["mem_before_backward_MiB"] = _allocated(self.device)
        self.found["backward_peak_MiB"] = self._peak_of(lambda: self._backward(outputs.pop()))
        self.found["mem_after_backward_MiB"] = _allocated(self.device)
        for _ in range(self.passes):
            self._drop_gradients()
            with self._timed("forward"):
                output = self._forward()
            with self._timed("backward"):
                self._backward(output)
            del output

    def time_forward(self) -> None:
        """Time forward alone, for backward does not fit."""
        self.samples_ms.clear()
        self._drop_gradients()
        for _ in range(self.passes):
            with self._timed("forward"):
                output = self._forward()
            del output

    def summarize(self) -> Row:
        """Return median, mean and deviation of the samples that there are, in milliseconds, and the samples."""
        samples = dict(self.samples_ms)
        if {"forward", "backward"} <= samples.keys():
            pairs = zip(samples["forward"], samples["backward"], strict=True)
            samples["forward_backward"] = [forward + backward for forward, backward in pairs]
        found: Row = {f"{part}_samples_ms": values for part, values in samples.items()}
        for part, values in samples.items():
            statistics = summarize_samples(values)
            found |= {
                f"{part}_ms": statistics.median,
                f"{part}_mean_ms": statistics.mean,
                f"{part}_std_ms": statistics.standard_deviation,
            }
        return found

    def _forward(self) -> Tensor:
        return self.attention(*self.inputs)

    def _backward(self, output: Tensor) -> None:
        output.backward(self.gradient)

    def _drop_gradients(self) -> None:
        for each in self.inputs:
            each.grad = None

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        self._synchronize()
        began = time.perf_counter()
        yield
        self._synchronize()
        self.samples_ms.setdefault(part, []).append((time.perf_counter() - began) * 1e3)

    def _peak_of(self, work: Callable[[], object]) -> float | None:
        if self.device != "cuda":
            work()
            return None
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / MIB

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        elif self.device == "mps":
            torch.mps.synchronize()


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
    return str(cell["implementation"]), int(str(cell["seq_len"])), int(str(cell["d_model"])), dtype
