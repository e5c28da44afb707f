"""The first screen, and the sections of a step: how long each took, and one median step by threads and streams.

The slices of a lane that are too short to be seen, and close together, become one; its ``busy_ns`` and ``count`` keep
what they were. All kernels that were launched under the median step are there, and nothing else that the GPU ran.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from profkit.analysis.causes.advice import Advice, AdviceResult
from profkit.analysis.efficiency.summary import GpuStep
from profkit.analysis.kernels import categorize
from profkit.analysis.placing.attribution import (
    AMBIGUOUS_HOST,
    DIRECT,
    INFERRED,
    NO_LAUNCH_RECORD,
    OUTSIDE,
    SEQUENCE,
    Attribution,
)
from profkit.analysis.summary import StepTree, Summary
from profkit.analysis.time_account import measured_ranges
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.tree import select_ranges
from profkit.analysis.tree.range_tree import build_nodes, kind_paths
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER, STEP
from profkit.report import make_visible, simplify_name
from profkit.report.colours import LIMITS
from profkit.report.commands.answer import (
    describe_after,
    describe_answer,
    describe_effects,
    describe_phases,
    describe_together,
    name_other_step,
    name_part,
    name_place,
)
from profkit.report.commands.steps import name_line
from profkit.report.commands.summary import build_summary_document
from profkit.report.document import Labelled
from profkit.report.page import Interned, Results, pack, without_folders
from profkit.report.units import format_bytes, format_count, format_ns, format_share
from profkit.run.edits import parse_edits
from profkit.run.manifest import Manifest
from profkit.trace.columns import Calls, Copies, Ints, Ranges, Work, distinct_values, rows_by_value


def build_dots(account: TimeAccount, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield a row of dots for the unprofiled steps and one for the recorded ones, on one scale that begins at 0."""
    sources = {"unprofiled": manifest.unprofiled, "recorded": manifest.profiled}
    rows = {name: [] if steps is None else steps.step_ns() for name, steps in sources.items()}
    if not rows["recorded"]:
        # No run noted when its steps began: what is known is each step's time on the GPUs.
        rows["recorded"] = account.recorded_steps_ns().tolist()
    longest = max((value for times in rows.values() for value in times), default=1)
    for name, times in rows.items():
        if times:
            dots = [{"left": round(98 * time_ns / longest, 2), "text": format_ns(time_ns)} for time_ns in times]
            span = f"{format_ns(min(times))} to {format_ns(max(times))}" if len(times) > 1 else format_ns(times[0])
            yield {"name": name, "dots": dots, "words": f"{format_count(len(times), 'step')}, {span}"}


MOST_SLICES = 3000
"""As many a lane may have before its shortest ones are merged."""

_DEEPEST = 24

Kind = Literal["ranges", "calls", "kernels", "copies"]


@dataclass(frozen=True, eq=False)
class Lane:
    """Slices that follow one another: of one thread at one depth of its ranges, its CUDA calls, or one GPU stream.

    ``row`` is the row of the trace's table (`kind`) that a slice stands for, of several the first.
    """

    name: str
    kind: Kind
    depth: int
    row: Ints
    start_ns: Ints
    end_ns: Ints
    busy_ns: Ints
    count: Ints


@dataclass(frozen=True, eq=False)
class StepSlices:
    """The lanes of one step; ``instance`` is its number among the ranges of its name, as ``--instance`` counts."""

    name: str
    instance: int
    start_ns: int
    end_ns: int
    lanes: tuple[Lane, ...]

    @property
    def merged(self) -> int:
        return sum(int((lane.count - 1).sum()) for lane in self.lanes)


def slice_median_step(attribution: Attribution, steps: Sequence[GpuStep]) -> StepSlices | None:
    """Return the lanes of the step whose time on the GPU is the median, of an even number the lower; None of none."""
    index = _find_median(attribution, steps)
    if index is None:
        return None
    trace = attribution.trace
    ranges, member = trace.ranges, np.array([index])
    kernels, copies = (np.sort(placed.under(member).rows) for placed in (attribution.work, attribution.copies))
    start, end = int(ranges.start_ns[index]), int(ranges.end_ns[index])
    for table, rows in ((trace.work, kernels), (trace.copies, copies)):
        start = min(start, int(table.start_ns[rows].min(initial=start)))
        end = max(end, int(table.end_ns[rows].max(initial=end)))
    name = trace.names[int(ranges.name[index])]
    same = select_ranges(attribution, name).tolist()
    lanes = [*_host_lanes(attribution, index, kernels), *_gpu_lanes(attribution, kernels, copies)]
    return StepSlices(name, same.index(index), start, end, tuple(lanes))


def _find_median(attribution: Attribution, steps: Sequence[GpuStep]) -> int | None:
    ranges, trace = attribution.trace.ranges, attribution.trace
    if not steps:
        return None
    chosen = sorted(steps, key=lambda step: (step.gpu.span_ns, step.start_ns))[(len(steps) - 1) // 2]
    for index in measured_ranges(attribution)[STEP].tolist():
        process = int(ranges.process[index])
        if ranges.start_ns[index] == chosen.start_ns and trace.process_ids.get(process, process) == chosen.process:
            return int(index)
    return None


def _host_lanes(attribution: Attribution, index: int, kernels: Ints) -> Iterator[Lane]:
    """The step's own thread comes first."""
    trace = attribution.trace
    ranges, calls = trace.ranges, trace.calls
    start, end = int(ranges.start_ns[index]), int(ranges.end_ns[index])
    inside = (ranges.start_ns >= start) & (ranges.end_ns <= end) & (ranges.process == ranges.process[index])
    inside &= ~attribution.is_mirror & ranges.was_open
    called = (calls.start_ns >= start) & (calls.end_ns <= end) & (calls.process == ranges.process[index])
    launching = distinct_values(trace.work.launch_thread[kernels]).tolist()
    own = int(ranges.thread[index])
    threads = [own, *(thread_id for thread_id in launching if thread_id != own and thread_id >= 0)]
    nodes = build_nodes(attribution, numbered=True)
    depth = nodes.depth[nodes.of_range]
    for thread in threads:
        name = "Python thread" if thread == own else trace.thread_names.get(thread) or "another thread"
        name = f"autograd thread ({name})" if "autograd" in name else name
        mine = np.flatnonzero(inside & (ranges.thread == thread))
        levels = depth[mine]
        for level in distinct_values(levels).tolist()[:_DEEPEST]:
            rows = mine[levels == level]
            yield _lane(name, "ranges", rows, ranges, level - int(levels.min()))
        rows = np.flatnonzero(called & (calls.thread == thread))
        if len(rows):
            yield _lane(name, "calls", rows, calls)


def _gpu_lanes(attribution: Attribution, kernels: Ints, copies: Ints) -> Iterator[Lane]:
    trace = attribution.trace
    work, moved = trace.work, trace.copies
    for device, rows in rows_by_value(work.device[kernels]).items():
        for stream, some in rows_by_value(work.stream[kernels[rows]]).items():
            name = f"GPU {device}, stream {stream}"
            yield _lane(name, "kernels", kernels[rows][some], work)
    for device, rows in rows_by_value(moved.device[copies]).items():
        yield _lane(f"GPU {device}, copies and fills", "copies", copies[rows], moved)


def _lane(name: str, kind: Kind, rows: Ints, table: Ranges | Calls | Work | Copies, depth: int = 0) -> Lane:
    rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
    start, end = table.start_ns[rows], table.end_ns[rows]
    first, shortest = np.arange(len(rows)), 256
    while len(first) > MOST_SLICES:
        # Of both neighbours neither can be seen at this width, nor the gap between them.
        is_short = end - start < shortest
        joins = is_short[1:] & is_short[:-1] & (start[1:] - np.maximum.accumulate(end)[:-1] < shortest)
        first = np.flatnonzero(np.concatenate([[True], ~joins]))
        shortest *= 2
    busy, count = np.add.reduceat(end - start, first), np.diff(np.append(first, len(rows)))
    return Lane(name, kind, depth, rows[first], start[first], np.maximum.reduceat(end, first), busy, count)


EVIDENCE = {
    DIRECT: "placed by its own thread",
    INFERRED: "placed by the thread that waited for it",
    SEQUENCE: "placed by operator links",
    OUTSIDE: "in no range",
    AMBIGUOUS_HOST: "not placed: two threads may have waited",
    NO_LAUNCH_RECORD: "not placed: no launch was recorded",
}

_COLUMNS = 1000
"""The picture without a script merges what lies in one thousandth of the step."""

_DEEPEST_PICTURED = 1
"""The step, and the phases in it."""

_KINDS = {"gemm": "matmul", "attention": "attention", "communication": "communication"}
"""Category → colour; kernels of every other category share one."""


def build_timeline(attribution: Attribution, step: StepSlices) -> dict[str, Any]:
    """Return the packed slices, a picture of the lanes, and what each lane adds up to."""
    texts = Interned()
    paths = kind_paths(attribution)
    lanes = [_pack_lane(attribution, lane, step.start_ns, texts, paths) for lane in step.lanes]
    kernels = [lane for lane in step.lanes if lane.kind == "kernels"]
    kernel_ns = sum(int(lane.busy_ns.sum()) for lane in kernels)
    return {
        "data": pack({"span": step.end_ns - step.start_ns, "lanes": lanes, "texts": texts.texts}),
        "name": step.name,
        "span": format_ns(step.end_ns - step.start_ns),
        "kernel_ns": kernel_ns,
        "kernels": format_count(sum(int(lane.count.sum()) for lane in kernels), "kernel"),
        "kernel_time": format_ns(kernel_ns),
        "merged": step.merged,
        "pictures": [
            _picture(attribution, lane, step)
            for lane in step.lanes
            if lane.kind != "calls" and lane.depth <= _DEEPEST_PICTURED
        ],
    }


def _pack_lane(attribution: Attribution, lane: Lane, zero_ns: int, texts: Interned, paths: list[str]) -> dict[str, Any]:
    packed = {
        "name": lane.name,
        "kind": lane.kind,
        "depth": lane.depth,
        "start": np.diff(lane.start_ns - zero_ns, prepend=0).tolist(),
        "length": (lane.end_ns - lane.start_ns).tolist(),
        "text": [texts.number(name) for name in _names(attribution, lane)],
    }
    if (lane.count > 1).any():
        packed |= {"count": lane.count.tolist(), "busy": lane.busy_ns.tolist()}
    if lane.kind in ("kernels", "copies"):
        placed = attribution.work if lane.kind == "kernels" else attribution.copies
        table = attribution.trace.work if lane.kind == "kernels" else attribution.trace.copies
        innermost = placed.innermost[lane.row].tolist()
        known = table.launch_thread[lane.row] >= 0
        gaps = np.where(known, table.start_ns[lane.row] - table.launch_ns[lane.row], -1)
        packed |= {
            "place": [texts.number(paths[number]) if number >= 0 else -1 for number in innermost],
            "gap": gaps.tolist(),
            "evidence": [texts.number(EVIDENCE[number]) for number in placed.verdict[lane.row].tolist()],
        }
    if lane.kind == "kernels":
        packed["category"] = [texts.number(number) for number in _categories(attribution, lane)]
    return packed


def _names(attribution: Attribution, lane: Lane) -> Iterator[str]:
    trace = attribution.trace
    if lane.kind == "copies":
        for fills, size in zip(
            trace.copies.is_memset[lane.row].tolist(), trace.copies.byte_count[lane.row].tolist(), strict=True
        ):
            yield f"{'fill' if fills else 'copy'} of {size:,} B"
        return
    names = {"ranges": trace.ranges.name, "calls": trace.calls.name, "kernels": trace.work.name}[lane.kind]
    shown: dict[int, str] = {}
    for name in names[lane.row].tolist():
        if name not in shown:
            shown[name] = simplify_name(trace.names[name]) if lane.kind == "kernels" else trace.names[name]
        yield shown[name]


def _categories(attribution: Attribution, lane: Lane) -> list[str]:
    trace = attribution.trace
    return [categorize(trace.names[name], trace.measure).name for name in trace.work.name[lane.row].tolist()]


def _picture(attribution: Attribution, lane: Lane, step: StepSlices) -> dict[str, Any]:
    kinds = ["range"] * len(lane.row)
    if lane.kind == "kernels":
        kinds = [_KINDS.get(category, "other") for category in _categories(attribution, lane)]
    elif lane.kind == "copies":
        kinds = ["copies"] * len(lane.row)
    unit = (step.end_ns - step.start_ns) / _COLUMNS or 1
    bars: list[list[Any]] = []
    for kind, start, end in zip(kinds, lane.start_ns.tolist(), lane.end_ns.tolist(), strict=True):
        left, right = round((start - step.start_ns) / unit), round((end - step.start_ns) / unit)
        if bars and left <= bars[-1][2] and (bars[-1][0] == kind or right <= bars[-1][2]):
            bars[-1][2] = max(bars[-1][2], right)
        else:
            bars.append([kind, left, max(right, left + 1)])
    label = f"{make_visible(lane.name)}: {format_ns(int(lane.busy_ns.sum()))} in {int(lane.count.sum()):,}"
    return {
        "label": label,
        "bars": [{"kind": kind, "left": left / 10, "width": (right - left) / 10} for kind, left, right in bars],
    }


_SECTIONS = {
    "STEP": ("step", "efficiency"),
    "LIMIT": ("step", "efficiency"),
    "GPU": ("step", "efficiency"),
    "WORK": ("kernels", "kernels"),
    "MODULE": ("modules", "ranges"),
    "LINES": ("step", "efficiency --by line"),
    "MEMORY": ("memory", "memory"),
    "RANKS": ("ranks", "ranks"),
    "Tried": ("trials", "try --report"),
    "Closed": ("trust", "kernels"),
}
"""A line's word → the section that shows more, and the command that prints its figures."""

_PARTS: dict[str, str] = {
    **LIMITS,
    "data": "data",
    "rest": "rest",
    FORWARD: "matmul",
    LOSS: "copies",
    BACKWARD: "attention",
    OPTIMIZER: "other",
}
"""A part of a step, or a phase without a GPU → its colour (`profkit.report.colours.STEP`)."""

_ELSEWHERE = ("Care", "Try")
"""Lines that stand at the head of the page."""


def build_answer(run: Results) -> dict[str, Any]:
    summary, advice = run.summary, run.advice
    return {
        "sentence": without_folders(make_visible(describe_answer(summary, advice))),
        "figures": list(_figures(summary, advice)),
        "parts": [] if summary.tree is None else list(_parts(summary.tree)),
        "together": describe_together(summary, advice),
        "tries": [_view_try(proposal, run.name) for proposal in advice.tries],
        "lanes": list(_lanes(run)),
        "nothing": "" if advice.tries else make_visible(advice.nothing or ""),
    }


def _figures(summary: Summary, advice: AdviceResult) -> Iterator[tuple[str, str]]:
    if summary.step_ns is not None:
        is_unprofiled = any(step.unprofiled_ns is not None for step in summary.steps)
        yield format_ns(summary.step_ns), "a step, unprofiled" if is_unprofiled else "a step, as recorded"
    if summary.gpu is not None:
        yield format_share(1 - summary.gpu.idle.share), "of a step the GPU is busy"
    if summary.memory is not None:
        phase = f", in {summary.memory.phase}" if summary.memory.phase else ""
        yield format_bytes(summary.memory.peak_bytes), f"at the peak of memory{phase}"
    first = next((proposal for proposal in advice.tries if describe_after(proposal)), None)
    if first is not None:
        middle, _, reach = describe_after(first).replace("about ", "≈ ").partition(" (")
        which, now = "a step", ""
        if first.other_step_ns is not None:
            which, now = f"a step {name_other_step(first)}", f"; {format_ns(first.other_step_ns)} now"
        yield middle, f"{which} after the first Try" + (f" ({reach}" if reach else "") + now


def _parts(tree: StepTree) -> Iterator[dict[str, Any]]:
    at = 0
    for part in tree.parts:
        name, time = name_part(tree, part), f"{format_ns(part.time_ns)} ({format_share(tree.share(part.time_ns))})"
        yield {
            "colour": _PARTS.get(name if part.kind == "phase" else part.kind, "outside"),
            "left": round(100 * tree.share(at), 3),
            "width": round(100 * tree.share(part.time_ns), 3),
            "name": name,
            "time": time,
            "detail": make_visible(describe_phases(tree, part)),
            "line": "" if part.line is None else make_visible(name_line(part.line)),
        }
        at += part.time_ns


def _lanes(run: Results) -> Iterator[dict[str, Any]]:
    """There are none where the first Try is no edit, or nothing is expected."""
    edit = next((proposal.edit for proposal in run.advice.tries), None)
    trace = run.capture.trace
    both = None if trace is None or edit is None else trace.step_lanes(parse_edits([edit]))
    if both is None:
        return
    before, after = both
    whole = max(before.step_ns, after.step_ns, 1)
    for label, step in (("now", before), ("after the first Try", after)):
        for name, spans in step.lanes.items():
            yield {
                "label": f"{label}: {name}",
                "words": f"{format_ns(step.step_ns)} a step",
                "spans": [
                    {
                        "left": round(100 * span.start_ns / whole, 2),
                        "width": round(100 * (span.end_ns - span.start_ns) / whole, 2),
                        "colour": LIMITS[span.kind],
                    }
                    for span in spans
                ],
            }


def _view_try(advice: Advice, run: str) -> dict[str, Any]:
    return {
        "cause": make_visible(advice.cause),
        "place": make_visible(name_place(advice)),
        "change": make_visible(advice.change),
        "effect": " · ".join(describe_effects(advice)),
        "costs": make_visible(advice.costs or ""),
        "command": re.sub(r"\bRUN\b", lambda _: shlex.quote(run), advice.proof),
        "is_new": "NEW" in advice.proof,
    }


def build_lines(run: Results) -> list[dict[str, Any]]:
    """Return the lines of the summary, each with its section and the command that prints its figures in full."""
    lines: list[dict[str, Any]] = []
    document = build_summary_document(run.summary, run.advice, with_all=True)
    labelled = [part for part in document.parts if isinstance(part, Labelled)]
    for label, text in labelled[-1].lines:
        if label or not lines:
            section, command = _SECTIONS.get(label, ("", "summary"))
            lines.append({"label": label, "section": section, "texts": [], "command": f"profkit {command} {run.name}"})
        lines[-1]["texts"].append(make_visible(text))
    return [line for line in lines if line["label"] not in _ELSEWHERE]
