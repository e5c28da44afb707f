"""One cell of end_to_end in its own process: times of each phase, rates, and the peak of memory."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from profkit import find_datasheet
from recipes.common.measuring import MIB, run_short, summarize_parts
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory, whole
from recipes.model_memory.predict import predict_memory
from recipes.whole_model.cells import Work, work_of
from recipes.whole_model.training import Training


def predict_bytes(cell: Cell, device: Device) -> int:
    """Return the bytes that a step needs at its peak; for compiled code a lower bound."""
    return predict_memory(work_of(cell), device).peak.bytes


def measure_cell(cell: Cell, device: Device) -> Row:
    """Return times, rates and the peak of memory; or the phase in which memory ran out."""
    training = Training(work_of(cell), device)
    found: Row = {}
    shortage = run_short(lambda: found.update(_measure(training, whole(cell["warmup"]), whole(cell["steps"]))), device)
    if shortage is not None:
        return {"status": out_of_memory(training.phase), **shortage}
    return {"status": OK, **found}


def _measure(training: Training, warmup: int, steps: int) -> Row:
    training.build()
    for _ in range(warmup):
        training.run()
    on_gpu = training.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    samples, events = time_steps(training.run, steps)
    return {
        **summarize_parts(samples),
        **rates(training.work, samples["step"], torch.cuda.get_device_name() if on_gpu else None),
        "parameters": training.parameter_count,
        "peak_MiB": torch.cuda.max_memory_allocated() / MIB if on_gpu else None,
        **events,
    }


def time_steps(run: Callable[[], dict[str, float]], steps: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Run steps; return each part's samples in ms, and how often something happened in them that makes a step slow."""
    before = _count_events()
    timed = [run() for _ in range(steps)]
    events = {name: count - before[name] for name, count in _count_events().items()}
    return {part: [step[part] for step in timed] for part in timed[0]}, events


def rates(work: Work, steps_ms: Sequence[float], gpu: str | None) -> Row:
    """Return tokens per second, and the model's FLOPs as a share of the datasheet's peak, by the median step."""
    seconds = statistics.median(steps_ms) / 1e3
    sheet = find_datasheet(gpu)
    peak = None if sheet is None else sheet.flops_per_s.get(work.dtype)
    return {
        "tokens_per_s": work.batch * work.context / seconds,
        "mfu": None if peak is None else work.flops / (seconds * peak),
    }


def _count_events() -> dict[str, int]:
    """Return how many graphs Dynamo compiled, and how often the allocator had to free its cache and try again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = 0 if dynamo is None else dynamo.counters.get("stats", {}).get("unique_graphs", 0)
    allocator = torch.cuda.memory_stats() if torch.cuda.is_available() and torch.cuda.is_initialized() else {}
    return {"compiled_graphs": graphs, "allocator_retries": allocator.get("num_alloc_retries", 0)}
