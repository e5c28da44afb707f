"""A second run of a command that recorded nothing, or the wrong steps: how it goes, and what forbids it.

A script with fewer steps than warm-up steps, one without anything that makes a step, and one whose steps turned into
others while they were recorded. A program that changed files in its folders while it ran is not run twice unasked.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profkit.launch.passes import Outcome
from profkit.run.manifest import Process
from profkit.run.recording import CUT_SHORT, NOT_REACHED, Order, StepChoice, StepKind, describe_step

_COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_SHORT_WARMUP = 2
"""Of a short script's steps: the first builds what the others have, the second is timed without a profiler."""
_LEFT_FOR_LINES = 3
"""How many steps after the recorded and the counted ones the lines of source need, where the program makes enough."""
_WHOLE = "whole"
_WORTH_ANOTHER = ("optimizer", "replay")
_MOST_ENTRIES = 50_000
"""This many are looked at in a fraction of a second on a local disk."""


@dataclass(frozen=True)
class AnotherTry:
    """How to run the command again: what the first run showed, what the second does, and by which options."""

    order: Order
    shown: str
    then: str
    options: str

    @property
    def why(self) -> str:
        return f"{self.shown}; it runs again {self.then}"

    def why_not(self, against: str) -> str:
        """Return why it does not, and what to do about it; ``against`` is what speaks against it, in a clause."""
        return f"{self.shown}; it was not run again by itself, because {against}: run it with {self.options}"

    @property
    def why_failed(self) -> str:
        return f"its first run ended well and its second failed: run it with {self.options}, and it runs once"

    @property
    def changed(self) -> dict[str, Any]:
        """What it changes of an order, and of the workload in the manifest."""
        return {name: getattr(self.order, name) for name in ("warmup_steps", "steps", "step_on")}


def find_another_try(outcome: Outcome) -> AnotherTry | None:
    """Return how to run a command again so that more is recorded; None if nothing more can be had by that."""
    order, processes = outcome.order, outcome.processes
    if outcome.exit_status != 0 or order.recorder == "oom" or not processes or processes[0].failure is not None:
        return None
    return _better_order(order, processes[0])


def _better_order(order: Order, first: Process) -> AnotherTry | None:
    if order.own_steps or order.step_on == _WHOLE:
        return None
    if first.step_changed_to in _WORTH_ANOTHER:
        return AnotherTry(
            replace(order, step_on=first.step_changed_to),
            "steps of another kind came after the recording had begun",
            f"and records them: {describe_step(first.step_changed_to)}",
            f"--step-on {first.step_changed_to}",
        )
    if first.profiled or first.state not in (NOT_REACHED, CUT_SHORT):
        return None
    step, made = _steps_made(first)
    if made and (order.step_on is None or first.step is not None):
        return _shortened(replace(order, step_on=order.step_on or step), made)
    if order.step_on is not None:
        return None
    return AnotherTry(
        replace(order, warmup_steps=0, steps=1, step_on=_WHOLE),
        "it showed nothing that makes a step",
        "and is recorded as a whole, from its first use of the GPU",
        f"--step-on {_WHOLE}",
    )


def _steps_made(process: Process) -> tuple[str | None, int]:
    if process.step is not None:
        return None, process.steps_seen or 0
    strength = {seen: max(k for k in StepKind if k.word == StepChoice.parse(seen).word) for seen in process.seen}
    strongest = max(strength, key=lambda seen: strength[seen], default=None)
    return strongest, 0 if strongest is None else process.seen[strongest]


def _shortened(order: Order, made: int) -> AnotherTry:
    fits = 0 if order.steps is None else made - order.steps - (order.flops != "no") - _LEFT_FOR_LINES
    warmup = min(order.warmup_steps, max(fits, _SHORT_WARMUP), made - 1)
    steps = made - warmup if order.steps is None else min(order.steps, made - warmup)
    options = f"--warmup {warmup} --steps {steps}"
    few = "1 step" if made == 1 else f"{made} steps"
    return AnotherTry(
        replace(order, warmup_steps=warmup, steps=steps),
        f"it made {few}, too few for --warmup {order.warmup_steps}",
        f"with {options}",
        options,
    )


def why_not_twice(words: Sequence[str], since: Path, run: Path) -> str | None:
    """Return in a clause what speaks against running a command a second time; None if it changed nothing that is seen.

    A command that adds to a file, resumes from its own checkpoint or refuses an output that is there does other things
    the second time. So each file counts that was written after the file ``since`` in the working directory or a folder
    that the command names, with all below it. Not counted are ``run``, hidden folders, caches (also of compiled
    code) and the files that our own standard streams are. What is written elsewhere, or sent over a network, is not
    seen.
    """
    try:
        began_ns = since.stat().st_mtime_ns
        passed_over = {_identity(run.stat()), *_streams(), *_compiler_caches()}
    except OSError:
        return "it took its run's directory away"
    waiting, count = deque(map(str, _folders(words))), 0
    while waiting:
        entries = _entries_of(waiting.popleft(), passed_over)
        count += len(entries)
        if count > _MOST_ENTRIES:
            return f"its folders hold too many files to see whether it wrote one (over {_MOST_ENTRIES:,})"
        for path, status in entries:
            if stat.S_ISREG(status.st_mode) and status.st_mtime_ns > began_ns:
                return f"it wrote {os.path.relpath(path)}"
            name = os.path.basename(path)
            if stat.S_ISDIR(status.st_mode) and not name.startswith(_HIDDEN) and name not in _CACHES:
                waiting.append(path)
    return None


def _folders(words: Sequence[str]) -> list[Path]:
    folders = {Path.cwd()}
    for word in words[1:]:
        path = Path(word.rpartition("=")[2]).absolute()
        with suppress(OSError):  # a word that can be no path
            folders.update(folder for folder in (path, path.parent) if folder.is_dir() and folder != Path("/"))
    outer: list[Path] = []
    for folder in sorted(folders):
        if not any(folder.is_relative_to(around) for around in outer):
            outer.append(folder)
    return outer


def _entries_of(folder: str, passed_over: set[tuple[int, int]]) -> list[tuple[str, os.stat_result]]:
    entries = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):  # it is gone by now
                status = entry.stat(follow_symlinks=False)
                if _identity(status) not in passed_over:
                    entries.append((entry.path, status))
    return entries


_CACHES = frozenset({"__pycache__", "site-packages"})
_HIDDEN = (".", "torchinductor_")
"""How the names of folders begin that are passed over: hidden ones, and Inductor's cache where nobody chose a place."""


def _compiler_caches() -> Iterator[tuple[int, int]]:
    for variable in _COMPILER_CACHES:
        with suppress(KeyError, OSError):
            yield _identity(os.stat(os.environ[variable]))


def _streams() -> Iterator[tuple[int, int]]:
    for number in range(3):
        with suppress(OSError):  # it is closed
            yield _identity(os.fstat(number))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
