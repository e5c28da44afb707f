"""How fast ``profkit memory`` is, compared with a bare ``pickle.load`` of the same snapshot.

Processes run in turn; times are medians.

    python tests/benchmarks/bench_memory.py [--snapshot SMALL.pickle] [--rounds 5] [--no-tenfold] [--smoke]

The snapshot is a small real one tiled to about 448,199 events (`tile_snapshot`), then to ten times as many. Times on a
shared machine swing by a factor of two within an hour; ratios of commands run in turn do not. ``--smoke`` runs each
command once on a tiny snapshot, to see that all of this works.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_kernels import (  # neighbours: a script's own folder
    CAPTURES,
    Measured,
    print_ratio,
    print_row,
    profkit,
    run_in_turn,
)

EVENTS = 448_199

_BARE = "import pickle, sys\nwith open(sys.argv[1], 'rb') as file:\n    data = pickle.load(file)\n"
_COLLECTOR_OFF = f"import gc\ngc.disable()\n{_BARE}"


def bench(small: Path, folder: Path, rounds: int, events: int, tenfold: bool) -> None:
    """Tile, run and print."""
    large, page, picture = folder / "large.pickle", folder / "timeline.html", folder / "timeline.png"
    count = tile(small, large, events)
    print(f"{count:,} events, {large.stat().st_size / 1e6:.0f} MB")
    bare = Measured([sys.executable, "-c", _BARE, str(large)])
    off = Measured([sys.executable, "-c", _COLLECTOR_OFF, str(large)])
    text = profkit("memory", str(large))
    html = profkit("memory", str(large), "--timeline", str(page))
    png = profkit("memory", str(large), "--timeline", str(picture))
    commands = {
        "pickle.load": bare,
        "pickle.load, garbage collection off": off,
        "profkit memory": text,
        "--timeline .html": html,
        "--timeline .png": png,
    }
    run_in_turn(commands.values(), rounds)
    print(f"\n{'median of ' + str(rounds):<44} {'time':>10}  {'range':>11}  {'peak':>9}")
    for name, measured in commands.items():
        print_row(name, measured)
    print()
    judged = events == EVENTS
    print_ratio("text / pickle.load without collection", text.time_s / off.time_s, 2.5, judged)
    print_ratio("text / pickle.load", text.time_s / bare.time_s, 1.3, judged)
    print_ratio("page / pickle.load", html.time_s / bare.time_s, 4, judged)
    print_ratio("picture / pickle.load", png.time_s / bare.time_s, 4, judged)
    print_ratio("memory of text / of pickle.load", text.memory_mb / bare.memory_mb, 1.5, judged)
    print_ratio("size of the page, MB", page.stat().st_size / 1e6, 3, judged)
    if tenfold:
        larger = folder / "ten_times_larger.pickle"
        ten_count = tile(small, larger, 10 * events)
        ten, once = profkit("memory", str(larger)), profkit("memory", str(large))
        run_in_turn([once, ten], 3)
        per_event = (ten.time_s / ten_count) / (once.time_s / count)
        print_ratio("time per event at ten times the events", per_event, 1.1, judged)


def tile(small: Path, out: Path, events: int) -> int:
    """Write the tiled snapshot; return how many events it has.

    In a process of its own: what a parent once held counts as the peak memory of the children that it starts.
    """
    script = Path(__file__).with_name("tile_snapshot.py")
    command = [sys.executable, str(script), str(small), str(out), str(events)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshot", type=Path, default=CAPTURES / "small.pickle")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-tenfold", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            bench(options.snapshot, Path(folder), 1, 1, False)
        else:
            bench(options.snapshot, Path(folder), options.rounds, EVENTS, not options.no_tenfold)


if __name__ == "__main__":
    main()
