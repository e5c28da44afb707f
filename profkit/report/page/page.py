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

from profkit.analysis.causes.advice import find_advice
from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.memory.bins import Stacking
from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.result import MemoryResult
from profkit.analysis.opened import OpenedCapture
from profkit.files import write_whole
from profkit.report.commands.clean_times import clean_times_parts
from profkit.report.commands.kernels import build_kernels_document
from profkit.report.commands.summary import build_summary_document
from profkit.report.commands.whatif import build_whatif_document
from profkit.report.page.markup import Section, view_parts, without_folders
from profkit.report.page.memory import build_memory
from profkit.report.page.modules import build_modules
from profkit.report.page.ranks import build_ranks
from profkit.report.page.results import Results, build_comparison, compare_runs
from profkit.report.page.step import build_step_bar, build_timeline, slice_median_step
from profkit.report.page.verdict import build_advice, build_verdict
from profkit.report.text import make_visible
from profkit.report.units import format_count
from profkit.version import __version__

_SCRIPTS = {
    "modules": ("modules.js",),
    "timeline": ("timeline.js",),
    "memory": ("uplot.min.js", "memory_data.js", "memory_drawing.js", "memory.js"),
}
"""Sections with a script of their own."""

_MEMORY = "Memory over time"
_WITHOUT_MEMORY = "Memory was not recorded. `profkit run --memory -- python train.py` records it."
_WITHOUT_STEPS = "No step was recorded: name the ranges around steps `step N`, or record with `profkit run`."
_WITHOUT_MODULES = "No module was recorded: `profkit run -- python train.py` opens a range for each."
_WITHOUT_ADVICE = "profkit has nothing to propose: none of its rules found a change with a known effect."
_WITHOUT_GPU = "No GPU work was recorded. `profkit run --nsys -- python train.py` on a machine with a GPU records it."

_MOST_SIMULATED = 100_000
"""Events of the allocator: a page should not wait for longer histories to be simulated under each setting."""

_NOT_RECORDED = "not recorded"
_REVISION = 12

_ASSETS = files("profkit.report.page") / "assets"


def render_memory_page(
    capture: OpenedCapture,
    memory: DeviceMemory,
    result: MemoryResult,
    *,
    by: Stacking = "category",
    wanted: Filter | None = None,
) -> str:
    """Return the page with the section of memory alone, for one device.

    Args:
        capture: the snapshot and the run that it lies in, for the head; its trace is not shown.
        memory: the device.
        result: its account, at any moment.
        by: what is stacked at first; the reader can change it.
        wanted: which allocations the chart shows; the others are added up as one.
    """
    command = f"profkit memory {without_folders(str(capture.path))}{_rank_words(capture, result)}"
    content = build_memory(memory, result, by=by, wanted=wanted)
    section = Section("memory", _MEMORY, command, content, findings=result.warnings)
    alone = OpenedCapture(capture.path, capture.run, None, None)
    title = f"{capture.path.resolve().name}, device {result.totals.device}: memory over time"
    return _render_sections(title, Results(alone), [section])


def write_page(path: Path, text: str) -> None:
    """Write a page as UTF-8.

    Raises:
        OSError: it cannot be written.
    """
    # A lone surrogate, which stands for an undecodable byte of a file's name, cannot be encoded.
    write_whole(path, text.encode("utf-8", "replace"))


def render_report(capture: OpenedCapture, *, against: OpenedCapture | None = None, source: Path | None = None) -> str:
    """Return the page of a capture as text.

    Args:
        capture: what is shown.
        against: an earlier run, to compare with.
        source: the folder whose source lines stand next to the allocations that they made; by default none do.

    Raises:
        UsageError: the earlier run has nothing that could be compared.
    """
    run = Results(capture)
    before = None if against is None else Results(against)
    ten_lines = build_summary_document(run.summary, find_advice(capture, run.summary), with_all=True)
    compared = [] if before is None else [_comparison_section(before, run)]
    headline = "".join(section.content["headline"] for section in compared)
    sections = [
        Section("verdict", "In short", f"profkit summary {run.name}", build_verdict(ten_lines, run.name, headline)),
        _step_section(run),
        *_rank_sections(run),
        _module_section(run, before),
        _timeline_section(run),
        _memory_section(run, source),
        _whatif_section(run),
        _kernel_section(run),
        _advice_section(run, list(ten_lines.data["advice"])),
        *compared,
        _trust_section(run),
    ]
    return _render_sections(f"{capture.path.resolve().name}: profkit report", run, sections)


def render_first_screen(capture: OpenedCapture) -> str:
    """Return a page that holds no more than the first screen of `render_report`."""
    run = Results(capture)
    document = build_summary_document(run.summary, find_advice(capture, run.summary))
    verdict = Section("verdict", "In short", f"profkit summary {run.name}", build_verdict(document, run.name))
    return _render_sections(f"{capture.path.resolve().name}: profkit summary", run, [verdict])


def _render_sections(title: str, run: Results, sections: Sequence[Section]) -> str:
    page: str = (
        _environment()
        .get_template("page.html")
        .render(
            title=make_visible(title),
            head=_head(run, sections),
            sections=sections,
            version=__version__,
            asset=_asset,
            scripts=_SCRIPTS,
            shown=[section.name for section in sections],
        )
    )
    return page


def _head(run: Results, sections: Sequence[Section]) -> dict[str, Any]:
    """Return the command, the facts as pairs of name and value, and the cautions, each once, failures first.

    Never the environment, the host or the user.
    """
    trace, manifest = run.capture.trace, run.manifest
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
        "chips": sorted(
            ((verdict, make_visible(message)) for message, verdict in cautions.items()),
            key=lambda caution: caution[0] != "failed",
        ),
    }


def _facts(run: Results) -> Iterator[tuple[str, str]]:
    """Yield what is known of the run; what a run should say and does not is said to be missing."""
    head = run.summary.head
    yield "GPU", f"{max(head.gpu_count, 1)} × {head.gpu}" if head.gpu else _NOT_RECORDED
    if head.rank_count > 1:
        yield "ranks", str(head.rank_count)
    yield "torch", head.torch or _NOT_RECORDED
    yield "precision", head.precision or _NOT_RECORDED
    if head.steps is not None:
        yield "recorded", format_count(head.steps, "step")
    yield "git revision", (run.manifest.git_revision or _NOT_RECORDED)[:_REVISION]
    yield "date", _date(run.manifest.started_utc)


def _date(started_utc: str | None) -> str:
    try:
        return f"{datetime.fromisoformat(started_utc or ''):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return _NOT_RECORDED


def _comparison_section(before: Results, run: Results) -> Section:
    command = f"profkit compare {before.name} {run.name}"
    result, cautions = compare_runs(before.capture, run.capture)
    return Section("compare", f"Against {before.name}", command, build_comparison(result), findings=tuple(cautions))


def _step_section(run: Results) -> Section:
    title, command, result = "One step", f"profkit efficiency {run.name}", run.efficiency
    if result is None or run.capture.trace is None:
        return Section("step", title, command, missing=_WITHOUT_GPU)
    if not result.steps:
        return Section("step", title, command, missing=_WITHOUT_STEPS, findings=result.warnings)
    return Section(
        "step",
        title,
        command,
        build_step_bar(run.capture.trace.account, result.steps, run.manifest),
        findings=result.warnings,
    )


def _rank_sections(run: Results) -> list[Section]:
    if run.ranks is None:
        return []
    return [Section("ranks", "Ranks", f"profkit ranks {run.name}", build_ranks(run.ranks, run.name))]


def _module_section(run: Results, before: Results | None) -> Section:
    title, command = "Modules", f"profkit summary {run.name} --format json"
    if not run.summary.modules and run.memory is None:
        return Section("modules", title, command, missing=_WITHOUT_MODULES)
    return Section("modules", title, command, build_modules(run, before))


def _timeline_section(run: Results) -> Section:
    title, trace, result = "Timeline of one step", run.capture.trace, run.efficiency
    step = None if trace is None or result is None else slice_median_step(trace.attribution, result.steps)
    if trace is None or step is None:
        missing = _WITHOUT_GPU if result is None else _WITHOUT_STEPS
        return Section("timeline", title, f"profkit ranges {run.name}", missing=missing)
    command = f"profkit kernels {run.name} --range {shlex.quote(step.name)} --instance {step.instance}"
    return Section("timeline", title, command, build_timeline(trace.attribution, step))


def _memory_section(run: Results, source: Path | None) -> Section:
    if run.device is None or run.memory is None:
        return Section("memory", _MEMORY, f"profkit memory {run.name}", missing=_WITHOUT_MEMORY)
    command = f"profkit memory {run.name}{_rank_words(run.capture, run.memory)}"
    content = build_memory(run.device, run.memory, source=source)
    return Section("memory", _MEMORY, command, content, findings=run.memory.warnings)


def _whatif_section(run: Results) -> Section:
    title, command, opened = "Memory under other settings", f"profkit whatif {run.name}", run.capture.snapshot
    if opened is None or run.memory is None or run.device is None:
        return Section("whatif", title, command, missing=_WITHOUT_MEMORY)
    command += _rank_words(run.capture, run.memory)
    if not 0 < len(run.device.device.events) <= _MOST_SIMULATED:
        return Section("whatif", title, command, missing=f"Not simulated here. `{command}` does it.")
    document = build_whatif_document(opened.whatif())
    return Section("whatif", title, command, {"parts": view_parts(document.parts)}, findings=tuple(document.findings))


def _kernel_section(run: Results) -> Section:
    title, command, trace = "Kernels", f"profkit kernels {run.name}", run.capture.trace
    if run.kernels is None or trace is None:
        return Section("kernels", title, command, missing=_WITHOUT_GPU)
    phases = trace.phases()
    document = build_kernels_document(run.kernels, (), phases={"": phases} if phases else None, compared=run.ranks)
    content = {"parts": view_parts(document.parts)}
    return Section("kernels", title, command, content, findings=run.kernels.warnings)


def _advice_section(run: Results, advice: Sequence[Mapping[str, Any]]) -> Section:
    title, command = "What would help", f"profkit summary {run.name}"
    if not advice:
        return Section("advice", title, command, missing=_WITHOUT_ADVICE)
    return Section("advice", title, command, build_advice(advice, run.name))


def _trust_section(run: Results) -> Section:
    check = None if run.capture.trace is None else run.capture.trace.self_check
    content = {
        "verdict": "" if check is None else _verdict_line(check),
        "findings": [] if check is None else [(finding.verdict, finding.message) for finding in check.findings],
        "costs": view_parts(clean_times_parts(run.manifest)),
        "missing": [{"what": what, "command": command} for what, command in _find_missing(run)],
    }
    return Section("trust", "How far to trust this", f"profkit kernels {run.name} --strict", content)


def _find_missing(run: Results) -> Iterator[tuple[str, str]]:
    """Yield what was not recorded and the command that records it."""
    capture, again = run.capture, run.record_again
    directory, trace = capture.run, capture.trace
    if trace is None:
        yield "time: kernels, ranges, steps", again("--nsys")
    if capture.snapshot is None:
        yield "memory", again("--memory")
    if run.manifest.unprofiled is None:
        yield "step times without a profiler", again("--nsys")
    if trace is not None and (directory is None or directory.work is None):
        yield "FLOPs of each module", again("--flops")
    if trace is not None and (directory is None or directory.ceilings is None):
        yield "what this GPU reaches at most (a datasheet is used if one is known)", "profkit ceilings"


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
    """Return the templates' environment: every text is escaped and loses the folders of this machine."""
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
    """Return a sentence in which what stands between backticks, a command mostly, is set as code."""
    escaped = str(escape(without_folders(text)))  # re.sub joins the parts of a Markup as one, which escapes them again
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", escaped))


def _finish(value: object) -> object:
    return without_folders(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _asset(name: str) -> Markup:
    return Markup(_read(name).strip())
