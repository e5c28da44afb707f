"""What limits a step: the chain of calls and operations that each ended last before the next could begin.

The chain is followed back from what ended last in the step to its beginning. Its pieces follow one another without
gaps, so that they sum up to the step, in integers. `StepLimits` holds the sums that commands ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from profkit.analysis.step_replay import COPY, NONE, WAIT, StepColumns
from profkit.analysis.step_replay.calibrate import Fit, describe_replay
from profkit.analysis.step_replay.replay import BY_LAUNCH, EARLIER, Proof, Replayed
from profkit.analysis.time_account.gpu_time import LONGEST_PAUSE_NS
from profkit.names import DATA
from profkit.run.lines import LineTime, calls_backward

OUTSIDE = "outside"
"""The phase of what lies in none."""


class Cause(StrEnum):
    PYTHON = "python"
    """The host between two CUDA calls: Python, the framework, data."""
    CALL = "call"
    """The host within a CUDA call that does not wait: mostly launches."""
    ALLOCATING = "allocating"
    """The host within a CUDA call that allocates or frees memory."""
    LATENCY = "latency"
    """From the end of a launch to the start of its operation on a free GPU."""
    OPERATION = "operation"
    """An operation runs on the GPU."""
    BETWEEN = "between"
    """Between two operations of a stream, or after a wait for another stream."""
    WAKING = "waking"
    """From an operation's end to that of the call that waited for it."""
    EARLIER = "earlier"
    """Work of an earlier step keeps the stream busy."""


class Moment(NamedTuple):
    """When a call or an operation begins or ends: ``at`` is its place in the step's columns."""

    is_call: bool
    at: int
    is_end: bool


class Piece(NamedTuple):
    """A piece of the chain, and the call or operation that it leads to."""

    cause: Cause
    start_ns: int
    end_ns: int
    to: Moment


class Limit(StrEnum):
    """What a step waits for, as the first screen names it; every `Cause` and category of operations counts for one."""

    PYTHON = "python"
    """Python without the GPU: pauses of more than `LONGEST_PAUSE_NS` between CUDA calls, and the wait for data."""
    COMPUTING = "computing"
    """The GPU computes: kernels, and the gaps between them while the host is ahead."""
    PREPARING = "preparing"
    """Python prepares kernels: short pauses between CUDA calls, launches, and the launches' latency."""
    COMMUNICATING = "communicating"
    WAITING = "waiting"
    """The host wakes up from a wait, or prepares a copy from or to pageable memory."""
    COPYING = "copying"
    """Memory copies and fills on the GPU."""
    ALLOCATING = "allocating"


OF_OPERATION = {"communication": Limit.COMMUNICATING, "copy": Limit.COPYING, "fill": Limit.COPYING}
_LARGEST_MISFIT = 0.15
"""A replayed step that is longer or shorter by a larger share than this does not stand for the measured one."""
_HOST = (Limit.PYTHON, Limit.PREPARING, Limit.WAITING)


class LimitPart(NamedTuple):
    """A part of what limits a step.

    ``cause`` is a `Cause` or the category of an operation, ``phase`` is `OUTSIDE` of all phases, ``module`` the
    innermost one, as ``profkit kernels --by module`` names it, None outside of all.
    """

    limit: Limit
    cause: str
    phase: str
    module: str | None
    time_ns: int


@dataclass(frozen=True)
class LineLimit:
    """How long a line of source limits a step, as Python, while it prepares kernels, or because it waits."""

    limit: Limit
    phase: str
    file: str
    line: int
    function: str
    called: str | None
    time_ns: int

    @property
    def place(self) -> tuple[str | None, int]:
        return self.file, self.line


@dataclass(frozen=True)
class StepLimits:
    """What limits the step of the median length at its unprofiled speed, and how well its replay is proven.

    ``step_ns`` is the time account's step: ``unprofiled_ns``, or as recorded where that is None. ``parts`` sum up to
    it; each is the longest chain's share of one limit, cause, phase and module. ``lines`` say which lines of source
    stand behind the parts of the host (`Limit.PYTHON`, ``PREPARING`` and ``WAITING``): their times and
    ``unplaced_ns`` sum up to these; without recorded lines all is unplaced. ``trainers`` are the places of those that
    run a trainer, as all lines of the step show, also those that limit nothing. ``calibrated_ns`` is how long the
    calibrated replay takes, from which the parts are scaled. ``refusal`` says why nothing is known; then ``step_ns``
    is 0.
    """

    step_ns: int
    unprofiled_ns: int | None
    proof: Proof | None
    fit: Fit
    refusal: str | None = None
    parts: tuple[LimitPart, ...] = ()
    lines: tuple[LineLimit, ...] = ()
    unplaced_ns: int = 0
    trainers: frozenset[tuple[str | None, int]] = frozenset()
    calibrated_ns: int = 0
    by_rank: Mapping[int, int] = field(default_factory=dict)
    """Of a step of several ranks: for how long each limits it; they add up to the step."""

    @property
    def stand_for_step(self) -> bool:
        """Whether the replayed step is about as long as the measured one, so that what limits it limits that too."""
        return bool(self.step_ns) and abs(self.calibrated_ns / self.step_ns - 1) <= _LARGEST_MISFIT

    @property
    def limited_by(self) -> dict[str, int]:
        """Cause → nanoseconds in all phases, the longest first; they add up to the step."""
        return sum_parts(self.parts, "cause")

    @property
    def by_phase(self) -> dict[str, dict[str, int]]:
        return {
            phase: sum_parts([part for part in self.parts if part.phase == phase], "cause")
            for phase in sum_parts(self.parts, "phase")
        }

    def parts_of(self, limit: Limit) -> list[LimitPart]:
        return [part for part in self.parts if part.limit == limit]

    def lines_of(self, limit: Limit) -> list[LineLimit]:
        """Return the lines, the longest first, without those that call backward or run a trainer: they say nothing."""
        own = [line for line in self.lines if line.place not in self.trainers and not calls_backward(line.called)]
        mine = [line for line in own if line.limit == limit]
        return sorted(mine, key=lambda line: -line.time_ns)

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_ns": self.step_ns,
            "unprofiled_ns": self.unprofiled_ns,
            "calibrated_ns": self.calibrated_ns,
            "replay": describe_replay(self.proof, self.fit),
            "limits": sum_parts(self.parts, "limit"),
            "limited_by": self.limited_by,
            "by_phase": self.by_phase,
            "parts": [part._asdict() for part in self.parts],
            "lines": [asdict(line) for line in self.lines],
            "unplaced_ns": self.unplaced_ns,
            **({"by_rank": {str(rank): time_ns for rank, time_ns in self.by_rank.items()}} if self.by_rank else {}),
            "refusal": self.refusal,
        }


def sum_parts(parts: Iterable[LimitPart], key: Literal["limit", "cause", "phase", "module"]) -> dict[Any, int]:
    return _sum((getattr(part, key), part.time_ns) for part in parts)


def _sum(items: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    sums: dict[Any, int] = {}
    for key, time_ns in items:
        sums[key] = sums.get(key, 0) + time_ns
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def join_parts(pieces: Iterable[LimitPart]) -> tuple[LimitPart, ...]:
    """Return the pieces of one limit, cause, phase and module as one part each, the longest first."""
    sums = _sum(((piece.limit, piece.cause, piece.phase, piece.module), piece.time_ns) for piece in pieces)
    return tuple(
        LimitPart(limit, cause, phase, module, time_ns) for (limit, cause, phase, module), time_ns in sums.items()
    )


def classify_piece(piece: Piece, step: StepColumns, cause: str, phase: str) -> Limit:
    """Return what a piece of the chain counts for; ``cause`` is its cause, or the category of its operation."""
    match piece.cause:
        case Cause.PYTHON:
            is_long = phase == DATA or step.gap_ns[piece.to.at] > LONGEST_PAUSE_NS
            return Limit.PYTHON if is_long else Limit.PREPARING
        case Cause.CALL | Cause.WAKING:
            if cause == Cause.ALLOCATING:
                return Limit.ALLOCATING
            return Limit.WAITING if step.kind[piece.to.at] in (WAIT, COPY) else Limit.PREPARING
        case Cause.LATENCY:
            return Limit.PREPARING
        case _:
            return OF_OPERATION.get(cause, Limit.COMPUTING)


def place_lines(pieces: Sequence[LimitPart], lines: Sequence[LineTime]) -> tuple[tuple[LineLimit, ...], int]:
    """Return which lines stand behind the host's pieces, and how much of these is unplaced.

    A phase's long pauses go to the lines that take about as long; what a phase prepares goes to its lines by the time
    that is left of them, and its waits by how often they wait. No line has more than its own time.
    """
    host = [piece for piece in pieces if piece.limit in _HOST]
    placed: dict[tuple[Limit, str, LineTime], int] = {}
    for phase, mine in _by_pool(host, lines).items():
        known = [line for line in lines if line.thread != "worker" and line.file and (line.phase or OUTSIDE) == phase]
        for limit, line, time_ns in _place_in_phase(mine, known):
            placed[limit, phase, line] = placed.get((limit, phase, line), 0) + time_ns
    found = tuple(
        LineLimit(limit, phase, line.file or "", line.line, line.function, line.called, time_ns)
        for (limit, phase, line), time_ns in sorted(placed.items(), key=lambda item: -item[1])
        if time_ns
    )
    return found, sum(piece.time_ns for piece in host) - sum(line.time_ns for line in found)


def _by_pool(pieces: Iterable[LimitPart], lines: Iterable[LineTime]) -> dict[str, list[LimitPart]]:
    has_data = any(line.phase == DATA for line in lines)
    pools: dict[str, list[LimitPart]] = {}
    for piece in pieces:
        phase = OUTSIDE if piece.phase == DATA and not has_data else piece.phase
        pools.setdefault(phase, []).append(piece)
    return pools


def _place_in_phase(pieces: Sequence[LimitPart], lines: Sequence[LineTime]) -> Iterator[tuple[Limit, LineTime, int]]:
    left = {line: max(0, line.own_ns) for line in lines}
    pauses = [piece.time_ns for piece in pieces if piece.limit == Limit.PYTHON]
    for pause_ns in sorted(pauses, reverse=True):
        for line, time_ns in _fill_pause(pause_ns, left):
            left[line] -= time_ns
            yield Limit.PYTHON, line, time_ns
    preparing_ns = sum(piece.time_ns for piece in pieces if piece.limit == Limit.PREPARING)
    whole_ns = max(preparing_ns, sum(left.values()), 1)
    for line, time_ns in left.items():
        yield Limit.PREPARING, line, preparing_ns * time_ns // whole_ns
    waiting_ns = sum(piece.time_ns for piece in pieces if piece.limit == Limit.WAITING)
    waits = sum(line.waits for line in lines)
    for line in lines:
        if line.waits:
            yield Limit.WAITING, line, int(waiting_ns * line.waits / waits)


def _fill_pause(pause_ns: int, left: Mapping[LineTime, int]) -> Iterator[tuple[LineTime, int]]:
    """Yield the line that takes about as long as a pause; if there is none, the longest ones until it is filled."""
    fitting = [line for line, time_ns in left.items() if time_ns >= _FITS * pause_ns]
    if fitting:
        line = min(fitting, key=left.__getitem__)
        yield line, min(pause_ns, left[line])
        return
    for line in sorted(left, key=lambda line: -left[line]):
        taken_ns = min(left[line], pause_ns)
        yield line, taken_ns
        pause_ns -= taken_ns


_FITS = 0.7


class RankRun(NamedTuple):
    """One rank's replayed step, its collectives in order, and when it began after the first rank's."""

    step: StepColumns
    found: Replayed
    collectives: Sequence[int] = ()
    begin_ns: int = 0

    def time_of(self, moment: Moment | None) -> int:
        return self.begin_ns + (0 if moment is None else _time_of(self.found, moment))


def find_limits(ranks: Sequence[RankRun]) -> list[tuple[int, Piece]]:
    """Return the chain of a replayed step from its beginning to its end, and which rank each piece is of.

    Ranks are given by their position. A collective begins when the last rank has come: there the chain goes on.
    """
    numbers = [{row: number for number, row in enumerate(rank.collectives)} for rank in ranks]
    at = max(range(len(ranks)), key=lambda at: ranks[at].begin_ns + ranks[at].found.step_ns)
    moment = _last_moment(ranks[at].found)
    pieces = []
    while moment is not None:
        end_ns, number = ranks[at].time_of(moment), numbers[at].get(moment.at)
        if not moment.is_call and moment.is_end and number is not None:
            rows = [rank.collectives[number] for rank in ranks]
            at = max(range(len(ranks)), key=lambda at: ranks[at].begin_ns + ranks[at].found.start_ns[rows[at]])
            moment = moment._replace(at=rows[at])
        earlier, cause = _find_earlier(ranks[at].step, ranks[at].found, moment)
        start_ns = ranks[at].time_of(earlier)
        if end_ns > start_ns:
            pieces.append((at, Piece(cause, start_ns, end_ns, moment)))
        moment = earlier
    return pieces[::-1]


def cut_before(pieces: Iterable[Piece], time_ns: int) -> list[Piece]:
    """Return the pieces, or what is left of them, after a time: before it other steps were not over."""
    left = (piece for piece in pieces if piece.end_ns > time_ns)
    return [piece if piece.start_ns >= time_ns else piece._replace(start_ns=time_ns) for piece in left]


def _last_moment(found: Replayed) -> Moment | None:
    ends = [
        Moment(is_call, max(range(len(column)), key=column.__getitem__), is_end=True)
        for is_call, column in ((True, found.call_end_ns), (False, found.end_ns))
        if column
    ]
    return max(ends, key=lambda moment: _time_of(found, moment), default=None)


def _time_of(found: Replayed, moment: Moment) -> int:
    if moment.is_call:
        return (found.call_end_ns if moment.is_end else found.call_start_ns)[moment.at]
    return (found.end_ns if moment.is_end else found.start_ns)[moment.at]


def _find_earlier(step: StepColumns, found: Replayed, moment: Moment) -> tuple[Moment | None, Cause]:
    """Return what this moment came after, None for the step's beginning, and what lies between the two."""
    at = moment.at
    if not moment.is_call:
        return (
            (Moment(False, at, is_end=False), Cause.OPERATION) if moment.is_end else _before_operation(step, found, at)
        )
    if not moment.is_end:
        before = step.before[at]
        return (None if before == NONE else Moment(True, before, is_end=True)), Cause.PYTHON
    awaited = found.call_cause[at]
    if awaited == EARLIER:
        return None, Cause.EARLIER
    if awaited == NONE:
        return Moment(True, at, is_end=False), Cause.CALL
    # Of a full queue the launch awaits an operation's start.
    return Moment(False, awaited, is_end=step.kind[at] in (WAIT, COPY)), Cause.WAKING


def _before_operation(step: StepColumns, found: Replayed, row: int) -> tuple[Moment | None, Cause]:
    cause = found.cause[row]
    if cause == NONE:
        return None, Cause.EARLIER
    if cause != BY_LAUNCH:
        return Moment(False, cause, is_end=True), Cause.BETWEEN
    call = step.launcher[row]
    # Copies from pageable memory, and many first operations of graphs, begin within their call.
    is_after = step.kind[call] != COPY and found.start_ns[row] >= found.call_end_ns[call]
    return Moment(True, call, is_end=is_after), Cause.LATENCY
