"""Plants faults in programs, has profkit find them, and measures without profkit what each truly costs.

    python tests/programs/faults/record_faults.py OUT [--tiny] [--budget-s 450] [--only NAME]

First every program is recorded with its fault and summarized: ``OUT/predictions.json`` stands before anything is
measured. Then each program's variants run bare in one process, in turns, and ``OUT/results.json`` gets both; the table
of it is printed by `fault_table.py`. A fault is named if a Try has its code, and its line or module.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PLAIN = ("transformer", "vision", "plain")
"""Programs that give their steps; the others are Trainers, which run their own loops."""
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
    Fault("three at once", "transformer", ("random", "item", "for-loop"), ("made-on-cpu",), "random", steps=60),
    Fault("layout of images", "vision", ("layout",), ("channels-last",), module=""),
    Fault("deterministic algorithms", "transformer", ("deterministic",), ("deterministic",), module=""),
    Fault("benchmark off", "vision", (), without=("benchmark",)),
    Fault("workers of many threads", "vision", ("threads",)),
    Fault("HF, fp32", "hf_trainer", ("fp32",), ("tf32",), module="", steps=120, fits=False),
    Fault(
        "Lightning, loop optimizer", "lightning_module", ("for-loop",), ("optimizer",), module="optimizer", fits=False
    ),
    Fault("not compiled", "transformer", (), ("compile", "launches"), module="", without=("compiled",)),
)


def find_lines(fault: Fault) -> list[tuple[str, int]]:
    """Return the file and line of each mark of a fault: any of them is the right one."""
    path = HERE / f"{fault.program}.py"
    marks = [text.partition("# fault:")[2].split() for text in path.read_text().splitlines()]
    return [(path.name, number) for number, names in enumerate(marks, 1) if fault.marker in names]


def record(fault: Fault, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Run one program under profkit."""
    words = [word for name in fault.faults for word in ("--fault", name)]
    run = folder / fault.name.replace(" ", "-").replace(",", "")
    target = [sys.executable, str(HERE / f"{fault.program}.py"), *words, "--steps", str(fault.steps)]
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


def measure_plain(program: str, variants: Sequence[tuple[str, ...]], *, tiny: bool) -> dict[str, list[float]]:
    """Return the step of each variant in ms, block by block, in turns in this process.

    A variant with a loader is made anew for each turn, and is gone before the next one: workers of another variant
    would take its CPUs. Of its steps as many are left out as its workers made batches for before the first one.
    """
    import torch
    from settings import Settings

    keep_threads()
    module = importlib.import_module(program)
    count_ready = getattr(module, "count_ready_batches", None)
    settings = {variant: Settings(frozenset(variant), tiny) for variant in variants}
    kept = {} if count_ready else {variant: module.make_step(setting) for variant, setting in settings.items()}
    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    rounds, length = (2, 2) if tiny else (4, 14) if count_ready else (5, 6)
    times: dict[str, list[float]] = {"+".join(variant): [] for variant in variants}
    for turn in range(rounds + 1):
        for variant, setting in settings.items():
            step = kept[variant] if kept else module.make_step(setting)
            for _ in range(count_ready(setting) + 3 if count_ready else 2):
                step()
            wait()
            began = time.perf_counter()
            for _ in range(length):
                step()
            wait()
            if turn:
                times["+".join(variant)].append((time.perf_counter() - began) * 1e3 / length)
            del step
            if count_ready:
                end_workers()
    return times


def end_workers() -> None:
    """Free what a step that was deleted held, and see that its loader's workers have ended."""
    gc.collect()
    left = multiprocessing.active_children()
    if left:
        raise RuntimeError(f"{len(left)} workers of a variant still run: others would be measured beside them")


def measure_trainer(program: str, variants: Sequence[tuple[str, ...]], *, tiny: bool) -> dict[str, list[float]]:
    """Return the step of each variant in ms: each trains three times, in turns; its last half counts."""
    from settings import Settings

    keep_threads()
    module = importlib.import_module(program)
    times: dict[str, list[float]] = {"+".join(variant): [] for variant in variants}
    for turn in range(1 if tiny else 3):
        for variant in variants:
            clock = make_clock(program)
            module.train(Settings(frozenset(variant), tiny, 6 if tiny else 50), clock)
            half = clock.times[len(clock.times) // 2 :]
            if turn or tiny:
                times["+".join(variant)].append((half[-1] - half[0]) * 1e3 / max(len(half) - 1, 1))
    return times


def keep_threads() -> None:
    """Settle how many threads this one computes with, as a program that has no loader of its own does.

    The thread of a DataLoader that pins memory sets one thread for all threads that have not computed yet; another
    variant's loader must not make this one's data five times slower.
    """
    import torch

    torch.get_num_threads()


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
    program: str, variants: Iterable[tuple[str, ...]], timeout_s: float | None, *, tiny: bool
) -> dict[str, Any]:
    """Measure the variants of a program in a process of their own, which may take so long; None: as long as it does."""
    words = [json.dumps([list(variant) for variant in variants]), *(["--tiny"] if tiny else [])]
    command = [sys.executable, __file__, "-", "--truth", program, *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not measured within {timeout_s:.0f} s"}
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr[-1500:]}


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
        measure_in_time(truths, program, program, variants, until, tiny=tiny)
    yield truths
    for program in programs:
        advised = [(row["fault"]["faults"], find_variants_of_tries(row)) for row in mine[program]]
        variants = [variant for now, tries in advised if tries for variant in (now, *tries.values())]
        measure_in_time(truths, f"{program}, Tries", program, variants, until, tiny=tiny)
        yield truths


def measure_in_time(
    truths: dict[str, Any], key: str, program: str, variants: Iterable[Iterable[str]], until: float, *, tiny: bool
) -> None:
    """Measure variants, if there are any and there is time left to begin, and note what came of it.

    What Tries advise, such as compiling, may take no longer than that time.
    """
    distinct = dict.fromkeys(tuple(variant) for variant in variants)
    able = [variant for variant in distinct if not _AT_START.intersection(variant)]
    left_s = until - time.monotonic()
    if able and left_s > 0:
        truths[key] = measure_apart(program, able, None if key == program else left_s, tiny=tiny)
    print("measured" if key in truths else "not measured", key, flush=True)


def find_truth(row: dict[str, Any], truths: dict[str, Any]) -> dict[str, Any]:
    """Return the step in ms: now, after the fault is mended, and after what each other Try advises."""
    fault = row["fault"]
    program = fault["program"]
    return {
        "now": _median_of(truths, program, fault["faults"]),
        "after": _median_of(truths, program, fault["without"], fault["samples"]),
        "tries": {
            code: _median_of(truths, f"{program}, Tries", variant)
            for code, variant in find_variants_of_tries(row).items()
        },
    }


def _median_of(truths: dict[str, Any], key: str, variant: Iterable[str], samples: int = 1) -> float | None:
    times = truths.get(key, {}).get("+".join(variant))
    return median(times) / samples if times else None


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
        program, variants = words.truth[0], [tuple(variant) for variant in json.loads(words.truth[1])]
        measure = measure_plain if program in PLAIN else measure_trainer
        print(json.dumps(measure(program, variants, tiny=words.tiny)))
        return
    (words.out / "runs").mkdir(parents=True, exist_ok=True)
    chosen = [fault for fault in FAULTS if not words.only or fault.name in words.only]
    run_all(words.out, chosen, tiny=words.tiny, budget_s=words.budget_s)


if __name__ == "__main__":
    main()
