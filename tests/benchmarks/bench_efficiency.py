"""How fast `profkit efficiency` is beside `profkit kernels` on the same capture: whole processes, in turn, medians.

    python tests/benchmarks/bench_efficiency.py [--capture SMALL.sqlite] [--rounds 5] [--smoke]

The capture is a small real one tiled to 357,179 kernels and 785,066 API calls (`tile_trace`). On a shared machine the
median of the ratios of neighbouring runs is steadier than the ratio of medians, so that is what is held to 1.5.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from bench_kernels import CALLS, CAPTURES, KERNELS, print_ratio, print_row, profkit, run_in_turn
from tile_trace import tile_trace

LIMIT = 1.5


def bench(capture: Path, folder: Path, rounds: int, scale: int) -> None:
    """Tile, run and print; ``scale`` divides the numbers of kernels and calls."""
    large = folder / "large.sqlite"
    tile_trace(capture, large, KERNELS // scale, CALLS // scale)
    print(f"{KERNELS // scale:,} kernels, {CALLS // scale:,} API calls")
    kernels, efficiency = profkit("kernels", str(large)), profkit("efficiency", str(large))
    efficiency.run()  # files into the page cache, modules into bytecode
    efficiency.seconds.clear()
    efficiency.peak_bytes.clear()
    run_in_turn([kernels, efficiency], rounds)
    print_row("profkit kernels", kernels)
    print_row("profkit efficiency", efficiency)
    pairs = [ours / theirs for ours, theirs in zip(efficiency.seconds, kernels.seconds, strict=True)]
    print_ratio("efficiency / kernels", median(pairs), LIMIT, scale == 1)


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path, default=CAPTURES / "small.nsys2023.sqlite")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if not arguments.capture.exists():
        print(f"no capture {arguments.capture} to tile: give one with --capture (nothing was measured)")
        return
    with tempfile.TemporaryDirectory() as folder:
        rounds, scale = (1, 100) if arguments.smoke else (arguments.rounds, 1)
        bench(arguments.capture, Path(folder), rounds, scale)


if __name__ == "__main__":
    main()
