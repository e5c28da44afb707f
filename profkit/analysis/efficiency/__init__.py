"""How much arithmetic each range of a trace did, and how well its steps used the GPU for it (MFU).

A run's ``work.json`` names a range by its path below the step. Without it, a range's payload counts as its FLOPs if it
is a whole number in NVTX's default domain: that is how `profkit.annotate` stores them.

Model FLOPs utilization is defined by Chowdhery et al. 2022 (PaLM), appendix B: the FLOPs of forward and backward as the
model asks for them, however much is recomputed, over the time of the whole step, here unprofiled, and the datasheet's
peak of all GPUs on which the process ran its steps. Hardware FLOPs utilization (HFU) is the same of all matrix products
that the step does. What a run directory knows that its trace does not are `RunFacts`.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account import context_of, is_step, is_warmup
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.tree.range_tree import RangeNodes
from profkit.errors import Finding, UsageError
from profkit.names import BACKWARD, FORWARD
from profkit.run.directory import Run
from profkit.trace.columns import Ints, Trace, distinct_values, rows_by_value

# Imported where they are needed: a trace outside a run has neither.
if TYPE_CHECKING:
    from profkit.run.manifest import Loading, Manifest
    from profkit.run.work import Ceilings, RangeWork, RunWork

# torch.set_float32_matmul_precision: these two values let cuBLAS use TF32 (torch/backends/cuda, allow_tf32).
_TF32_PRECISIONS = ("high", "medium")

VECTOR_DTYPE = "fp32"
"""What everything but matrix products is computed in, with autocast or without, on the GPU's ordinary units."""


@dataclass(frozen=True)
class Peaks:
    """The most that a GPU can do per second: FLOPs of matrix products by dtype, and bytes moved.

    ``source`` is ``measured`` (by `profkit ceilings` on a GPU of this name) or ``datasheet``.
    """

    source: str
    gpu: str
    flops_per_s: dict[str, float]
    bytes_per_s: float


@dataclass(frozen=True)
class RunFacts:
    """What is known besides the trace; little if the trace lies in no run directory.

    ``dtype`` is the type of matrix products whose range does not name one. ``peaks`` are the measured ones if there are
    any, else the datasheet's; MFU always uses ``datasheet``.
    ``loading`` is of the data loaders with workers, if there were any. ``uncounted`` says why ``work`` is unknown.
    """

    gpu: str | None
    dtype: str | None
    work: RunWork | None
    peaks: Peaks | None
    datasheet: Datasheet | None
    loading: Loading | None
    uncounted: str | None = None

    def find_doubts(self) -> Iterator[Finding]:
        if self.work is None:
            return
        from profkit.run.work import FUSED

        missing = self.work.missing
        if FUSED in missing:
            yield Finding(
                "uncounted-fused",
                "of fused kernels of compiled code only matrix products are counted: their other work and their "
                "bytes are unknown, so their rates and % of peak are too low",
            )
        names = ", ".join(name for name in missing if name != FUSED)
        if names:
            yield Finding("uncounted", f"operators without a FLOP formula, counted as no work: {names}")


def read_run_facts(
    trace: Trace, run: Run | None, *, ceilings: Path | None = None, dtype: str | None = None
) -> RunFacts:
    """Return what is known besides the trace.

    Args:
        ceilings: a file of `profkit ceilings`, or a run directory that has one; by default the run's own.
        dtype: the type of matrix products, if the run does not name it.
    """
    manifest = None if run is None else run.manifest
    work = None if run is None else run.work
    names = set(trace.gpus)
    gpu = (None if manifest is None else manifest.gpu) or (names.pop() if len(names) == 1 else None)
    sheet = find_datasheet(gpu)
    measured = None if run is None else run.ceilings
    if ceilings is not None:
        from profkit.run.work import read_ceilings

        measured = Run(ceilings).ceilings if ceilings.is_dir() else read_ceilings(ceilings)
    if measured is not None and gpu is not None and _bare(measured.device.name) != _bare(gpu):
        raise UsageError(
            f"{ceilings or trace.path}: the ceilings were measured on {measured.device.name}, the capture on {gpu};"
            " run `profkit ceilings` on that GPU"
        )
    recorded = (work.dtype if work is not None else None) or (None if manifest is None else _dtype_of(manifest))
    if None not in (dtype, recorded) and dtype != recorded:
        raise UsageError(f"{trace.path}: the run computed its matrix products in {recorded}, not in {dtype}")
    return RunFacts(
        gpu=gpu,
        dtype=recorded or dtype,
        work=work,
        peaks=_peaks(measured, sheet),
        datasheet=sheet,
        loading=None if manifest is None else manifest.loading,
        uncounted=_explain_no_work(run) if work is None else None,
    )


def _explain_no_work(run: Run | None) -> str:
    if run is None:
        return "a trace alone does not hold them; `profkit run` counts them in a step of its own"
    return run.manifest.uncounted or "this run counted none; `profkit run` does so unless --no-flops is given"


def _peaks(measured: Ceilings | None, sheet: Datasheet | None) -> Peaks | None:
    if measured is not None:
        products = {product.dtype: product.best_flops_per_s for product in measured.gemm}
        return Peaks("measured", measured.device.name, products, measured.copy.best_bytes_per_s)
    return None if sheet is None else Peaks("datasheet", sheet.name, sheet.flops_per_s, sheet.bytes_per_s)


def _dtype_of(manifest: Manifest) -> str | None:
    from profkit.run.manifest import find_condition

    asked = manifest.workload.dtype
    if asked is None or manifest.device == "cpu":
        return None
    is_tf32 = asked == "fp32" and find_condition(manifest, "float32_matmul_precision") in _TF32_PRECISIONS
    return "tf32" if is_tf32 else asked


def _bare(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").strip()


_TABLE = Path(__file__).with_name("datasheet.toml")


@dataclass(frozen=True)
class Datasheet:
    """Dense peaks of a GPU: FLOP/s by type ("fp32", "tf32", "bf16", "fp16", those that it has), and memory bytes/s."""

    name: str
    flops_per_s: dict[str, float]
    bytes_per_s: float


def find_datasheet(gpu: str | None) -> Datasheet | None:
    """Return the datasheet of a GPU by the name that torch and nsys give it; None if the table lacks it.

    Names are compared whole: an "RTX 4090 D" is not an "RTX 4090".
    """
    return None if gpu is None else _datasheets().get(_bare(gpu))


@cache
def _datasheets() -> dict[str, Datasheet]:
    sheets = {}
    for row in tomllib.loads(_TABLE.read_text(encoding="utf-8"))["gpu"]:
        peaks = {dtype: value * 1e12 for dtype, value in row["tflops_per_s"].items()}
        for name in row["names"]:
            sheets[name] = Datasheet(name, peaks, row["gigabytes_per_s"] * 1e9)
    return sheets


_UNKNOWN_DTYPE = "unknown"


@dataclass(frozen=True)
class Amount:
    """The work of some ranges together; None if it is unknown for any of them. ``flops_by_dtype`` sums to ``flops``."""

    flops: int | None = None
    other_flops: int | None = None
    needed_flops: int | None = None
    least_bytes: int | None = None
    recomputed_flops: int | None = None
    flops_by_dtype: dict[str, int] = field(default_factory=dict)


class RangeWorks:
    """Knows how much work the ranges of a trace did."""

    def __init__(self, trace: Trace, nodes: RangeNodes, facts: RunFacts) -> None:
        """Look up the path of every node; ``nodes`` must be numbered: ``layer 0`` and ``layer 1`` may differ."""
        self._dtype = facts.dtype or _UNKNOWN_DTYPE
        self._node = nodes.of_range
        self._known: list[RangeWork | None] = [None] * len(nodes)
        if facts.work is not None:
            by_path = {work.path: work for work in facts.work.ranges}
            self._known = [_look_up(by_path, names) for names in nodes.names_above()]
        self._source = facts.work.source if facts.work is not None else ""
        self._payload = np.full(len(trace.ranges), -1, dtype=np.int64)
        for index, value in trace.ranges.payload.items():
            if isinstance(value, int) and value >= 0 and trace.names[int(trace.ranges.domain[index])] == "":
                self._payload[index] = value

    def source(self, members: Ints) -> str | None:
        """Return where the figures for these ranges come from; None if none is known."""
        if any(self._known[node] is not None for node in distinct_values(self._node[members]).tolist()):
            return self._source
        return "payload" if (self._payload[members] >= 0).any() else None

    def total(self, members: Ints) -> Amount:
        if not len(members):
            return Amount()
        # Asked of single ranges, a hundred thousand times: no array function is as quick.
        counts = Counter(self._node[members].tolist())
        known = [(self._known[node], counts[node]) for node in sorted(counts)]
        whole = [(work, count) for work, count in known if work is not None]
        if len(whole) == len(known):
            return _sum(whole)
        payload = self._payload[members]
        if (payload < 0).any():
            return Amount()
        flops = int(payload.sum())
        return Amount(flops=flops, flops_by_dtype={self._dtype: flops})


def _sum(whole: list[tuple[RangeWork, int]]) -> Amount:
    by_dtype: Counter[str] = Counter()
    for work, count in whole:
        by_dtype.update(work.flops_of(count))
    needed = [None if work.needed_flops is None else work.needed_flops * count for work, count in whole]
    return Amount(
        flops=sum(by_dtype.values()),
        other_flops=sum(work.other_flops * count for work, count in whole),
        needed_flops=None if None in needed else sum(filter(None, needed)),
        least_bytes=sum(work.least_bytes * count for work, count in whole),
        recomputed_flops=sum(work.recomputed_flops * count for work, count in whole),
        flops_by_dtype=dict(by_dtype),
    )


def _look_up(by_path: dict[tuple[str, ...], RangeWork], names: tuple[str, ...]) -> RangeWork | None:
    if is_warmup(names[-1]) or context_of(names[-1:]) is not None:
        return None  # these lie around any number of steps
    kept = tuple(name for name in names if not is_step(name) and not is_warmup(name))
    # Ranges that a script opens around its steps are not part of the paths in work.json.
    below = names[max((at + 1 for at, name in enumerate(names) if is_step(name)), default=0) :]
    return by_path.get(kept) or by_path.get(below)


@dataclass(frozen=True)
class Utilization:
    """FLOPs of each of some steps, and the share of what their GPUs could do; None if unknown, or if steps differ."""

    flops: int | None = None
    share: float | None = None


class StepFlops:
    """Knows how many FLOPs the model of a trace asks for in a step (MFU), and how many the hardware did (HFU)."""

    def __init__(self, account: TimeAccount, nodes: RangeNodes, works: RangeWorks, facts: RunFacts) -> None:
        self._account = account
        self._attribution = account.attribution
        self._nodes = nodes
        self._names = nodes.names_above()
        self._works = works
        self._facts = facts
        self._gpu_counts = _count_gpus(account.attribution, account.steps)

    def model(self, members: Ints | None = None) -> Utilization:
        """Return what these steps ask for, forward and backward, whatever is computed again; by default all steps."""
        return self._utilization(members, self._asked_of)

    def hardware(self, members: Ints | None = None) -> Utilization:
        """Return what was computed in these steps, optimizer included; by default in all of them."""
        return self._utilization(members, lambda step: self._works.total(np.array([step], dtype=np.int64)).flops)

    def _utilization(self, members: Ints | None, flops_of: Callable[[int], int | None]) -> Utilization:
        steps = self._account.steps if members is None else members
        contexts = {self._context(step) for step in steps.tolist()}
        amounts = {flops_of(step) for step in steps.tolist()}
        flops = amounts.pop() if len(amounts) == 1 else None
        return Utilization(flops, self._share(flops, contexts.pop(), steps) if len(contexts) == 1 else None)

    def _asked_of(self, step: int) -> int | None:
        """Return a step's FLOPs: the run's figure, else the sum of its forward and backward ranges without what is
        computed again.

        A step that only runs forward has no backward range; then forward alone is the sum.
        """
        if self._facts.work is not None and self._context(step) is None:
            return self._facts.work.model_flops
        below = self._children(step)
        below += [inner for child in below if is_step(self._name(child)) for inner in self._children(child)]
        passes = [child for child in below if self._name(child) in (FORWARD, BACKWARD)]
        work = self._works.total(np.array(passes, dtype=np.int64))
        return None if work.flops is None else work.flops - (work.recomputed_flops or 0)

    def _share(self, flops: int | None, context: int | None, steps: Ints) -> float | None:
        processes = distinct_values(self._attribution.trace.ranges.process[steps]).tolist()
        gpu_counts = {self._gpu_counts.get(process, 1) for process in processes}
        step_ns, sheet = self._account.step_ns(context), self._facts.datasheet
        peak = sheet.flops_per_s.get(self._facts.dtype or "") if sheet is not None else None
        if flops is None or not step_ns or peak is None or len(gpu_counts) != 1:
            return None
        return flops / (step_ns / 1e9 * peak * gpu_counts.pop())

    def _children(self, index: int) -> list[int]:
        order, parent = self._by_parent
        low, high = np.searchsorted(parent, [index, index + 1]).tolist()
        children: list[int] = order[low:high].tolist()
        return children

    @cached_property
    def _by_parent(self) -> tuple[Ints, Ints]:
        order = np.argsort(self._attribution.parent, kind="stable")
        return order, self._attribution.parent[order]

    def _name(self, index: int) -> str:
        trace = self._attribution.trace
        return trace.names[int(trace.ranges.name[index])]

    def _context(self, step: int) -> int | None:
        return context_of(self._names[self._nodes.of_range[step]])


def _count_gpus(attribution: Attribution, steps: Ints) -> dict[int, int]:
    work = attribution.trace.work
    rows = attribution.work.under(steps).rows
    return {
        process: len(distinct_values(work.device[rows[mine]]))
        for process, mine in rows_by_value(work.process[rows]).items()
    }
