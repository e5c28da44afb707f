"""Rows of causes: calls of modules that need not be made, or not one by one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from profkit.analysis.causes.changes import NOTHING, By, fuse, remove_operations
from profkit.analysis.causes.evidence import Cause, Evidence, Operation, SourceLine, name_times, source_line
from profkit.analysis.step_replay.facts import World
from profkit.analysis.step_replay.kernel_edits import SMALLEST_NS
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import BACKWARD, FORWARD
from profkit.run.work import IndependentCalls

_ALIKE = 0.8
"""Calls whose kernels take this share of the longest one's do the same work."""
_SHORT_NS = 20_000
"""Kernels that take no longer leave the GPU mostly empty, so that many samples take little more than one."""
_OF_FURTHER: By = {"least": 0.1, "expected": 0.4, "most": 1.0}
"""What a further sample takes of what its own kernel takes beyond its start, if one kernel computes all."""


def _unread_passes(evidence: Evidence) -> Iterator[Cause]:
    """Forward passes with gradients that no backward pass reads, as of a model that is asked once more for a log."""
    if evidence.step is None:
        return
    for name, passed, calls in evidence.unread_calls:
        read = max(1, round(passed))

        def choose(step: ReplayedStep, read: int = read, calls: Sequence[int] = calls) -> list[int]:
            return [at for one in evidence.operations_in(step, calls)[:-read] for at in one]

        durations = evidence.step.columns.duration_ns
        passes = evidence.operations_in(evidence.step, calls)
        times_ns = [sum(durations[at] for at in one) for one in passes]
        # Which of them is not read, nobody recorded: it is known what goes only if they take the same.
        if len(passes) > read and min(times_ns) >= _ALIKE * max(times_ns):
            yield Cause(
                code="unread-graph",
                cause=f"{name} is called {name_times(len(passes))}, and backward goes through it {name_times(passed)}",
                module=name,
                change="call it once for both, or for a log every N steps",
                changes=[remove_operations("no pass that nobody reads", choose, NOTHING, "which of the calls it is")],
                costs="what that call is for, in the other steps",
                evidence={"calls": len(passes), "passes": passed, "call_ns": round(median(times_ns))},
            )


def unread_graphs(evidence: Evidence) -> Iterator[str]:
    """Note of the same where nobody can say what it costs."""
    steps = max(1, evidence.summary.program_steps)
    priced = {cause.module for cause in _unread_passes(evidence)}
    for name, passed, calls in evidence.unread_calls:
        if name not in priced:
            yield (
                f"{name} is called with gradients {name_times(len(calls) / steps)}, and backward goes through it "
                f"{name_times(passed)}: torch.no_grad() around the other calls spares memory and Python"
            )


def _separate_calls(evidence: Evidence) -> Iterator[Cause]:
    """A module is called for each sample, say, though none of these calls needs what another of them made."""
    if evidence.step is None or evidence.work is None:
        return
    durations = evidence.step.columns.duration_ns
    for calls in evidence.work.independent_calls:
        groups = _group_alike(evidence, evidence.step, calls)
        times_ns = [durations[row] for group in groups for row in group]
        if not times_ns:
            continue

        def choose(step: ReplayedStep, calls: IndependentCalls = calls) -> list[list[int]]:
            return _group_alike(evidence, step, calls)

        yield Cause(
            code="loop",
            cause=f"{calls.module} is called {calls.calls:,} times a pass, and no call needs another's result",
            detail=f": {len(times_ns):,} kernels",
            line=_find_calling_line(evidence, calls.module),
            module=calls.module,
            change=f"one call for all of {'one size' if calls.sizes > 1 else 'them'}, on what they are given stacked "
            "together",
            changes=[fuse("one call", choose, _size_of_all)],
            costs="a batch norm then sees all of them together",
            evidence={"calls": calls.calls, "kernels": len(times_ns), "time_ns": sum(times_ns)},
        )


def _group_alike(evidence: Evidence, step: ReplayedStep, calls: IndependentCalls) -> list[list[int]]:
    """Return the operations of a module's calls in one pass that do the same: the first of a name of each call, ….

    The first call may do more, such as casts of weights. Modules of one kind have weights of their own. Images of
    several sizes are taken to be as many of each, and to come one size after another.
    """
    assert evidence.trace is not None
    ranges, operations = evidence.trace.trace.ranges, evidence.operations(step)
    passes = _number_passes(operations)
    groups = defaultdict[tuple[str, int, int, str, int], list[int]](list)
    for phase in (FORWARD, BACKWARD):
        for at in evidence.module_ranges.get((phase, calls.module), ()):
            count = Counter[str]()
            for row in (row for call in evidence.operations_in(step, [at]) for row in call):
                name = operations[row].name
                groups[phase, int(ranges.name[at]), passes[row], name, count[name]].append(row)
                count[name] += 1
    parts = (part for group in groups.values() for part in _split(group, calls.sizes))
    return [part for part in parts if len(part) > 1]


def _split(rows: list[int], parts: int) -> list[list[int]]:
    size = -(-len(rows) // parts)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _number_passes(operations: Sequence[Operation]) -> list[int]:
    """Return of each operation in how many-th pass it is launched: one ends when forward follows backward."""
    number, is_backward, numbers = 0, False, []
    for operation in operations:
        number += is_backward and operation.phase == FORWARD
        if operation.phase in (FORWARD, BACKWARD):
            is_backward = operation.phase == BACKWARD
        numbers.append(number)
    return numbers


def _size_of_all(world: World, durations: Sequence[int]) -> float:
    """Return how long one kernel takes that does what these do, each for other samples."""
    if max(durations) > _SHORT_NS:
        return sum(durations)
    more_ns = sum(max(0, time_ns - SMALLEST_NS) for time_ns in durations) - max(0, max(durations) - SMALLEST_NS)
    return max(durations) + _OF_FURTHER[world] * more_ns


def _find_calling_line(evidence: Evidence, module: str) -> SourceLine | None:
    """Return the line that calls a module by the end of its name, None if none was seen to."""
    name = module.rpartition(".")[2]
    lines = [line for line in (*evidence.lines, *evidence.facts.callers) if line.file and line.method == name]
    line = max(lines, key=lambda line: line.time_ns, default=None)
    return None if line is None else source_line(line)


CALLS = (_unread_passes, _separate_calls)
