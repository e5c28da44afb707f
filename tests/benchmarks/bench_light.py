"""How much of a step's time the light record takes, in a run of several ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.benchmarks.bench_light
        [--rounds 15] [--blocks 26]

The program of `tests/late_program.py` trains under DDP, and its host sets the pace (130 modules; meant to take about
17 ms a step on an H200), in three ways by turns: without profkit's hooks, with them in steps that the record does not
keep, and with them in steps that it keeps. The time of a clock and the thread's processor time are printed, and
everything counts that profkit does in a step: hooks, events, the step's entry, reading the flight recorder and writing.
Its buffer and NCCL's threads are there in all three ways.

With a GPU it runs over NCCL (several ranks may share one), else over gloo.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import distributed, nn
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader, dataloader

from profkit.capture import light as light_record
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.light import LightRecorder
from tests.late_program import Delay, Model, join, parallel

PATCHED = (
    *((nn.Module, "__call__"), (torch.autograd, "backward"), (torch.optim.Optimizer, "profile_hook_step")),
    *((record_function, "__enter__"), (record_function, "__exit__"), (dataloader._BaseDataLoaderIter, "__next__")),
)
"""Functions that run in each step and that the hooks replace."""


class Hooked:
    """The hooks of a process that leaves only a light record; they can be taken out and put back between steps."""

    def __init__(self, run: Path, base: Any, parameters: Iterator[nn.Parameter], **options: Any) -> None:
        plain_step = base.step  # not wrapped: torch does that where an optimizer of the class is made
        trained = list(parameters)
        self._out = [vars(owner)[name] for owner, name in PATCHED]
        self._light = LightRecorder(run)
        self._hooks = Hooks(self, depth=1)
        self._hooks.times_waits = True
        self._hooks.install()
        self._hooks.steps.settle()
        self._in = [vars(owner)[name] for owner, name in PATCHED]
        self._optimizers = {}
        for is_in in (True, False):
            self.put(is_in=is_in)
            kind = type("Own", (base,), {"step": plain_step})
            self._optimizers[is_in] = kind(trained, lr=1e-9, **options)

    def put(self, *, is_in: bool) -> None:
        """Put the hooks in place, or what they replaced."""
        for (owner, name), value in zip(PATCHED, self._in if is_in else self._out, strict=True):
            setattr(owner, name, value)

    def choose(self, way: str) -> torch.optim.Optimizer:
        """Have the next steps run in one of `WAYS`; return an optimizer that was made so."""
        self.put(is_in=way != "without")
        light_record._ALL = 1 << 60 if way == "kept" else 0
        light_record._IN_ROW = 32 if way == "kept" else 0
        return self._optimizers[way != "without"]

    def boundary(self, number: int) -> None:
        """Do what a session does that records nothing."""
        self._light.step_ended(self._hooks.clock.take())
        is_kept = self._light.step_begins(number)
        if is_kept:
            self._hooks.clock.start()
        else:
            self._hooks.clock.stop()

    def hooks_failed(self, error: Exception) -> None:
        """End the benchmark: without hooks there is nothing to measure."""
        raise error


WAYS = ("without", "not kept", "kept")


def bench(run: Path, device: torch.device, blocks: int, rounds: int, steps: int = 40) -> Iterator[str]:
    """Yield lines: what a step of a program takes whose host sets the pace, and how much more with the light record."""
    torch.manual_seed(0)
    model = parallel(Model(256, blocks, Delay("none", 0.0, device)).to(device), "ddp", device)
    hooked = Hooked(run, torch.optim.AdamW, model.parameters(), foreach=False)
    batch = torch.randn(1, 64, 256)
    if device.type == "cuda":
        batch = batch.pin_memory()
    batches = iter(DataLoader(batch.expand(10_000_000, -1, -1), batch_size=None))

    def times_of_steps(way: str) -> tuple[float, float]:
        optimizer = hooked.choose(way)
        for number in range(2 * steps):
            if number == steps:
                _wait_for(device)
                began, used = time.perf_counter_ns(), time.thread_time_ns()
            model(next(batches).to(device, non_blocking=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        _wait_for(device)
        return (time.perf_counter_ns() - began) / steps / 1e3, (time.thread_time_ns() - used) / steps / 1e3

    times = []
    for number in range(rounds):
        first = number % len(WAYS)  # another way is the first in each round
        times.append({way: times_of_steps(way) for way in (*WAYS[first:], *WAYS[:first])})
    hooked.put(is_in=False)
    modules = sum(1 for _ in model.modules())
    for at, clock in enumerate(("wall clock", "its thread's processor time")):
        plain = [one["without"][at] for one in times]
        yield f"program of {modules} modules on {device.type}, {clock}: {_spread(plain)} µs a step without profkit"
        for way in WAYS[1:]:
            more = [one[way][at] - one["without"][at] for one in times]
            yield f"  {way}: {_spread(more)} µs more = {median(more) / median(plain):+.2%}"


def _spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run as the command line says; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    parser.add_argument("--blocks", type=int, default=26)
    chosen = parser.parse_args()
    LightRecorder(Path()).begin()
    device = join()
    with tempfile.TemporaryDirectory() as place:
        for line in bench(Path(place), device, chosen.blocks, chosen.rounds):
            if distributed.get_rank() == 0:
                print(line, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
