"""The self-check of a run against its manifest: how many steps it made, and how many matrix products a model makes.

A capture that lost the same part of every step looks even, and passes every check that knows only the capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profkit.analysis.kernels.categories import OTHER, categorize
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account.steps import measured_ranges
from profkit.errors import Finding
from profkit.names import FORWARD, STEP
from profkit.trace.columns import Bools, distinct_values, rows_by_value

if TYPE_CHECKING:
    from profkit.run.manifest import Manifest

_LINEARS_PER_LAYER = 7
"""Query, key, value and output of attention, three of SwiGLU."""
_BATCHED_PER_LAYER = 2
"""Attention scores, and the values weighted by them."""

_COMPLETE, _CUT_SHORT = "complete", "cut short"

# cuBLAS adds up the parts of a product that was split along its inner dimension in a kernel of its own.
_ADDS_SPLIT_PARTS = re.compile(r"splitKreduce|execute_split_k_kernel", re.IGNORECASE)


@dataclass(frozen=True)
class KnownRun:
    """What a run's manifest says of its steps.

    ``steps`` is how many step ranges the process that counts must have; None if that is not known (no ranges were
    asked for, or the script was cut short). ``layers`` is of a built-in model, None for a command. ``even`` says that
    each step must launch as many kernels as any other. ``pids`` are the processes each of which made all of the steps,
    where there were several.
    """

    steps: int | None
    layers: int | None
    even: bool
    pids: tuple[int, ...] = ()


UNKNOWN_RUN = KnownRun(steps=None, layers=None, even=False)


def know_run(manifest: Manifest) -> KnownRun:
    """Return what the manifest of a run says of its steps; manifests of older versions say less."""
    workload = manifest.workload
    if manifest.status != "complete":
        return UNKNOWN_RUN
    pids = _pids_of_whole(manifest)
    if workload.preset_name is None:
        steps = workload.steps
        is_short = len(manifest.processes) == 1 and manifest.processes[0].state == _CUT_SHORT
        if steps is not None and is_short:
            steps = min(steps, len(manifest.processes[0].profiled))
        return KnownRun(steps if workload.annotate else None, None, even=False, pids=pids)
    # The first step makes the optimizer's state; CUDA graphs of compiled code run from the third.
    settled = 3 if workload.compile_mode == "reduce-overhead" else 1
    layers = (manifest.preset or {}).get("num_layers")
    return KnownRun(
        steps=None if workload.steps is None else workload.steps * max(len(workload.contexts), 1),
        layers=layers if isinstance(layers, int) else None,
        even=(workload.warmup_steps or 0) >= settled,
        pids=pids,
    )


def _pids_of_whole(manifest: Manifest) -> tuple[int, ...]:
    """Return the processes that recorded every step, where there were several: not those left out by ``--ranks``."""
    if len(manifest.processes) < 2:
        return ()
    return tuple(
        process.pid
        for process in manifest.processes
        if process.pid is not None and process.state == _COMPLETE and process.is_recorded and not process.failure
    )


def products_per_forward(layers: int) -> int:
    """Return how many matrix products a forward pass of the built-in model makes: nine a layer and the head."""
    return (_LINEARS_PER_LAYER + _BATCHED_PER_LAYER) * layers + 1


def check_run(attribution: Attribution, run: KnownRun) -> Iterator[Finding]:
    yield from _check_step_count(attribution, run)
    yield from _check_products(attribution, run)


def _check_step_count(attribution: Attribution, run: KnownRun) -> Iterator[Finding]:
    if run.steps is None or attribution.trace.has_invisible_ranges:
        return
    steps = measured_ranges(attribution).get(STEP, np.empty(0, dtype=np.int64))
    trace = attribution.trace
    rows = rows_by_value(trace.ranges.process[steps])
    counts = {process: len(own) for process, own in rows.items()}
    ours = {pid: process for process, pid in trace.process_ids.items() if pid in run.pids}
    if ours:  # else the numbers are of another namespace
        made = min(counts.get(ours[pid], 0) if pid in ours else 0 for pid in run.pids)
        where = " of one of its processes" if len(run.pids) > 1 else ""
    else:
        made, where = max(counts.values(), default=0), ""
    # A script may have ranges of its own under the same name.
    if made < run.steps or (run.layers is not None and made > run.steps):
        message = f"the run made {run.steps:,} step{'s' * (run.steps != 1)}, and the capture holds {made:,}{where}"
        yield Finding("step-count", message, "failed")


def _check_products(attribution: Attribution, run: KnownRun) -> Iterator[Finding]:
    trace = attribution.trace
    members = measured_ranges(attribution).get(FORWARD)
    if run.layers is None or members is None or trace.measure != "gpu-kernel" or not len(trace.work):
        return
    under = attribution.work.under(members, np.arange(len(members)))
    rows, instance = under.rows, under.member
    if trace.work.is_graph[rows].any():  # a graph traced whole does not show its kernels
        return
    is_product, is_nameless = _products_and_nameless(attribution)
    made, nameless = (
        np.bincount(instance[marked[trace.work.name[rows]]], minlength=len(members))
        for marked in (is_product, is_nameless)
    )
    due = products_per_forward(run.layers)
    said = f"a forward pass of this model makes {due:,} matrix products"
    missing = due - made
    lost = np.flatnonzero(missing > nameless)  # kernels of unknown kinds may be products too
    if len(lost):
        worst = int(made[lost].min())
        message = f"{said}; {len(lost):,} of {len(made):,} hold fewer, down to {worst:,}: kernels are missing"
        yield Finding("missing-products", message, "failed")
    elif missing.any():
        message = f"{said}, and by their kernels' names they hold {made.min():,} to {made.max():,}"
        yield Finding("unknown-products", f"{message}: some kernel names are unknown or ambiguous", "warning")


def _products_and_nameless(attribution: Attribution) -> tuple[Bools, Bools]:
    names = attribution.trace.names
    products, nameless = np.zeros((2, len(names)), dtype=np.bool_)
    for index in distinct_values(attribution.trace.work.name).tolist():
        category = categorize(names[index])
        products[index] = category.name == "gemm" and not _ADDS_SPLIT_PARTS.search(names[index])
        nameless[index] = category == OTHER
    return products, nameless
