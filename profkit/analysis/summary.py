"""What a run's summary says: each line's figures as plain data.

Times are sums over the measured steps and all GPUs; `Summary.per_step` divides them by both. A capture without measured
steps is taken whole. What was not recorded is None or empty.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from profkit.analysis.efficiency.work import Peaks
from profkit.analysis.kernels.compiled_code import RunCompilations
from profkit.analysis.memory.places import PartRow
from profkit.analysis.placing.attribution import Ledger
from profkit.analysis.time_account.account import IdleCauses, IdleTime
from profkit.analysis.time_account.gpu_time import GpuParts
from profkit.analysis.tree.modules import ModuleTime
from profkit.findings import Finding
from profkit.run.lines import LineTime

if TYPE_CHECKING:
    from profkit.analysis.ranks.comparison import RanksResult
    from profkit.analysis.step_replay.limits import StepLimits
    from profkit.analysis.step_tree import StepTree

PRODUCTS = ("gemm", "attention")
RUN_WARNING = "run"
"""The code of findings that are the run's own warnings, which ``profkit run`` prints."""
WORTH = 0.02
"""An effect below this share of the step time, or of the peak, is not worth a line."""
EXPANDABLE = "expandable_segments:True"
SMALL = (
    "softmax",
    "normalization",
    "elementwise",
    "reduction",
    "copy/cast",
    "embedding/index",
    "loss",
    "random",
    "other",
)
"""The categories of kernels that do little arithmetic per byte: what a compiler fuses."""


@dataclass(frozen=True)
class Head:
    """What was run: the command as it was given, on which GPUs, in which precision, and how it ended.

    ``steps`` are the measured ones of each process, from ``first_step`` to ``last_step`` by their names;
    ``drained_steps`` before them were recorded and left out, for they emptied a data loader's queue.
    ``is_compiled`` says whether compiled code ran, None if unknown. ``ending`` is how a run ended that is not complete.
    """

    command: tuple[str, ...] = ()
    gpu: str | None = None
    gpu_count: int = 0
    rank_count: int = 0
    torch: str | None = None
    precision: str | None = None
    dtype: str | None = None
    is_compiled: bool | None = None
    steps: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    drained_steps: int = 0
    ending: str | None = None


@dataclass(frozen=True)
class StepUse:
    """The step time in ns: without a profiler (over ``count`` steps) and as recorded.

    ``data_wait_ns`` is the mean wait for data in an unprofiled step, None if it waits for none. Then the step time is
    this mean and the median of the rest, since waits come in bursts.
    """

    context: int | None
    unprofiled_ns: float | None
    count: int
    p10_ns: float | None
    p90_ns: float | None
    recorded_ns: float | None
    data_wait_ns: float | None = None

    @property
    def best_ns(self) -> float | None:
        """Return the time without a profiler if it is known, else the recorded one."""
        return self.recorded_ns if self.unprofiled_ns is None else self.unprofiled_ns


@dataclass(frozen=True)
class GpuUse:
    """The GPUs' time in its parts and why they were idle, as recorded; ``idle`` as the run was unprofiled, if known.

    ``graph_launches`` counts replays of CUDA graphs.
    """

    parts: GpuParts
    causes: IdleCauses
    idle: IdleTime
    graph_launches: int


@dataclass(frozen=True)
class WorkUse:
    """Kernel time (of a CPU trace: operators' self time) by category, that of the optimizer's phase apart.

    ``at_peak_ns`` is what the matrix products would take at their dtype's peak, None if their FLOPs are unknown;
    ``uncounted`` says why the run counted none, None where nothing was to be counted.
    """

    measure: str
    kernel_time_ns: int
    by_category: dict[str, int]
    in_optimizer: dict[str, int]
    at_peak_ns: float | None
    peaks: Peaks | None
    uncounted: str | None = None

    @property
    def communication_ns(self) -> int:
        """Return the time of communication kernels, waiting included.

        This and the next four properties divide the kernel time: each kernel counts in the first that it fits.
        """
        return self.by_category.get("communication", 0)

    @property
    def optimizer_ns(self) -> int:
        """Return the time of the optimizer's phase; without that phase, of kernels that are its by their names.

        Kernels with such names also clip gradients and average weights: where the phase is known they are small ones.
        """
        if not self.in_optimizer:
            return self.by_category.get("optimizer", 0)
        return sum(self.in_optimizer.values()) - self.in_optimizer.get("communication", 0)

    @property
    def product_ns(self) -> int:
        """Return the time of matrix products and attention."""
        return sum(map(self._outside_optimizer, PRODUCTS))

    @property
    def graph_ns(self) -> int:
        """Return the time of CUDA graphs that were traced whole."""
        return self._outside_optimizer("graph")

    @property
    def small_ns(self) -> int:
        """Return the time of all other kernels, which are `SMALL`, and the optimizer's by name outside its phase."""
        others = self.communication_ns + self.optimizer_ns + self.product_ns + self.graph_ns
        return self.kernel_time_ns - others

    @property
    def peak_share(self) -> float | None:
        """Return how near all matrix products, the optimizer's included, come to their dtype's peak, if known."""
        products_ns = sum(self.by_category.get(category, 0) for category in PRODUCTS)
        return None if self.at_peak_ns is None or not products_ns else self.at_peak_ns / products_ns

    def _outside_optimizer(self, category: str) -> int:
        return self.by_category.get(category, 0) - self.in_optimizer.get(category, 0)


@dataclass(frozen=True)
class OptimizerUse:
    """The optimizer's phase: its time on the GPUs and its launches."""

    kind: str
    """How its kernels are built: ``fused``, ``foreach``, ``compiled`` or ``single tensor``."""
    span_ns: int
    launch_count: int


@dataclass(frozen=True)
class MemoryUse:
    """The peak of the device with the highest one, in bytes; ``modules`` are folded as `profkit memory` shows them."""

    device: int
    peak_bytes: int
    exact: bool
    phase: str | None
    by_category: dict[str, int]
    reserved_peak_bytes: int
    capacity_bytes: int | None
    expandable_reserved_bytes: int | None
    """What would be reserved with expandable segments, simulated; None if they are on or it cannot be predicted."""
    modules: tuple[PartRow, ...]
    failure: str | None
    """Why the last allocation that failed did; None if none did."""
    failed_request_bytes: int | None
    agrees: bool | None
    """Whether PyTorch's own peaks are the replayed ones to the byte; None if the run recorded none."""
    recording_cost: float | None
    """What recording the allocator added to the step time, as a fraction of it."""


@dataclass(frozen=True)
class RankUse:
    """One rank: its kernel time without communication, and how long it waited in the collectives that are compared."""

    rank: int
    own_ns: int
    communication_ns: int
    waiting_ns: int | None


@dataclass(frozen=True)
class Summary:
    """Everything that the lines state.

    ``step_count`` is over how many pairs of a step and a GPU (of a CPU trace: a step and a process) times are summed;
    ``program_steps`` is how many steps the program made, over which things are counted. ``compared`` are its ranks side
    by side. ``limits`` is what limits the step, None without GPU work. ``findings`` are what a reader must know before
    trusting the figures, each once. ``passes`` are the backward passes of a step, on average.
    """

    run: str
    head: Head = Head()
    steps: tuple[StepUse, ...] = ()
    step_count: int = 1
    program_steps: int = 1
    limits: StepLimits | None = None
    tree: StepTree | None = None
    gpu: GpuUse | None = None
    work: WorkUse | None = None
    optimizer: OptimizerUse | None = None
    modules: tuple[ModuleTime, ...] = ()
    costliest_module: ModuleTime | None = None
    costliest_kinds: dict[str, int] = field(default_factory=dict)
    lines: tuple[LineTime, ...] = ()
    """The lines of source that take most of a step, and those that wait for the GPU (`profkit.analysis.lines`)."""
    recomputes: bool = False
    passes: float | None = None
    memory: MemoryUse | None = None
    ranks: tuple[RankUse, ...] = ()
    compared: RanksResult | None = None
    has_trace: bool = False
    ledger: Ledger | None = None
    findings: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()
    """What a run of steps could hold and does not: an older profkit recorded it, or it was left out."""
    compilations: RunCompilations | None = None
    """What torch.compile did, None if that is not known."""

    @property
    def has_failed(self) -> bool:
        """Return whether a check of the capture failed: then no figure is to be trusted."""
        return any(finding.verdict == "failed" for finding in self.findings)

    def per_step(self, time_ns: float) -> float:
        """Return a sum as the average of a step on one GPU."""
        return time_ns / self.step_count

    @property
    def step_ns(self) -> float | None:
        """Return the step time, without a profiler if known; of several contexts, their mean."""
        times = [step.best_ns for step in self.steps if step.best_ns is not None]
        return sum(times) / len(times) if times else None

    @property
    def idle_ns(self) -> float:
        """Return the idle time of a step on one GPU, without a profiler if that is known."""
        return 0.0 if self.gpu is None else self.per_step(self.gpu.idle.idle_ns)

    @property
    def idle_causes_ns(self) -> dict[str, float]:
        """Return the parts of `idle_ns` by the names of `IdleCauses`."""
        causes = {} if self.gpu is None else asdict(self.gpu.idle.causes)
        return {name: self.per_step(time_ns) for name, time_ns in causes.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        data = asdict(replace(self, findings=(), compared=None, limits=None, tree=None))
        del data["findings"], data["compared"], data["limits"], data["tree"]
        data["step_tree"] = None if self.tree is None else self.tree.to_dict()
        data["step_limits"] = None if self.limits is None else self.limits.to_dict()
        data["slowest_rank"] = None if self.compared is None else self.compared.late_rank
        data["waited_for"] = None if self.compared is None else self.compared.waited_for
        if self.gpu is not None:
            data["gpu"]["parts"] = self.gpu.parts.to_dict()
            data["gpu"] |= {"idle_share": self.gpu.idle.share, "is_estimate": self.gpu.idle.is_unprofiled}
        return data
