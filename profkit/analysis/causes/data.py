"""Rows of causes: a step's data. Loaders, padding, and copies of batches to the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from profkit.analysis.causes.changes import batches_every, keep_workers, scale_operations, without_copies
from profkit.analysis.causes.evidence import (
    DRAINED_STEP,
    FACTORIES,
    MEAN_STEP,
    WORTH_COMPILING,
    Cause,
    Evidence,
    SourceLine,
    edits,
    line_of_keeping,
    name_ms,
    name_place,
    name_times,
    source_line,
)
from profkit.analysis.step_replay import World
from profkit.analysis.step_replay.edits import find_pageable_copies
from profkit.analysis.summary import WORTH
from profkit.names import BACKWARD, DATA, FORWARD, INFERENCE, LOSS
from profkit.run.lines import NEAR, LineTime

_LEAST_SHARE = 0.01
_MOSTLY = 0.5
"""A wait for data that is starting workers by this share is for these."""
_OF_DATASET = 0.25
"""With less of the batch's time in its lines, the dataset is not what takes it."""
_MANY_WORKERS = 64
"""More are not advised where the number of CPUs is unknown."""
_TOO_SLOW = 1.1
"""Workers that take by so much longer than the step will be waited for, however their queue hides it."""
_LEAST_PADDING, _UNLIKE = 0.1, 0.25
"""Shares of padding that are much: beyond a batch's longest sample, and beside it, where samples differ."""
_OF_LIKE = 0.85
"""Which share of that padding goes where samples of like lengths are together."""
_SPARE = 2.0
"""By how much workers that keep up are faster than the step: batches come unevenly, so that at 1.5 it waits."""
_NEARLY = 2.0
"""More workers are the simpler change, as long as the step takes no more than so many times its pace with them."""
_USUAL_WORKERS, _USUAL_OF_FEW, _TIMES_MORE = 8, 12, 4
"""Where more would be needed, it is the dataset that is slow; some more are usual if that is so many times as many."""
_COLLATING = ("collate.", "fetch.")
"""Files of torch's whose functions get samples one by one, and put them together."""
_CONVERTING = ("float", "half", "bfloat16", "double", "long", "int", "type")
_MAKING_SAMPLES = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
_OF_SINGLE = 0.2
"""What is left of that time where the dataset makes a whole batch at once."""
_SEVERAL = 1.5
"""A worker that keeps so many CPUs busy computes with several threads."""


def _loader(evidence: Evidence) -> Iterator[Cause]:
    """The program waits for its DataLoader: without workers, or with too few for what a batch takes."""
    step, facts = evidence.step, evidence.facts
    if step is None:
        return
    waited_ns = wait_for_data(evidence)
    if are_workers_restarted(evidence):
        yield replace(describe_restarts(evidence), detail=", and the GPU waits for the first", changes=[keep_workers()])
        return
    yield from restarts_elsewhere(evidence)
    # What is left of the recorded step without its waits is less: the GPU's work hides some of them.
    pace_ns = evidence.expect_after(edits(f"workers:{facts.room or _MANY_WORKERS}")) or evidence.now_ns
    behind = [*_falling_behind(evidence, waited_ns)]
    if behind:
        yield from behind
        return
    in_time_ns = evidence.expect_after([batches_every(0)]) or pace_ns
    # More workers are the simpler change if they spare half of the wait, too.
    is_spared = evidence.now_ns - pace_ns >= _MOSTLY * (evidence.now_ns - in_time_ns)
    cheaper = cheapen_batches(evidence, waited_ns, in_time_ns, _NEARLY if is_spared else 1)
    workers = choose_workers(evidence, waited_ns, pace_ns)
    if cheaper is not None and waited_ns >= _LEAST_SHARE * evidence.now_ns:
        cause, every_ns = cheaper
        yield replace(cause, detail=", and the GPU waits for it", changes=[batches_every(every_ns)])
    elif workers is not None:
        cause = describe_loader(evidence, waited_ns, workers, ", pin_memory=True")
        yield replace(cause, detail=", and the GPU waits for it", changes=edits(f"workers:{workers}"))


def restarts_elsewhere(evidence: Evidence) -> Iterator[Cause]:
    """Workers start anew in steps that are none of those timed, which wait for nothing; nor are these rare ones."""
    rare = evidence.summary.rare_steps
    if rare is not None and rare.line is not None and rare.line.phase == DATA:
        return
    saved_ns = evidence.facts.saved_by_keeping_workers("expected")
    if saved_ns > WORTH * evidence.now_ns and wait_for_data(evidence) < _LEAST_SHARE * evidence.now_ns:
        cause, mean_ns = describe_restarts(evidence), evidence.now_ns + saved_ns
        yield replace(
            cause,
            detail=", in steps that are not the typical one",
            answer=evidence.typical_instead_of(mean_ns),
            evidence={**cause.evidence, MEAN_STEP: mean_ns},
        )


def _falling_behind(evidence: Evidence, waited_ns: int) -> Iterator[Cause]:
    """Workers make batches more slowly than steps take them; a queue that was full hides it for a while."""
    facts, lines = evidence.facts, None if evidence.trace is None else evidence.trace.lines
    if not facts.workers or facts.batch_ns is None or lines is None or lines.batches < facts.workers:
        return
    every_ns = round(facts.batch_ns / facts.workers)
    is_waited_for = waited_ns > _MOSTLY * (every_ns - evidence.now_ns + waited_ns)
    if is_waited_for or every_ns <= _TOO_SLOW * evidence.now_ns:
        return
    workers = _workers_in_time(evidence, facts.batch_ns, evidence.now_ns)
    cheaper = cheapen_batches(evidence, 0, evidence.now_ns)
    if cheaper is not None:
        (cause, left_ns), workers = cheaper, facts.workers
    elif workers is not None:
        cause, left_ns = describe_loader(evidence, 0, workers), round(facts.batch_ns / workers)
    else:
        return
    slowest = _find_slowest(evidence, workers)
    yield replace(
        cause,
        cause=f"{name_workers(facts.workers)} of the DataLoader make{'s' * (facts.workers == 1)} a batch every "
        + name_ms(every_ns)
        + f", mostly in {slowest}" * bool(slowest),
        detail=f", and a step takes {name_ms(evidence.now_ns)} only until their queue is empty",
        answer=evidence.typical_instead_of(every_ns, left_ns),
        evidence={**cause.evidence, DRAINED_STEP: every_ns},
    )


def cheapen_batches(
    evidence: Evidence, waited_ns: int, pace_ns: int, nearly: float = _NEARLY
) -> tuple[Cause, int] | None:
    """Return that a line of the dataset makes batches slow, and how often they come without it.

    None where the CPUs have room for enough workers, with which a step takes no more than ``nearly`` times its pace, or
    no line is a good part of a batch.
    """
    facts = evidence.facts
    if not facts.workers or facts.batch_ns is None:
        return None
    line, collating_ns = _costliest_line(evidence), _time_collating(evidence)
    if line is None:
        return None
    costly_ns, what = _time_function(evidence, line)
    room = facts.room or _MANY_WORKERS
    longest_ns = pace_ns * facts.batches_at_once(room, "expected") * (nearly if room > facts.workers else 1)
    if facts.batch_ns <= longest_ns:
        return None
    if collating_ns > _MOSTLY * facts.batch_ns:
        change = "let the dataset make whole batches (batch_size=None, or __getitems__), not single samples"
        left_ns = facts.batch_ns - round((1 - _OF_SINGLE) * collating_ns)
    elif costly_ns < _OF_DATASET * facts.batch_ns:
        return None
    else:
        change = f"do {what} once, or beforehand, not for every sample"
        left_ns = max(0, facts.batch_ns - costly_ns)
    cause = replace(describe_loader(evidence, waited_ns, facts.workers), change=change, edit=None, costs=None)
    return cause, round(left_ns / facts.batches_at_once(facts.workers, "expected"))


def wait_for_data(evidence: Evidence) -> int:
    """Return how long a step waits for its data, in nanoseconds; 0 where that is not known."""
    if evidence.step is None:
        return 0 if evidence.cpu_step is None else evidence.cpu_step.phases.get(DATA, 0)
    return sum(phases.get(DATA, 0) for phases in evidence.step.gap_phases) + evidence.step.columns.late_ns


def are_workers_restarted(evidence: Evidence) -> bool:
    """Return whether most of a step's wait for data is for the first batch of each epoch, and for workers to start."""
    waited_ns, restart_ns = wait_for_data(evidence), evidence.facts.restart_ns
    return waited_ns > _LEAST_SHARE * evidence.now_ns and restart_ns > _MOSTLY * waited_ns


def describe_restarts(evidence: Evidence) -> Cause:
    """Return the cause that workers begin anew for each epoch, without what keeping them does to the step."""
    facts, line = evidence.facts, _find_fetching(evidence)
    place = None if line is None else source_line(line)
    if evidence.loader is not None and facts.starts_workers:
        place = line_of_keeping(evidence.loader)
    starts = f"starts its workers anew for every {facts.epoch_batches} batches"
    change, costs = "DataLoader(…, persistent_workers=True)", "host memory during evaluation"
    if evidence.is_in_trainer:
        change = "TrainingArguments(dataloader_persistent_workers=True)"
    if not facts.starts_workers:
        starts = f"has nothing made ahead when one of its epochs of {facts.epoch_batches} batches begins"
        change, costs = "a sampler that goes on from one epoch to the next", "epochs that you count yourself"
    return Cause(
        code="loader",
        cause=f"the DataLoader {starts}",
        line=place,
        change=change,
        costs=costs,
        evidence={"restart_ns": facts.restart_ns, "epoch_batches": facts.epoch_batches, "workers": facts.workers},
    )


def choose_workers(evidence: Evidence, waited_ns: int, pace_ns: int) -> int | None:
    """Return with how many workers a loader keeps up with a pace; None if more would not help, or nobody knows."""
    facts = evidence.facts
    batch_ns = facts.batch_in_worker(waited_ns, "expected")
    has_unknown_workers = not facts.workers and any(line.thread == "worker" for line in evidence.lines)
    if waited_ns < _LEAST_SHARE * evidence.now_ns or batch_ns is None or has_unknown_workers:
        return None
    if facts.workers and _SPARE * batch_ns < facts.workers * pace_ns:
        return None  # they keep up: what is waited for is something else, such as a loader that has none
    return _workers_in_time(evidence, batch_ns, pace_ns)


def _workers_in_time(evidence: Evidence, batch_ns: int, pace_ns: int) -> int | None:
    facts = evidence.facts
    workers = max(2, math.ceil(_SPARE * batch_ns / max(pace_ns, 1)), facts.workers + 1)
    workers = min(workers, facts.room or _MANY_WORKERS)
    return workers if workers > facts.workers else None


def name_workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def describe_loader(evidence: Evidence, waited_ns: int, workers: int, pinned: str = "") -> Cause:
    """Return the cause that a loader is too slow, without what so many workers do to the step.

    Where a usual number of workers is enough its line is that which says how many there are, if it is known; else it is
    the dataset's, which is named in any case.
    """
    facts, line, loader = evidence.facts, _costliest_line(evidence), evidence.loader
    of_data = None if line is None else source_line(line)
    is_too_few = loader is not None and _are_too_few(evidence, workers)
    have, slowest = f"with {name_workers(facts.workers)} is too slow", _find_slowest(evidence, workers)
    have += f", mostly in {slowest}" * bool(slowest)
    if not facts.workers:
        have = "has no workers" + f": {slowest} runs in the step" * bool(slowest)
    change = f"DataLoader(…, num_workers={workers}{pinned}, persistent_workers=True)"
    if evidence.is_in_trainer:
        change = f"TrainingArguments(dataloader_num_workers={workers}, dataloader_persistent_workers=True)"
    return Cause(
        code="loader",
        cause=f"the DataLoader {have}",
        line=SourceLine(loader.file, loader.line, loader.function) if loader is not None and is_too_few else of_data,
        change=change,
        edit=f"workers:{workers}",
        costs="CPU cores and host memory",
        evidence={
            "waited_ns": waited_ns,
            "workers": facts.workers,
            "batch_ns": facts.batch_in_worker(waited_ns, "expected") or 0,
        },
    )


def _are_too_few(evidence: Evidence, workers: int) -> bool:
    """Return whether a usual number of workers is enough, of very few some more, so that there are too few."""
    have = evidence.facts.workers
    return have < workers <= (_USUAL_OF_FEW if 0 < _TIMES_MORE * have <= workers else _USUAL_WORKERS)


def _find_slowest(evidence: Evidence, workers: int) -> str:
    """Return what takes most of a batch, with its line where a cause that asks for so many workers names the loader's.

    Empty where that line says it, or nobody knows.
    """
    line, inside = _costliest_line(evidence), _find_inside(evidence)
    is_loaders = evidence.loader is not None and _are_too_few(evidence, workers)
    if not is_loaders or line is None or line.called == "next":
        return inside or ""
    return f"{inside or line.called or line.function} at {name_place(line)}"


def _find_inside(evidence: Evidence) -> str | None:
    """Return the library's function that takes most of a batch in workers, None if none is known to."""
    lines = [
        line for line in (*evidence.lines, _find_library(evidence)) if line is not None and line.thread == "worker"
    ]
    longest = max(lines, key=lambda line: line.time_ns, default=None)
    is_most = longest is not None and 2 * longest.time_ns > sum(line.time_ns for line in lines)
    return longest.inside if longest is not None and is_most else None


def _time_collating(evidence: Evidence) -> int:
    """Return how long a worker takes for a batch in torch's own code, which gets samples one by one and stacks them."""
    librarys = _find_library(evidence)
    is_collating = librarys is not None and (librarys.inside or "").startswith(_COLLATING)
    return librarys.time_ns if librarys is not None and is_collating else 0


def _find_library(evidence: Evidence) -> LineTime | None:
    lines = None if evidence.trace is None else evidence.trace.lines
    return None if lines is None else lines.of_library


def _costliest_line(evidence: Evidence) -> LineTime | None:
    """Return the costliest line of the dataset; the loop that asks for the batch only if nearly all lies in itself.

    Of a call by the dataset within which no line takes most of it, the line of the call.
    """
    of_workers = [line for line in evidence.lines if line.thread == "worker"]
    of_main = [line for line in evidence.lines if line.thread == "main" and line.phase == DATA]
    lines = [line for line in (of_workers if evidence.facts.workers else of_main) if line.file]
    calling = {line.place for line in evidence.facts.callers if line.thread == "main"}
    own = [line for line in lines if line.called != "next" and line.place not in calling]
    if sum(line.time_ns for line in own) < _OF_DATASET * sum(line.time_ns for line in lines):
        own = lines
    line = max(own, key=lambda line: line.time_ns, default=None)
    if line is None or line.thread != "worker":
        return line
    *_, outermost = line, *evidence.call_tree.callers_of(line)
    return evidence.call_tree.most_of(outermost)


def _time_function(evidence: Evidence, line: LineTime) -> tuple[int, str]:
    """Return what a line of workers takes, or its function where others of its lines take time; and what it does.

    A function that makes the whole sample is no part of it; there the lines count that call the same.
    """
    function = line.outer_function
    own = [one for one in evidence.lines if one.thread == line.thread and one.file == line.file]
    own = [line] if line.is_caller else [one for one in own if one.outer_function == function]
    if function.rpartition(".")[2] in _MAKING_SAMPLES:
        own = [one for one in own if one is line or (line.method and one.method == line.method)]
    elif len(own) > 1:
        return sum(one.time_ns for one in own), f"what {function} does"
    return sum(one.time_ns for one in own), line.called or "it"


def _padding(evidence: Evidence) -> Iterator[Cause]:
    """Samples are padded to a length that none of their batch has, or few have, and all of it is computed."""
    cause, phases = describe_padding(evidence), (FORWARD, LOSS, BACKWARD)
    if cause is not None:
        trained = evidence.choose(lambda one: one.phase in phases)
        # A teacher or a reference is given the same batch; a rollout is not.
        asked = evidence.choose(lambda one: one.phase == INFERENCE)
        left = shares_without_padding(cause)
        yield replace(
            cause,
            changes=[
                scale_operations(trained, left, "how fast kernels are on shorter samples"),
                scale_operations(asked, {**left, "most": 1.0}, "that passes without gradients have the same samples"),
            ],
        )


def describe_padding(evidence: Evidence) -> Cause | None:
    """Return the cause that much of what is computed is padding, without what the step is without it; None if not."""
    padding = None if evidence.work is None else evidence.work.padding
    if padding is None or not padding.in_longest:
        return None
    left, of_used = padding.in_longest / padding.positions, padding.used / padding.in_longest
    share, detail, worth = 1 - left, " beyond the longest sample of the batch", WORTH
    change = 'pad each batch to its longest sample (padding=True or "longest" in the collator)'
    costs = "shapes that change from step to step"
    if left >= 1 - _LEAST_PADDING:
        if of_used >= 1 - _UNLIKE:
            return None
        share = 1 - padding.used / padding.positions
        left *= 1 - (1 - of_used) * _OF_LIKE
        detail, worth = " beside longer samples of the batch", WORTH_COMPILING
        change = "batches of samples of like lengths (group_by_length), or several samples packed into one"
        costs = "the order of samples is less random"
    return Cause(
        code="padding",
        cause=f"{100 * share:.0f} % of what the model computes is padding",
        detail=detail,
        change=change,
        costs=costs,
        worth=worth,
        evidence={
            "positions": padding.positions,
            "in_longest": padding.in_longest,
            "used": padding.used,
            "left": round(left, 4),
        },
    )


def shares_without_padding(cause: Cause) -> dict[World, float]:
    """Return what passes take of their time without it: attention less than their share, small kernels more."""
    left = float(cause.evidence["left"])
    return {"least": 0.9 * left, "expected": left, "most": left + 0.2 * (1 - left)}


def _copies(evidence: Evidence) -> Iterator[Cause]:
    """Copies of a loader's batches that are not pinned: the host waits in the call until they have run."""
    step = evidence.step
    if step is None or not evidence.facts.workers:
        return
    columns = step.columns
    calls = evidence.pageable_copies
    held_ns = sum(columns.call_end_ns[call] - columns.call_start_ns[call] for call in calls)
    if held_ns < _LEAST_SHARE * evidence.now_ns:
        return
    moves = [line for line in evidence.lines if line.file and line.is_move and line.thread == "main"]
    line = max(moves, key=lambda line: (line.time_ns, line.waits), default=None)
    no_wait = [f"no-wait:{line.file}:{line.line}"] if line is not None and round(line.waits) else []
    change = "DataLoader(…, pin_memory=True) and .to(…, non_blocking=True)"
    # What is converted on the host lies in memory that is not pinned, whatever the loader does.
    converting = [one for one in (*moves, *_find_before(evidence, line)) if one.method in _CONVERTING]
    if converting:
        no_wait = [f"no-host:{one.file}:{one.line}" for one in converting]
        change += " before it is converted: on the GPU, or in the dataset"
    made = None if line is None or len(calls) > round(line.waits) else _find_maker(evidence, line)
    if line is not None and made is not None:
        yield Cause(
            code="made-on-cpu",
            cause=f"torch.{made} makes a tensor on the CPU that is copied to the GPU",
            detail=f", {name_times(len(calls))}, while the host waits",
            line=source_line(line),
            change=f"torch.{made}(…, device=…), or once before the loop",
            changes=[*edits(f"no-host:{line.file}:{line.line}", *no_wait), without_copies(find_pageable_copies)],
            evidence={"copies": len(calls), "held_ns": held_ns},
        )
        return
    line = line or _find_fetching(evidence)
    yield Cause(
        code="pageable-copy",
        cause="data is copied from memory that is not pinned",
        detail=f", {name_times(len(calls))}, while the host waits",
        line=None if line is None else source_line(line),
        change=change,
        changes=edits("pin-memory", *no_wait),
        edit=None if converting else "pin-memory",
        costs="pinned host memory",
        evidence={"copies": len(calls), "held_ns": held_ns},
    )


def _find_before(evidence: Evidence, move: LineTime | None) -> Sequence[LineTime]:
    """Return the lines of the same function that stand just before one that moves a batch."""
    if move is None:
        return []
    own = [one for one in evidence.lines if (one.file, one.function, one.thread) == (move.file, move.function, "main")]
    return [one for one in own if 0 < move.line - one.line <= NEAR]


def _find_maker(evidence: Evidence, line: LineTime) -> str | None:
    """Return the function of torch that makes on the CPU what a line moves; None if the line makes nothing."""
    here = [one for one in evidence.operator_lines if (one.file, one.line) == line.place]
    return next((one.operator for one in here if one.operator in FACTORIES), None)


def _find_fetching(evidence: Evidence) -> LineTime | None:
    """Return the line that asks the loader for a batch, whose own code may move it to the GPU."""
    lines = [line for line in evidence.lines if line.file and line.thread == "main" and line.phase == DATA]
    return max(lines, key=lambda line: line.time_ns, default=None)


def note_crowded_cpus(evidence: Evidence) -> Iterator[str]:
    """There are more threads that compute than CPUs: the program's, or those of workers of data loaders."""
    workers, cpus, busy = evidence.facts.workers, evidence.condition("cpu_count"), evidence.busy_cpus_of_worker
    threads = evidence.condition("cpu_threads")
    if evidence.cpu_step is not None and isinstance(cpus, int) and isinstance(threads, int) and threads > cpus:
        yield f"torch computes with {threads} threads on {cpus} CPUs: torch.set_num_threads({cpus})"
    if busy is not None and isinstance(cpus, int) and busy > _SEVERAL and busy * workers > cpus:
        yield (
            f"each of {workers} loader workers keeps {busy:.1f} of {cpus} CPUs busy while it makes a batch: "
            "set OMP_NUM_THREADS=1, or torch.set_num_threads(1) in worker_init_fn"
        )


DATA_ROWS = (_loader, _padding, _copies)
