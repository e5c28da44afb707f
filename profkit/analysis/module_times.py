"""What each module took: its kernels' time in the forward and the backward pass, siblings of one kind as one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from profkit.analysis.attribution import Attribution
from profkit.analysis.range_paths import build_nodes, split_path
from profkit.analysis.steps import is_warmup
from profkit.names import BACKWARD, PHASES, RECOMPUTE, REPLICA, kind_of
from profkit.trace.columns import distinct_values

if TYPE_CHECKING:
    from profkit.analysis.opened_trace import OpenedTrace

_OPTIMIZERS = "Optimizer."
"""How torch's own ranges around an optimizer's calls begin."""
_NCCL = "nccl"
"""The domain of NCCL's own ranges around collectives."""
_CCCL = "CCCL"
"""The domain of the ranges that CUDA's C++ libraries open around their algorithms."""


@dataclass(frozen=True)
class ModuleTime:
    """One module, or all that differ in a number: ``h.*`` is ``h.0`` to ``h.11``, and ``number`` is 12.

    Times are kernel time in nanoseconds, summed over the measured steps and all GPUs, and hold the modules within it.
    ``recompute_ns`` is what a checkpoint computed again, which ``backward_ns`` leaves out. ``forward_ns`` holds every
    other phase, such as inference. ``parent`` is the module around it, None at the top.
    """

    module: str
    parent: str | None
    number: int
    forward_ns: int
    backward_ns: int
    recompute_ns: int

    @property
    def total_ns(self) -> int:
        """Return the time of all three."""
        return self.forward_ns + self.backward_ns + self.recompute_ns


@dataclass
class _Sum:
    parent: str | None
    forward_ns: int = 0
    backward_ns: int = 0
    recompute_ns: int = 0
    names: set[str] = field(default_factory=set)


def time_modules(opened: OpenedTrace) -> tuple[ModuleTime, ...]:
    """Return the modules of a trace in the order of its tree: the ranges within its phases.

    Raises:
        TraceError: the trace cannot be placed in its ranges.
    """
    sums: dict[str, _Sum] = {}
    for row in opened.ranges(numbered=False).ranges:
        parts = split_path(row.path)
        at = next((n for n, part in enumerate(parts) if part in PHASES), None)
        if at is None or row.name == REPLICA or any(map(is_warmup, parts)):
            continue
        if _is_of_library(row.name, row.domain):
            continue
        _add(sums, parts[at], [part for part in parts[at + 1 :] if part != REPLICA], row.kernel_time_ns)
    names = {opened.trace.names[index] for index in distinct_values(opened.trace.ranges.name).tolist()}
    numbers: dict[str, int] = {}
    for name in names:
        numbers[kind_of(name)] = numbers.get(kind_of(name), 0) + 1
    return tuple(
        ModuleTime(name, one.parent, max(numbers.get(name, 1), 1), one.forward_ns, one.backward_ns, one.recompute_ns)
        for name, one in sums.items()
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
    for at in range(len(names) - 1, -1 if phase is None else phase, -1):
        name, domain = labels[node]
        is_module = name not in (RECOMPUTE, REPLICA) and domain != _CCCL and not _is_of_library(name, domain)
        if phase is not None and is_module:
            return names[at]
        node = parent[node]
    return f"(no module: {names[-1 if phase is None else phase]})"


def _is_of_library(name: str, domain: str) -> bool:
    """Return whether torch or NCCL opened a range for itself."""
    return name.startswith(_OPTIMIZERS) or _NCCL in domain.lower()


def own_time(modules: Sequence[ModuleTime], module: str) -> ModuleTime | None:
    """Return what a module took outside the modules within it, named ``model itself``; None if that is nothing."""
    whole = next((one for one in modules if one.module == module), None)
    if whole is None:
        return None
    inner = [one for one in modules if one.parent == module]
    own = {
        name: max(getattr(whole, name) - sum(getattr(one, name) for one in inner), 0)
        for name in ("forward_ns", "backward_ns", "recompute_ns")
    }
    return ModuleTime(f"{module} itself", whole.parent, whole.number, **own) if any(own.values()) else None


def _add(sums: dict[str, _Sum], phase: str, inner: list[str], time_ns: int) -> None:
    """Add the time of one path within a phase to its module; a module within itself counts once."""
    if not inner:
        return
    *above, name = inner
    if name == RECOMPUTE:
        # One within another is part of that one, and was taken out with it.
        for module in dict.fromkeys(above) if RECOMPUTE not in above else ():
            if module in sums:
                sums[module].backward_ns -= time_ns
                sums[module].recompute_ns += time_ns
        return
    if name in above:
        return
    one = sums.setdefault(name, _Sum(next((module for module in reversed(above) if module != RECOMPUTE), None)))
    if RECOMPUTE in above:
        one.recompute_ns += time_ns
        # A part that is computed again alone belongs to the modules around it too, which have no range there.
        around, counted = one.parent if above[-1] == RECOMPUTE else None, set(above)
        while around is not None and around in sums and around not in counted:
            sums[around].recompute_ns += time_ns
            counted.add(around)
            around = sums[around].parent
    elif phase == BACKWARD:
        one.backward_ns += time_ns
    else:
        one.forward_ns += time_ns
