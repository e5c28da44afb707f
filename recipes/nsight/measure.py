"""The cells of one capture: it is made, and each context's row is read out of it; runs in a process of their own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from profkit import read_trace
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory, whole
from recipes.model_memory.predict import predict_memory
from recipes.nsight.capture import MemoryFull, build_arguments, record
from recipes.nsight.cells import work_of
from recipes.nsight.read import read_row


def predict_bytes(cell: Cell, device: Device) -> int:
    """Return the bytes that a step asks for at its peak."""
    return predict_memory(work_of(cell), device).peak.bytes


def measure_cells(cells: Sequence[Cell], device: Device, captures: Path) -> list[Row]:
    """Return the rows of cells that differ in their context alone, from one capture.

    Where the memory is too small for all of them, the longest context is left out and the others are recorded again.
    """
    contexts = sorted(whole(cell["context"]) for cell in cells)
    found: dict[int, Row] = {}
    while contexts:
        try:
            run = record(cells[0], contexts, device, captures)
        except MemoryFull as error:
            found[contexts.pop()] = {"status": out_of_memory("step"), "reason": str(error)}
            continue
        opened = read_trace(run)
        several = len(contexts) > 1
        words = ["profkit", "run", *build_arguments(cells[0], contexts, device), "-o", f"{captures.name}/{run.name}"]
        for context in contexts:
            read = read_row(opened, run, context if several else None)
            found[context] = {"status": OK, "made_by": shlex.join(words), **read}
        break
    return [found[whole(cell["context"])] for cell in cells]
