"""What a step's time is spent on, in few parts that sum up to the step: what the first lines of a summary show.

The parts are what the replayed step waited for. Where it cannot be replayed, or its replay is not as long as the
measured step, they are what the GPUs did on average; without a GPU they are phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from profkit.analysis.step_replay.limits import OUTSIDE, Limit, LineLimit, StepLimits
from profkit.analysis.time_account.account import TimeAccount, share_out
from profkit.names import DATA, STEP
from profkit.run.lines import LineTime

Kind = Limit | Literal["data", "phase", "rest"]
"""What a part of a step is: a `Limit` (``data`` is the wait for a batch, which ``python`` leaves out), or a phase."""
Basis = Literal["replay", "gpu", "phases"]

LARGEST_MISFIT = 0.15
"""A replayed step that is longer or shorter by a larger share than this does not stand for the measured one."""

SMALLEST_PART = 0.01
"""A part below this share of the step goes into the rest."""


@dataclass(frozen=True)
class StepPart:
    """One part: its time, that of each phase in it where this is known, and the line that most of it goes to."""

    kind: Kind
    time_ns: int
    phases: Mapping[str, int] = field(default_factory=dict)
    line: LineLimit | None = None


@dataclass(frozen=True)
class StepTree:
    """The parts of a step, the longest first; they sum up to ``step_ns``. ``basis`` is where they come from."""

    step_ns: int
    basis: Basis
    parts: tuple[StepPart, ...]

    def share(self, time_ns: float) -> float:
        """Return a part of the step as a fraction of it."""
        return time_ns / self.step_ns if self.step_ns else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)


def divide_step(
    account: TimeAccount, limits: StepLimits | None, lines: Sequence[LineTime], step_ns: float
) -> StepTree | None:
    """Return the parts of a step that takes ``step_ns``; None where neither a GPU nor phases are known."""
    whole = round(step_ns)
    if limits is not None and stands_for_step(limits):
        basis: Basis = "replay"
        parts = list(_join(_by_limits(limits)))
    elif len(account):
        basis, parts = "gpu", [StepPart(kind, time_ns) for kind, time_ns in _by_gpu_time(account) if time_ns]
    else:
        basis, parts = "phases", list(_by_phases(account, lines, whole))
    if not parts:
        return None
    times = share_out(whole, [part.time_ns for part in parts])
    scaled = [replace(part, time_ns=time_ns) for part, time_ns in zip(parts, times, strict=True)]
    return StepTree(whole, basis, tuple(_with_rest(scaled, whole)))


def stands_for_step(limits: StepLimits) -> bool:
    """Return whether the replayed step is about as long as the measured one, so that what limits it limits that too."""
    return bool(limits.step_ns) and abs(limits.calibrated_ns / limits.step_ns - 1) <= LARGEST_MISFIT


def _by_limits(limits: StepLimits) -> Iterator[StepPart]:
    for part in limits.parts:
        is_data = part.limit == Limit.PYTHON and part.phase == DATA
        line = next((line for line in limits.lines_of(part.limit) if (line.phase == DATA) == is_data), None)
        yield StepPart("data" if is_data else part.limit, part.time_ns, {part.phase: part.time_ns}, line)


def _join(parts: Iterable[StepPart]) -> Iterator[StepPart]:
    """Yield the parts of each kind as one, with its phases."""
    kinds: dict[Kind, list[StepPart]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).append(part)
    for kind, mine in kinds.items():
        phases: dict[str, int] = {}
        for part in mine:
            for phase, time_ns in part.phases.items():
                phases[phase] = phases.get(phase, 0) + time_ns
        yield StepPart(kind, sum(part.time_ns for part in mine), phases, mine[0].line)


def _by_gpu_time(account: TimeAccount) -> Iterator[tuple[Kind, int]]:
    parts, idle = account.sum_parts()[0], account.idle_time().causes
    yield Limit.COMPUTING, parts.computing_ns
    yield Limit.COMMUNICATING, parts.exposed_communication_ns
    yield Limit.COPYING, parts.exposed_copy_ns
    yield "data", idle.data_ns
    yield Limit.PREPARING, idle.launching_ns
    yield Limit.WAITING, idle.synchronising_ns
    yield Limit.PYTHON, idle.outside_cuda_ns


def _by_phases(account: TimeAccount, lines: Sequence[LineTime], step_ns: int) -> Iterator[StepPart]:
    """Yield the phases' unprofiled times and what is left of the step; nothing if several contexts have their own."""
    timed = account.timed
    if timed is None or len(timed.contexts) != 1:
        return
    left_ns = step_ns
    for times in timed.phases:
        if times.phase != STEP:
            time_ns = round(times.clean_ns)
            left_ns -= time_ns
            kind: Kind = "data" if times.phase == DATA else "phase"
            yield StepPart(kind, time_ns, {times.phase: time_ns}, _longest(lines, times.phase))
    if 0 < left_ns < step_ns:
        yield StepPart(Limit.PYTHON, left_ns, {OUTSIDE: left_ns}, _longest(lines, None))


def _longest(lines: Sequence[LineTime], phase: str | None) -> LineLimit | None:
    """Return the line in which Python stands longest in a phase; a call of backward says nothing of where."""
    own = [
        line
        for line in lines
        if line.phase == phase and line.thread != "worker" and not (line.called or "").endswith("backward")
    ]
    line = max(own, key=lambda line: line.time_ns, default=None)
    if line is None or line.file is None:
        return None
    return LineLimit(Limit.PYTHON, phase or OUTSIDE, line.file, line.line, line.function, line.called, line.time_ns)


def _with_rest(parts: Sequence[StepPart], step_ns: int) -> Iterator[StepPart]:
    """Yield the parts, the longest first, and small ones together as the rest."""
    large = [part for part in parts if part.time_ns >= SMALLEST_PART * step_ns]
    yield from sorted(large, key=lambda part: -part.time_ns)
    rest_ns = step_ns - sum(part.time_ns for part in large)
    if rest_ns:
        yield StepPart("rest", rest_ns)
