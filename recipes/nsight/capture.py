"""One capture of some contexts, made by ``profkit run`` in a process of its own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from profkit.errors import RunError
from profkit.launch.processes import run_child
from profkit.run.directory import MANIFEST, Run
from recipes.common.recipe import Cell, Device
from recipes.nsight.cells import NSYS

CAPTURES = "captures"
"""Where a directory of results keeps them. They are made again at will, and an nsys export holds the environment."""

_FULL = "memory is full"


class MemoryFull(Exception):
    """The steps did not fit into the memory; ``str(error)`` is one line."""


def build_arguments(cell: Cell, contexts: Sequence[int], device: Device) -> list[str]:
    """Return what follows ``profkit run`` for a cell, all its contexts in one capture."""
    recorder = ["--nsys", "--no-keep-report"] if cell["profiler"] == NSYS else ["--kineto"]
    options = {"--context": ",".join(map(str, contexts)), "--device": device}
    options |= {f"--{key}": str(cell[key]) for key in ("passes", "batch", "steps")}
    return [*recorder, *(word for pair in options.items() for word in pair), f"model.{cell['size']}"]


def name_capture(cell: Cell, contexts: Sequence[int]) -> str:
    """Return a capture's name: ``small-train-nsys-4x128-256-3steps``."""
    sizes = "-".join(map(str, contexts))
    return f"{cell['size']}-{cell['passes']}-{cell['profiler']}-{cell['batch']}x{sizes}-{cell['steps']}steps"


def record(cell: Cell, contexts: Sequence[int], device: Device, captures: Path) -> Path:
    """Record the cell's steps at some contexts and return the run directory, in the place of one of that name.

    Raises:
        MemoryFull: they do not fit.
        RunError: ``profkit run`` failed.
    """
    run = captures / name_capture(cell, contexts)
    if (run / MANIFEST).exists():
        shutil.rmtree(run)
    words = ["run", *build_arguments(cell, contexts, device), "-o", str(run)]
    with tempfile.TemporaryFile() as output:
        status = run_child([sys.executable, "-m", "profkit", *words], os.environ, output)
        output.seek(0)
        said = output.read().decode(errors="replace").strip().splitlines()
    if status != 0:
        _explain(run, status, said[-1] if said else "nothing")
    return run


def _explain(run: Path, status: int, last_line: str) -> None:
    """Raise what a failed run says of itself."""
    told = Run(run).manifest.reason if (run / MANIFEST).exists() else None
    if told and _FULL in told:
        raise MemoryFull(told)
    raise RunError(f"profkit run ended with status {status}: {told or last_line}")
