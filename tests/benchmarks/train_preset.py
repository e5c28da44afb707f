"""A plain training script for `bench_annotation`: blocks of steps of a built-in model, each block's time on one line.

    python train_preset.py PRESET CONTEXT STEPS_PER_BLOCK BLOCKS on|off|turns

Its own ranges are ``on``, ``off``, or off and on by turns, block by block; the device is waited for between blocks.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter_ns
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from profkit.annotation import Range
from profkit.models.options import PRESETS
from profkit.models.transformer import TransformerLM

BATCH = 4
_ENTER, _EXIT = Range.__enter__, Range.__exit__


def switch_ranges(on: bool) -> None:
    """Have ranges emitted, or cost no more than an empty context manager."""
    # mypy: methods are replaced on purpose, so that the two states differ in nothing else.
    Range.__enter__ = _ENTER if on else lambda self: self  # type: ignore[method-assign]
    Range.__exit__ = _EXIT if on else lambda self, *_: None  # type: ignore[method-assign]


def train(preset_name: str, context: int, steps: int, blocks: int, ranges: str) -> list[dict[str, Any]]:
    """Return one row a block: whether ranges were on, and the mean time of its steps in ns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    preset = PRESETS[preset_name]
    with device:
        model = TransformerLM(preset, context)
        tokens = torch.randint(preset.vocab_size, (BATCH, context + 1))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = []
    for block in range(blocks):
        on = ranges == "on" or (ranges == "turns" and block % 2 == 1)
        switch_ranges(on)
        wait(device)
        start_ns = perf_counter_ns()
        for _ in range(steps):
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        wait(device)
        rows.append({"ranges": on, "step_ns": (perf_counter_ns() - start_ns) / steps})
    return rows


def wait(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    name, *counts, ranges = sys.argv[1:]
    for row in train(name, *map(int, counts), ranges):
        print(json.dumps(row), flush=True)
