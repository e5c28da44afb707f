"""Rows of causes: calls of modules that need not be made, or not one by one: for each sample, or each time step."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import median

from profkit.analysis.causes.changes import NOTHING, By, call_once, fuse, remove_operations, scale_operations
from profkit.analysis.causes.evidence import (
    Cause,
    Evidence,
    Operation,
    SourceLine,
    edits,
    is_part,
    name_times,
    source_line,
)
from profkit.analysis.step_replay import World
from profkit.analysis.step_replay.kernel_edits import SMALLEST_NS, is_convolution
from profkit.analysis.step_replay.predict import StepChange
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import BACKWARD, FORWARD, kind_of, name_in_list
from profkit.run.work import IndependentCalls, IndependentTurns, RepeatedCalls

_ALIKE = 0.8
"""Calls whose kernels take this share of the longest one's do the same work."""
_SHORT_NS = 20_000
"""Kernels that take no longer leave the GPU mostly empty, so that many samples take little more than one."""
_OF_FURTHER: By = {"least": 0.1, "expected": 0.4, "most": 1.0}
"""What a further sample takes of what its own kernel takes beyond its start, if one kernel computes all."""
_CELL = re.compile(r"(lstm|gru)_cell")
"""torch's kernels of all that a cell does but its products."""
_MANY_STEPS = 16
"""A sequence has so many time steps."""
_PLAIN = 0.7
"""A loop over time steps that does nothing else has at least this share of its kernels in cells; dropout is little."""
_JOINT_PRODUCTS = {FORWARD: 1 / 2, BACKWARD: 3 / 4}
"""Which share of a cell's products needs no other time step: those of inputs, and in backward those of weights, too."""
_IN_LARGE_PRODUCT: By = {"least": 0.25, "expected": 0.5, "most": 1.0}
"""What products take of their time if one large one makes them for all time steps."""
_SUMS_LEFT: By = {"least": 0.0, "expected": 0.1, "most": 0.3}
"""What is left of the sums of weights' gradients over time steps, which the large products make."""
_OF_SHORTEST: By = {"least": 1, "expected": 2, "most": 6}
"""How many times as long as the shortest kernel of a cell that is written out one kernel takes for all of it."""
_CALLS_LEFT: By = {"least": 0.2, "expected": 0.4, "most": 1.0}
"""What is left of the time of launches: in an LSTM of two layers and 70 time steps cuDNN made 0.4 as many."""

_LONGEST_CELL = 32
_REPEATED = 0.9
"""Of kernels of equal time steps so many have the name of the one a time step before."""

_Holds = Callable[[Operation], bool]


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
                changes=[remove_operations(choose, NOTHING, "which of the calls it is")],
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
    step, durations = evidence.step, evidence.step.columns.duration_ns
    for calls in evidence.work.independent_calls:
        groups = _group_alike(evidence, step, calls)
        times_ns = [durations[row] for group in groups for row in group]
        if not times_ns:
            continue

        def choose(step: ReplayedStep, calls: IndependentCalls = calls) -> list[list[int]]:
            return _group_alike(evidence, step, calls)

        around = calls.module.removesuffix(".*").rpartition(".")[0]
        line, turns = _find_calling_line(evidence, calls.module), _group_turns(evidence, step, around, calls.module)
        if sum(map(len, turns)) > len(times_ns):

            def choose_all(
                step: ReplayedStep, calls: IndependentCalls = calls, around: str = around
            ) -> list[list[int]]:
                return [*_group_alike(evidence, step, calls), *_group_turns(evidence, step, around, calls.module)]

            yield _describe_loop(evidence, around, calls.calls, line, choose_all)
            continue
        each, change = "is called {:,} times a pass, and no call", "one call for all of them, on what they are given"
        has_list = calls.module.endswith(".*")
        if has_list:
            each = "are called one by one, {:,} times a pass, and none"
            change = "one operation for all of them, with their weights"
        elif calls.sizes > 1:
            change = "one call for all of one size, on what they are given"
        yield Cause(
            code="loop",
            cause=f"{calls.module} {each.format(calls.calls)} needs another's result",
            detail=f": {len(times_ns):,} kernels",
            line=line,
            module=calls.module,
            change=f"{change} stacked together",
            changes=[fuse(choose, _size_of_all)],
            costs=None if has_list else "a batch norm then sees all of them together",
            evidence={"calls": calls.calls, "kernels": len(times_ns), "time_ns": sum(times_ns)},
        )


def _loops_apart(evidence: Evidence) -> Iterator[Cause]:
    """A module's own code computes in a loop, as for each variable or head, though no turn needs another's result."""
    if evidence.step is None or evidence.work is None:
        return
    for loop in evidence.work.independent_turns:

        def choose(step: ReplayedStep, loop: IndependentTurns = loop) -> list[list[int]]:
            return _group_turns(evidence, step, loop.module, loop.turns)

        if choose(evidence.step):
            line = SourceLine(loop.file, loop.line, loop.function)
            yield _describe_loop(evidence, loop.module, loop.turns, line, choose)


def _describe_loop(
    evidence: Evidence,
    around: str,
    turns: int,
    line: SourceLine | None,
    choose: Callable[[ReplayedStep], Sequence[Sequence[int]]],
) -> Cause:
    """Return a module's loop, whose turns compute most themselves.

    So a mixture calls its experts one by one: what it selects, multiplies and adds for each is in the loop, too.
    """
    assert evidence.step is not None
    times_ns = [evidence.step.columns.duration_ns[row] for group in choose(evidence.step) for row in group]
    here = [line for line in evidence.operator_lines if line.path and kind_of(line.path[-1]) == around]
    places = {(line.file, line.line) for line in here}
    waiting = [line for line in evidence.lines if line.place in places and line.waits >= turns]
    return Cause(
        code="loop",
        cause=f"{around} computes in a loop of {turns:,} turns, and none needs another's result",
        detail=f": {len(times_ns):,} kernels",
        line=line,
        module=around,
        change="one operation for all turns: products of all at once (torch.bmm, or grouped), on what each is given",
        changes=[fuse(choose, _size_of_all), *edits(*{f"no-wait:{line.file}:{line.line}" for line in waiting})],
        evidence={"calls": turns, "kernels": len(times_ns), "time_ns": sum(times_ns)},
    )


def _group_turns(evidence: Evidence, step: ReplayedStep, around: str, turns: int | str) -> list[list[int]]:
    """Return a module's own operations that each turn of its loop makes, each with those of the other turns.

    ``turns`` is how many there are in a call, or which module each of them calls.
    """
    operations, groups = evidence.operations(step), list[list[int]]()
    for phase in (FORWARD, BACKWARD):
        called = evidence.module_ranges.get((phase, turns), ()) if isinstance(turns, str) else ()
        firsts = {first for first, *_ in evidence.operations_in(step, called)}
        for rows in evidence.operations_in(step, evidence.module_ranges.get((phase, around), ())):
            count = turns if isinstance(turns, int) else len(firsts & {*rows})
            own = defaultdict[str, list[int]](list)
            for row in rows:
                if operations[row].module == around:
                    own[operations[row].name].append(row)
            for alike in own.values():
                each = round(len(alike) / max(count, 1))
                groups += [alike[at::each] for at in range(each) if count > 1]
    return groups


def _repeated_calls(evidence: Evidence) -> Iterator[Cause]:
    """A module computes again, in the same pass, what it has computed: two heads' losses ask the same trunk, say."""
    step = evidence.step
    if step is None or evidence.work is None:
        return
    durations = step.columns.duration_ns
    for repeated in evidence.work.repeated_calls:
        if kind_of(repeated.module) != repeated.module:  # the calls of several are not told apart
            continue

        def choose(step: ReplayedStep, repeated: RepeatedCalls = repeated) -> list[int]:
            chosen = []
            for phase in (FORWARD, BACKWARD):
                calls = evidence.operations_in(step, evidence.module_ranges.get((phase, repeated.module), ()))
                chosen += [row for at, rows in enumerate(calls) if at % repeated.calls for row in rows]
            return chosen

        rows = choose(step)
        if rows:
            yield Cause(
                code="repeated-call",
                cause=f"{repeated.module} is called {repeated.calls} times a pass on the same input",
                line=_find_calling_line(evidence, repeated.module) or _find_calling_models(evidence),
                module=repeated.module,
                change="call it once, and use what it returns for all of them",
                changes=[remove_operations(choose, NOTHING, "that all of its calls' results are the same")],
                evidence={"calls": repeated.calls, "time_ns": sum(durations[row] for row in rows)},
            )


def _find_calling_models(evidence: Evidence) -> SourceLine | None:
    """Return the line of the function that trains in which most of the forward pass runs, None if none is known."""
    lines = (*evidence.lines, *evidence.facts.callers)
    loops = {(line.file, line.function) for line in lines if line.phase == BACKWARD}
    own = [line for line in lines if line.phase == FORWARD and line.file and (line.file, line.function) in loops]
    # Further out, the calls of the loop itself hold them all.
    names = {function.rpartition(".")[2] for _, function in loops}
    inner = [line for line in own if line.method not in names and line.place not in evidence.trainer_lines]
    line = max(inner, key=lambda line: line.time_ns, default=None)
    return None if line is None else source_line(line)


def _group_alike(evidence: Evidence, step: ReplayedStep, calls: IndependentCalls) -> list[list[int]]:
    """Return the operations of a module's calls in one pass that do the same: the first of a name of each call, ….

    The first call may do more, such as casts of weights. Modules of one kind have weights of their own. Images of
    several sizes are taken to be as many of each, and to come one size after another.
    """
    assert evidence.trace is not None
    ranges, operations = evidence.trace.trace.ranges, evidence.operations(step)
    passes = _number_passes(operations)
    groups = defaultdict[tuple[str, str, int, str, int], list[int]](list)
    for phase in (FORWARD, BACKWARD):
        for at in evidence.module_ranges.get((phase, calls.module), ()):
            count, module = Counter[str](), name_in_list(evidence.trace.trace.names[ranges.name[at]])
            for row in (row for call in evidence.operations_in(step, [at]) for row in call):
                name = operations[row].name
                groups[phase, module, passes[row], name, count[name]].append(row)
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


def _loops_of_cells(evidence: Evidence) -> Iterator[Cause]:
    """Cells that Python calls one after another, for each time step and layer, where cuDNN has whole layers.

    They are torch's own, or written out. No layer makes what else a loop does between time steps, such as attention,
    nor a choice for which it waits.
    """
    step = evidence.step
    if step is None or evidence.is_debugged:
        return
    forward = [one for one in evidence.kernels if one.phase == FORWARD]
    modules = dict.fromkeys(one.module for one in forward if one.module and (_is_cell(one) or _is_tanh(one)))
    for module in modules:
        own = [one for one in forward if _is_within(one.module, module)]
        kind, count = _find_cells(own)
        calls, layers = _find_calls(evidence, step, module, FORWARD), _count_modules(evidence, module)
        inside = sum(one.call in calls for one in forward)
        is_plain = len(own) >= _PLAIN * inside and not step.columns.waits_among(calls)
        if kind is None or count < _MANY_STEPS * layers or not is_plain:
            continue
        is_fused = any(map(_is_cell, own))
        yield Cause(
            code="loop",
            cause=f"a loop calls {kind} cells",
            detail=f", {name_times(count)}: {inside / count:.1f} kernels each in forward",
            module=module,
            change=f"nn.{kind} over the whole sequence, which cuDNN computes",
            changes=_make_layers(evidence, module, layers, is_fused=is_fused),
            costs="saved parameters have other names" + ("" if is_fused else "; the cell must be the usual one"),
            evidence={"cells": count, "layers": layers, "time_ns": sum(one.duration_ns for one in own)},
        )


def _find_cells(own: Sequence[Operation]) -> tuple[str | None, int]:
    """Return which cells the operations of a module are, None if none, and how many: torch's own, or equal ones that
    are written out.

    An LSTM takes the hyperbolic tangent twice, of a gate and of its state.
    """
    kinds = Counter(match[1].upper() for match in (_CELL.search(one.name) for one in own) if match)
    if kinds:
        return max(kinds, key=lambda kind: kinds[kind]), kinds.total()
    length = _find_period([one.name for one in own])
    cell = own[:length]
    tangents, sigmoids, products = (sum(map(holds, cell)) for holds in (_is_tanh, _is_sigmoid, _is_product))
    if not length or not tangents or not products:
        return None, 0
    if sigmoids:
        return "LSTM" if tangents > 1 else "GRU", len(own) // length
    # Between the products of other networks stands an activation.
    is_simple = tangents == 1 and _is_product(cell[0]) and _is_product(cell[1]) and _is_tanh(cell[-1])
    return ("RNN", len(own) // length) if is_simple else (None, 0)


def _find_period(names: Sequence[str]) -> int:
    """Return after how many names nearly all of them come again, 0 if they do not."""
    for length in range(2, min(_LONGEST_CELL, len(names) // 2) + 1):
        pairs = list(zip(names, names[length:], strict=False))
        if sum(one == other for one, other in pairs) >= _REPEATED * len(pairs):
            return length
    return 0


def _is_within(module: str | None, outer: str) -> bool:
    return module == outer or is_part(module, outer)


def _is_cell(operation: Operation) -> bool:
    return _CELL.search(operation.name) is not None


def _is_tanh(operation: Operation) -> bool:
    return "tanh" in operation.name and operation.category == "elementwise"


def _is_sigmoid(operation: Operation) -> bool:
    return "sigmoid" in operation.name and operation.category == "elementwise"


def _is_product(operation: Operation) -> bool:
    return operation.category == "gemm" and not is_convolution(operation.name)


def _is_sum(operation: Operation) -> bool:
    return not _is_product(operation) and not _is_cell(operation)


def _find_calls(evidence: Evidence, step: ReplayedStep, module: str, phase: str) -> range:
    calls = [one.call for one in evidence.operations(step) if one.phase == phase and _is_within(one.module, module)]
    return range(min(calls), max(calls) + 1) if calls else range(0)


def _count_modules(evidence: Evidence, kind: str) -> int:
    names = () if evidence.trace is None else evidence.trace.trace.names
    return max(1, len({name for name in names if kind_of(name) == kind}))


def _make_layers(evidence: Evidence, module: str, layers: int, *, is_fused: bool) -> list[StepChange]:
    """Return the changes that make whole layers of a loop of cells.

    Products that need no other time step become large ones; the other products and the cells still follow one another,
    but each layer's may run beside those of the others. What is written out of a cell becomes one kernel.
    """
    beside: By = {"least": 1 / layers, "expected": (1 + 1 / layers) / 2, "most": 1.0}

    def choose(phase: str, holds: _Holds) -> Callable[[ReplayedStep], list[int]]:
        return evidence.choose(lambda one: one.phase == phase and _is_within(one.module, module) and holds(one))

    def find_written(step: ReplayedStep, phase: str) -> list[list[int]]:
        def is_written(one: Operation) -> bool:
            return one.phase == phase and _is_within(one.module, module) and not _is_product(one)

        return [[one.at for one in run] for fits, run in groupby(evidence.operations(step), is_written) if fits]

    def size(world: World, durations: Sequence[int]) -> float:
        return beside[world] * min(_OF_SHORTEST[world] * min(durations), sum(durations))

    def make_layers(phase: str) -> Iterator[StepChange]:
        joint = _JOINT_PRODUCTS[phase]
        products: By = {
            world: joint * large + (1 - joint) * beside[world] for world, large in _IN_LARGE_PRODUCT.items()
        }
        yield scale_operations(choose(phase, _is_product), products, "how fast cuDNN's layers are")
        if is_fused:
            yield scale_operations(choose(phase, _is_cell), beside, "which layers run side by side")
            yield remove_operations(choose(phase, _is_sum), _SUMS_LEFT, "which sums are left")
        else:
            yield fuse(lambda step: find_written(step, phase), size)
        yield call_once(lambda step: _find_calls(evidence, step, module, phase), _CALLS_LEFT)

    return [change for phase in _JOINT_PRODUCTS for change in make_layers(phase)]


CALLS = (_loops_of_cells, _unread_passes, _separate_calls, _loops_apart, _repeated_calls)
