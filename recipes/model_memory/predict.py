"""How many bytes one step of profkit's transformer needs, by phase and tensor; computed from its sizes, without torch.

For eager execution every allocation of a step is recorded in order (`recipes.model_memory.forward`, ``backward``),
together with parameters (4 B each), their gradients and AdamW's two moments; ``foreach`` AdamW takes the square roots
of all second moments at once, once more the size of the parameters while the optimizer runs. A phase's peak is the
highest sum within it, and the step's peak the highest of the phases, not the sum of all kinds. The step is not the
first one: moments and cuBLAS workspaces exist from its beginning. Bytes are as requested; the allocator rounds them up.

Between activation checkpoints forward keeps only the input of the layers; backward records their forward pass a second
time, up to the last product, which torch leaves out (torch/utils/checkpoint.py).

Compiled code saves and fuses what the compiler chooses: only what stands outside of it is predicted, a lower bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER
from recipes.common.recipe import Device, Row
from recipes.model_memory.backward import BackwardPass, Loss
from recipes.model_memory.forward import ForwardPass
from recipes.model_memory.tape import (
    ACTIVATIONS,
    GRADIENTS,
    INDEX_BYTES,
    LOGITS,
    POSITIONS,
    TEMPORARIES,
    Block,
    Line,
    Peak,
    Tape,
    group,
)
from recipes.whole_model.cells import FORWARD_BACKWARD, FORWARD_ONLY, TRAIN, Work

HOPPER_WORKSPACE_BYTES = 32 * 2**20
"""What cuBLAS gets for each handle and stream by default on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp). A handle
belongs to a thread: the main thread and the autograd thread have one each."""

KINDS = ("parameters", "optimizer state", "gradients", "activations", "autocast copies", "temporaries", "workspace")
REST = "the rest"

_COPIES = {FORWARD_ONLY: 1, FORWARD_BACKWARD: 2, TRAIN: 4}
"""How often the parameters are held: themselves, their gradients, AdamW's two moments."""


@dataclass(frozen=True)
class MemoryPrediction:
    """The peaks of a step, in the order of the phases, and what autograd has saved when the loss has been computed."""

    peaks: tuple[Peak, ...]
    saved: tuple[Line, ...]

    @property
    def peak(self) -> Peak:
        """The highest phase."""
        return max(self.peaks, key=lambda peak: peak.bytes)


def predict_memory(work: Work, device: Device = "cuda") -> MemoryPrediction:
    """Return what one step needs; only CUDA's libraries take workspaces."""
    step = StepAccount(work, HOPPER_WORKSPACE_BYTES if device == "cuda" else 0)
    return MemoryPrediction(step.tape.peaks()[1:], group(step.saved))


def describe_prediction(work: Work, device: Device) -> Row:
    """Return the predicted peaks by phase and category, as columns of a row.

    ``added_up_bytes`` is the usual sum: 4 N bytes of parameters, as much of gradients, twice as much for AdamW, and all
    that is saved for backward, as if it existed at once; without autocast copies, temporaries and workspaces.
    """
    prediction = predict_memory(work, device)
    parameters = work.preset.parameter_count
    saved = sum(line.bytes for line in prediction.saved)
    phases = []
    for peak in prediction.peaks:
        kinds = Counter[str]()
        for line in peak.lines:
            kinds[line.category] += line.bytes
        phases.append({"phase": peak.phase, "bytes": peak.bytes, "by_category": dict(kinds)})
    return {
        "parameters": parameters,
        "predicted_peak_bytes": prediction.peak.bytes,
        "predicted_phase": prediction.peak.phase,
        "predicted_phases": phases,
        "predicted_saved_bytes": saved,
        "added_up_bytes": _COPIES[work.passes] * 4 * parameters + saved,
    }


def kinds_at_peak(row: Row) -> dict[str, int]:
    """Return the predicted bytes of each of the `KINDS` at the peak of a described row, and of all others."""
    phases = cast("list[dict[str, Any]]", row["predicted_phases"])
    kinds: dict[str, int] = max(phases, key=lambda phase: int(phase["bytes"]))["by_category"]
    rest = sum(size for kind, size in kinds.items() if kind not in KINDS)
    return {**{kind: kinds.get(kind, 0) for kind in KINDS}, REST: rest}


class StepAccount:
    """One step, recorded onto a tape; its first phase holds all that exists before the step."""

    def __init__(self, work: Work, workspace_bytes: int) -> None:
        self._work, self._preset = work, work.preset
        self._workspace_bytes = workspace_bytes
        self._trains = work.passes != FORWARD_ONLY
        preset = work.preset
        lengths = {"b": work.batch, "t": work.context, "d": preset.d_model, "f": preset.d_ff, "h": preset.num_heads}
        self.tape = Tape({**lengths, "v": preset.vocab_size}, keeps_graph=self._trains)
        self.saved: list[Block] = []
        """What autograd holds when the loss has been computed."""
        self.tape.begin("before")
        self._existing()
        if work.compiled:
            self._compiled_step()
        else:
            self._eager_step()

    def _parameters(self, category: str, suffix: str = "") -> list[Block]:
        outside = [("embedding", "v d"), ("final norm gain", "d"), ("head weight", "v d")]
        layer = [(f"{name} weight", "d d") for name in ("query", "key", "value", "output")]
        layer += [(f"{name} weight", "d f") for name in ("w1", "w2", "w3")]
        layer += [(f"{name} gain", "d") for name in ("attention norm", "ffn norm")]
        every = outside + layer * self._preset.num_layers
        return [self.tape.new(name + suffix, shape, 4, category) for name, shape in every]

    def _existing(self) -> None:
        """Allocate what exists before the step: parameters, tables, the batch, workspaces, moments, the last loss."""
        tape = self.tape
        self._parameters("parameters")
        for name in ("cosine table", "sine table"):
            tape.new(name, f"t {(self._preset.head_dim + 1) // 2}", 4, "buffers")
        tape.new("causal mask", "t t", 1, "buffers")
        tape.new("tokens", f"b {self._work.context + 1}", INDEX_BYTES, "inputs")
        for thread in ("main thread", "autograd thread")[: 2 if self._trains else 1]:
            tape.new(f"cuBLAS workspace of the {thread}", f"{self._workspace_bytes}", 1, "workspace")
        if self._trains:
            tape.new("loss of the previous step", "", 4, "outputs")
        if self._work.passes == TRAIN:
            for name in ("exp_avg", "exp_avg_sq"):
                self._parameters("optimizer state", f" {name}")

    def _eager_step(self) -> None:
        tape, is_bf16 = self.tape, self._work.dtype == "bf16"
        tape.begin(FORWARD)
        layers, checkpoints = self._preset.num_layers, self._work.checkpoint_layers
        forward = ForwardPass(tape, layers, is_bf16=is_bf16, checkpoint_layers=checkpoints)
        made = forward.run()
        made.logits.category = ACTIVATIONS if self._trains else made.logits.category
        if not self._trains:
            tape.drop(made.logits)
            forward.end_autocast()
            return
        forward.end_autocast()
        tape.begin(LOSS)
        loss = self._loss(forward.low)
        self.saved = [block for block in tape.live() if block.is_saved]
        tape.begin(BACKWARD)
        rows = self._work.batch * self._work.context
        backward = BackwardPass(tape, rows=rows, d_model=self._preset.d_model, is_bf16=is_bf16)
        backward.run(made, loss)
        self._optimizer()
        tape.drop(*backward.gradients, made.logits)

    def _loss(self, low: int) -> Loss:
        """Cross-entropy: targets in order, log-softmax in the logits' width, nll_loss in fp32."""
        tape = self.tape
        targets = tape.new_copy("targets in order", POSITIONS, INDEX_BYTES)
        softmax = tape.new("log-softmax", LOGITS, low)
        tape.save(softmax)  # by log-softmax, as its result
        given = softmax if low == 4 else tape.new("log-softmax in fp32", LOGITS, 4)
        tape.new("loss", "", 4, "outputs")
        weight = tape.new("total weight of the loss", "", 4)
        tape.save(given, *targets, weight)
        tape.drop(softmax, *targets, weight, *[given] * (given is not softmax))
        return Loss(softmax, given, targets, weight)

    def _optimizer(self) -> None:
        if self._work.passes == TRAIN:
            self.tape.begin(OPTIMIZER)
            self.tape.drop(*self._parameters(TEMPORARIES, " exp_avg_sq, square root"))

    def _compiled_step(self) -> None:
        tape = self.tape
        tape.begin(FORWARD)
        if not self._trains:
            return
        tape.new("logits", LOGITS, 2 if self._work.dtype == "bf16" else 4, ACTIVATIONS)
        tape.begin(LOSS)
        tape.begin(BACKWARD)
        if self._work.passes == TRAIN:
            # Which gradients exist earlier is up to the compiler; by now all do.
            tape.begin(OPTIMIZER)
            gradients = self._parameters(GRADIENTS)
            tape.drop(*self._parameters(TEMPORARIES, " exp_avg_sq, square root"))
            tape.drop(*gradients)
