"""What the range around a launch of compiled code costs, by the number of launches in the generated function.

    python tests/benchmarks/bench_launches.py [--launches 40 400 2000] [--rounds 60] [--smoke]

The launches do nothing, and no profiler listens. Launches without profkit, with its proxies while nothing records, and
with ranges take turns, so that all see the same machine. The times are this thread's own on a processor; each figure
is the 5th percentile of the rounds, in nanoseconds a launch.
"""

from __future__ import annotations

import argparse
from time import thread_time_ns
from types import ModuleType, SimpleNamespace
from typing import Any

from profkit.annotation import RangeObserver
from profkit.capture.compiled.generated_file import read_generated_file
from profkit.capture.compiled.places import LoadedGraph
from profkit.capture.compiled.stand_ins import stand_in
from profkit.capture.compiled.watch import _Ranges
from profkit.capture.hooks import Call
from profkit.capture.hooks.module_names import ModuleNames
from profkit.capture.hooks.open_ranges import OpenOnThread

HEAD = "async_compile = make = lambda *_: None\ntriton_0 = async_compile.triton('')\ndef call(args):\n"


class Recording(RangeObserver):
    """The part of `profkit.capture.hooks.hooks.Hooks` that launches ask, within the call of a model."""

    def __init__(self) -> None:
        self.is_recording = True
        self.names = ModuleNames(None)
        self.on_thread = OpenOnThread(self, None)
        self.on_thread.ranges.call = Call("model", None, self)  # type: ignore[arg-type]

    def name_model(self, _model: Any) -> None:
        """Nothing has a name."""


def generated(launches: int, hooks: Any) -> Any:
    """Return the function of a generated file, watched for ``hooks`` if there are any."""
    text = HEAD + "    triton_0.run(1, 2)\n" * launches
    module = ModuleType("generated")
    module.async_compile = SimpleNamespace(triton=lambda *_: None)  # type: ignore[attr-defined]
    exec(compile(text.partition("\n")[2], "generated", "exec"), vars(module))
    vars(module)["triton_0"] = SimpleNamespace(run=lambda *_: None)
    if hooks is not None:
        file = read_generated_file(text.partition("\n")[2])
        graph = LoadedGraph("3f9a1c22e0", None, {site.line: () for site in file.sites})
        stand_in(module, file, hooks, _Ranges(graph, SimpleNamespace(module=None), hooks, _fail).around)
    return vars(module)["call"]


def _fail(error: Exception) -> None:
    raise error


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--launches", type=int, nargs="*", default=[40, 400, 2000], help="in the function")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--smoke", action="store_true", help="one short round, to see that it runs")
    asked = parser.parse_args()
    print(f"{'launches':>8}  {'plain':>7}  {'idle':>7}  {'recorded':>8}")
    for launches in [20] if asked.smoke else asked.launches:
        idle, recording = Recording(), Recording()
        idle.is_recording = False
        variants = [generated(launches, hooks) for hooks in (None, idle, recording)]
        times: list[list[int]] = [[] for _ in variants]
        for _ in range(1 if asked.smoke else asked.rounds):
            for variant, found in zip(variants, times, strict=True):
                begin = thread_time_ns()
                variant([])
                found.append((thread_time_ns() - begin) // launches)
        plain, idle_ns, recorded = (sorted(found)[len(found) // 20] for found in times)
        print(f"{launches:8}  {plain:7}  {idle_ns:7}  {recorded:8}")


if __name__ == "__main__":
    main()
