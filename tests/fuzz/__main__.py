"""``python -m tests.fuzz --count 3000``: read that many mutants, print what became of them, exit 1 if one failed."""

from __future__ import annotations

import argparse
import atexit
import itertools
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from tests.fuzz.judge import Task, Verdict, judge_all
from tests.fuzz.mutants import CLASSES

_SHARE = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="mutants, shared by the classes (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of each class (default 0)")
    parser.add_argument("--kind", choices=CLASSES, action="append", help="only this class")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default 1)")
    options = parser.parse_args()
    kinds = options.kind or list(CLASSES)
    tasks = [(kinds[n % len(kinds)], options.seed + n // len(kinds)) for n in range(options.count)]
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    failed = 0
    shares = [tasks[start : start + _SHARE] for start in range(0, len(tasks), _SHARE)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for (kind, seed), verdict in itertools.chain.from_iterable(pool.map(judge_some, shares)):
            outcomes[kind][verdict.outcome] += 1
            if verdict.is_failure:
                failed += 1
                print(f"{kind} {seed}: {verdict.outcome}: {verdict.detail}\n", flush=True)
    for kind, found in outcomes.items():
        print(f"{kind:16} {found.total():6,}: {', '.join(f'{count:,} {what}' for what, count in found.most_common())}")
    print(f"{options.count:,} mutants, {failed:,} failed")
    return int(failed > 0)


def judge_some(tasks: list[Task]) -> list[tuple[Task, Verdict]]:
    return judge_all(tasks, _scratch())


@cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


if __name__ == "__main__":
    sys.exit(main())
