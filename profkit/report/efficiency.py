"""Print the table of ``profkit efficiency``: the tree of ranges, what bounds each, and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence

from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.efficiency.gpu_time import GpuParts
from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.analysis.efficiency.unprofiled import ProfilingCost
from profkit.names import STEP
from profkit.report.formats import Column, Format, Table, render_csv, render_json
from profkit.report.host_waits import host_wait_lines
from profkit.report.old_document import Document, render_document
from profkit.report.ranges import tree_name
from profkit.report.self_check import check_to_dict, check_warnings, failure_lines
from profkit.report.units import format_count, format_ns, format_share, four_digits

_RANGE = Column("range", "path", right=False, flexible=True)
_DOMAIN = Column("domain", "domain", right=False)
_BOUND = Column("bound by", "verdict", right=False)
_TIMES = (
    Column("count", "instances"),
    Column("wall", "wall_ns"),
    Column("busy", "busy_ns"),
    Column("idle", "best_idle_share"),
)
_WORK = (Column("TFLOP/s", "flops_per_s"), Column("peak", "roof_share"))
_LAUNCHES = Column("launches", "launch_count")
_ALL = (
    *_TIMES[:2],
    Column("kernel time", "kernel_time_ns"),
    *_TIMES[2:],
    _LAUNCHES,
    Column("FLOPs", "flops"),
    *_WORK,
    Column("least bytes", "least_bytes"),
    Column("GB/s", "bytes_per_s"),
    Column("FLOP/B", "intensity"),
    Column("MFU", "mfu"),
    _BOUND,
)
_EXACT = tuple(Column(field, field) for field in EfficiencyRow.__dataclass_fields__ if field != "gpu")
_PARTS = tuple(field for field in GpuParts.__dataclass_fields__)

_STEP_COLUMNS = (
    Column("step", "name", right=False, flexible=True),
    Column("GPU", "device"),
    Column("wall", "wall_ns"),
    Column("idle", "idle_share"),
    Column("comm.", "communication_ns"),
    Column("exposed", "exposed_ns"),
    Column("overlapped", "overlapped_ns"),
    Column("waiting", "waiting_ns"),
)

_PID, _RANK = Column("pid", "process"), Column("rank", "rank")

_UNITS = {"flops_per_s": 1e12, "bytes_per_s": 1e9}
_SHARES = ("idle_share", "best_idle_share", "roof_share", "mfu")


def render_efficiency(
    result: EfficiencyResult, check: SelfCheck, style: Format = "table", *, full_names: bool = False
) -> str:
    """Return the result as text; a figure that is not known is a dash, in CSV an empty cell, in JSON null.

    The table for a screen has the columns that fit 80 characters, those for documents have all.
    """
    if style == "json":
        data = result.to_dict()
        data["warnings"] = [*data["warnings"], *check_warnings(check)]
        return render_json({**data, "self_check": check_to_dict(check)})
    if style == "csv":
        return render_csv(_exact_table(result))
    on_screen = (*_TIMES, *(_WORK if result.work_source is not None else (_LAUNCHES,)), _BOUND)
    is_screen = style == "table"
    tables = [_build_table(result, on_screen if is_screen else _ALL, indented=is_screen)]
    if any(step.communication_ns for step in result.steps):
        tables.append(_step_table(result))
    document = Document(tables, failure_lines(check), head_lines(result), books(result))
    return render_document(document, style, full_names=full_names)


def head_lines(result: EfficiencyResult) -> list[str]:
    """Return whose time it is, how much of it was idle and why, and how well the steps used the GPU."""
    what = ", ".join(part for part in (result.gpu or "unknown GPU", result.dtype) if part)
    parts, named = result.capture, "the whole capture"
    if result.steps:
        parts, named = _add([step.gpu for step in result.steps]), _count_steps(result)
    recorded = "" if result.clean_idle_share is None else " as recorded"
    lines = [f"{what}: {named}, {format_ns(parts.span_ns)} of GPU time{recorded}", *_parts_lines(parts)]
    if result.clean_idle_share is not None:
        lines.append(f"without a profiler idle {format_share(result.clean_idle_share)}")
    if result.model_flops is not None:
        mfu = "not known" if result.mfu is None else format_share(result.mfu)
        lines.append(f"model FLOPs a step {result.model_flops:,}   MFU {mfu}")
    return lines


def books(result: EfficiencyResult) -> list[str]:
    """Return the lines that say what the columns are of, and what they rest on."""
    lines = ["wall is the host's; busy, the union of the range's kernels; idle, of its time on the GPU"]
    if any(row.clean_idle_share is not None for row in result.ranges):
        lines.append(
            "wall and busy are as recorded; idle is estimated as without the profiler: each phase's shrunk alike"
        )
    if result.work_source is not None:
        lines.append(f"TFLOP/s are over busy time; FLOPs are {_SOURCES[result.work_source]}")
        lines.append(f"peak: how near to {_peak_words(result)}")
        if any(row.verdict == "memory-bound" for row in result.ranges):
            lines.append("bound by memory: most kernel time moves data, or even a perfect kernel would wait for it")
    else:
        lines.append("FLOPs are not known: give a run directory of `profkit run --flops`, or of a built-in model")
    lines += [*host_wait_lines(result), *(_inflation_words(one) for one in result.inflation if one.phase == STEP)]
    if any(step.communication_ns for step in result.steps):
        lines.append("waiting: before the last rank had come to the collective; – where the trace holds one rank alone")
    return lines


_SOURCES = {
    "formula": "worked out from the model's sizes",
    "counted": "torch's count of one step",
    "payload": "what the ranges carry",
}


def _inflation_words(one: ProfilingCost) -> str:
    where = "" if one.context is None else f" at context {one.context}"
    clean, profiled = (format_ns(round(value)) for value in (one.clean_ns, one.profiled_ns))
    return f"step{where} without a profiler {clean}, with one {profiled} ({one.cost:+.0%})"


def _peak_words(result: EfficiencyResult) -> str:
    if result.dtype is None:
        return "what, is not known: nothing says what dtype the products were done in (--dtype)"
    if result.peaks is None:
        return "what, is not known: no measured ceilings, and no datasheet of this GPU (`profkit ceilings`)"
    if result.dtype not in result.peaks.flops_per_s:
        return f"what, is not known for {result.dtype}"
    peaks = result.peaks
    rates = (
        f"{four_digits(peaks.flops_per_s[result.dtype] / 1e12)} TFLOP/s or {four_digits(peaks.bytes_per_s / 1e9)} GB/s"
    )
    if peaks.source == "measured":
        return f"{rates}, measured on an {peaks.gpu}"
    return f"{rates}, an {peaks.gpu}'s by its datasheet, not measured"


def _parts_lines(parts: GpuParts) -> list[str]:
    """Return what the GPUs did, as shares of the span, and what the host did while they were idle."""
    busy = (
        ("computing", parts.computing_ns),
        ("communicating", parts.exposed_communication_ns),
        ("copying", parts.exposed_copy_ns),
        ("idle", parts.idle_ns),
    )
    idle = (
        ("launching", parts.launching_ns),
        ("synchronising", parts.synchronising_ns),
        ("outside CUDA", parts.outside_cuda_ns),
    )
    said, why = (
        ", ".join(f"{name} {format_share(value / parts.span_ns)}" for name, value in some if value)
        for some in (busy, idle)
    )
    return [said, f"idle while the host was {why}"] if why else [said]


def _count_steps(result: EfficiencyResult) -> str:
    gpus = len({step.device for step in result.steps})
    steps = len({(step.process, step.start_ns) for step in result.steps})
    return format_count(steps, "step") + (f" on {format_count(gpus, 'GPU')}" if gpus > 1 else "")


def _add(parts: Sequence[GpuParts]) -> GpuParts:
    return GpuParts(*(sum(getattr(one, name) for one in parts) for name in _PARTS))


def _build_table(result: EfficiencyResult, columns: Sequence[Column], *, indented: bool = False) -> Table:
    domain = (
        () if indented or not any(row.domain for row in result.ranges) else (Column("domain", "domain", right=False),)
    )
    shown = (_RANGE, *domain, *columns)
    cells = [[_cell(column.key, getattr(row, column.key)) for column in shown] for row in result.ranges]
    if indented:
        names = [tree_name(vars(row)) for row in result.ranges]
        base = min((len(name) - len(name.lstrip(" ")) for name in names), default=0)
        cells = [[name[base:], *line[1:]] for name, line in zip(names, cells, strict=True)]
    return Table(shown, cells, cells)


def _exact_table(result: EfficiencyResult) -> Table:
    parts = tuple(Column(name, name) for name in _PARTS)
    values = [
        [getattr(row, column.key) for column in _EXACT]
        + [None if row.gpu is None else getattr(row.gpu, name) for name in _PARTS]
        for row in result.ranges
    ]
    return Table((*_EXACT, *parts), [], values)


def _step_table(result: EfficiencyResult) -> Table:
    values = [
        {
            "name": step.name,
            "process": str(step.process),
            "rank": step.rank,
            "device": step.device,
            "wall_ns": step.wall_ns,
            "idle_share": step.idle_share,
            "communication_ns": step.communication_ns,
            "exposed_ns": step.gpu.exposed_communication_ns,
            "overlapped_ns": step.gpu.overlapped_communication_ns,
            "waiting_ns": step.waiting_ns,
        }
        for step in result.steps
    ]
    cells = [
        [str(row[c.key]) if c.key == "process" else _cell(c.key, row[c.key]) for c in _STEP_COLUMNS] for row in values
    ]
    return Table(_STEP_COLUMNS, cells, cells)


def _cell(key: str, value: object) -> str:
    if value is None:
        return "–"
    if value == 0 and key in _UNITS:
        return "0"
    if isinstance(value, float):
        return format_share(value) if key in _SHARES else four_digits(value / _UNITS.get(key, 1.0))
    if key.endswith("_ns"):
        return format_ns(int(str(value)))
    return f"{value:,}" if isinstance(value, int) else str(value).removesuffix("-bound")
