"""What torch.compile did in a run, for a person who can act on it: compilations in recorded steps, graph breaks.

The times are of the process that compiled for the longest in recorded steps: ranks compile at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profkit.findings import Finding
from profkit.run.compiled_code import Compilation, GraphBreak
from profkit.run.directory import Run

IN_RECORDED_STEPS = ("recompiled", "compiled")
"""Codes of findings about what the figures of recorded steps contain."""
_SHOWN = 3
_LIMIT = "recompile limit"
_SIZES = ("size mismatch", "stride mismatch", ".size()", ".shape[")


@dataclass(frozen=True)
class CompiledStep:
    """What was compiled in one recorded step: ``duration_ns`` is the time that the step spent in it.

    ``again`` are those that were compiled before, each with its line and reason.
    """

    step: int | None
    duration_ns: int
    first_time: tuple[Compilation, ...]
    again: tuple[Compilation, ...]


@dataclass(frozen=True)
class BreakPlace:
    """A line at which graphs break, and how often Dynamo met it; ``in_recorded_steps`` says how often there."""

    line: str
    reason: str
    explanation: str | None
    hint: str | None
    times: int
    in_recorded_steps: int


@dataclass(frozen=True)
class RunCompilations:
    """What one process of a run compiled; times of ``before_ns`` are of what no recorded step has."""

    steps: tuple[CompiledStep, ...]
    before_ns: int
    before_count: int
    breaks: tuple[BreakPlace, ...]
    not_compiled: tuple[Compilation, ...]
    without_graphs: tuple[Compilation, ...]

    @property
    def recorded_ns(self) -> int:
        """Return the time that recorded steps spent compiling."""
        return sum(step.duration_ns for step in self.steps)


def read_run_compilations(run: Run | None) -> RunCompilations | None:
    """Return what the run's processes compiled; None if nothing is known of that.

    Raises:
        RunError: a file cannot be read.
    """
    if run is None:
        return None
    recording = {process.pid for process in run.manifest.processes}
    found: list[RunCompilations] = []
    for of_rank in run.compilations:
        compiled = [one for one in of_rank[0] if one.pid in recording]
        breaks = [one for one in of_rank[1] if one.pid in recording]
        if compiled or breaks:
            found.append(sum_compilations(compiled, breaks))
    return max(found, key=lambda one: one.recorded_ns, default=None)


def sum_compilations(compiled: Sequence[Compilation], breaks: Sequence[GraphBreak]) -> RunCompilations:
    """Return what one process compiled."""
    recorded = [one for one in compiled if one.is_recorded]
    before = [one for one in compiled if not one.is_recorded]
    steps = []
    for number in dict.fromkeys(one.step for one in recorded):
        mine = [one for one in recorded if one.step == number]
        steps.append(
            CompiledStep(
                number,
                sum(one.duration_ns or 0 for one in mine),
                tuple(one for one in mine if not one.is_again),
                tuple(one for one in mine if one.is_again),
            )
        )
    return RunCompilations(
        steps=tuple(steps),
        before_ns=sum(one.duration_ns or 0 for one in before),
        before_count=len(before),
        breaks=_places(breaks),
        not_compiled=_each_once(one for one in compiled if one.failure is not None),
        without_graphs=_each_once(one for one in compiled if one.cudagraphs_skipped is not None),
    )


def _places(breaks: Sequence[GraphBreak]) -> tuple[BreakPlace, ...]:
    groups: dict[tuple[str, str], list[GraphBreak]] = {}
    for one in breaks:
        groups.setdefault((one.lines[0] if one.lines else "", one.reason), []).append(one)
    return tuple(
        BreakPlace(
            line=line or "an unknown line",
            reason=reason,
            explanation=mine[0].explanation,
            hint=mine[0].hint,
            times=len(mine),
            in_recorded_steps=sum(one.is_recorded for one in mine),
        )
        for (line, reason), mine in groups.items()
    )


def _each_once(some: Iterator[Compilation]) -> tuple[Compilation, ...]:
    return tuple({(one.line, one.failure, one.cudagraphs_skipped): one for one in some}.values())


def find_compilations(run: Run | None) -> tuple[Finding, ...]:
    """Return what a person can act on, a sentence each: recompilations, graph breaks, what was not compiled.

    Raises:
        RunError: a file cannot be read.
    """
    known = read_run_compilations(run)
    return () if known is None else tuple(_describe(known))


def _describe(known: RunCompilations) -> Iterator[Finding]:
    for step in known.steps:
        where = "a recorded step" if step.step is None else f"recorded step {step.step}"
        spent = f"which took {step.duration_ns / 1e9:.2f} s of {where}"
        if step.again:
            yield Finding("recompiled", f"torch.compile compiled again, {spent}: {_why_again(step.again)}")
        elif step.first_time:
            message = f"torch.compile was still compiling, {spent}: {_lines(step.first_time)}; raise --warmup"
            yield Finding("compiled", message)
    if known.breaks:
        places = [f"{one.line}: {one.reason}" for one in known.breaks]
        message = f"graphs break at {_count(len(places), 'place')}, where Python runs instead: {_some(places)}"
        yield Finding("graph-break", message)
    for one in known.not_compiled:
        at = one.line or one.failed_line or "a function"
        if _LIMIT in (one.failure or ""):
            message = f"{at} is compiled for no further inputs: {one.failure}"
            message += f" ({one.reason})" if one.reason else ""
            yield Finding("recompile-limit", message)
        else:
            where = "" if one.failed_line is None else f" at {one.failed_line}"
            yield Finding("not-compiled", f"{one.line or at} runs without torch.compile: {one.failure}{where}")
    for one in known.without_graphs:
        message = f"{one.line or 'a backward pass'} runs without CUDA graphs: {one.cudagraphs_skipped}"
        yield Finding("without-cuda-graphs", message)


def _why_again(some: Sequence[Compilation]) -> str:
    """Return what was compiled again and why: what one change of the inputs caused is said once."""
    reasons = list(dict.fromkeys(one.reason for one in some if one.reason is not None))
    because = f" ({_some(reasons)})" if reasons else ""
    is_size = any(mark in reason for reason in reasons for mark in _SIZES)
    cure = "; with torch.compile(dynamic=True), or inputs of one size, it compiles once" if is_size else ""
    return f"{_lines(some)}{because}{cure}"


def _lines(some: Sequence[Compilation]) -> str:
    return _some(list(dict.fromkeys(one.line or "a backward pass" for one in some)))


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")
