"""What a run says first, in one sentence, and the step as a tree of what its time went to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from profkit.analysis.causes.advice import Advice, AdviceResult, find_advice
from profkit.analysis.causes.evidence import DRAINED_STEP, LATER_STEP, Interval
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.step_replay.limits import OUTSIDE, Limit
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import Kind, MemoryUse, StepPart, StepTree, Summary
from profkit.report import shorten
from profkit.report.commands.edits import describe_trial
from profkit.report.commands.steps import name_line, name_source
from profkit.report.units import NS_IN, format_bytes, format_ns, format_share

NAMES: dict[Kind, str] = {
    "data": "waiting for the next batch",
    Limit.PYTHON: "Python without the GPU",
    Limit.COMPUTING: "GPU computing",
    Limit.PREPARING: "Python preparing kernels",
    Limit.COMMUNICATING: "communication not hidden",
    Limit.WAITING: "waits for the GPU",
    Limit.COPYING: "copies and fills",
    Limit.ALLOCATING: "allocations from CUDA",
    "rest": "the rest",
}
_OUTSIDE_PHASES = "outside phases"
_PACES: dict[Kind, str] = {
    "data": "it waits for the next batch",
    Limit.PYTHON: "Python keeps the GPU waiting",
    Limit.COMPUTING: "the GPU sets the pace",
    Limit.PREPARING: "Python prepares kernels",
    Limit.COMMUNICATING: "it communicates, which computing does not hide",
    Limit.WAITING: "Python and the GPU wait for each other",
    Limit.COPYING: "the GPU copies or fills memory",
    Limit.ALLOCATING: "PyTorch allocates memory from CUDA and frees it",
}
ROOM = 92
"""A line's text on a screen of 100 columns, behind its word."""
SEPARATOR = " · "
_CALLED = re.compile(r"[\w.]+\.(\w+)\(\)")
_FURTHER = re.compile(r", (?:or|and) ")
"""Between the ways to make a change, or its parts: the first says what to do."""
TWO_LINES = 2 * ROOM - 16
"""Two such lines hold this much of a text that is wrapped."""
_NUMBERS = {2: "Both", 3: "All three"}
_MOST = 0.5
_SMALL_PHASE = 0.005
_LARGE_OUTSIDE = 0.05
"""What lies outside of all phases, such as a loss, is named from this share of the step."""
_FAR = 0.2
"""A mean that is longer than the typical step by more than this share of it is said beside it."""
_DECISIVE = 0.3
"""A change that saves this share of the step is the answer; what sets the pace need not be said beside it."""
_UNTRUSTED = "No answer: the capture failed its self-check, and none of its figures can be trusted."


def answer_capture(capture: OpenedCapture) -> str:
    """Return what `describe_answer` says of a run; empty of a file by itself, and of a run that recorded nothing."""
    if capture.run is None or (capture.trace is None and capture.snapshot is None):
        return ""
    summary = summarize_capture(capture)
    return describe_answer(summary, find_advice(capture, summary))


def describe_answer(summary: Summary, advice: AdviceResult) -> str:
    """Return in one sentence how long a step takes, why, and how long without that; else what is known instead."""
    if summary.has_failed:
        return _UNTRUSTED
    if summary.step_ns is None:
        return _describe_without_step(summary)
    of = "" if summary.head.iteration is None else f" ({summary.head.iteration})"
    step = f"A step{of} takes {format_ns(summary.step_ns)}"
    if not any(use.unprofiled_ns for use in summary.steps):
        step += " as recorded (its unprofiled time is unknown)"
    best = next(iter(advice.tries), None)
    if summary.later_step_ns is not None and (best is None or LATER_STEP not in best.evidence):
        step += f" (later ones {format_ns(summary.later_step_ns)})"
    late = describe_ranks(summary) if summary.compared and summary.compared.verdict.culprit else ""
    if best is None or best.other_step_ns is None:
        step += _describe_mean(summary)
    if late:
        return f"{step}: {late[:1].lower()}{late[1:]}."
    if best is not None and best.other_step_ns is not None:
        other = f"{format_ns(best.other_step_ns)} {name_other_step(best)}: {_describe_cause(best)}"
        return f"{step}, and {other}. Without that: {describe_after(best)}."
    if best is not None and best.effect_ns >= _DECISIVE * summary.step_ns and not best.changes_training:
        lost = f"{format_ns(best.effect_ns)} of it is lost: {_describe_cause(best)}"
        then = _name_change(best)
        return f"{step}; {lost}. {then[:1].upper()}{then[1:]}: {describe_after(best)}."
    if summary.tree is not None:
        step += f": {_describe_pace(summary, summary.tree, is_brief=best is not None)}"
    return f"{step}." if best is None else f"{step}. {_describe_best(best)}"


def _describe_mean(summary: Summary) -> str:
    """Return the mean step, where rare steps that come regularly make it far longer than the typical one."""
    rare, step_ns = summary.rare_steps, summary.step_ns or 0
    more_ns = 0 if rare is None or rare.every is None else rare.mean_longer_ns
    return f", and {format_ns(step_ns + more_ns)} on average" if more_ns > _FAR * step_ns else ""


def name_other_step(advice: Advice) -> str:
    """Return which step a Try makes shorter that is not the typical one, as the end of its time."""
    if DRAINED_STEP in advice.evidence:
        return "once the queue of its workers is empty"
    if LATER_STEP in advice.evidence:
        return "later on"
    return "on average of those seen" if "of_steps" in advice.evidence else "on average"


def _describe_cause(advice: Advice) -> str:
    place = name_place(advice)
    return f"{advice.short_cause} ({place})" if place else advice.short_cause


def _describe_best(advice: Advice) -> str:
    cause, after, then = _describe_cause(advice), describe_after(advice), _name_change(advice)
    is_code = "." in cause.split()[0]
    return (cause if is_code else f"{cause[:1].upper()}{cause[1:]}") + (f"; {then}: {after}." if after else ".")


def _name_change(advice: Advice) -> str:
    if advice.code == "batch":
        return "with a larger batch" if advice.changes_training else "with fewer and larger passes"
    return "without that"


def describe_after(advice: Advice) -> str:
    """Return the step without a cause: as `profkit try` measured it, else as predicted; empty if neither is known."""
    trial = advice.measured
    if trial is None or trial.step_ns is None or trial.change_ns is None:
        return "" if advice.after_ns is None else f"about {describe_interval(advice.after_ns)}{_samples_of([advice])}"
    spread = "" if trial.half_ns is None else f" ± {format_ns(trial.half_ns)}"
    return f"{format_ns(trial.step_ns)} (measured{spread}; {format_ns(trial.step_ns - trial.change_ns)} with it)"


def describe_together(summary: Summary, advice: AdviceResult) -> str:
    """Return what all Tries that change the step's time buy together; empty if there are not several."""
    if advice.together_ns is None or summary.step_ns is None:
        return ""
    count = sum(proposal.after_ns is not None for proposal in advice.tries)
    after = f"{describe_interval(advice.together_ns)}{_samples_of(advice.tries)}"
    now_ns = summary.later_part(summary.step_ns) * summary.step_ns
    return f"{_NUMBERS[count]}: {format_ns(now_ns)} → {after}"


def _samples_of(tries: Sequence[Advice]) -> str:
    """Return of which samples a time is, where a step would have more: of as many as a step has today."""
    return " for as many samples" if any((advice.edit or "").startswith("batch:") for advice in tries) else ""


def name_place(advice: Advice) -> str:
    if advice.line is not None:
        return name_source(advice.line)
    return advice.module or ""


def describe_try(number: int, advice: Advice, room: int | None, *, is_cut: bool = False) -> str:
    """Return a Try as whole as it fits ``room`` characters.

    Left out for that are the details of its cause, its costs, its module and function. It is longer where even the
    least does not fit. One that ``is_cut`` has no more than the least, and where that is longer than a line of a screen
    the method alone of what is called, and the first of several ways to make the change. No sentence is cut.
    """
    place, effects = name_place(advice), list(describe_effects(advice))
    costs = f"costs {advice.costs}" if advice.costs is not None else ""
    whole = join_parts(f"{number} {advice.cause}", place, advice.change, *effects, costs)
    if room is None or len(whole) <= room:
        return whole
    short = join_parts(f"{number} {advice.short_cause}", place, advice.change, *effects)
    line = "" if advice.line is None else f"{Path(advice.line.file).name}:{advice.line.line}"
    least = join_parts(f"{number} {advice.short_cause}", line, advice.change, *effects)
    if is_cut and len(least) > ROOM:
        cause = _CALLED.sub(r".\1()", advice.short_cause)
        return join_parts(f"{number} {cause}", line, _FURTHER.split(advice.change)[0], *effects)
    room = room if len(least) <= ROOM else TWO_LINES
    return next((text for text in (whole, join_parts(short, costs), short) if len(text) <= room), least)


def join_parts(*parts: str) -> str:
    return SEPARATOR.join(filter(None, parts))


def describe_effects(advice: Advice) -> Iterator[str]:
    """Yield what a change does: the step after it, what was measured of it, the memory that it saves."""
    if advice.after_ns is not None:
        before = "" if advice.other_step_ns is None else f"{format_ns(advice.other_step_ns)} "
        yield f"{before}→ {describe_interval(advice.after_ns)}{_samples_of([advice])}"
    if advice.measured is not None:
        yield describe_trial(advice.measured)
    if advice.saves_bytes is not None:
        yield f"memory −{format_bytes(advice.saves_bytes.expected)}"


def describe_interval(after: Interval) -> str:
    """Return a predicted time with its least and most, as exactly as they are apart: ``93 ms (90 to 97)``."""
    expected, unit = format_ns(after.expected).split()
    divisor = NS_IN[unit]
    width = (after.high - after.low) / divisor
    decimals = next((digits for digits, least in enumerate((5, 0.5, 0.05)) if width >= least), 3)
    low, middle, high = (f"{time_ns / divisor:,.{decimals}f}" for time_ns in (after.low, after.expected, after.high))
    return f"{middle} {unit} ({low} to {high})" if low != high else f"{expected} {unit}"


def _describe_without_step(summary: Summary) -> str:
    memory = "" if summary.memory is None else f"Memory peaks at {_describe_peak(summary.memory)}."
    if not summary.has_trace:
        verdict = describe_ranks(summary)
        return memory or (
            f"{verdict}." if verdict else "No trace was recorded." if summary.lines else "Nothing was recorded."
        )
    return " ".join(filter(None, ["No step is known: times are of the whole recording.", memory]))


def _describe_peak(memory: MemoryUse) -> str:
    phase = f" in {memory.phase}" if memory.phase else ""
    category, size = max(memory.by_category.items(), key=lambda item: item[1], default=("", 0))
    share = format_share(size / memory.peak_bytes) if memory.peak_bytes else ""
    what = "of unknown purpose" if category == "unknown" else category
    return f"{format_bytes(memory.peak_bytes)}{phase}" + (f": {share} are {what}" if size else "")


def describe_ranks(summary: Summary) -> str:
    """Return the verdict of `profkit ranks`, empty where only one rank was recorded."""
    if summary.compared is None:
        return ""
    from profkit.report.commands.ranks import describe_verdict  # few captures are of several ranks

    return describe_verdict(summary.compared)[0]


def _describe_pace(summary: Summary, tree: StepTree, *, is_brief: bool) -> str:
    part = tree.parts[0]
    time = format_ns(part.time_ns)
    if tree.basis == "phases" and part.kind != "data":
        where = f"in {name_part(tree, part)}" if part.kind == "phase" else name_part(tree, part)
        where += "" if tree.rank is None else f" on rank {tree.rank}"
        return f"{time} of it {where}" + (f", most at {name_line(part.line)}" if part.line else "")
    pace = _PACES.get(part.kind, "")
    if not is_brief and part.kind == Limit.PREPARING:
        pace += ", more slowly than the GPU runs them"
    if not is_brief and part.kind == Limit.COMPUTING and summary.work and summary.work.peak_share is not None:
        pace += f", matrix products at {format_share(summary.work.peak_share)} of {summary.work.peak_name}"
    if part.line is None:
        return f"for {time} {pace}"
    if part.line.time_ns > _MOST * part.time_ns and part.kind == Limit.PYTHON:
        return f"for {format_ns(part.line.time_ns)} {name_line(part.line)} keeps the GPU waiting"
    return f"for {time} {pace}, {format_ns(part.line.time_ns)} of it at {name_line(part.line)}"


def draw_tree(tree: StepTree, least_share: float = 0.0) -> Iterator[str]:
    """Yield a line for each part of the step: what it is, how long, which share; then its line, or its phases.

    Parts below ``least_share`` of the step stand in the rest; the longest part always has its own line. Above them
    stands whose step it is, where it is that of one rank of several.
    """
    if tree.rank is not None:
        yield f"on rank {tree.rank}, whose steps these are:"
    large = sum(part.kind != "rest" and tree.share(part.time_ns) >= least_share for part in tree.parts)
    parts, small = tree.parts[: large or 1], tree.parts[large or 1 :]
    if small:
        parts = (*parts, small[0] if len(small) == 1 else StepPart("rest", sum(part.time_ns for part in small)))
    names = [name_part(tree, part) for part in parts]
    width = max(map(len, names))
    for at, (part, name) in enumerate(zip(parts, names, strict=True)):
        branch = "└─" if at == len(names) - 1 else "├─"
        time, share = format_ns(part.time_ns), format_share(tree.share(part.time_ns))
        row = f"{branch} {name:<{width}}  {time:>8}  {share:>6}  "
        room = ROOM - len(row)
        detail = describe_phases(tree, part, room)
        if part.line is not None:
            detail = f"◀ {shorten(name_line(part.line), room - len('◀ '))}"
        yield f"{row}{detail}".rstrip()


def name_part(tree: StepTree, part: StepPart) -> str:
    if part.kind == "phase":
        return next(iter(part.phases))
    return _OUTSIDE_PHASES if part.kind == Limit.PYTHON and tree.basis == "phases" else NAMES[part.kind]


def describe_phases(tree: StepTree, part: StepPart, room: int | None = None) -> str:
    """Return the phases of a part, each as a share of the step, the largest first; empty where they say nothing."""
    if part.kind not in (Limit.PREPARING, Limit.COMPUTING):
        return ""
    shares = {phase: tree.share(time_ns) for phase, time_ns in part.phases.items() if phase}
    named = [
        f"{_OUTSIDE_PHASES if phase == OUTSIDE else phase} {share:.0%}"
        for phase, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= (_LARGE_OUTSIDE if phase == OUTSIDE else _SMALL_PHASE)
    ]
    while room is not None and len(SEPARATOR.join(named)) > room and len(named) > 1:
        named.pop()
    return SEPARATOR.join(named)
