"""How fast `profkit efficiency` and `profkit compare` are beside `profkit kernels` on what they read.

    python tests/benchmarks/bench_against_kernels.py [--before A.sqlite] [--after B.sqlite] [--rounds 5] [--smoke]

The captures are small real ones tiled to 357,179 kernels and 785,066 API calls (`tile_trace`). Whole processes run in
turn; on a shared machine the median of the ratios of neighbouring runs is steadier than the ratio of medians, so that
is what is held to 1.5. A comparison is held against `profkit kernels` of both captures together.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from bench_kernels import CALLS, CAPTURES, KERNELS, print_ratio, print_row, profkit, run_in_turn
from tile_trace import tile_trace

LIMIT = 1.5


def bench(before: Path, after: Path, folder: Path, rounds: int, scale: int) -> None:
    """Tile, run and print; ``scale`` divides the numbers of kernels and calls."""
    large = [str(folder / "before.sqlite"), str(folder / "after.sqlite")]
    for source, target in zip((before, after), large, strict=True):
        tile_trace(source, Path(target), KERNELS // scale, CALLS // scale)
    print(f"{KERNELS // scale:,} kernels, {CALLS // scale:,} API calls, twice")
    first, second = (profkit("kernels", path) for path in large)
    efficiency, compare = profkit("efficiency", large[0]), profkit("compare", *large, "--force")
    run_in_turn([efficiency, compare], 1)  # files into the page cache, modules into bytecode
    for warmed_up in (efficiency, compare):
        warmed_up.seconds.clear()
        warmed_up.peak_bytes.clear()
    commands = {"kernels BEFORE": first, "kernels AFTER": second, "efficiency BEFORE": efficiency, "compare": compare}
    run_in_turn(commands.values(), rounds)
    for name, measured in commands.items():
        print_row(f"profkit {name}", measured)
    runs = list(zip(first.seconds, second.seconds, efficiency.seconds, compare.seconds, strict=True))
    print_ratio("efficiency / kernels", median(ours / one for one, _, ours, _ in runs), LIMIT, scale == 1)
    print_ratio("compare / both kernels", median(ours / (one + two) for one, two, _, ours in runs), LIMIT, scale == 1)


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
