"""One cell in its own process: two steps recorded by `profkit run`, their peaks read back; what a block saves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from profkit import read_snapshot
from profkit.errors import RunError
from profkit.names import FORWARD
from recipes.common.grid import sigterm_raises
from recipes.common.measuring import run_short
from recipes.common.recipe import OK, Cell, Device, Row, out_of_memory
from recipes.model_memory.cells import name_of, work_of
from recipes.model_memory.predict import predict_memory
from recipes.whole_model.cells import FORWARD_ONLY, Work
from recipes.whole_model.training import Training

LARGEST_PARTS = 5
FIRST_STACKS = 5


def measure_cell(cell: Cell, device: Device, timelines: Mapping[str, Path]) -> Row:
    """Return the peaks and what they are made of, and what a block saves; or the phase in which memory ran out.

    ``timelines`` maps the names of some cells to the picture of each. Only CUDA's allocator records its history. What a
    block saves is counted in a forward pass of its own; between
    checkpoints nothing is saved, and nothing is counted.
    """
    found: Row = {}
    if device == "cuda":
        with sigterm_raises(), tempfile.TemporaryDirectory(prefix="memory_questions.") as made:
            run = Path(made) / "run"
            shortage = _record(work_of(cell), run)
            if shortage is not None:
                return {**shortage, "status": out_of_memory(str(shortage["phase"]))}
            found |= read_recorded(run, work_of(cell))
            picture = timelines.get(name_of(cell))
            if picture is not None:
                _profkit("memory", str(run), "--timeline", str(picture))
                found["timeline"] = picture.name
    if not cell["checkpoint_layers"]:
        training = Training(work_of(cell), device)
        shortage = run_short(lambda: found.update(_count(training)), device)
        if shortage is not None:
            phase = FORWARD if hasattr(training, "inputs") else training.phase
            return {"status": out_of_memory(phase), **shortage}
    return {"status": OK, **found}


def _record(work: Work, run: Path) -> Row | None:
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        setting = {**asdict(work), "device": "cuda", "steps": 2, "result": result.name}
        script = [sys.executable, "-m", "recipes.whole_model.training", json.dumps(setting)]
        _profkit(
            "run", "--memory-only", "--no-annotate", "--warmup", "1", "--steps", "1", "-o", str(run), "--", *script
        )
        shortage: Row | None = json.loads(Path(result.name).read_text())
    return shortage


def _profkit(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "profkit", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RunError(f"profkit {words[0]} ended with status {done.returncode}: {last}")


def read_recorded(path: Path, work: Work) -> Row:
    """Return the peaks of a snapshot or run directory, what was alive then, and each phase's peak next to prediction.

    ``replay_difference_bytes`` is the replayed peak less the allocator's own; None if no run recorded that.
    """
    opened = read_snapshot(path)
    result = opened.memory()
    totals, peak, check = result.totals, result.composition, result.allocator_check
    return {
        "allocated_peak_bytes": totals.allocated_peak_bytes,
        "reserved_peak_bytes": totals.reserved_peak_bytes,
        "requested_peak_bytes": totals.requested_peak_bytes,
        "peak_phase": peak.phase,
        "replay_difference_bytes": None if check is None else check.allocated_difference_bytes,
        "is_exact": totals.exact,
        "phase_peaks": {phase.name: phase.peak_bytes for phase in result.phases},
        "by_category": {row.category: row.bytes for row in peak.by_category},
        "largest": [
            {key: getattr(row, key) for key in ("bytes", "category", "phase", "owner", "label")} for row in peak.largest
        ],
        "stacks": [
            {"bytes": row.bytes, "count": row.count, "label": row.label} for row in peak.by_stack[:FIRST_STACKS]
        ],
        **compare_phases(requested_peaks(opened.device()), work),
        "warnings": [warning.message for warning in result.warnings],
    }


def requested_peaks(memory: Any) -> dict[str, int]:
    """Return the highest requested bytes within each phase of a device's history."""
    requested = memory.history.curves.requested
    found: dict[str, int] = {}
    for phase in memory.timeline.phases:
        first, last = memory.timeline.moments_of(phase)
        found[phase.name] = max(found.get(phase.name, 0), int(requested[first : last + 1].max()))
    return found


def compare_phases(requested: Mapping[str, int], work: Work) -> Row:
    """Return each phase's requested peak next to the predicted one, and the difference of the two highest.

    ``difference_bytes`` is between the two peaks, whether they are of the same phase or not.
    """
    predicted = {peak.phase: peak.bytes for peak in predict_memory(work).peaks}
    phases = [
        {"phase": name, "requested_bytes": size, "predicted_bytes": predicted[name],
         "difference_bytes": size - predicted[name]}
        for name, size in requested.items() if name in predicted
    ]  # fmt: skip
    highest = max(phases, key=lambda phase: int(str(phase["requested_bytes"])))
    return {
        "requested_phases": phases,
        "requested_phase": highest["phase"],
        "difference_bytes": int(str(highest["requested_bytes"])) - max(predicted.values()),
    }


def _count(training: Training) -> Row:
    training.build()
    is_trained = training.work.passes != FORWARD_ONLY

    def forward() -> Tensor:
        with torch.set_grad_enabled(is_trained), training.autocast():
            logits: Tensor = training.module(training.inputs)
        # Autocast forgets its casts in between, as in the step.
        with torch.set_grad_enabled(is_trained), training.autocast():
            return cross_entropy(logits.flatten(0, 1), training.targets.flatten()) if is_trained else logits

    batch = (training.inputs, training.targets)
    return describe_saved(count_saved(training.module, training.module.layers, batch, forward))


def describe_saved(saved: SavedAccount) -> Row:
    """Return the tensor that a block hands on, the bytes that each saves, and the parts of the one that saves most."""
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
    """Return the parts, equal ones together, the largest first; all after the fifth are one line."""
    ordered = sorted(Counter(parts).items(), key=lambda entry: -entry[0].bytes * entry[1])
    lines: list[dict[str, object]] = [
        {**asdict(part), "shape": list(part.shape), "count": count, "bytes": part.bytes * count}
        for part, count in ordered[:LARGEST_PARTS]
    ]
    rest = ordered[LARGEST_PARTS:]
    if rest:
        count, size = sum(count for _, count in rest), sum(part.bytes * count for part, count in rest)
        lines.append({"made_by": None, "saved_in": None, "shape": None, "dtype": None, "count": count, "bytes": size})
    return lines


_NODE = re.compile(r"(?P<operator>\w+?)Backward\d*$")
_VIEWS = frozenset(
    {"View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Expand", "Unsqueeze", "Squeeze", "Slice"}
)
_CAST = "ToCopy"


@dataclass(frozen=True)
class Part:
    """A saved tensor: the operator that made it, the part of the block that saved it first, its size."""

    made_by: str
    saved_in: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class BlockAccount:
    """One block: the tensors saved for its backward, and its output.

    A block's input counts as its own, because its norm saves it; its output is the next block's input.
    """

    parts: tuple[Part, ...]
    output_shape: tuple[int, ...]
    output_dtype: str
    output_bytes: int

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class SavedAccount:
    """What a forward pass saves, by block and outside of the blocks.

    Each storage counts once, where it is saved first. Parameters, buffers and inputs do not count: they exist anyway.
    """

    blocks: tuple[BlockAccount, ...]
    outside_bytes: int

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks) + self.outside_bytes


def count_saved(
    module: nn.Module, blocks: nn.ModuleList, inputs: Iterable[Tensor], forward: Callable[[], object]
) -> SavedAccount:
    """Return what ``forward()`` saves for backward; it runs ``module`` with its ``blocks`` on ``inputs``."""
    running: list[tuple[int, str]] = []  # The block's number and the part's name, the innermost last.
    parts: list[list[Part]] = [[] for _ in blocks]
    outputs: dict[int, Tensor] = {}
    outside: list[int] = []
    seen = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers(), *inputs)}

    def begin(place: tuple[int, str], *_: object) -> None:
        running.append(place)

    def end(place: tuple[int, str], _module: nn.Module, _inputs: object, output: Tensor) -> None:
        running.pop()
        number, name = place
        if not name:
            outputs[number] = output.detach()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            if running:
                number, name = running[-1]
                part = Part(_maker(tensor), name, tuple(tensor.shape), _name(tensor.dtype), storage.nbytes())
                parts[number].append(part)
            else:
                outside.append(storage.nbytes())
        # Keep the storage, so that no other takes its address; but not the node, which would hold its results.
        return tensor.detach()

    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            for name, part in block.named_modules():
                hooks.enter_context(part.register_forward_pre_hook(partial(begin, (number, name))))
                hooks.enter_context(part.register_forward_hook(partial(end, (number, name))))
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        forward()
    accounts = [
        BlockAccount(tuple(saved), tuple(output.shape), _name(output.dtype), output.untyped_storage().nbytes())
        for saved, (_, output) in zip(parts, sorted(outputs.items()), strict=True)
    ]
    return SavedAccount(tuple(accounts), sum(outside))


def _maker(tensor: Tensor) -> str:
    """Return the operator that made a tensor, ignoring views; unknown for tensors without a gradient."""
    node: Any = tensor.grad_fn
    names: list[str] = []
    while node is not None and len(names) < 2:
        found = _NODE.search(node.name())
        name = found["operator"] if found else ""
        if name not in _VIEWS:
            names.append(name)
        node = node.next_functions[0][0] if node.next_functions else None
    if not names:
        return "without a gradient"
    if names[0] == _CAST:
        return "cast of a weight" if names[1:] == [""] else "cast"
    return re.sub(r"(?<!^)(?=[A-Z])", "_", names[0]).lower()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
