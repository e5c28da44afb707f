"""``profkit summary`` and the end of a run: the answer, the step as a tree, what to try, and how sure that is."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from profkit.analysis.causes.advice import AdviceResult
from profkit.analysis.summary import RUN_WARNING, Head, Summary
from profkit.report.commands.answer import (
    ROOM,
    SEPARATOR,
    TWO_LINES,
    describe_answer,
    describe_together,
    describe_try,
    draw_tree,
    join_parts,
)
from profkit.report.commands.step_replay import describe_limits
from profkit.report.commands.steps import describe_line
from profkit.report.commands.summary_lines import (
    describe_closing,
    describe_gpu,
    describe_memory,
    describe_modules,
    describe_step,
    describe_work,
    list_ranks,
)
from profkit.report.commands.trials import describe_trial, name_trial
from profkit.report.document import Column, Document, Labelled, Lines, Table, wrap, wrap_labelled
from profkit.report.units import TEXT, format_bytes, format_count

_SCHEMA = 2

Line = tuple[str, str]
"""A word and what stands behind it."""

_SCREENS = {100: 12, 80: 20}
"""How many lines the answer and what stands below it may take on a screen of so many columns."""

_ATTEMPTS = (
    (0.0, ()),
    (0.02, ("ends",)),
    (0.05, ("costs", "Tried", "Lacks")),
    (0.05, ("together",)),
    (0.1, ("command", "Care")),
    (0.1, ("MODULE",)),
    (0.2, ()),
    (0.2, ("RANKS", "WORK")),
    (1.0, ()),
    (1.0, ("Closed",)),
)
"""The attempts to fit a screen: the least share of a part of the step that has a row, and what else is left out."""

_MOST_TRIALS = 3
"""The trials of other edits than the Tries that have a line."""


def build_summary_document(
    summary: Summary, advice: AdviceResult, *, for_run: bool = False, with_all: bool = False
) -> Document:
    """Return the answer in one sentence, then the lines.

    Args:
        summary: their figures.
        advice: what to try, the largest effect first.
        for_run: leave out the warnings, which ``profkit run`` says itself.
        with_all: every line in full; else those that answer, each as long as a screen of 100 columns is wide.
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
    """Yield each line with its word; one of which nothing is known is empty."""
    join = SEPARATOR.join
    yield "STEP", join(describe_step(summary))
    yield from (("STEP", row) for row in (() if summary.tree is None else draw_tree(summary.tree)))
    yield "LIMIT", "" if summary.limits is None else describe_limits(summary.limits)
    yield "GPU", describe_gpu(summary)
    yield "WORK", join(describe_work(summary))
    yield "MODULE", join(describe_modules(summary))
    if summary.lines:
        yield "LINES", "Python spends, per step: " + "; ".join(map(describe_line, summary.lines))
    yield "MEMORY", join(describe_memory(summary))
    yield "RANKS", join(list_ranks(summary, ""))
    yield "Try", advice.nothing or ""
    yield from _tries_in_full(summary, advice)
    yield from _tried(advice)
    yield from (("Note", note) for note in advice.notes)
    yield from (("Care", message) for message in cares)
    yield from _missing(summary)
    yield "Closed", join(describe_closing(summary))


def _fit_screen(answer: str, summary: Summary, advice: AdviceResult, cares: Sequence[str]) -> list[Line]:
    """Return the lines that fit a screen below the answer: as few are left out as must be."""
    lines: list[Line] = []
    left_out: set[str] = set()
    for least_share, words in _ATTEMPTS:
        left_out |= {*words}
        tree = () if summary.tree is None else draw_tree(summary.tree, least_share)
        rows = [("STEP", row) for row in (_fit(describe_step(summary)), *tree)]
        short = [*rows, *_in_short(answer, summary, advice, cares, left_out)]
        lines = [(label, text) for label, text in short if text and label not in left_out]
        if all(_count_lines(answer, lines, width) <= most for width, most in _SCREENS.items()):
            break
    return lines


def _count_lines(answer: str, lines: Sequence[Line], width: int) -> int:
    texts = [wrap(answer, width), *wrap_labelled(Labelled(lines), width)]
    return sum(len(text.splitlines()) for text in texts)


def _in_short(
    answer: str, summary: Summary, advice: AdviceResult, cares: Sequence[str], left_out: Collection[str]
) -> Iterator[Line]:
    """Yield what stands below the tree, each line as long as a screen is wide if it can be; some are empty."""
    join = _cut if "ends" in left_out else _fit
    yield "WORK", _cut(describe_work(summary))
    yield "MODULE", _cut(describe_modules(summary))
    yield "MEMORY", _cut(describe_memory(summary))
    yield "RANKS", join(list_ranks(summary, answer))
    yield "Try", advice.nothing or ""
    yield from _tries(summary, advice, left_out)
    yield from _tried(advice)
    more = f" ({len(cares) - 1} more with --all)" if len(cares) > 1 else ""
    yield "Care", join(f"{care}{more}" for care in cares[:1])
    yield from _missing(summary)
    warnings = f"{format_count(len(cares), 'warning')} (--all)" if cares and "Care" in left_out else ""
    yield "Closed", join_parts(_fit(describe_closing(summary)), warnings)


def _cut(parts: Iterable[str]) -> str:
    """Return as many parts as a line has room for, the first one without its end if it must be."""
    return textwrap.shorten(_fit(parts), ROOM, placeholder=" … (--all)")


def _fit(parts: Iterable[str]) -> str:
    """Return as many parts as a line has room for, and at least the first."""
    text = ""
    for part in parts:
        longer = f"{text}{SEPARATOR}{part}" if text else part
        if text and len(longer) > ROOM:
            break
        text = longer
    return text


def _tries(summary: Summary, result: AdviceResult, left_out: Collection[str]) -> Iterator[Line]:
    """Yield the Tries in about a line each, the first one whole, and what measures them."""
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
        command = shlex.join(_words(summary.head))
        yield "Lacks", f"{' and '.join(summary.missing)}: `profkit run -- {command}` records them"


def _flatten(data: Any, key: str = "") -> Iterator[dict[str, Any]]:
    if isinstance(data, dict | list | tuple):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _flatten(value, f"{key}.{name}" if key else str(name))
    else:
        yield {"figure": key, "value": data}
