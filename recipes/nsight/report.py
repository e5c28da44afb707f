"""What nsight_questions says: the answers in short, then in a sentence a cell, with pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from profkit.report.formats import render_markdown
from recipes.common.recipe import OK, Report, Row
from recipes.common.tables import build_pivot
from recipes.nsight.answers import find_answers, profiler_name, summarize
from recipes.nsight.cells import INFERENCE, TRAIN
from recipes.nsight.pictures import draw_ratios, draw_shares

QUESTIONS = {
    "a": "Do forward and backward take as long by the profiler as by Python's clock?",
    "b": "Which kernel has the most time in forward, how often is it called, and is it the same with backward?",
    "c": "Which kernels other than matrix products matter in forward?",
    "d": "What share have matrix products in inference and in a training step, and what grew?",
    "e": "What does a softmax take against the two matrix products around it, in time and in FLOPs?",
}

_NONE = "Not measured."

TABLES = {
    "a": [
        ("forward_ratio", TRAIN, "`forward` of training, recorded over unprofiled"),
        ("backward_ratio", TRAIN, "`backward` of training, recorded over unprofiled"),
    ],
    "b": [("top_calls", TRAIN, "Calls a forward of the one with the most time")],
    "c": [("gemm_forward_share", TRAIN, "Share of matrix products in forward")],
    "d": [
        ("gemm_step_share", INFERENCE, "Share of matrix products in inference"),
        ("gemm_step_share", TRAIN, "Share of matrix products in a training step"),
    ],
    "e": [("softmax_ratio", TRAIN, "A softmax's time over that of the scores before it")],
}
"""Of each question the columns shown by size and context: column, passes, title."""


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Return the answers to the five questions, those of a capture that failed its self-check left out."""
    setting, alike = choose_alike(rows)
    answered = [row for row in rows if row["status"] == OK]
    compared = [row for row in alike if row["status"] == OK]
    sections = [f"## In short{setting}", _listed(summarize(compared)) or _NONE]
    if answered:
        sections.append("The commands are for the directory of results. Its captures were made by:")
        sections.append(_listed(f"`{command}`" for command in dict.fromkeys(str(row["made_by"]) for row in answered)))
    for letter, sentences in find_answers(answered).items():
        sections += [f"## ({letter}) {QUESTIONS[letter]}", *_tables(letter, alike), _listed(sentences) or _NONE]
    sections += ["## What the captures warn of", _listed(_warnings(rows)) or "Nothing."]
    return Report("\n\n".join(sections), {"ratios.png": draw_ratios(compared), "shares.png": draw_shares(compared)})


def _tables(letter: str, rows: Sequence[Row]) -> Iterator[str]:
    for key, passes, title in TABLES[letter]:
        some = [row for row in rows if row["passes"] == passes]
        if any(row.get(key) is not None for row in some):
            yield f"{title}:\n\n{render_markdown(build_pivot(some, 'context', ['size'], key))}"


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what profkit doubts about each capture: its times, its GPU, and what its self-check found."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for key in ("recorder_warnings", "self_check_warnings"):
            found.setdefault(str(row.get("capture")), []).extend(cast("list[str]", row.get(key) or []))
    for capture, messages in found.items():
        yield from (f"`{capture}`: {message}" for message in dict.fromkeys(messages))


def choose_alike(rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Return the rows of the batch, steps and profiler that most have, and which these are: others do not compare."""
    settings = Counter((row["batch"], row["steps"], row["profiler"]) for row in rows)
    if not settings:
        return "", []
    chosen = settings.most_common(1)[0][0]
    alike = [row for row in rows if (row["batch"], row["steps"], row["profiler"]) == chosen]
    return f": batch {chosen[0]}, {chosen[1]} steps recorded by {profiler_name(alike[0])}", alike


def _listed(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
