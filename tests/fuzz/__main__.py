"""``python -m tests.fuzz --count 3000``: read that many mutants, print what became of them, exit 1 if one failed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.judge import judge
from tests.fuzz.mutants import CLASSES


def main() -> int:
    """Read the mutants and print a line per class and per failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="mutants, shared by the classes (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of each class (default 0)")
    parser.add_argument("--kind", choices=CLASSES, action="append", help="only this class")
    options = parser.parse_args()
    kinds = options.kind or list(CLASSES)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number in range(options.count):
            kind, seed = kinds[number % len(kinds)], options.seed + number // len(kinds)
            verdict = judge(kind, seed, folder)
            outcomes[kind][verdict.outcome] += 1
            if verdict.is_failure:
                failed += 1
                print(f"{kind} {seed}: {verdict.outcome}: {verdict.detail}\n", flush=True)
    for kind, found in outcomes.items():
        print(f"{kind:16} {found.total():6,}: {', '.join(f'{count:,} {what}' for what, count in found.most_common())}")
    print(f"{options.count:,} mutants, {failed:,} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
