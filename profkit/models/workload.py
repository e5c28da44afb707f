"""What one run of a built-in model does, as plain data: the launcher writes it, the worker process reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from profkit.models.presets import PRESETS, Preset

Passes = Literal["forward", "forward-backward", "train"]
Dtype = Literal["fp32", "bf16"]
CompileMode = Literal["none", "default", "reduce-overhead"]
Device = Literal["auto", "cuda", "cpu"]
Recorder = Literal["none", "kineto", "nsys", "memory"]
Stacks = Literal["python", "all"]

MEMORY_ENTRIES = 1_000_000
"""Allocator events kept by default: some hundred training steps of a large model, in 0.3 to 1 GB of host memory."""


@dataclass(frozen=True)
class Workload:
    """Which model, on what, how often. ``bf16`` means autocast with fp32 weights; ``auto`` takes CUDA where it is."""

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

    @property
    def preset(self) -> Preset:
        return PRESETS[self.preset_name]


@dataclass(frozen=True)
class MemoryOrder:
    """How the allocator is recorded: where to, with which stacks, how many events at most.

    ``saved`` also writes down every tensor that autograd saves for backward.
    """

    snapshot_path: str
    ledger_path: str
    stacks: Stacks = "python"
    max_entries: int = MEMORY_ENTRIES
    saved: bool = False


@dataclass(frozen=True)
class Order:
    """What a worker process is told.

    ``result_path`` is where it leaves its results, ``trace_path`` where Kineto's trace goes, ``memory`` how the
    allocator is recorded. ``output_fds`` are the
    inherited descriptors to use as standard output and error, where the recorder writes to the usual ones itself.
    """

    workload: Workload
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
        return cls(**{**fields, "workload": Workload(**fields["workload"]), "memory": memory})
