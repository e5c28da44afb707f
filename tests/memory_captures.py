"""Small made snapshots with phases, frames and a ledger."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from profkit.analysis.memory.device import Composition
from profkit.analysis.memory.opened_snapshot import MemoryResult, OpenedSnapshot
from profkit.reading import open_snapshot
from profkit.run.directory import OWNERS, SNAPSHOT
from profkit.snapshot.reader import build_snapshot
from tests.allocator_reference import MIB, Block, ReferenceAllocator
from tests.run_builder import start_run

STACKS = {
    "model": [
        ("<lambda>", "/x/site-packages/torch/nn/modules/module.py", 1),
        ("_apply", "torch/nn/modules/module.py", 2),
    ],
    "forward": [
        ("linear", "/x/site-packages/torch/nn/functional.py", 9),
        ("forward", "train.py", 12),
        ("_call_impl", "torch/nn/modules/module.py", 3),
    ],
    "data": [("batch", "train.py", 5), ("<module>", "train.py", 40)],
    "backward": [],
    "state": [("_init_group", "/x/site-packages/torch/optim/adam.py", 7), ("<module>", "train.py", 44)],
    "compiled state": [
        ("_init_group", "/x/site-packages/torch/optim/adam.py", 7),
        ("_fn", "/x/site-packages/torch/_dynamo/eval_frame.py", 1263),
        ("<module>", "train.py", 46),
    ],
    "mask": [("mask", "train.py", 21), ("<module>", "train.py", 41)],
    "keep": [("remember", "train.py", 30), ("<module>", "train.py", 45)],
    "bucket": [("_ddp_init_helper", "/x/site-packages/torch/nn/parallel/distributed.py", 8), ("main", "train.py", 6)],
    "generated": [
        ("call", f"/tmp/torchinductor_me/ym/cymh4uh5{'k' * 44}.py", 90),
        ("forward", "train.py", 12),
    ],
    "generated anew": [
        ("call", f"/tmp/torchinductor_me/2a/c2aomvkf{'q' * 44}.py", 71),
        ("run", "/x/site-packages/torch/_inductor/utils.py", 3401),
        ("forward", "train.py", 12),
    ],
}


class Training:
    """A few steps of a training run on the reference allocator: stacks, annotations, and a ledger of owners."""

    def __init__(self, *, leaks: bool = False, steps: int = 3, scale: int = 1, late_free: bool = False) -> None:
        self.allocator = ReferenceAllocator()
        self.allocator.record()
        self.annotations: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = [{"kind": "header", "version": 1}]
        self.scale, self.late_free = scale, late_free
        self.weights = [self.malloc(4 * MIB, "model", ("parameter", f"w{n}")) for n in range(2)]
        self.states: list[Block] = []
        self.kept: list[Block] = []
        for step in range(steps):
            self.step(step, leaks)

    def malloc(self, size: int, stack: str, owner: tuple[str, str] | None = None) -> Block:
        before = len(self.allocator.events)
        block = self.allocator.malloc(size)
        frames = [{"name": name, "filename": file, "line": line} for name, file, line in STACKS[stack]]
        for event in self.allocator.events[before:]:
            event["frames"] = frames
        if owner:
            role, name = owner
            entry = {"kind": "owned", "time_us": self.allocator.clock, "device": 0, "address": block.address}
            self.ledger.append({**entry, "bytes": size, "role": role, "name": name, "step": 0})
        return block

    def step(self, number: int, leaks: bool) -> None:
        self.mark("START", f"step {number}")
        batch = self.malloc(3000, "data")
        self.mark("START", "forward")
        temporary = self.malloc(2 * MIB, "forward")
        saved = [self.malloc(6 * MIB * self.scale, "forward") for _ in range(2)]
        self.allocator.free(temporary)
        self.mark("END", "forward")
        self.mark("START", "backward")
        inner = self.malloc(3 * MIB, "backward")
        gradients = [self.malloc(4 * MIB, "backward", ("gradient", f"w{n}")) for n in range(2)]
        for block in [inner, *saved]:
            self.allocator.free(block)
        self.mark("END", "backward")
        self.mark("START", "Optimizer.step#AdamW.step")
        if not self.states:
            self.states = [self.malloc(4 * MIB, "state") for _ in range(4)]
        if leaks:
            self.kept.append(self.malloc(700, "keep"))
        for block in [*gradients, batch]:
            self.allocator.free(block)
        self.mark("END", "Optimizer.step#AdamW.step")
        self.mark("END", f"step {number}")

    @contextmanager
    def within(self, *names: str) -> Iterator[None]:
        for name in names:
            self.mark("START", name)
        yield
        for name in reversed(names):
            self.mark("END", name)

    def mark(self, stage: str, name: str) -> None:
        self.allocator.clock += 3
        self.annotations.append({"stage": stage, "name": name, "device": 0, "time_us": self.allocator.clock})

    def snapshot(self) -> dict[str, Any]:
        return {**self.allocator.snapshot(), "external_annotations": self.annotations}

    def figures(self) -> dict[str, Any]:
        """Return the ledger's line of what the allocator says of itself at the dump."""
        allocated, requested, reserved = self.allocator.peaks()
        own = self.allocator
        return {
            "kind": "figures",
            "time_us": own.clock,
            "device": 0,
            "moment": "dump",
            "allocated_bytes": own.allocated.current,
            "allocated_peak_bytes": allocated,
            "requested_bytes": own.requested.current,
            "requested_peak_bytes": requested,
            "reserved_bytes": own.reserved.current,
            "reserved_peak_bytes": reserved,
            "capacity_bytes": 2**34,
        }

    def write(self, folder: Path, name: str = SNAPSHOT) -> Path:
        path = folder / name
        path.write_bytes(pickle.dumps(self.snapshot(), 4))
        return path

    def write_run(self, folder: Path) -> Path:
        self.write(start_run(folder))
        lines = [*self.ledger, self.figures()]
        (folder / OWNERS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    def opened(self) -> OpenedSnapshot:
        """Return the snapshot alone."""
        return opened(self.snapshot())

    def opened_run(self) -> OpenedSnapshot:
        """Return the snapshot with the ledger."""
        with TemporaryDirectory() as folder:
            return open_snapshot(self.write_run(Path(folder)))

    def memory(self, **how: Any) -> MemoryResult:
        return self.opened().memory(**how)

    def at_peak(self, **how: Any) -> Composition:
        """Return what a moment, by default the peak, is made of, with the ledger."""
        return self.opened_run().memory(**how).composition


def opened(data: dict[str, Any], phases: dict[str, str] | None = None) -> OpenedSnapshot:
    return OpenedSnapshot(build_snapshot(Path("made.pickle"), data), phases=phases)


def on_two_devices(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return one snapshot of two: the second one's device becomes device 1."""
    return {
        **first,
        "segments": [*first["segments"], *({**segment, "device": 1} for segment in second["segments"])],
        "device_traces": [*first["device_traces"], *second["device_traces"]],
    }


def sizes(result: MemoryResult) -> dict[str, int]:
    return {row.category: row.bytes for row in result.composition.by_category}


def assert_books_close(result: MemoryResult) -> None:
    at = result.composition
    assert sum(row.bytes for row in at.by_category) == at.allocated_bytes
    assert sum(row.bytes for row in at.by_stack) == at.allocated_bytes
    assert sum(row.bytes for row in at.by_phase) == at.allocated_bytes
    assert sum(row.own_bytes for row in at.by_module) == at.allocated_bytes
    assert sum(row.bytes for row in at.by_module if len(row.path) == 1) == at.allocated_bytes
    assert sum(row.count for row in at.by_stack) == sum(row.count for row in at.by_category)
    for row in at.by_category:
        assert sum(row.evidence.values()) in (row.bytes, 0)
