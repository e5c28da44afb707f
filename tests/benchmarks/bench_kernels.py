"""How fast `profkit kernels` is against `nsys stats` on the same capture, and `efficiency` and `compare` against it.

    python tests/benchmarks/bench_kernels.py [--capture SMALL.sqlite] [--after SMALL.sqlite] [--rounds 5] [--smoke]

The capture is a small real one tiled to 357,179 kernels and 785,066 API calls (`tile_trace`), then to ten times as
many, and what it is compared with is another. Whole processes run in turn: times on a shared machine swing by a factor
of two within an hour, ratios of neighbouring runs do not. Without nsys on PATH profkit's own times stand alone.
``--smoke`` runs each command once on a tiny capture, to see that all of this works.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tile_trace import tile_trace  # a neighbour: Python puts a script's own folder on its path

CAPTURES = Path(os.environ.get("PROFKIT_CAPTURES", Path(__file__).parents[3] / "shared" / "captures"))
KERNELS, CALLS = 357_179, 785_066
REPORTS = ("nvtx_kern_sum", "nvtx_gpu_proj_sum", "cuda_gpu_kern_sum")

# As on a person's machine: compiled once, and not at every start.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass
class Measured:
    """One command: seconds and peak resident memory of each of its runs, its children's included."""

    command: list[str]
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Run it once more, as a process of its own.

        Raises:
            SystemExit: the command failed.
        """
        with tempfile.TemporaryFile() as errors:
            began = time.perf_counter()
            process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=errors, env=_ENVIRONMENT)
            _, status, usage = os.wait4(process.pid, 0)
            self.seconds.append(time.perf_counter() - began)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                errors.seek(0)
                sys.exit(f"{' '.join(self.command)}: exit {process.returncode}\n{errors.read().decode()[-2000:]}")
        self.peak_bytes.append(usage.ru_maxrss * 1024)

    def warm_up(self) -> Measured:
        """Have its files in the page cache and its modules in bytecode."""
        self.run()
        self.seconds.clear()
        self.peak_bytes.clear()
        return self

    @property
    def time_s(self) -> float:
        return median(self.seconds)

    @property
    def memory_mb(self) -> float:
        return max(self.peak_bytes) / 1e6


def run_in_turn(commands: Iterable[Measured], rounds: int) -> None:
    """Run all commands once, then all again: what else the machine does slows all of them equally."""
    for _ in range(rounds):
        for command in commands:
            command.run()


def profkit(*arguments: str) -> Measured:
    """Return a profkit command, started as a person starts it."""
    script = shutil.which("profkit", path=str(Path(sys.executable).parent))
    return Measured([*([script] if script else [sys.executable, "-m", "profkit"]), *arguments])


def print_row(name: str, measured: Measured) -> None:
    spread = f"{min(measured.seconds):.2f}–{max(measured.seconds):.2f}"
    print(f"{name:<44} {measured.time_s:>8.3f} s  {spread:>11}  {measured.memory_mb:>6.0f} MB")


def print_ratio(name: str, value: float, limit: float, judged: bool) -> None:
    verdict = "" if not judged or value <= limit else "   MISSED"
    print(f"{name:<44} {value:>8.3f}    " + (f"at most {limit:g}{verdict}" if judged else "(too small to judge)"))


def bench(capture: Path, after: Path, folder: Path, rounds: int, scale: int, tenfold: bool) -> None:
    """Tile, run and print; ``scale`` divides the numbers of kernels and calls."""
    large, larger = folder / "large.sqlite", folder / "ten_times_larger.sqlite"
    tile_trace(capture, large, KERNELS // scale, CALLS // scale)
    print(f"{KERNELS // scale:,} kernels, {CALLS // scale:,} API calls, {large.stat().st_size / 1e6:.0f} MB")
    ours = profkit("kernels", str(large), "--range", "backward")
    whole, start = profkit("kernels", str(large)), profkit("--help")
    export = profkit("export", str(large), "-o", str(folder / "step.json.gz"))
    nsys = shutil.which("nsys")
    theirs = {r: Measured([nsys, "stats", "-r", r, str(large)]) for r in REPORTS} if nsys else {}
    run_in_turn([ours.warm_up(), *theirs.values(), whole, start], rounds)
    export.run()

    print(f"\n{'median of ' + str(rounds):<44} {'time':>10}  {'range':>11}  {'peak':>9}")
    judged = scale == 1
    print_row("profkit kernels --range backward", ours)
    print_row("profkit kernels", whole)
    print_row("profkit --help", start)
    print_row("profkit export", export)
    for report, measured in theirs.items():
        print_row(f"nsys stats -r {report}", measured)
    print()
    for report, limit in (("nvtx_kern_sum", 0.15), ("cuda_gpu_kern_sum", 0.85)):
        if report in theirs:
            print_ratio(f"--range backward / {report}", ours.time_s / theirs[report].time_s, limit, judged)
    print_ratio("peak memory of --range backward, MB", ours.memory_mb, 250, judged)
    print_ratio("peak memory of export, MB", export.memory_mb, 450, judged)
    print_ratio("profkit --help, s", start.time_s, 0.25, judged)

    other = folder / "after.sqlite"
    tile_trace(after, other, KERNELS // scale, CALLS // scale)
    first, second = profkit("kernels", str(large)), profkit("kernels", str(other))
    efficiency = profkit("efficiency", str(large)).warm_up()
    compare = profkit("compare", str(large), str(other), "--force").warm_up()
    run_in_turn([first, second, efficiency, compare], rounds)
    print_row("profkit efficiency", efficiency)
    print_row("profkit compare", compare)
    runs = list(zip(first.seconds, second.seconds, efficiency.seconds, compare.seconds, strict=True))
    print_ratio("efficiency / kernels", median(theirs / one for one, _, theirs, _ in runs), 1.5, judged)
    print_ratio("compare / both kernels", median(both / (one + two) for one, two, _, both in runs), 1.5, judged)

    if tenfold:
        tile_trace(capture, larger, 10 * KERNELS // scale, 10 * CALLS // scale)
        ten = profkit("kernels", str(larger), "--range", "backward").warm_up()
        once = Measured(ours.command)
        run_in_turn([once, ten], max(1, rounds // 2))
        print_row("profkit kernels --range backward, tenfold", ten)
        print_ratio("ten times the kernels / once", ten.time_s / once.time_s, 11, judged)


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path, default=CAPTURES / "small.nsys2023.sqlite")
    parser.add_argument("--after", type=Path, default=CAPTURES / "small.nsys2025.sqlite")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-tenfold", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.capture.exists() and arguments.after.exists()):
        print("no captures to tile: give them with --capture and --after (nothing was measured)")
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.smoke:
            bench(arguments.capture, arguments.after, Path(folder), rounds=1, scale=100, tenfold=True)
        else:
            tenfold = not arguments.no_tenfold
            bench(arguments.capture, arguments.after, Path(folder), arguments.rounds, scale=1, tenfold=tenfold)


if __name__ == "__main__":
    main()
