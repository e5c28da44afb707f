"""The work of one profiled step: its kernels by phase, who launched them, and what is fused in them.

On a CPU these are operators, by self time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profkit import read_trace
from recipes.common.recipe import Row

_MATRIX_PRODUCTS = ("gemm", "attention")
# Inductor's names: triton_poi_fused_add_mul_0; for C++ graph_0_cpp_fused_add_mul_0, if the profiler sees it.
_GENERATED = re.compile(r"^(?:graph_\d+_)?(?:triton|cpp)_")
# Operators that Inductor adds to ATen's (torch/_inductor/inductor_prims.py).
_PRIMITIVES = (("prepare", "softmax", "online"),)
_FUSED = re.compile(r"^(?:graph_\d+_)?(?:triton|cpp)_(?:\w+?_)?fused_(\w+?)_\d+$")


Totals = tuple[int, int]
"""Launches, and their nanoseconds."""


@dataclass(frozen=True)
class Kernel:
    """The launches of one kernel in one phase (or the calls of one operator, by self time)."""

    phase: str
    name: str
    category: str
    count: int
    total_ns: int
    fused: tuple[str, ...] = ()
    """The operators inside, if Inductor made it."""

    @property
    def is_generated(self) -> bool:
        return is_generated(self.name)

    @property
    def is_matrix_product(self) -> bool:
        """Whether a library multiplies matrices in it."""
        return self.category in _MATRIX_PRODUCTS and not self.is_generated


@dataclass(frozen=True)
class Launcher:
    """The kernels that one operator launched in one phase; on a CPU the operator itself."""

    phase: str
    name: str
    count: int
    total_ns: int


def is_generated(name: str) -> bool:
    """Return whether Inductor made a kernel of this name."""
    return _GENERATED.match(name) is not None


def split_operators(name: str, is_operator: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the operators in the name of a generated kernel: mul and silu for ``triton_poi_fused_mul_silu_0``.

    Inductor joins operators with underscores, which their names contain too (``get_fused_kernel_name`` in
    ``torch/_inductor/utils.py``): at each place the longest known name counts, and an unknown word stands by itself.
    Other kernels have none.
    """
    found = _FUSED.match(name)
    words, operators = found[1].split("_") if found else [], list[str]()
    while words:
        ends = range(len(words), 1, -1)
        end = next((end for end in ends if is_operator("_".join(words[:end]))), 1)
        operators.append("_".join(words[:end]))
        del words[:end]
    return _join_primitives(filter(None, operators))


def _join_primitives(words: Iterable[str]) -> tuple[str, ...]:
    """Return the operators with the words of one Inductor primitive joined: ``prepare_softmax_online``."""
    operators = list(words)
    for primitive in _PRIMITIVES:
        for start in reversed(range(len(operators))):
            if tuple(operators[start : start + len(primitive)]) == primitive:
                operators[start : start + len(primitive)] = ["_".join(primitive)]
    return tuple(operators)


def read_work(path: Path, phases: Sequence[str], is_operator: Callable[[str], bool]) -> Row:
    """Return the work in a trace of one step, by phase and in all, and why the trace cannot be trusted, if so."""
    opened = read_trace(path)
    whole = opened.kernels()
    work: list[dict[str, Any]] = []
    launchers: list[dict[str, Any]] = []
    for phase in phases:
        for row in opened.kernels(phase).kernels:
            fused = split_operators(row.name, is_operator)
            place = {"phase": phase, "name": row.name, "category": row.category}
            work.append({**place, "count": row.count, "total_ns": row.total_ns, "fused": fused})
        for row in opened.kernels(phase, by="operator").kernels:
            launchers.append({"phase": phase, "name": row.name, "count": row.count, "total_ns": row.total_ns})
    return {
        "measure": whole.measure,
        "kernels": whole.kernel_count,
        "kernel_ms": whole.kernel_time_ns / 1e6,
        "generated_kernels": sum(each["count"] for each in work if is_generated(each["name"])),
        "work": work,
        "launchers": launchers,
        "trace_failures": [finding.message for finding in opened.self_check.of("failed")],
    }


def kernels_of(row: Mapping[str, Any]) -> list[Kernel]:
    """Return the kernels that a row holds."""
    # Rows of earlier runs may hold the words of a primitive separately.
    return [Kernel(**{**each, "fused": _join_primitives(each["fused"])}) for each in row.get("work") or ()]


def launchers_of(row: Mapping[str, Any]) -> list[Launcher]:
    """Return the launching operators that a row holds."""
    return [Launcher(**each) for each in row.get("launchers") or ()]


def total(work: Iterable[Kernel | Launcher]) -> Totals:
    """Return the number of launches and their nanoseconds."""
    entries = list(work)
    return sum(each.count for each in entries), sum(each.total_ns for each in entries)
