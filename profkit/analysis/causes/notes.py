"""Notes: facts that slow a step down, of which no recording says by how much. They are no Tries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from profkit.analysis.causes.evidence import Evidence
from profkit.analysis.step_replay.kernel_edits import is_convolution
from profkit.analysis.step_replay.steps import ReplayedStep

_SEVERAL = 1.5
"""A worker that keeps so many CPUs busy computes with several threads."""


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
    names = (step.names[row] for row in step.columns.row.tolist())
    return tuple(name for name in names if is_convolution(name))


def _crowded_cpus(evidence: Evidence) -> Iterator[str]:
    """Workers of data loaders compute with several threads each, more in all than there are CPUs."""
    workers, cpus, busy = evidence.facts.workers, evidence.condition("cpu_count"), evidence.busy_cpus_of_worker
    if busy is not None and isinstance(cpus, int) and busy > _SEVERAL and busy * workers > cpus:
        yield (
            f"each of {workers} loader workers keeps {busy:.1f} of {cpus} CPUs busy while it makes a batch: "
            "set OMP_NUM_THREADS=1, or torch.set_num_threads(1) in worker_init_fn"
        )


NOTES: tuple[Callable[[Evidence], Iterator[str]], ...] = (_deterministic, _convolutions, _crowded_cpus)
