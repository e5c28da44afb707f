"""What each module took: its kernels' time in the forward and the backward pass, siblings of one kind as one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account.steps import is_warmup
from profkit.analysis.tree.range_tree import build_nodes
from profkit.analysis.tree.selection import split_path
from profkit.names import BACKWARD, EVALUATION, PHASES, RECOMPUTE, REPLICA, kind_of
from profkit.run.compiled_code import COMPILING
from profkit.trace.columns import distinct_values

if TYPE_CHECKING:
    from profkit.analysis.opened import OpenedTrace

_OPTIMIZERS = "Optimizer."
"""How torch's own ranges around an optimizer's calls begin."""
_NCCL = "nccl"
"""The domain of NCCL's own ranges around collectives."""
_CCCL = "CCCL"
"""The domain of the ranges that CUDA's C++ libraries open around their algorithms."""
_CCCL_NAMES = ("cub::", "thrust::")
"""How the names of these ranges begin, which are all that is known of some."""


@dataclass(frozen=True)
class ModuleTime:
    """One module, or all that differ in a number: ``h.*`` is ``h.0`` to ``h.11``, and ``number`` is 12.

    Times are kernel time in nanoseconds, summed over the measured steps and all GPUs, and hold the modules within it.
    ``recompute_ns`` is what a checkpoint computed again, which ``backward_ns`` leaves out; ``inference_ns`` are its
    calls without gradients, as to evaluate it. ``parent`` is the module around it, None at the top.
    """

    module: str
    parent: str | None
    number: int
    forward_ns: int
    backward_ns: int
    recompute_ns: int
    inference_ns: int = 0

    @property
    def total_ns(self) -> int:
        """Return the time of all passes."""
        return self.forward_ns + self.backward_ns + self.recompute_ns + self.inference_ns


PASSES = ("forward_ns", "backward_ns", "recompute_ns", "inference_ns")
"""The times of a `ModuleTime`."""


class RangePath(Protocol):
    """A path of the tree of ranges: `RangeRow` and `NodePath` are such."""

    @property
    def path(self) -> str:
        """The names joined."""

    @property
    def name(self) -> str:
        """The last one."""

    @property
    def domain(self) -> str:
        """NVTX's."""


Credit = tuple[str, str, int]
"""A module, one of the times of `ModuleTime`, and 1 or -1: whether work under a path adds to it."""

Path = TypeVar("Path", bound=RangePath)


def time_modules(opened: OpenedTrace) -> tuple[ModuleTime, ...]:
    """Return the modules of a trace in the order of its tree: the ranges within its phases.

    Raises:
        TraceError: the trace cannot be placed in its ranges.
    """
    parents: dict[str, str | None] = {}
    sums: dict[str, Counter[str]] = {}
    for row, credits in credit_modules(opened.ranges(numbered=False).ranges, parents):
        for module, time, sign in credits:
            sums.setdefault(module, Counter())[time] += sign * row.kernel_time_ns
    names = {opened.trace.names[index] for index in distinct_values(opened.trace.ranges.name).tolist()}
    numbers: dict[str, int] = {}
    for name in names:
        numbers[kind_of(name)] = numbers.get(kind_of(name), 0) + 1
    return tuple(
        ModuleTime(name, parents[name], max(numbers.get(name, 1), 1), *(times[part] for part in PASSES))
        for name, times in sums.items()
    )


def modules_of_ranges(attribution: Attribution) -> list[str]:
    """Return the module that each range's own work counts for: the innermost, siblings of one kind as one.

    Work of a phase that lies in none of its modules counts for ``(no module: backward)``.
    """
    nodes = build_nodes(attribution, numbered=False)
    labels = [_module_of(names, nodes.labels, nodes.parent, node) for node, names in enumerate(nodes.names_above())]
    return [labels[node] for node in nodes.of_range.tolist()]


def _module_of(names: Sequence[str], labels: Sequence[tuple[str, str]], parent: Sequence[int], node: int) -> str:
    """Return the module of one node of the tree, whose ``names`` are those from the top down to its own."""
    phase = next((at for at, name in enumerate(names) if name in PHASES), None)
    if is_compiling(names):
        return f"(no module: {COMPILING})"
    for at in range(len(names) - 1, -1 if phase is None else phase, -1):
        name, domain = labels[node]
        if phase is not None and is_module_range(name, domain):
            return names[at]
        node = parent[node]
    return f"(no module: {names[-1 if phase is None else phase]})"


def is_compiling(path: Iterable[str]) -> bool:
    """Return whether a path of ranges lies in one around torch.compile's own work, which is no module's."""
    return any(name.startswith(COMPILING) for name in path)


def is_module_range(name: str, domain: str = "") -> bool:
    """Return whether a range within a phase is one of the program's parts."""
    return name not in (RECOMPUTE, REPLICA) and not _is_of_library(name, domain)


def _is_of_library(name: str, domain: str) -> bool:
    """Return whether torch, NCCL or one of CUDA's C++ libraries opened a range for itself."""
    return name.startswith((_OPTIMIZERS, *_CCCL_NAMES)) or domain == _CCCL or _NCCL in domain.lower()


def own_time(modules: Sequence[ModuleTime], module: str) -> ModuleTime | None:
    """Return what a module took outside the modules within it, named ``model itself``; None if that is nothing."""
    whole = next((one for one in modules if one.module == module), None)
    if whole is None:
        return None
    inner = [one for one in modules if one.parent == module]
    own = {name: max(getattr(whole, name) - sum(getattr(one, name) for one in inner), 0) for name in PASSES}
    return ModuleTime(f"{module} itself", whole.parent, whole.number, **own) if any(own.values()) else None


def credit_modules(rows: Iterable[Path], parents: dict[str, str | None]) -> Iterator[tuple[Path, list[Credit]]]:
    """Yield the paths within phases, depth first, each with the times of modules to which its work adds.

    Work counts at every path above it too, so each path credits its own module alone. ``parents`` collects the modules
    met, each with the one around it.
    """
    for row in rows:
        parts = split_path(row.path)
        at = next((n for n, part in enumerate(parts) if part in PHASES), None)
        if at is None or row.name == REPLICA or any(map(is_warmup, parts)):
            continue
        if _is_of_library(row.name, row.domain):
            continue
        yield row, list(_credit(parents, parts[at], [part for part in parts[at + 1 :] if part != REPLICA]))


def _credit(parents: dict[str, str | None], phase: str, inner: list[str]) -> Iterator[Credit]:
    """Yield what one path within a phase adds to; a module within itself counts once."""
    if not inner:
        return
    *above, name = inner
    if name == RECOMPUTE:
        # One within another is part of that one, and was taken out with it.
        for module in dict.fromkeys(above) if RECOMPUTE not in above else ():
            if module in parents:
                yield module, "backward_ns", -1
                yield module, "recompute_ns", 1
        return
    if is_compiling(inner):
        # What torch.compile runs to choose among kernels lies within the ranges of modules.
        if not is_compiling(above):
            for module in dict.fromkeys(one for one in above if one != RECOMPUTE):
                yield module, _pass_of(phase, above), -1
        return
    if name in above:
        return
    parents.setdefault(name, next((module for module in reversed(above) if module != RECOMPUTE), None))
    if RECOMPUTE in above:
        yield name, "recompute_ns", 1
        # A part that is computed again alone belongs to the modules around it too, which have no range there.
        around, counted = parents[name] if above[-1] == RECOMPUTE else None, set(above)
        while around is not None and around in parents and around not in counted:
            yield around, "recompute_ns", 1
            counted.add(around)
            around = parents[around]
    else:
        yield name, _pass_of(phase, above), 1


def _pass_of(phase: str, above: Sequence[str]) -> str:
    if RECOMPUTE in above:
        return "recompute_ns"
    if phase in EVALUATION:
        return "inference_ns"
    return "backward_ns" if phase == BACKWARD else "forward_ns"
