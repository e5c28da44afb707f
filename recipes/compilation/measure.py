"""One cell in its own process: its steps' times without a profiler, then what one more step ran, with one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from recipes.attention.cells import DTYPES as DTYPE_NAMES
from recipes.attention.measure import Passes
from recipes.attention.measure import predict_bytes as predict_attention_bytes
from recipes.attention.memory import find_attention
from recipes.common.grid import sigterm_raises
from recipes.common.measuring import run_short, summarize_parts, synchronize
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory, whole
from recipes.compilation.cells import ATTENTION, as_attention_cell, as_model_cell
from recipes.compilation.work import read_work
from recipes.whole_model.cells import COMPILED, FORWARD_ONLY, work_of
from recipes.whole_model.measure import predict_bytes as predict_model_bytes
from recipes.whole_model.measure import time_steps
from recipes.whole_model.training import Training

WARMUP = 5
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_QUIET = {"KINETO_LOG_LEVEL": "99"}  # torch 2.13 prints two lines a recording


class AttentionSteps:
    """Passes over written-out attention, used as `Training` is; forward alone runs without autograd."""

    def __init__(self, cell: Cell, device: Device) -> None:
        own = as_attention_cell(cell)
        shape = (whole(cell["batch"]), whole(own["seq_len"]), whole(own["d_model"]))
        dtype = getattr(torch, DTYPE_NAMES[str(own["dtype"])])
        self._passes = Passes(find_attention(str(own["implementation"])), shape, dtype, device)
        self._forward_only = cell["passes"] == FORWARD_ONLY

    @property
    def phase(self) -> str:
        return self._passes.phase

    def build(self) -> None:
        """Make the inputs; nothing runs yet."""
        torch.manual_seed(0)
        self._passes.make_inputs()

    def run(self) -> dict[str, float]:
        """Run a step; return the milliseconds of its phases and of the ``step``."""
        if self._forward_only:
            with torch.no_grad():
                self._passes.time_forward()
        else:
            self._passes.time_both()
        phases = {phase: samples.pop() for phase, samples in self._passes.samples_ms.items()}
        return {**phases, "step": sum(phases.values())}


def predict_bytes(cell: Cell, device: Device) -> int:
    """Return the bytes that a cell needs at its peak; for compiled code a lower bound."""
    if cell["what"] == ATTENTION:
        return predict_attention_bytes(as_attention_cell(cell), device)
    return predict_model_bytes(as_model_cell(cell), device)


def measure_cell(cell: Cell, device: Device) -> Row:
    """Return times, and the kernels of one step; or the phase in which memory ran out.

    The timed steps run without a profiler, after a warm-up that compiles everything from an empty cache: the first
    step's time includes all of that. One more step runs under torch.profiler; only its kernel times are used.
    """
    is_attention = cell["what"] == ATTENTION
    steps = AttentionSteps(cell, device) if is_attention else Training(work_of(as_model_cell(cell)), device)
    found: Row = {}
    # Inductor's own processes may still hold files there, which is no reason to fail.
    temporary = TemporaryDirectory(prefix="compile_speedup.", ignore_cleanup_errors=True)
    # A cell that is given up is ended by SIGTERM, and would leave its compiled code there.
    with sigterm_raises(), temporary as directory, compiling_anew(Path(directory)):
        if device == "cpu" and cell["mode"] == COMPILED:
            name_generated_operators()
        shortage = run_short(lambda: found.update(_measure(steps, cell, device, Path(directory))), device)
    if shortage is not None:
        return {"status": out_of_memory(steps.phase), **shortage}
    return {"status": OK, **found}


def _measure(steps: AttentionSteps | Training, cell: Cell, device: Device, directory: Path) -> Row:
    steps.build()
    first = steps.run()
    for _ in range(WARMUP - 1):
        steps.run()
    samples, events = time_steps(steps.run, whole(cell["steps"]))
    trace = directory / "step.json.gz"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=activities) as profile:
        profiled = steps.run()
        synchronize(device)
    profile.export_chrome_trace(str(trace))
    phases = [part for part in profiled if part not in ("step", "forward_backward")]
    return {
        **summarize_parts(samples),
        "first_step_s": first["step"] / 1e3,
        **events,
        **read_work(trace, phases, is_aten_operator),
    }


def is_aten_operator(name: str) -> bool:
    """Return whether ATen has an operator of this name."""
    return hasattr(torch.ops.aten, name)


def name_generated_operators() -> None:
    """Let Inductor's C++ code report its kernels to the profiler, as GPU kernels always are."""
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True


@contextmanager
def compiling_anew(directory: Path) -> Iterator[None]:
    """Let Inductor and Triton compile into a new directory, so that no earlier cache saves them time."""
    wanted = {name: str(directory / folder) for name, folder in _CACHES.items()} | _QUIET
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
