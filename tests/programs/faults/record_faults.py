"""Plants faults in programs, has profkit find them, and measures without profkit what each truly costs.

    python tests/programs/faults/record_faults.py OUT [--tiny] [--budget-s 450] [--only NAME]

First every program is recorded with its fault and summarized: ``OUT/predictions.json`` stands before anything is
measured. Then each program's variants run bare, in turns, each in processes of its own, and ``OUT/results.json`` gets
both; the table of it is printed by `fault_table.py`. A fault is named if a Try has its code, and its line or module.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).parent
PLAIN = ("transformer", "vision", "plain", "speech", "diffusion", "recommender")
"""Programs that give their steps; Trainers run their own loops."""
PARALLEL = "parallel"
"""The program of several ranks, which torchrun starts, and which measures its steps itself."""
RANKS = 4
MENDED = {"compile": "compiled", "launches": "graphed"}
"""The fault without which no program has what these Tries advise: a variant with it is measured where one is given."""
MENDED_IN = {"hf_trainer": {"activation": "torchs-gelu"}}
"""The same of single programs."""


@dataclass(frozen=True)
class Fault:
    """A program with faults, and what must be said of it.

    ``codes`` are the causes that are right, ``marker`` is the mark of the line, ``module`` a part of the module's name;
    a clean program has none of these. ``without`` are the faults that stay when the first one is mended; a step without
    does the work of ``samples`` with it. ``fits``: it was looked at while rows were written; the others are a test.
    """

    name: str
    program: str
    faults: tuple[str, ...]
    codes: tuple[str, ...] = ()
    marker: str | None = None
    module: str | None = None
    without: tuple[str, ...] = ()
    samples: int = 1
    steps: int = 190
    options: tuple[str, ...] = ()
    fits: bool = True


_AT_START = frozenset({"launch-blocking"})
"""Faults that a process has from its start or never: no variant of it is measured."""

SPEECH: tuple[tuple[Any, ...], ...] = (
    ("clean", ()),
    ("positions on the CPU", ("positions",), ("made-on-cpu", "python", "waits"), "positions"),
    ("unrolled", ("unrolled",), ("loop", "launches", "compile"), None, "recurrence"),
    ("search for NaN", ("nan-check",), ("waits",), "nan-check"),
    ("masks by NumPy", ("numpy-mask",), ("python", "made-on-cpu"), "numpy-mask"),
    ("records by JSON", ("json",), ("python",), "json"),
    ("fp32", ("fp32",), ("tf32",), None, ""),
    ("no autocast", ("no-autocast",), ("autocast",), None, ""),
    ("chosen frames", ("select",), ("waits",), "select"),
    ("zeroed gradients", ("zeroed",), ("zero-grad",), None, ""),
    ("clipping in a loop", ("clip-loop",), ("loop", "optimizer", "python"), "clip-loop", None, ("clip-fused",)),
    ("norms of gradients", ("norms",), ("waits",), "norms"),
    ("averaged weights", ("average",), ("loop", "optimizer", "python"), "average", None, ("average-at-once",)),
    ("accuracy on the CPU", ("accuracy",), ("waits", "python"), "accuracy"),
    ("reads the loss", ("reads",)),
    ("kept logits", ("history",), ("growth", "allocations"), "history"),
    ("empties the cache", ("empty-cache",), ("allocations",), "empty-cache"),
    ("saves every fifth step", ("saves",), ("python",), "saves"),
    ("synchronizes", ("sync",), ("waits",), "sync"),
    ("fp32, NaN and NumPy", ("fp32", "nan-check", "numpy-mask"), ("tf32",), None, "", ("nan-check", "numpy-mask")),
)
"""Planted in a program that no row was written with."""
DIFFUSION: tuple[tuple[Any, ...], ...] = (
    ("clean", ()),
    ("embedding by Python", ("embedding",), ("python", "waits", "made-on-cpu"), "embedding"),
    ("weights that decay in the loss", ("decay",), ("loop", "launches", "compile", "optimizer", "python"), "decay"),
    ("average on the CPU", ("average-on-cpu",), ("waits", "pageable-copy", "python"), "average-on-cpu"),
    ("Swish by hand", ("swish",), ("activation", "chain", "compile"), None, "activation"),
    ("losses by quartile", ("quartiles",), ("waits", "python", "loop"), "quartiles"),
    ("eight passes", ("eight-passes",), ("batch", "launches", "compile"), None, "", ("four-passes",)),
    ("attention in fp32", ("upcast",), ("attention", "autocast", "tf32"), None, "attention"),
    ("schedule on the CPU", ("schedule",)),
    (
        "decay and quartiles",
        ("decay", "quartiles"),
        ("loop", "launches", "compile", "optimizer", "python"),
        "decay",
        None,
        ("quartiles",),
    ),
    (
        "average and Swish",
        ("average-on-cpu", "swish"),
        ("waits", "pageable-copy", "python"),
        "average-on-cpu",
        None,
        ("swish",),
    ),
)
RECOMMENDER: tuple[tuple[Any, ...], ...] = (
    ("clean", ()),
    # its workers have two dozen batches ready before they fall behind
    ("places by hash", ("hash",), ("loader", "python"), "hash", None, (), 1, 190, ("--warmup", "40")),
    ("pairs in a loop", ("pairs",), ("loop", "launches", "compile"), None, "interaction"),
    ("a table each", ("tables",), ("loop", "launches", "compile"), None, "tables"),
    ("counts of values", ("counts",), ("python",), "counts"),
    ("area on the CPU", ("area",), ("waits", "python"), "area"),
    ("converted before the copy", ("long",), ("pageable-copy", "made-on-cpu", "waits"), "long"),
    ("checks of places", ("checks",), ("waits", "loop"), "checks"),
    ("loss by hand", ("loss",)),
    ("hash and area", ("hash", "area"), ("loader", "python"), "hash", None, ("area",)),
    ("counts and tables", ("counts", "tables"), ("python",), "counts", None, ("tables",)),
)
"""These two by someone who knew no rule of what profkit says."""
ON_RANKS: tuple[tuple[Any, ...], ...] = (
    ("clean", ()),
    ("Python on one", ("late-python",), ("late-rank",), "late-python"),
    ("random numbers on one", ("late-data",), ("late-rank",), "late-data"),
    ("more rows on one", ("uneven",), ("late-rank",), None, ""),
    ("sums after every pass", ("always-sums",), ("no-sync",), None, ""),
    ("small buckets", ("small-buckets",)),
    ("unused parameters", ("unused",)),
    ("mean of the loss", ("mean-loss",), ("waits",), "mean-loss"),
    ("one writes", ("first-writes",), ("late-rank",), "first-writes"),
)

FAULTS = (
    Fault("clean transformer", "transformer", ()),
    Fault("collection every step", "transformer", ("collect",), ("garbage",), "collect", steps=120),
    Fault(
        "records in cycles",
        "transformer",
        ("records",),
        ("garbage",),
        module="",
        without=("records", "frozen"),
        steps=120,
    ),
    Fault(
        "small batch",
        "transformer",
        ("small-batch",),
        ("batch",),
        module="",
        without=("small-batch", "doubled"),
        samples=2,
    ),
    Fault("launches that block", "transformer", ("launch-blocking",), ("launch-blocking",), module="", steps=120),
    Fault(
        "compiles every step",
        "transformer",
        ("recompiles",),
        ("recompile",),
        "recompiles",
        without=("compiles-once",),
        steps=80,
    ),
    Fault("waits in blocks", "transformer", ("item",), ("waits",), "item"),
    Fault("attention by hand", "transformer", ("attention",), ("attention",), module="attention"),
    Fault("loop optimizer", "transformer", ("for-loop",), ("optimizer",), module="optimizer"),
    Fault("random on the CPU", "transformer", ("random",), ("made-on-cpu",), "random", steps=60),
    Fault("clean vision", "vision", ()),
    Fault("no workers", "vision", ("no-workers",), ("loader",), "no-workers", steps=50),
    Fault("one worker", "vision", ("one-worker",), ("loader",), "one-worker", steps=50),
    Fault("clean plain", "plain", (), fits=False),
    Fault("mask by Python", "plain", ("mask",), ("python",), "mask", fits=False),
    Fault("clean Lightning", "lightning_module", (), fits=False),
    Fault("Lightning, waits", "lightning_module", ("item",), ("waits",), "item", fits=False),
    Fault(
        "Lightning, no workers", "lightning_module", ("no-workers",), ("loader",), "no-workers", steps=80, fits=False
    ),
    Fault("clean HF Trainer", "hf_trainer", (), fits=False),
    Fault("HF, eager attention", "hf_trainer", ("eager",), ("attention",), module="attn", fits=False),
    Fault("HF, slow collate", "hf_trainer", ("collate",), ("loader",), "collate", fits=False),
    Fault("batch by Python", "transformer", ("python-batch",), ("python",), "python-batch"),
    Fault("foreach optimizer", "transformer", ("foreach",), ("optimizer",), module="optimizer"),
    Fault("loop of kernels", "transformer", ("loop",), ("loop",), module="gate", steps=120),
    Fault("fp32 products", "transformer", ("fp32",), ("tf32",), module="", steps=120),
    Fault("GELU by hand", "transformer", ("gelu",), ("activation",), module="activation"),
    Fault("norm by hand", "transformer", ("norm",), ("norm",), module="norm"),
    Fault("waits in clipping", "transformer", ("clip",), ("waits",), "clip", without=("clip-on-gpu",)),
    Fault("pageable copy", "vision", ("pageable",), ("pageable-copy",), "pageable"),
    Fault("odd vocabulary", "plain", ("sizes",), ("sizes",), module="head", fits=False),
    Fault("metrics on the CPU", "plain", ("metrics",), ("waits",), "metrics", without=("metrics-on-gpu",), fits=False),
    Fault("loss by hand", "transformer", ("cross-entropy",), ("cross-entropy",), module=""),
    Fault("anomaly detection", "transformer", ("anomaly",), ("anomaly",), module="", steps=100),
    Fault("needless checkpoints", "transformer", ("checkpoint",), ("recompute",), module="blocks"),
    Fault("kept results", "transformer", ("keep",), ("growth", "allocations"), "keep", options=("--memory",)),
    Fault(
        "three at once",
        "transformer",
        ("random", "item", "for-loop"),
        ("made-on-cpu",),
        "random",
        without=("item", "for-loop"),
        steps=60,
    ),
    Fault("layout of images", "vision", ("layout",), ("channels-last",), module=""),
    Fault("deterministic algorithms", "transformer", ("deterministic",), ("deterministic",), module=""),
    Fault("benchmark off", "vision", (), without=("benchmark",)),
    Fault("workers of many threads", "vision", ("threads",)),
    Fault("HF, fp32", "hf_trainer", ("fp32",), ("tf32",), module="", steps=120, fits=False),
    Fault(
        "Lightning, loop optimizer", "lightning_module", ("for-loop",), ("optimizer",), module="optimizer", fits=False
    ),
    Fault("not compiled", "transformer", (), ("compile", "launches"), module="", without=("compiled",)),
    *(Fault(f"speech, {name}", "speech", *rest, fits=False) for name, *rest in SPEECH),
    *(Fault(f"diffusion, {name}", "diffusion", *rest, fits=False) for name, *rest in DIFFUSION),
    *(Fault(f"recommender, {name}", "recommender", *rest, fits=False) for name, *rest in RECOMMENDER),
    *(Fault(f"ranks, {name}", "parallel", *rest, fits=False) for name, *rest in ON_RANKS),
)


def find_lines(fault: Fault) -> list[tuple[str, int]]:
    """Return the file and line of each mark of a fault: any of them is the right one."""
    path = HERE / f"{fault.program}.py"
    marks = [text.partition("# fault:")[2].split() for text in path.read_text().splitlines()]
    return [(path.name, number) for number, names in enumerate(marks, 1) if fault.marker in names]


def record(fault: Fault, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Run one program under profkit."""
    run = folder / fault.name.replace(" ", "-").replace(",", "")
    target = command_of(fault.program, fault.faults, fault.steps)
    command = [sys.executable, "-m", "profkit", "run", "-o", str(run), *fault.options, "--", *target]
    environment = {**os.environ, **({"FAULTS_TINY": "1"} if tiny else {})}
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False
    )
    return {
        "run": str(run),
        "status": done.returncode,
        "took_s": round(time.monotonic() - began, 1),
        "stderr": done.stderr[-1500:],
        "stdout": done.stdout[-4000:],
    }


def summarize(run: str) -> dict[str, Any]:
    """Return what ``profkit summary`` says of a run, as data."""
    command = [sys.executable, "-m", "profkit", "summary", run, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-1500:]}


def measure_plain(program: str, faults: Sequence[str], *, tiny: bool) -> list[float]:
    """Return how long each of some steps took in ms, without those that its workers had made batches for before.

    A step ends when the GPU has done its work, which is read afterwards: nothing waits between the steps.
    """
    from settings import Settings

    module = importlib.import_module(program)
    settings = Settings(frozenset(faults), tiny)
    step = module.make_step(settings)
    ready = module.count_ready_batches(settings) if hasattr(module, "count_ready_batches") else 0
    for _ in range(1 if tiny else ready + 10):
        step()
    return time_steps(step, 2 if tiny else 30)


def time_steps(step: Callable[[], None], count: int) -> list[float]:
    """Return what each of these steps took in ms on the GPU, or on the CPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        ends = [time.perf_counter(), *(time.perf_counter() for _ in range(count) if step() is None)]
        return [(end - start) * 1e3 for start, end in pairwise(ends)]
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def measure_trainer(program: str, faults: Sequence[str], *, tiny: bool) -> list[float]:
    """Return how long each step of the last half of a training took in ms."""
    from settings import Settings

    clock = make_clock(program)
    importlib.import_module(program).train(Settings(frozenset(faults), tiny, 6 if tiny else 50), clock)
    half = clock.times[len(clock.times) // 2 :]
    return [(end - start) * 1e3 for start, end in pairwise(half)]


def measure_parallel(faults: Sequence[str], *, tiny: bool) -> list[float]:
    """Return how long each step of a job of several ranks took in ms, as its first rank measured it."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "times.json"
        words = [*command_of(PARALLEL, faults, 6 if tiny else 40), "--times", str(into), *["--tiny"] * tiny]
        subprocess.run(words, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        times: list[float] = json.loads(into.read_text())
    return times


def command_of(program: str, faults: Iterable[str], steps: int) -> list[str]:
    """Return the command line that starts a program with its faults, on several ranks where it is for them."""
    job = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)] if program == PARALLEL else []
    words = [word for name in faults for word in ("--fault", name)]
    return [sys.executable, *job, str(HERE / f"{program}.py"), *words, "--steps", str(steps)]


def make_clock(program: str) -> Any:
    """Return a callback that notes when each step ended."""
    if program == "hf_trainer":
        from transformers import TrainerCallback

        class Clock(TrainerCallback):
            def __init__(self) -> None:
                self.times: list[float] = []

            def on_step_end(self, *_: Any, **__: Any) -> None:
                self.times.append(time.perf_counter())

        return Clock()
    import lightning

    class LightningClock(lightning.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    return LightningClock()


def measure_apart(
    program: str, variants: Iterable[tuple[str, ...]], until: float, *, tiny: bool
) -> dict[str, list[float]]:
    """Measure the variants of a program in turns, each time in a process of its own, as far as there is time.

    In one process the models of other variants, their garbage and their loaders' workers made steps up to a tenth
    longer. A variant that fails, or for which there is no time left, has no times.
    """
    times: dict[str, list[float]] = {"+".join(variant): [] for variant in variants}
    for name in (*times, *times):
        command = [sys.executable, __file__, "-", "--truth", program, name, *["--tiny"] * tiny]
        left_s = until - time.monotonic()
        if left_s > 0:
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=left_s
                )
            except subprocess.TimeoutExpired:
                continue
            print(program, name, "failed:" + done.stderr[-300:] if done.returncode else "measured", flush=True)
            times[name] += [] if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return times


def find_variants_of_tries(row: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return code → the program's faults and the change that makes what the Try advises, where one is known."""
    fault = row["fault"]
    known = MENDED | MENDED_IN.get(fault["program"], {})
    given = [advice["code"] for advice in row["summary"].get("advice", [])]
    return {code: (*fault["faults"], known[code]) for code in given if code in known}


def run_all(out: Path, faults: Sequence[Fault], *, tiny: bool, budget_s: float) -> None:
    """Record, summarize, then measure; write both files."""
    began, recorded = time.monotonic(), {}
    reserved_s = 0.25 * budget_s
    for fault in faults:
        if time.monotonic() - began > budget_s - reserved_s:
            print("no time left to record", fault.name, flush=True)
            continue
        recorded[fault.name] = record(fault, out / "runs", tiny=tiny)
        print(fault.name, recorded[fault.name]["status"], recorded[fault.name]["took_s"], flush=True)
    with ThreadPoolExecutor(6) as pool:
        summaries = dict(zip(recorded, pool.map(summarize, (row["run"] for row in recorded.values())), strict=True))
    rows = [
        {"fault": asdict(fault), "lines": find_lines(fault), **recorded[fault.name], "summary": summaries[fault.name]}
        for fault in faults
        if fault.name in recorded
    ]
    (out / "predictions.json").write_text(json.dumps(rows, indent=1))
    print("predicted", round(time.monotonic() - began), "s", flush=True)
    for truths in measure_all(rows, began + budget_s, tiny=tiny):
        for row in rows:
            row["truth_ms"] = find_truth(row, truths)
        (out / "results.json").write_text(json.dumps({"rows": rows, "truths": truths}, indent=1))


def measure_all(rows: Sequence[dict[str, Any]], until: float, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield program → the times of its variants, then also, under names apart, of what Tries advise, which may fail.

    What the clock leaves no time for is not measured.
    """
    truths: dict[str, Any] = {}
    programs = dict.fromkeys(row["fault"]["program"] for row in rows)
    mine = {program: [row for row in rows if row["fault"]["program"] == program] for program in programs}
    for program in programs:
        faults = [row["fault"] for row in mine[program]]
        variants = [(), *(fault["without"] for fault in faults), *(fault["faults"] for fault in faults)]
        truths[program] = measure_apart(program, distinct_variants(variants), until, tiny=tiny)
        yield truths
    for program in programs:
        advised = [(row["fault"]["faults"], find_variants_of_tries(row)) for row in mine[program]]
        variants = [variant for now, tries in advised if tries for variant in (now, *tries.values())]
        truths[f"{program}, Tries"] = measure_apart(program, distinct_variants(variants), until, tiny=tiny)
        yield truths


def distinct_variants(variants: Iterable[Iterable[str]]) -> list[tuple[str, ...]]:
    """Return variants once each, without those whose fault a process has from its start."""
    distinct = dict.fromkeys(tuple(variant) for variant in variants)
    return [variant for variant in distinct if not _AT_START.intersection(variant)]


def find_truth(row: dict[str, Any], truths: dict[str, Any]) -> dict[str, Any]:
    """Return the step in ms: now, after the fault is mended, and after what each other Try advises; of two the means.

    The typical step is what profkit predicts. Where single steps take far longer, the mean is what a day is made of.
    """
    fault = row["fault"]
    program = fault["program"]
    return {
        "now": _median_of(truths, program, fault["faults"]),
        "now_mean": _median_of(truths, program, fault["faults"], of=mean),
        "after": _median_of(truths, program, fault["without"], fault["samples"]),
        "after_mean": _median_of(truths, program, fault["without"], fault["samples"], of=mean),
        "tries": {
            code: _median_of(truths, f"{program}, Tries", variant)
            for code, variant in find_variants_of_tries(row).items()
        },
    }


def _median_of(
    truths: dict[str, Any],
    key: str,
    variant: Iterable[str],
    samples: int = 1,
    of: Callable[[Sequence[float]], float] = median,
) -> float | None:
    times = truths.get(key, {}).get("+".join(variant))
    return of(times) / samples if times else None


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--budget-s", type=float, default=450)
    parser.add_argument("--truth", nargs=2)
    words = parser.parse_args()
    if words.truth:
        program, faults = words.truth[0], [name for name in words.truth[1].split("+") if name]
        if program == PARALLEL:
            measured = measure_parallel(faults, tiny=words.tiny)
        else:
            measured = (measure_plain if program in PLAIN else measure_trainer)(program, faults, tiny=words.tiny)
        print(json.dumps(measured))
        return
    (words.out / "runs").mkdir(parents=True, exist_ok=True)
    chosen = [fault for fault in FAULTS if not words.only or fault.name in words.only]
    run_all(words.out, chosen, tiny=words.tiny, budget_s=words.budget_s)


if __name__ == "__main__":
    main()
