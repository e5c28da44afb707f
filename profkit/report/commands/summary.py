"""``profkit summary`` and the end of a run: the answer, the step as a tree, what to try, and how sure that is.

Each line is told in parts: a short one holds as many as it has room for, so the first says the most.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from profkit.analysis.causes.advice import AdviceResult
from profkit.analysis.causes.memory import repeated_module
from profkit.analysis.memory.places import PartRow
from profkit.analysis.summary import RUN_WARNING, Head, StepUse, Summary
from profkit.analysis.tree.modules import ModuleTime
from profkit.names import MODEL
from profkit.report import cut_clauses, name_within, shorten
from profkit.report.commands.answer import (
    ROOM,
    SEPARATOR,
    TWO_LINES,
    describe_answer,
    describe_ranks,
    describe_together,
    describe_try,
    draw_tree,
    join_parts,
)
from profkit.report.commands.edits import describe_trial, name_trial
from profkit.report.commands.steps import describe_limits, describe_line, name_source
from profkit.report.document import Column, Document, Labelled, Lines, Table, wrap, wrap_labelled
from profkit.report.units import TEXT, format_bytes, format_change, format_count, format_ns, format_share
from profkit.text_kinds import LEFT_OUT

_SCHEMA = 2

Line = tuple[str, str]
"""A word and what stands behind it."""

_SCREENS = {100: 12, 80: 20}
"""How many lines the answer and what stands below it may take on a screen of so many columns."""

_ATTEMPTS = (
    (0.0, ()),
    (0.02, ("ends",)),
    (0.05, ("costs", "Tried", "Lacks")),
    (0.1, ("command", "Care")),
    (0.1, ("MODULE",)),
    (0.2, ()),
    (0.2, ("WORK",)),
    (0.2, ("together",)),
    (0.2, ("RANKS",)),
    (1.0, ()),
    (1.0, ("Closed",)),
    (1.0, ("MEMORY",)),
)
"""The attempts to fit a screen: the least share of a part of the step that has a row, and what else is left out."""

_MOST_TRIALS = 3
"""The trials of other edits than the Tries that have a line."""


def build_summary_document(
    summary: Summary, advice: AdviceResult, *, for_run: bool = False, with_all: bool = False
) -> Document:
    """Return the answer in one sentence, then the lines.

    ``for_run`` leaves out the warnings, which ``profkit run`` says itself. ``with_all`` shows every line in full; else
    those that answer, each as long as a screen of 100 columns is wide.
    """
    answer, failures = describe_answer(summary, advice), list(_failures(summary))
    cares = [
        finding.message
        for finding in summary.findings
        if finding.verdict == "warning" and not (for_run and finding.code == RUN_WARNING)
    ]
    if with_all:
        lines = [(label, text) for label, text in _in_full(summary, advice, cares) if text]
    else:
        lines = _fit_screen(answer, summary, advice, cares)
    before = ["", *(label for label, _ in lines)]
    labelled = [(label if label != before[at] else "", text) for at, (label, text) in enumerate(lines)]
    data = summary.to_dict()
    data["head"]["command"] = _words(summary.head)
    data = {"answer": answer, **data, **advice.to_dict()}
    figures = Table((Column("figure", "figure", TEXT), Column("value", "value", TEXT)), list(_flatten(data)))
    return Document(
        "summary",
        data,
        [
            *([Labelled(failures)] if failures else []),
            Lines([answer], "head"),
            Labelled(labelled),
        ],
        figures,
        summary.findings,
        has_warnings=True,
        schema=_SCHEMA,
    )


def _words(head: Head) -> list[str]:
    return [Path(word).name if word.startswith("/") else word for word in head.command]


def _failures(summary: Summary) -> Iterator[Line]:
    ending, memory = summary.head.ending, summary.memory
    if ending is not None:
        subject = f"the run {ending.removeprefix('it ')}" if ending.startswith("it ") else ending
        nothing, is_empty = "nothing was recorded", not summary.has_trace and memory is None
        kept = nothing if is_empty else "what it recorded follows"
        yield "FAILED", subject if is_empty and nothing in ending else f"{subject}; {kept}"
    if memory is not None and memory.failure is not None:
        has_survived = ending is None and bool(summary.head.command)
        size = format_bytes(memory.failed_request_bytes or 0)
        goes_on = " (the program went on)" if has_survived else ""
        yield "Care" if has_survived else "FAILED", f"out of memory, asked for {size}: {memory.failure}{goes_on}"


def _in_full(summary: Summary, advice: AdviceResult, cares: Sequence[str]) -> Iterator[Line]:
    join = SEPARATOR.join
    yield "STEP", join(describe_step(summary))
    yield from (("STEP", row) for row in _describe_rare(summary))
    yield from (("STEP", row) for row in (() if summary.tree is None else draw_tree(summary.tree)))
    late = None if summary.compared is None else summary.compared.late_rank
    yield "LIMIT", "" if summary.limits is None else describe_limits(summary.limits, late)
    yield "GPU", _describe_gpu(summary)
    yield "WORK", join(_describe_work(summary))
    yield "MODULE", join(_describe_modules(summary))
    if summary.lines:
        yield "LINES", "Python spends, per step: " + "; ".join(map(describe_line, summary.lines))
    yield "MEMORY", join(describe_memory(summary))
    yield "RANKS", _describe_late_rank(summary, "")
    yield "Try", advice.nothing or ""
    yield from _tries_in_full(summary, advice)
    yield from _tried(advice)
    yield from (("Note", note) for note in advice.notes)
    yield from (("Care", message) for message in cares)
    yield from _missing(summary)
    yield "Closed", join(_describe_closing(summary))


def _fit_screen(answer: str, summary: Summary, advice: AdviceResult, cares: Sequence[str]) -> list[Line]:
    lines: list[Line] = []
    left_out: set[str] = set()
    for least_share, words in _ATTEMPTS:
        left_out |= {*words}
        tree = () if summary.tree is None else draw_tree(summary.tree, least_share)
        rows = [("STEP", row) for row in (_fit(describe_step(summary)), *_describe_rare(summary), *tree)]
        short = [*rows, *_in_short(answer, summary, advice, cares, left_out)]
        lines = [(label, text) for label, text in short if text and label not in left_out]
        screens = ([wrap(answer, width), *wrap_labelled(Labelled(lines), width)] for width in _SCREENS)
        counts = (sum(len(text.splitlines()) for text in texts) for texts in screens)
        if all(count <= most for count, most in zip(counts, _SCREENS.values(), strict=True)):
            break
    return lines


def _in_short(
    answer: str, summary: Summary, advice: AdviceResult, cares: Sequence[str], left_out: Collection[str]
) -> Iterator[Line]:
    join = _cut if "ends" in left_out else _fit
    yield "WORK", _cut(_describe_work(summary))
    yield "MODULE", _cut(_describe_modules(summary))
    yield "MEMORY", _cut(describe_memory(summary, ROOM))
    yield "RANKS", join([_describe_late_rank(summary, answer)])
    yield "Try", advice.nothing or ""
    yield from _tries(summary, advice, left_out)
    yield from _tried(advice)
    more = f" ({len(cares) - 1} more with --all)" if len(cares) > 1 else ""
    yield "Care", join(f"{care}{more}" for care in cares[:1])
    yield from _missing(summary)
    warnings = f"{format_count(len(cares), 'warning')} (--all)" if cares and "Care" in left_out else ""
    yield "Closed", join_parts(_fit(_describe_closing(summary)), warnings)


def _cut(parts: Iterable[str]) -> str:
    return cut_clauses(_fit(parts), ROOM, " … (--all)")


def _fit(parts: Iterable[str]) -> str:
    text = ""
    for part in parts:
        longer = f"{text}{SEPARATOR}{part}" if text else part
        if text and len(longer) > ROOM:
            break
        text = longer
    return text


def _tries(summary: Summary, result: AdviceResult, left_out: Collection[str]) -> Iterator[Line]:
    for number, advice in enumerate(result.tries, 1):
        room = ROOM if number > 1 or "costs" in left_out else TWO_LINES
        yield "Try", describe_try(number, advice, room, is_cut=number > 1 and "ends" in left_out)
    together = "" if "together" in left_out else describe_together(summary, result)
    can_be_tried = any(advice.proof.startswith("profkit try") for advice in result.tries)
    measured = f"profkit try {shlex.quote(summary.run)} measures {'them' if len(result.tries) > 1 else 'it'}"
    yield "Try", join_parts(together, measured if can_be_tried and "command" not in left_out else "")


def _tries_in_full(summary: Summary, result: AdviceResult) -> Iterator[Line]:
    yield "Try", describe_together(summary, result)
    for number, advice in enumerate(result.tries, 1):
        yield "Try", describe_try(number, advice, None)
    proofs = SEPARATOR.join(dict.fromkeys(advice.proof for advice in result.tries))
    commands = re.sub(r"\bRUN\b", lambda _: shlex.quote(summary.run), proofs)
    meaning = " (NEW is recorded with the change)" if "NEW" in commands else ""
    yield "", f"proof: {commands}{meaning}" if proofs else ""


def _tried(result: AdviceResult) -> Iterator[Line]:
    for trial in result.trials[:_MOST_TRIALS]:
        yield "Tried", f"{name_trial(trial)}: {describe_trial(trial)}"


def _missing(summary: Summary) -> Iterator[Line]:
    if summary.missing:
        words = _words(summary.head)
        # A copy that is shared does not hold the command.
        command = "" if any(word.startswith(LEFT_OUT) for word in words) else f" -- {shlex.join(words)}"
        cure = summary.why_missing or f"`profkit run{command}` records them"
        yield "Lacks", f"{' and '.join(summary.missing)}: {cure}"


def _flatten(data: Any, key: str = "") -> Iterator[dict[str, Any]]:
    if isinstance(data, dict | list | tuple):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _flatten(value, f"{key}.{name}" if key else str(name))
    else:
        yield {"figure": key, "value": data}


_MODULES = 4
_NAME_WIDTH = 48
_CAUSES = {
    "data_ns": "waiting for data",
    "launching_ns": "while Python prepared kernels",
    "synchronising_ns": "while Python waited for the GPU",
    "outside_cuda_ns": "while Python ran without calling CUDA",
}
_MUCH = 0.05
_PART = 0.005
"""A part of the time below this share has no place in a line."""


def describe_step(summary: Summary) -> Iterator[str]:
    yield from (_describe_time(step) for step in summary.steps if step.best_ns is not None)
    if summary.gpu is not None:
        yield f"GPU busy {format_share(1 - summary.gpu.idle.share)}"
    head = summary.head
    if summary.has_trace:
        yield from filter(None, (_name_machine(summary), head.precision, head.torch and f"torch {head.torch}"))
    yield from [format_count(head.rank_count, "rank")] if head.rank_count > 1 else []
    if head.steps:
        drained = f" after {head.drained_steps} for a data loader's full queue" if head.drained_steps else ""
        rare = sum(step.recorded_rare_count for step in summary.steps)
        counted = f", {format_count(rare, 'rare one')} among them, which WORK and MODULE count" if rare else ""
        yield f"{format_count(head.steps, 'step')} recorded{drained}{counted}"
    for step in summary.steps:
        if step.unprofiled_ns is not None and step.recorded_ns is not None:
            cost = format_change(step.recorded_ns / step.unprofiled_ns - 1)
            yield f"{format_ns(step.recorded_ns)} with the profiler ({cost})"
        if step.data_wait_ns is not None:
            yield f"Python waits {format_ns(step.data_wait_ns)} a step for data, on average"
    compiled = summary.compilations
    if compiled is not None and compiled.recorded_ns:
        count = format_count(len(compiled.steps), "recorded step")
        yield f"torch.compile worked for {format_ns(compiled.recorded_ns)} in {count}"


def _describe_time(step: StepUse) -> str:
    time = format_ns(step.best_ns or 0)
    if step.context is not None:
        return f"context {step.context}: {time}"
    low, high = step.p10_ns or 0, step.p90_ns or 0
    # The mean of waits that come in bursts may be longer than most steps.
    is_within = low < high and low <= (step.best_ns or 0) <= high
    spread = f", most take {format_ns(low)} to {format_ns(high)}" if is_within else ""
    if step.hidden_wait_ns is not None:
        spread = f", and {format_ns(step.hidden_wait_ns)} of waiting for data that a full queue hid from them"
    rare = f", {format_count(step.rare_count, 'rare one')} left out" if step.rare_count else ""
    timed = f"{format_count(step.count, 'step')}{rare}{spread}"
    return f"{time} unprofiled ({timed})" if step.count else f"{time} as recorded"


def _describe_rare(summary: Summary) -> Iterator[str]:
    rare = summary.rare_steps
    if rare is not None:
        part = "" if rare.is_explained else f"{format_ns(rare.lines_ns)} of it at "
        where = "" if rare.line is None else f" ({part}{name_source(rare.line)})"
        # How often they come one alone shows only after a first one, which was left out.
        once = "; a first time may take longest" if rare.count == 1 and rare.every is None else ""
        yield f"{rare.which} {format_ns(rare.longer_ns)} longer, which is no part of this{where}{once}"


def _describe_gpu(summary: Summary) -> str:
    gpu = summary.gpu
    if gpu is None:
        return ""
    parts, idle = gpu.parts, gpu.idle
    text = f"busy {format_share(1 - idle.share)}{SEPARATOR}idle {format_share(idle.share)}"
    if summary.step_ns is not None:
        text += f" = {format_ns(summary.idle_ns)} a step"
        text += "" if idle.is_unprofiled else " as recorded"
    why = {_CAUSES[name]: time_ns for name, time_ns in summary.idle_causes_ns.items()}
    cause = max(why, key=lambda one: why[one])
    # Of less, the gaps between kernels are most, whatever the host did meanwhile.
    if idle.share >= _MUCH:
        text += f", {'mostly ' if why[cause] < 0.9 * summary.idle_ns else ''}{cause}"
        data_ns = why[_CAUSES["data_ns"]]
        if data_ns > _PART * summary.idle_ns and cause != _CAUSES["data_ns"]:
            text += f", {format_ns(data_ns)} {_CAUSES['data_ns']}"
    if parts.exposed_communication_ns:
        share = idle.exposed_communication_ns(parts) / idle.span_ns
        text += f"{SEPARATOR}communication not hidden {format_share(share)}"
    elif not parts.overlapped_communication_ns:
        text += f"{SEPARATOR}no communication"
    if parts.exposed_copy_ns > _PART * idle.span_ns:
        text += f"{SEPARATOR}copies and fills alone {format_share(parts.exposed_copy_ns / idle.span_ns)}"
    return text


def _describe_work(summary: Summary) -> Iterator[str]:
    work = summary.work
    if work is None:
        if summary.has_trace:
            yield "no GPU work was recorded (no GPU, or no CUDA), so there are no kernel times"
        return
    whole = work.kernel_time_ns
    names = "matmul + attention" if work.by_category.get("attention") else "matmul"
    kind = "kernel time" if work.measure == "gpu-kernel" else "operator time"
    if not whole:
        yield f"no {kind} in the recorded steps"
        return
    each = format_ns(summary.per_step(work.kernel_time_ns))
    peak = ""
    if work.peak_share is not None and work.product_ns:
        peak = f", at {format_share(work.peak_share)} of {work.peak_name}"
    elif work.uncounted is not None and work.measure == "gpu-kernel":
        peak = f" (% of peak: {work.uncounted})"
    yield f"{names} {format_share(work.product_ns / whole)} of {each} of {kind}{_of_each(summary.head)}{peak}"
    others = {
        "other kernels": work.small_ns,
        "optimizer": work.optimizer_ns,
        "communication": work.communication_ns,
        "whole CUDA graphs": work.graph_ns,
    }
    for name, time_ns in sorted(others.items(), key=lambda item: -item[1]):
        if time_ns > _PART * whole:
            yield f"{name} {format_share(time_ns / whole)}"


def _of_each(head: Head) -> str:
    if head.gpu_count > 1:
        return " per GPU"
    return " per rank" if head.rank_count > 1 else ""


def _describe_modules(summary: Summary) -> Iterator[str]:
    module, work = summary.costliest_module, summary.work
    if module is None or work is None:
        return
    each, whole = format_ns(summary.per_step(module.total_ns)), format_ns(summary.per_step(work.kernel_time_ns))
    times = f" ×{module.number}" if module.number > 1 else ""
    yield f"{_module_path(module)}{times} {each} of {whole}"
    yield _passes(summary, module)
    kind, time_ns = max(summary.costliest_kinds.items(), key=lambda item: item[1], default=("", 0))
    if time_ns > module.total_ns / 2:
        yield f"{format_share(time_ns / module.total_ns)} {kind}"
    within = [row for row in summary.modules if row.parent == module.module]
    others = within or [row for row in summary.modules if row.parent == module.parent and row is not module]
    for row in sorted(others, key=lambda row: -row.total_ns)[:_MODULES]:
        if row.total_ns > _MUCH * module.total_ns:
            name = shorten(name_within(row.module, row.parent), _NAME_WIDTH)
            yield f"{'in it' if within else 'beside it'} {name} {format_ns(summary.per_step(row.total_ns))}"


def _module_path(module: ModuleTime) -> str:
    is_whole = module.parent is None or module.module.startswith(f"{module.parent}.") or module.parent == MODEL
    return shorten(module.module if is_whole else f"{module.parent}/{module.module}", _NAME_WIDTH)


def _passes(summary: Summary, module: ModuleTime) -> str:
    passes = {
        "forward": module.forward_ns,
        "backward": module.backward_ns,
        "computed again": module.recompute_ns,
        "inference": module.inference_ns,
    }
    return ", ".join(f"{name} {format_ns(summary.per_step(ns))}" for name, ns in passes.items() if ns)


def describe_memory(summary: Summary, room: int | None = None) -> Iterator[str]:
    """Yield the peak with its largest parts, what PyTorch held beside it, and what recording it cost.

    With ``room`` for the first of these, only as many modules hold activations as it has room for.
    """
    memory = summary.memory
    if memory is None:
        return
    text = f"peak {format_bytes(memory.peak_bytes)}" + ("" if memory.exact else " or more")
    text += f" in {memory.phase}" if memory.phase else ""
    whole = memory.peak_bytes or 1
    shown = sorted(memory.by_category.items(), key=lambda item: -item[1])
    holders = _holders(memory.modules)
    if room is not None and shown[:1] and shown[0][0] == "activations":
        without = len(f"{text}: activations 00.0% ()")
        while holders and without + len(", ".join(holders)) > room:
            holders.pop()
    held = f" ({', '.join(holders)})" if holders else ""
    parts = [
        f"{category} {format_share(size / whole)}{held if category == 'activations' else ''}"
        for category, size in shown
        if size >= 2 * _PART * whole
    ]
    yield ": ".join([text, *parts[:1]])
    yield from parts[1:_MODULES]
    unused = memory.reserved_peak_bytes - memory.peak_bytes
    if unused > _MUCH * memory.reserved_peak_bytes:
        yield f"reserved {format_bytes(memory.reserved_peak_bytes)}"
    if memory.recording_cost is not None:
        yield f"recording the allocator changed the step time by {format_change(memory.recording_cost)}"


def _holders(modules: Sequence[PartRow]) -> list[str]:
    blocks = repeated_module(tuple(modules))
    above = () if blocks is None else blocks.path
    if not any(row.path[:-1] == above and row.categories.get("activations") for row in modules):
        above = above[:-1]
    # A row that holds the blocks, or lies deeper in another module, would count bytes twice.
    rows = [
        row
        for row in modules
        if row.categories.get("activations")
        and row.path != above[: len(row.path)]
        and not row.path[0].startswith("(")
        and row.path[:-1] == above[: len(row.path) - 1]
    ]
    rows.sort(key=lambda row: -row.categories["activations"])
    return [f"{shorten(row.name, _NAME_WIDTH)} {format_bytes(row.categories['activations'])}" for row in rows[:3]]


def _describe_late_rank(summary: Summary, answer: str) -> str:
    verdict = describe_ranks(summary)
    return "" if verdict[1:] in answer else verdict


def _describe_closing(summary: Summary) -> Iterator[str]:
    texts, open_ends = [], []
    if summary.ledger is not None and summary.work is not None:
        kind = "kernels" if summary.work.measure == "gpu-kernel" else "operators"
        texts.append(f"{summary.ledger.total_ns:,} ns of {kind}")
        unplaced = summary.ledger.outside_ns + summary.ledger.ambiguous_ns + summary.ledger.no_launch_ns
        open_ends += [f"{unplaced:,} ns of them are in no range"] if unplaced else []
    if summary.memory is not None:
        texts.append(f"{summary.memory.peak_bytes:,} B at the peak")
        unknown = summary.memory.by_category.get("unknown", 0)
        open_ends += [f"the purpose of {unknown:,} B is unknown"] if unknown else []
        open_ends += [] if summary.memory.exact else ["the peak is not proved"]
    if not texts or summary.has_failed:
        return
    yield f"{', '.join(texts)}: {'; '.join(open_ends) or 'every one in a named line'}"
    if summary.memory is not None and summary.memory.agrees:
        yield "PyTorch's own peaks, recorded by the run, agree to the byte"


def _name_machine(summary: Summary) -> str:
    head = summary.head
    if head.gpu_count or head.gpu:
        gpu = (head.gpu or "GPU").removeprefix("NVIDIA ")
        return f"{head.gpu_count} × {gpu}" if head.gpu_count else gpu
    return "CPU only" if summary.work is not None else ""
