"""Model FLOPs utilization: what a step asks of the model, over unprofiled time and the datasheet's peak.

The definition is that of Chowdhery et al. 2022 (PaLM), appendix B: FLOPs of forward and backward pass as the model asks
for them, whatever is computed again; over the whole step, optimizer and data included.
"""

from __future__ import annotations

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.checks.step_check import find_measured
from profkit.analysis.efficiency.range_work import RangeWorks, context_of
from profkit.analysis.efficiency.run_facts import RunFacts
from profkit.analysis.range_paths import RangeNodes
from profkit.names import BACKWARD, FORWARD, STEP
from profkit.trace.columns import Ints


class ModelFlops:
    """Answers for the steps of a trace how many FLOPs they ask for, and how well they use the GPU for them."""

    def __init__(self, attribution: Attribution, nodes: RangeNodes, works: RangeWorks, facts: RunFacts) -> None:
        """Prepare to answer; ``nodes`` are those of the trace, numbered."""
        self._attribution = attribution
        self._nodes = nodes
        self._names = nodes.names_above()
        self._works = works
        self._facts = facts
        steps = find_measured(attribution).get(STEP, np.empty(0, dtype=np.int64))
        contexts = {self._context(step) for step in steps.tolist()}
        self.of_all = self.of_steps(steps)
        """FLOPs of a step; None where they are not known or steps differ."""
        self.mfu_of_all = self._share(self.of_all, contexts.pop()) if len(contexts) == 1 else None

    def mfu(self, members: Ints) -> float | None:
        """Return the utilization of some steps, None where they are of several contexts or something is not known."""
        contexts = {self._context(step) for step in members.tolist()}
        return self._share(self.of_steps(members), contexts.pop()) if len(contexts) == 1 else None

    def of_steps(self, members: Ints) -> int | None:
        """Return the FLOPs that each of some steps asks for."""
        found = {self._of_step(step) for step in members.tolist()}
        return found.pop() if len(found) == 1 else None

    def _of_step(self, step: int) -> int | None:
        """Return a step's FLOPs: the run's figure, else what its forward and backward ranges carry.

        Steps that only run forward have no backward range, and owe none.
        """
        if self._facts.work is not None and self._context(step) is None:
            return self._facts.work.model_flops
        trace = self._attribution.trace
        inside = np.flatnonzero(self._attribution.parent == step)
        passes = [i for i in inside.tolist() if trace.names[int(trace.ranges.name[i])] in (FORWARD, BACKWARD)]
        return self._works.total(np.array(passes, dtype=np.int64)).flops

    def _share(self, flops: int | None, context: int | None) -> float | None:
        step_ns, sheet = self._facts.step_ns(context), self._facts.datasheet
        peak = sheet.flops_per_s.get(self._facts.dtype or "") if sheet is not None else None
        if flops is None or not step_ns or peak is None:
            return None
        return flops / (step_ns / 1e9 * peak)

    def _context(self, step: int) -> int | None:
        return context_of(self._names[self._nodes.of_range[step]])
