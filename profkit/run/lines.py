"""``lines.jsonl``: the lines of the user's own code in which steps spent their time, one object a line.

The first object is a `LineSteps`: in how many steps, and how long, the lines were looked for. Every other one is a
`LineTime`. Times are nanoseconds a step (of a loader's worker: a batch) in these steps, which had no profiler on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from profkit.errors import RunError
from profkit.files import whole_file
from profkit.names import BACKWARD, OPTIMIZER
from profkit.run import decode, read_lines
from profkit.text_kinds import FunctionName, Message, SourceFile, SourceLine, Word

VERSION = 1

FEWEST_SAMPLES = 10
"""With fewer samples no line is named: their error is a third of the time, and more."""

NEAR = 8
"""Lines of a function that stand this close together do one thing."""

RARELY = 2.0
"""A step of so many times the usual one, both without waits for data, is a rare one."""

Thread = Literal["main", "backward", "worker"]
"""The thread that trains, another one that called backward, or a worker of a data loader."""


class Line(NamedTuple):
    """A line of source: its file, number and function, and what it calls, None if that is not known."""

    file: str | None
    line: int
    function: str
    called: str | None = None


def calls_backward(called: str | None) -> bool:
    """Return whether a line calls backward, where Python stands while torch's engine or the GPU works."""
    return (called or "").endswith("backward")


@dataclass(frozen=True)
class LineSteps:
    """How the lines of one process were looked for.

    ``steps`` are the times of each step and its phases, as those of unprofiled steps are written
    (`profkit.run.manifest.Samples`). ``batches`` were made by workers of data loaders meanwhile, each in
    ``batch_ns`` (mean); all threads of the worker together ran on CPUs for ``batch_cpu_ns`` of it. ``no_waits``
    says why synchronizing calls are not known, None if they are. With ``is_after_rare`` they follow on a rare step
    that is left out, since it took far longer than the later ones.
    """

    steps: tuple[dict[Word, int], ...]
    batches: int = 0
    batch_ns: int = 0
    no_waits: Message | None = None
    version: int = VERSION
    batch_cpu_ns: int | None = None
    is_after_rare: bool = False


@dataclass(frozen=True)
class LineTime:
    """What one line took: the mean a step, its standard error, how often it waited for the GPU a step, and how long.

    ``file`` is None for time with no line of the user's own on the stack. ``phase`` is None outside of all phases.
    With ``is_caller`` it is what other lines of the user's own took, and how they waited, that this one had called.
    ``inside`` is the library's function, behind its file's name, in which most of its waits were, or else of its time:
    ``collate.default_collate``. ``caller`` is the line of the user's own in whose call most of its time was, as
    ``train.py:30 main``. Each is None if no one has most of it. ``waits_in`` is what it calls where it waits, None if
    that is what it calls: of ``x.float().to("cuda")`` one takes the time, and the other waits.
    """

    file: SourceFile | None
    line: int
    function: FunctionName
    called: FunctionName | None
    phase: Word | None
    thread: Thread
    samples: int
    time_ns: int
    error_ns: int
    waits: float
    waiting_ns: int = 0
    is_caller: bool = False
    inside: FunctionName | None = None
    caller: SourceLine | None = None
    waits_in: FunctionName | None = None

    @property
    def own_ns(self) -> int:
        return self.time_ns - self.waiting_ns

    @property
    def method(self) -> str:
        """The last name of what it calls: ``item`` of ``x.sum().item``; empty if that is not known."""
        return (self.called or "").rpartition(".")[2]

    @property
    def outer_function(self) -> str:
        """The function, or that in which a lambda or a generator is written."""
        return self.function.partition(".<")[0]

    @property
    def is_move(self) -> bool:
        return (self.waits_in or self.called or "").rpartition(".")[2] in ("to", "cuda")

    @property
    def may_move_to_cpu(self) -> bool:
        """Whether it waits for the GPU in ``.cpu()``, or in ``.to()``, which may lead to the GPU as well."""
        return self.waits > 0 and self.method in ("cpu", "to")

    @property
    def identity(self) -> tuple[object, ...]:
        return self.file, self.line, self.function, self.called, self.phase, self.thread

    @property
    def place(self) -> tuple[str | None, int]:
        return self.file, self.line

    @property
    def caller_place(self) -> tuple[str, int] | None:
        if self.caller is None:
            return None
        file, _, number = self.caller.rpartition(" ")[0].rpartition(":")
        return file, int(number)


@dataclass(frozen=True)
class RunLines:
    """All that one process wrote: the lines that ran, and apart from them those that had called others."""

    steps: LineSteps
    lines: tuple[LineTime, ...]
    callers: tuple[LineTime, ...] = ()


class Placed(Protocol):
    """A line of source in a phase."""

    @property
    def place(self) -> tuple[str | None, int]: ...

    @property
    def phase(self) -> str | None: ...


class CallTree:
    """Which lines of a phase ran in the calls of which others, as most of each one's time says.

    Recordings of before lines had callers have a tree without branches.
    """

    def __init__(self, lines: Iterable[LineTime], callers: Iterable[LineTime]) -> None:
        self._callers = {(line.place, line.phase, line.thread): line for line in callers}
        self._under: dict[tuple[object, ...], list[LineTime]] = {}
        for line in (*lines, *self._callers.values()):
            for caller in self.callers_of(line):
                self._under.setdefault((caller.place, caller.phase, caller.thread), []).append(line)

    def callers_of(self, line: LineTime) -> Iterator[LineTime]:
        """Yield the line that called this one, then that one's, and so on to the outermost of the same phase."""
        known = {line.place}
        place = line.caller_place
        while place is not None and place not in known and (place, line.phase, line.thread) in self._callers:
            caller = self._callers[place, line.phase, line.thread]
            yield caller
            known.add(place)
            place = caller.caller_place

    def under(self, caller: LineTime) -> list[LineTime]:
        """Return all lines that ran in what this one called, callers among them."""
        return self._under.get((caller.place, caller.phase, caller.thread), [])

    def called_by(self, caller: LineTime) -> list[LineTime]:
        """Return the lines of the functions that this one called itself: no further line had called them."""
        return [line for line in self.under(caller) if next(self.callers_of(line), None) is caller]

    def depth_of(self, line: LineTime) -> int:
        """Return how many lines of the same phase had called this one, one in the other."""
        return sum(1 for _ in self.callers_of(line))

    def most_of(self, caller: LineTime, among: Collection[LineTime] | None = None) -> LineTime:
        """Return the innermost line, of these if any are given, with over half of what this one takes, or itself."""
        lines = self.under(caller) if among is None else [line for line in self.under(caller) if line in among]
        most = [line for line in lines if 2 * line.own_ns > caller.own_ns]
        return max(most, key=self.depth_of, default=caller)


def lines_of_trainers(lines: Iterable[Placed]) -> frozenset[tuple[str | None, int]]:
    """Return the file and number of each line that runs a trainer: all of a step's phases, or several, lie in it."""
    phases: dict[tuple[str | None, int], set[str | None]] = {}
    for line in lines:
        phases.setdefault(line.place, set()).add(line.phase)
    return frozenset(place for place, own in phases.items() if len(own) > 1 and own & {BACKWARD, OPTIMIZER})


def join_at_places(lines: Iterable[LineTime]) -> tuple[LineTime, ...]:
    """Return one line for each place, phase and thread, where a function and a generator written in it may share one.

    It is called as the longest of them.
    """
    together: dict[tuple[object, ...], list[LineTime]] = {}
    for line in lines:
        together.setdefault((line.place, line.phase, line.thread), []).append(line)
    return tuple(
        replace(
            max(own, key=lambda line: line.time_ns),
            samples=sum(line.samples for line in own),
            time_ns=sum(line.time_ns for line in own),
            error_ns=round(math.hypot(*(line.error_ns for line in own))),
            waits=sum(line.waits for line in own),
            waiting_ns=sum(line.waiting_ns for line in own),
        )
        for own in together.values()
    )


def name_count(count: float) -> str:
    """Return how often a line does something, to three digits, and to the last one from a thousand on."""
    return f"{count:.3g}" if count < 999.5 else f"{count:,.0f}"


def write_lines(path: Path, lines: RunLines) -> None:
    objects = [asdict(lines.steps), *map(asdict, (*lines.lines, *lines.callers))]
    with whole_file(path) as partial:
        partial.write_text("".join(f"{json.dumps(record)}\n" for record in objects), encoding="utf-8")


def split_lines(steps: LineSteps, lines: Sequence[LineTime]) -> RunLines:
    return RunLines(
        steps,
        tuple(line for line in lines if not line.is_caller),
        tuple(line for line in lines if line.is_caller),
    )


def read_run_lines(path: Path) -> RunLines:
    """Return what a process wrote.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: it cannot be read, or holds something else.
    """
    steps: list[LineSteps] = []
    lines: list[LineTime] = []

    def take(entry: dict[str, Any]) -> None:
        if steps:
            lines.append(decode(LineTime, entry))
        else:
            steps.append(decode(LineSteps, entry))

    read_lines(path, take, "a line of lines.jsonl")
    if not steps:
        raise RunError(f"{path}: holds no lines")
    if steps[0].version != VERSION:
        raise RunError(f"{path}: has version {steps[0].version}, and this profkit reads version {VERSION}")
    return split_lines(steps[0], lines)
