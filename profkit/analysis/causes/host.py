"""Rows of causes: Python on the host, and modes of torch that slow it down.

`NOTES` are facts that slow a step down, of which no recording says by how much. They are no Tries.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from statistics import median

from profkit.analysis.causes.calls import unread_graphs
from profkit.analysis.causes.changes import (
    compile_rest,
    drop_stretches,
    launch_without_waiting,
    shorten_gaps,
    without_calls,
    without_copies,
)
from profkit.analysis.causes.data import note_crowded_cpus
from profkit.analysis.causes.evidence import (
    FACTORIES,
    MEAN_STEP,
    Cause,
    Evidence,
    SourceLine,
    edits,
    find_line,
    line_of_keeping,
    name_ms,
    name_place,
    name_times,
    source_line,
)
from profkit.analysis.kernels.compiled_code import is_beyond_limit
from profkit.analysis.lines import RareSteps
from profkit.analysis.step_replay import LAUNCH, WAIT
from profkit.analysis.step_replay.edits import find_pageable_copies
from profkit.analysis.step_replay.kernel_edits import find_attention_plans, find_left_eager, is_convolution
from profkit.analysis.step_replay.limits import OUTSIDE, Limit
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.analysis.time_account.gpu_time import LONGEST_PAUSE_NS
from profkit.names import BACKWARD, COLLECTING, COMPILING, DATA, FORWARD, INFERENCE, LOSS, OPTIMIZER
from profkit.run.lines import NEAR, CallTree, LineTime, lines_of_trainers

_IN_SOURCE = re.compile(r"([^\s/]+\.py):(\d+) in (\w+)")
_RANDOM = ("randn", "rand", "randint", "randperm", "normal")
_TRAINING = ("backward", "step", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "synchronize", "item", "join")
_FETCHES = ("cpu", "numpy", "tolist")
_MAKERS = (".tensor", ".as_tensor", ".from_numpy")
_GATHERING = (
    *("_pad_across_processes", "pad_across_processes", "gather", "gather_object", "concatenate"),  # of Accelerate
    *("nested_concat", "nested_numpify", "torch_pad_and_concatenate", "numpy_pad_and_concatenate"),  # of Transformers
)
_SAVING = ("serialization.", "storage._StorageBase.cpu", "torch.save_file", "torch._evaluate_tensors", "torch._tobytes")
"""Functions of torch, and of safetensors' torch.py, in which time goes by while a checkpoint is saved."""
_MOST_OF_ROLLOUT = 8
"""What calls the model without gradients in one of so few steps or fewer is no evaluation: training needs it."""
_EVALUATES = re.compile("eval|valid", re.IGNORECASE)
"""Functions with such names evaluate a model, however often that is done."""
_MANY_READS, _READ_NS = 64, 40_000
"""So many values are read in a loop of a rare step; what takes no longer was there, and no forward pass waited for."""
_OF_READS = 0.5
_OF_ARRAYS = ("np.", "numpy.", "scipy.", "sklearn.")
_LEAST_SHARE = 0.01
_COVERED = 0.5
"""A line whose time is at least by this share long pauses between CUDA calls runs Python; else it prepares kernels."""
_ALL_PAUSED = 0.8
"""A call is Python by this share of its time."""
_TRIED = 4
"""Fewer waits in a row are no search of cuDNN's, which waits twice for each kernel that it tries."""
_MOSTLY = 0.5
"""A pause that is compiling by this share is all of it."""


def _python_lines(evidence: Evidence) -> Iterator[Cause]:
    """Lines of the user's own that run Python while the GPU has nothing to do: data, masks, tensors made on the CPU."""
    if evidence.step is None or evidence.is_debugged:
        return
    for lines, call in _group_lines(evidence):
        line = max(lines, key=lambda line: line.own_ns) if call is None else evidence.call_tree.most_of(call)
        edited = lines if call is None else [call]
        changes = [*edits(*(f"no-host:{one.file}:{one.line}" for one in edited))]
        fetches = [*_fetches_for(evidence, edited)]
        changes += edits(*(f"no-wait:{one.file}:{one.line}" for one in fetches))
        is_moving = line.is_move and round(line.waits) >= max(1, len(evidence.pageable_copies))
        where = (
            "on the GPU, or less often" if fetches else _say_where(evidence, call or line, line, is_moving=is_moving)
        )
        if line.method in FACTORIES:
            changes.append(without_copies(find_pageable_copies))
        elif is_moving:
            changes.append(without_copies(find_pageable_copies, stay="most"))
        yield Cause(
            code="made-on-cpu" if line.method in FACTORIES else "python",
            cause=_describe_line(line, call),
            line=source_line(line),
            change=f'{line.called}(…, device="cuda")' if line.method in FACTORIES else f"do it {where}",
            changes=changes,
            edit=f"no-host:{edited[0].file}:{edited[0].line}",
            evidence={
                "time_ns": sum(one.own_ns for one in edited),
                "lines": ", ".join(str(one.line) for one in lines),
            },
        )


def _say_where(evidence: Evidence, call: LineTime, line: LineTime, *, is_moving: bool) -> str:
    """Return where, or when, to do what a line does that runs in a call."""
    if _follows(evidence, call, (OPTIMIZER,)):
        return "less often, or in fewer calls"
    if line.phase in (FORWARD, LOSS) or _follows(evidence, call, (FORWARD, LOSS)):
        return "for the whole batch at once, on the GPU, or less often"
    if is_moving:
        return "where the GPU computes: keep the data there, or make it ready ahead in pinned memory"
    has_loader = evidence.facts.workers > 0 or any(one.phase == DATA for one in evidence.lines)
    worker = "in a DataLoader's worker or " if has_loader else ""
    return f"{worker}on the GPU, or once before the loop"


def _follows(evidence: Evidence, line: LineTime, phases: Collection[str]) -> bool:
    return any(each.phase in phases and _is_above(each, line) for each in (*evidence.lines, *evidence.facts.callers))


def _is_above(one: LineTime, other: LineTime) -> bool:
    return (one.file, one.function) == (other.file, other.function) and one.line < other.line


def _fetches_for(evidence: Evidence, lines: Sequence[LineTime]) -> Iterator[LineTime]:
    first = min(lines, key=lambda line: line.line)
    for line in evidence.lines:
        is_alike = (line.file, line.function, line.phase) == (first.file, first.function, first.phase)
        is_before = first.line - NEAR <= line.line < first.line
        if is_alike and is_before and line.method in _FETCHES and round(line.waits):
            yield line


def _moved_tensors(evidence: Evidence) -> Iterator[Cause]:
    """A line makes a tensor of Python's numbers, and the line that moves it waits until the GPU has nothing left."""
    known = {line.place for lines, _ in _group_lines(evidence) for line in lines}
    own = [line for line in evidence.lines if line.file and line.thread == "main"]
    for move in own:
        if move.waits < 1 or not move.is_move:
            continue
        makers = [line for line in own if line.phase == move.phase and (line.called or "").endswith(_MAKERS)]
        line = max(makers, key=lambda line: line.time_ns, default=None)
        if line is None or line.time_ns < _LEAST_SHARE * evidence.now_ns or line.place in known:
            continue
        yield Cause(
            code="python",
            cause=f"{line.called} makes a tensor on the CPU",
            detail=", and moving it waits for the GPU",
            line=source_line(line),
            change="make it in a DataLoader's worker, or move it pinned and with non_blocking=True",
            changes=edits(f"no-host:{line.file}:{line.line}", f"no-wait:{move.file}:{move.line}"),
            edit=f"no-wait:{move.file}:{move.line}",
            evidence={"time_ns": line.time_ns, "waits": move.waits},
        )


def _name_call(line: LineTime) -> str:
    return f"{line.called or line.function} ({name_place(line)})"


def _describe_line(line: LineTime, call: LineTime | None) -> str:
    if line.method in _RANDOM:
        return f"{line.called} draws random numbers on the CPU while the GPU waits"
    if line.method in FACTORIES:
        return f"{line.called} makes a tensor on the CPU while the GPU waits"
    if call is not None and call is not line:
        return f"Python in {_name_call(call)} keeps the GPU waiting"
    # What it waits in is no place of its Python.
    inside = line.called if line.inside is None or line.waits else line.inside
    called = "" if inside is None else f" ({inside})"
    return f"Python in {line.function}{called} keeps the GPU waiting"


def _group_lines(evidence: Evidence) -> Iterator[tuple[Sequence[LineTime], LineTime | None]]:
    """Yield the lines that make the step's long pauses: those of one function and phase that stand together.

    Those that ran in one call, of which hardly anything else is known than such lines, come with the line of the call.
    A pause that is not in every recorded step is none of the program's.
    """
    limits = evidence.limits
    python = [] if limits is None else limits.lines_of(Limit.PYTHON)
    limiting = {(line.file, line.line, line.phase): line.time_ns for line in python}
    pauses = _pauses(evidence)
    calls: dict[LineTime | None, list[LineTime]] = {}
    pausing, is_plain = [], _is_plain(evidence)
    for line in filter(is_plain, evidence.lines):
        phase = line.phase or OUTSIDE
        limiting_ns, paused_ns = limiting.get((line.file or "", line.line, phase), 0), pauses.get(phase, 0)
        # Of a long pause the GPU's work may hide the most.
        is_late = limiting_ns >= min(_COVERED * line.own_ns, _LEAST_SHARE * evidence.now_ns)
        if is_late and paused_ns >= _COVERED * line.own_ns:
            pausing.append(line)
    for line in pausing:
        calls.setdefault(_find_call(evidence.call_tree, line, pausing, is_plain), []).append(line)
    alone = calls.pop(None, [])
    for call, lines in calls.items():
        assert call is not None
        if call.own_ns >= _LEAST_SHARE * evidence.now_ns:
            yield lines, call
    long = [line for line in alone if line.own_ns >= _LEAST_SHARE * evidence.now_ns]
    yield from ((lines, None) for lines in group_nearby(long))


def _is_plain(evidence: Evidence) -> Callable[[LineTime], bool]:
    """Return whether a line of the thread that trains runs Python of the program's own.

    A line in which backward passes or optimizers run, too, calls a trainer.
    """
    # What moving a worker's batch takes is that of its memory, which is not pinned: a row of its own.
    moves_pageable = bool(evidence.facts.workers and evidence.pageable_copies)
    known = (*evidence.lines, *evidence.facts.callers)
    training = [line for line in known if line.phase in (BACKWARD, OPTIMIZER)]
    trainers, loops = {line.place for line in training}, {(line.file, line.function) for line in training}
    # In the function that trains, what lies in a forward pass is the call of the model: all of a library's Python.
    models = {line.place for line in known if line.phase == FORWARD and (line.file, line.function) in loops}

    def is_plain(line: LineTime) -> bool:
        is_own = line.thread == "main" and line.phase != DATA and line.place not in trainers | models
        return is_own and not _launches(line) and not (line.is_move and moves_pageable)

    return is_plain


def _find_call(
    tree: CallTree, line: LineTime, pausing: Sequence[LineTime], is_plain: Callable[[LineTime], bool]
) -> LineTime | None:
    """Return the outermost line that had called this one and hardly anything but such lines, None if there is none."""
    found = None
    for caller in filter(is_plain, tree.callers_of(line)):
        paused_ns = sum(one.own_ns for one in tree.under(caller) if one in pausing)
        if paused_ns >= _ALL_PAUSED * caller.own_ns:
            found = caller
    return found


def _pauses(evidence: Evidence) -> dict[str, int]:
    """Return phase → how long Python ran in pauses of over `LONGEST_PAUSE_NS` in most recorded steps, if in all."""
    steps = () if evidence.replay is None else evidence.replay.steps
    of_steps = [_pauses_of(evidence, step) for step in steps]
    phases = set().union(*of_steps)
    in_all = [phase for phase in phases if all(pauses.get(phase) for pauses in of_steps)]
    return {phase: round(median(pauses[phase] for pauses in of_steps)) for phase in in_all}


def _pauses_of(evidence: Evidence, step: ReplayedStep) -> dict[str, int]:
    others = evidence.shares_in_ranges(step, COLLECTING) | evidence.shares_in_ranges(step, COMPILING)
    sums: dict[str, int] = {}
    for call, (gap_ns, phases) in enumerate(zip(step.columns.gap_ns, step.gap_phases, strict=True)):
        for phase, time_ns in phases.items() if gap_ns > LONGEST_PAUSE_NS else ():
            sums[phase] = sums.get(phase, 0) + round(time_ns * (1 - others.get(call, 0)))
    return sums


def _launches(line: LineTime) -> bool:
    is_operation = line.phase is not None and (line.called or "").startswith(("self.", "F."))
    return is_operation or line.method in _TRAINING


def group_nearby(lines: Iterable[LineTime]) -> Iterator[Sequence[LineTime]]:
    """Yield the lines of one phase and function, with what is written within it, that stand together."""
    groups: defaultdict[tuple[str, str, str | None], list[LineTime]] = defaultdict(list)
    for line in lines:
        groups[line.file or "", line.outer_function, line.phase].append(line)
    for group in groups.values():
        ordered = sorted(group, key=lambda line: line.line)
        starts = [at for at, line in enumerate(ordered) if not at or line.line - ordered[at - 1].line > NEAR]
        yield from (ordered[start:end] for start, end in pairwise([*starts, len(ordered)]))


def _rare_steps(evidence: Evidence) -> Iterator[Cause]:
    """A line runs in rare steps alone, which take far longer: a checkpoint, an evaluation, figures for a log."""
    rare = evidence.summary.rare_steps
    if rare is None or rare.line is None or not evidence.now_ns:
        return
    every, mean_ns = rare.one_in, evidence.now_ns + rare.mean_longer_ns
    yield from _rare_reads(evidence, every, mean_ns)
    is_often = rare.every is not None and rare.every <= _MOST_OF_ROLLOUT
    asked = [line.function for line in evidence.lines_of_rare_steps if line.phase == INFERENCE]
    if is_often and asked and not any(map(_EVALUATES.search, asked)):
        return
    # What else runs in these steps, as the rest of a rollout, stays.
    saved_ns = min(round(rare.lines_ns / every), mean_ns - evidence.now_ns)
    what, change = _explain_rare(evidence, rare, rare.line)
    moved = _find_moved(evidence, rare, rare.line)
    if moved is not None:
        what, change = f"on the CPU, to which line {moved.line} moves tensors", "leave them on the GPU"
    restarted = _find_restarted(evidence) if rare.line.phase == DATA else None
    if restarted is not None:
        argument = f"{'dataloader_' * evidence.is_in_trainer}persistent_workers=True"
        change = f"give this DataLoader workers that stay ({argument}), or go through it less often"
    cause, detail = f"{rare.which} {name_ms(rare.longer_ns)} longer", f", {what}"
    if not rare.is_explained:
        cause, detail = f"{cause}, {name_ms(rare.lines_ns)} of it {what}", ""
    elif moved is not None:
        cause, detail = f"{cause}, {what}", ""
    yield Cause(
        code="python",
        cause=cause,
        detail=detail,
        line=restarted or source_line(moved or rare.line),
        change=change,
        answer=evidence.typical_instead_of(mean_ns, mean_ns - saved_ns),
        evidence={
            "longer_ns": rare.longer_ns,
            "every": every,
            "lines_ns": rare.lines_ns,
            MEAN_STEP: mean_ns,
            **({} if rare.every else {"of_steps": rare.of}),
        },
    )


def _find_moved(evidence: Evidence, rare: RareSteps, line: LineTime) -> LineTime | None:
    """Return the line that moves to the CPU what the longest line of rare steps computes with, which waits for nothing.

    Or that which takes most of them by itself. On a GPU a method of tensors is done at once. What ``.to()`` moves
    before a model is called goes to the GPU.
    """
    if rare.copy is not None:
        return rare.copy
    is_tensors = "." in (line.called or "") and not (line.called or "").startswith(_OF_ARRAYS)
    if line.waiting_ns > _OF_READS * line.time_ns or not is_tensors:
        return None
    moves = [one for one in (*evidence.lines_of_rare_steps, *evidence.lines) if one.may_move_to_cpu]
    if line.phase == INFERENCE:
        moves = [one for one in moves if one.method == "cpu"]
    before = [one for one in moves for anchor in (line, rare.call) if anchor is not None and _is_above(one, anchor)]
    return max(before, key=lambda one: (one.waiting_ns, one.line), default=None)


def _find_restarted(evidence: Evidence) -> SourceLine | None:
    """Return the line that lets a loader's workers end with its epoch, if the only one that began several is known."""
    loaders = [one for one in evidence.manifest.loaders if one.workers and not one.keeps_workers and one.epochs > 1]
    return line_of_keeping(loaders[0]) if len(loaders) == 1 else None


def _explain_rare(evidence: Evidence, rare: RareSteps, line: LineTime) -> tuple[str, str]:
    """Return what the line of rare steps does in them, and what to do about it."""
    name = line.called or line.function if rare.call is None else _name_call(rare.call)
    # What a trainer's line does in rare steps is no part of the usual ones, whose lines are the evidence's.
    is_trainers = line.place in lines_of_trainers((line, *evidence.lines, *evidence.facts.callers))
    how = "on larger batches" if rare.evaluates else "beside training"
    if line.phase == DATA:
        how = "give its DataLoader workers that stay: persistent_workers=True"
        if evidence.manifest.loading is not None and evidence.manifest.loading.keeps_workers:
            how = "let its sampler begin anew by itself: each epoch's first batch is waited for"
    change = f"do it less often, or {how}"
    if not is_trainers:
        if line.phase == INFERENCE and _evaluates_in_fp32(evidence):
            change = "do it under the autocast that training has, or less often"
        return f"for {name}", change
    if _saves_checkpoint(line):
        return f"in {name}, which saves a checkpoint", "save checkpoints less often, or less of the state"
    what = f"in {name}, mostly a wait for data"
    evaluating = [one for one in (*evidence.lines, *evidence.lines_of_rare_steps) if one.phase == INFERENCE]
    if line.phase == DATA and any(one.place == line.place for one in evaluating):
        change = "give its evaluation's DataLoader workers that stay, or evaluate less often"
    elif line.phase != DATA:
        what, change = f"in {name} itself", "evaluate, save or log less often, or less of it"
    if any(map(_reads_classes, evidence.lines_of_rare_steps)) or _gathers_outputs(line):
        change = f"preprocess_logits_for_metrics that returns classes: no scores are gathered; or {change}"
    reads = round(line.waits * rare.one_in)
    if reads >= _MANY_READS and line.waiting_ns >= _COVERED * line.time_ns:
        what = f"in {name}, mostly waits for {reads:,} reads from the GPU"
        change = f"return fewer tensors from the model, as without output_hidden_states; or {change}"
    return what, change


def _rare_reads(evidence: Evidence, every: float, mean_ns: int) -> Iterator[Cause]:
    """Values that rare steps read one by one, though they were there: a loop over environments, say."""
    for line in evidence.lines_of_rare_steps:
        is_loop = line.waits * every >= _MANY_READS and line.waiting_ns <= _READ_NS * line.waits
        if not line.file or not is_loop or line.waiting_ns < _MOSTLY * line.time_ns:
            continue
        answer = evidence.typical_instead_of(mean_ns, mean_ns - line.time_ns)
        if answer is not None and answer.low_ns is not None and answer.high_ns is not None:
            # Looking for lines slows these steps, and what is computed together takes a part of it.
            reach_ns = round(_OF_READS * line.time_ns)
            answer = replace(answer, low_ns=answer.low_ns - reach_ns, high_ns=answer.high_ns + reach_ns)
        name = "a value" if line.called is None else f"{line.called}()"
        yield Cause(
            code="waits",
            cause=f"{name} is read from the GPU {round(line.waits * every):,} times in one step of {round(every)}",
            line=source_line(line),
            change="compute the values together, and read them once",
            answer=answer,
            evidence={"waits": line.waits * every, "every": every, MEAN_STEP: mean_ns},
        )


def _evaluates_in_fp32(evidence: Evidence) -> bool:
    return bool(evidence.condition("autocast_dtypes")) and evidence.condition("evaluates_without_autocast") is True


def _reads_classes(line: LineTime) -> bool:
    """Whether a line computes metrics of Hugging Face's Trainer from scores of all classes, which come to the CPU."""
    return line.outer_function == "compute_metrics" and line.method == "argmax"


def _saves_checkpoint(line: LineTime) -> bool:
    """Whether a trainer's line mostly copies tensors to be saved, or writes them."""
    return (line.inside or "").startswith(_SAVING)


def _gathers_outputs(line: LineTime) -> bool:
    """Whether that Trainer mostly pads, joins and copies to the CPU what the model returned."""
    return (line.inside or "").rpartition(".")[2] in _GATHERING


def _anomaly(evidence: Evidence) -> Iterator[Cause]:
    """Anomaly detection: every operation keeps its stack, and every gradient is searched for NaN, which waits."""
    if evidence.condition("anomaly_detection") is not True or evidence.step is None:
        return
    step = evidence.step
    yield Cause(
        code="anomaly",
        cause="anomaly detection is on: every gradient is searched for NaN, and every operation keeps its stack",
        change="torch.autograd.set_detect_anomaly(False)",
        changes=edits("no-anomaly"),
        edit="no-anomaly",
        evidence={"waits": len(step.columns.waits_among(step.calls_in({BACKWARD})))},
    )


def _allocations(evidence: Evidence) -> Iterator[Cause]:
    """Memory that CUDA gives and takes within steps: PyTorch's cache does not hold what a step needs, or it grows."""
    step = evidence.step
    if step is None or not step.allocating:
        return
    columns = step.columns
    time_ns = sum(columns.call_end_ns[call] - columns.call_start_ns[call] for call in step.allocating)
    emptying = [line for line in evidence.lines if line.method == "empty_cache"]
    line = max(emptying, key=lambda line: line.time_ns, default=None)
    yield Cause(
        code="allocations",
        cause=f"CUDA allocates or frees memory {name_times(len(step.allocating))}",
        detail=": memory grows, or is in pieces" if line is None else ": the cache is emptied, and filled again",
        line=None if line is None else source_line(line),
        change="keep no tensors from step to step; else PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        if line is None
        else "no torch.cuda.empty_cache() in the step",
        changes=[without_calls(lambda step: list(step.allocating))],
        evidence={"calls": len(step.allocating), "time_ns": time_ns},
        proof="profkit memory RUN --leaks",
    )


def _attention_plans(evidence: Evidence) -> Iterator[Cause]:
    """cuDNN plans its attention on the CPU for each size that is new, and the lengths of most batches are."""
    step = evidence.step
    plans = [] if step is None else find_attention_plans(step)
    # Where later steps do without, most lengths have come.
    if step is None or not plans or evidence.summary.later_step_ns is not None:
        return
    planning_ns = sum(step.columns.gap_ns[call] for call in plans)
    lines = [line for line in evidence.lines if line.method == "scaled_dot_product_attention"]
    line = max(lines, key=lambda line: line.time_ns, default=None)
    yield Cause(
        code="attention-plans",
        cause=f"attention is planned anew for {name_ms(planning_ns)} a step",
        detail=" by cuDNN, once for each length",
        line=None if line is None else source_line(line),
        module=_module_of_most(step, plans),
        change="torch.backends.cuda.enable_cudnn_sdp(False), or batches of few lengths",
        changes=edits("no-cudnn-attention"),
        edit="no-cudnn-attention",
        costs="attention's kernels may take longer; where lengths are few, all are planned after some steps",
        evidence={"plans": len(plans), "planning_ns": planning_ns},
    )


def _searches(evidence: Evidence) -> Iterator[Cause]:
    """cudnn.benchmark is on, and inputs have new sizes: for each, all kernels of a convolution run and are timed."""
    step = evidence.step
    searches = [] if step is None else [*_find_searches(step)]
    if step is None or not searches or evidence.condition("cudnn_benchmark") is not True:
        return
    yield Cause(
        code="convolution-search",
        cause=f"cuDNN tries all kernels of a convolution, {name_times(len(searches))}",
        detail=": cudnn.benchmark is on, and sizes are new",
        module=_module_of_most(step, [search[0] for search in searches]),
        change="torch.backends.cudnn.benchmark = False, or inputs of few sizes",
        changes=[drop_stretches(_find_searches, "how fast convolutions are without a search")],
        costs="convolutions may take longer; where sizes are few, all are tried after some steps",
        evidence={"searches": len(searches), "waits": sum(map(len, map(step.columns.waits_among, searches)))},
    )


def _module_of_most(step: ReplayedStep, calls: Iterable[int]) -> str | None:
    """Return the module in which most of these calls are made, None if none of them is in one."""
    modules = Counter(module for module in (step.module[call] for call in calls) if module is not None)
    return max(modules, key=lambda module: modules[module], default=None)


def _find_searches(step: ReplayedStep) -> Iterator[range]:
    """Yield the calls of each search: waits for convolutions in one module and phase, without a kernel of torch's."""
    columns, names = step.columns, step.operation_names
    of_torch = accumulate(any("at::native" in names[row] for row in range(*rows)) for rows in columns.launches)
    places = [*zip(step.phase, step.module, of_torch, strict=True)]
    waits = (call for call, kind in enumerate(columns.kind) if kind == WAIT)
    for _, group in groupby(waits, key=places.__getitem__):
        tried = [*group]
        search = range(tried[0], tried[-1] + 1)
        if len(tried) >= _TRIED and any(is_convolution(names[row]) for row in columns.rows_of(search)):
            yield search


def _collections(evidence: Evidence) -> Iterator[Cause]:
    """Python collects garbage in most steps, and looks at all objects of the process for it."""
    paused_ns = evidence.usual_time_in(COLLECTING, "full_collections")
    if not paused_ns:
        return
    lines = [line for line in evidence.lines if line.called == "gc.collect"]
    line = max(lines, key=lambda line: line.time_ns, default=None)
    is_asked_for = line is not None
    yield Cause(
        code="garbage",
        cause=f"Python collects garbage for {name_ms(paused_ns)} in most steps",
        detail=", and looks at all objects for it",
        line=source_line(line) if line is not None else None,
        change="no gc.collect() in the step"
        if is_asked_for
        else "gc.freeze() before the first step, then gc.disable()",
        changes=[shorten_gaps(lambda step: evidence.shares_in_ranges(step, COLLECTING))],
        costs=None if is_asked_for else "objects that refer to each other are kept",
        evidence={"paused_ns": paused_ns},
    )


def _recompilations(evidence: Evidence) -> Iterator[Cause]:
    """torch.compile compiles in most steps, since what it has compiled does not fit the step's inputs.

    What Dynamo does before and after a compilation is no part of its range, and goes with it: it looks for code whose
    guards hold, and collects garbage.
    """
    compiling_ns = evidence.usual_time_in(COMPILING, "compiled_graphs")
    known = evidence.summary.compilations
    again = [] if known is None else [compiled for step in known.steps for compiled in step.again if compiled.line]
    if not compiling_ns or not again:
        return
    longest = max(again, key=lambda compiled: compiled.duration_ns or 0)
    reason = (longest.reason or "torch does not say why").partition("  #")[0].strip()
    yield Cause(
        code="recompile",
        cause="torch.compile compiles again in most steps",
        detail=f": {reason}",
        line=find_line(longest.line or ""),
        change="keep what the code is compiled for the same: pass what changes as a tensor, or leave it outside",
        changes=[shorten_gaps(lambda step: evidence.shares_in_ranges(step, COMPILING, whole_from=_MOSTLY))],
        evidence={"compiling_ns": compiling_ns},
    )


def _given_up(evidence: Evidence) -> Iterator[Cause]:
    """A function runs without torch.compile, which had compiled it for other inputs as often as it does."""
    step, known = evidence.step, evidence.summary.compilations
    beyond = None if known is None else next(filter(is_beyond_limit, known.not_compiled), None)
    if step is None or beyond is None:
        return
    reason, _, source = (beyond.reason or "torch does not say why").partition("  #")
    place = _IN_SOURCE.search(source)
    eager = find_left_eager(step)
    yield Cause(
        code="recompile",
        cause="torch.compile has given a function up, which changed too often",
        detail=f": {reason.strip()}",
        line=find_line(beyond.line or "") if place is None else SourceLine(place[1], int(place[2]), place[3]),
        change="keep what the code is compiled for the same: pass what changes as a tensor, or leave it outside",
        changes=[compile_rest()],
        evidence={"kernels": len(eager), "small_ns": sum(step.columns.duration_ns[row] for row in eager)},
    )


def _blocking_launches(evidence: Evidence) -> Iterator[Cause]:
    """Each launch waits for its kernel, which is meant for finding errors."""
    if evidence.step is None or not evidence.launches_block:
        return
    columns = evidence.step.columns
    yield Cause(
        code="launch-blocking",
        cause="CUDA_LAUNCH_BLOCKING is set",
        detail=": Python waits in each launch until its kernel has run",
        change="unset CUDA_LAUNCH_BLOCKING",
        changes=[launch_without_waiting()],
        evidence={
            "launching_ns": sum(own for own, kind in zip(columns.own_ns, columns.kind, strict=True) if kind == LAUNCH)
        },
    )


HOST = (
    _attention_plans,
    _searches,
    _collections,
    _recompilations,
    _given_up,
    _python_lines,
    _moved_tensors,
    _rare_steps,
    _anomaly,
    _blocking_launches,
    _allocations,
)


def _deterministic(evidence: Evidence) -> Iterator[str]:
    if evidence.condition("deterministic_algorithms") is True:
        yield "torch.use_deterministic_algorithms is on: some operations run slower kernels"


def _convolutions(evidence: Evidence) -> Iterator[str]:
    """cuDNN chooses kernels by rules of thumb, and every step has the same convolutions."""
    steps = () if evidence.replay is None else evidence.replay.steps
    kernels = {_names_of_convolutions(step) for step in steps}
    if evidence.condition("cudnn_benchmark") is False and len(steps) > 1 and len(kernels) == 1 and kernels != {()}:
        yield (
            f"cudnn.benchmark is off, and every recorded step runs the same {len(next(iter(kernels)))} kernels of "
            "convolutions: `profkit try RUN --edit cudnn-benchmark` shows whether others are faster"
        )


def _names_of_convolutions(step: ReplayedStep) -> tuple[str, ...]:
    return tuple(name for name in step.operation_names if is_convolution(name))


NOTES: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _deterministic,
    _convolutions,
    note_crowded_cpus,
    unread_graphs,
)
