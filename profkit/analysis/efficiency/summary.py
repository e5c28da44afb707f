"""How well the GPUs' time was used, range by range and step by step: idle and why, FLOPs and bytes, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from profkit.analysis import NotebookResult
from profkit.analysis.efficiency import Amount, Peaks, RangeWorks, RunFacts, StepFlops
from profkit.analysis.efficiency.limits import (
    MOVERS,
    Roofline,
    Verdict,
    build_roofline,
    chosen_ranges,
    judge,
    product_ns,
)
from profkit.analysis.intervals import Stretches, unite
from profkit.analysis.kernels.summary import explain_no_work, extent_ns
from profkit.analysis.placing.attribution import Attribution, mark_members, warn_of_placement
from profkit.analysis.ranks.matching import Waiting, find_waiting
from profkit.analysis.time_account import context_of, count_steps, is_step
from profkit.analysis.time_account.account import (
    IdleTime,
    TimeAccount,
    find_too_few_steps,
    recorded_idle,
    scale_ranges,
    unprofiled_idle,
)
from profkit.analysis.time_account.gpu_time import (
    DataWait,
    GpuParts,
    GpuTime,
    Windows,
    category_rows,
    communication_rows,
    find_data_waits,
    find_windows,
    sum_host_waits,
    sum_parts,
)
from profkit.analysis.tree import split_path
from profkit.analysis.tree.range_tree import RangeNodes, RangeRow, build_nodes, build_rows, join_kinds, work_by_node
from profkit.errors import Finding, TraceError
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, rows_by_value

if TYPE_CHECKING:
    import pandas as pd

    from profkit.analysis.time_account.step_times import PhaseTimes


@dataclass(frozen=True)
class GpuStep:
    """One step on one GPU, in nanoseconds.

    ``process`` is the operating system's pid, ``rank`` its rank if the run has ranks; ``start_ns`` and ``wall_ns`` are
    Python time. ``gpu`` is the step's window on the GPU in its parts (`profkit.analysis.time_account.gpu_time`).
    ``communication_ns`` is the union of communication kernels, exposed and overlapped. ``waiting_ns`` is the part
    before the last rank arrived (`profkit.analysis.ranks.matching`); ``untold_ns`` is the part for which this is
    unknown. ``waiting_ns`` is None if it is unknown for the whole, as in a trace of one rank. ``data`` is the part of
    ``gpu`` that is waiting for data; ``data_wait_ns`` is the Python time of these waits, whatever the GPU did.
    """

    name: str
    rank: int | None
    process: int
    device: int
    start_ns: int
    wall_ns: int
    gpu: GpuParts
    communication_ns: int
    waiting_ns: int | None
    untold_ns: int
    data: DataWait
    data_wait_ns: int


@dataclass(frozen=True)
class EfficiencyRow(RangeRow):
    """All ranges of one path together, and how well they used the GPUs; unknown figures are None.

    ``launch_count`` counts the calls that launched kernels and graphs. ``gpu`` is its time on the GPUs in parts,
    ``idle_share`` the idle part; both are None if it launched nothing. ``flops`` are matrix products as executed,
    ``needed_flops`` those without what a causal mask hides, ``recomputed_flops`` those that repeat what the forward
    pass did, ``other_flops`` all other operations; rates are over ``busy_ns``, and so are the shares: ``ceiling_share``
    of the time that ``flops`` would take at their dtypes' peak, ``roof_share`` of that of the peak which the range
    would meet first (of the least bytes if it is memory-bound). Where that is the memory's, a range that holds others
    has none: its least bytes are those of one perfect kernel for all of them, which nobody can write, and no rate of
    its kernels. ``intensity`` is all operations per least byte. ``mfu`` and ``hfu`` exist for steps
    (`efficiency.work`). ``idle_factor`` is the unprofiled over the recorded idle time, if the phase around the range
    was timed without a profiler; ``idle`` and ``clean_idle_share`` follow from it. ``waiting_for`` is the rank for
    which most of the communication in its time was waiting. ``data_loading_ns`` and ``input_copy_ns`` are waits for
    data (`time_account.gpu_time`), ``loads_data`` whether they are most of what a *host-bound* range waits for.
    """

    launch_count: int
    gpu: GpuParts | None
    idle: IdleTime | None
    idle_share: float | None
    clean_idle_share: float | None
    flops: int | None
    other_flops: int | None
    needed_flops: int | None
    least_bytes: int | None
    recomputed_flops: int | None
    flops_per_s: float | None
    ceiling_share: float | None
    roof_share: float | None
    bytes_per_s: float | None
    intensity: float | None
    mfu: float | None
    hfu: float | None
    idle_factor: float | None
    waiting_for: int | None
    data_loading_ns: int | None
    input_copy_ns: int | None
    loads_data: bool
    verdict: str | None

    @property
    def best_idle_share(self) -> float | None:
        """The idle share without a profiler if known, else the recorded one."""
        return None if self.idle is None else self.idle.share

    @property
    def launching_share(self) -> float:
        """The share of its time on the GPU that is idle while the host launches, without a profiler if known."""
        return 0.0 if self.idle is None else self.idle.causes.launching_ns / (self.idle.span_ns or 1)

    @property
    def host_share(self) -> float:
        """The share that is idle for any other reason, without a profiler if known."""
        return 0.0 if self.idle is None else self.idle.share - self.launching_share


@dataclass(frozen=True, repr=False)
class EfficiencyResult(NotebookResult):
    """The rows and everything they rest on: the JSON of ``profkit efficiency --format json``.

    ``capture`` are the parts of the GPUs' time from the first to the last record. ``ranges`` are ordered depth
    first. ``step_count`` is the number of measured steps in which all of their work ran; None if some ran outside,
    or if each row stands for a step of its own (``numbered``). ``twin`` says which steps were timed without a
    profiler: those of an own process (``clean``), or of the same process before its recording began (``attached``).
    ``product_flops`` are those of matrix products in the range that did most. ``model_flops`` are what the model
    asks for in a step, ``hardware_flops`` all that a step does, with what is computed again; ``mfu``, ``hfu`` and
    ``idle_share`` cover all steps, None if unknown. ``clean_idle_share`` is the idle share without a profiler, None
    if unknown. ``uncounted`` says why no FLOPs are known, None if they are.
    """

    trace: str
    gpu: str | None
    dtype: str | None
    work_source: str | None
    peaks: Peaks | None
    capture: GpuParts
    ranges: tuple[EfficiencyRow, ...]
    steps: tuple[GpuStep, ...]
    step_count: int | None
    twin: str | None
    inflation: tuple[PhaseTimes, ...]
    product_flops: dict[str, int]
    model_flops: int | None
    mfu: float | None
    hardware_flops: int | None
    hfu: float | None
    idle_share: float | None
    clean_idle_share: float | None
    uncounted: str | None
    warnings: tuple[Finding, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the types of matrix products whose peaks the shares of peak are of, the run's own first."""
        known = [] if self.peaks is None else [dtype for dtype in self.product_flops if dtype in self.peaks.flops_per_s]
        return tuple(sorted(known, key=lambda dtype: (dtype != self.dtype, dtype)))

    def to_dict(self) -> dict[str, Any]:
        # There may be a hundred thousand rows, which asdict would copy value by value.
        data = asdict(replace(self, ranges=(), steps=(), inflation=()))
        data["ranges"] = [vars(row) | {"gpu": None if row.gpu is None else row.gpu.to_dict()} for row in self.ranges]
        for row in data["ranges"]:
            del row["idle"]
        data["steps"] = [
            vars(step) | {"gpu": step.gpu.to_dict(), "data": asdict(step.data), "idle_share": step.gpu.idle_share}
            for step in self.steps
        ]
        costs = ("phase", "context", "clean_ns", "profiled_ns", "cost")
        data["inflation"] = [{name: getattr(times, name) for name in costs} for times in self.inflation]
        return data | {"capture": self.capture.to_dict()}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per range; the parts of its time on the GPU are columns such as ``gpu_launching_ns``."""
        import pandas as pd

        return pd.json_normalize(self.to_dict()["ranges"], sep="_")


@dataclass(frozen=True, eq=False)
class _Columns:
    """What is summed by node of the tree; ``window_count`` counts a range on two GPUs twice."""

    launch_count: Ints
    own_computing_ns: Ints
    moving_ns: Ints
    parts: dict[int, GpuParts]
    waited_for: dict[int, int]
    data: dict[int, DataWait]
    window_count: Ints


def measure_efficiency(account: TimeAccount, facts: RunFacts, range: str | None, *, numbered: bool) -> EfficiencyResult:
    """Return how well the GPUs' time was used under each range.

    Args:
        range: only these ranges and those within them, as ``--range`` names them.
        numbered: keep ``step 0`` and ``step 1`` apart.
    """
    attribution, timed = account.attribution, account.timed
    trace, times = attribution.trace, account.gpu_times
    if trace.measure != "gpu-kernel":
        raise TraceError(f"{trace.path}: recorded no GPU work, so efficiency is unknown; see `profkit kernels`")
    if not len(trace.work):
        raise TraceError(explain_no_work(trace))
    members = chosen_ranges(attribution, range)
    numbered_nodes = build_nodes(attribution, numbered=True)
    works = RangeWorks(trace, numbered_nodes, facts)
    step_flops = StepFlops(account, numbered_nodes, works, facts)
    nodes = numbered_nodes if numbered else join_kinds(numbered_nodes)[0]
    waiting = find_waiting(trace, account.ranks)
    columns = _sum_columns(attribution, nodes, members, times, waiting)
    ranges_of, factors = rows_by_value(nodes.of_range[members]), scale_ranges(account, nodes, columns.parts)
    rows = []
    product_flops: dict[str, int] = {}
    summed_of = build_rows(attribution, nodes, members)
    holders = {nodes.parent[node] for node, summed in summed_of.items() if summed.busy_ns}
    for node, summed in summed_of.items():
        mine, change_ns, part = members[ranges_of[node]], None, 1.0
        if is_step(summed.name):
            context = context_of(split_path(summed.path))
            change_ns, part = account.data_change_ns(context), account.unprofiled_part(context)
        amount = works.total(mine)
        if (amount.flops or 0) > sum(product_flops.values()):
            product_flops = amount.flops_by_dtype
        row = _build_row(
            node,
            summed,
            columns,
            amount,
            facts.peaks,
            idle_factor=factors[node],
            data_change_ns=change_ns,
            unprofiled_part=part,
            holds_others=node in holders,
        )
        if is_step(row.name):
            row = replace(row, mfu=step_flops.model(mine).share, hfu=step_flops.hardware(mine).share)
        rows.append(row)
    steps, idle = describe_steps(account, waiting), account.idle_time()
    model, hardware = step_flops.model(), step_flops.hardware()
    under = attribution.work.under(members).rows
    return EfficiencyResult(
        trace=trace.path,
        gpu=facts.gpu,
        dtype=facts.dtype,
        work_source=works.source(members),
        peaks=facts.peaks,
        capture=_whole_capture(trace, times),
        ranges=tuple(rows),
        steps=steps,
        step_count=None if numbered else count_steps(attribution, mark_members(len(trace.work), under)),
        twin=None if timed is None else timed.twin,
        inflation=() if timed is None else tuple(times for times in timed.phases if times.cost is not None),
        product_flops=product_flops,
        model_flops=model.flops,
        mfu=model.share,
        hardware_flops=hardware.flops,
        hfu=hardware.share,
        idle_share=account.sum_parts()[0].idle_share if len(account) else None,
        clean_idle_share=idle.share if idle.is_unprofiled else None,
        uncounted=facts.uncounted,
        warnings=tuple(_find_doubts(account, rows, facts)),
    )


def describe_steps(account: TimeAccount, waiting: Waiting) -> tuple[GpuStep, ...]:
    """Return the rows of the account with what ran on their GPUs: communication, and waiting for other ranks."""
    ranges, trace = account.attribution.trace.ranges, account.attribution.trace
    talks = communication_rows(trace)
    communication, unknown = (
        account.measure(_unite_kernels(trace, rows)).tolist() for rows in (talks, talks & ~waiting.is_known)
    )
    waits = account.measure({device: waiting.waits_of(device) for device in account.gpu_times}).tolist()
    waited_ns = sum_host_waits(account.attribution, account.steps)[account.step].tolist()
    return tuple(
        GpuStep(
            name=trace.names[int(ranges.name[index])],
            rank=None if account.rank[row] < 0 else int(account.rank[row]),
            process=trace.process_ids.get(int(ranges.process[index]), int(ranges.process[index])),
            device=int(account.windows.device[row]),
            start_ns=int(ranges.start_ns[index]),
            wall_ns=int(ranges.end_ns[index] - ranges.start_ns[index]),
            gpu=GpuParts(*account.parts[row].tolist()),
            communication_ns=communication[row],
            waiting_ns=waits[row] if communication[row] > unknown[row] or not communication[row] else None,
            untold_ns=unknown[row],
            data=DataWait(*account.data[row].tolist()),
            data_wait_ns=waited_ns[row],
        )
        for row, index in enumerate(account.steps[account.step].tolist())
    )


def _unite_kernels(trace: Trace, rows: Bools) -> dict[int, Stretches]:
    work = trace.work
    here = {device: rows & (work.device == device) for device in distinct_values(work.device).tolist()}
    return {device: unite(work.start_ns[mine], work.end_ns[mine]) for device, mine in here.items()}


def _find_doubts(account: TimeAccount, rows: Sequence[EfficiencyRow], facts: RunFacts) -> Iterator[Finding]:
    slowed = [row for row in rows if row.verdict == "launch-bound"]
    if slowed and all(row.idle_factor is None for row in slowed):
        yield Finding(
            "no-clean-twin",
            "the profiler slows each kernel launch, and the unprofiled step time is unknown: without it,"
            " fewer ranges may be limited by kernel launches; `profkit run` also times unprofiled steps",
        )
    if account.timed is not None:
        from profkit.analysis.time_account.step_times import find_timing_doubts  # a run alone has such times

        yield from find_timing_doubts(account.timed)
    yield from facts.find_doubts()
    yield from warn_of_placement(account.attribution)
    yield from find_too_few_steps(account, facts.loading)


def _sum_columns(
    attribution: Attribution, nodes: RangeNodes, members: Ints, times: dict[int, GpuTime], waiting: Waiting
) -> _Columns:
    windows = find_windows(attribution, members, times)
    node = nodes.of_range[members]
    parts = sum_parts(times, node[windows.member], windows.device, windows.start_ns, windows.end_ns)
    launches, own_computing, moving = count_launches(attribution, nodes, members)
    return _Columns(
        launch_count=launches,
        own_computing_ns=own_computing,
        moving_ns=moving,
        parts=parts,
        waited_for=_find_waited_for(parts, node[windows.member], windows, waiting),
        data=find_data_waits(attribution.trace, times).sum_by_group(node[windows.member], windows),
        window_count=np.bincount(node[windows.member], minlength=len(nodes)),
    )


def _find_waited_for(parts: dict[int, GpuParts], node: Ints, windows: Windows, waiting: Waiting) -> dict[int, int]:
    waited_for = {}
    for number, part in parts.items() if len(waiting.device) else ():
        communication_ns = part.exposed_communication_ns + part.overlapped_communication_ns
        mine = node == number
        sums = waiting.sum_by_rank(windows.device[mine], windows.start_ns[mine], windows.end_ns[mine])
        rank = max(sums, key=lambda number_: sums[number_], default=None)
        if rank is not None and sums[rank] > communication_ns / 2:
            waited_for[number] = rank
    return waited_for


def count_launches(attribution: Attribution, nodes: RangeNodes, members: Ints) -> tuple[Ints, Ints, Ints]:
    """Return for each node its launching calls, its kernel time without communication, and that of `MOVERS`."""
    work = attribution.trace.work
    order = np.lexsort((work.launch_ns, work.launch_thread))
    same = (np.diff(work.launch_ns[order]) == 0) & (np.diff(work.launch_thread[order]) == 0)
    is_first = np.ones(len(work), dtype=np.int64)
    is_first[order[1:][same]] = 0
    computing_ns = np.where(communication_rows(attribution.trace), 0, work.duration_ns)
    moving_ns = np.where(category_rows(attribution.trace, MOVERS), work.duration_ns, 0)
    launches, own_computing, moving = (np.zeros(len(nodes), dtype=np.int64) for _ in range(3))
    for rows, node in work_by_node(attribution, nodes, members):
        np.add.at(launches, node, is_first[rows])
        np.add.at(own_computing, node, computing_ns[rows])
        np.add.at(moving, node, moving_ns[rows])
    return launches, own_computing, moving


def _build_row(
    node: int,
    summed: RangeRow,
    columns: _Columns,
    amount: Amount,
    peaks: Peaks | None,
    *,
    idle_factor: float | None,
    data_change_ns: float | None,
    unprofiled_part: float,
    holds_others: bool,
) -> EfficiencyRow:
    busy_ns = summed.busy_ns
    parts = columns.parts.get(node)
    roofline = build_roofline(amount, peaks)
    own_ns = int(columns.own_computing_ns[node])
    data = columns.data.get(node, DataWait())
    change_ns = None if data_change_ns is None else round(data_change_ns * int(columns.window_count[node]))
    idle = None if parts is None else recorded_idle(parts, data)
    if parts is not None and idle_factor is not None:
        idle = unprofiled_idle(parts, data, round(parts.idle_ns * idle_factor), change_ns, part=unprofiled_part)
    verdict = judge(
        parts,
        idle,
        busy_ns,
        roofline,
        only_communicates=busy_ns > 0 and not own_ns,
        mover_share=int(columns.moving_ns[node]) / own_ns if own_ns else 0.0,
        input_copy_ns=data.input_copy_ns,
    )
    at_peak = product_ns(amount, peaks)
    operations = None if amount.flops is None or amount.other_flops is None else amount.flops + amount.other_flops
    return EfficiencyRow(
        **vars(summed),
        launch_count=int(columns.launch_count[node]),
        gpu=parts,
        idle=idle,
        idle_share=None if parts is None else parts.idle_share,
        clean_idle_share=None if idle is None or not idle.is_unprofiled else idle.share,
        **{name: value for name, value in vars(amount).items() if name != "flops_by_dtype"},
        flops_per_s=_ratio(amount.flops, busy_ns / 1e9),
        ceiling_share=_ratio(at_peak, busy_ns),
        roof_share=_ratio(_nearest_roof_ns(roofline, verdict, holds_others=holds_others), busy_ns),
        bytes_per_s=_ratio(amount.least_bytes, busy_ns / 1e9),
        intensity=_ratio(operations, amount.least_bytes),
        mfu=None,
        hfu=None,
        idle_factor=idle_factor,
        waiting_for=columns.waited_for.get(node),
        data_loading_ns=None if parts is None else data.idle_ns,
        input_copy_ns=None if parts is None else data.input_copy_ns,
        loads_data=verdict.loads_data,
        verdict=verdict.word,
    )


def _nearest_roof_ns(roofline: Roofline, verdict: Verdict, *, holds_others: bool) -> float | None:
    # A range that moves data by its kernels' names may still have products that take longer at their peak.
    bound_ns = roofline.memory_ns if verdict.word == "memory-bound" else roofline.bound_ns
    return None if holds_others and bound_ns == roofline.memory_ns else bound_ns


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _whole_capture(trace: Trace, times: dict[int, GpuTime]) -> GpuParts:
    device = np.array(list(times), dtype=np.int64)
    first, last = (np.full(len(device), edge) for edge in extent_ns(trace))
    return sum_parts(times, np.zeros(len(device), dtype=np.int64), device, first, last)[0]
