"""How many bytes a built-in model needs, by phase and tensor; worked out from its sizes, without torch.

For eager execution every allocation of a step is written down in order (`profkit.models.memory_forward`,
`profkit.models.memory_backward`), with the step's own: parameters (4 B each), their gradients, AdamW's two moments
(as much again, twice), and, as ``foreach`` AdamW takes the square roots of all second moments at once, a third time as
much while the optimizer runs. A phase's peak is the highest sum within it, and the step's peak is the highest of the
phases', not the sum of all kinds. Bytes are those that the program asks for; the allocator's padding comes on top.

Between activation checkpoints (``checkpoint_layers``) forward keeps the input of the layers alone; backward writes
their forward pass a second time, up to the last product, which torch leaves out (torch/utils/checkpoint.py).

Compiled code saves what the compiler finds cheap to save and fuses what it likes: its activations and temporaries are
not predicted, only what stands outside of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from profkit.models.memory_backward import GRADIENTS, BackwardPass, Loss
from profkit.models.memory_forward import ForwardPass
from profkit.models.memory_graph import INDEX_BYTES, LOGITS, POSITIONS
from profkit.models.memory_tape import ACTIVATIONS, TEMPORARIES, Block, Line, Peak, Tape, group
from profkit.models.presets import Preset
from profkit.models.workload import Workload
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER

VERSION = 1

HOPPER_WORKSPACE_BYTES = 32 * 2**20
"""What cuBLAS is given for each handle and stream by default on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp). A
handle belongs to a thread: the main thread and the autograd thread have one each."""

COMPILED = "of compiled code: it saves what the compiler chooses: activations and temporaries are not predicted"
FROM_SECOND = "of a step after the first: AdamW's moments and cuBLAS's workspaces are there from its beginning"
ONLY_FIRST = "of the only step: AdamW's moments and cuBLAS's workspaces are made in it"


@dataclass(frozen=True)
class MemoryPrediction:
    """What a step needs; ``peaks`` in the order of the phases, each with what it is made of.

    ``saved`` is what autograd keeps when the loss has been made. For compiled code the peaks are lower bounds, and
    ``is_whole`` is False.
    """

    peaks: tuple[Peak, ...]
    saved: tuple[Line, ...]
    is_whole: bool
    lengths: dict[str, int]
    notes: tuple[str, ...]

    @property
    def peak(self) -> Peak:
        """The highest phase."""
        return max(self.peaks, key=lambda peak: peak.bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON-ready data: the content of ``predicted.json``."""
        return {
            "version": VERSION,
            "lengths": self.lengths,
            "is_whole": self.is_whole,
            "peak_phase": self.peak.phase,
            "phases": [asdict(peak) for peak in self.peaks],
            "saved": [asdict(line) for line in self.saved],
            "notes": list(self.notes),
        }


def predict_memory(workload: Workload, workspace_bytes: int = HOPPER_WORKSPACE_BYTES) -> MemoryPrediction:
    """Return what one step of the workload needs on a GPU: of its later steps, or of its first if that is all."""
    step = StepAccount(workload, workspace_bytes)
    notes = (FROM_SECOND if step.is_later else ONLY_FIRST, *[COMPILED] * (not step.is_whole))
    return MemoryPrediction(step.tape.peaks()[1:], group(step.saved), step.is_whole, step.lengths, notes)


def lengths_of(preset: Preset, batch: int, context: int) -> dict[str, int]:
    """Return the lengths that shapes name."""
    return {
        "b": batch,
        "t": context,
        "d": preset.d_model,
        "f": preset.d_ff,
        "h": preset.num_heads,
        "v": preset.vocab_size,
        "L": preset.num_layers,
    }


class StepAccount:
    """One step of a workload, written onto a tape; its first phase is all that was there before."""

    def __init__(self, workload: Workload, workspace_bytes: int) -> None:
        self._workload = workload
        self._preset = workload.preset
        self._workspace_bytes = workspace_bytes
        self._trains = workload.passes != "forward"
        self.lengths = lengths_of(self._preset, workload.batch, workload.context)
        self.is_later = workload.warmup_steps + workload.steps > 1
        self.is_whole = workload.compile_mode == "none"
        self.tape = Tape(self.lengths, keeps_graph=self._trains)
        self.saved: list[Block] = []
        """What autograd holds when the loss has been made."""
        self._write()

    def _write(self) -> None:
        self.tape.begin("before")
        self._parameters("parameters")
        self._standing()
        if self.is_later:
            self._kept_from_before()
        if self.is_whole:
            self._eager_step()
        else:
            self._compiled_step()

    def _parameters(self, category: str, suffix: str = "") -> list[Block]:
        """Allocate as much as the parameters take, one block a tensor."""
        outside = [("embedding", "v d"), ("final norm gain", "d"), ("head weight", "v d")]
        layer = [(f"{name} weight", "d d") for name in ("query", "key", "value", "output")]
        layer += [(f"{name} weight", "d f") for name in ("w1", "w2", "w3")]
        layer += [(f"{name} gain", "d") for name in ("attention norm", "ffn norm")]
        every = outside + layer * self._preset.num_layers
        return [self.tape.new(name + suffix, shape, 4, category) for name, shape in every]

    def _standing(self) -> None:
        """Allocate what stands beside the parameters: tables, mask and the batch with its targets."""
        for name in ("cosine table", "sine table"):
            self.tape.new(name, f"t {(self._preset.head_dim + 1) // 2}", 4, "buffers")
        self.tape.new("causal mask", "t t", 1, "buffers")
        self.tape.new("tokens", f"b {self._workload.context + 1}", INDEX_BYTES, "inputs")

    def _kept_from_before(self) -> None:
        """Allocate what an earlier step has left: workspaces, moments, the loss."""
        self._workspace("main thread")
        if self._trains:
            self._workspace("autograd thread")
            self.tape.new("loss of the step before", "", 4, "outputs")
        if self._workload.passes == "train":
            self._moments()

    def _workspace(self, thread: str) -> None:
        self.tape.new(f"cuBLAS workspace of the {thread}", f"{self._workspace_bytes}", 1, "workspace")

    def _backward_workspace(self) -> None:
        if not self.is_later:
            self._workspace("autograd thread")

    def _moments(self) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._parameters("optimizer state", f" {name}")

    def _eager_step(self) -> None:
        tape, is_bf16 = self.tape, self._workload.dtype == "bf16"
        tape.begin(FORWARD)
        if not self.is_later:
            self._workspace("main thread")
        forward = ForwardPass(
            tape,
            self._preset.num_layers,
            is_bf16=is_bf16,
            checkpoint_layers=self._workload.checkpoint_layers,
        )
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
        rows = self._workload.batch * self._workload.context
        backward = BackwardPass(tape, rows=rows, d_model=self._preset.d_model, is_bf16=is_bf16)
        backward.run(made, loss, self._backward_workspace)
        if self._workload.passes == "train":
            tape.begin(OPTIMIZER)
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
        if not self.is_later:
            self._moments()
        self.tape.drop(*self._parameters(TEMPORARIES, " exp_avg_sq, square root"))

    def _compiled_step(self) -> None:
        tape = self.tape
        tape.begin(FORWARD)
        if not self.is_later:
            self._workspace("main thread")
        if not self._trains:
            return
        tape.new("logits", LOGITS, 2 if self._workload.dtype == "bf16" else 4, ACTIVATIONS)
        tape.begin(LOSS)
        tape.begin(BACKWARD)
        self._backward_workspace()
        if self._workload.passes == "train":
            tape.begin(OPTIMIZER)
            gradients = self._parameters(GRADIENTS)
            self._optimizer()
            tape.drop(*gradients)
