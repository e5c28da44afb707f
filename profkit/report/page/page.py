"""Put the head and the sections together: every figure is of the document or result that a command prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.self_check import SelfCheck
from profkit.analysis.trials import Trial, summarize_trials
from profkit.files import write_whole
from profkit.report import colours, make_visible
from profkit.report.commands.edits import build_trials_document, build_whatif_document, describe_trial, name_trial
from profkit.report.commands.efficiency import build_efficiency_document
from profkit.report.commands.kernels import build_kernels_document
from profkit.report.commands.ranks import build_ranks_document, describe_ranks
from profkit.report.commands.steps import clean_times_parts
from profkit.report.page import Results, Section, view_parts, without_folders
from profkit.report.page.modules import build_memory, build_modules
from profkit.report.page.step import build_answer, build_dots, build_lines, build_timeline, slice_median_step
from profkit.report.units import format_count, format_ns
from profkit.version import __version__

_SCRIPTS = {
    "modules": ("modules.js",),
    "timeline": ("timeline.js",),
    "memory": ("uplot.min.js", "memory_data.js", "memory_drawing.js", "memory.js", "memory_chosen.js"),
}
"""Sections with a script of their own."""

_MEMORY = "Memory over time"

_MOST_SIMULATED = 100_000
"""Events of the allocator: a page should not wait for longer histories to be simulated under each setting."""

_REVISION = 12

_ASSETS = files("profkit.report.page") / "assets"


def render_memory_page(
    capture: OpenedCapture, memory: DeviceMemory, result: MemoryResult, wanted: Filter | None = None
) -> str:
    """Return the page with the section of memory alone, for one device and its account, at any moment.

    ``capture`` is the snapshot and the run that it lies in, for the head; its trace is not shown. Allocations that are
    not ``wanted`` are one in the chart.
    """
    command = f"profkit memory {without_folders(str(capture.path))}{_rank_words(capture, result)}"
    content = build_memory(memory, result, wanted)
    section = Section("memory", _MEMORY, command, content, findings=result.warnings)
    alone = OpenedCapture(capture.path, capture.run, None, None)
    title = f"{capture.path.resolve().name}, device {result.totals.device}: memory over time"
    return _render_sections(title, Results(alone), [section])


def write_page(path: Path, text: str) -> None:
    # A lone surrogate, which stands for an undecodable byte of a file's name, cannot be encoded.
    write_whole(path, text.encode("utf-8", "replace"))


def render_report(capture: OpenedCapture) -> str:
    run = Results(capture)
    sections = [
        Section("lines", "Every line of the summary", f"profkit summary {run.name} --all", {"lines": build_lines(run)}),
        *_step_sections(run),
        *_trial_sections(run),
        *_rank_sections(run),
        *_module_sections(run),
        *_memory_sections(run),
        *_kernel_sections(run),
        _trust_section(run),
    ]
    title = f"{capture.path.resolve().name}: profkit report"
    return _render_sections(title, run, sections, answer=build_answer(run))


def render_first_screen(capture: OpenedCapture) -> str:
    """Return a page that holds no more than the first screen of `render_report`."""
    run = Results(capture)
    return _render_sections(f"{capture.path.resolve().name}: profkit summary", run, [], answer=build_answer(run))


def _render_sections(
    title: str, run: Results, sections: Sequence[Section], *, answer: Mapping[str, Any] | None = None
) -> str:
    page: str = (
        _environment()
        .get_template("page.html")
        .render(
            title=make_visible(title),
            head=_head(run, sections),
            answer=answer,
            sections=sections,
            is_alone=answer is None,
            colours=colours.STEP,
            version=__version__,
            asset=lambda name: Markup(_read(name).strip()),
            scripts=_SCRIPTS,
            shown=[section.name for section in sections],
        )
    )
    return page


def _head(run: Results, sections: Sequence[Section]) -> dict[str, Any]:
    """Never the environment, the host or the user."""
    trace, manifest = run.capture.trace, run.capture.manifest
    findings = [
        *run.summary.findings,
        *(() if trace is None else trace.self_check.findings),
        *(finding for section in sections for finding in section.findings),
    ]
    cautions = {finding.message: finding.verdict for finding in findings if finding.verdict != "note"}
    if run.summary.head.ending is not None:
        cautions[f"this run is {manifest.status}: {run.summary.head.ending}"] = "warning"
    command = shlex.join(map(without_folders, manifest.argv)) if manifest.argv else manifest.target
    return {
        "command": make_visible(command),
        "facts": list(_facts(run)),
        "failed": [make_visible(message) for message, verdict in cautions.items() if verdict == "failed"],
        "cautions": [make_visible(message) for message, verdict in cautions.items() if verdict != "failed"],
    }


def _facts(run: Results) -> Iterator[tuple[str, str]]:
    head = run.summary.head
    known = {
        "GPU": f"{max(head.gpu_count, 1)} × {head.gpu}" if head.gpu else "",
        "ranks": str(head.rank_count) if head.rank_count > 1 else "",
        "torch": head.torch or "",
        "precision": head.precision or "",
        "recorded": "" if head.steps is None else format_count(head.steps, "step"),
        "git revision": (run.capture.manifest.git_revision or "")[:_REVISION],
        "date": _date(run.capture.manifest.started_utc),
    }
    yield from ((name, value) for name, value in known.items() if value)


def _date(started_utc: str | None) -> str:
    try:
        return f"{datetime.fromisoformat(started_utc or ''):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return ""


def _step_sections(run: Results) -> Iterator[Section]:
    trace, result = run.capture.trace, run.efficiency
    if trace is None or result is None:
        return
    document = build_efficiency_document(result, (), compared=run.summary.compared, limits=trace.step_limits)
    dots = list(build_dots(trace.account, run.capture.manifest)) if result.steps else []
    content = {"dots": dots, "parts": view_parts(document.parts)}
    yield Section("step", "One step", f"profkit efficiency {run.name}", content, findings=result.warnings)
    step = slice_median_step(trace.attribution, result.steps)
    if step is not None:
        command = f"profkit kernels {run.name} --range {shlex.quote(step.name)} --instance {step.instance}"
        yield Section("timeline", "Timeline of one step", command, build_timeline(trace.attribution, step))


def _trial_sections(run: Results) -> Iterator[Section]:
    calls = () if run.capture.run is None else run.capture.run.trials
    if calls and calls[-1].processes:
        trials = summarize_trials(calls[-1])
        document = build_trials_document(run.name, calls[-1].plan, trials)
        content = {"bars": list(_draw_trials(trials)), "parts": view_parts(document.parts)}
        yield Section("trials", "Edits that were tried", f"profkit try --report {run.name}", content)


def _draw_trials(trials: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    timed = [(trial, trial.step_ns) for trial in trials if trial.step_ns is not None]
    scale = 1000 / max((step_ns + (trial.half_ns or 0) for trial, step_ns in timed), default=1)
    for trial, step_ns in timed:
        ends = (None, None) if trial.half_ns is None else (step_ns - trial.half_ns, step_ns + trial.half_ns)
        low, high = (None if end is None else round(max(0, end) * scale, 1) for end in ends)
        text = format_ns(step_ns) + (f", {describe_trial(trial)}" if trial.edits else "")
        yield {"name": name_trial(trial), "width": round(step_ns * scale, 1), "low": low, "high": high, "text": text}


def _rank_sections(run: Results) -> Iterator[Section]:
    result = run.summary.compared
    if result is None:
        return
    document = build_ranks_document(result, run.name)
    content = {
        "lines": describe_ranks(result),
        "parts": view_parts(document.parts[1:]),
        "lost": [without_folders(make_visible(finding.message)) for finding in document.findings],
    }
    yield Section("ranks", "Ranks", f"profkit ranks {run.name}", content)


def _module_sections(run: Results) -> Iterator[Section]:
    if run.summary.modules:
        yield Section("modules", "Modules", f"profkit summary {run.name} --format json", build_modules(run))


def _memory_sections(run: Results) -> Iterator[Section]:
    opened = run.capture.snapshot
    if opened is None or run.memory is None:
        return
    device = opened.device()
    rank = _rank_words(run.capture, run.memory)
    content = build_memory(device, run.memory)
    yield Section("memory", _MEMORY, f"profkit memory {run.name}{rank}", content, findings=run.memory.warnings)
    if 0 < len(device.device.events) <= _MOST_SIMULATED:
        document = build_whatif_document(opened.whatif())
        parts, findings = {"parts": view_parts(document.parts)}, tuple(document.findings)
        yield Section(
            "whatif", "Memory under other settings", f"profkit whatif {run.name}{rank}", parts, findings=findings
        )


def _kernel_sections(run: Results) -> Iterator[Section]:
    trace = run.capture.trace
    if run.kernels is None or trace is None:
        return
    phases = trace.phases()
    document = build_kernels_document(
        run.kernels, (), phases={"": phases} if phases else None, compared=run.summary.compared
    )
    content = {"parts": view_parts(document.parts)}
    yield Section("kernels", "Kernels", f"profkit kernels {run.name}", content, findings=run.kernels.warnings)


def _trust_section(run: Results) -> Section:
    check = None if run.capture.trace is None else run.capture.trace.self_check
    content = {
        "verdict": "" if check is None else _verdict_line(check),
        "findings": [] if check is None else [(finding.verdict, finding.message) for finding in check.findings],
        "costs": view_parts(clean_times_parts(run.capture.manifest)),
    }
    return Section("trust", "How far to trust this", f"profkit kernels {run.name} --strict", content)


def _verdict_line(check: SelfCheck) -> str:
    failed, warned = len(check.of("failed")), len(check.of("warning"))
    if failed:
        return f"self-check FAILED ({format_count(failed, 'check')})"
    return "self-check passed" + (f" with {format_count(warned, 'warning')}" if warned else "")


def _rank_words(capture: OpenedCapture, result: MemoryResult) -> str:
    ranks = {} if capture.run is None else capture.run.snapshots
    rank = next((number for number, file in ranks.items() if str(file) == result.snapshot), None)
    named = "" if rank is None or len(ranks) < 2 else f" --rank {rank}"
    return f"{named} --device {result.totals.device}" if result.others else named


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finish,
    )
    environment.filters["code"] = _mark_code
    return environment


def _mark_code(text: str) -> Markup:
    escaped = str(escape(without_folders(text)))  # re.sub joins the parts of a Markup as one, which escapes them again
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", escaped))


def _finish(value: object) -> object:
    return without_folders(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
