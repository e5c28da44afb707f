"""``manifest.json``: what was run, with what, on what, and how long its steps took, unprofiled and profiled.

The environment is left out on purpose but for a list of harmless variables: it holds people's secrets. Files that
older versions wrote lack some keys, and are read as far as they go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from profkit.errors import RunError
from profkit.files import write_json, write_new_json
from profkit.names import DATA, PHASES, STEP
from profkit.run import Plain, read_record
from profkit.run.job import Job
from profkit.text_kinds import (
    LEFT_OUT,
    FunctionName,
    GpuName,
    Message,
    ModuleName,
    Moment,
    RunFile,
    SourceFile,
    State,
    Uncounted,
    Version,
    Word,
)

Status = Literal["complete", "incomplete", "failed"]
Kind = Literal["model", "command", "block"]
"""What is run; ``block``: a part of the program that asked for it itself, by `profkit.record`."""


Clock = Literal["wall", "cuda-events", "host"]
"""What timed a phase: the host, events on the GPU, or the host beside these."""

RECORDED_FASTER = "recorded steps were faster"
"""How the warning begins that unprofiled steps were slower than recorded ones."""
_SUFFIX: dict[Clock, str] = {"wall": "_ns", "cuda-events": "_event_ns", "host": "_host_ns"}
_CONTEXT = "context"


@dataclass(frozen=True)
class Samples:
    """The steps of one pass, each an object of nanoseconds.

    ``step_ns`` is from one step's end to the next one's, on the GPU's own clock where there is one, else by the host's;
    ``<phase>_event_ns`` what CUDA events around a phase say, and ``<phase>_host_ns`` how long the host was in it;
    ``<phase>_ns``, without a GPU, is by the host's clock. ``data_ns`` is the host's with a GPU too: how long the step
    waited for batches. In a run over several context lengths ``context`` is the step's.

    ``during`` counts what happened within them that makes a step slow: compiled graphs, allocator retries,
    out-of-memory errors, full collections of garbage.
    """

    steps: tuple[dict[Word, int], ...] = ()
    during: dict[Word, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(value < 0 for step in self.steps for value in step.values()):
            raise ValueError("a step took a negative time")

    @property
    def contexts(self) -> list[int | None]:
        return list(dict.fromkeys(step.get(_CONTEXT) for step in self.steps))

    def times_ns(self, clock: Clock, context: int | None) -> dict[str, list[int]]:
        """Return phase → its times in the steps of one context length that have it, in order; the step comes last."""
        by_phase: dict[str, list[int]] = {}
        for step in self.steps_over(context):
            for phase, time_ns in times_of_step(step, clock).items():
                by_phase.setdefault(phase, []).append(time_ns)
        return {phase: by_phase[phase] for phase in sorted(by_phase, key=phase_order)}

    def steps_over(self, context: int | None) -> list[dict[Word, int]]:
        return [step for step in self.steps if step.get(_CONTEXT) == context]

    def step_ns(self, context: int | None = None) -> list[int]:
        return self.times_ns("wall", context).get(STEP, [])


def times_of_step(step: Mapping[str, int], clock: Clock) -> dict[str, int]:
    """Return phase → its time in a step by one clock."""
    others = (_SUFFIX["cuda-events"], _SUFFIX["host"]) if clock == "wall" else ()
    return {
        name.removesuffix(_SUFFIX[clock]): time_ns
        for name, time_ns in step.items()
        if name.endswith(_SUFFIX[clock]) and not (others and name.endswith(others))
    }


def phase_order(phase: str) -> tuple[int, str]:
    """Return a key that sorts phases as they run, the whole step last."""
    order = (DATA, *PHASES, STEP)
    return (order.index(phase) if phase in order else order.index(STEP), phase)


@dataclass(frozen=True)
class Workload:
    """What was asked to run; what does not apply to its kind of target is None.

    ``preset_name``, ``batch``, ``context`` or ``contexts``, ``passes``, ``dtype``, ``compile_mode``, ``seed`` and
    ``checkpoint_layers`` are a built-in model's. ``steps`` are those that were to be recorded, after ``warmup_steps``.
    """

    steps: int | None = None
    warmup_steps: int | None = None
    annotate: bool | None = None
    depth: int | None = None
    flops: bool | None = None
    stop: bool | None = None
    step_on: str | None = None
    preset_name: Word | None = None
    batch: int | None = None
    context: int | None = None
    contexts: tuple[int, ...] = ()
    passes: Word | None = None
    dtype: Word | None = None
    compile_mode: Word | None = None
    seed: int | None = None
    ranks: int | None = None
    checkpoint_layers: int | None = None


@dataclass(frozen=True)
class Compiled:
    """How many graphs a process compiled, and by which backends with which options."""

    graphs: int
    backends: tuple[dict[Word, Word | bool | int | object], ...] = ()


_HAVE_FUSED_STEPS = ("Adam", "AdamW", "SGD")
"""Classes of torch.optim with a fused step on CUDA in every torch from 2.4 on (Adagrad's began on the CPU alone)."""
_OTHERS = ("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
_HAVE_FOREACH_STEPS = (*_HAVE_FUSED_STEPS, *_OTHERS)


@dataclass(frozen=True)
class UsedOptimizer:
    """An optimizer that made a step: its class, and if that is torch's own; its flags; what a step reads and writes.

    The bytes are those of this process: ``parameter_bytes`` of the ``parameters`` that had a gradient, ``state_bytes``
    of their state after the first step. ``groups`` have such parameters, and ``unlike_groups`` would be left if those
    with the same options were one. Older runs have 0 for the three counts.
    """

    name: Word = ""
    is_torchs: bool = False
    fused: bool | None = None
    foreach: bool | None = None
    differentiable: bool = False
    parameter_bytes: int = 0
    state_bytes: int = 0
    parameters: int = 0
    groups: int = 0
    unlike_groups: int = 0

    @property
    def can_be_fused(self) -> bool:
        """Whether ``fused=True`` can be added: a class of torch that has such a step, with no such choice made."""
        is_free = self.fused is None and not (self.foreach or self.differentiable)
        return self.is_torchs and self.name in _HAVE_FUSED_STEPS and is_free

    @property
    def can_be_foreach(self) -> bool:
        """Whether torch has a step in few kernels for it."""
        return self.is_torchs and self.name in _HAVE_FOREACH_STEPS and not self.differentiable

    @property
    def fused_step_bytes(self) -> int:
        """What a fused step moves: it reads parameters, gradients and state, and writes parameters and state."""
        return 3 * self.parameter_bytes + 2 * self.state_bytes


@dataclass(frozen=True)
class Conditions:
    """How a process multiplied matrices, what it compiled and optimized with, and its GPU; None if unknown.

    ``reserved_peak_bytes`` is the most that PyTorch held of the GPU's ``gpu_memory_bytes``. ``cpu_count`` is how many
    CPUs the process may use. ``launch_blocking``: each launch waits until its kernel has run (CUDA_LAUNCH_BLOCKING).
    ``fills_uninitialized_memory``: deterministic algorithms fill each tensor that torch allocates.
    ``evaluates_without_autocast``: a model was called in evaluation, without gradients, while no autocast was on.
    """

    float32_matmul_precision: Word | None = None
    cuda_matmul_allow_tf32: bool | None = None
    cuda_matmul_fp32_precision: Word | None = None
    cudnn_allow_tf32: bool | None = None
    cudnn_conv_fp32_precision: Word | None = None
    cudnn_benchmark: bool | None = None
    deterministic_algorithms: bool | None = None
    cpu_threads: int | None = None
    autocast_dtypes: tuple[Word, ...] = ()
    compiled: Compiled | None = None
    gpu_uuid: Message | None = None
    optimizers: tuple[UsedOptimizer, ...] | None = None
    anomaly_detection: bool | None = None
    cpu_count: int | None = None
    reserved_peak_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    launch_blocking: bool | None = None
    fills_uninitialized_memory: bool | None = None
    evaluates_without_autocast: bool | None = None


@dataclass(frozen=True)
class ProcessMemory:
    """What one process left of its allocator's recording: the snapshot's file name, and why it lacks something.

    ``failed_allocations`` is how many found no memory; ``is_of_failure``: the last of them wrote the snapshot.
    """

    snapshot: RunFile | None = None
    allocated_peak_bytes: int = 0
    failure: Message | None = None
    script_records: bool = False
    failed_allocations: int = 0
    is_of_failure: bool = False


@dataclass(frozen=True)
class Loading:
    """The data loaders with workers of a process when its recording began, and what was done about their queues.

    A queue holds at most ``queue_batches``. Starting the recorder took ``start_ns``. Until the queue was as usual again
    ``needed_steps`` had to go by; the first ``drained_steps`` in the trace do not count for that reason, and
    ``first_step`` is the number of the first that does.

    The longest loader has ``epoch_batches`` batches an epoch, for each of which it starts its workers anew, or goes on
    with them (``starts_workers`` is False); the program last waited ``epoch_start_ns`` for the former ones' end, for
    these, and for the first batch. Both are 0 where batches cannot be counted, and the latter where workers went on
    from no epoch before. ``keeps_workers``: those of all loaders stay from one epoch to the next.

    ``later_wait_ns`` is the mean wait for data of usual steps after the recording, with no recorder on and once the
    queue was as usual again; None if there were too few.
    """

    workers: int = 0
    queue_batches: int = 0
    batches_per_step: float = 0.0
    start_ns: int = 0
    needed_steps: int = 0
    drained_steps: int = 0
    first_step: int = 0
    epoch_batches: int = 0
    epoch_start_ns: int = 0
    starts_workers: bool = True
    keeps_workers: bool = False
    later_wait_ns: int | None = None

    @property
    def burst_steps(self) -> int:
        """For how many steps the workers may deliver at once; 0 if no step takes a batch of theirs."""
        return math.ceil(self.workers / self.batches_per_step) if self.batches_per_step else 0


@dataclass(frozen=True)
class Loader:
    """A data loader that gave a process so many batches, in so many epochs, and the lines that say how it works.

    ``line`` is where the number of its workers is written, ``keeps_line`` where it is written whether they stay
    (``keeps_workers``) when an epoch ends; where neither is, the line that makes it.
    """

    file: SourceFile = ""
    line: int = 0
    keeps_line: int = 0
    function: FunctionName = ""
    keeps_function: FunctionName = ""
    workers: int = 0
    keeps_workers: bool = False
    epochs: int = 0
    batches: int = 0


@dataclass(frozen=True)
class RangesLeftOut:
    """How many modules have no range, because that would be too many, and the ``--depth`` that gives them one."""

    modules: int = 0
    depth: int = 0


@dataclass(frozen=True)
class Process:
    """One process of the target that made a step. ``state``: ``complete``, ``cut short`` or ``not reached``.

    ``step`` is the kind of its steps, in the words of ``--step-on``, and ``step_names`` are the classes or functions
    that make one; ``step_times`` of these are one step together. ``seen`` says how often each thing that may make a
    step happened, and ``step_changed_to`` which kind of steps began only when the recording had. ``compiled_failure``
    says why compiled code, or some of it, has no modules. ``loaders`` are its data loaders whose lines are known, that
    with most batches first. ``uncounted`` says why no step's FLOPs were counted, where they were to be.
    """

    process: str = ""
    pid: int | None = None
    rank: int | None = None
    state: State = "complete"
    is_recorded: bool = True
    """False of a rank that ``--ranks`` leaves out: it has its light record alone."""
    failure: Message | None = None
    steps_seen: int | None = None
    step: Word | None = None
    step_names: tuple[ModuleName, ...] = ()
    step_times: int = 1
    seen: dict[Word, int] = field(default_factory=dict)
    step_changed_to: Word | None = None
    device: Word | None = None
    gpu: GpuName | None = None
    torch: Version | None = None
    cuda: Version | None = None
    conditions: Conditions | None = None
    attached: tuple[dict[Word, int], ...] = ()
    profiled: tuple[dict[Word, int], ...] = ()
    during: dict[Word, dict[Word, int]] = field(default_factory=dict)
    memory: ProcessMemory | None = None
    loading: Loading | None = None
    loaders: tuple[Loader, ...] = ()
    left_out: RangesLeftOut | None = None
    compiled_failure: Message | None = None
    uncounted: Uncounted | None = None

    @property
    def iteration(self) -> str | None:
        """What ``--step-on`` calls its steps, where several of a thing make one; None of others."""
        return f"{self.step}*{self.step_times}" if self.step_times > 1 else None


@dataclass(frozen=True)
class MemoryPass:
    """The pass that recorded the allocator: how, its steps, and its processes."""

    stacks: Word | None = None
    max_entries: int | None = None
    steps: tuple[dict[Word, int], ...] = ()
    processes: tuple[Process, ...] = ()


# nvml.h, nvmlClocksEventReasons: why the clocks are not as high as they were asked to be.
THROTTLE_REASONS = {
    0x01: "gpu_idle",
    0x02: "applications_clocks_setting",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""What each bit of NVML's answer means."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    ``clean`` are steps without a profiler in a process of their own, ``attached`` such steps of the very process that
    was recorded afterwards, ``profiled`` the recorded ones; the first two are never mixed with the last. Of several
    ranks all are the first's, and each rank's own stand under ``processes``.
    """

    status: Status = "incomplete"
    job: Job | None = None
    """The job of several machines that this is a part of."""
    target: Message = ""
    kind: Kind | None = None
    command: tuple[Message, ...] = ()
    """profkit's own command line."""
    argv: tuple[Message, ...] = ()
    """The command that was run."""
    workload: Workload = field(default_factory=Workload)
    preset: dict[Word, Plain] | None = None
    """The sizes of a built-in model."""
    profiler: Word | None = None
    started_utc: Moment | None = None
    finished_utc: Moment | None = None
    exit_status: int | None = None
    reason: Message | None = None
    versions: dict[Word, Version | None] = field(default_factory=dict)
    driver: Version | None = None
    git_revision: Word | None = None
    device: Word | None = None
    gpu: GpuName | None = None
    conditions: Conditions | None = None
    environment: dict[str, str] = field(default_factory=dict)
    clean: Samples | None = None
    attached: Samples | None = None
    profiled: Samples | None = None
    memory: MemoryPass | None = None
    processes: tuple[Process, ...] = ()
    warnings: tuple[Message, ...] = ()

    @property
    def ending(self) -> str:
        if self.status == "failed":
            return f"it failed ({self.reason or f'exit status {self.exit_status}'})"
        return "its `profkit run` was killed, or has not ended yet"

    @property
    def unprofiled(self) -> Samples | None:
        """Return the steps that ran without a profiler, None where none was timed."""
        samples = self.clean or self.attached
        return samples if samples is not None and samples.steps else None

    @property
    def step_on(self) -> str | None:
        """What ``--step-on`` has to say for steps like these; None where they are found without."""
        return self.workload.step_on or (None if self.first is None else self.first.iteration)

    @property
    def first_rank(self) -> int | None:
        """Return the rank whose steps and conditions stand for the run; None of a process that is none of several."""
        return None if self.first is None else self.first.rank

    @property
    def first(self) -> Process | None:
        """Return the first process that was recorded, or else the first; its steps stand for the run's."""
        return min(self.processes, key=lambda process: not process.is_recorded, default=None)

    def of_rank(self, rank: int) -> Manifest:
        """Return it as that of one rank alone: with the process, the steps and the conditions that are its own.

        A process that is none of several ranks is any rank's. The steps of a process of their own are the first rank's.
        """
        if all(process.rank is None for process in self.processes):
            return self
        own = tuple(process for process in self.processes if process.rank == rank)
        if not own:
            return replace(self, clean=None, attached=None, profiled=None, processes=())
        attached, profiled = (
            Samples(steps, own[0].during.get(part, {})) if steps else None
            for part, steps in (("attached", own[0].attached), ("profiled", own[0].profiled))
        )
        return replace(
            self,
            clean=self.clean if own[0] is self.first else None,
            attached=attached,
            profiled=profiled,
            conditions=own[0].conditions,
            processes=own,
        )

    @property
    def uncounted(self) -> str | None:
        """Return why no step's FLOPs were counted; None if they were, or were not to be."""
        return next((process.uncounted for process in self.processes if process.uncounted is not None), None)

    @property
    def loading(self) -> Loading | None:
        return next((process.loading for process in self.processes if process.loading is not None), None)

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """Return the data loaders whose lines are known, that with most batches first; none in a copy without files."""
        loaders = next((process.loaders for process in self.processes if process.loaders), ())
        return tuple(loader for loader in loaders if loader.file != LEFT_OUT)

    @property
    def first_step(self) -> int | None:
        """Return the number of the first step that counts, where the trace begins with some that do not."""
        loading = self.loading
        return None if loading is None or not loading.drained_steps else loading.first_step

    @property
    def recorded_peaks(self) -> dict[str, int]:
        """Return each snapshot's allocated peak by its file name, as the processes that left them noted it."""
        processes = () if self.memory is None else self.memory.processes
        memories = (process.memory for process in processes if process.memory is not None)
        return {memory.snapshot: memory.allocated_peak_bytes for memory in memories if memory.snapshot is not None}

    @property
    def rank_of_pid(self) -> dict[int, int]:
        return {
            process.pid: process.rank
            for process in self.processes
            if process.pid is not None and process.rank is not None
        }


def read_manifest(path: Path) -> Manifest:
    """Return the content of a ``manifest.json``; RunError names the key if a value is of another type."""
    try:
        return read_record(Manifest, path)
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None


def write_manifest(path: Path, manifest: Manifest, *, is_first: bool = False) -> None:
    """Write a ``manifest.json``, which its owner alone may read: it holds the command line.

    Raises:
        FileExistsError: the run has one, and this is to be its first.
        OSError: it cannot be written.
    """
    write = write_new_json if is_first else write_json
    write(path, asdict(manifest), mode=0o600)


def find_condition(run: Manifest, *names: str) -> object:
    """Return the first of these conditions that the run, or else its first process, knows; None if neither does."""
    each = [run.conditions, *(process.conditions for process in run.processes[:1])]
    values = [getattr(conditions, name) for conditions in each if conditions is not None for name in names]
    return next((value for value in values if value is not None), None)


def used_optimizers(run: Manifest) -> tuple[UsedOptimizer, ...]:
    used = find_condition(run, "optimizers")
    return used if isinstance(used, tuple) else ()


def can_all_be_fused(run: Manifest) -> bool:
    """Return whether ``fused=True`` can be added to every optimizer of a run.

    In fp16 a GradScaler scales the loss, and Lightning refuses to clip the gradients of a fused optimizer then.
    """
    used, autocast = used_optimizers(run), find_condition(run, "autocast_dtypes")
    is_fp16 = isinstance(autocast, tuple) and "float16" in autocast
    return bool(used) and not is_fp16 and all(optimizer.can_be_fused for optimizer in used)
