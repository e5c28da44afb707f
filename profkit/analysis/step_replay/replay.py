"""Runs a step again, in one pass over its calls: a race of host threads, streams and waits.

- A call begins its gap after the call before it has ended (`columns`), and takes its own time.
- An operation begins when the last of these is over: its launch and the launch's latency; the operation before it on
  its stream and the gap between the two; what its stream waits for.
- A call that waits ends its own time after it began, or a wake-up time after its last target has ended.
- A copy from or to pageable memory runs inside its call, whose own time is what passes until the copy can begin.
- The first operation of a CUDA graph begins during its launch, after the recorded share of it.
- A launch into a queue that holds `QUEUE_DEPTH` operations and events ends when the first of them has begun.

The constants are medians and means of the recording itself. An operation that began more than `STALL_NS` after the
rules say keeps that delay: idle GPUs sometimes do, and nobody knows why (a shared GPU would look so). Latencies,
gaps between operations and wake-up times that the recording shows are its own; the constants stand where it hides them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from profkit.analysis.step_replay import COPY, LAUNCH, NODE, NONE, WAIT, StepColumns

QUEUE_DEPTH = 1021
"""A full queue held up 205 launches in a recording of an H200; 188 ended with 1,020 ahead, 17 with 1 or 2 fewer."""
STALL_NS = 20_000

BY_LAUNCH = -2
"""Of an operation: it began as soon as it was launched; its stream was free."""
EARLIER = -3
"""Of a call: an operation of an earlier step made room for its launch."""

_FEWEST = 3
STEADY = 0.001
"""Steps that follow each other and differ by less than this share are steady."""
_MOST_ROUNDS = 6
_LONG_BEFORE_NS = 20_000
_SURELY_FREE_NS = 2_500
"""No stream pauses longer than this between two operations that wait in its queue."""


@dataclass(frozen=True)
class Constants:
    """What a recording shows of its machine, in nanoseconds; the defaults stand where it shows nothing (an H200's).

    ``latency_ns`` lies between the end of a launch and the start of its operation on a free stream; ``gap_ns`` between
    two operations, ``gaps_ns`` by the kinds of both; ``wake_ns`` between an operation's end and the end of the call
    that waited for it; ``wait_ns`` is such a call's own time if there is nothing to wait for; ``launch_ns`` is a
    launch's own time; ``event_ns`` passes before a stream that waited for another one goes on.
    """

    latency_ns: int = 1_700
    gap_ns: int = 1_100
    gaps_ns: Mapping[tuple[int, int], int] = field(default_factory=dict)
    wake_ns: int = 10_000
    wait_ns: int = 2_000
    launch_ns: int = 5_000
    event_ns: int = 1_000


def measure_constants(steps: Iterable[StepColumns]) -> Constants:
    """Return the constants of a recording: medians over its steps, of cases in which nothing else decides."""
    latency: list[int] = []
    gaps: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    wake: list[int] = []
    wait: list[int] = []
    launch: list[int] = []
    for step in steps:
        for row, at in enumerate(step.previous):
            launched_ns = step.call_end_ns[step.launcher[row]]
            free_ns = step.end_ns[at] if at != NONE else step.free_ns.get(step.stream[row], 0)
            if (
                row in step.awaited
                or step.kind[step.launcher[row]] == COPY
                or _launches_graph(step, step.launcher[row])
            ):
                continue
            if at != NONE and free_ns > launched_ns + _LONG_BEFORE_NS:
                gaps[step.operation[at], step.operation[row]].append(step.start_ns[row] - free_ns)
            elif free_ns < step.call_start_ns[step.launcher[row]]:
                latency.append(step.start_ns[row] - launched_ns)
        for call, targets in enumerate(step.targets):
            if step.kind[call] == LAUNCH and not _launches_graph(step, call):
                launch.append(step.own_ns[call])
            if step.kind[call] != WAIT:
                continue
            ended_ns = max((step.end_ns[row] for row in targets), default=0)
            if ended_ns <= step.call_start_ns[call]:
                wait.append(step.own_ns[call])
            else:
                wake.append(step.call_end_ns[call] - ended_ns)
    default = Constants()
    together = [gap for some in gaps.values() for gap in some]
    gap_ns = _mean(together, default.gap_ns)
    return Constants(
        latency_ns=_median([one for one in latency if one < STALL_NS], default.latency_ns),
        gap_ns=gap_ns,
        gaps_ns={kinds: _mean(some, gap_ns) for kinds, some in gaps.items()},
        wake_ns=max(0, _median(wake, default.wake_ns)),
        wait_ns=_median(wait, default.wait_ns),
        launch_ns=_median(launch, default.launch_ns),
    )


def _launches_graph(step: StepColumns, call: int) -> bool:
    first, last = step.launches[call]
    return last - first > 1


def _median(values: Sequence[int], default: int) -> int:
    return round(median(values)) if len(values) >= _FEWEST else default


def _mean(values: Sequence[int], default: int) -> int:
    """Return the mean of the values but stalls: of many gaps in a row it is the sum that counts."""
    usual = [value for value in values if value < STALL_NS]
    return round(fmean(usual)) if len(usual) >= _FEWEST else default


@dataclass(frozen=True, eq=False)
class Replayed:
    """When each call and operation began and ended, in nanoseconds since the step began, and what it waited for.

    ``call_cause`` is the operation after whose end a call ended, `NONE` if it ended in its own time. ``cause`` is the
    operation after whose end another one began, `BY_LAUNCH`, or `NONE` for work of an earlier step.
    """

    call_start_ns: list[int]
    call_end_ns: list[int]
    call_cause: list[int]
    start_ns: list[int]
    end_ns: list[int]
    cause: list[int]

    @property
    def host_ns(self) -> int:
        """How long the host took, which then begins the next step."""
        return max(self.call_end_ns, default=0)

    @property
    def step_ns(self) -> int:
        """How long the step took: until its host and its GPUs had ended."""
        return max(max(self.call_end_ns, default=0), max(self.end_ns, default=0))


class Queues:
    """What waits on each stream, in the order of the launches: operations of earlier steps, then those of this one."""

    def __init__(self, backlog_ns: Mapping[int, list[int]]) -> None:
        self._backlog_ns = backlog_ns
        self.rows: defaultdict[int, list[int]] = defaultdict(list)
        """Those of this step, by stream, each as often as it takes places."""
        self.surely_room = QUEUE_DEPTH - max(map(len, backlog_ns.values()), default=0)
        """A stream with fewer rows has room."""

    def find_room(self, stream: int, start_ns: Sequence[int]) -> tuple[int, int]:
        """Return when a launch finds room in a stream's queue, and the operation that makes it by beginning then.

        It is 0 where there is room, and the operation is `EARLIER` where another step has launched it.
        """
        rows, backlog_ns = self.rows[stream], self._backlog_ns.get(stream, ())
        at = len(rows) - QUEUE_DEPTH
        if at >= 0:
            return start_ns[rows[at]], rows[at]
        at += len(backlog_ns)
        return (backlog_ns[at], EARLIER) if at >= 0 else (0, NONE)

    def add(self, stream: int, row: int, slots: int) -> None:
        self.rows[stream].extend([row] * slots)


def prepare(step: StepColumns, constants: Constants) -> StepColumns:
    """Return a recorded step that is ready to run.

    Its calls' own times are less what the recording's waits and full queues cost; stalls are known.
    """
    ready = replace(
        step,
        own_ns=_own_times(step, constants),
        between_ns=_find_gaps(step, constants),
        wake_ns=_find_wakes(step),
    )
    ready = replace(ready, graph_share=_graph_shares(ready), latency_ns=_find_latencies(ready, constants))
    return replace(ready, stall_ns=_find_stalls(ready, constants))


def run(step: StepColumns, constants: Constants) -> Replayed:
    found = prepare_result(step)
    for _ in run_on(step, constants, found, ()):
        pass
    return found


def prepare_result(step: StepColumns) -> Replayed:
    calls, operations = len(step.own_ns), len(step.duration_ns)
    return Replayed([], [], [NONE] * calls, [0] * operations, [0] * operations, [BY_LAUNCH] * operations)


def run_on(  # noqa: PLR0912  the loop, in one piece
    step: StepColumns, constants: Constants, found: Replayed, shared: Container[int]
) -> Iterator[int]:
    """Run a step as `run` does, into ``found``, and yield when each of the ``shared`` operations begins.

    How long such a one takes is read from the step only then.
    """
    between, stalls, wakes, shares = step.between_ns, step.stall_ns, step.wake_ns, step.graph_share
    latency, event = step.latency_ns, constants.event_ns
    previous, duration, awaited, streams, free = (
        step.previous,
        step.duration_ns,
        step.awaited,
        step.stream,
        step.free_ns,
    )
    call_start, call_end, call_cause = found.call_start_ns, found.call_end_ns, found.call_cause
    start, end, cause = found.start_ns, found.end_ns, found.cause
    queues, slots = Queues(step.backlog_ns), step.slots
    queued, surely_room = queues.rows, queues.surely_room
    calls = zip(step.before, step.gap_ns, step.own_ns, step.kind, step.launches, strict=True)
    for at, (earlier, gap, own, kind, (first, last)) in enumerate(calls):
        begun = gap if earlier < 0 else call_end[earlier] + gap
        ended = begun + own
        if kind == WAIT:
            waking = wakes.get(at, constants.wake_ns)
            for row in step.targets[at]:
                if end[row] + waking > ended:
                    ended, call_cause[at] = end[row] + waking, row
        if first < last:
            if kind == COPY:
                ready = ended
            else:
                if len(queued[streams[first]]) >= surely_room:
                    room_ns, row = queues.find_room(streams[first], start)
                    if room_ns > ended:
                        ended, call_cause[at] = room_ns, row
                ready = begun + round(shares[at] * own) if at in shares else max(begun, ended + latency[first])
            for row in range(first, last):
                begins, last_row = ready, previous[row]
                if last_row >= 0:
                    if end[last_row] + between[row] > begins:
                        begins, cause[row] = end[last_row] + between[row], last_row
                elif free and free.get(streams[row], 0) > begins:
                    begins, cause[row] = free[streams[row]], NONE
                if row in awaited:
                    for other in awaited[row]:
                        if end[other] + event > begins:
                            begins, cause[row] = end[other] + event, other
                if row in stalls:
                    begins += stalls[row]
                if row in shared:
                    yield begins
                start[row], end[row] = begins, begins + duration[row]
                queued[streams[row]].extend([row] * slots[row])
            if kind == COPY:
                ended = max(ended, end[last - 1] + step.call_end_ns[at] - step.end_ns[last - 1])
                call_cause[at] = last - 1
        call_start.append(begun)
        call_end.append(ended)


@dataclass(frozen=True)
class Steady:
    """A step among others like it: how it runs after them, how long each takes, and when the ones before had ended.

    ``found`` counts from when the host begins the step; the steps before it end ``ended_ns`` after that, and this one
    ``step_ns`` later still, with what the mean step waits longer for data. ``begun`` is the step with what the ones
    before have left to the GPU.
    """

    begun: StepColumns
    found: Replayed
    step_ns: int
    ended_ns: int


def run_steadily(step: StepColumns, constants: Constants) -> Steady:
    """Run a step again and again, as a program does: the host begins the next one while the GPU has work left.

    So what a step takes is how much later it ends than the one before.
    """
    found, ended_ns, step_ns = run(step, constants), 0, 0
    for _ in range(_MOST_ROUNDS):
        ended_ns, following, before_ns = found.step_ns - found.host_ns, follow(step, found), step_ns
        if following is not step:
            step = following
            found = run(step, constants)
        step_ns = found.step_ns - ended_ns
        if abs(step_ns - before_ns) <= STEADY * step_ns or not step.free_ns:
            break
    return Steady(step, found, step_ns + step.late_ns, ended_ns)


def follow(step: StepColumns, found: Replayed) -> StepColumns:
    """Return the step as it begins when the host has ended it: what it left to the GPU is there still."""
    busy = _still_busy(step, found, found.host_ns)
    if busy == step.free_ns:
        return step
    return replace(step, free_ns=busy, backlog_ns=_still_queued(step, found, found.host_ns))


def _still_busy(step: StepColumns, found: Replayed, host_ns: int) -> dict[int, int]:
    ends = dict(step.free_ns)
    for stream, end in zip(step.stream, found.end_ns, strict=True):
        if end > host_ns:
            ends[stream] = max(ends.get(stream, 0), end)
    return {stream: end - host_ns for stream, end in ends.items() if end > host_ns}


def _still_queued(step: StepColumns, found: Replayed, host_ns: int) -> dict[int, list[int]]:
    begins: defaultdict[int, list[int]] = defaultdict(list)
    for stream, earlier in step.backlog_ns.items():
        begins[stream].extend(start - host_ns for start in earlier if start > host_ns)
    for stream, start, slots in zip(step.stream, found.start_ns, step.slots, strict=True):
        if start > host_ns:
            begins[stream].extend([start - host_ns] * slots)
    return dict(begins)


def _own_times(step: StepColumns, constants: Constants) -> list[int]:
    own = list(step.own_ns)
    queues = Queues(step.backlog_ns)
    for at, (first, last) in enumerate(step.launches):
        if step.kind[at] == WAIT and any(step.end_ns[row] > step.call_start_ns[at] for row in step.targets[at]):
            own[at] = min(own[at], constants.wait_ns)
        elif step.kind[at] == COPY:
            own[at] = _time_to_copy(step, at, constants)
        for row in range(first, last):
            if queues.find_room(step.stream[row], step.start_ns)[0] > step.call_start_ns[at]:
                own[at] = min(own[at], constants.launch_ns)
            queues.add(step.stream[row], row, step.slots[row])
    return own


def _time_to_copy(step: StepColumns, call: int, constants: Constants) -> int:
    row = step.launches[call][0]
    inside_ns = max(0, step.start_ns[row] - step.call_start_ns[call])
    at = step.previous[row]
    free_ns = step.end_ns[at] if at != NONE else step.free_ns.get(step.stream[row], 0)
    return min(inside_ns, constants.launch_ns) if free_ns > step.call_start_ns[call] else inside_ns


def _graph_shares(step: StepColumns) -> dict[int, float]:
    """Return for launches of graphs the share after which the first operation began, at most all of it.

    Where its stream was busy until then, the share is the median of the others.
    """
    shares, hidden = {}, []
    for call, (first, last) in enumerate(step.launches):
        if step.kind[call] != LAUNCH or last - first <= 1:
            continue
        at = step.previous[first]
        free_ns = step.end_ns[at] if at != NONE else step.free_ns.get(step.stream[first], 0)
        if free_ns > step.call_start_ns[call] or not step.own_ns[call]:
            hidden.append(call)
        else:
            shares[call] = min(1.0, (step.start_ns[first] - step.call_start_ns[call]) / step.own_ns[call])
    usual = median(shares.values()) if shares else 1.0
    return {**dict.fromkeys(hidden, usual), **shares}


def _find_wakes(step: StepColumns) -> dict[int, int]:
    wakes = {}
    for call, targets in enumerate(step.targets):
        ended_ns = max((step.end_ns[row] for row in targets), default=0)
        if step.kind[call] == WAIT and ended_ns > step.call_start_ns[call]:
            wakes[call] = max(0, step.call_end_ns[call] - ended_ns)
    return wakes


def _find_gaps(step: StepColumns, constants: Constants) -> list[int]:
    """It is the recorded time where no host took part: within a CUDA graph, and where it was in its queue by then."""
    gaps = []
    for row, at in enumerate(step.previous):
        usual_ns = (
            0 if at == NONE else constants.gaps_ns.get((step.operation[at], step.operation[row]), constants.gap_ns)
        )
        recorded_ns = 0 if at == NONE else step.start_ns[row] - step.end_ns[at]
        call = step.launcher[row]
        is_queued = at != NONE and step.end_ns[at] > step.call_end_ns[call] + constants.latency_ns
        is_seen = is_queued and recorded_ns < STALL_NS and row not in step.awaited and step.kind[call] != COPY
        gaps.append(recorded_ns if is_seen or step.operation[row] == NODE else usual_ns)
    return gaps


def _find_latencies(step: StepColumns, constants: Constants) -> list[int]:
    latencies = []
    for row, at in enumerate(step.previous):
        call = step.launcher[row]
        free_ns = step.free_ns.get(step.stream[row], 0) if at == NONE else step.end_ns[at]
        recorded_ns = step.start_ns[row] - step.call_end_ns[call]
        is_seen = free_ns + _SURELY_FREE_NS < step.start_ns[row] and free_ns < step.call_end_ns[call]
        is_seen = is_seen and row not in step.awaited and step.kind[call] == LAUNCH
        latencies.append(recorded_ns if is_seen and recorded_ns < STALL_NS else constants.latency_ns)
    return latencies


def _find_stalls(step: StepColumns, constants: Constants) -> dict[int, int]:
    stalls = {}
    for row, at in enumerate(step.previous):
        call = step.launcher[row]
        if step.kind[call] == COPY:
            continue
        free_ns = step.free_ns.get(step.stream[row], 0) if at == NONE else step.end_ns[at] + step.between_ns[row]
        ready_ns = step.call_end_ns[call] + step.latency_ns[row]
        if call in step.graph_share:
            ready_ns = step.call_start_ns[call] + round(step.graph_share[call] * step.own_ns[call])
        ready_ns = max(ready_ns, free_ns)
        ready_ns = max([ready_ns, *(step.end_ns[other] + constants.event_ns for other in step.awaited.get(row, ()))])
        if step.start_ns[row] - ready_ns > STALL_NS:
            stalls[row] = step.start_ns[row] - ready_ns
    return stalls


@dataclass(frozen=True)
class Proof:
    """How well a step that runs as it was recorded ends where it ended, in nanoseconds.

    ``operations_p50_ns`` and ``operations_p95_ns`` are of the distances between the recorded and replayed ends of
    operations. Of several ranks it is how well all together end.
    """

    recorded_ns: int
    replayed_ns: int
    operations_p50_ns: int
    operations_p95_ns: int

    @property
    def error(self) -> float:
        return (self.replayed_ns - self.recorded_ns) / self.recorded_ns if self.recorded_ns else 0.0


def prove(*runs: tuple[StepColumns, Replayed]) -> Proof:
    """Return how well a step was replayed that ran as it was recorded: on one rank, or on several together."""
    ends = [abs(a - b) for step, found in runs for a, b in zip(found.end_ns, step.end_ns, strict=True)]
    return Proof(
        max(step.recorded_ns for step, _ in runs),
        max(found.step_ns for _, found in runs),
        _quantile(ends, 0.5),
        _quantile(ends, 0.95),
    )


def _quantile(values: Sequence[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0
