"""What to try: at most three causes with the largest expected effects, and what their removal buys together.

A cause stands only if its removal is expected to save more than 2 % of the step (`Cause.worth`) and more than the
steps' own spread, and if its interval is hardly one of steps longer than now, on a host of the same speed; or if it
saves 2 % of the peak. Each further one must save as much on top of those before it, which make the spread smaller with
the step, so that no waste is sold twice.
Effects on time are replayed. A capture that failed its self-check, or cannot be replayed, gets none. Where the steps
that followed are far shorter than those that were timed, a Try is of them, and its times become shorter as they do.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from profkit.analysis.causes.calls import CALLS
from profkit.analysis.causes.chains import CHAINS
from profkit.analysis.causes.data import DATA_ROWS
from profkit.analysis.causes.evidence import (
    COMPARE,
    DRAINED_STEP,
    LATER_STEP,
    MEAN_STEP,
    Cause,
    Evidence,
    Interval,
    SourceLine,
)
from profkit.analysis.causes.gradients import GRADIENTS
from profkit.analysis.causes.host import HOST, NOTES
from profkit.analysis.causes.kernels import KERNELS
from profkit.analysis.causes.launches import LAUNCHES
from profkit.analysis.causes.memory import MEMORY
from profkit.analysis.causes.on_cpu import find_causes_on_cpu
from profkit.analysis.causes.ranks import RANKS
from profkit.analysis.causes.waits import WAITS
from profkit.analysis.step_replay.limits import OUTSIDE, Limit, StepLimits
from profkit.analysis.step_replay.predict import StepChange, TimeAnswer
from profkit.analysis.summary import PRODUCTS, WORTH, StepTree, Summary
from profkit.analysis.trials import Trial, latest_trials
from profkit.run.edits import Trials, can_be_tried
from profkit.run.work import OperatorLine

if TYPE_CHECKING:
    from profkit.analysis.opened import OpenedCapture

MOST_TRIES = 3
_MOST_SCREENED = 12
_LEAST_NAMED = 0.1
_SURE = 0.25
"""A step after a change may be longer than now by at most this part of the expected saving."""
_COMPILING = ("compile", "launches", "chain")
"""Causes that compiling removes: the model's is advised once, after a chain that is much of it."""
_OF_MODELS = ("compile", "launches")
_MUCH_OF = 0.4
"""A chain that saves this share of what compiling does is named for its place, and before it."""
_OF_LOOPS = ("launches", "activation", "chain", "loop")
"""Causes that go with a loop in the same module."""
_TIMES_A_MEND = 4
"""So many times what a mend at one place saves compiling must save on top of all others to stand before it."""
_TIMES_OTHERS = 2
"""So many times what others save autocast must save to stand before them."""
_OF_CALLS = ("loop", "chain")
"""Causes outside of modules whose rows choose the line."""
_RUNS_PYTHON = ("python", "made-on-cpu", "loader", "garbage", "recompile")
"""Causes for which Python is late: with them goes what a wait costs without which it would run ahead."""
_OF_TRAINING = ("autocast", "batch")
"""Edits of what a program computes: their causes are chosen after all others, which they must not hide."""

_OF_LOSSES = ("log_softmax", "softmax", "log", "exp", "logsumexp", "gather", "sub", "one_hot", "scatter")
_OPERATORS: dict[str, Callable[[OperatorLine], float]] = {
    **dict.fromkeys(("norm", "activation"), lambda line: line.bytes * (not line.flops)),
    **dict.fromkeys(("loop", "chain"), lambda line: line.count),
    "pairs": lambda line: line.bytes * (line.operator == "sub"),
    "sizes": lambda line: line.flops,
    "autocast": lambda line: line.flops * (line.dtype == "float32"),
    "attention": lambda line: line.bytes * ("softmax" in line.operator or "dot_product" in line.operator),
    "cross-entropy": lambda line: line.bytes * (line.operator.strip("_") in _OF_LOSSES),
    "float64": lambda line: line.bytes * (line.dtype == "float64"),
    "sort": lambda line: line.bytes * (line.operator == "randperm"),
    "gather": lambda line: line.bytes * (line.operator == "index"),
    "scan": lambda line: line.bytes * line.operator.startswith("cum"),
    "channels-last": lambda line: line.bytes * (line.operator in ("clone", "copy_")),
}
"""Code of a cause that is seen in kernels, and mended where they come from → how much a line has to do with it."""

Row = Callable[[Evidence], Iterator[Cause]]

ROWS: tuple[Row, ...] = (
    *DATA_ROWS,
    *HOST,
    *WAITS,
    *LAUNCHES,
    *KERNELS,
    *CHAINS,
    *CALLS,
    *GRADIENTS,
    *MEMORY,
    *RANKS,
    find_causes_on_cpu,
)
"""The table: each row yields the causes of one kind for which a capture holds evidence."""


@dataclass(frozen=True)
class Advice:
    """One Try: the cause with its line or module, the change, and the step after it, unprofiled.

    ``detail`` is the end of ``cause`` that a short line leaves out.
    ``edit`` is its name for ``profkit whatif --edit`` and ``profkit try --edit``, None if it has none. ``after_ns`` is
    the step after this change alone; ``saves_ns`` is what that saves, give or take the steps' own spread; None where a
    change is for memory alone. ``saves_bytes`` is of the peak. ``evidence`` are the figures that prove the cause. In
    ``proof`` ``RUN`` is this run and ``NEW`` one that was recorded with the change. ``measured`` is the latest trial of
    the edit in this run, None if it was not tried.
    """

    code: str
    cause: str
    line: SourceLine | None
    module: str | None
    change: str
    edit: str | None
    after_ns: Interval | None
    saves_ns: Interval | None
    saves_bytes: Interval | None
    costs: str | None
    evidence: Mapping[str, float | str]
    proof: str
    measured: Trial | None = None
    detail: str = ""

    @property
    def other_step_ns(self) -> float | None:
        """The step that it makes shorter, where that is not the typical one; None if it is."""
        steps_ns = (self.evidence.get(which) for which in (MEAN_STEP, DRAINED_STEP, LATER_STEP))
        return next((step_ns for step_ns in steps_ns if isinstance(step_ns, int | float)), None)

    @property
    def short_cause(self) -> str:
        return self.cause.removesuffix(self.detail)

    @property
    def changes_training(self) -> bool:
        """Whether the change is one of what the program computes."""
        return _changes_training(self)

    @property
    def effect_ns(self) -> float:
        """By how much the step becomes shorter: as measured, else as expected; 0 where that is not known."""
        measured = self.measured
        if measured is not None and measured.change_ns is not None and measured.batch_factor == 1:
            return -measured.change_ns
        return 0 if self.saves_ns is None else self.saves_ns.expected


@dataclass(frozen=True)
class AdviceResult:
    """The Tries, the largest effect first, compiling as `_sort_by_effect` says.

    ``together_ns`` is the step after all of those that change its time. ``nothing`` says in one sentence that nothing
    was found, and what the step is made of; None if there is a Try. ``trials`` are the edits that were tried in this
    run, and are no Try; the largest effect first. ``notes`` are facts that slow a step down by an unknown time.
    """

    tries: tuple[Advice, ...] = ()
    together_ns: Interval | None = None
    nothing: str | None = None
    trials: tuple[Trial, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data: ``trials``, ``advice`` and, with that as their beginning, its other parts."""
        return {
            "advice": [_plain(advice) for advice in self.tries],
            "advice_together": None if self.together_ns is None else {"after_ns": vars(self.together_ns)},
            "advice_nothing": self.nothing,
            "advice_notes": list(self.notes),
            "trials": [trial.to_dict() for trial in self.trials],
        }


def _plain(advice: Advice) -> dict[str, Any]:
    inner = ("line", "after_ns", "saves_ns", "saves_bytes")
    measured = None if advice.measured is None else advice.measured.to_dict()
    plain = {**vars(advice), "evidence": dict(advice.evidence), "measured": measured}
    return plain | {key: None if plain[key] is None else vars(plain[key]) for key in inner}


def find_advice(capture: OpenedCapture, summary: Summary) -> AdviceResult:
    """Return what to try in a capture of which ``summary`` is the summary, and what was tried in its run.

    A Try whose effect was measured ranks by that.
    """
    result = _find_tries(capture, summary)
    return result if capture.run is None else add_trials(result, capture.run.trials)


def add_trials(result: AdviceResult, calls: Sequence[Trials]) -> AdviceResult:
    """Return the Tries with what was measured of them, ranked by that, and the other edits that were tried."""
    tried = latest_trials(calls)
    if not tried:
        return result
    tries = [replace(advice, measured=tried.pop((advice.edit or "",), None)) for advice in result.tries]
    others = [trial for trial in tried.values() if trial.change_ns is not None]
    return replace(
        result,
        tries=tuple(sorted(tries, key=lambda advice: (_is_last(advice), -_sure_effect(advice)))),
        trials=tuple(sorted(others, key=lambda trial: trial.change_ns or 0.0)),
    )


def _sure_effect(advice: Advice) -> float:
    is_unsure = advice.code in _COMPILING and advice.measured is None
    return advice.effect_ns / (_TIMES_A_MEND if is_unsure else 1)


def _is_last(advice: Advice) -> bool:
    return advice.changes_training and advice.measured is None


def _changes_training(cause: Cause | Advice) -> bool:
    """Return whether the change is an edit of what a program computes; as many samples in fewer passes are none."""
    return cause.edit is not None and cause.edit.partition(":")[0] in _OF_TRAINING


def _find_tries(capture: OpenedCapture, summary: Summary) -> AdviceResult:
    if summary.has_failed:
        return AdviceResult(nothing="Nothing can be advised: the capture failed its self-check.")
    evidence = Evidence(capture, summary)
    causes = [cause for row in ROWS for cause in row(evidence)]
    chosen = _choose(evidence, _screen(evidence, causes))
    notes = tuple(note for find in NOTES for note in find(evidence))
    if not chosen:
        return AdviceResult(nothing=_say_nothing(evidence), notes=notes)
    tries = tuple(_advise(evidence, cause) for cause in _sort_by_effect(evidence, chosen))
    return AdviceResult(tries, _predict_together(evidence, chosen), notes=notes)


def _sort_by_effect(evidence: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    """Return the largest effect first; that of compiling is what it saves on top of the others, and far less sure.

    An edit of what the program computes stands last, but autocast before what saves less than half as much.
    """
    others = [cause for cause in causes if cause.code not in _COMPILING and not _changes_training(cause)]

    def effect(cause: Cause) -> float:
        chains = [other for other in causes if other.code == "chain" and cause.code in _OF_MODELS]
        if cause.code in _COMPILING and (others or chains):
            return _weight_on_top(evidence, cause, others + chains) / _TIMES_A_MEND
        return _printed_share(evidence, cause) / (_TIMES_OTHERS if _changes_training(cause) else 1)

    return sorted(causes, key=lambda cause: (_changes_training(cause) and cause.code == "batch", -effect(cause)))


def _printed_share(evidence: Evidence, cause: Cause) -> float:
    """Return the share that a chosen cause saves as it will be printed: of the step over all worlds, or of the peak."""
    if cause.ends_run or cause.answer is not None or not cause.changes:
        return _weight(evidence, cause)
    return max(_share_saved(evidence.predict(cause.changes)), _memory_share(evidence, cause))


def _predict_together(evidence: Evidence, causes: Sequence[Cause]) -> Interval | None:
    if len([cause for cause in causes if cause.changes]) > 1:
        after = _interval(evidence.predict(_changes_of(causes)))
        return None if after is None else _scaled(after, evidence.summary.later_part(evidence.now_ns))
    answers = [cause.answer for cause in causes if cause.answer is not None]
    if evidence.cpu_step is not None and len(answers) > 1:
        return _interval(evidence.cpu_step.without_all(answers))
    return None


def _screen(evidence: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    weights = [(_weight(evidence, cause), cause) for cause in causes]
    worth = [(weight, cause) for weight, cause in weights if weight > 0]
    return [cause for _, cause in sorted(worth, key=lambda weighed: -weighed[0])][:_MOST_SCREENED]


def _choose(evidence: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    """Return up to three causes: each adds more than any other to those before it, and holds when predicted.

    Those that come last are asked when no other adds anything, compiling before them: what has a place of its own is
    not hidden by it. So is a wait after the Python for which the GPU is late, if it adds nothing to that: with either
    gone, Python is in time. Autocast that saves far more than any other is asked with these: three that save little
    would leave no place for it.
    """
    chosen: list[Cause] = []
    left = list(causes)
    late = [cause for cause in causes if cause.code in _RUNS_PYTHON]
    explained = [cause for cause in causes if cause.code == "waits" and late and not _weight(evidence, cause, late)]
    compiled = max((_weight(evidence, cause) for cause in causes if cause.code in _OF_MODELS), default=0.0)
    placed = [cause for cause in causes if cause.code == "chain" and _weight(evidence, cause) >= _MUCH_OF * compiled]
    if any(cause.code == "recompile" for cause in causes):
        placed = []  # what is compiled is what a chain asks for
    while left and len(chosen) < MOST_TRIES:
        weights = [_weight_on_top(evidence, cause, chosen) for cause in left]
        weighed = list(zip(weights, left, strict=True))
        much = _TIMES_OTHERS * max((weight for weight, cause in weighed if not _changes_training(cause)), default=0.0)
        rank = [
            2 if cause in placed or (cause.code == "autocast" and weight > much) else _when_asked(cause, explained)
            for weight, cause in weighed
        ]
        best = max(range(len(left)), key=lambda at: (weights[at] > 0, rank[at], weights[at]))
        if weights[best] <= 0:
            break
        cause = left.pop(best)
        if _holds(evidence, cause):
            chosen.append(cause)
            left = [other for other in left if not _is_same_waste(cause, other)]
    return chosen


def _when_asked(cause: Cause, explained: Sequence[Cause]) -> int:
    if _changes_training(cause) or cause in explained:
        return 0
    return 1 if cause.code in _COMPILING else 2


def _is_same_waste(cause: Cause, other: Cause) -> bool:
    at_one_line = cause.line is not None and cause.line == other.line
    are_of_loop = cause.code == "loop" and cause.module == other.module is not None and other.code in _OF_LOOPS
    are_compiled = cause.code in _COMPILING and (other.code == "chain" or cause.code in _OF_MODELS)
    are_compiled_again = cause.code == "recompile" and other.code == "chain"
    return at_one_line or are_of_loop or are_compiled_again or (are_compiled and other.code in _COMPILING)


def _changes_of(causes: Sequence[Cause]) -> list[StepChange]:
    """Return the changes of some causes, a larger batch last: the step after it stands for fewer passes of all else."""
    in_order = sorted(causes, key=lambda cause: cause.code == "batch")
    return [change for cause in in_order for change in cause.changes]


def _weight(evidence: Evidence, cause: Cause, before: Sequence[Cause] = ()) -> float:
    """Return the share of the step, or of the peak, that removing a cause saves on top of others; 0 if too little."""
    if cause.ends_run:
        return 2.0
    return max(_time_share(evidence, cause, before), _memory_share(evidence, cause))


def _weight_on_top(evidence: Evidence, cause: Cause, before: Sequence[Cause]) -> float:
    """Return the weight on top of others; compiling a model saves what their chains save no second time."""
    weight = _weight(evidence, cause, before)
    of_chains = [other for other in before if other.code == "chain" and cause.code in _OF_MODELS]
    if not of_chains:
        return weight
    alone = _weight(evidence, cause) - sum(_weight(evidence, chain) for chain in of_chains)
    return min(weight, alone) if alone > cause.worth else 0.0


def _time_share(evidence: Evidence, cause: Cause, before: Sequence[Cause]) -> float:
    if cause.answer is not None:
        return _share_saved(cause.answer)
    replay = evidence.replay
    if not cause.changes or replay is None or not replay.now_ns:
        return 0.0
    without = evidence.expect_after(_changes_of(before)) if before else replay.now_ns
    after = evidence.expect_after(_changes_of([*before, cause]))
    if without is None or after is None:
        return 0.0
    share, spread = (without - after) / replay.now_ns, replay.spread_ns / replay.now_ns
    if share <= max(cause.worth, spread * without / replay.now_ns):
        return 0.0
    if replay.unprofiled_ns is None and evidence.share_saved_on_fast_host(cause.changes) <= cause.worth:
        return 0.0
    return share


def _share_saved(answer: TimeAnswer) -> float:
    if answer.expected_ns is None or not answer.now_ns:
        return 0.0
    share = (answer.now_ns - answer.expected_ns) / answer.now_ns
    return share if share > WORTH else 0.0


def _memory_share(evidence: Evidence, cause: Cause) -> float:
    memory = evidence.summary.memory
    if cause.saves_bytes is None or memory is None or not memory.peak_bytes:
        return 0.0
    share = min(cause.saves_bytes.expected / memory.peak_bytes, 1.0)
    if share <= WORTH or (cause.changes and not evidence.is_tight):
        return 0.0
    return share if evidence.is_tight else share / 2


def _holds(evidence: Evidence, cause: Cause) -> bool:
    """Return whether the prediction itself, over all recorded steps and worlds, says what the screening said.

    What may well save nothing is no advice. The interval reaches beyond the step as it is by a small part of the
    expected saving at most: where host and GPU are as fast as in this process, and in another one, where the step as
    it is takes longer, too.
    """
    if not cause.changes or cause.ends_run or _memory_share(evidence, cause):
        return True
    now, then = (evidence.predict(changes) for changes in ((), cause.changes))
    if now.expected_ns is None or then.expected_ns is None:
        return False
    saved_ns = now.expected_ns - then.expected_ns
    beyond_ns = max((then.high_here_ns or 0) - now.expected_ns, (then.high_ns or 0) - (now.high_ns or 0))
    return beyond_ns <= _SURE * saved_ns and saved_ns > max(cause.worth * now.expected_ns, evidence.spread_ns)


def _interval(answer: TimeAnswer) -> Interval | None:
    if answer.low_ns is None or answer.expected_ns is None or answer.high_ns is None:
        return None
    return Interval(max(0, answer.low_ns), max(0, answer.expected_ns), max(0, answer.high_ns))


def _scaled(interval: Interval, part: float) -> Interval:
    return Interval(*(round(part * time_ns) for time_ns in (interval.low, interval.expected, interval.high)))


def _advise(evidence: Evidence, cause: Cause) -> Advice:
    answer, figures = cause.answer, cause.evidence
    if answer is None and cause.changes and evidence.replay is not None:
        answer = evidence.predict(cause.changes)
    after, saves = None if answer is None else _interval(answer), None
    if answer is not None and after is not None:
        now_ns, spread_ns = answer.now_ns or 0, evidence.spread_ns
        if DRAINED_STEP not in figures and (part := evidence.summary.later_part(now_ns)) != 1:
            after, now_ns, spread_ns = _scaled(after, part), round(part * now_ns), round(part * spread_ns)
            figures = {**figures, MEAN_STEP if MEAN_STEP in figures else LATER_STEP: now_ns}
        saves = Interval(now_ns - after.high - spread_ns, now_ns - after.expected, now_ns - after.low + spread_ns)
    return Advice(
        code=cause.code,
        cause=cause.cause + cause.detail,
        detail=cause.detail,
        line=_find_source(evidence, cause),
        module=cause.place,
        change=cause.change,
        edit=cause.edit,
        after_ns=after,
        saves_ns=saves,
        saves_bytes=cause.saves_bytes,
        costs=cause.costs,
        evidence=figures,
        proof=_prove(evidence, cause),
    )


def _find_source(evidence: Evidence, cause: Cause) -> SourceLine | None:
    """Return the cause's own line, or that which calls the operators whose kernels show it in a counted step."""
    calls = _OPERATORS.get(cause.code)
    called = None if calls is None else evidence.find_operator_line(cause.module, calls)
    is_chosen = cause.module is not None or cause.code in _OF_CALLS
    return cause.line or called if is_chosen else called or cause.line


def _prove(evidence: Evidence, cause: Cause) -> str:
    capture = evidence.capture
    is_file_of_run = capture.run is not None and capture.run.path != capture.path
    can_be_run = bool(evidence.manifest.argv) and not is_file_of_run and cause.proof == COMPARE
    if cause.edit is not None and can_be_run and can_be_tried(cause.edit):
        return f"profkit try RUN --edit {shlex.quote(cause.edit)}"
    return cause.proof


def _say_nothing(evidence: Evidence) -> str:
    limits = evidence.summary.limits
    if limits is None:
        if evidence.summary.memory is not None and not evidence.summary.has_trace:
            return "Nothing found that would save more than 2 % of the peak."
        why = _why_unpredicted(evidence)
        if why is None:
            phases = _name_phases(evidence.summary)
            return f"Nothing found that surely saves more than 2 %{phases and f': the step is {phases}'}."
        return f"Nothing is predicted: {why}."
    if limits.refusal is not None and evidence.replay is not None:
        return "Nothing found that surely saves more than 2 %."
    if limits.refusal is not None:
        return f"Nothing is predicted: {limits.refusal}."
    parts = " and ".join(_compose(evidence.summary, limits))
    if limits.unprofiled_ns is None:
        parts += ", as recorded; without a profiler, of which no step was timed, Python is faster"
    return f"Nothing found that surely saves more than {WORTH:.0%}: the step is {parts}.".replace("2%", "2 %")


def _why_unpredicted(evidence: Evidence) -> str | None:
    trace = evidence.trace
    if trace is None:
        return "no trace was recorded"
    if trace.trace.measure != "cpu-operator":
        return "no work of a GPU was recorded"
    timed, ranks = trace.account.timed, len(trace.ranks.members)
    if timed is None:
        return "no unprofiled step was recorded"
    if len(timed.contexts) > 1:
        return "steps over several context lengths have no step in common"
    if evidence.cpu_step is None:
        return f"{ranks} ranks compute on the CPU, and each of them waits for the others"
    return "no line of source was recorded" if evidence.facts.lines is None else None


def _name_phases(summary: Summary) -> str:
    parts = () if summary.tree is None else summary.tree.parts
    shares = {"outside of phases" if phase == OUTSIDE else phase: part for part in parts for phase in part.phases}
    named = [(phase, summary.tree.share(part.time_ns)) for phase, part in shares.items() if summary.tree is not None]
    return " and ".join(f"{share:.0%}".replace("%", f" % {phase}") for phase, share in named if share >= _LEAST_NAMED)


def _compose(summary: Summary, limits: StepLimits) -> Iterator[str]:
    work, tree = summary.work, summary.tree
    shares = _share_limits(limits)
    if tree is not None and tree.basis == "gpu" and work is not None:
        shares = _share_tree(tree, work.product_ns / max(work.kernel_time_ns - work.communication_ns, 1))
    shares["other kernels, copies and gaps"] = 1 - sum(shares.values())
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share < _LEAST_NAMED:
            continue
        rate = ""
        if name == "arithmetic" and work is not None and work.peak_share is not None:
            rate = f" at {100 * work.peak_share:.0f} % of the peak rate"
        yield f"{100 * share:.0f} % {name}{rate}"


def _share_limits(limits: StepLimits) -> dict[str, float]:
    of_cause, whole = limits.limited_by, max(limits.step_ns, 1)
    return {
        "arithmetic": sum(of_cause.get(category, 0) for category in PRODUCTS) / whole,
        "Python": sum(of_cause.get(cause, 0) for cause in ("python", "call", "latency")) / whole,
        "communication": of_cause.get("communication", 0) / whole,
    }


def _share_tree(tree: StepTree, of_products: float) -> dict[str, float]:
    of_kind = {part.kind: tree.share(part.time_ns) for part in tree.parts}
    return {
        "arithmetic": of_products * of_kind.get(Limit.COMPUTING, 0.0),
        "Python": of_kind.get(Limit.PYTHON, 0.0) + of_kind.get(Limit.PREPARING, 0.0),
        "communication": of_kind.get(Limit.COMMUNICATING, 0.0),
    }
