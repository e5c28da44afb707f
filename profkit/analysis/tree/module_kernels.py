"""Which kernels the time of each module is made of: what a module takes, kernel by kernel, closes to the nanosecond."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from profkit.analysis.opened import OpenedTrace
from profkit.analysis.tree.module_times import credit_modules
from profkit.analysis.tree.range_tree import build_nodes, work_by_node


@dataclass
class ModuleKernel:
    """One kernel within one module; the times are those of `ModuleTime`, summed over the measured steps."""

    forward_ns: int = 0
    backward_ns: int = 0
    recompute_ns: int = 0
    inference_ns: int = 0
    count: int = 0


def time_kernels_by_module(opened: OpenedTrace, wanted: Container[str]) -> dict[str, dict[str, ModuleKernel]]:
    """Return module → kernel → its time within the module, for the modules wanted.

    Each of a module's times is the sum over its kernels.

    Raises:
        TraceError: the trace cannot be placed in its ranges.
    """
    attribution = opened.attribution
    names, work = attribution.trace.names, attribution.trace.work
    nodes = build_nodes(attribution, numbered=False)
    credits = {row.node: found for row, found in credit_modules(nodes.depth_first(), {})}
    found: dict[str, dict[str, ModuleKernel]] = {}
    for rows, node in work_by_node(attribution, nodes, np.arange(len(attribution.trace.ranges))):
        keys, inverse = np.unique(node * len(names) + work.name[rows], return_inverse=True)
        counts = np.bincount(inverse, minlength=len(keys))
        times = np.zeros(len(keys), dtype=np.int64)
        np.add.at(times, inverse, work.duration_ns[rows])
        for key, time_ns, count in zip(keys.tolist(), times.tolist(), counts.tolist(), strict=True):
            for module, part, sign in credits.get(key // len(names), ()):
                if module in wanted:
                    one = found.setdefault(module, {}).setdefault(names[key % len(names)], ModuleKernel())
                    setattr(one, part, getattr(one, part) + sign * time_ns)
                    one.count += sign * count
    return {module: {name: one for name, one in kernels.items() if one.count} for module, kernels in found.items()}
