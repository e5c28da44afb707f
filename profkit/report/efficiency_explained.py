"""Show what each verdict of ``profkit efficiency`` rests on: the rule, the numbers in it, and raw rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from profkit.analysis.efficiency.evidence import Evidence, IdleGap
from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.report.formats import Format, escape_markdown, make_visible, shorten
from profkit.report.kernel_names import simplify_name
from profkit.report.units import four_digits

_IDLE_WORDS = ("launch-bound", "host-bound")
_NAME_WIDTH = 40


def render_explanation(
    result: EfficiencyResult, evidence: Mapping[str, Evidence], style: Format = "table", *, full_names: bool = False
) -> str:
    """Return the explanation of every range, in the table's order; times are the capture's own nanoseconds.

    Args:
        result: what the table shows.
        evidence: raw rows by the ranges' paths.
        style: ``table`` or ``markdown``.
        full_names: do not shorten kernels' names.
    """
    blocks = []
    for row in result.ranges:
        head = f"{row.path}: {row.verdict or 'no verdict'}"
        lines = [*_numbers(row), *_rows(row, evidence.get(row.path), full_names)]
        if style == "markdown":
            blocks.append("\n".join([f"**{escape_markdown(head)}**", "", *(f"- {escape_markdown(x)}" for x in lines)]))
        else:
            blocks.append("\n".join([make_visible(head), *(f"  {make_visible(line)}" for line in lines)]))
    return "what the verdicts rest on; times in the capture's own nanoseconds\n\n" + "\n\n".join(blocks)


def _numbers(row: EfficiencyRow) -> Iterator[str]:
    yield row.rule
    if row.gpu is not None:
        gpu = row.gpu
        yield (
            f"on the GPU {gpu.span_ns:,} = computing {gpu.computing_ns:,} + communicating"
            f" {gpu.exposed_communication_ns:,} + copying {gpu.exposed_copy_ns:,} + idle {gpu.idle_ns:,}"
        )
        yield (
            f"idle {gpu.idle_ns:,} = launching {gpu.launching_ns:,} + synchronising {gpu.synchronising_ns:,}"
            f" + outside CUDA {gpu.outside_cuda_ns:,}"
        )
    if row.launch_count:
        each = row.busy_ns // row.launch_count
        yield f"{row.launch_count:,} launches, their kernels busy for {row.busy_ns:,}: {each:,} each"
    if row.flops is not None and row.flops_per_s is not None:
        share = row.ceiling_share
        peak = "" if share is None else f"; at the peak they take {round(share * row.busy_ns):,}"
        yield f"{row.flops:,} FLOPs / {row.busy_ns:,} = {four_digits(row.flops_per_s / 1e12)} TFLOP/s{peak}"
    if row.least_bytes is not None and row.bytes_per_s is not None:
        yield f"at least {row.least_bytes:,} B / {row.busy_ns:,} = {four_digits(row.bytes_per_s / 1e9)} GB/s"
    if row.intensity is not None:
        operations = (row.flops or 0) + (row.other_flops or 0)
        yield f"{operations:,} operations / {row.least_bytes:,} B = {four_digits(row.intensity)} FLOP/B"


def _rows(row: EfficiencyRow, evidence: Evidence | None, full_names: bool) -> Iterator[str]:
    if evidence is None:
        return
    if evidence.categories:
        total_ns = sum(time_ns for _, time_ns in evidence.categories)
        parts = " + ".join(f"{name} {time_ns:,}" for name, time_ns in evidence.categories)
        yield f"kernel time {total_ns:,} = {parts}"
    if row.verdict in _IDLE_WORDS:
        yield from (_gap_words(gap, full_names) for gap in evidence.gaps)
        return
    for kernel in evidence.kernels:
        times = f"{kernel.count:,} times, {kernel.total_ns:,} in all, first at {kernel.first_ns:,}"
        yield f"{_name(kernel.name, full_names)}: {times}"


def _gap_words(gap: IdleGap, full_names: bool) -> str:
    parts = (("launching", gap.launching_ns), ("synchronising", gap.synchronising_ns), ("outside", gap.outside_cuda_ns))
    host = " + ".join(f"{name} {value:,}" for name, value in parts if value)
    words = f"GPU {gap.device} idle {gap.end_ns - gap.start_ns:,} from {gap.start_ns:,} to {gap.end_ns:,}: {host}"
    if gap.call is not None:
        words += f"; {gap.call} took {gap.call_ns:,} of it"
    if gap.ended_by is not None:
        launched = "" if gap.launch_ns is None else f", launched at {gap.launch_ns:,}"
        words += f"; then {_name(gap.ended_by, full_names)}{launched}"
    return words


def _name(kernel: str, full: bool) -> str:
    return kernel if full else shorten(simplify_name(kernel), _NAME_WIDTH)
