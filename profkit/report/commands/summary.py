"""``profkit summary`` and the end of a run: the answer, the step as a tree, what to try, and how sure that is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from profkit.analysis.causes.advice import AdviceResult
from profkit.analysis.causes.memory import repeated_module
from profkit.analysis.memory.places import PartRow
from profkit.analysis.summary import RUN_WARNING, Head, StepUse, Summary
from profkit.analysis.tree.modules import ModuleTime
from profkit.names import MODEL
from profkit.report.commands.answer import (
    ROOM,
    describe_answer,
    describe_effects,
    describe_together,
    draw_tree,
    name_place,
)
from profkit.report.commands.step_replay import describe_limits
from profkit.report.commands.steps import describe_line
from profkit.report.commands.trials import describe_trial, name_trial
from profkit.report.document import Column, Document, Labelled, Lines, Table
from profkit.report.text import shorten
from profkit.report.units import TEXT, format_bytes, format_change, format_count, format_ns, format_share

_SCHEMA = 2
_COMMAND_WIDTH = 60
_COMMAND_BEGINNING = 40
_MODULES = 4
_NAME_WIDTH = 48
_SEPARATOR = " · "
_CAUSES = {
    "data_ns": "waiting for data",
    "launching_ns": "while Python prepared kernels",
    "synchronising_ns": "while Python waited for the GPU",
    "outside_cuda_ns": "while Python ran without calling CUDA",
}
_MUCH = 0.05
_PART = 0.005
"""A part of the time below this share has no place in a line."""

_MOST_TRIALS = 3
"""The trials of other edits than the Tries that have a line."""

_MOST_RANKS = 8
"""The line of ranks shows the own time of this many."""


def build_summary_document(
    summary: Summary, advice: AdviceResult, *, for_run: bool = False, with_all: bool = False
) -> Document:
    """Return the answer in one sentence, then the lines.

    Args:
        summary: their figures.
        advice: what to try, the largest effect first.
        for_run: leave out what ``profkit run`` says itself: its warnings, and the commands that show more.
        with_all: every line in full; else those that answer, each as long as a screen of 100 columns is wide.
    """
    cares = [
        finding.message
        for finding in summary.findings
        if finding.verdict == "warning" and not (for_run and finding.code == RUN_WARNING)
    ]
    if len(cares) > 1 and not with_all:
        cares = [f"{cares[0]} ({len(cares) - 1} more with --all)"]
    lines = [
        *((label, text) for label, text in _lines(summary, with_all=with_all) if text),
        *_tries(summary, advice, with_proof=with_all),
        *(("Tried", f"{name_trial(trial)}: {describe_trial(trial)}") for trial in advice.trials[:_MOST_TRIALS]),
        *(("Note", note) for note in advice.notes if with_all),
        *(("Care", message) for message in cares),
        *_missing(summary),
        *_closed(summary),
        *(_more(summary) if with_all and not for_run else []),
    ]
    before = ["", *(label for label, _ in lines)]
    labelled = [(label if label != before[at] else "", text) for at, (label, text) in enumerate(lines)]
    answer, failures = describe_answer(summary, advice), list(_failures(summary))
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
            *([Lines([_head(summary)])] if with_all else []),
            Labelled(labelled),
        ],
        figures,
        summary.findings,
        has_warnings=True,
        schema=_SCHEMA,
    )


def _head(summary: Summary) -> str:
    head = summary.head
    parts = [
        _command(_words(head)) or Path(summary.run).name,
        _machine(summary),
        format_count(head.rank_count, "rank") if head.rank_count > 1 else "",
        f"torch {head.torch}" if head.torch else "",
        head.precision or "",
    ]
    if head.steps:
        numbers = "" if head.first_step is None else f" ({head.first_step}–{head.last_step})"
        numbers = f" ({head.first_step})" if numbers and head.first_step == head.last_step else numbers
        drained = f" after {head.drained_steps} that emptied the data loader's queue" if head.drained_steps else ""
        parts.append(f"{format_count(head.steps, 'step')} recorded{numbers}{drained}")
    elif summary.work is not None:
        parts.append("no steps known: figures are of the whole capture")
    return _SEPARATOR.join(filter(None, parts))


def _machine(summary: Summary) -> str:
    head = summary.head
    if head.gpu_count or head.gpu:
        gpu = (head.gpu or "GPU").removeprefix("NVIDIA ")
        return f"{head.gpu_count} × {gpu}" if head.gpu_count else gpu
    return "CPU only" if summary.work is not None else ""


def _command(words: list[str]) -> str:
    text = " ".join(words)
    if len(text) > _COMMAND_WIDTH and len(words) > 1:
        ends = [at for at in range(1, len(words)) if len(" ".join(words[:at])) <= _COMMAND_BEGINNING]
        text = " ".join([*words[: max(ends, default=1)], "…", words[-1]])
    return shorten(text, _COMMAND_WIDTH)


def _words(head: Head) -> list[str]:
    return [Path(word).name if word.startswith("/") else word for word in head.command]


def _failures(summary: Summary) -> Iterator[tuple[str, str]]:
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


def _lines(summary: Summary, *, with_all: bool) -> Iterator[tuple[str, str]]:
    """Yield each line with its word, in full or as long as a screen is wide; one of which nothing is known is empty."""
    join = _SEPARATOR.join if with_all else _fit
    compiling = _compiling(summary)
    steps = (_step(step) + compiling for step in summary.steps) if with_all else [_fit(_step_in_short(summary))]
    tree = () if summary.tree is None else draw_tree(summary.tree)
    yield from (("STEP", line) for line in (*steps, *tree))
    details = dict(_details(summary)) if with_all else {}
    yield from ((label, details.get(label, "")) for label in ("LIMIT", "GPU"))
    yield "WORK", join(_work(summary))
    yield "MODULE", join(_modules(summary))
    yield "LINES", details.get("LINES", "")
    yield "MEMORY", join(_memory(summary))
    yield "RANKS", join(_ranks(summary))


def _fit(parts: Iterable[str]) -> str:
    """Return as many parts as a line has room for, and at least the first."""
    text = ""
    for part in parts:
        longer = f"{text}{_SEPARATOR}{part}" if text else part
        if text and len(longer) > ROOM:
            break
        text = longer
    return text


def _details(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.limits is not None:
        yield "LIMIT", describe_limits(summary.limits)
    if summary.gpu is not None:
        yield "GPU", _gpu(summary)
    if summary.lines:
        yield "LINES", "Python spends, per step: " + "; ".join(map(describe_line, summary.lines))


def _step_in_short(summary: Summary) -> Iterator[str]:
    if len(summary.steps) > 1:
        yield from (f"context {step.context}: {format_ns(step.best_ns)}" for step in summary.steps if step.best_ns)
    elif summary.step_ns is not None:
        (step,) = summary.steps
        has_spread = step.p10_ns is not None and step.p90_ns is not None and step.p10_ns < step.p90_ns
        spread = f", most take {format_ns(step.p10_ns or 0)} to {format_ns(step.p90_ns or 0)}" if has_spread else ""
        times = f"unprofiled ({format_count(step.count, 'step')}{spread})" if step.count else "as recorded"
        yield f"{format_ns(summary.step_ns)} {times}"
    if summary.gpu is not None:
        yield f"GPU busy {format_share(1 - summary.gpu.idle.share)}"
    head = summary.head
    if summary.has_trace:
        yield from filter(None, (_machine(summary), head.precision, head.torch and f"torch {head.torch}"))


def _step(step: StepUse) -> str:
    where = "" if step.context is None else f"context {step.context}: "
    if step.unprofiled_ns is None or step.p10_ns is None or step.p90_ns is None:
        recorded = format_ns(step.recorded_ns or 0)
        return f"{where}{recorded} as recorded; the unprofiled time is unknown (`profkit run` measures it)"
    text = f"{where}{format_ns(step.unprofiled_ns)} unprofiled ({format_count(step.count, 'step')}"
    if step.data_wait_ns is not None:
        text += f": their median without waits for data, plus {format_ns(step.data_wait_ns)}, the mean wait"
    elif step.count > 1:
        text += f", p10 to p90 {format_ns(step.p10_ns)} to {format_ns(step.p90_ns)}"
    text += ")"
    if step.recorded_ns is not None:
        cost = format_change(step.recorded_ns / step.unprofiled_ns - 1)
        text += f"; {format_ns(step.recorded_ns)} with the profiler ({cost})"
    return text


def _compiling(summary: Summary) -> str:
    compiled = summary.compilations
    if compiled is None or not compiled.recorded_ns:
        return ""
    count = format_count(len(compiled.steps), "recorded step")
    return f"; torch.compile worked for {format_ns(compiled.recorded_ns)} in {count}"


def _gpu(summary: Summary) -> str:
    gpu = summary.gpu
    assert gpu is not None
    parts, idle = gpu.parts, gpu.idle
    text = f"busy {format_share(1 - idle.share)}{_SEPARATOR}idle {format_share(idle.share)}"
    if summary.step_ns is not None:
        text += f" = {format_ns(summary.idle_ns)} a step"
        text += "" if idle.is_unprofiled else " as recorded"
    why = {_CAUSES[name]: time_ns for name, time_ns in summary.idle_causes_ns.items()}
    cause = max(why, key=lambda one: why[one])
    if idle.idle_ns:
        text += f", {'mostly ' if why[cause] < 0.9 * summary.idle_ns else ''}{cause}"
        data_ns = why[_CAUSES["data_ns"]]
        if data_ns > _PART * summary.idle_ns and cause != _CAUSES["data_ns"]:
            text += f", {format_ns(data_ns)} {_CAUSES['data_ns']}"
    exposed = parts.exposed_communication_ns
    if exposed:
        text += f"{_SEPARATOR}communication not hidden {format_share(exposed / idle.span_ns)}"
    elif not parts.overlapped_communication_ns:
        text += f"{_SEPARATOR}no communication"
    if parts.exposed_copy_ns > _PART * idle.span_ns:
        text += f"{_SEPARATOR}copies and fills alone {format_share(parts.exposed_copy_ns / idle.span_ns)}"
    return text


def _work(summary: Summary) -> Iterator[str]:
    work = summary.work
    if work is None:
        if summary.has_trace:
            yield "no GPU work was recorded (no GPU, or no CUDA), so there are no kernel times"
        return
    whole = work.kernel_time_ns or 1
    names = "matmul + attention" if work.by_category.get("attention") else "matmul"
    kind = "kernel time" if work.measure == "gpu-kernel" else "operator time"
    each = format_ns(summary.per_step(work.kernel_time_ns))
    peak = ""
    if work.peak_share is not None and work.product_ns:
        dtype = f"{summary.head.dtype} " if summary.head.dtype else ""
        peak = f", at {format_share(work.peak_share)} of {dtype}peak"
    elif work.uncounted is not None and work.measure == "gpu-kernel":
        peak = f" (% of peak: {work.uncounted})"
    yield f"{names} {format_share(work.product_ns / whole)} of {each} of {kind}{_of_each(summary.head)}{peak}"
    others = {
        "small kernels": work.small_ns,
        "optimizer": work.optimizer_ns,
        "communication": work.communication_ns,
        "whole CUDA graphs": work.graph_ns,
    }
    for name, time_ns in sorted(others.items(), key=lambda item: -item[1]):
        if time_ns > _PART * whole:
            yield f"{name} {format_share(time_ns / whole)}"


def _of_each(head: Head) -> str:
    """Return whose the average of a step is, where several GPUs or ranks make one."""
    if head.gpu_count > 1:
        return " per GPU"
    return " per rank" if head.rank_count > 1 else ""


def _modules(summary: Summary) -> Iterator[str]:
    """Yield the module that the time goes to, with what it does, then what else holds much of the time."""
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
            name = shorten(row.module.removeprefix(f"{row.parent}."), _NAME_WIDTH)
            yield f"{'in it' if within else 'beside it'} {name} {format_ns(summary.per_step(row.total_ns))}"


def _module_path(module: ModuleTime) -> str:
    """Return a module's name, after that of the one around it unless its own begins with that."""
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


def _memory(summary: Summary) -> Iterator[str]:
    memory = summary.memory
    if memory is None:
        return
    text = f"peak {format_bytes(memory.peak_bytes)}" + ("" if memory.exact else " or more")
    text += f" in {memory.phase}" if memory.phase else ""
    whole = memory.peak_bytes or 1
    shown = sorted(memory.by_category.items(), key=lambda item: -item[1])
    parts = [
        f"{category} {format_share(size / whole)}{_holders(memory.modules) if category == 'activations' else ''}"
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


def _holders(modules: Sequence[PartRow]) -> str:
    """Return the modules that hold the most activations: those in the repeated blocks, and others of the model."""
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
    named = [f"{shorten(row.name, _NAME_WIDTH)} {format_bytes(row.categories['activations'])}" for row in rows[:3]]
    return f" ({', '.join(named)})" if named else ""


def _ranks(summary: Summary) -> Iterator[str]:
    if summary.compared is not None:
        from profkit.report.commands.late_rank import describe_verdict  # few captures are of several ranks

        yield describe_verdict(summary.compared)[0]
    own = [f"rank {row.rank} {format_ns(summary.per_step(row.own_ns) * len(summary.ranks))}" for row in summary.ranks]
    more = [f"{len(own) - _MOST_RANKS} more"] if len(own) > _MOST_RANKS else []
    if own:
        yield f"own kernels a step: {', '.join(own[:_MOST_RANKS] + more)}"


def _tries(summary: Summary, result: AdviceResult, *, with_proof: bool) -> Iterator[tuple[str, str]]:
    if not result.tries:
        yield from [("Try", result.nothing)] if result.nothing is not None else []
        return
    together = describe_together(summary, result)
    yield from [("Try", together)] if together else []
    for number, advice in enumerate(result.tries, 1):
        parts = [f"{number} {advice.cause}", name_place(advice), advice.change, *describe_effects(summary, advice)]
        parts += [f"costs {advice.costs}"] if advice.costs is not None else []
        yield "Try", _SEPARATOR.join(filter(None, parts))
    if with_proof:
        proofs = dict.fromkeys(advice.proof for advice in result.tries)
        commands = re.sub(r"\bRUN\b", lambda _: shlex.quote(summary.run), _SEPARATOR.join(proofs))
        meaning = " (NEW is recorded with the change)" if "NEW" in commands else ""
        yield "", f"proof: {commands}{meaning}"


def _missing(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.missing:
        command = shlex.join(_words(summary.head))
        yield "Lacks", f"{' and '.join(summary.missing)}: `profkit run -- {command}` records them"


def _closed(summary: Summary) -> Iterator[tuple[str, str]]:
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
    text = f"{', '.join(texts)}: {'; '.join(open_ends) or 'every one in a named line'}"
    if summary.memory is not None and summary.memory.agrees:
        text += f"{_SEPARATOR}PyTorch's own peaks, recorded by the run, agree to the byte"
    yield "Closed", text


def _more(summary: Summary) -> Iterator[tuple[str, str]]:
    run = shlex.quote(summary.run)
    commands = [f"profkit report {run}"] if summary.has_trace or summary.memory is not None else []
    if summary.gpu is not None:
        commands += [f"profkit efficiency {run}", f"profkit kernels {run}"]
    elif summary.work is not None:
        commands += [f"profkit kernels {run}", f"profkit ranges {run}"]
    elif summary.has_trace:
        commands += [f"profkit ranges {run}"]
    if summary.memory is not None:
        commands.append(f"profkit memory {run}" + (" --at oom" if summary.memory.failure is not None else ""))
    if commands:
        yield "More", _SEPARATOR.join(commands)


def _flatten(data: Any, key: str = "") -> Iterator[dict[str, Any]]:
    if isinstance(data, dict | list | tuple):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _flatten(value, f"{key}.{name}" if key else str(name))
    else:
        yield {"figure": key, "value": data}
