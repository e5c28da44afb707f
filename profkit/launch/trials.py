"""Trials of edits: the program is started anew for each, in turns with the program as it is, and stopped early.

The same code's speed differs between two processes by more than between its steps: so what is compared are processes,
and the first one, which warms caches up, does not count. It shows how long a process takes, too.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from profkit.errors import ToolError, UsageError
from profkit.files import PARTIAL
from profkit.launch.manifest import utc_now
from profkit.launch.passes import why_not_twice
from profkit.launch.processes import run_child
from profkit.launch.record import Progress, Say, build_environment
from profkit.run.edits import VERSION, Measured, TrialPlan, TrialProcess, parse_edits
from profkit.run.recording import Failure, Order, take_failures, take_measured

Edits = tuple[str, ...]
Keep = Callable[[TrialProcess], None]

AS_IS: Edits = ()
"""The program as it is."""

_SCOUT_WARMUP, _SCOUT_STEPS = 5, 5
_WARMUP, _SHORT_WARMUP = 10, 3
_LEAST_STEPS, _MOST_STEPS = 10, 200
_ENOUGH_S = 1.5
"""So long steps are timed in a process, at least `_LEAST_STEPS` and at most `_MOST_STEPS` of them."""
_FEWEST_STEPS = 3
_FAILED = "the program failed"
_WORTH = 0.99
"""An edit that shortens the step to less than this is combined with others like it."""

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Its older and its newer name."""


@dataclass(frozen=True)
class TrialOptions:
    """How edits are tried: ``processes`` of each that count, and which of a script's events ends a step.

    ``combines``: those that helped in the first turn are also tried together. ``may_write``: also a script that writes
    files where it runs.
    """

    processes: int = 3
    step_on: str | None = None
    combines: bool = True
    may_write: bool = False


class TrialRunner:
    """Runs ``argv`` with edits, in turns with the program as it is.

    Args:
        run: the run directory; what processes leave lies in a folder of it until the end.
    """

    def __init__(
        self,
        argv: Sequence[str],
        run: Path,
        options: TrialOptions,
        *,
        progress: Progress,
        say: Say,
    ) -> None:
        self._argv = list(argv)
        self._run = run
        self._options = options
        self._progress = progress
        self._say = say
        self._warmup, self._steps = _SCOUT_WARMUP, _SCOUT_STEPS

    def plan(self, count: int) -> TrialPlan:
        """Run the program as it is once, and return how ``count`` edits are tried; say how long that takes.

        Raises:
            ToolError: the program fails, or makes too few steps.
            UsageError: it writes files where it runs, and that was not allowed.
        """
        with self._folder() as folder:
            since = folder / "began"
            since.touch()
            with self._progress("running the program as it is once, to see how long that takes"):
                scout = self._start(folder, AS_IS, turn=0)
            wrote = why_not_twice(self._argv, since, self._run)
        if wrote is not None and not self._options.may_write:
            raise UsageError(f"{wrote}: each trial would do so again; --anyway tries all the same")
        self._choose_steps(scout)
        may_combine = self._options.combines and count > 1
        often = self._options.processes * (count + 1 + may_combine) + may_combine
        assert scout.measured is not None
        step_s = (scout.measured.step_ns or 0) / 1e9
        each_s = scout.wall_s + step_s * (self._warmup + self._steps - _SCOUT_WARMUP - _SCOUT_STEPS)
        self._say(
            f"{often} processes of about {each_s:.0f} s, of which {self._steps} steps each are timed: about "
            f"{_minutes(often * each_s)}, and the time to compile (Ctrl-C keeps what was measured)"
        )
        return TrialPlan(VERSION, utc_now(), self._warmup, self._steps)

    def run(self, variants: Sequence[Edits], keep: Keep) -> None:
        """Try each set of edits in turns with the program as it is; ``keep`` gets each process as it ends."""
        left = dict.fromkeys(variants, self._options.processes)
        turn = 0
        while any(left.values()):
            turn += 1
            done = [self._try(AS_IS, turn, keep)]
            for edits in [edits for edits, count in left.items() if count]:
                process = self._try(edits, turn, keep)
                done.append(process)
                left[edits] = left[edits] - 1 if process.reason is None else 0
            if turn == 1 and self._options.combines:
                combined = _combine(done)
                if combined is not None and combined not in left:
                    left[combined] = self._options.processes

    def _try(self, edits: Edits, turn: int, keep: Keep) -> TrialProcess:
        name = ", ".join(edits) or "the program as it is"
        with self._folder() as folder, self._progress(f"turn {turn}: {name}"):
            process = self._start(folder, edits, turn)
        keep(process)
        return process

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=self._run) as folder:
            yield Path(folder).resolve()

    def _start(self, folder: Path, edits: Edits, turn: int) -> TrialProcess:
        order = Order(
            str(folder), "none", self._warmup, self._steps, step_on=self._options.step_on, trial=edits, depth=None
        )
        settings = [edit.argument for edit in parse_edits(edits) if edit.spec.name == "allocator"]
        variables = {name: text for text in settings for name in _ALLOCATOR_VARIABLES}
        environment = build_environment({**os.environ, **variables}, order)
        began = monotonic()
        with (folder / "output.txt").open("w+b") as output:
            status = run_child(self._argv, environment, output=output)
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
        wall_s = monotonic() - began
        measured, failures = take_measured(folder), take_failures(folder)
        reason = _why_not_measured(measured, self._warmup + self._steps)
        if failures and reason is not None:
            reason = f"{_FAILED}: {_first_words(failures[0])}"
        elif status and reason is not None:
            reason = f"{_FAILED} with exit status {status}: {lines[-1] if lines else 'it printed nothing'}"
        # The other ranks waited for the slowest one.
        slowest = max(measured, key=lambda process: process.step_ns or 0.0, default=None)
        return TrialProcess(edits, turn, wall_s, slowest, reason)

    def _choose_steps(self, scout: TrialProcess) -> None:
        measured, reason = scout.measured, scout.reason or ""
        if measured is not None and measured.step_ns is not None:
            self._warmup = _WARMUP
            self._steps = min(max(math.ceil(_ENOUGH_S * 1e9 / measured.step_ns), _LEAST_STEPS), _MOST_STEPS)
        elif measured is not None and measured.steps_seen > _FEWEST_STEPS and not reason.startswith(_FAILED):
            # A short script: what steps it makes are timed, after fewer that are not.
            self._warmup = min(_SHORT_WARMUP, measured.steps_seen - _FEWEST_STEPS)
            self._steps = measured.steps_seen - self._warmup
        else:
            raise ToolError(f"nothing was tried: {reason}")


def _first_words(failure: Failure) -> str:
    """Return what ended a program; of an allocation that failed, without what PyTorch says of the GPU's other users."""
    return failure.error.partition(". GPU ")[0] if failure.out_of_memory else failure.error


def _why_not_measured(measured: Sequence[Measured], wanted: int) -> str | None:
    if not measured:
        return "no process that imports torch made a training step"
    first = measured[0]
    if first.reason is not None or first.refusals:
        return first.reason or "; ".join(first.refusals)
    if first.step_ns is None:
        return f"the script made {first.steps_seen} steps, and {wanted} are needed"
    return None


def _combine(done: Sequence[TrialProcess]) -> Edits | None:
    """Return the edits that helped, together: of several of one kind the best; None if there are not two."""
    as_is, *others = done
    if as_is.measured is None or as_is.measured.step_ns is None:
        return None
    most_ns = _WORTH * as_is.measured.step_ns
    helped = {
        process.edits: process.measured.step_ns
        for process in others
        if process.reason is None and process.measured is not None and (process.measured.step_ns or math.inf) < most_ns
    }
    best: dict[str, str] = {}
    for (text, *more), _ in sorted(helped.items(), key=lambda item: item[1] or 0):
        if not more:
            best.setdefault(parse_edits([text])[0].spec.name, text)
    together = tuple(edit.text for edit in parse_edits(best.values()))
    return together if len(together) > 1 else None


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
