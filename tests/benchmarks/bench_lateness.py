"""How often ranks are called late that are not, and one with a delay is, in seeded simulations (tests.late_costs).

python -m tests.benchmarks.bench_lateness [--count 2000] [--ranks 2,4,8,64] [--steps 4,8,12,24,100]
"""

from __future__ import annotations

import argparse

from tests.late_costs import cells, false_alarms, found_delays


def main() -> None:
    """Print both tables, in percent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--ranks", default="2,4,8,64")
    parser.add_argument("--steps", default="4,8,12,24,100")
    given = parser.parse_args()
    ranks, steps = ([int(one) for one in text.split(",")] for text in (given.ranks, given.steps))
    head = "".join(f"{f'{rank}×{step}':>8}" for rank in ranks for step in steps)
    print(f"called late and is not, % of {given.count:,} recordings (ranks × steps)\n{'':24}{head}")
    for kind, spread in cells():
        found = [false_alarms(1, kind, spread, rank, step, given.count) for rank in ranks for step in steps]
        print(
            f"{kind:10} {spread:6.0%}       " + "".join(f"{100 * one / given.count:8.1f}" for one in found), flush=True
        )
    count = max(given.count // 10, 1)
    print(f"has a delay and is found, % of {count:,}\n{'':24}{head}")
    for kind, spread, delay, every in (
        ("white", 0.01, 0.1, 1),
        ("white", 0.02, 0.1, 1),
        ("white", 0.03, 0.1, 1),
        ("drift", 0.02, 0.1, 1),
        ("stalls", 0.02, 0.3, 1),
        ("white", 0.01, 0.3, 4),
        ("white", 0.02, 0.8, 4),
    ):
        found = [
            found_delays(2, kind, spread, rank, step, count, delay=delay, every=every)
            for rank in ranks
            for step in steps
        ]
        name = f"{kind} {spread:.0%} + {delay:.0%} of {every}"
        print(f"{name:24}" + "".join(f"{100 * one / count:8.1f}" for one in found), flush=True)


if __name__ == "__main__":
    main()
