"""Rows of causes: waits for the GPU, of lines that read a value, move tensors or read them one by one in a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from profkit.analysis.causes.changes import (
    By,
    drop_own_waits,
    fuse,
    scale_operations,
    spare_in_phase,
    stop_chosen_waits,
)
from profkit.analysis.causes.evidence import (
    OF_CHAINS,
    Cause,
    Evidence,
    Operation,
    Place,
    edits,
    name_times,
    saves_on_cpu,
    source_line,
)
from profkit.analysis.step_replay import World
from profkit.analysis.step_replay.limits import OUTSIDE
from profkit.analysis.step_replay.predict import StepChange
from profkit.analysis.step_replay.steps import FROM_HOST, ReplayedStep
from profkit.analysis.summary import WORTH
from profkit.names import BACKWARD, FORWARD, LOSS
from profkit.run.lines import LineTime

_TRAINING = (".step", "backward")
_READING = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "any", "all", "equal", "allclose")
_FINDING = ("nonzero", "where", "masked_select", "argwhere")
"""What finds rows waits until the host knows how many there are."""
_CHECKING = ("any", "all", "equal", "allclose", "isnan", "isfinite", "isinf")
"""Methods and functions whose line does nothing but check: what it computes goes with its wait."""
_READING_FUNCTIONS = ("torch.", "F.", "float", "int", "bool", "print")
"""Methods and functions that wait for a value themselves; others call what waits, in code that may not be one's own."""
_SEVERAL_MOVES = 4
"""What is moved to the GPU so often in a step is more than its batch, which has rows of its own."""
_MANY_READS, _FEWEST_READS, _BETWEEN_READS = 8, 4, 6
"""So many values are read in loops of at least so many, if a loop launches no more than this from one to the next."""
_MOST_BETWEEN_READS, _READS_A_TURN = 60, 4
"""It may launch so much if it launches the same again, of that many reads in turn, and multiplies no matrices."""
_READ_AT_ONCE: By = {"least": 0.1, "expected": 0.3, "most": 1.0}
"""The GPU's time for the values of a loop that are computed together, as a share of its time for each by itself."""
_TENSOR_BYTES = 1024
"""From so many bytes a copy on, a loop reads no values, but tensors: the host computes with them."""
_COMPUTES = 0.02
"""A line that reads a value computes it first, if that takes this share of the step."""
_MUCH = 0.1
"""A line that reads values takes much Python, too: leaving it out spares all of it."""
_GONE: By = {"least": 1.0, "expected": 0.95, "most": 0.5}
_STAYING: By = {"least": 0.01, "expected": 0.05, "most": 0.3}
"""What the GPU takes to compute with tensors itself, as a share of their copies: its memory is that much faster."""


def _waits(evidence: Evidence) -> Iterator[Cause]:
    """A line whose calls wait for the GPU; if nothing is late for it, the replay says so and it is no cause.

    What waits within a trainer, an optimizer or a backward pass is no line of the user's own.
    """
    waits: list[LineTime] = []
    for line in evidence.lines:
        is_own = line.file is not None and line.thread != "worker" and line.place not in evidence.trainer_lines
        trains = (line.called or "").endswith(_TRAINING) and not _scales_gradients(line)
        is_batch = _moves_to_gpu(evidence, line) and line.waits < _SEVERAL_MOVES
        if is_own and line.waits >= 1 and not trains and not is_batch and not saves_on_cpu(line):
            waits.append(replace(line, called=line.waits_in or line.called))
    each: list[tuple[LineTime, Cause]] = []
    for lines in _group_adjacent(waits):
        line = max(lines, key=lambda line: line.waits)
        count = sum(line.waits for line in lines)
        # Nobody makes another loop of a library's: what it reads for is left out.
        is_librarys = bool(_name_inside(line)) and _share_outside(evidence, lines) > 0
        is_loop = not is_librarys and _reads_in_loop(evidence, line)
        of_tensors = is_loop and line.method != "item" and _reads_tensors(evidence, line)
        change, changes, edit = (
            _stop_reading_one_by_one(evidence, line, of_tensors=of_tensors)
            if is_loop
            else _stop_reading(evidence, lines)
        )
        name = _name_call(line)
        cause = Cause(
            code="waits",
            cause=f"{name} copies tensors from the GPU"
            if of_tensors
            else f"{name} waits for the GPU{_name_inside(line)}",
            detail=f", {name_times(count)}"
            + (", and the CPU computes with them" if of_tensors else " in a loop" if is_loop else ""),
            line=source_line(line),
            change=change,
            changes=changes,
            edit=edit,
            evidence={"waits": count, "waiting_ns": sum(line.waiting_ns for line in lines)},
        )
        each.append((line, cause))
        yield cause
    yield from _waits_together(evidence, each)


def _waits_together(evidence: Evidence, each: Sequence[tuple[LineTime, Cause]]) -> Iterator[Cause]:
    """Lines of which none saves anything alone: as long as one of them waits, the host cannot run ahead of the GPU.

    The outermost of them is named.
    """
    causes = [cause for _, cause in each if cause.changes]
    if evidence.replay is None or len(causes) < 2 or any(_saves(evidence, cause.changes) for cause in causes):
        return
    changes = [change for cause in causes for change in cause.changes]
    if _saves(evidence, changes):
        line, cause = min(each, key=lambda one: evidence.call_tree.depth_of(one[0]))
        count = sum(waiting.waits for waiting, _ in each)
        others = "another line" if len(each) == 2 else f"{len(each) - 1} more lines"
        yield replace(
            cause,
            cause=f"{_name_call(line)} and {others} wait for the GPU",
            detail=f", {name_times(count)}",
            changes=changes,
            edit=None,
            evidence={name: sum(float(one.evidence[name]) for one in causes) for name in cause.evidence},
        )


def _name_call(line: LineTime) -> str:
    """Return what a line calls: ``x.sum().item``, whose name is ``….item``, is written ``.item()``."""
    return "a call" if line.called is None else line.called.removeprefix("…") + "()"


def _saves(evidence: Evidence, changes: Sequence[StepChange]) -> bool:
    after_ns = evidence.expect_after(changes)
    return after_ns is not None and evidence.now_ns - after_ns > WORTH * evidence.now_ns


def _group_adjacent(lines: Iterable[LineTime]) -> Iterator[list[LineTime]]:
    """Yield lines of one method of a function that stand next to each other, each with what it is in all phases."""
    groups: list[list[LineTime]] = []
    for line in sorted(lines, key=lambda line: (line.file or "", line.line)):
        last = groups[-1][-1] if groups else line
        is_same = (line.file, line.function, line.method) == (last.file, last.function, last.method)
        if groups and line.line - last.line <= 1 and (is_same or line.place == last.place):
            groups[-1].append(line)
        else:
            groups.append([line])
    yield from sorted(groups, key=lambda group: -max(line.time_ns for line in group))


def _stop_reading_one_by_one(
    evidence: Evidence, line: LineTime, *, of_tensors: bool
) -> tuple[str, Sequence[StepChange], str | None]:
    change = "compute the values together (torch.stack, torch._foreach_norm), and read them once"
    if _find_long_loops(evidence, line):
        change = "compute it for all at once: torch.where, or products with a mask, for what depends on a value"
    if of_tensors:
        change = "keep on the GPU what the tensors are computed with, and compute there (torch._foreach_…)"
    return change, _read_at_once(evidence, line, of_tensors=of_tensors), None


def _stop_reading(evidence: Evidence, lines: Sequence[LineTime]) -> tuple[str, Sequence[StepChange], str | None]:
    line = max(lines, key=lambda line: line.waits)
    places = {(line.file, line.line) for line in lines}
    texts = {
        method: [f"{method}:{file}:{number}" for file, number in sorted(places)] for method in ("no-host", "no-wait")
    }
    if line.method in _CHECKING:
        return "check it every 50 steps or so, or not at all", edits(*texts["no-host"]), texts["no-host"][0]
    computing = [*_stop_computing(evidence, places)] if line.method in _READING else []
    change = "compute and read it" if computing else "keep the value on the GPU, and read it"
    change += " every 50 steps or so"
    if line.method in _FINDING:
        change = "torch.where over all rows, or products with a mask: they ask for no number of rows"
    if _name_inside(line):
        change = f"see what {line.inside} reads there: an argument or a setting may spare it"
    if _scales_gradients(line):
        is_in_bf16 = evidence.condition("autocast_dtypes") == ("bfloat16",)
        change = "no GradScaler: bf16 needs none" if is_in_bf16 else "a fused optimizer, which looks for inf on the GPU"
    share = _share_outside(evidence, lines)
    if share:
        change = "do it every 50 steps or so, or not at all"
        computing = [spare_in_phase(OUTSIDE, {world: share * gone for world, gone in _GONE.items()})]
    if _moves_to_gpu(evidence, line):
        change = "move what is the same in every step once, before the loop; else pin it, with non_blocking=True"
    # The waits of lines that it calls are theirs, and the edit takes them with its own.
    if any(each.place in places and each.waits >= 1 for each in evidence.facts.callers):
        return change, [*map(drop_own_waits, lines), *computing], None
    edit = texts["no-wait"][0] if len(places) == 1 and not share else None
    return change, [*edits(*texts["no-wait"]), *computing], edit


def _share_outside(evidence: Evidence, lines: Sequence[LineTime]) -> float:
    """Return how much of the Python outside of all phases is theirs, 0 unless that is much of the step.

    So it is with figures for a log. What the loss is computed with cannot be left out, nor what reads one value, such
    as an action, nor what moves data.
    """
    own_ns = sum(line.own_ns for line in lines)
    if sum(line.waits for line in lines) < _MANY_READS or any(_moves_to_gpu(evidence, line) for line in lines):
        return 0.0
    is_outside = all(line.phase is None and not evidence.computes_loss(line) for line in lines)
    outside_ns = sum(line.own_ns for line in evidence.lines if line.thread == "main" and line.phase is None)
    return own_ns / outside_ns if is_outside and own_ns >= _MUCH * evidence.now_ns else 0.0


def _stop_computing(evidence: Evidence, places: Collection[tuple[str | None, int]]) -> Iterator[StepChange]:
    """Yield the changes after which what lines compute is not computed, if the GPU takes long for it."""
    shares = evidence.shares_of_lines(places)
    times_ns = Counter[Place]()
    for one in evidence.kernels:
        if one.category in OF_CHAINS:
            times_ns[one.phase, one.module] += one.duration_ns
    if sum(share * times_ns[place] for place, share in shares.items()) < _COMPUTES * evidence.now_ns:
        return
    for place, share in shares.items():

        def holds(one: Operation, place: Place = place) -> bool:
            return one.category in OF_CHAINS and (one.phase, one.module) == place

        left = {world: 1 - share * gone for world, gone in _GONE.items()}
        yield scale_operations(evidence.choose(holds), left, "what else needs the values")


def _scales_gradients(line: LineTime) -> bool:
    """Return whether a GradScaler reads whether a gradient is infinite, before an optimizer that cannot look itself."""
    return (line.inside or "").startswith("grad_scaler.")


def _name_inside(line: LineTime) -> str:
    is_librarys = line.inside is not None and not waits_itself(line)
    return f" in {line.inside}" if is_librarys else ""


def _moves_to_gpu(evidence: Evidence, line: LineTime) -> bool:
    if not line.is_move or evidence.step is None:
        return line.is_move
    copies = [one for one in evidence.awaited_copies(evidence.step) if one.phase == (line.phase or OUTSIDE)]
    to_gpu = sum(one.name == FROM_HOST for one in copies)
    return to_gpu >= round(line.waits) or len(copies) - to_gpu < round(line.waits)


def _reads_in_loop(evidence: Evidence, line: LineTime) -> bool:
    loops = [] if evidence.step is None else _find_reading_loops(evidence, evidence.step, line.phase or OUTSIDE)
    return 2 * sum(sum(map(_is_copy, loop)) for loop in loops) > line.waits >= _MANY_READS


def _reads_tensors(evidence: Evidence, line: LineTime) -> bool:
    """Return whether what loops read are tensors, of the mean size of a copy: of many parameters, most are small."""
    step = evidence.step
    assert step is not None
    loops = _find_reading_loops(evidence, step, line.phase or OUTSIDE)
    copied = [step.copied_bytes[int(step.columns.row[one.at])] for loop in loops for one in loop if _is_copy(one)]
    return sum(copied) >= _TENSOR_BYTES * len(copied)


def _read_at_once(evidence: Evidence, line: LineTime, *, of_tensors: bool) -> list[StepChange]:
    """Return the changes that compute a loop's values with one kernel, and wait for all of them at its last copy."""
    share = _STAYING if of_tensors else _READ_AT_ONCE

    modules = {one.module for loop in _find_long_loops(evidence, line) for one in loop} - {None}

    def find(step: ReplayedStep) -> list[tuple[Operation, ...]]:
        backward = _find_reading_loops(evidence, step, BACKWARD) if modules else []
        own = _find_reading_loops(evidence, step, line.phase or OUTSIDE)
        inside = (tuple(one for one in loop if one.module in modules) for loop in backward)
        return [*own, *(loop for loop in inside if loop)]

    def choose(step: ReplayedStep) -> list[list[int]]:
        return [[one.at for one in (loop if of_tensors else loop[:-1])] for loop in find(step)]

    def find_last(step: ReplayedStep) -> list[int]:
        calls = range(len(step.columns.kind))
        return step.columns.waits_among(at for loop in find(step) for at in calls[loop[-1].call :][:2])

    def size(world: World, durations: Sequence[int]) -> float:
        return share[world] * sum(durations)

    changes = [fuse(choose, size, with_waits=True)]
    return [*changes, stop_chosen_waits(find_last)] if of_tensors else changes


def _find_long_loops(evidence: Evidence, line: LineTime) -> list[tuple[Operation, ...]]:
    """Return the loops that compute more than what they read, as a loss of each sample and class does."""
    loops = [] if evidence.step is None else _find_reading_loops(evidence, evidence.step, line.phase or OUTSIDE)
    return [loop for loop in loops if len(loop) > _BETWEEN_READS * sum(map(_is_copy, loop))]


def _find_reading_loops(evidence: Evidence, step: ReplayedStep, phase: str) -> list[tuple[Operation, ...]]:
    operations = [one for one in evidence.operations(step) if one.phase == phase]
    awaited = {one.at for one in evidence.awaited_copies(step)}
    reads = [at for at, one in enumerate(operations) if _is_copy(one) and one.at in awaited]
    before = [[one.category for one in operations[last:at]] for last, at in pairwise([0, *reads])]

    def goes_on(at: int) -> bool:
        others = [*before[max(1, at - _READS_A_TURN) : at], *before[at + 1 : at + 1 + _READS_A_TURN]]
        is_turn = before[at] in others and len(before[at]) <= _MOST_BETWEEN_READS and "gemm" not in before[at]
        # What is neither forward nor backward is for a log, more often than not.
        return at > 0 and (len(before[at]) <= _BETWEEN_READS or (is_turn and phase in (FORWARD, LOSS, BACKWARD)))

    starts = [at for at in range(len(reads)) if not goes_on(at)]
    loops = [reads[start:end] for start, end in pairwise([*starts, len(reads)]) if end - start >= _FEWEST_READS]
    if sum(map(len, loops)) < _MANY_READS:
        return []
    return [tuple(operations[max(0, loop[0] - (loop[1] - loop[0]) + 1) : loop[-1] + 1]) for loop in loops]


def _is_copy(one: Operation) -> bool:
    return one.category == "copy" and one.name != FROM_HOST


def waits_itself(line: LineTime) -> bool:
    """Return whether a line waits for a value itself, and not in code that it calls."""
    return not line.called or line.method in _READING or line.called.startswith(_READING_FUNCTIONS)


WAITS = (_waits,)
