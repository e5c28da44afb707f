"""A step on the CPU, where no GPU works.

There one thread does one thing after another, and nothing runs beside it but workers of data loaders: without a part of
it the step is shorter by what that part takes while no profiler runs. Nothing is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from profkit.analysis.step_replay.calibrate import AS_RECORDED
from profkit.analysis.step_replay.edits import World
from profkit.analysis.step_replay.predict import TimeAnswer
from profkit.analysis.step_replay.steps import find_spread, find_variation
from profkit.analysis.time_account.account import TimeAccount
from profkit.names import STEP

OTHER_PROCESS = 0.1
"""By so much the steps of two processes of one program differ, on a machine that is used for other things, too."""
_LIKELY = 1.28
"""Standard errors: within so many lie four of five."""


@dataclass(frozen=True)
class CpuStep:
    """The unprofiled step and its phases in nanoseconds; ``spread_ns`` and ``variation`` as of `StepReplay`."""

    now_ns: int
    phases: Mapping[str, int]
    spread_ns: int
    variation: float

    def without(self, name: str, saved_ns: Mapping[World, float], error_ns: float = 0.0) -> TimeAnswer:
        """Return the step without what takes so long, to which a standard error may be known."""
        after_ns = {world: max(0.0, self.now_ns - saved) for world, saved in saved_ns.items()}
        expected_ns = after_ns["expected"]
        errors = (_LIKELY * error_ns, self.variation * expected_ns, OTHER_PROCESS * expected_ns)
        return TimeAnswer(
            (name,),
            self.now_ns,
            self.now_ns,
            None,
            AS_RECORDED,
            low_ns=max(0, round(expected_ns - math.hypot(expected_ns - min(after_ns.values()), *errors))),
            expected_ns=round(expected_ns),
            high_ns=round(expected_ns + math.hypot(max(after_ns.values()) - expected_ns, *errors)),
        )

    def without_all(self, answers: Iterable[TimeAnswer]) -> TimeAnswer:
        """Return the step without all that several answers lack, of which none is in another's part of it."""
        saved: dict[World, float] = {"least": 0.0, "expected": 0.0, "most": 0.0}
        for answer in answers:
            after: dict[World, int | None]
            after = {"least": answer.low_ns, "expected": answer.expected_ns, "most": answer.high_ns}
            saved = {world: saved[world] + self.now_ns - (after[world] or 0) for world in saved}
        return self.without("together", saved)


def find_cpu_step(account: TimeAccount) -> CpuStep | None:
    """Return the step of a program that computes on the CPU; None of others, and where no step was timed."""
    timed, step_ns = account.timed, account.step_ns()
    if account.attribution.trace.measure != "cpu-operator" or timed is None or not step_ns or len(timed.contexts) != 1:
        return None
    phases = {times.phase: round(times.clean_ns) for times in timed.phases if times.phase != STEP}
    return CpuStep(round(step_ns), phases, find_spread(account), find_variation(account))
