"""What nsight_questions says: the answers in short, the pictures, then a section a question with its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from profkit.report.units import format_count
from recipes.common.recipe import OK, Report, Row
from recipes.common.tables import listed
from recipes.nsight.attention import answer_attention
from recipes.nsight.commands import find_origins
from recipes.nsight.other_kernels import answer_others
from recipes.nsight.pictures import draw_ratios, draw_shares
from recipes.nsight.shares import answer_shares
from recipes.nsight.times import answer_times
from recipes.nsight.top_kernels import answer_top
from recipes.nsight.words import Answer, Measured, profiler_name

QUESTIONS: Mapping[str, tuple[str, Callable[[Sequence[Measured]], Answer]]] = {
    "a": ("Do forward and backward take as long by the profiler as by Python's clock?", answer_times),
    "b": (
        "Which kernel has the most time in forward, how often is it called, and is it the same with backward?",
        answer_top,
    ),
    "c": ("Which kernels other than matrix products matter in forward?", answer_others),
    "d": ("What share have matrix products in inference and in a training step, and what grew?", answer_shares),
    "e": (
        "What does a softmax take against the two matrix products around it, in time and in FLOPs?",
        answer_attention,
    ),
}

_NONE = "Not measured."
_NO_WARNING = "Nothing. Times that are uneven within one phase are marked in (a)."
_RATIOS, _SHARES = "ratios.png", "shares.png"


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Return the answers to the five questions, those of a capture that failed its self-check left out."""
    setting, alike = choose_alike(rows)
    compared = [row for row in alike if row["status"] == OK]
    answers = {letter: answer(alike if letter == "a" else compared) for letter, (_, answer) in QUESTIONS.items()}
    short = [f"({letter}) {line}" for letter, answer in answers.items() for line in answer.short]
    sections = [f"## In short{setting}", listed(short) or _NONE, *_left_out(rows, alike)]
    if compared:
        sections += [f"![Times with the profiler over those without]({_RATIOS})", f"![Shares of the time]({_SHARES})"]
        sections += [*_tell_captures(compared)]
    for letter, answer in answers.items():
        sections += [f"## ({letter}) {QUESTIONS[letter][0]}", *_section(answer)]
    sections += ["## What the captures warn of", listed(_warnings(rows)) or _NO_WARNING]
    return Report(sections, {_RATIOS: draw_ratios(compared), _SHARES: draw_shares(compared)})


def _section(answer: Answer) -> Iterator[str]:
    if not answer.blocks:
        yield _NONE
        return
    yield from answer.blocks
    yield "```sh\n" + "\n".join(answer.commands) + "\n```"


def _tell_captures(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how to make the captures that the commands read."""
    profiler = profiler_name(rows[0])
    yield (
        "The commands below are for the directory of results. CAPTURE is what this leaves there, of a SIZE and of "
        f"PASSES `train` or `forward` (inference), recorded by {profiler}; CONTEXT is one of its contexts."
    )
    yield "```sh\n" + "\n".join(find_origins(rows)) + "\n```"


def _left_out(rows: Sequence[Row], alike: Sequence[Row]) -> Iterator[str]:
    if len(rows) > len(alike):
        yield f"{format_count(len(rows) - len(alike), 'cell')} of another batch, steps or profiler: see the CSV."


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
