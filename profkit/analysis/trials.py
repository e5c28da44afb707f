"""What trials show: by how much an edit changes the step, with its interval over processes, its memory and its losses.

Each turn's process is compared with the one of the program as it is in the same turn, which ran just before: what
slows the machine down for a minute is in both. The interval is that of Student's t over these differences (95 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from profkit.analysis.statistics import value_exceeded
from profkit.run.edits import Edit, Evidence, Measured, TrialPrediction, TrialProcess, Trials, parse_edits, read_factor
from profkit.text_kinds import LEFT_OUT

_CHANCE = 0.025
_NOISY_LOSS = 0.1
"""Where the unchanged program's own losses differ by more, nothing is said of an edit's."""
_MOST_DIGITS = 7
_LOSSES = 20
"""The losses of so many steps are compared: later on, differences of rounding have grown."""


@dataclass(frozen=True)
class LossChange:
    """How far the losses of ``steps`` steps depart, as a share of the loss: the most of any step.

    It is 1 where one of two losses is no number. ``spread`` is the same between processes of the program as it is.
    ``allowed`` is what the edits' precision explains, None where they change what is learned.
    """

    steps: int
    share: float
    spread: float
    allowed: float | None

    @property
    def is_comparable(self) -> bool:
        """Whether the program itself repeats its losses, as with a fixed seed, and the edits should keep them."""
        return self.spread <= _NOISY_LOSS and self.allowed is not None

    @property
    def departs(self) -> bool:
        """Whether the losses depart by more than the edits' precision, and the program's own spread, explain."""
        return self.allowed is not None and self.is_comparable and self.share > max(self.allowed, 2 * self.spread)

    @property
    def digits(self) -> int:
        """How many digits are equal, at most seven."""
        return _MOST_DIGITS if self.share == 0 else max(0, min(_MOST_DIGITS, math.floor(-math.log10(self.share))))


@dataclass(frozen=True)
class Trial:
    """Edits that were tried, in nanoseconds a step; ``edits`` is empty for the program as it is.

    ``step_ns`` is the mean of ``processes`` processes, ``error_ns`` half its interval (95 %). ``change_ns`` is the mean
    difference to the program as it is in the same turn, ``change_low_ns`` and ``change_high_ns`` its interval; None
    where one process alone was measured. ``first_ns`` is what the steps before the timed ones took longer than without
    the edits, as compiling does. ``batch_factor``: a step trains on so many times the samples. ``reason`` says why
    nothing was measured.
    """

    edits: tuple[str, ...]
    processes: int = 0
    step_ns: float | None = None
    error_ns: float | None = None
    change_ns: float | None = None
    change_low_ns: float | None = None
    change_high_ns: float | None = None
    first_ns: float | None = None
    allocated_peak_bytes: int | None = None
    change_peak_bytes: int | None = None
    batch_factor: float = 1.0
    loss: LossChange | None = None
    evidence: tuple[Evidence, ...] = ()
    prediction: TrialPrediction | None = None
    reason: str | None = None

    @property
    def half_ns(self) -> float | None:
        """Half of the step's interval: that of its change, or of the program as it is."""
        if self.change_low_ns is None or self.change_high_ns is None:
            return None if self.edits else self.error_ns
        return (self.change_high_ns - self.change_low_ns) / 2

    @property
    def is_shorter(self) -> bool:
        """Whether the whole interval says that the step is shorter; of another batch, that of its samples."""
        return self.change_high_ns is not None and self.change_high_ns < 0 and self.batch_factor == 1

    @property
    def is_as_predicted(self) -> bool | None:
        """Whether the predicted interval holds the measured step; None where nothing was predicted or measured."""
        return None if self.change_ns is None else self._is_predicted(self.change_ns, self.change_ns)

    @property
    def may_be_as_predicted(self) -> bool | None:
        """Whether some of the measured interval is predicted: of few processes it is wide."""
        if self.change_low_ns is None or self.change_high_ns is None:
            return None
        return self._is_predicted(self.change_low_ns, self.change_high_ns)

    def _is_predicted(self, change_low_ns: float, change_high_ns: float) -> bool | None:
        prediction = self.prediction
        if prediction is None or prediction.now_ns is None or prediction.low_ns is None:
            return None
        high_ns = math.inf if prediction.high_ns is None else prediction.high_ns
        return prediction.now_ns + change_low_ns <= high_ns and prediction.low_ns <= prediction.now_ns + change_high_ns

    def to_dict(self) -> dict[str, Any]:
        loss, prediction = self.loss, self.prediction
        return {
            "edits": list(self.edits),
            "processes": self.processes,
            "step_ns": self.step_ns,
            "error_ns": self.error_ns,
            "change_ns": {"mean": self.change_ns, "low": self.change_low_ns, "high": self.change_high_ns},
            "first_steps_ns": self.first_ns,
            "allocated_peak_bytes": self.allocated_peak_bytes,
            "change_peak_bytes": self.change_peak_bytes,
            "batch_factor": self.batch_factor,
            "loss": loss and {"steps": loss.steps, "share": loss.share, "spread": loss.spread, "departs": loss.departs},
            "evidence": [vars(evidence) for evidence in self.evidence],
            "predicted": prediction
            and {"low": prediction.low_ns, "expected": prediction.expected_ns, "high": prediction.high_ns},
            "is_as_predicted": self.is_as_predicted,
            "reason": self.reason,
        }


def summarize_trials(trials: Trials) -> tuple[Trial, ...]:
    """Return what one call of `profkit try` measured: the program as it is first, then the edits as they were tried."""
    by_edits: dict[tuple[str, ...], list[TrialProcess]] = {(): []}
    for process in trials.processes:
        by_edits.setdefault(process.edits, []).append(process)
    predictions = {prediction.edits: prediction for prediction in trials.predictions}
    as_is = _timed(by_edits[()])
    losses = [process.losses for process in as_is.values()]
    spread = max((_compare(*pair)[1] for pair in combinations(losses, 2)), default=0.0)
    return tuple(
        _summarize(edits, processes, as_is, spread, predictions.get(edits)) for edits, processes in by_edits.items()
    )


def find_best(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the shortest step, of those that shorten it for certain and learn as before."""
    sound = [trial for trial in trials if trial.is_shorter and not (trial.loss is not None and trial.loss.departs)]
    return min(sound, key=lambda trial: trial.step_ns or math.inf, default=None)


def latest_trials(calls: Iterable[Trials]) -> dict[tuple[str, ...], Trial]:
    """Return the latest trial of each set of edits that measured something, over all calls of `profkit try`."""
    return {trial.edits: trial for call in calls for trial in summarize_trials(call) if trial.edits and trial.processes}


def _timed(processes: Iterable[TrialProcess]) -> dict[int, Measured]:
    return {
        process.turn: process.measured
        for process in processes
        if process.reason is None and process.measured is not None and process.measured.step_ns is not None
    }


def _summarize(
    edits: tuple[str, ...],
    processes: Sequence[TrialProcess],
    as_is: Mapping[int, Measured],
    spread: float,
    prediction: TrialPrediction | None,
) -> Trial:
    timed = _timed(processes)
    reason = next((process.reason for process in processes if process.reason is not None), None)
    seen = [*timed.values(), *(process.measured for process in processes if process.measured is not None)]
    evidence = seen[0].evidence if seen else ()
    if not timed:
        return Trial(edits, evidence=evidence, prediction=prediction, reason=reason)
    pairs = [(own, as_is[turn]) for turn, own in timed.items() if edits and turn in as_is]
    step_ns, error_ns = _mean_and_error([own.step_ns or 0.0 for own in timed.values()])
    change_ns, half_ns = _mean_and_error([(own.step_ns or 0.0) - (before.step_ns or 0.0) for own, before in pairs])
    peaks = [own.allocated_peak_bytes for own in timed.values() if own.allocated_peak_bytes is not None]
    changes = [
        own.allocated_peak_bytes - before.allocated_peak_bytes
        for own, before in pairs
        if own.allocated_peak_bytes is not None and before.allocated_peak_bytes is not None
    ]
    return Trial(
        edits,
        len(timed),
        step_ns,
        error_ns,
        change_ns,
        None if change_ns is None or half_ns is None else change_ns - half_ns,
        None if change_ns is None or half_ns is None else change_ns + half_ns,
        max((own.first_ns - before.first_ns for own, before in pairs), default=None),
        max(peaks, default=None),
        max(changes, default=None),
        math.prod(float(read_factor(edit.argument)) for edit in known_edits(edits) if edit.spec.name == "batch"),
        _loss_change(edits, [_compare(own.losses, before.losses) for own, before in pairs], spread),
        evidence,
        prediction,
        reason,
    )


def _mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return (values[0], None) if values else (None, None)
    return fmean(values), value_exceeded(_CHANCE, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def known_edits(edits: Iterable[str]) -> tuple[Edit, ...]:
    """Return the edits, without those whose names a copy to share leaves out."""
    return parse_edits(text for text in edits if text != LEFT_OUT)


def _compare(losses: Sequence[float | None], before: Sequence[float | None]) -> tuple[int, float]:
    pairs = list(zip(losses, before, strict=False))[:_LOSSES]
    shares = [_share(loss, expected) for loss, expected in pairs]
    return len(pairs), max(shares, default=0.0)


def _share(loss: float | None, before: float | None) -> float:
    if loss is None or before is None:
        return 0.0 if loss is before else 1.0
    scale = max(abs(loss), abs(before))
    return abs(loss - before) / scale if scale else 0.0


def _loss_change(edits: Sequence[str], losses: Sequence[tuple[int, float]], spread: float) -> LossChange | None:
    steps = min((steps for steps, _ in losses), default=0)
    if not steps:
        return None
    allowed = [edit.spec.numbers.loss_share for edit in known_edits(edits)]
    known = [share for share in allowed if share is not None]
    return LossChange(
        steps,
        max(share for _, share in losses),
        spread,
        max(known, default=0.0) if len(known) == len(allowed) else None,
    )
