"""Rows of causes: waits for the GPU, and more launches than the work needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePath

from profkit.analysis.causes.changes import (
    By,
    compile_optimizer,
    drop_own_waits,
    drop_some_launches,
    fuse,
    merge_groups,
    scale_operations,
    spare_in_phase,
    stop_chosen_waits,
)
from profkit.analysis.causes.evidence import (
    OF_CHAINS,
    WORTH_COMPILING,
    Cause,
    Evidence,
    Operation,
    Place,
    edits,
    name_times,
    saves_on_cpu,
    source_line,
    sums_by_index,
)
from profkit.analysis.step_replay.edits import find_zeroed_gradients
from profkit.analysis.step_replay.facts import World
from profkit.analysis.step_replay.kernel_edits import COMPILED_PHASES, find_fusable, has_recurrent_layers
from profkit.analysis.step_replay.limits import OUTSIDE, Limit, LimitPart
from profkit.analysis.step_replay.predict import StepChange
from profkit.analysis.step_replay.steps import FROM_HOST, ReplayedStep
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER, kind_of
from profkit.run.lines import LineTime
from profkit.run.manifest import UsedOptimizer, can_all_be_fused, used_optimizers

_TRAINING = (".step", "backward")
_LATE = 0.3
"""A step that waits for launches for this share of it is limited by them."""
_TORCHS_FILLS: By = {"least": 1.0, "expected": 0.95, "most": 0.6}
"""Which share of fills is torch's own, in a program that lets it fill what it allocates."""
_FILLS_PYTHON: By = {"least": 1.0, "expected": 0.5, "most": 0.0}
"""Which share of Python before the launch of a fill goes with it; the rest is that of the operation that allocates."""
_IN_ANY_ORDER: By = {"least": 0.02, "expected": 0.1, "most": 0.6}
"""What sums by index take of their time where rows are added in any order, or by an operation's own kernel."""
_READING = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "any", "all", "equal", "allclose")
_CHECKING = ("any", "all", "equal", "allclose", "isnan", "isfinite", "isinf")
"""Methods and functions whose line does nothing but check: what it computes goes with its wait."""
_READING_FUNCTIONS = ("torch.", "F.", "float", "int", "bool", "print")
"""Methods and functions that wait for a value themselves; others call what waits, in code that may not be one's own."""
_MANY = 4
"""Launches of an optimizer's step from which on fewer are worth looking at."""
_MANY_PARAMETERS = 16
_SMALL_NS = 20_000
_MOSTLY = 0.8
"""An optimizer of small kernels has so many of them: one that multiplies matrices is not much faster compiled."""
_MANY_GROUPS, _FEWER = 8, 4
"""So many groups of parameters are worth looking at, if that many times fewer would do."""
_MORE_THAN_LAYERS = 128
"""Groups that were not counted are taken to have the same options if they are more than a model has layers, twice."""
_WITH_DECAY_AND_WITHOUT = 2
_IN_ONE_LAUNCH: By = {"least": 110, "expected": 36, "most": 12}
"""How many parameters one launch takes: 30 to 110, by how many tensors belong to each (MultiTensorApply.cuh)."""
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
        # x.sum().item, whose name is ….item, is written .item().
        name = "a call" if line.called is None else line.called.removeprefix("…") + "()"
        yield Cause(
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
    if _name_inside(line):
        change = f"see what {line.inside} reads there: an argument or a setting may spare it"
    if _scales_gradients(line):
        is_in_bf16 = evidence.condition("autocast_dtypes") == ("bfloat16",)
        change = "no GradScaler: bf16 needs none" if is_in_bf16 else "a fused optimizer, which looks for inf on the GPU"
    share = _share_outside(evidence, lines)
    if share:
        change = "do it every 50 steps or so, or not at all"
        computing = [
            spare_in_phase("do it less often", OUTSIDE, {world: share * gone for world, gone in _GONE.items()})
        ]
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
        yield scale_operations("read less often", evidence.choose(holds), left, "what else needs the values")


def _scales_gradients(line: LineTime) -> bool:
    """Return whether a GradScaler reads whether a gradient is infinite, before an optimizer that cannot look itself."""
    return (line.inside or "").startswith("grad_scaler.")


def _name_inside(line: LineTime) -> str:
    is_librarys = line.inside is not None and not _waits_itself(line)
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
    name, share = f"read-at-once:{line.file}:{line.line}", _STAYING if of_tensors else _READ_AT_ONCE

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

    changes = [fuse(name, choose, size, with_waits=True)]
    return [*changes, stop_chosen_waits(name, find_last)] if of_tensors else changes


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


def _optimizer(evidence: Evidence) -> Iterator[Cause]:
    """An optimizer that launches kernels for each parameter, where torch has one for all of them."""
    optimizer, optimizers = evidence.summary.optimizer, used_optimizers(evidence.manifest)
    if optimizer is None or optimizer.kind not in ("foreach", "single tensor"):
        return
    launches = optimizer.launch_count / evidence.summary.program_steps
    has_fused = can_all_be_fused(evidence.manifest)
    has_foreach = bool(optimizers) and all(used.can_be_foreach for used in optimizers)
    names = _name_all(optimizers) or "the optimizer"
    if launches < _MANY or not (has_fused or (optimizer.kind == "single tensor" and has_foreach)):
        return
    better = "fused" if has_fused else "foreach"
    kind = "in a loop over parameters" if optimizer.kind == "single tensor" else "in groups of parameters"
    yield Cause(
        code="optimizer",
        cause=f"{names} steps {kind}",
        detail=f"{' (foreach)' if optimizer.kind == 'foreach' else ''}: {launches:,.0f} launches a step",
        module=OPTIMIZER,
        change=f"{names}(…, {better}=True)",
        changes=edits(f"optimizer:{better}"),
        edit=f"optimizer:{better}",
        evidence={"launches": launches, "span_ns": evidence.summary.per_step(optimizer.span_ns)},
    )


def _written_optimizer(evidence: Evidence) -> Iterator[Cause]:
    """An optimizer that is not torch's, and makes several small operations for each parameter in a loop of Python."""
    optimizer, optimizers = evidence.summary.optimizer, used_optimizers(evidence.manifest)
    # Gradients that are clipped one by one in it are kernels over lists of tensors.
    if optimizer is None or optimizer.kind == "fused" or not optimizers or _communicates(evidence):
        return
    parameters = sum(used.parameters for used in optimizers)
    kernels = [one for one in evidence.kernels if one.phase == OPTIMIZER]
    small = [one for one in kernels if one.category in OF_CHAINS and one.duration_ns < _SMALL_NS]
    if any(used.is_torchs or not used.parameters for used in optimizers) or len(small) < _MOSTLY * len(kernels):
        return
    each = len(kernels) / parameters
    if parameters < _MANY_PARAMETERS or each < _MANY:
        return
    calls = [line for line in (*evidence.lines, *evidence.facts.callers) if line.phase == OPTIMIZER and line.file]
    steps = [
        line for line in calls if (line.called or "").endswith(".step") and line.place not in evidence.trainer_lines
    ]
    line = max(steps, key=lambda line: line.time_ns, default=None)
    yield Cause(
        code="optimizer",
        cause=f"{_name_all(optimizers)} steps in a loop over parameters",
        detail=f": {len(kernels):,} launches a step, {each:.0f} for each parameter",
        line=None if line is None else source_line(line),
        module=OPTIMIZER,
        change="torch.compile(optimizer.step), or an optimizer that is fused",
        changes=[compile_optimizer(sum(used.fused_step_bytes for used in optimizers))],
        costs="compiling at the start",
        worth=WORTH_COMPILING,
        evidence={
            "launches": len(kernels),
            "parameters": parameters,
            "span_ns": evidence.summary.per_step(optimizer.span_ns),
        },
    )


def _small_groups(evidence: Evidence) -> Iterator[Cause]:
    """An optimizer that calls its kernels for each of many groups of parameters, most of them with the same options."""
    optimizer, optimizers = evidence.summary.optimizer, used_optimizers(evidence.manifest)
    if optimizer is None or optimizer.kind not in ("fused", "foreach") or not optimizers:
        return
    if not all(used.can_be_foreach for used in optimizers) or _communicates(evidence):
        return
    is_counted = all(used.groups for used in optimizers)
    groups = sum(used.groups for used in optimizers) if is_counted else _count_equal_calls(evidence)
    unlike = sum(used.unlike_groups for used in optimizers) if is_counted else _WITH_DECAY_AND_WITHOUT
    in_group = sum(used.parameters for used in optimizers) / groups if is_counted else 1.0
    launches = optimizer.launch_count / evidence.summary.program_steps
    if not max(_MANY_GROUPS, _FEWER * unlike) <= groups <= launches:
        return
    left = {world: min(1.0, max(unlike / groups, in_group / most)) for world, most in _IN_ONE_LAUNCH.items()}
    moved_bytes = sum(used.fused_step_bytes for used in optimizers) if optimizer.kind == "fused" else None
    yield Cause(
        code="optimizer",
        cause=f"{_name_all(optimizers)} steps in {groups:,} groups of parameters",
        detail=f": {launches:,.0f} launches a step",
        module=OPTIMIZER,
        change="parameters with the same options in one group"
        + (f": {unlike} in place of {groups}" if is_counted else " (with weight decay and without: two groups)"),
        changes=[merge_groups("groups", left, moved_bytes)],
        costs="saved states of the optimizer fit the old groups",
        evidence={
            "launches": launches,
            "groups": groups,
            "span_ns": evidence.summary.per_step(optimizer.span_ns),
        },
    )


def _name_all(optimizers: Sequence[UsedOptimizer]) -> str:
    return ", ".join(dict.fromkeys(used.name for used in optimizers))


def _communicates(evidence: Evidence) -> bool:
    return any(one.phase == OPTIMIZER and one.category == "communication" for one in evidence.kernels)


def _count_equal_calls(evidence: Evidence) -> int:
    """Return how often a fused optimizer is called if it launches each of several kernels as often, and too often for
    groups by layer; else 0.

    A call of many parameters launches some kernels more often than others: they take fewer parameters.
    """
    counts = Counter(one.name for one in evidence.kernels if one.phase == OPTIMIZER)
    is_fused = any("Fused" in name for name in counts)
    each = set(counts.values())
    return each.pop() if is_fused and len(counts) > 1 and len(each) == 1 and min(each) >= _MORE_THAN_LAYERS else 0


def _zeroed_gradients(evidence: Evidence) -> Iterator[Cause]:
    """Gradients that are filled with zeros in every step, where dropping them costs nothing."""
    step = evidence.step
    if step is None:
        return
    zeroed = set(find_zeroed_gradients(step))
    filled = [one for one in evidence.kernels if one.at in zeroed]
    if filled:
        yield Cause(
            code="zero-grad",
            cause="gradients are filled with zeros",
            detail=f", {name_times(len(filled))}",
            module=filled[0].module or None,
            change="optimizer.zero_grad(set_to_none=True)",
            changes=edits("zero-grad:none"),
            edit="zero-grad:none",
            evidence={"launches": len(filled)},
        )


def _deterministic(evidence: Evidence) -> Iterator[Cause]:
    """Deterministic algorithms fill each tensor that torch allocates, so that nothing reads what nobody wrote.

    Where a program fills tensors itself, too, its fills follow on torch's: they are not known apart. What is gathered
    by an index, or interpolated, has its gradients summed up one row after another.
    """
    is_on = evidence.condition("deterministic_algorithms") is True
    fills = evidence.condition("fills_uninitialized_memory") is not False
    filling = [one for one in evidence.kernels if _is_fill(one)] if is_on and fills else []
    summing = [one for one in evidence.kernels if sums_by_index(one)] if is_on else []
    if not filling and not summing:
        return
    changes, what, settings = [], [], ["torch.use_deterministic_algorithms(False)"]
    if filling:
        choose = evidence.choose(_is_fill)
        changes.append(
            drop_some_launches("deterministic", choose, _TORCHS_FILLS, _FILLS_PYTHON, "which fills torch adds")
        )
        what.append("fill all memory that torch allocates")
    if summing:
        choose = evidence.choose(sums_by_index)
        changes.append(scale_operations("deterministic", choose, _IN_ANY_ORDER, "how fast sums in any order are"))
        what.append("sum up gradients by index in order")
    else:
        settings.insert(0, "torch.utils.deterministic.fill_uninitialized_memory = False")
    yield Cause(
        code="deterministic",
        cause=f"deterministic algorithms {' and '.join(what)}",
        detail=f", by {len(filling) + len(summing):,} of the step's launches",
        change=", or ".join(settings),
        changes=changes,
        costs="results may differ from run to run"
        + (": with the first, only where memory is read that nothing wrote" if len(settings) > 1 else ""),
        evidence={
            "launches": len(filling) + len(summing),
            "fill_ns": sum(one.duration_ns for one in filling),
            "sum_ns": sum(one.duration_ns for one in summing),
        },
    )


def _is_fill(operation: Operation) -> bool:
    return "FillFunctor" in operation.name and operation.phase != OPTIMIZER and operation.is_alone


def _compile(evidence: Evidence) -> Iterator[Cause]:
    """A model that is not compiled: where launches limit the step, graphs replay them; else small kernels are fused."""
    summary, step, limits = evidence.summary, evidence.step, evidence.limits
    replays = summary.gpu is not None and summary.gpu.graph_launches
    if step is None or replays or evidence.is_debugged:
        return
    if summary.head.is_compiled or summary.recomputes:
        return
    of_phases = [] if limits is None else limits.parts_of(Limit.PREPARING)
    preparing = [part for part in of_phases if part.phase in COMPILED_PHASES]
    preparing_ns = sum(part.time_ns for part in preparing)
    is_late = limits is not None and preparing_ns > _LATE * limits.step_ns and _can_be_captured(evidence)
    operations = [one for one in evidence.kernels if one.phase in COMPILED_PHASES]
    fusable = set(find_fusable(step))
    small = [one for one in operations if one.at in fusable]
    mode = "reduce-overhead" if is_late else None
    lines = [line for line in evidence.lines if line.file and line.phase in COMPILED_PHASES and line.waits >= 1]
    lines = lines if is_late and _find_waits(step) else []
    if not all(map(_waits_itself, lines)):
        return
    waiting = max(lines, key=lambda line: line.waits, default=None)
    edit = f"compile:{mode}" if mode else "compile"
    no_waits = [] if waiting is None else [stop_chosen_waits("no-wait", _find_waits)]
    yield Cause(
        code="launches" if is_late else "compile",
        cause="the GPU waits for Python" if is_late else "small kernels read and write memory",
        detail=f", which makes {len(operations):,} launches a step in forward and backward"
        if is_late
        else f" between products, {len(small):,} a step",
        line=None if waiting is None else source_line(waiting),
        module=_find_module(preparing) if is_late and waiting is None else None,
        change=(
            f"no wait at {PurePath(waiting.file or '').name}:{waiting.line}, which graphs forbid; then "
            if waiting
            else ""
        )
        + (f'model.compile(mode="{mode}")' if mode else "model.compile()"),
        changes=[*no_waits, *edits(edit)],
        edit=edit,
        costs="compiling at the start; constant shapes" + (", memory of its own" if is_late else ""),
        evidence={
            "launches": len(operations),
            "small_ns": sum(one.duration_ns for one in small),
            "preparing_ns": preparing_ns,
        },
        worth=WORTH_COMPILING,
    )


def _find_module(preparing: Sequence[LimitPart]) -> str | None:
    times: Counter[str | None] = Counter()
    for part in preparing:
        times[part.module and kind_of(part.module)] += part.time_ns
    module = max(times, key=lambda module: times[module], default=None)
    return module if 2 * times[module] > times.total() else None


def _can_be_captured(evidence: Evidence) -> bool:
    """Return whether all recorded steps run the same kernels, and one thread launches those of the forward pass."""
    steps = () if evidence.replay is None else evidence.replay.steps
    kernels = {
        tuple(sorted(one.name for one in evidence.operations(step) if one.phase in COMPILED_PHASES)) for step in steps
    }
    threads = {
        step.columns.thread[one.call] for step in steps for one in evidence.operations(step) if one.phase == FORWARD
    }
    return len(kernels) == 1 and len(threads) <= 1 and not any(map(has_recurrent_layers, steps))


def _find_waits(step: ReplayedStep) -> list[int]:
    return step.columns.waits_among(step.calls_in(COMPILED_PHASES))


def _waits_itself(line: LineTime) -> bool:
    return not line.called or line.method in _READING or line.called.startswith(_READING_FUNCTIONS)


LAUNCHES = (_waits, _optimizer, _written_optimizer, _small_groups, _zeroed_gradients, _deterministic, _compile)
