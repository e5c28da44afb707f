"""Modules in the tree of ranges: which module work counts for, what each took, and which kernels that was.

The ranges within a phase are modules, those that differ in a number as one (``h.*``). No module is what a library or
profkit opens for itself, and what lies in the optimizer's phase. Work counts for every module around it, once each. In
the backward pass some have no range: a block around a part that a checkpoint computes again, or a wrapper. Where the
modules around a part are none that it has in another phase, its work counts for those that have it in the tree too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account import is_warmup, mark_work_of_steps
from profkit.analysis.tree.range_tree import RangeNodes, build_nodes
from profkit.names import BACKWARD, COMPILING, EVALUATION, OPTIMIZER, RECOMPUTE, REPLICA, is_shared, kind_of, phase_of
from profkit.trace.columns import Ints, distinct_values

Pass = Literal["forward_ns", "backward_ns", "recompute_ns", "inference_ns"]
PASSES: tuple[Pass, ...] = ("forward_ns", "backward_ns", "recompute_ns", "inference_ns")
"""The parts of a module's time, of which each piece of work counts in one."""

_OPTIMIZERS = "Optimizer."
"""How torch's own ranges around an optimizer's calls begin."""
_NCCL = "nccl"
"""The domain of NCCL's own ranges around collectives."""
_CCCL = "CCCL"
"""The domain of the ranges that CUDA's C++ libraries open around their algorithms."""
_CCCL_NAMES = ("cub::", "thrust::")
"""How the names of these ranges begin, which are all that is known of some."""


@dataclass(frozen=True)
class Place:
    """Where a path of ranges lies: its phase, if any, and the modules around it there, outermost first, each once.

    ``phase`` is `COMPILING` for torch.compile's own work, wherever that lies.
    """

    phase: str | None
    modules: tuple[str, ...] = ()
    is_again: bool = False

    @property
    def part(self) -> Pass:
        """Return the part of its modules' time that work here counts in."""
        if self.is_again:
            return "recompute_ns"
        if self.phase in EVALUATION:
            return "inference_ns"
        return "backward_ns" if self.phase == BACKWARD else "forward_ns"


def read_place(path: Sequence[tuple[str, str]]) -> Place:
    names = [name for name, _ in path]
    if any(name.startswith(COMPILING) for name in names):
        return Place(COMPILING)
    at, phase = next(((n, phase) for n, name in enumerate(names) if (phase := phase_of(name))), (0, None))
    if phase is None or phase == OPTIMIZER:
        return Place(phase)
    inner = path[at + 1 :]
    modules = dict.fromkeys(name for name, domain in inner if _is_module(name, domain))
    return Place(phase, tuple(modules), RECOMPUTE in names[at + 1 :])


def _is_module(name: str, domain: str) -> bool:
    is_of_library = name.startswith((_OPTIMIZERS, *_CCCL_NAMES)) or domain == _CCCL or _NCCL in domain.lower()
    return name not in (RECOMPUTE, REPLICA) and not is_of_library


class ModuleTree:
    """The modules of some places by name, each within the one around it where most are, best outside backward."""

    def __init__(self, places: Iterable[Place]) -> None:
        distinct = dict.fromkeys(places)
        self._recorded = {
            place.modules[:depth]
            for place in distinct
            if place.phase != BACKWARD
            for depth in range(1, len(place.modules) + 1)
        }
        self.parent: dict[str, str | None] = {module: None for place in distinct for module in place.modules}
        pairs = {
            (place.phase == BACKWARD, -depth, around, module)
            for place in distinct
            for depth, (around, module) in enumerate(pairwise(place.modules))
        }
        for *_, around, module in sorted(pairs):
            if self.parent[module] is None and module not in (around, *self.above(around)):
                self.parent[module] = around

    def above(self, module: str) -> Iterator[str]:
        around = self.parent[module]
        while around is not None:
            yield around
            around = self.parent[around]

    def modules_around(self, place: Place) -> list[str]:
        """Return the modules that work in a place counts for, the outermost first."""
        if place.phase != BACKWARD or place.modules in self._recorded:
            return [*place.modules]
        modules: list[str] = []
        for module in place.modules:
            above = [*self.above(module)]
            if not modules:
                modules = above[::-1]
            elif modules[-1] in above:
                modules += above[: above.index(modules[-1])][::-1]
            modules.append(module)
        return list(dict.fromkeys(modules))


@dataclass(frozen=True)
class PassTimes:
    """Kernel time in nanoseconds by pass.

    ``recompute_ns`` is what a checkpoint computed again, which ``backward_ns`` leaves out; ``inference_ns`` are calls
    without gradients, as to evaluate a model. ``forward_ns`` holds every other phase.
    """

    forward_ns: int = 0
    backward_ns: int = 0
    recompute_ns: int = 0
    inference_ns: int = 0

    @property
    def total_ns(self) -> int:
        return self.forward_ns + self.backward_ns + self.recompute_ns + self.inference_ns


@dataclass(frozen=True)
class ModuleTime:
    """One module, or all that differ in a number: ``h.*`` is ``h.0`` to ``h.11``, and ``number`` is 12.

    Times are those of `PassTimes`, sums over the measured steps and all GPUs, and hold the modules within it;
    ``itself`` is what lies in none of these. ``parent`` is the module around it, None at the top, and ``around`` are
    all modules that some of its work counts for too.
    """

    module: str
    parent: str | None
    number: int
    forward_ns: int
    backward_ns: int
    recompute_ns: int
    inference_ns: int = 0
    itself: PassTimes = PassTimes()
    around: tuple[str, ...] = ()

    @property
    def total_ns(self) -> int:
        return self.forward_ns + self.backward_ns + self.recompute_ns + self.inference_ns


@dataclass(frozen=True)
class ModuleKernel(PassTimes):
    """One kernel within one module: its part of the module's times, and how often it ran."""

    count: int = 0


def time_modules(attribution: Attribution) -> tuple[ModuleTime, ...]:
    nodes = build_nodes(attribution, numbered=False)
    places, measured = _read_places(nodes), _measured_nodes(nodes)
    tree = ModuleTree(places[node] for node in measured)
    work = attribution.trace.work
    own_ns = np.zeros(len(nodes), dtype=np.int64)
    node, rows = _innermost_nodes(attribution, nodes)
    np.add.at(own_ns, node, work.duration_ns[rows])
    whole: dict[str, Counter[Pass]] = {}
    itself: dict[str, Counter[Pass]] = {}
    around: dict[str, dict[str, None]] = {}
    for at in measured:
        place, time_ns = places[at], int(own_ns[at])
        modules = tree.modules_around(place)
        for depth, module in enumerate(modules):
            whole.setdefault(module, Counter())[place.part] += time_ns
            around.setdefault(module, {}).update(dict.fromkeys(modules[:depth]))
        if modules:
            itself.setdefault(modules[-1], Counter())[place.part] += time_ns
    trace = attribution.trace
    numbers = Counter(kind_of(trace.names[index]) for index in distinct_values(trace.ranges.name).tolist())
    return tuple(
        ModuleTime(
            module=module,
            parent=tree.parent[module],
            number=max(numbers[module], 1),
            itself=PassTimes(**_by_pass(itself.get(module, Counter()))),
            around=tuple(around[module]),
            **_by_pass(sums),
        )
        for module, sums in whole.items()
    )


def time_kernels_by_module(attribution: Attribution, wanted: Container[str]) -> dict[str, dict[str, ModuleKernel]]:
    nodes = build_nodes(attribution, numbered=False)
    places, measured = _read_places(nodes), set(_measured_nodes(nodes))
    tree = ModuleTree(places[node] for node in _measured_nodes(nodes))
    names, work = attribution.trace.names, attribution.trace.work
    node, rows = _innermost_nodes(attribution, nodes)
    keys, inverse, counts = np.unique(node * len(names) + work.name[rows], return_inverse=True, return_counts=True)
    times = np.zeros(len(keys), dtype=np.int64)
    np.add.at(times, inverse, work.duration_ns[rows])
    sums: dict[tuple[str, str], Counter[Pass]] = {}
    ran: Counter[tuple[str, str]] = Counter()
    for key, time_ns, count in zip(keys.tolist(), times.tolist(), counts.tolist(), strict=True):
        at, name = divmod(key, len(names))
        for module in tree.modules_around(places[at]) if at in measured else ():
            if module in wanted:
                sums.setdefault((module, names[name]), Counter())[places[at].part] += time_ns
                ran[module, names[name]] += count
    kernels: dict[str, dict[str, ModuleKernel]] = {}
    for (module, kernel), passes in sums.items():
        kernels.setdefault(module, {})[kernel] = ModuleKernel(count=ran[module, kernel], **_by_pass(passes))
    return kernels


def find_costliest(modules: Sequence[ModuleTime]) -> ModuleTime | None:
    """Return the module that the time goes to: from the outermost one down, as long as one holds most of the other."""
    within: dict[str | None, list[ModuleTime]] = {}
    for row in modules:
        if not is_shared(row.module):
            within.setdefault(row.parent, []).append(row)
    module = max(within.get(None, ()), key=lambda row: row.total_ns, default=None)
    while module is not None and module.module in within:
        inner = max(within[module.module], key=lambda row: row.total_ns)
        if inner.total_ns <= module.total_ns / 2:
            break
        module = inner
    return module if module is not None and module.total_ns else None


def modules_of_ranges(attribution: Attribution) -> list[str]:
    """Return the module that each range's own work counts for: the innermost, siblings of one kind as one.

    Work of a phase that lies in none of its modules counts for ``(no module: backward)``.
    """
    nodes = build_nodes(attribution, numbered=False)
    places = zip(_read_places(nodes), nodes.labels, strict=True)
    labels = [
        place.modules[-1] if place.modules else f"(no module: {place.phase or name})" for place, (name, _) in places
    ]
    return [labels[node] for node in nodes.of_range.tolist()]


def places_of_ranges(attribution: Attribution) -> list[Place]:
    nodes = build_nodes(attribution, numbered=False)
    places = _read_places(nodes)
    return [places[node] for node in nodes.of_range.tolist()]


def _read_places(nodes: RangeNodes) -> list[Place]:
    return [read_place(path) for path in nodes.labels_above()]


def _measured_nodes(nodes: RangeNodes) -> list[int]:
    names = nodes.names_above()
    return [node for node, _ in nodes.depth_first() if not any(map(is_warmup, names[node]))]


def _innermost_nodes(attribution: Attribution, nodes: RangeNodes) -> tuple[Ints, Ints]:
    innermost = attribution.work.innermost
    rows = np.flatnonzero((innermost >= 0) & mark_work_of_steps(attribution))
    return nodes.of_range[innermost[rows]], rows


def _by_pass(sums: Counter[Pass]) -> dict[str, int]:
    return {part: sums[part] for part in PASSES}
