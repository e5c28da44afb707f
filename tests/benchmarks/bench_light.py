"""What the light record costs a step of several ranks: the time within it, as a share of the step.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/benchmarks/bench_light.py
        [--step-ms 20] [--collectives 5,25] [--steps 600]

Ranks make steps of collectives over gloo and then sleep until the step is over, so that a shared machine does not
decide the result. Counted are the marks of the phases, the step's own entry, and reading the flight recorder and
writing the file, which happen once in many steps; all in time of the processor, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed

from profkit.capture.light import LightRecorder
from profkit.capture.times import PhaseClock
from profkit.names import DATA, PHASES
from profkit.run.directory import LIGHT, name_of_rank
from profkit.run.light_record import read_light_record


def bench(run: Path, step_s: float, collectives: int, steps: int) -> str:
    """Return in a line what the record costs steps of this length with so many collectives each."""
    light, clock = LightRecorder(run), PhaseClock()
    values = torch.ones(1000)
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
    record = read_light_record(path)
    whole = sum(len(step.collectives) > 0 for step in record.steps)
    return (
        f"{collectives} collectives in a step of {took / steps * 1e3:.1f} ms: {within / steps * 1e6:.0f} µs = "
        f"{within / took:.2%}; {len(record.steps)} steps kept, {whole} with collectives, "
        f"{path.stat().st_size / len(record.steps):.0f} B a step"
    )


def main() -> None:
    """Run as the command line says; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--collectives", default="5,25")
    parser.add_argument("--steps", type=int, default=600)
    chosen = parser.parse_args()
    LightRecorder(Path()).begin()
    distributed.init_process_group("gloo")
    for count in map(int, chosen.collectives.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            line = bench(Path(folder), chosen.step_ms / 1e3, count, chosen.steps)
        if distributed.get_rank() == 0:
            print(line, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
