"""The document of ``profkit kernels``: the phases, the table of kernels, and how its time adds up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from profkit.analysis.kernels import categorize
from profkit.analysis.kernels.summary import KernelRow, KernelsResult
from profkit.analysis.tree import split_path
from profkit.errors import Finding
from profkit.report import simplify_name
from profkit.report.document import UNKNOWN, Column, Document, Lines, Row, Table
from profkit.report.units import NS, PLAIN, SHARE, TEXT, Unit, count_over, format_count, format_ns, ns_over

if TYPE_CHECKING:
    from profkit.analysis.kernels.compiled_code import KernelSource
    from profkit.analysis.ranks.comparison import RanksResult

_SORTS = {"total": "total_ns", "count": "count", "mean": "mean_ns", "min": "min_ns", "max": "max_ns", "name": "name"}
SORTS = tuple(_SORTS)

_EXACT = tuple(key for key in KernelRow.__dataclass_fields__ if key != "per_rank_ns")
_MOST_LINES = 3
"""As many shared lines are named (`profkit ranges` lists all), and lines of the program."""
_MOST_SOURCES = 20
_MOST_RANK_COLUMNS = 4
"""Up to this many ranks get a column each in the table of kernels; of more it shows the least, median and most."""
"""For numbers that count nothing: ranks, devices, process ids."""
_RANKS_BESIDE_CATEGORY = 2
"""With more ranks than these a screen has no room for the category."""


def build_kernels_document(
    result: KernelsResult,
    self_check: Sequence[Finding],
    *,
    sort: str = "total",
    top: int | None = None,
    totals: bool = False,
    full_names: bool = False,
    explain: bool = False,
    phases: Mapping[str, Sequence[KernelsResult]] | None,
    compared: RanksResult | None,
) -> Document:
    """Return the result with its books.

    People read averages per step where the steps are known (`KernelsResult.steps`), unless they want ``totals``. CSV is
    one table: the instances if they were asked for, else the kernels. The lines after the first ``top`` are added up in
    one more. ``explain`` shows the rule that gave each kernel its category. ``phases`` are shown first, by the title of
    their table (`OpenedTrace.phases`); ``compared`` are the ranks side by side, for which of them is late.
    """
    rows = sort_rows(result.kernels, sort)
    shown, others = rows[:top], rows[top:] if top is not None else []
    rest = _sum_rows(result, others) if others else None
    steps = None if totals else result.steps
    late = None if compared is None else compared.late_rank
    table = _kernel_table(result, shown, rest, steps, late, full_names=full_names, explain=explain)
    instances = [_instance_table(result)] if result.per_instance is not None else []
    parts: list[Table | Lines] = [
        _phase_table(title, some, result.ledger.total_ns, totals=totals) for title, some in (phases or {}).items()
    ]
    parts.append(Lines([*_head(result, steps), *_rank_head(result, compared)], "head"))
    parts += [_rank_table(result, steps)] if _are_compared(result) else []
    parts += [table, *instances]
    parts += [_rule_table(result, shown, full_names=full_names)] if explain else []
    parts += _source_lines(result, shown, steps, full_names=full_names) if explain else []
    parts.append(Lines(_books(result, steps)))
    data = result.to_dict() | {"kernels": [_exact_row(result, row, explain) for row in shown]}
    data["slowest_rank"] = late
    data["rest"] = None if rest is None else asdict(rest)
    return Document("kernels", data, parts, instances[0] if instances else table, result.warnings, self_check)


def sort_rows(rows: Sequence[KernelRow], sort: str) -> list[KernelRow]:
    field = _SORTS[sort]
    return sorted(rows, key=lambda row: getattr(row, field), reverse=sort != "name")


def subject(result: KernelsResult) -> str:
    """Return what the table is about: the capture or a range, and the filters that leave a part of it."""
    of_rank = "" if result.filters.rank is None else f" of rank {result.filters.rank}"
    if result.range is not None:
        what = f"range {result.range!r}{of_rank}, open {format_count(result.instances or 0, 'time')}"
    else:
        what = f"part of {_scope(result)}" if _filter_words(result) else f"whole capture{of_rank}"
    return ", ".join([what, *_filter_words(result)])


def count_line(result: KernelsResult, steps: int | None) -> str:
    """Return how many kernels (or operators) and graphs the table counts, per step if ``steps`` is given."""
    if steps is None:
        count = format_count(result.kernel_count, _noun(result))
        return count + (f" and {format_count(result.graph_count, 'CUDA graph')}" if result.graph_count else "")
    each = count_over(steps).show
    graphs = f" and {each(result.graph_count)} CUDA graphs" if result.graph_count else ""
    return f"{each(result.kernel_count)} {_noun(result)}s{graphs} per step ({format_count(steps, 'step')})"


def _noun(result: KernelsResult) -> str:
    return "operator" if result.measure == "cpu-operator" else "kernel"


def _scope(result: KernelsResult) -> str:
    return "the capture" if result.filters.rank is None else f"rank {result.filters.rank}"


def _filter_words(result: KernelsResult) -> list[str]:
    filters = result.filters
    named = (("instance", filters.instance), ("process", filters.process), ("device", filters.device))
    words = [f"{name} {value} only" for name, value in named if value is not None]
    return words + ([f"without {filters.exclude!r}"] if filters.exclude is not None else [])


def _head(result: KernelsResult, steps: int | None) -> list[str]:
    each = ns_over(steps).show
    time_name = "self time" if result.measure == "cpu-operator" else "kernel time"
    # Without a range this is the time from the first to the last thing recorded.
    open_name = "recorded time" if result.range is None else "Python time"
    times = [(time_name, result.total_ns), ("GPU busy", result.busy_ns), (open_name, result.wall_ns)]
    if result.measure == "cpu-operator":
        times[1] = ("busy", result.busy_ns)
    lines = [
        f"{subject(result)}: {count_line(result, steps)}",
        "   ".join(f"{name} {UNKNOWN if value is None else each(value)}" for name, value in times),
    ]
    if result.shared is not None:
        names = [f"{name!r}" for name in result.shared.lines]
        more = f" and {len(names) - _MOST_LINES} more" if len(names) > _MOST_LINES else ""
        lines.append(
            f"and {each(result.shared.total_ns)} in kernels that it shares with other modules, not counted here:"
            f" {', '.join(names[:_MOST_LINES])}{more}"
        )
    return lines


def _books(result: KernelsResult, steps: int | None) -> list[str]:
    evidence, ledger, noun = result.range_evidence, result.ledger, _noun(result)
    lines = [f"100 % = {format_ns(result.total_ns)} of {noun}s {_whole(result)}"]
    lines[0] += f" in {format_count(result.steps, 'step')}" if result.steps is not None else ""
    if evidence is not None:
        parts = [("placed by launching thread", evidence.direct_ns), ("by waiting thread", evidence.inferred_ns)]
        parts += [("by operator links", evidence.sequence_ns)] if evidence.sequence_ns else []
        lines.append(f"Under {result.range!r} {_sum_line(parts, result.total_ns)}")
    parts = [
        ("placed by launching thread", ledger.direct_ns),
        ("by waiting thread (backward)", ledger.inferred_ns),
        ("in no range", ledger.outside_ns),
    ]
    parts += [("two threads may have waited", ledger.ambiguous_ns)] if ledger.ambiguous_ns else []
    parts += [("no launch record", ledger.no_launch_ns)] if ledger.no_launch_ns else []
    of_rank = "" if result.filters.rank is None else f" of rank {result.filters.rank}"
    lines.append(f"All {noun} time{of_rank} {_sum_line(parts, ledger.total_ns)}")
    lines += _sum_ranks(result)
    copies = result.copies
    if copies.memcpy_count or copies.memset_count:
        count, time = count_over(steps).show, ns_over(steps).show
        lines.append(
            f"Also{' per step' if steps is not None else ''}:"
            f" {_plural(count(copies.memcpy_count), 'memory copy', 'memory copies')} {time(copies.memcpy_ns)},"
            f" {_plural(count(copies.memset_count), 'memory fill', 'memory fills')} {time(copies.memset_ns)}"
            " (not counted above)"
        )
    return lines


def _plural(count: str, one: str, more: str) -> str:
    return f"{count} {one if count == '1' else more}"


def _whole(result: KernelsResult) -> str:
    filters = _filter_words(result)
    if result.range is not None:
        of_rank = [] if result.filters.rank is None else [f"{_scope(result)} only"]
        return ", ".join([f"under {result.range!r}", *of_rank, *filters])
    if filters:
        return f"in this part of {_scope(result)} ({', '.join(filters)})"
    return "in this capture" if result.filters.rank is None else f"of {_scope(result)}"


def _sum_line(parts: Sequence[tuple[str, int]], total_ns: int) -> str:
    return f"{total_ns:,} ns = " + " + ".join(f"{name} {value:,}" for name, value in parts)


def _kernel_table(
    result: KernelsResult,
    rows: Sequence[KernelRow],
    rest: KernelRow | None,
    steps: int | None,
    late: int | None,
    *,
    full_names: bool,
    explain: bool,
) -> Table:
    compared, by_name = _are_compared(result), result.by == "kernel"
    is_of_instances = steps is None and result.range is not None
    each = Column("per_instance_ns", "per inst.", NS) if is_of_instances else Column("mean_ns", "mean", NS)
    columns = [
        Column("share", "share", SHARE),
        Column("total_ns", "total" if steps is None else "per step", ns_over(steps)),
        # Next to columns of ranks there is no room for these; JSON and CSV have them.
        *(_rank_columns(result, steps, late) if compared else [Column("count", "times", count_over(steps)), each]),
    ]
    if by_name and len(result.ranks) <= _RANKS_BESIDE_CATEGORY:
        columns.append(Column("category", "category", TEXT))
    columns.append(
        Column("name", _noun(result) if by_name else result.by, _name_unit(result, full_names), flexible=True)
    )
    exact = [*_EXACT, *(f"rank_{rank.rank}_ns" for rank in result.ranks if compared), *(["rule"] if explain else [])]
    shown = [_row(result, row, explain) for row in rows]
    return Table(columns, shown, rest=None if rest is None else _row(result, rest, explain=False), exact=exact)


def _name_unit(result: KernelsResult, full_names: bool) -> Unit:
    simple = result.by == "kernel" and result.measure == "gpu-kernel" and not full_names
    return Unit(simplify_name, right=False) if simple else TEXT


def _row(result: KernelsResult, row: KernelRow, explain: bool) -> Row:
    each = row.per_instance_count
    per_instance_ns = round(row.total_ns * each / row.count) if each is not None else None
    cells = _exact_row(result, row, explain) | {"per_instance_ns": per_instance_ns}
    return cells | (_rank_cells(result, row) if _are_compared(result) else {})


def _exact_row(result: KernelsResult, row: KernelRow, explain: bool) -> dict[str, Any]:
    rule = {"rule": categorize(row.name, result.measure).rule} if explain else {}
    return {**vars(row), "per_rank_ns": list(row.per_rank_ns), **rule}


def _sum_rows(result: KernelsResult, rows: Sequence[KernelRow]) -> KernelRow:
    total, count = sum(row.total_ns for row in rows), sum(row.count for row in rows)
    each = [row.per_instance_count for row in rows if row.per_instance_count is not None]
    return KernelRow(
        name=f"({len(rows)} more)",
        category="",
        count=count,
        per_instance_count=sum(each) if each else None,
        total_ns=total,
        share=total / result.total_ns if result.total_ns else 0.0,
        mean_ns=round(total / count),
        min_ns=min(row.min_ns for row in rows),
        max_ns=max(row.max_ns for row in rows),
        per_rank_ns=tuple(map(sum, zip(*(row.per_rank_ns for row in rows), strict=True))),
    )


def _instance_table(result: KernelsResult) -> Table:
    columns = [
        Column("instance", "instance"),
        Column("start_ns", "start", Unit(lambda value: format_ns(value - result.first_ns))),
        Column("wall_ns", "Python time", NS),
        Column("kernel_time_ns", "kernel time", NS),
        Column("busy_ns", "GPU busy", NS),
        Column("kernel_count", "kernels"),
    ]
    columns += [Column("rank", "rank")] if _are_compared(result) else []
    return Table(columns, [vars(row) for row in result.per_instance or ()])


def _rule_table(result: KernelsResult, rows: Sequence[KernelRow], *, full_names: bool) -> Table:
    columns = (
        Column("category", "category", TEXT),
        Column("rule", "rule", TEXT, flexible=True),
        Column("name", "kernel", _name_unit(result, full_names), flexible=True),
    )
    title = "Why each kernel has its category: the first rule that matches its full name"
    return Table(columns, [_exact_row(result, row, explain=True) for row in rows], title)


def _source_lines(
    result: KernelsResult, rows: Sequence[KernelRow], steps: int | None, *, full_names: bool
) -> list[Lines]:
    shown = {row.name for row in rows}
    sources = [source for source in result.sources or () if source.kernel in shown]
    if not sources:
        return []
    each, most = ns_over(steps).show, len(sources) if full_names else _MOST_SOURCES
    lines = [_source_line(result, source, each, full_names) for source in sources[:most]]
    if len(sources) > most:
        rest = sum(source.total_ns for source in sources[most:])
        lines.append(f"{each(rest)} in {len(sources) - most} smaller places (--full-names shows them)")
    unknown = sum(source.launch is None for source in sources)
    if unknown:
        who = f"operators and lines of {unknown} of {len(sources)} are unknown"
        lines.append(f"{who}: no compiled.jsonl next to this trace knows them")
    what = "What compiled kernels compute, from which lines, and for which modules"
    return [Lines(lines, title=f"{what}, {'sums' if steps is None else 'per step'}")]


def _source_line(result: KernelsResult, source: KernelSource, each: Callable[[Any], str], full_names: bool) -> str:
    """Return one sentence: ``3.2 ms triton_poi_fused_gelu_3: aten.gelu; model.py:87 forward; for h.*.mlp.gelu``."""
    most = 1 << 20 if full_names else _MOST_LINES
    parts = [f"{each(source.total_ns)} {_name_unit(result, full_names).show(source.kernel)}"]
    if source.launch is not None:
        operators = _some(source.operators or (), 2 * most)
        called = f"{source.launch}: {operators}" if source.is_extern and operators else operators or source.launch
        parts[0] += f": {called}"
        lines = source.lines or ()
        parts += (
            [_some(lines if full_names else [line[line.rfind("/") + 1 :] for line in lines], most)] if lines else []
        )
    parts.append(f"for {' + '.join(source.modules)}" if source.modules else "for no module (made by the compiler)")
    return "; ".join(parts)


def _some(texts: Sequence[str], most: int) -> str:
    more = [f"{len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more])


def _phase_table(title: str, phases: Sequence[KernelsResult], whole_ns: int, *, totals: bool) -> Table:
    counts = {result.steps for result in phases}
    steps = counts.pop() if len(counts) == 1 and not totals else None
    unit = "sums over the capture" if steps is None else f"per step ({format_count(steps, 'step')})"
    without = ", without warmup" if any(result.filters.exclude for result in phases) else ""
    whose = f" of {len(phases[0].ranks)} ranks together" if _are_compared(phases[0]) else ""
    heading = f"{title or 'Phases'}{whose}, {unit}{without}; 100 % = all {format_ns(whole_ns)} of {_scope(phases[0])}"
    rows = [
        {
            "phase": split_path(str(result.range))[-1],
            **{key: getattr(result, key) for key in ("instances", "wall_ns", "total_ns", "busy_ns")},
            "share": result.total_ns / whole_ns if whole_ns else None,
            "kernels": result.kernel_count + result.graph_count,
        }
        for result in phases
    ]
    on_cpu = phases[0].measure == "cpu-operator"
    columns = (
        Column("phase", "phase", TEXT),
        Column("instances", "times", count_over(steps)),
        Column("wall_ns", "Python time", ns_over(steps)),
        Column("total_ns", "self time" if on_cpu else "kernel time", ns_over(steps)),
        Column("busy_ns", "busy" if on_cpu else "GPU busy", ns_over(steps)),
        Column("share", "share", SHARE),
        Column("kernels", "operators" if on_cpu else "kernels", count_over(steps)),
    )
    return Table(columns, rows, heading)


def _are_compared(result: KernelsResult) -> bool:
    return len(result.ranks) > 1


def _rank_table(result: KernelsResult, steps: int | None) -> Table:
    on_gpu = result.measure == "gpu-kernel"
    columns = (
        Column("rank", "rank", PLAIN),
        Column("device", "GPU", PLAIN) if on_gpu else Column("process", "pid", PLAIN),
        Column("wall_ns", "recorded" if result.range is None else "Python time", ns_over(steps)),
        Column("kernel_time_ns", "kernel time" if on_gpu else "self time", ns_over(steps)),
        Column("busy_ns", "GPU busy" if on_gpu else "busy", ns_over(steps)),
        Column("communication_ns", "communicating", ns_over(steps)),
        Column("own_ns", "computing", ns_over(steps)),
        Column("kernel_count", "kernels" if on_gpu else "operators", count_over(steps)),
    )
    return Table(columns, [{**vars(row), "own_ns": row.own_ns} for row in result.ranks])


def _rank_head(result: KernelsResult, compared: RanksResult | None) -> list[str]:
    is_guess = result.rank_evidence is not None and result.rank_evidence.startswith("guessed")
    lines = [f"ranks are {result.rank_evidence}"] * is_guess
    if compared is not None:
        from profkit.report.commands.ranks import describe_verdict  # few captures are of several ranks

        lines += describe_verdict(compared)[:1]
    return lines


def _sum_ranks(result: KernelsResult) -> list[str]:
    if not _are_compared(result):
        return []
    total = sum(row.kernel_time_ns for row in result.ranks)
    parts = [f"rank {row.rank} {row.kernel_time_ns:,}" for row in result.ranks]
    if len(parts) > _MOST_RANK_COLUMNS:
        parts = [f"{len(parts)} ranks {total:,}"]
    if result.total_ns > total:
        parts.append(f"other processes {result.total_ns - total:,}")
    return [f"Ranks: {result.total_ns:,} ns = {' + '.join(parts)}"]


def _rank_columns(result: KernelsResult, steps: int | None, late: int | None) -> list[Column]:
    unit = ns_over(steps)
    if len(result.ranks) <= _MOST_RANK_COLUMNS:
        return [Column(f"rank_{row.rank}_ns", f"rank {row.rank}", unit) for row in result.ranks]
    some = [Column(f"rank_{word}_ns", word, unit) for word in ("least", "median", "most")]
    return some + ([] if late is None else [Column(f"rank_{late}_ns", f"rank {late}", unit)])


def _rank_cells(result: KernelsResult, row: KernelRow) -> dict[str, Any]:
    from statistics import median  # slow to load, and needed only where there are ranks

    each = row.per_rank_ns
    cells = {f"rank_{rank.rank}_ns": time for rank, time in zip(result.ranks, each, strict=True)}
    return {**cells, "rank_least_ns": min(each), "rank_median_ns": round(median(each)), "rank_most_ns": max(each)}
