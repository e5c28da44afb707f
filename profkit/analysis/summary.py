"""What a run's summary says: each line's figures as plain data, and what the step's time is spent on.

Times are sums over the measured steps and all GPUs; `Summary.per_step` divides them by both. A capture without measured
steps is taken whole. What was not recorded is None or empty.

The few parts of a step, which sum up to it, are what the replayed step waited for. Where it cannot be replayed, or its
replay is not as long as the measured step, they are what the GPUs did on average; without a GPU they are phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from profkit.analysis.efficiency import Peaks
from profkit.analysis.kernels.compiled_code import RunCompilations
from profkit.analysis.lines import RareSteps
from profkit.analysis.memory.places import PartRow
from profkit.analysis.placing.attribution import Ledger
from profkit.analysis.step_replay.limits import OUTSIDE, Limit, LineLimit, StepLimits
from profkit.analysis.time_account.account import IdleCauses, IdleTime, TimeAccount, share_out
from profkit.analysis.time_account.gpu_time import GpuParts
from profkit.analysis.tree.modules import ModuleTime
from profkit.errors import Finding
from profkit.names import DATA, STEP
from profkit.run.lines import LineTime

if TYPE_CHECKING:
    from profkit.analysis.ranks.comparison import RanksResult

Kind = Limit | Literal["data", "phase", "rest"]
"""What a part of a step is: a `Limit` (``data`` is the wait for a batch, which ``python`` leaves out), or a phase."""
Basis = Literal["replay", "gpu", "phases"]

SMALLEST_PART = 0.01
"""A part below this share of the step goes into the rest."""

_MOST = 0.5
"""A line that makes this share of the time in which kernels are prepared stands for it."""


@dataclass(frozen=True)
class StepPart:
    """One part: its time, that of each phase in it where this is known, and the line that most of it goes to."""

    kind: Kind
    time_ns: int
    phases: Mapping[str, int] = field(default_factory=dict)
    line: LineLimit | None = None


@dataclass(frozen=True)
class StepTree:
    """The parts of a step, the longest first; they sum up to ``step_ns``. ``basis`` is where they come from.

    ``rank`` is whose step it is, of several that were recorded; None if it is that of all of them.
    """

    step_ns: int
    basis: Basis
    parts: tuple[StepPart, ...]
    rank: int | None = None

    def share(self, time_ns: float) -> float:
        return time_ns / self.step_ns if self.step_ns else 0.0


def divide_step(
    account: TimeAccount, limits: StepLimits | None, lines: Sequence[LineTime], step_ns: float
) -> StepTree | None:
    """Return the parts of a step that takes ``step_ns``; None where neither a GPU nor phases are known."""
    whole = round(step_ns)
    if limits is not None and limits.stand_for_step:
        basis: Basis = "replay"
        parts = list(_join(_by_limits(limits)))
    elif len(account):
        basis, parts = "gpu", [StepPart(kind, time_ns) for kind, time_ns in _by_gpu_time(account) if time_ns]
    else:
        basis, parts = "phases", list(_by_phases(account, lines, whole))
    if not parts:
        return None
    times = share_out(whole, [part.time_ns for part in parts])
    scaled = [replace(part, time_ns=time_ns) for part, time_ns in zip(parts, times, strict=True)]
    return StepTree(whole, basis, tuple(_with_rest(scaled, whole)))


def _by_limits(limits: StepLimits) -> Iterator[StepPart]:
    for part in limits.parts:
        is_data = part.limit == Limit.PYTHON and part.phase == DATA
        line = next((line for line in limits.lines_of(part.limit) if (line.phase == DATA) == is_data), None)
        yield StepPart("data" if is_data else part.limit, part.time_ns, {part.phase: part.time_ns}, line)


def _join(parts: Iterable[StepPart]) -> Iterator[StepPart]:
    kinds: dict[Kind, list[StepPart]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).append(part)
    for kind, mine in kinds.items():
        phases: dict[str, int] = {}
        for part in mine:
            for phase, time_ns in part.phases.items():
                phases[phase] = phases.get(phase, 0) + time_ns
        time_ns, line = sum(part.time_ns for part in mine), mine[0].line
        # Which lines prepare kernels while the GPU waits is known by phases alone: the longest need not be one of them.
        is_sure = line is None or line.limit != Limit.PREPARING or line.time_ns >= _MOST * time_ns
        yield StepPart(kind, time_ns, phases, line if is_sure else None)


def _by_gpu_time(account: TimeAccount) -> Iterator[tuple[Kind, int]]:
    parts, idle = account.sum_parts(account.usual)[0], account.idle_time(account.usual)
    yield Limit.COMPUTING, parts.computing_ns
    yield Limit.COMMUNICATING, idle.exposed_communication_ns(parts)
    yield Limit.COPYING, parts.exposed_copy_ns
    yield "data", idle.causes.data_ns
    yield Limit.PREPARING, idle.causes.launching_ns
    yield Limit.WAITING, idle.causes.synchronising_ns
    yield Limit.PYTHON, idle.causes.outside_cuda_ns


def _by_phases(account: TimeAccount, lines: Sequence[LineTime], step_ns: int) -> Iterator[StepPart]:
    """Yield the unprofiled times of the typical step's phases, and what is left of it; nothing of several contexts."""
    timed = account.timed
    if timed is None or len(timed.contexts) != 1:
        return
    left_ns = step_ns
    for times in timed.phases:
        time_ns = round(times.typical_ns)
        if times.phase != STEP and time_ns:
            left_ns -= time_ns
            kind: Kind = "data" if times.phase == DATA else "phase"
            yield StepPart(kind, time_ns, {times.phase: time_ns}, _longest(lines, times.phase))
    if 0 < left_ns < step_ns:
        yield StepPart(Limit.PYTHON, left_ns, {OUTSIDE: left_ns}, _longest(lines, None))


def _longest(lines: Sequence[LineTime], phase: str | None) -> LineLimit | None:
    own = (line for line in lines if line.phase == phase)
    line = max(own, key=lambda line: line.time_ns, default=None)
    if line is None or line.file is None:
        return None
    return LineLimit(Limit.PYTHON, phase or OUTSIDE, line.file, line.line, line.function, line.called, line.time_ns)


def _with_rest(parts: Sequence[StepPart], step_ns: int) -> Iterator[StepPart]:
    large = [part for part in parts if part.time_ns >= SMALLEST_PART * step_ns]
    yield from sorted(large, key=lambda part: -part.time_ns)
    rest_ns = step_ns - sum(part.time_ns for part in large)
    if rest_ns:
        yield StepPart("rest", rest_ns)


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

    ``steps`` are the measured ones of each process; ``drained_steps`` before them were recorded and left out, for a
    data loader's queue was full. ``is_compiled`` says whether compiled code ran, None if unknown. ``ending`` is how a
    run ended that is not complete. ``iteration`` says in words of which steps each step consists, where it is several.
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
    drained_steps: int = 0
    ending: str | None = None
    iteration: str | None = None


@dataclass(frozen=True)
class StepUse:
    """The step time in ns: without a profiler (over ``count`` steps) and as recorded.

    Of the ``count`` steps ``rare_count`` are rare ones, which are left out of the time and of its spread; of those that
    were recorded ``recorded_rare_count``, which are left out of the time alone.

    ``data_wait_ns`` is how long Python waits for data in an unprofiled step, on average, None if it waits for none: the
    GPU's work may hide some of that. ``hidden_wait_ns`` is as much of it as a full queue hid from the steps that were
    timed, and is counted all the same.
    """

    context: int | None
    unprofiled_ns: float | None
    count: int
    p10_ns: float | None
    p90_ns: float | None
    recorded_ns: float | None
    data_wait_ns: float | None = None
    hidden_wait_ns: float | None = None
    rare_count: int = 0
    recorded_rare_count: int = 0

    @property
    def best_ns(self) -> float | None:
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

    ``at_peak_ns`` is what the matrix products would take at their dtypes' peaks, None if their FLOPs are unknown;
    ``dtypes`` are those that make much of it. ``uncounted`` says why the run counted none, None where nothing was to be
    counted.
    """

    measure: str
    kernel_time_ns: int
    by_category: dict[str, int]
    in_optimizer: dict[str, int]
    at_peak_ns: float | None
    peaks: Peaks | None
    uncounted: str | None = None
    dtypes: tuple[str, ...] = ()

    @property
    def peak_name(self) -> str:
        """Return which peak `peak_share` is a share of, in words."""
        return " ".join([" and ".join(self.dtypes), "peaks" if len(self.dtypes) > 1 else "peak"]).strip()

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
        return sum(map(self._outside_optimizer, PRODUCTS))

    @property
    def graph_ns(self) -> int:
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
    rare_steps: RareSteps | None = None
    later_step_ns: int | None = None
    """The steps that followed without a profiler, if they are far shorter, without their waits for data."""
    recomputes: bool = False
    passes: float | None = None
    memory: MemoryUse | None = None
    compared: RanksResult | None = None
    has_trace: bool = False
    ledger: Ledger | None = None
    findings: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()
    """What a run of steps could hold and does not: an older profkit recorded it, or it was left out."""
    why_missing: str | None = None
    """Why the command that recorded it would leave it out again; None if it would not, or if that is not known."""
    compilations: RunCompilations | None = None
    """What torch.compile did, None if that is not known."""

    @property
    def has_failed(self) -> bool:
        return any(finding.verdict == "failed" for finding in self.findings)

    def per_step(self, time_ns: float) -> float:
        return time_ns / self.step_count

    @property
    def step_ns(self) -> float | None:
        """Return the step time, without a profiler if known; of several contexts, their mean."""
        times = [step.best_ns for step in self.steps if step.best_ns is not None]
        return sum(times) / len(times) if times else None

    @property
    def without_waits_ns(self) -> float:
        """Return the unprofiled step without what Python waits for data in it; 0 if it was not timed."""
        timed = (use.unprofiled_ns - (use.data_wait_ns or 0) for use in self.steps if use.unprofiled_ns)
        return min(timed, default=0.0)

    def later_part(self, now_ns: float) -> float:
        """Return what is left of ``now_ns``, a step as it was timed, once steps have become as short as later ones."""
        if self.later_step_ns is None or not now_ns:
            return 1.0
        return max(0.0, 1 - (self.without_waits_ns - self.later_step_ns) / now_ns)

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
        data = asdict(replace(self, findings=(), compared=None, limits=None, tree=None))
        del data["findings"], data["compared"], data["limits"], data["tree"]
        data["step_tree"] = None if self.tree is None else asdict(self.tree)
        data["step_limits"] = None if self.limits is None else self.limits.to_dict()
        data["slowest_rank"] = None if self.compared is None else self.compared.late_rank
        data["waited_for"] = None if self.compared is None else self.compared.waited_for
        if self.gpu is not None:
            data["gpu"]["parts"] = self.gpu.parts.to_dict()
            data["gpu"] |= {"idle_share": self.gpu.idle.share, "is_estimate": self.gpu.idle.is_unprofiled}
        return data
