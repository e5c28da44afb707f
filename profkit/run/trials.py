"""``trials.jsonl``: edits that profkit made in runs of the program, and measured; one object a line.

Each call of `profkit try` adds a `TrialPlan` and behind it, as they come, what is predicted (`TrialPrediction`) and a
`TrialProcess` for each process that ran. The program as it is has no edits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from profkit.errors import RunError
from profkit.files import whole_file
from profkit.run.records import decode, read_lines
from profkit.text_kinds import EditName, GpuName, Message, Moment, SourceLine, Version, Word

VERSION = 1


@dataclass(frozen=True)
class Evidence:
    """Whether an edit took effect in a process: ``text`` says by what that is seen, or why it did not.

    ``place`` is the line of the user's own code that it changes, None if that is not one line, or not known.
    """

    edit: EditName
    is_made: bool
    text: Message
    place: SourceLine | None = None


@dataclass(frozen=True)
class Measured:
    """What one process of the program measured.

    ``steps`` steps took ``step_ns`` each (mean), the GPU waited for before the first and after the last; None if the
    process did not get there: ``reason`` says why, if it knows. ``first_ns`` is what the steps before those took
    together. ``losses`` are the means of the losses of each step, from the first on; None where one is not finite, or
    larger than any that is kept. ``steps_seen`` counts all steps. Peaks are of the whole process, None without a GPU.
    """

    steps: int = 0
    step_ns: float | None = None
    first_ns: int = 0
    steps_seen: int = 0
    losses: tuple[float | None, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    rank: int | None = None
    device: Word | None = None
    gpu: GpuName | None = None
    torch: Version | None = None
    reason: Message | None = None

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why edits were not made, or took no effect."""
        return tuple(f"{evidence.edit}: {evidence.text}" for evidence in self.evidence if not evidence.is_made)


@dataclass(frozen=True)
class TrialPlan:
    """One call of `profkit try`: in each process ``steps`` steps were timed after ``warmup_steps``."""

    version: int
    started_utc: Moment
    warmup_steps: int
    steps: int


@dataclass(frozen=True)
class TrialPrediction:
    """What the step replay predicted of some edits, in nanoseconds a step; None where it says nothing."""

    edits: tuple[EditName, ...]
    now_ns: int | None = None
    low_ns: int | None = None
    expected_ns: int | None = None
    high_ns: int | None = None


@dataclass(frozen=True)
class TrialProcess:
    """One process of the program with some edits.

    Processes of one ``turn`` ran one after another, the program as it is first. ``wall_s`` is how long it took from its
    start to its end. ``reason`` says why nothing was measured, None if something was.
    """

    edits: tuple[EditName, ...]
    turn: int
    wall_s: float
    measured: Measured | None = None
    reason: Message | None = None


@dataclass(frozen=True)
class Trials:
    """What one call of `profkit try` left."""

    plan: TrialPlan
    predictions: tuple[TrialPrediction, ...] = ()
    processes: tuple[TrialProcess, ...] = ()


@dataclass(frozen=True)
class RunTrials:
    """The content of the file: the calls of `profkit try`, the oldest first."""

    calls: tuple[Trials, ...] = field(default_factory=tuple)


def write_trials(path: Path, trials: RunTrials) -> None:
    """Write the file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    lines = [line for call in trials.calls for line in _lines(call)]
    with whole_file(path) as partial:
        partial.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def _lines(call: Trials) -> Iterable[dict[str, Any]]:
    yield {"plan": asdict(call.plan)}
    yield from ({"prediction": asdict(prediction)} for prediction in call.predictions)
    yield from ({"process": asdict(process)} for process in call.processes)


def read_trials(path: Path) -> RunTrials:
    """Return the content of the file.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: it cannot be read, or holds something else.
    """
    calls: list[tuple[TrialPlan, list[TrialPrediction], list[TrialProcess]]] = []

    def take(entry: dict[str, Any]) -> None:
        if "plan" in entry:
            plan: TrialPlan = decode(TrialPlan, entry["plan"], "plan")
            if plan.version != VERSION:
                raise RunError(f"{path}: has version {plan.version}, and this profkit reads version {VERSION}")
            calls.append((plan, [], []))
        elif "prediction" in entry:
            calls[-1][1].append(decode(TrialPrediction, entry["prediction"], "prediction"))
        elif "process" in entry:
            calls[-1][2].append(decode(TrialProcess, entry["process"], "process"))

    read_lines(path, take, "a line of trials.jsonl")
    return RunTrials(
        tuple(Trials(plan, tuple(predictions), tuple(processes)) for plan, predictions, processes in calls)
    )
