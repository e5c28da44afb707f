"""A built-in model at several contexts in one process, so that one capture holds them all."""

from __future__ import annotations

import torch

from profkit.annotation import annotate
from profkit.capture.step import StepObserver, TrainingStep
from profkit.models.workload import Workload
from profkit.names import context_range


class ContextSteps:
    """The steps of each context in turn, under a range ``context N``.

    The contexts share the parameters and the optimizer, so that they fit where the longest alone does. Each has a
    module of its own around them, for a mask cut out of a longer one would be read by other kernels. All are warmed up
    before the first is measured.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._steps: list[TrainingStep] = []
        for one in workload.with_each_context():
            self._steps.append(TrainingStep(one, device, shared=self._steps[0] if self._steps else None))

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return self._steps[0].parameter_count

    @property
    def autocast_dtypes(self) -> tuple[str, ...]:
        """The type that autocast computes in, if it is on."""
        return self._steps[0].autocast_dtypes

    @property
    def losses(self) -> list[float]:
        """Each measured step's loss, in the order of the steps."""
        return [loss for step in self._steps for loss in step.losses]

    def observe(self, observer: StepObserver) -> None:
        """Tell ``observer`` of each phase and step from now on."""
        for step in self._steps:
            step.observe(observer)

    def run_warmup(self) -> None:
        """Run every context's warm-up steps."""
        for step in self._steps:
            step.run_warmup()

    def run_unbroken(self) -> list[dict[str, int]]:
        """Run every context's unbroken steps and return their times, each with the ``context`` it belongs to."""
        return [{"context": step.workload.context, **one} for step in self._steps for one in step.run_unbroken()]

    def run_measured(self) -> list[dict[str, int]]:
        """Run every context's measured steps and return their times, each with the ``context`` it belongs to."""
        times = []
        for step in self._steps:
            context = step.workload.context
            with annotate(context_range(context)):
                times += [{"context": context, **one} for one in step.run_measured()]
        return times
