"""How much of a step's time the light record takes, in a run of several ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.benchmarks.bench_light
        [--parts collectives,modules,program] [--step-ms 20] [--collectives 5,25] [--steps 600] [--modules 1,200]
        [--rounds 15] [--blocks 26]

collectives: in each step a rank calls some collectives and then sleeps until the step is over. Processor time is
counted, so that other programs on the machine do not matter: for marking the phases, for the step's own entry, and for
reading the flight recorder and writing the file, which happens once in many steps.

modules: each rank trains a model of many modules that compute next to nothing, in three ways by turns: without
profkit's hooks, with them in steps that the record does not keep, and with them in steps that it keeps. What the hooks
add to a step is printed, as processor time.

program: the same three ways for the program of `tests/late_program.py` under DDP, whose host sets the pace (130
modules; meant to take about 17 ms a step on an H200). Here the time of a clock is printed too, and everything counts
that profkit does in a step: hooks, events, the step's entry, reading the flight recorder and writing. Its buffer and
NCCL's threads are there in all three ways.

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
from profkit.capture.steps.times import PhaseClock
from profkit.names import DATA, PHASES
from profkit.run.directory import LIGHT, name_of_rank
from profkit.run.light_columns import read_light
from tests.late_program import Delay, Model, join, parallel


def bench(run: Path, device: torch.device, step_s: float, collectives: int, steps: int) -> str:
    """Return a line: what the record costs steps of this length, with this number of collectives in each."""
    light, clock = LightRecorder(run), PhaseClock()
    values = torch.ones(1000, device=device)
    within = 0.0
    distributed.barrier()
    began = time.perf_counter()
    for number in range(steps):
        start, used = time.perf_counter(), time.thread_time()
        clock.start()
        light.step_begins(number)
        within += time.thread_time() - used
        works = [distributed.all_reduce(values, async_op=True) for _ in range(collectives)]
        for work in works:
            if work is not None:
                work.wait()
        time.sleep(max(0.0, step_s - (time.perf_counter() - start)))
        used = time.thread_time()
        for phase in (DATA, *PHASES):
            clock.begin(phase)
            clock.end()
        light.step_ended(clock.take())
        within += time.thread_time() - used
    took = time.perf_counter() - began
    light.end()
    path = run / name_of_rank(LIGHT, distributed.get_rank())
    record = read_light(path)[1]
    whole = sum(len(step.collectives) > 0 for step in record.steps)
    return (
        f"{collectives} collectives in a step of {took / steps * 1e3:.1f} ms: {within / steps * 1e6:.0f} µs = "
        f"{within / took:.2%}; {len(record.steps)} steps kept, {whole} with collectives, "
        f"{path.stat().st_size / len(record.steps):.0f} B a step"
    )


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
        self._hooks.rest(is_wanted=not is_kept)

    def hooks_failed(self, error: Exception) -> None:
        """End the benchmark: without hooks there is nothing to measure."""
        raise error


WAYS = ("without", "not kept", "kept")


def bench_modules(run: Path, modules: int, rounds: int, steps: int = 40) -> str:
    """Return a line: by how many µs the hooks make a step longer, for a model with this number of modules."""
    model = nn.Sequential(*(nn.Identity() for _ in range(modules)), nn.Linear(2, 2))
    hooked = Hooked(run, torch.optim.SGD, model.parameters())
    batches = iter(DataLoader(torch.ones(10_000_000, 1).expand(-1, 2), batch_size=None))

    def time_of_steps(way: str) -> float:
        optimizer = hooked.choose(way)
        for number in range(2 * steps):
            if number == steps:  # Python specializes its bytecode again after the hooks change
                began = time.thread_time_ns()
            model(next(batches)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.thread_time_ns() - began) / steps / 1e3

    times = [{way: time_of_steps(way) for way in WAYS} for _ in range(rounds)]
    hooked.put(is_in=False)
    more = {way: median(one[way] - one["without"] for one in times) for way in WAYS[1:]}
    plain = median(one["without"] for one in times)
    return f"{modules} modules: {plain:.0f} µs a step; " + ", ".join(f"{way} {us:+.0f} µs" for way, us in more.items())


def bench_program(run: Path, device: torch.device, blocks: int, rounds: int, steps: int = 40) -> Iterator[str]:
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
    parser.add_argument("--parts", default="collectives,modules,program")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--collectives", default="5,25")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--modules", default="1,200")
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    parser.add_argument("--blocks", type=int, default=26)
    chosen = parser.parse_args()
    parts = chosen.parts.split(",")
    LightRecorder(Path()).begin()
    device = join()
    with tempfile.TemporaryDirectory() as place:
        for number, count in enumerate(map(int, chosen.collectives.split(",") * ("collectives" in parts))):
            _print(bench(_folder(place, f"c{number}"), device, chosen.step_ms / 1e3, count, chosen.steps))
        for number, count in enumerate(map(int, chosen.modules.split(",") * ("modules" in parts))):
            _print(bench_modules(_folder(place, f"m{number}"), count, chosen.rounds))
        if "program" in parts:
            for line in bench_program(_folder(place, "program"), device, chosen.blocks, chosen.rounds):
                _print(line)
    distributed.destroy_process_group()


def _folder(place: str, name: str) -> Path:
    folder = Path(place) / name
    folder.mkdir()
    return folder


def _print(line: str) -> None:
    if distributed.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
