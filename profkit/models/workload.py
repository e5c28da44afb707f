"""What a worker process runs, as plain data: the launcher writes it, the worker process reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from profkit.models.presets import PRESETS, Preset

Passes = Literal["forward", "forward-backward", "train"]
Dtype = Literal["fp32", "tf32", "bf16"]
CompileMode = Literal["none", "default", "reduce-overhead"]
Device = Literal["auto", "cuda", "cpu"]
Recorder = Literal["none", "kineto", "nsys", "memory"]
Stacks = Literal["python", "all"]

MODEL_PREFIX = "model."

MEMORY_ENTRIES = 1_000_000
"""Allocator events kept by default: some hundred training steps of a large model, in 0.3 to 1 GB of host memory."""


@dataclass(frozen=True)
class Workload:
    """Which model, on what, how often.

    ``tf32``: fp32 with matrix products in TF32; ``bf16``: autocast with fp32 weights; ``auto`` takes CUDA where it is.
    With several ``contexts`` the steps run with each of them in turn, and ``context`` is the longest. With several
    ``ranks`` as many processes of one machine train it together, each on a batch of its own. ``checkpoint_layers`` is
    how many layers at a time keep no more than their input for backward, which runs them again; 0: each keeps all that
    its backward needs. FLOPs are those of the model, whatever runs again.
    """

    preset_name: str
    batch: int = 4
    context: int = 256
    warmup_steps: int = 2
    steps: int = 3
    dtype: Dtype = "fp32"
    compile_mode: CompileMode = "none"
    passes: Passes = "train"
    seed: int = 0
    device: Device = "auto"
    contexts: tuple[int, ...] = ()
    ranks: int = 1
    checkpoint_layers: int = 0

    @property
    def preset(self) -> Preset:
        return PRESETS[self.preset_name]

    @property
    def target(self) -> str:
        """What the command line calls it."""
        return f"{MODEL_PREFIX}{self.preset_name}"

    def with_each_context(self) -> tuple[Workload, ...]:
        """Return one workload a context, in the order of the request; of a single one itself."""
        return tuple(replace(self, context=context, contexts=()) for context in self.contexts) or (self,)


@dataclass(frozen=True)
class CallableWorkload:
    """A callable of the user's, ``package.module:name``, that returns a step; and how often the step is called.

    ``depth`` of the modules' ranges; ``annotate`` False opens none but the steps'; ``flops`` counts what the last
    warm-up step does. ``device`` is where its steps ran when that is known, else ``auto``.
    """

    target: str
    warmup_steps: int = 2
    steps: int = 3
    depth: int = 3
    annotate: bool = True
    flops: bool = False
    device: Device = "auto"

    ranks: ClassVar[int] = 1


@dataclass(frozen=True)
class MemoryOptions:
    """How the allocator is recorded: with which stacks, how many events at most.

    ``saved`` also writes down every tensor that autograd saves for backward.
    """

    stacks: Stacks = "python"
    max_entries: int = MEMORY_ENTRIES
    saved: bool = False


@dataclass(frozen=True)
class MemoryOrder:
    """Where the allocator's recording goes, and how it is made; see `MemoryOptions`."""

    snapshot_path: str
    ledger_path: str
    stacks: Stacks = "python"
    max_entries: int = MEMORY_ENTRIES
    saved: bool = False

    @property
    def options(self) -> MemoryOptions:
        return MemoryOptions(self.stacks, self.max_entries, self.saved)


@dataclass(frozen=True)
class Order:
    """What a worker process is told.

    ``result_path`` is where it leaves its results, ``trace_path`` where Kineto's trace goes, ``memory`` how the
    allocator is recorded. ``output_fds`` are the inherited descriptors to use as standard output and error, where the
    recorder writes to the usual ones itself.
    """

    workload: Workload | CallableWorkload
    recorder: Recorder
    result_path: str
    trace_path: str | None = None
    memory: MemoryOrder | None = None
    output_fds: tuple[int, int] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        fields = json.loads(text)
        memory = None if fields["memory"] is None else MemoryOrder(**fields["memory"])
        fds = None if fields["output_fds"] is None else tuple(fields["output_fds"])
        return cls(**{**fields, "workload": _read_workload(fields["workload"]), "memory": memory, "output_fds": fds})


def _read_workload(fields: dict[str, Any]) -> Workload | CallableWorkload:
    if "target" in fields:
        return CallableWorkload(**fields)
    return Workload(**{**fields, "contexts": tuple(fields["contexts"])})
