"""Time and memory of one cell of attention, in the cell's own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from profkit import annotate
from profkit.names import BACKWARD, FORWARD
from recipes.attention.cells import BATCH, COMPILED, DTYPES, SDPA, WRITTEN
from recipes.attention.memory import Attention, find_attention, saved_bytes, work_out
from recipes.common.measuring import MIB, run_short, summarize_parts, synchronize
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory, whole

WARMUP = 5
MAKING = "inputs"
"""The phase before the first pass."""


def predict_bytes(cell: Cell, _device: Device) -> int:
    """Return the bytes that a cell needs at its peak; a lower bound if it is compiled or chooses its kernels."""
    name, seq_len, d_model, dtype = _read(cell)
    if name == SDPA:
        # Q, K, V, O and the gradient of each, whatever the kernel.
        return 8 * BATCH * seq_len * d_model * dtype.itemsize
    memory = work_out(WRITTEN if name == COMPILED else name, seq_len, d_model, dtype)
    if name == COMPILED:
        return memory.input_bytes + memory.saved_bytes
    return max(memory.peak_bytes(phase) for phase in memory.peaks)


def measure_cell(cell: Cell, device: Device) -> Row:
    """Return times, memory and what autograd saves; if memory ran out, the phase and what was measured before.

    Forward and backward of a pass are timed separately, each between two synchronisations; ``forward_backward`` is
    their sum, pass by pass. Memory is read in a pass of its own after the warm-up: by then the libraries have their
    workspaces, which are part of ``mem_after_inputs``.
    """
    name, seq_len, d_model, dtype = _read(cell)
    pass_count = whole(cell["passes"])
    torch.manual_seed(0)
    passes = Passes(find_attention(name), (BATCH, seq_len, d_model), dtype, device)
    row: Row = {"status": OK}
    found: Row = {}
    for phase, measure in ((FORWARD, _measure_forward), (BACKWARD, partial(_measure_backward, pass_count=pass_count))):
        shortage = run_short(partial(measure, passes, found), device)
        if shortage is not None:
            row |= {"status": out_of_memory(phase), **shortage}
            if phase == BACKWARD:
                run_short(partial(_time_forward_alone, passes, pass_count), device)
            break
    if name not in (COMPILED, SDPA):
        peaks = work_out(name, seq_len, d_model, dtype).peaks
        row["accounting"] = {phase: [asdict(each) for each in live] for phase, live in peaks.items()}
    samples = dict(passes.samples_ms)
    if {FORWARD, BACKWARD} <= samples.keys():
        pairs = zip(samples[FORWARD], samples[BACKWARD], strict=True)
        samples["forward_backward"] = [forward + backward for forward, backward in pairs]
    return {**row, **found, **summarize_parts(samples)}


class Passes:
    """Inputs and the output's gradient, both ``(batch, seq, d)``; passes over them; the times so far by phase."""

    def __init__(self, attention: Attention, shape: tuple[int, int, int], dtype: torch.dtype, device: Device) -> None:
        self.attention, self.shape, self.dtype, self.device = attention, shape, dtype, device
        self.phase = MAKING
        self.samples_ms: dict[str, list[float]] = {}

    def make_inputs(self) -> None:
        """Make query, key, value and the output's gradient from random numbers."""
        made = [torch.randn(self.shape, device=self.device, dtype=self.dtype) for _ in range(4)]
        self.inputs, self.gradient = [each.requires_grad_() for each in made[:3]], made[3]

    def time_forward(self) -> None:
        """Time one forward pass, and drop what it saved for backward."""
        with self._timed(FORWARD):
            output = self.forward()
        del output

    def time_both(self) -> None:
        """Time one forward and one backward pass."""
        self.drop_gradients()
        with self._timed(FORWARD):
            output = self.forward()
        with self._timed(BACKWARD):
            self.backward(output)
        del output

    def forward(self) -> Tensor:
        return self.attention(*self.inputs)

    def backward(self, output: Tensor) -> None:
        output.backward(self.gradient)

    def drop_gradients(self) -> None:
        for each in self.inputs:
            each.grad = None

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self.phase = phase
        # The range encloses the waiting, so that what a profiler adds at its ends is not timed.
        with annotate(phase):
            synchronize(self.device)
            began = time.perf_counter()
            yield
            synchronize(self.device)
            self.samples_ms.setdefault(phase, []).append((time.perf_counter() - began) * 1e3)


def _measure_forward(passes: Passes, found: Row) -> None:
    passes.make_inputs()
    for _ in range(WARMUP):
        passes.forward()
    synchronize(passes.device)
    found["mem_after_inputs_MiB"] = _allocated_mib(passes.device)
    found["forward_peak_MiB"] = _peak_mib(passes.forward, passes.device)
    saved = saved_bytes(passes.attention, passes.inputs)
    found |= {"saved_activations_MiB": saved / MIB, "bytes_per_seq2": saved / passes.shape[1] ** 2}


def _measure_backward(passes: Passes, found: Row, *, pass_count: int) -> None:
    for _ in range(WARMUP):
        passes.backward(passes.forward())
    passes.drop_gradients()
    outputs = [passes.forward()]
    synchronize(passes.device)
    found["mem_before_backward_MiB"] = _allocated_mib(passes.device)
    found["backward_peak_MiB"] = _peak_mib(lambda: passes.backward(outputs.pop()), passes.device)
    found["mem_after_backward_MiB"] = _allocated_mib(passes.device)
    for _ in range(pass_count):
        passes.time_both()


def _time_forward_alone(passes: Passes, pass_count: int) -> None:
    passes.samples_ms.clear()
    passes.drop_gradients()
    for _ in range(pass_count):
        passes.time_forward()


def _peak_mib(work: Callable[[], object], device: Device) -> float | None:
    if device != "cuda":
        work()
        return None
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB


def _allocated_mib(device: Device) -> float | None:
    """Return what torch's allocator has given out; the CPU's allocator does not count."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / MIB
    return torch.mps.current_allocated_memory() / MIB if device == "mps" else None


def _read(cell: Cell) -> tuple[str, int, int, torch.dtype]:
    dtype = getattr(torch, DTYPES[str(cell["dtype"])])
    return str(cell["implementation"]), whole(cell["seq_len"]), whole(cell["d_model"]), dtype
