"""One cell, in its own process: the allocator's history of two steps, read back; and what a block keeps."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from profkit.capture.memory_observer import MemoryObserver
from profkit.capture.owners import OwnerLedger
from profkit.capture.recorded_training import recorded_training
from profkit.capture.step import StepObserver, TrainingStep
from profkit.errors import RunError
from profkit.launch.directory import write_json, write_manifest
from profkit.launch.processes import sigterm_raises
from profkit.models.workload import MemoryOrder
from profkit.names import FORWARD
from profkit.run_directory import LEDGER, MANIFEST, PREDICTED, SNAPSHOT, read_manifest
from profkit.version import __version__
from recipes.common.measuring import run_short
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory
from recipes.model_memory.cells import BUILDING, Files, describe_cell, name_of, workload_of
from recipes.model_memory.predicted import predict
from recipes.model_memory.recorded import draw_recorded, read_recorded
from recipes.model_memory.saved import Part, SavedAccount, count_saved
from recipes.whole_model.cells import FORWARD_ONLY

RECORDED_DEVICES = ("cuda",)
"""Those whose allocator records its history."""
LARGEST_PARTS = 5
_UNDER_WAY = "incomplete"


def measure_cell(cell: Cell, device: Device, files: Files) -> Row:
    """Return the peaks with what they are made of, and what a block keeps; or the phase in which the memory ended.

    Only CUDA's allocator records its history. What a block keeps is counted in a forward pass of its own after the
    recording; between checkpoints nothing is kept, and nothing counted.
    """
    run = _Run(cell, device, files)
    shortage = run_short(run.measure, device)
    if shortage is not None:
        return {"status": out_of_memory(run.phase), **shortage}
    return {"status": OK, **run.found}


class _Observer(MemoryObserver):
    """Notes owners, and knows which phase is running."""

    phase = BUILDING

    def phase_begun(self, name: str) -> None:
        self.phase = name


class _Run:
    """One cell: what it found so far, and in which phase it is."""

    def __init__(self, cell: Cell, device: Device, files: Files) -> None:
        self._cell = cell
        self._device = torch.device(device)
        self._files = files
        self._workload = workload_of(cell)
        self._observer: _Observer | None = None
        self._phase = BUILDING
        self.found: Row = {}

    @property
    def phase(self) -> str:
        """The phase that is running, or ran last."""
        return self._phase if self._observer is None else self._observer.phase

    def measure(self) -> None:
        """Record the steps where that can be, count what a block keeps, read the recording."""
        if self._device.type not in RECORDED_DEVICES:
            if not self._workload.checkpoint_layers:
                self._count(TrainingStep(self._workload, self._device))
            return
        with sigterm_raises(), self._directory() as run:
            step = self._record(run)
            if not self._workload.checkpoint_layers:
                self._count(step)
            self.found |= read_recorded(run)
            self._draw(run)

    @contextmanager
    def _directory(self) -> Iterator[Path]:
        """Yield a directory for the capture, which stays if captures are to be kept."""
        if self._files.captures is None:
            with tempfile.TemporaryDirectory(prefix="profkit-") as made:
                yield Path(made)
            return
        run = self._files.captures / name_of(self._cell)
        if (run / MANIFEST).exists() and read_manifest(run).get("status") == _UNDER_WAY:
            shutil.rmtree(run)  # what an interrupted run of this cell left
        run.mkdir(parents=True, exist_ok=True)
        if any(run.iterdir()):
            raise RunError(f"{run}: exists and is not empty; name another directory with --keep-captures")
        yield run

    def _record(self, run: Path) -> TrainingStep:
        """Record the making of the model and its steps, and leave a run directory that ``profkit memory`` reads."""
        versions = {"profkit": __version__, "torch": torch.__version__}
        manifest = {"target": self._workload.target, "versions": versions, "workload": asdict(self._workload)}
        write_manifest(run, {"status": _UNDER_WAY, **manifest})
        write_json(run / PREDICTED, predict(self._cell, "cuda").to_dict())
        order = MemoryOrder(str(run / SNAPSHOT), str(run / LEDGER))
        with recorded_training(self._workload, self._device, order, self._observe) as step:
            step.run_warmup()
            step.run_measured()
        step.observe(StepObserver())
        write_manifest(run, {"status": "complete", **manifest})
        return step

    def _observe(self, owners: OwnerLedger, step: TrainingStep) -> _Observer:
        self._observer = _Observer(owners, step, saved=False)
        return self._observer

    def _count(self, step: TrainingStep) -> None:
        """Count in one more forward pass, loss included, what each block keeps, and look at what it hands on."""
        self._observer, self._phase = None, FORWARD
        is_trained = self._workload.passes != FORWARD_ONLY
        is_bf16 = self._workload.dtype == "bf16"

        def forward() -> Tensor:
            autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=is_bf16)
            with torch.set_grad_enabled(is_trained), autocast:
                logits: Tensor = step.module(step.inputs)
            # Autocast forgets its casts in between, as it does in the step.
            with torch.set_grad_enabled(is_trained), autocast:
                return cross_entropy(logits.flatten(0, 1), step.targets.flatten()) if is_trained else logits

        saved = count_saved(step.module, step.module.layers, (step.inputs, step.targets), forward)
        self.found |= describe_saved(saved)

    def _draw(self, run: Path) -> None:
        picture = self._files.timelines.get(name_of(self._cell))
        if picture is not None:
            draw_recorded(run, picture, describe_cell(self._cell))
            self.found["timeline"] = picture.name


def describe_saved(saved: SavedAccount) -> Row:
    """Return the tensor that a block hands on, the bytes that each keeps, and of the one that keeps most the parts."""
    most = max(saved.blocks, key=lambda block: block.bytes)
    return {
        "residual_bytes": most.output_bytes,
        "residual_shape": list(most.output_shape),
        "residual_dtype": most.output_dtype,
        "saved_block_bytes": most.bytes,
        "saved_bytes_by_block": [block.bytes for block in saved.blocks],
        "saved_bytes": saved.bytes,
        "saved_parts": group_parts(most.parts),
    }


def group_parts(parts: Sequence[Part]) -> list[dict[str, object]]:
    """Return the parts, those alike together, the largest first; what follows the fifth is one line."""
    alike = Counter(parts)
    ordered = sorted(alike.items(), key=lambda entry: -entry[0].bytes * entry[1])
    lines: list[dict[str, object]] = [
        {**asdict(part), "shape": list(part.shape), "count": count, "bytes": part.bytes * count}
        for part, count in ordered[:LARGEST_PARTS]
    ]
    rest = ordered[LARGEST_PARTS:]
    if rest:
        count, size = sum(count for _, count in rest), sum(part.bytes * count for part, count in rest)
        lines.append({"made_by": None, "saved_in": None, "shape": None, "dtype": None, "count": count, "bytes": size})
    return lines
