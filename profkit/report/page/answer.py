"""The first screen: the answer, four figures, the step as a bar, and what to try; then every line of the summary."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from profkit.analysis.causes.advice import Advice, AdviceResult
from profkit.analysis.summary import StepTree, Summary
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER
from profkit.report.colours import LIMITS
from profkit.report.commands.answer import (
    describe_after,
    describe_answer,
    describe_effects,
    describe_phases,
    describe_together,
    name_line,
    name_part,
    name_place,
)
from profkit.report.commands.summary import build_summary_document
from profkit.report.document import Labelled
from profkit.report.page.markup import Results, without_folders
from profkit.report.text import make_visible
from profkit.report.units import format_bytes, format_ns, format_share
from profkit.run.edits import parse_edits

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

_ELSEWHERE = ("Care", "Lacks", "Try")
"""Lines that stand at the head of the page, or under what was not recorded."""


def build_answer(run: Results) -> dict[str, Any]:
    """Return the first screen."""
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
    after = next(filter(None, map(describe_after, advice.tries)), "")
    if after:
        middle, _, reach = after.replace("about ", "≈ ").partition(" (")
        yield middle, "a step after the best change" + (f" ({reach}" if reach else "")


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
    """Yield the lanes of a step as it is and as it is expected after the first Try, on one scale.

    There are none where that Try is no edit, or nothing is expected.
    """
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
