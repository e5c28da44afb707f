"""Rows of causes: small kernels one after another that one kernel could replace: losses, norms, activations, loops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from profkit.analysis.causes.changes import By, fuse
from profkit.analysis.causes.evidence import (
    OF_CHAINS,
    WORTH_COMPILING,
    Cause,
    Evidence,
    Operation,
    SourceLine,
    edits,
    source_line,
    sums_by_index,
)
from profkit.analysis.causes.kernels import attention_modules
from profkit.analysis.step_replay import World
from profkit.analysis.step_replay.kernel_edits import is_recurrent
from profkit.analysis.step_replay.limits import OUTSIDE, Limit
from profkit.analysis.step_replay.predict import StepChange
from profkit.analysis.step_replay.steps import FROM_HOST, ReplayedStep
from profkit.analysis.summary import WORTH
from profkit.names import BACKWARD, INFERENCE, LOSS, OPTIMIZER, kind_of
from profkit.run.lines import LineTime

_FUSED_CHAIN: By = {"least": 0.8, "expected": 1.2, "most": 2.2}
_FUSED_ACTIVATION: By = {"least": 0.2, "expected": 0.7, "most": 2.0}
"""An activation of torch's own keeps the type of its numbers, which those that are written out make larger."""
_FUSED_REDUCTION: By = {"least": 1.0, "expected": 2.2, "most": 4.0}
_ONE_HOT_LOSS = "the loss is a product with a one-hot matrix", "F.cross_entropy of the targets' numbers"
_WRITTEN_LOSS = "the loss is written out", "F.cross_entropy, which has label_smoothing, weight and ignore_index"
_PAIRS = "pairs", "differences of all pairs are written out", "torch.cdist, or x² + y² - 2 x·y with a matrix product"
_EXPANDED = 0.7
"""A difference moves at most this share of what a function of as many numbers does, if what comes in is small."""
_OF_ONE_HOT: By = {"least": 0.02, "expected": 0.15, "most": 0.5}
"""The share of a loss with a one-hot matrix that is left without it: backward still writes the gradient's matrix."""
_FEW, _MANY, _VERY_MANY = 4, 12, 48
"""Small kernels of one module's call from which on they are a chain that one kernel could replace, and, if they repeat,
a loop; so many are one whatever they take.
"""
_REPEATS, _REPEATED = 3, 0.5
"""A loop runs the same two kernels one after the other so often, for this share of all its kernels."""
_MOST_OF_LOOP = 0.6
_LARGE = 0.4
"""Kernels of a chain that take this share of its longest one handle as many numbers."""
_SILU = "sigmoid", "MulFunctor"
_PASS, _MANY_PASSES = 0.2, 5
"""Kernels of this share of the longest one pass over as large a matrix; torch's own loss needs fewer than so many."""
_MOST_CHAINS = 4
_SHORT_NS = 10_000
"""Kernels that are launched about as fast as they run."""
_LAUNCH_NS = 3_000
"""About what a launch takes: chains are looked at by what they cost the host and the GPU."""
_TRAINING = ("backward", "step", "zero_grad", "item")
_FOREACH = "multi_tensor_apply"
"""A kernel that handles many tensors already."""

Run = tuple[Operation, ...]

ChainPlace = tuple[str | None, str]
"""A module, or None and the phase of what runs outside of all modules."""


def _chains(evidence: Evidence) -> Iterator[Cause]:
    """Small kernels one after another in one module: a norm, an activation, a loss or a loop that is written out.

    Outside of all modules they may be a trainer's, and a line must say whose they are.
    """
    step = evidence.step
    if step is None or evidence.is_debugged:
        return
    loss = _find_written_loss(evidence, step)
    if loss is not None:
        yield loss
    others = (BACKWARD,) if loss is None else (BACKWARD, LOSS)
    runs = _find_runs(evidence, step)
    summing = {
        run[0].module for run in runs if run[0].phase == BACKWARD and any("CUDAFunctor_add" in one.name for one in run)
    }
    written = [run for run in runs if run[0].phase not in others and _is_written_out(run)]
    # Views run nothing in forward, and a kernel each in backward.
    places = {run[0].module for run in written}
    written += [run for run in runs if _is_of_views(run) and run[0].module not in places]
    # A gate has the same kernels, but its two gradients are those of two tensors.
    written = [run for run in written if not _is_silu(run) or run[0].module in summing]
    alike: defaultdict[tuple[str, ...], dict[ChainPlace, list[Run]]] = defaultdict(dict)
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    for place in dict.fromkeys(map(_place_of, written)):
        chain = _find_chain(evidence, step, place)
        turns = _find_turns(evidence, place[0], chain)
        kind, kernels = _kind_of_place(place, chain, turns), tuple(one.name for one in _find_longest(chain, turns))
        # The same kernels are the same code, whatever its modules are called.
        own = (*kind, *_name_alike(place, kind[0]))
        alike[known.setdefault((*kind, *kernels), own) if place[0] else (*kind, place[1])][place] = chain
    for chains in sorted(alike.values(), key=lambda chains: -_cost(chains))[:_MOST_CHAINS]:
        cause = _describe_chains(evidence, dict(sorted(chains.items(), key=lambda item: -_cost(dict([item])))))
        if cause is None:
            continue
        if cause.module or cause.line or not evidence.lines or cause.code == "cross-entropy":
            yield cause


def _find_written_loss(evidence: Evidence, step: ReplayedStep) -> Cause | None:
    """Return a loss of classes by several passes over its matrix of scores, in one module or in modules within it."""
    own = _find_loss(evidence, step)
    forward = [one for run in own for one in run if one.phase == LOSS]
    longest_ns = max((one.duration_ns for one in forward), default=0)
    large = [one for one in forward if one.duration_ns >= _PASS * longest_ns]
    if not _is_of_classes(forward) or len(large) < _MANY_PASSES:
        return None

    def choose(step: ReplayedStep) -> list[list[int]]:
        return [[one.at for one in run] for run in _find_loss(evidence, step)]

    is_one_hot = _is_one_hot(forward)
    what, change = _ONE_HOT_LOSS if is_one_hot else _WRITTEN_LOSS
    times_ns = Counter[str | None]()
    for one in forward:
        times_ns[one.module] += one.duration_ns
    return Cause(
        code="cross-entropy",
        cause=what,
        detail=f": {len(large)} passes over its matrix of scores in forward",
        module=times_ns.most_common(1)[0][0],
        change=change,
        changes=[fuse(choose, _size_of_one_hot if is_one_hot else _size_of_fused(_FUSED_REDUCTION))],
        evidence={"kernels": sum(map(len, own)), "time_ns": sum(one.duration_ns for run in own for one in run)},
    )


def _find_loss(evidence: Evidence, step: ReplayedStep) -> list[Run]:
    """Return what a step's loss modules launch in forward, and in backward."""
    own = [one for one in evidence.operations(step) if one.phase == LOSS and one.module is not None]
    modules = {one.module for one in own}
    backward = [one for one in evidence.operations(step) if one.phase == BACKWARD and one.module in modules]
    return [tuple(run) for run in (own, backward) if run]


def _find_runs(evidence: Evidence, step: ReplayedStep) -> list[Run]:
    skipped, awaited = attention_modules(evidence), {one.at for one in evidence.awaited_copies(step)}
    runs = evidence.runs(step, lambda one: _is_link(one, skipped) and one.at not in awaited)
    forward = [run for run in runs if run[0].phase != BACKWARD and run[0].module]
    activated = {run[0].module for run in forward if _is_activation(_outside_norm(run))}
    return [run if run[0].module not in activated else _outside_norm(run) or run for run in runs]


def _outside_norm(run: Run) -> Run:
    """Return what a run has after torch's own norm, or before it in backward; the whole run if it has none."""
    norms = [at for at, one in enumerate(run) if one.category == "normalization"]
    if not norms:
        return run
    return run[: norms[0]] if run[0].phase == BACKWARD else run[norms[-1] + 1 :]


def _is_activation(run: Run) -> bool:
    """Return whether a run that is written out takes a function of its numbers, and nothing of several of them."""
    names = " ".join(one.name.lower() for one in run)
    is_function = any(name in names for name in ("tanh", "erf", "sigmoid"))
    return is_function and _is_written_out(run) and not any(one.category == "reduction" for one in run)


def _find_chain(evidence: Evidence, step: ReplayedStep, place: ChainPlace) -> list[Run]:
    """Return the runs of a step that are written out in a place, with those of its backward passes.

    What backward runs outside of all modules may be anybody's, unless most of backward lies in modules.
    """
    knows_backward = _knows_modules_of_backward(evidence.kernels)
    runs = [run for run in _find_runs(evidence, step) if _is_link_of(run, place)]
    return [run for run in runs if knows_backward or run[0].module or run[0].phase != BACKWARD]


def _is_link(operation: Operation, skipped: frozenset[str]) -> bool:
    is_moved = operation.category == "copy" and operation.name != FROM_HOST
    is_own = _FOREACH not in operation.name and not is_recurrent(operation.name) and not sums_by_index(operation)
    is_small = operation.is_alone and is_own and (is_moved or operation.category in OF_CHAINS)
    return is_small and operation.phase != OPTIMIZER and operation.module not in skipped


def _place_of(run: Run) -> ChainPlace:
    return run[0].module, "" if run[0].module else run[0].phase


def _is_link_of(run: Run, place: ChainPlace) -> bool:
    """Return whether a run is of a place; outside of all modules a few kernels are the backward pass of torch's own."""
    module, phase = run[0].module, run[0].phase
    if phase == BACKWARD:
        return module == place[0] and (len(run) > 2 if module else _is_written_out(run))
    return _place_of(run) == place and _is_written_out(run)


def _knows_modules_of_backward(operations: Sequence[Operation]) -> bool:
    """Return whether most of backward lies in modules: nsys sees none there where no hook opened their ranges."""
    has_module = [one.module is not None for one in operations if one.phase == BACKWARD]
    return 2 * sum(has_module) > len(has_module)


def _is_written_out(run: Run) -> bool:
    has_own = any(one.category in ("normalization", "loss", "softmax") for one in run)
    return len(run) >= (_MANY if has_own else _FEW) or _is_silu(run)


def _is_of_views(run: Run) -> bool:
    """Return whether backward goes through so many views of one module's that a loop has made them."""
    is_long = run[0].phase == BACKWARD and run[0].module is not None and len(run) >= _VERY_MANY
    return is_long and _are_short(run) and _repeats(run)


def _is_silu(run: Run) -> bool:
    """Return whether a run is a product with a sigmoid of as many numbers."""
    names, times_ns = [one.name for one in run], [one.duration_ns for one in run]
    is_product = len(run) == len(_SILU) and all(part in name for part, name in zip(_SILU, names, strict=True))
    return is_product and min(times_ns) >= _LARGE * max(times_ns)


def _kind_of_place(place: ChainPlace, runs: Sequence[Run], turns: Sequence[Run]) -> tuple[str, str, str]:
    in_turn = len(turns) if place[0] else sum(run[0].phase != BACKWARD for run in runs)
    return _kind_of_chain(_find_longest(runs, turns), in_turn)


def _find_longest(runs: Sequence[Run], turns: Sequence[Run]) -> Run:
    """Return the run that says what a place's runs are: a turn of its loop, if it has one, or else the longest."""
    views = [run for run in runs if _is_of_views(run)]
    return max(views or turns or [run for run in runs if run[0].phase != BACKWARD], key=len)


def _find_turns(evidence: Evidence, module: str | None, runs: Sequence[Run]) -> Sequence[Run]:
    """Return the runs of the same kernels that a module has so often in each call that a loop must make them.

    Between them lies what is no link of a chain, such as a copy from the host.
    """
    alike = defaultdict[tuple[str, ...], list[Run]](list)
    for run in runs:
        if run[0].phase != BACKWARD:
            alike[tuple(one.name for one in run)].append(run)
    turns = max(alike.values(), key=len, default=[])
    if module is None or evidence.step is None or len(turns) < _MANY:
        return []
    ranges = evidence.module_ranges.get((turns[0][0].phase, module), ())
    calls = len(evidence.operations_in(evidence.step, ranges))
    return turns if calls and len(turns) >= _MANY * calls else []


def _name_alike(place: ChainPlace, code: str) -> tuple[str, ...]:
    """Return what modules have in common that one change mends: the end of their names, or one activation."""
    return () if code == "activation" else ("", (place[0] or "").rpartition(".")[2])


def _cost(chains: Mapping[ChainPlace, Sequence[Run]]) -> int:
    return sum(one.duration_ns + _LAUNCH_NS for runs in chains.values() for run in runs for one in run)


def _describe_chains(evidence: Evidence, chains: Mapping[ChainPlace, Sequence[Run]]) -> Cause | None:
    (module, phase), costliest = next(iter(chains.items()))
    turns = _find_turns(evidence, module, costliest)
    code, what, change = _kind_of_place((module, phase), costliest, turns)
    if code in ("norm", "chain") and _compares_pairs(evidence, module):
        code, what, change = _PAIRS
    runs = [run for chain in chains.values() for run in chain]
    longest, turn = _find_longest(costliest, turns), _find_body(evidence, module) if turns else None
    has_views = any(map(_is_of_views, runs))
    each = "turn" if turns and not has_views else "call"
    if has_views:
        what = "a loop takes parts of a tensor one by one"
    is_outside = code == "loop" and module is None
    looping = _find_call_that_loops(evidence, phase) if is_outside else None
    if is_outside and _asks_the_model(evidence, looping):
        return None
    backward = " with backward" if any(run[0].phase == BACKWARD for run in runs) else ""
    return Cause(
        code=code,
        cause=what,
        detail=f": {len(longest):,} kernels a {each}, {sum(map(len, runs)):,} a step{backward}",
        line=_find_line(evidence, phase, looping) if module is None else turn,
        module=module,
        further_modules=[name for name, _ in chains if name is not None and name != module],
        change=change,
        changes=[
            *(_fuse_chain(evidence, code, place, chain) for place, chain in chains.items()),
            *(_stop_slicing(evidence, module) if has_views else ()),
            *(_stop_reading_turns(evidence, module, looping) if code == "loop" and not has_views else ()),
        ],
        worth=WORTH_COMPILING if code == "chain" else WORTH,
        evidence={"kernels": sum(map(len, runs)), "time_ns": sum(one.duration_ns for run in runs for one in run)},
    )


def _find_body(evidence: Evidence, module: str | None) -> SourceLine | None:
    """Return the line that calls most operators in a module itself, or outside of all: of a loop, it is in its body."""
    return evidence.find_operator_line(module, lambda line: line.count)


def _stop_slicing(evidence: Evidence, module: str | None) -> Sequence[StepChange]:
    """Return that the function of a module that makes views in a loop takes no Python."""
    body = _find_body(evidence, module)
    own = [line for line in evidence.lines if body and (line.file, line.function) == (body.file, body.function)]
    return edits(*{f"no-host:{line.file}:{line.line}" for line in own if line.thread == "main"})


def _stop_reading_turns(evidence: Evidence, module: str | None, looping: LineTime | None) -> Sequence[StepChange]:
    """Return that nobody reads from the GPU what a loop goes over, as its line above its body does, or in each turn."""
    body = _find_body(evidence, module)
    heads = [line for line in evidence.lines if body and line.file == body.file and line.line == body.line - 1]
    if looping is not None:
        heads += [line for line in evidence.call_tree.under(looping) if not line.is_caller and line.waits >= _MANY]
    return edits(*{f"no-host:{line.file}:{line.line}" for line in heads if line.waits >= 1 and line.thread == "main"})


def _compares_pairs(evidence: Evidence, module: str | None) -> bool:
    """Return whether what a module moves is mostly differences of all pairs, a function of them, and its sums."""
    moved = Counter[str]()
    for line in evidence.operator_lines:
        if line.path and kind_of(line.path[-1]) == module:
            moved[line.operator] += line.bytes
    longest, function = max(((moved[name], name) for name in ("pow", "square", "mul", "abs")), default=(0, ""))
    pairs = moved["sub"] + longest + moved["sum"]
    is_expanded = 0 < moved["sub"] <= _EXPANDED * longest and 0 < moved["sum"] <= _EXPANDED * longest
    return bool(function) and is_expanded and 2 * pairs > moved.total()


def _fuse_chain(evidence: Evidence, code: str, place: ChainPlace, runs: Sequence[Run]) -> StepChange:
    def choose(step: ReplayedStep) -> list[list[int]]:
        return [[one.at for one in run] for run in _find_chain(evidence, step, place)]

    longest = _find_longest(runs, _find_turns(evidence, place[0], runs))
    is_reducing = any(one.category == "reduction" for one in longest)
    if code == "cross-entropy" and _is_one_hot(longest):
        return fuse(choose, _size_of_one_hot)
    factors = _FUSED_ACTIVATION if code == "activation" else _FUSED_REDUCTION if is_reducing else _FUSED_CHAIN
    size = _size_of_loop if code == "loop" and _are_short(longest) else _size_of_fused(factors)
    return fuse(choose, size, compiled=code == "chain")


def _find_call_that_loops(evidence: Evidence, phase: str) -> LineTime | None:
    """Return the innermost call, outside of all modules, of what takes most of a phase's Python; None if it is none."""
    tree = evidence.call_tree
    own = [line for line in evidence.lines if line.thread == "main" and (line.phase or OUTSIDE) == phase]
    least_ns = _MOST_OF_LOOP * sum(line.time_ns for line in own)

    def is_most(call: LineTime) -> bool:
        return sum(line.time_ns for line in tree.under(call) if not line.is_caller) >= least_ns

    calls = [line for line in evidence.facts.callers if line.thread == "main" and (line.phase or OUTSIDE) == phase]
    most = [call for call in calls if call.place not in evidence.trainer_lines and is_most(call)]
    return max(most, key=tree.depth_of, default=None)


def _asks_the_model(evidence: Evidence, looping: LineTime | None) -> bool:
    """Return whether a loop is a rollout's: each turn needs what the model says of the one before.

    A line in it that calls most of the operators loops itself. Without lines it may be one if the step asks the model.
    """
    if looping is None:
        return not evidence.lines and any(one.phase == INFERENCE for one in evidence.kernels)
    inference = [line for line in (*evidence.lines, *evidence.facts.callers) if line.phase == INFERENCE]
    own = evidence.call_tree.called_by(looping)
    functions = {(line.file, line.function) for line in own} & {(line.file, line.function) for line in inference}
    counts = Counter[bool]()
    for line in evidence.operator_lines:
        if not line.path:
            counts[(line.file, line.function) in functions] += line.count
    return bool(functions) and 2 * counts[True] < counts.total()


def _find_line(evidence: Evidence, phase: str, looping: LineTime | None) -> SourceLine | None:
    """Return the line that calls most operators; of a loop whose turns call functions, the costliest of its own."""
    called = _find_body(evidence, None)
    if looping is not None:
        own = evidence.call_tree.called_by(looping)
        longest = max(own, key=lambda line: line.time_ns, default=None)
        if longest is not None and longest.is_caller and called is not None and called.function != longest.function:
            return source_line(longest)
    return called or _find_longest_line(evidence, phase)


def _find_longest_line(evidence: Evidence, phase: str) -> SourceLine | None:
    limits = evidence.limits
    paused = {} if limits is None else {(one.file, one.line): one.time_ns for one in limits.lines_of(Limit.PYTHON)}
    own = [
        line
        for line in evidence.lines
        if line.file and line.thread == "main" and (line.phase or OUTSIDE) == phase
        if not (line.called or "").endswith(_TRAINING) and line.place not in evidence.trainer_lines
        if line.own_ns > 2 * paused.get((line.file, line.line), 0)
    ]
    longest = max(own, key=lambda line: line.own_ns, default=None)
    return None if longest is None else source_line(longest)


def _kind_of_chain(run: Run, in_turn: int) -> tuple[str, str, str]:
    """Return code, sentence and change; ``in_turn`` is how many such chains the same code outside of modules runs."""
    names = " ".join(one.name.lower() for one in run)
    reduces = any(one.category == "reduction" for one in run)
    if in_turn >= _MANY or len(run) >= _VERY_MANY or (len(run) >= _MANY and _are_short(run)):
        if in_turn < _MANY and not _repeats(run):
            return "chain", "many small kernels one after another", "torch.compile of this function"
        return (
            "loop",
            f"a loop of {'small ' * _are_short(run)}kernels",
            "one operation on the whole tensor, or torch.compile of this function",
        )
    is_one_hot = reduces and _is_one_hot(run)
    if is_one_hot or _is_of_classes(run):
        return "cross-entropy", *(_ONE_HOT_LOSS if is_one_hot else _WRITTEN_LOSS)
    if reduces and ("rsqrt" in names or "sqrt" in names or "pow" in names or "mean" in names):
        return "norm", "a norm is written out", "F.layer_norm or F.rms_norm"
    # A sigmoid that is no activation's is a gate: what it multiplies has nothing to do with it.
    if "tanh" in names or "erf" in names or "pow" in names or _is_silu(run):
        usual = "F.silu(x)" if _is_silu(run) else 'F.gelu(x, approximate="tanh"), or torch\'s own'
        usual = "F.mish(x)" if "softplus" in names else usual
        return "activation", "an activation is written out", usual
    return "chain", "a chain of elementwise kernels", "torch.compile of this module, or one operation of torch"


def _is_of_classes(run: Sequence[Operation]) -> bool:
    """Return whether a loss takes the logarithms of probabilities, by torch's softmax or by hand."""
    names = " ".join(one.name.lower() for one in run)
    has_softmax = any(one.category == "softmax" and one.phase == LOSS for one in run)
    return has_softmax or ("exp" in names and "log" in names)


def _is_one_hot(run: Sequence[Operation]) -> bool:
    return any("scatter_gather" in one.name for one in run)


def _repeats(run: Run) -> bool:
    pairs = Counter(pairwise(one.name for one in run))
    return sum(count for count in pairs.values() if count >= _REPEATS) >= _REPEATED * pairs.total()


def _are_short(run: Run) -> bool:
    return median(one.duration_ns for one in run) < _SHORT_NS


def _size_of_fused(factors: By) -> Callable[[World, Sequence[int]], float]:
    """Return how long one kernel in place of a chain takes: it reads its input and writes its output once.

    The chain's shortest kernel of those that handle as many numbers does as much; with a reduction it reads twice.
    """

    def size(world: World, durations: Sequence[int]) -> float:
        least_ns = _LARGE * max(durations)
        shortest_ns = min(time for time in durations if time >= least_ns)
        return min(factors[world] * shortest_ns, sum(durations))

    return size


def _size_of_one_hot(world: World, durations: Sequence[int]) -> float:
    """Return how long the loss of numbers takes in place of that with a matrix: it reads one value of each row."""
    return _OF_ONE_HOT[world] * sum(durations)


def _size_of_loop(world: World, durations: Sequence[int]) -> float:
    smallest_ns, sum_ns = min(durations), sum(durations)
    work_ns = max(smallest_ns, sum_ns - smallest_ns * len(durations))
    return {"least": smallest_ns, "expected": work_ns, "most": (work_ns + sum_ns) / 2}[world]


CHAINS = (_chains,)
