"""How fast `profkit compare` is beside `profkit kernels` on the captures it reads: whole processes, in turn, medians.

    python tests/benchmarks/bench_compare.py [--before A.sqlite] [--after B.sqlite] [--rounds 5] [--smoke]

Both captures are small real ones tiled to 357,179 kernels and 785,066 API calls (`tile_trace`). A comparison reads two
captures, so it is held to 1.5 times what `profkit kernels` takes for the one and for the other together.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench_kernels import CALLS, CAPTURES, KERNELS, print_ratio, print_row, profkit, run_in_turn
from tile_trace import tile_trace

LIMIT = 1.5


def bench(before: Path, after: Path, folder: Path, rounds: int, scale: int) -> None:
    """Tile, run and print; ``scale`` divides the numbers of kernels and calls."""
    large = [folder / "before.sqlite", folder / "after.sqlite"]
    for source, target in zip((before, after), large, strict=True):
        tile_trace(source, target, KERNELS // scale, CALLS // scale)
    print(f"{KERNELS // scale:,} kernels, {CALLS // scale:,} API calls, twice")
    each = [profkit("kernels", str(path)) for path in large]
    both = profkit("compare", *map(str, large), "--force")
    both.run()  # files into the page cache, modules into bytecode
    both.seconds.clear()
    both.peak_bytes.clear()
    run_in_turn([*each, both], rounds)
    print_row("profkit kernels BEFORE", each[0])
    print_row("profkit kernels AFTER", each[1])
    print_row("profkit compare BEFORE AFTER", both)
    print_ratio("compare / both kernels", both.time_s / (each[0].time_s + each[1].time_s), LIMIT, scale == 1)


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, default=CAPTURES / "small.nsys2023.sqlite")
    parser.add_argument("--after", type=Path, default=CAPTURES / "small.nsys2025.sqlite")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.before.exists() and arguments.after.exists()):
        print("no captures to tile: give them with --before and --after (nothing was measured)")
        return
    with tempfile.TemporaryDirectory() as folder:
        rounds, scale = (1, 100) if arguments.smoke else (arguments.rounds, 1)
        bench(arguments.before, arguments.after, Path(folder), rounds, scale)


if __name__ == "__main__":
    main()
