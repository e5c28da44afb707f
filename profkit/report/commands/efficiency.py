"""The documents of ``profkit ranges`` and ``efficiency``: the tree of ranges, and what limits each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.analysis.step_replay.limits import StepLimits
from profkit.analysis.time_account.account import recorded_idle
from profkit.analysis.time_account.gpu_time import DataWait, GpuParts
from profkit.analysis.tree import join_path, split_path
from profkit.analysis.tree.range_tree import RangesResult
from profkit.errors import Finding
from profkit.names import STEP
from profkit.report import name_within, shortest_end
from profkit.report.commands.steps import DATA, LIMITS, limit_parts, name_limits
from profkit.report.document import UNKNOWN, Column, Document, Lines, Row, Table
from profkit.report.units import (
    NS,
    NUMBER,
    SHARE,
    TEXT,
    Unit,
    count_over,
    format_change,
    format_count,
    format_flops,
    format_ns,
    format_share,
    four_digits,
    ns_over,
)

if TYPE_CHECKING:
    from profkit.analysis.ranks.comparison import RanksResult
    from profkit.analysis.time_account.step_times import PhaseTimes

TERA = Unit(lambda value: four_digits(value / 1e12) if value else "0")
_GIGA = Unit(lambda value: four_digits(value / 1e9) if value else "0")

_PARTS = tuple(field.name for field in fields(GpuParts))
_EXACT = (
    *(field.name for field in fields(EfficiencyRow) if field.name not in ("gpu", "idle")),
    *_PARTS,
    "limited_by",
)

_SOURCES = {
    "formula": "computed from the model's sizes",
    "counted": "counted in one step",
    "payload": "stored in the ranges by their program",
}

_UNEVEN = 1.5
"""Waits for data of which the longest is this many times their mean come in bursts,"""
_WORTH = 0.1
"""which is worth a word where it is this share of a step."""
_MUCH = 0.2
"""The share of a range's time on the GPU from which a wait for the host is worth naming."""
_WAITS_NAMED = 3


def build_efficiency_document(
    result: EfficiencyResult,
    self_check: Sequence[Finding],
    *,
    totals: bool = False,
    compared: RanksResult | None = None,
    limits: StepLimits | None = None,
    answer: str = "",
) -> Document:
    """Return the tree of ranges; people read averages per step if its steps are known, unless they want ``totals``.

    ``compared`` are the ranks side by side, for which of them is late; ``answer`` is what the summary says of the run.
    """
    steps = None if totals else result.step_count
    words = name_limits(result.ranges, limits, None if compared is None else compared.late_rank)
    rows = [_row(row, words[row.path]) for row in result.ranges]
    ranges = Table(_columns(result, steps), rows, exact=_EXACT)
    parts: list[Table | Lines] = [Lines([*([answer] if answer else []), *_head(result)], "head"), ranges]
    if any(step.communication_ns for step in result.steps):
        parts.append(_step_table(result))
    if compared is not None:
        from profkit.report.commands.ranks import verdict_beside  # few captures are of several ranks

        verdict = verdict_beside(answer, compared)
        parts += [Lines(verdict)] if verdict else []
    data = result.to_dict()
    for row in data["ranges"]:
        row["limited_by"] = words[row["path"]]
    if answer:
        data = {"answer": answer, **data}
    if limits is not None:
        parts += limit_parts(limits)
        data["step_limits"] = limits.to_dict()
    parts.append(Lines(_notes(result, steps, words, replayed=limits is not None)))
    return Document("efficiency", data, parts, ranges, result.warnings, self_check)


def _columns(result: EfficiencyResult, steps: int | None) -> tuple[Column, ...]:
    known = result.work_source is not None
    depth = min((len(split_path(row.path)) - 1 for row in result.ranges), default=0)
    return (
        Column(
            "path",
            "range",
            TEXT,
            flexible=True,
            on_screen=lambda row: _tree_name(row)[depth:],
            brief=lambda row: _brief_name(row)[depth:],
        ),
        *([Column("domain", "domain", TEXT, wide=True)] if any(row.domain for row in result.ranges) else []),
        Column("instances", "times", count_over(steps)),
        Column("wall_ns", "Python time", ns_over(steps), wide=True),
        Column("kernel_time_ns", "kernel time", ns_over(steps), wide=True),
        Column("busy_ns", "GPU busy", ns_over(steps)),
        Column("best_idle_share", "idle", SHARE),
        Column("launch_count", "launches", count_over(steps), wide=known),
        Column("flops", "FLOPs", count_over(steps), wide=True),
        Column("flops_per_s", "TFLOP/s", TERA, wide=not known),
        Column("roof_share", "% of peak", SHARE, wide=not known),
        Column("least_bytes", "least bytes", count_over(steps), wide=True),
        Column("bytes_per_s", "GB/s", _GIGA, wide=True),
        Column("intensity", "FLOP/B", NUMBER, wide=True),
        Column("mfu", "MFU", SHARE, wide=True),
        Column("hfu", "HFU", SHARE, wide=True),
        Column("limited_by", "limited by", TEXT),
    )


def _row(row: EfficiencyRow, words: str | None) -> dict[str, Any]:
    parts = dict.fromkeys(_PARTS) if row.gpu is None else vars(row.gpu)
    return {**vars(row), **parts, "best_idle_share": row.best_idle_share, "limited_by": words}


def _step_table(result: EfficiencyResult) -> Table:
    columns = (
        Column("name", "step", TEXT, flexible=True),
        *([Column("rank", "rank")] if any(step.rank is not None for step in result.steps) else []),
        Column("device", "GPU"),
        Column("wall_ns", "Python time", NS),
        Column("idle_share", "idle", SHARE),
        Column("communication_ns", "comm.", NS),
        Column("exposed_communication_ns", "not hidden", NS),
        Column("overlapped_communication_ns", "hidden", NS),
        Column("waiting_ns", "waiting", NS),
    )
    rows = [{**vars(step), **vars(step.gpu), "idle_share": step.gpu.idle_share} for step in result.steps]
    return Table(columns, rows)


def _head(result: EfficiencyResult) -> Iterator[str]:
    parts, whole, data = result.capture, "the whole capture", DataWait()
    if result.steps:
        whole = _count_steps(result)
        parts = GpuParts(*(sum(getattr(step.gpu, part.name) for step in result.steps) for part in fields(GpuParts)))
        data = DataWait(*(sum(getattr(step.data, part.name) for step in result.steps) for part in fields(DataWait)))
    gpu = ", ".join(part for part in (result.gpu or "unknown GPU", result.dtype) if part)
    yield f"{gpu}: {whole}, {format_ns(parts.span_ns)} of GPU time" + (
        "" if result.clean_idle_share is None else " as recorded"
    )
    shown = {
        "computing": parts.computing_ns,
        "communicating": parts.exposed_communication_ns,
        "copying": parts.exposed_copy_ns,
        "idle": parts.idle_ns,
    }
    yield ", ".join(f"{name} {format_share(ns / parts.span_ns)}" for name, ns in shown.items() if ns)
    idle = recorded_idle(parts, data).causes
    outside = "Python" if any(step.data_wait_ns for step in result.steps) else "Python or data loading"
    causes = {
        "waited for data": idle.data_ns,
        "prepared kernels": idle.launching_ns,
        "waited for the GPU": idle.synchronising_ns,
        f"ran without calling CUDA ({outside})": idle.outside_cuda_ns,
    }
    if parts.idle_ns:
        why = ", ".join(f"{name} {format_share(ns / parts.span_ns)}" for name, ns in causes.items() if ns)
        yield f"idle while Python {why}"
    yield from _data_line(result, data)
    if result.clean_idle_share is not None:
        yield f"idle without a profiler (estimate): {format_share(result.clean_idle_share)}"
    if result.model_flops is not None:
        line = f"{format_flops(result.model_flops)} per step, MFU {_share_or_unknown(result.mfu)}"
        if result.hardware_flops not in (None, result.model_flops):
            done = format_flops(result.hardware_flops)
            line += f"; {done} executed, HFU {_share_or_unknown(result.hfu)}"
        yield line


def _share_or_unknown(share: float | None) -> str:
    return "unknown" if share is None else format_share(share)


def _data_line(result: EfficiencyResult, data: DataWait) -> Iterator[str]:
    waits = {(step.process, step.start_ns): step.data_wait_ns for step in result.steps}
    if not any(waits.values()):
        return
    shortest, longest, mean = min(waits.values()), max(waits.values()), sum(waits.values()) / len(waits)
    line = f"waiting for data: {format_ns(mean)} per step"
    step_ns = sum(step.wall_ns for step in result.steps) / len(result.steps)
    if longest > max(_UNEVEN * mean, _WORTH * step_ns):
        line += f" ({format_ns(shortest)} to {format_ns(longest)})"
    if data.input_copy_ns:
        line += f", then {format_ns(data.input_copy_ns // len(waits))} to copy it to the GPU"
    yield line


def _count_steps(result: EfficiencyResult) -> str:
    gpus = len({step.device for step in result.steps})
    # The n-th steps of all processes are one.
    starts = {(step.process, step.start_ns) for step in result.steps}
    steps = max(Counter(process for process, _ in starts).values(), default=0)
    return format_count(steps, "step") + (f" on {format_count(gpus, 'GPU')}" if gpus > 1 else "")


def _notes(
    result: EfficiencyResult, steps: int | None, limited_by: Mapping[str, str | None], *, replayed: bool
) -> Iterator[str]:
    average = "sums over the recording" if steps is None else f"averages over {format_count(steps, 'step')}"
    yield f"Times and counts are {average}. Idle: share of the range's time on the GPU."
    if any(row.clean_idle_share is not None for row in result.ranges):
        scaled = "Idle of ranges, and what limits the step, are" if replayed else "Idle of ranges is"
        yield f"{scaled} scaled to the unprofiled step (estimate); other times are as recorded."
    if result.work_source is None:
        yield f"FLOPs and % of peak are unknown: {result.uncounted}."
    else:
        yield f"TFLOP/s: per second of GPU busy; FLOPs are {_SOURCES[result.work_source]}."
        yield _peak_words(result)
    yield from _host_wait_line(result, limited_by)
    yield from (_cost_words(times) for times in result.inflation if times.phase == STEP)
    if any(step.communication_ns for step in result.steps):
        yield "comm.: communication = not hidden + hidden behind computing. waiting: until the last rank arrived."
        if any(step.communication_ns and step.waiting_ns is None for step in result.steps):
            yield f"{UNKNOWN} in waiting: unknown, because the trace does not hold every rank's communication."


def _peak_words(result: EfficiencyResult) -> str:
    if result.dtype is None:
        return "% of peak is unknown: pass --dtype."
    if result.peaks is None:
        return "% of peak is unknown: no measured ceilings and no datasheet of this GPU; run `profkit ceilings`."
    if result.dtype not in result.peaks.flops_per_s:
        return f"% of peak is unknown: no {result.dtype} peak is known for this GPU."
    peaks = result.peaks
    arithmetic = ", ".join(
        f"{four_digits(peaks.flops_per_s[dtype] / 1e12)} TFLOP/s {dtype}" for dtype in result.dtypes or (result.dtype,)
    )
    memory = four_digits(peaks.bytes_per_s / 1e9)
    gpu = peaks.gpu.removeprefix("NVIDIA ")
    source = f"measured on {gpu}" if peaks.source == "measured" else f"{gpu} datasheet"
    return f"% of peak: of {arithmetic} or {memory} GB/s ({source})."


def _host_wait_line(result: EfficiencyResult, limited_by: Mapping[str, str | None]) -> Iterator[str]:
    """A range within one that is named for the same cause is not named again."""
    waits: list[tuple[float, str, str, str]] = []
    for row in result.ranges:
        for cause, share in (("launch-bound", row.launching_share), ("host-bound", row.host_share)):
            words = DATA if cause == "host-bound" and row.loads_data else LIMITS[cause]
            if row.verdict in ("launch-bound", "host-bound") or words == limited_by[row.path]:
                continue
            if share >= _MUCH and not any(cause == of and row.path.startswith(f"{path}/") for _, of, path, _ in waits):
                span_ns = 0 if row.idle is None else row.idle.span_ns
                waits.append((share * span_ns, cause, row.path, f"{format_share(share)} ({words})"))
    if waits:
        waits.sort(key=lambda wait: -wait[0])
        paths = [split_path(row.path) for row in result.ranges]
        named = [
            f"{join_path(shortest_end(split_path(path), paths))} {words}" for _, _, path, words in waits[:_WAITS_NAMED]
        ]
        more = f", {len(waits) - _WAITS_NAMED} more" if len(waits) > _WAITS_NAMED else ""
        yield f"Also idle for more than {_MUCH * 100:.0f} % for one reason: {', '.join(named)}{more}"


def _cost_words(step: PhaseTimes) -> str:
    where = "" if step.context is None else f" at context {step.context}"
    unprofiled, profiled = (format_ns(time_ns or 0) for time_ns in (step.clean_ns, step.profiled_ns))
    cost = "" if step.cost is None else f" ({format_change(step.cost)})"
    return f"step time{where}: {unprofiled} unprofiled, {profiled} with the profiler{cost}"


def build_ranges_document(
    result: RangesResult, self_check: Sequence[Finding], *, numbered: bool, totals: bool
) -> Document:
    """Return the tree.

    If it is not ``numbered``, names that differ only in a number share a line, and people read averages per step where
    the steps are known (`RangesResult.steps`), unless they want ``totals``.
    """
    steps = None if numbered or totals else result.steps
    rows: list[dict[str, Any]] = [
        {**asdict(row), "share_of_capture": row.kernel_time_ns / result.total_ns if result.total_ns else None}
        for row in result.ranges
    ]
    each = ns_over(steps)
    of_operators = result.measure == "cpu-operator"
    # Ranges that stand for operator links were never open.
    python_time = Unit(lambda value: each.show(value) if value else UNKNOWN)
    columns = (
        Column("path", "range", TEXT, flexible=True, on_screen=_tree_name, brief=_brief_name),
        *([Column("domain", "domain", TEXT, wide=True)] if any(row["domain"] for row in rows) else []),
        Column("instances", "times", count_over(steps)),
        Column("wall_ns", "Python time", python_time),
        Column("kernel_time_ns", "self time" if of_operators else "kernel time", each),
        Column("busy_ns", "busy" if of_operators else "GPU busy", each),
        Column("share_of_capture", "share", SHARE),
        Column("kernel_count", "operators" if of_operators else "kernels", count_over(steps)),
    )
    exact = ("path", "domain", "instances", "wall_ns", "kernel_time_ns", "busy_ns", "share_of_capture", "kernel_count")
    table = Table(columns, rows, exact=exact)
    parts = (table, Lines(_ranges_notes(result, numbered, steps)))
    return Document("ranges", result.to_dict(), parts, table, result.warnings, self_check)


def _tree_name(row: Row) -> str:
    return _moved_in(row, row["name"])


def _brief_name(row: Row) -> str:
    """Return the rest of a module's name behind its parent's, which stands above it: ``….mlp``."""
    above = split_path(row["path"])[:-1]
    rest = name_within(row["name"], above[-1] if above else None)
    return _moved_in(row, rest if rest == row["name"] else f"….{rest}")


def _moved_in(row: Row, name: str) -> str:
    depth = str(row["path"]).replace("\\/", "").count("/")
    return f"{' ' * depth}{name}" + (f" [{row['domain']}]" if row["domain"] else "")


def _ranges_notes(result: RangesResult, numbered: bool, steps: int | None) -> list[str]:
    lines = ["no GPU work was recorded: only Python times are shown"]
    if result.total_ns:
        kind = "operator self time" if result.measure == "cpu-operator" else "kernels"
        whole = "in this capture" if result.rank is None else f"of rank {result.rank}"
        whole += f" in {format_count(steps, 'step')}" if steps is not None else ""
        lines = [f"100 % = {NS.show(result.total_ns)} of {kind} {whole}; a range includes the ranges inside it"]
    if steps is not None:
        lines.append(f"all other figures are averages per step ({format_count(steps, 'step')}); --totals shows sums")
    else:
        lines.append("all other figures are sums over the recording")
    if not numbered and any("*" in row.name for row in result.ranges):
        lines.append("* stands for a number: one line for all such ranges; --numbered shows each of them")
    return lines
