"""What ``profkit run`` asks of the processes of its target, and what they leave in the run directory for it.

The order goes to every process that the target starts, in an environment variable. Each process that made a step or
used CUDA leaves a `profkit.run.manifest.Process`, one that an exception ended a `Failure`; the launcher removes both.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal, TypeVar

from profkit.files import PARTIAL
from profkit.run import decode, read_record, read_text, write_record
from profkit.run.edits import Measured
from profkit.run.job import number_in
from profkit.run.manifest import Process

T = TypeVar("T")

ENDED_TOO_SOON = "the program ended too soon"
"""Why no step's work was counted, until it was."""


class StepKind(IntEnum):
    """What makes a step, the weakest first: the strongest that a program shows is what counts."""

    WHOLE = 0
    """The whole program is one step."""
    FUNCTION = 1
    """A call of a function that is decorated with ``annotate``."""
    CALL = 2
    """A call of an outermost module."""
    GENERATE = 3
    """A call of a model's ``generate``."""
    REPLAY = 4
    """A replay of a CUDA graph."""
    BACKWARD = 5
    """A backward pass."""
    OPTIMIZER = 6
    """An optimizer's step."""
    STEP_REPLAY = 7
    """A replay of a CUDA graph that an optimizer's step was captured into."""

    @property
    def word(self) -> str:
        """What ``--step-on`` and the files call it."""
        return _WORDS[self]


_OTHER_WORDS = {"FUNCTION": "call", "STEP_REPLAY": "replay"}
_WORDS = tuple(_OTHER_WORDS.get(kind.name, kind.name.lower()) for kind in StepKind)
"""By the kinds' numbers: a kind as the key of a dict runs Python."""


_NAMED = ("optimizer", "call")
WORDS = (*(f"{word}:NAME" for word in _NAMED), "backward", "replay", "generate", "whole")
"""What ``--step-on`` accepts."""


@dataclass(frozen=True)
class StepChoice:
    """A person's choice of what a step is; ``name`` is that of the optimizer, module or function, None for any.

    ``times`` of what it names make one step together: ``optimizer*4``.
    """

    word: str
    name: str | None = None
    times: int = 1

    @classmethod
    def parse(cls, text: str) -> StepChoice:
        """Return the choice that ``text`` names; a word of no kind is the class of an optimizer.

        Raises:
            ValueError: a name is given where none belongs, or is empty; or a number that is none.
        """
        each, star, number = text.partition("*")
        word, colon, name = each.partition(":")
        times = int(number) if number.isdecimal() else 1
        is_wrong = not word or times < 1 or (star and (not number.isdecimal() or word == StepKind.WHOLE.word))
        if word in _NAMED and (name or not colon) and not is_wrong:
            return cls(word, name or None, times)
        if word in WORDS and not colon and not is_wrong:
            return cls(word, times=times)
        if colon or is_wrong:
            raise ValueError(f"{text}: write one of {', '.join(WORDS)}; optimizer*4 makes a step of four")
        return cls("optimizer", word, times)

    @property
    def is_whole(self) -> bool:
        return self.word == StepKind.WHOLE.word

    def allows(self, kind: StepKind, names: tuple[str | None, ...]) -> bool:
        return kind.word == self.word and (self.name is None or self.name in names)


def describe_step(word: str, names: tuple[str, ...] = (), times: int = 1) -> str:
    """Return what a step is, as a person reads it: ``one step of the optimizer AdamW``, or ``4 steps of …``."""
    of = _joined(names)
    each = " each" if len(names) > 1 else ""
    one, plural = ("one", "") if times == 1 else (f"{times}", "s")
    return {
        "optimizer": f"{one} step{plural}{each} of {_joined(names, 'optimizer') or 'an optimizer'}",
        "backward": f"{one} backward pass{'es' * (times > 1)}",
        "replay": f"{one} replay{plural} of a CUDA graph",
        "generate": f"{one} call{plural} of {of}.generate" if len(names) == 1 else f"{one} call{plural} of generate",
        "call": f"{one} call{plural}{each} of {of}" if of else f"{one} call{plural}",
        "whole": "the whole program",
    }[word]


def _joined(names: tuple[str, ...], kind: str = "") -> str:
    if len(names) > _MOST_NAMED:
        return f"{len(names)} {kind or 'module'}s"
    listed = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return f"the {kind}{'s' * (len(names) > 1)} {listed}" if kind and names else listed


_MOST_NAMED = 3


VARIABLE = "PROFKIT_ATTACH"

COMMAND_WARMUP = 14
"""Of a program's steps before the recording the first three are not timed, ten make a median worth comparing, and in
the last torch.profiler warms up."""

Recorder = Literal["none", "kineto", "nsys", "memory", "oom"]
Stacks = Literal["python", "all"]

Counted = Literal["no", "plain", "any"]
"""Whose work is counted: no program's; a program's without compiled code, CUDA graphs and several ranks; any one's."""

COMPLETE, CUT_SHORT, NOT_REACHED = "complete", "cut short", "not reached"
"""How a process's recording ended: after its last step, with the process, or before it began."""

MEMORY_ENTRIES = 1_000_000
"""Allocator events kept by default: some hundred training steps of a large model, in 0.3 to 1 GB of host memory."""

_PATIENCE_S = 10.0
_POLL_S = 0.001

_PROCESS = "attached-{}.json"
_FAILURE = "failed-{}.json"
_MEETING = PARTIAL + "meeting-{}"
_MEASURED = PARTIAL + "trial-{}.json"
_LINES = PARTIAL + "lines-{}"
_ATTACHED = PARTIAL + "attached-{}"
_ENDED = PARTIAL + "ended-{}"
_REFUSED = PARTIAL + "refused-{}"
_UNSAVED = PARTIAL + "unsaved-{}-{}"


@dataclass(frozen=True)
class MemoryOptions:
    """How the allocator is recorded: with which stacks, and at most how many events."""

    stacks: Stacks = "python"
    max_entries: int = MEMORY_ENTRIES


BY_TREE = -1
"""The depth of modules' ranges that follows from the model's tree."""


@dataclass(frozen=True)
class Order:
    """Steps ``warmup_steps`` to ``warmup_steps + steps - 1`` of the target, counted from 0, are recorded into ``run``.

    The recorder ``none`` times these steps; ``memory`` begins with CUDA's first use instead of at a step. With
    every recorder the allocator's history is kept as ``memory`` says, if that is given, and whatever allocation
    fails, to the end of the process, is written down; ``oom`` does that alone. ``steps`` None: all that follow.
    ``depth`` of the modules' ranges, `BY_TREE` or None: modules have none; ``annotate`` False opens no range at all;
    ``stop`` ends the target after the last step; ``step_on`` is what a person says a step is
    (`profkit.run.recording.StepChoice`); ``flops`` says whether the work of the step after the recorded ones, or of
    the range `profkit.names.COUNTED`, is counted; ``operators`` records CPU operators on a GPU too. ``ranks`` says
    which ranks are recorded (`profkit.run.job.RankChoice`), None: all.
    ``own_steps``: the target's own ranges `profkit.names.WARMUP` and ``step N`` are its steps.
    ``lines``: the lines of source are looked for in the steps after these. ``within``: the program asked
    for it itself (`profkit.record`), and goes on without profkit afterwards. ``trial`` are edits (`profkit.run.edits`)
    that are made in the process: then nothing is recorded, the ``steps`` steps are timed, and the process ends with
    them; empty: the program is timed as it is.
    """

    run: str
    recorder: Recorder
    warmup_steps: int
    steps: int | None
    depth: int | None = BY_TREE
    annotate: bool = True
    stop: bool = False
    step_on: str | None = None
    flops: Counted = "no"
    operators: bool = False
    memory: MemoryOptions | None = None
    own_steps: bool = False
    lines: bool = False
    within: bool = False
    ranks: str | None = None
    trial: tuple[str, ...] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Order:
        order: Order = decode(cls, json.loads(environment[VARIABLE]))
        return order


@dataclass(frozen=True)
class Failure:
    """What ended a process, in one line: an exception or a signal; and the process's rank if it has one.

    ``out_of_memory``: a failed allocation is the exception, or led to it.
    """

    error: str
    rank: int | None = None
    out_of_memory: bool = False
    by_signal: bool = False


# Each of the following raises OSError if the word cannot be left.


def leave_attached(run: Path, pid: int) -> None:
    (run / _ATTACHED.format(pid)).touch()


def leave_ended(run: Path, pid: int) -> None:
    """Leave word that the process ``pid`` ended as Python ends: neither killed, nor by ``os._exit``."""
    if not any(run.glob(_UNSAVED.format("*", pid))):
        (run / _ATTACHED.format(pid)).rename(run / _ENDED.format(pid))


def leave_unsaved(run: Path, pid: int, error: OSError) -> None:
    """Leave word why the process ``pid`` could not write its recording, in a name: on a full disk nothing else fits."""
    (run / _ATTACHED.format(pid)).rename(run / _UNSAVED.format(error.errno or errno.EIO, pid))


def claim_recording(run: Path) -> bool:
    """Return whether no process without a rank has asked before: they would write the same files."""
    try:
        _meeting_file(run, "without-rank", 0).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def leave_process(run: Path, process: Process) -> None:
    write_record(run / _PROCESS.format(process.process), process)


def leave_failure(run: Path, name: str, failure: Failure) -> None:
    write_record(run / _FAILURE.format(name), failure)


@dataclass(frozen=True)
class Attached:
    """In how many processes profkit was, and how many of them did not end as Python ends.

    ``refused`` says where profkit could not get into a process, and why; ``unsaved`` why one could not write its
    recording, as the system says it.
    """

    count: int
    unended: int = 0
    refused: str | None = None
    unsaved: str | None = None


def lines_flag(run: Path, pid: int) -> Path:
    return run / _LINES.format(pid)


# Each of the following raises RunError if a file cannot be read.


def take_attached(run: Path) -> Attached:
    """Return what processes left of being attached, and remove the files."""
    unended, ended, refused = (sorted(run.glob(name.format("*"))) for name in (_ATTACHED, _ENDED, _REFUSED))
    unsaved = sorted(run.glob(_UNSAVED.format("*", "*")))
    attached = Attached(
        len(unended) + len(ended) + len(unsaved),
        len(unended),
        next((read_text(path, errors="replace") for path in refused), None),
        next((os.strerror(int(path.name.split("-")[1])) for path in unsaved), None),
    )
    for path in (*unended, *ended, *refused, *unsaved, *run.glob(_LINES.format("*"))):
        path.unlink(missing_ok=True)  # a loader's worker may still be about to remove its own
    return attached


def has_recorded(run: Path) -> bool:
    return any(read_record(Process, path).state != NOT_REACHED for path in run.glob(_PROCESS.format("*")))


def _take(kind: type[T], paths: Iterable[Path]) -> list[T]:
    records = []
    for path in paths:
        records.append(read_record(kind, path))
        path.unlink()
    return records


def take_processes(run: Path) -> tuple[Process, ...]:
    """Return what processes left, the first rank first, without ranks the one that recorded most; remove the files."""
    processes = _take(Process, sorted(run.glob(_PROCESS.format("*"))))
    # One that showed no step, as a launcher of others, is of use only where none did.
    used = [
        process
        for process in processes
        if process.steps_seen is None or process.steps_seen >= 0 or process.memory is not None
    ]
    return tuple(sorted(used or processes, key=_precedence))


def _precedence(process: Process) -> tuple[object, ...]:
    state = (COMPLETE, CUT_SHORT, NOT_REACHED).index(process.state)
    strongest = max((kind for kind in StepKind if kind.word == process.step), default=StepKind.WHOLE)
    return process.rank is None, process.rank or 0, state, -strongest, -(process.steps_seen or 0)


def take_failures(run: Path) -> tuple[Failure, ...]:
    """Return what ended processes, the first to fail first; remove the files, and those by which ranks met.

    The others often fail because the first one is gone. A rank that a signal ended counts as the first: it is known
    only when torchrun has seen it.
    """
    failures = _take(Failure, sorted(run.glob(_FAILURE.format("*")), key=lambda path: path.stat().st_mtime_ns))
    for path in run.glob(_MEETING.format("*")):
        path.unlink()
    return tuple(sorted(failures, key=lambda failure: (failure.rank is None, not failure.by_signal)))


def leave_measured(folder: Path, pid: int, measured: Measured) -> None:
    write_record(folder / _MEASURED.format(pid), measured)


def take_measured(folder: Path) -> tuple[Measured, ...]:
    """Return what processes left in ``folder``, the first rank first, without ranks most steps first; remove it."""
    measured = _take(Measured, sorted(folder.glob(_MEASURED.format("*"))))
    return tuple(sorted(measured, key=lambda process: (process.rank is None, process.rank or 0, -process.steps_seen)))


def count_left(folder: Path) -> int:
    return len(list(folder.glob(_MEASURED.format("*"))))


class LocalRanks:
    """This machine's ranks as the launcher numbered them, and this process among them."""

    def __init__(self, run: Path) -> None:
        self.number = number_in(os.environ, "LOCAL_RANK") or 0
        self.count = number_in(os.environ, "LOCAL_WORLD_SIZE") or 1
        self._run = run

    def meet(self, occasion: str, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until every rank of this machine has come here; False if one did not come in time."""
        if self.count == 1:
            return True
        _meeting_file(self._run, occasion, self.number).touch()
        awaited = [_meeting_file(self._run, occasion, number) for number in range(self.count)]
        deadline = time.monotonic() + patience_s
        while not all(path.exists() for path in awaited):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def agree(self, occasion: str, number: int, patience_s: float = _PATIENCE_S) -> int:
        """Return the largest number that a rank of this machine came here with; 0 if one did not come in time."""
        if self.count == 1:
            return number
        mine = _meeting_file(self._run, occasion, self.number)
        written = mine.with_name(f"{mine.name}.new")
        written.write_text(str(number), encoding="ascii")
        written.replace(mine)  # whoever sees the file sees the number
        if not self.meet(occasion, patience_s):
            return 0
        files = [_meeting_file(self._run, occasion, rank) for rank in range(self.count)]
        return max(int(file.read_text(encoding="ascii")) for file in files)


def _meeting_file(run: Path, occasion: str, local_rank: int) -> Path:
    return run / _MEETING.format(f"{occasion}-{local_rank}")
