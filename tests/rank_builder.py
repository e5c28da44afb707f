"""Several ranks that train together, simulated: who is late where is known, so that what profkit finds can be judged.

A step waits for data, runs forward and backward, reduces the gradients over all ranks and runs the optimizer. Every
rank starts a collective when it is there; it ends on all of them together, when the last one is there and the wire has
carried it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from profkit.analysis.ranks.comparison import RanksResult, compare_ranks
from profkit.analysis.ranks.culprit import Culprit
from profkit.analysis.ranks.own_time import Account, ReducedRank
from profkit.analysis.ranks.reduce import reduce_columns, reduce_ranks
from profkit.cli import cli
from profkit.reading import open_trace
from profkit.run.directory import KINETO_TRACE, LIGHT, name_of_rank
from profkit.run.light_columns import Phases, read_light_columns
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord, write_light_record
from tests.kineto_builder import kernel, launch, row, written
from tests.nsys_builder import NsysBuilder
from tests.run_builder import start_run

MS = 1_000_000
GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_ffma_execute_kernel__5x_cublas"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
BYTES = 100_000_000
WIRE_NS = 500_000

PLACES = ("data", "forward", "backward", "optimizer", "kernels", "launch")
"""Where a delay may be: the data loader, Python in a phase, kernels of the forward's second layer, launches there."""


@dataclass
class Timeline:
    """What one rank did: ranges (name, start, end), kernels (launch, start, end, name) and CUDA calls, in ns."""

    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    kernels: list[tuple[int, int, int, str]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    now: int = 0

    def compute(self, time_ns: int) -> None:
        self.kernels.append((self.now, self.now + 5_000, self.now + time_ns, GEMM))
        self.now += time_ns

    def part(self, first: int, end: int | None = None) -> Timeline:
        """Return what was done from this step on, up to another one."""
        starts = {name: start for name, start, _ in self.ranges}
        begin, stop = starts[f"step {first}"], inf if end is None else starts[f"step {end}"]
        return Timeline(
            [one for one in self.ranges if begin <= one[1] < stop],
            [one for one in self.kernels if begin <= one[0] < stop],
            [one for one in self.calls if begin <= one < stop],
        )


@dataclass(frozen=True)
class Delay:
    rank: int
    place: str
    time_ns: int
    every: int = 1
    """In every so many steps."""
    first: int = 0
    """The first of these steps."""

    def is_in(self, step: int) -> bool:
        return step % self.every == self.first


def simulate(ranks: int, steps: int = 5, delays: Sequence[Delay] = ()) -> list[Timeline]:
    """Return what each rank did; each is off by some microseconds of its own."""
    lines = [Timeline(now=MS + rank * 3_000) for rank in range(ranks)]
    for step in range(steps):
        begins = [line.now for line in lines]
        for rank, line in enumerate(lines):
            extra = dict.fromkeys(PLACES, 0)
            for delay in delays:
                if delay.rank == rank and delay.is_in(step):
                    extra[delay.place] += delay.time_ns
            _until_reduction(line, extra, (rank * 7 + step * 13) % 11 * 1_000)
        end = max(line.now for line in lines) + WIRE_NS
        for rank, line in enumerate(lines):
            line.kernels.append((line.now - 10_000, line.now, end, NCCL))
            line.now = end
            begin = line.now
            slow = sum(
                one.time_ns for one in delays if (one.rank, one.place) == (rank, "optimizer") and one.is_in(step)
            )
            line.now += slow + 20_000
            line.compute(MS)
            line.ranges.append(("optimizer", begin, line.now))
            line.now += 10_000
            line.ranges.append((f"step {step}", begins[rank], line.now))
            line.now += 5_000
    return lines


def _until_reduction(line: Timeline, extra: dict[str, int], noise_ns: int) -> None:
    begin = line.now
    line.now += 200_000 + extra["data"] + noise_ns
    line.ranges.append(("data", begin, line.now))
    for phase, time_ns in (("forward", 8 * MS), ("backward", 16 * MS)):
        begin = line.now
        for layer in range(2):
            inner = line.now
            line.now += 10_000 + (extra[phase] if layer else 0)
            for _ in range(extra["launch"] // 100_000 if phase == "forward" and layer else 0):
                line.calls.append(line.now)
                line.now += 100_000
            slower = extra["kernels"] if phase == "forward" and layer else 0
            for _ in range(4):
                line.compute((time_ns // 2 + slower) // 4)
            line.ranges.append((f"layers.{layer}", inner, line.now))
        line.ranges.append((phase, begin, line.now))


def write_nsys(path: Path, lines: Sequence[Timeline]) -> Path:
    builder = NsysBuilder()
    for rank, line in enumerate(lines):
        pid = 100 + rank
        for name, start, end in line.ranges:
            builder.range(name, start, end, pid=pid, tid=pid)
        for called, start, end, name in line.kernels:
            builder.kernel(called, end - start, name=name, pid=pid, tid=pid, start=start, device=rank)
        for called in line.calls:
            builder.call(called, name="cudaEventRecord", pid=pid, tid=pid)
    return builder.write(path)


def write_kineto_run(folder: Path, lines: Sequence[Timeline], *, shift_ns: int = 0) -> Path:
    """Write a run of one torch.profiler trace a rank; each rank's clock is ``shift_ns`` ahead of the one before."""
    start_run(folder)
    for rank, line in enumerate(lines):
        events = []
        for name, start, end in line.ranges:
            events.append(row("user_annotation", name, start / 1000, (end - start) / 1000))
        for number, (called, start, end, name) in enumerate(line.kernels, 1):
            facts = _kineto_facts(len(lines), number) if name == NCCL else {}
            events += [launch(called / 1000, number), kernel(name, start / 1000, (end - start) / 1000, number, **facts)]
        events += [row("cuda_runtime", "cudaEventRecord", called / 1000, 1) for called in line.calls]
        distributed = {"rank": rank, "world_size": len(lines)}
        base = 1_790_857_026_000_000_000 + rank * shift_ns
        name = name_of_rank(KINETO_TRACE, rank)
        written(folder, events, name, distributedInfo=distributed, baseTimeNanoseconds=base)
    return folder


def write_two_hosts(folder: Path, steps: int, events_of: Callable[[int, int], list[dict[str, object]]]) -> Path:
    """Write a run of two ranks on CPUs, given torch.profiler's events of each step by its number and the rank."""
    start_run(folder)
    for rank in (0, 1):
        events = [event for step in range(steps) for event in events_of(step, rank)]
        facts = {"distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": 10**18}
        written(folder, events, name_of_rank(KINETO_TRACE, rank), **facts)
    return folder


def _kineto_facts(world_size: int, number: int) -> dict[str, object]:
    return {
        "Collective name": "allreduce",
        "In msg nelems": BYTES // 4,
        "Out msg nelems": BYTES // 4,
        "dtype": "Float",
        "Seq": number,
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(world_size))),
    }


def light_records(lines: Sequence[Timeline]) -> list[LightRecord]:
    """Return what the ranks would have left without a profiler: phases on both clocks, and lengths of collectives."""
    found = []
    for rank, line in enumerate(lines):
        reductions = [(called, start, end) for called, start, end, name in line.kernels if name == NCCL]
        spans = sorted((start, end, name) for name, start, end in line.ranges if name.startswith("step"))
        steps = []
        for number, ((start, end, name), (called, begin, stop)) in enumerate(zip(spans, reductions, strict=True)):
            inside = [(what, a - start, b - start) for what, a, b in line.ranges if start <= a and b <= end]
            on_gpu = tuple(one for one in inside if one[0] in PLACES and one[0] != "data")
            # The host does not wait for kernels.
            phases = tuple(
                (what, a, b - sum(c - k for _, k, c, _ in line.kernels if start + a <= k < start + b))
                for what, a, b in sorted((one for one in inside if one[0] in PLACES), key=lambda one: one[1])
            )
            call = Collectives(
                *([0], [number], ["all_reduce"], ["float32"], [BYTES]),
                *([called - start], [begin - start], [stop - start], [None], [None]),
            )
            steps.append(StepRecord(name, start, end, phases, on_gpu, sm_mhz=1980, collectives=call))
        groups = (Group(0, "0", tuple(range(len(lines))), "dp", "nccl"),)
        found.append(LightRecord(rank, len(lines), clock_base_ns=rank * 10**9, groups=groups, steps=tuple(steps)))
    return found


NO_CALLS: Mapping[str, Any] = {}
UNTIMED: Mapping[str, Any] = {"start_ns": [None], "end_ns": [None]}
"""What is not known of a collective that no GPU timed."""


def in_each_step(record: LightRecord, calls: Mapping[str, Any] = NO_CALLS, **changes: Any) -> LightRecord:
    """Return the record with these values in every step, and with these columns of collectives."""
    steps = (replace(step, collectives=replace(step.collectives, **calls), **changes) for step in record.steps)
    return replace(record, steps=tuple(steps))


def with_groups(record: LightRecord, *groups: Group) -> LightRecord:
    """Return the record with groups of these names, ranks, dimensions and backends, numbered in their order."""
    return replace(record, groups=tuple(replace(group, number=number) for number, group in enumerate(groups)))


def of_gloo(records: Sequence[LightRecord], *, is_timed: bool = False) -> list[LightRecord]:
    """Return the records as gloo leaves them: only when each rank called is known, by the clock of one machine."""
    timed = [with_groups(replace(one, clock_base_ns=0), replace(one.groups[0], backend="gloo")) for one in records]
    return timed if is_timed else [in_each_step(one, UNTIMED) for one in timed]


def with_another_call(record: LightRecord, **columns: list[Any]) -> LightRecord:
    """Return the record with the first collective of each step once more at its end, except for these columns."""
    steps = []
    for step in record.steps:
        calls = {name: [*column, column[0]] for name, column in vars(step.collectives).items()}
        steps.append(replace(step, collectives=Collectives(**{**calls, **columns})))
    return replace(record, steps=tuple(steps))


def write_light_run(folder: Path, records: Sequence[LightRecord]) -> Path:
    start_run(folder)
    for record in records:
        write_light_record(folder / name_of_rank(LIGHT, record.rank), record)
    return folder


def reduce_record(record: LightRecord) -> ReducedRank:
    """Return what a rank hands over that left this record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / LIGHT
        write_light_record(path, record)
        return reduce_columns(read_light_columns(path))


def compare_records(records: Sequence[LightRecord]) -> RanksResult:
    return compare_ranks(map(reduce_record, records))


def compare_traced(trace: Path) -> RanksResult:
    """Return the comparison of the ranks of a trace, without light records."""
    return compare_ranks(reduce_ranks(open_trace(trace), {}))


def read_reduced(folder: Path, rank: int) -> ReducedRank:
    """Return a rank by its stored full trace: its columns in the form of a light record, and what it did by itself."""
    reduced = reduce_columns(read_light_columns(folder / name_of_rank("reduced.jsonl", rank)))
    own = json.loads((folder / name_of_rank("own_time.json", rank)).read_text())
    outside = {name: np.array(column) for name, column in own["outside_cuda"].items() if name != "names"}
    phases = Phases(tuple(own["outside_cuda"]["names"]), start_ns=np.zeros_like(outside["end_ns"]), **outside)
    times_ns, exposed_ns = (np.array(own[name], dtype=np.float64) for name in ("times_ns", "exposed_ns"))
    exact = Account(tuple(map(tuple, own["parts"])), times_ns, exposed_ns, is_exact=True, sm_mhz=own["sm_mhz"])
    return replace(reduced, steps=replace(reduced.steps, outside_cuda=phases), exact=exact)


def late_rank(result: RanksResult) -> Culprit:
    assert result.verdict.culprit is not None
    return result.verdict.culprit


def said(*words: object) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    return " ".join((done.stderr + done.stdout).split())
