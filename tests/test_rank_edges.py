"""Several ranks of which something is missing or odd, and four that were recorded on the CPU with gloo."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from profkit.errors import UsageError
from profkit.joining import read_ranks
from profkit.report.commands.ranks import describe_ranks, describe_verdict, verdict_beside
from profkit.report.units import format_gigabytes
from profkit.run.directory import NSYS_EXPORT, Run, name_of_rank
from profkit.run.light_columns import read_light
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord
from tests.golden import check_transcript
from tests.in_process import names_in
from tests.kineto_builder import row
from tests.nsys_builder import NsysBuilder
from tests.rank_builder import (
    MS,
    NCCL,
    UNTIMED,
    Delay,
    Timeline,
    compare_records,
    in_each_step,
    late_rank,
    light_records,
    of_gloo,
    said,
    simulate,
    with_groups,
    write_kineto_run,
    write_light_run,
    write_nsys,
    write_two_hosts,
)
from tests.run_builder import start_run
from tests.training_scripts import training_of_ranks

if TYPE_CHECKING:
    from tests.forked_scripts import Forks


pytestmark = pytest.mark.usefixtures("read_here")

PAIRS = (0, 1), (2, 3)


def _without(lines: list[Timeline], *, steps: bool = False, collectives: bool = False) -> list[Timeline]:
    return [
        Timeline(
            [one for one in line.ranges if not (steps and one[0].startswith("step"))],
            [one for one in line.kernels if not (collectives and one[3] == NCCL)],
            line.calls,
        )
        for line in lines
    ]


def _of_nobody(lines: list[Timeline]) -> list[LightRecord]:
    """Return the records in which nobody timed collectives, which are all-gathers within phases."""
    calls = {"kind": ["all_gather"], "exposed_ns": [None], **UNTIMED}
    return [in_each_step(one, calls, launch_wait_ns=20_000) for one in light_records(lines)]


def test_what_is_said_of_ranks(tmp_path: Path) -> None:
    """Who is late and from when on that is said, what is assumed or missing, and what is refused."""
    late, lines = [Delay(1, "data", 9 * MS)], simulate(4, 4)
    turns = [Delay(rank, "forward", 6 * MS, every=4, first=rank) for rank in range(4)]

    def light(name: str, records: Sequence[LightRecord]) -> Path:
        return write_light_run(tmp_path / name, records)

    def full(name: str, lines: list[Timeline]) -> Path:
        return write_kineto_run(tmp_path / name, lines)

    def nsys(name: str, lines: list[Timeline]) -> Path:
        return write_nsys(tmp_path / f"{name}.sqlite", lines)

    def clocks(records: Sequence[LightRecord], nodes: int) -> list[LightRecord]:
        """Return the records of so many machines, each of whose clocks is 50 ms ahead of the one before."""
        return [replace(one, node=one.rank % nodes, clock_base_ns=one.rank % nodes * 50 * MS) for one in records]

    without_steps = full("without-steps", _without(simulate(2, 4, late), steps=True))
    untimed = light("untimed", _of_nobody(simulate(4, delays=[Delay(2, "forward", 8 * MS)])))
    skewed = nsys("skewed", simulate(2, delays=[Delay(1, "data", 30 * MS)]))
    alone = nsys("alone", simulate(1))
    # A rank's record was cut; another rank's trace is a copy, empty, or stands under a name that is no rank's.
    records = light_records(simulate(4, 14, late))
    cut = light("cut", [*records[:2], replace(records[2], steps=records[2].steps[:1]), records[3]])
    with (cut / "light.rank2.jsonl").open("a") as file:
        file.write('{"kind":"steps","name":["step 1')
    copied = light("copied", light_records(lines[:3]))
    shutil.copy(full("copied", lines[:3]) / "trace.rank1.json.gz", copied / "trace.rank2.json.gz")
    damaged = full("damaged", lines[:3])
    (damaged / "trace.rank2.json.gz").write_bytes(b"")
    renamed = light("renamed", light_records(lines[:3]))
    (renamed / "light.rank7.jsonl").write_bytes((renamed / "light.rank1.jsonl").read_bytes())
    many = light_records(simulate(40, 6, [Delay(31, "data", 9 * MS)]))
    lost = light("lost", [one for one in many if one.rank not in {3, *range(8, 30)}])
    jobs = tmp_path / "jobs"
    for node in (0, 1):
        run = write_light_run(jobs / f"node{node}", light_records(lines)[2 * node :][:2])
        job = {"id": f"job {node}", "count": 2, "number": node, "unit": "node"}
        start_run(run, job=job)
        full(f"twice/{'ab'[node]}", simulate(2, 2))
        start_run(tmp_path / "empty" / f"node{node}")
        start_run(tmp_path / "half" / f"node{node}")
    light("half/node1", light_records(simulate(2, 2))[1:])
    (start_run(tmp_path / "no-trace") / "trace.sqlite").write_bytes(b"")
    (tmp_path / "no-run").mkdir()

    ranks: list[tuple[str | Path, ...]] = [
        *((full("late", simulate(3, 4, late)), "--format", style) for style in ("table", "csv", "json")),
        (full("in-every-fourth-step", simulate(2, 13, [Delay(0, "optimizer", 40 * MS, every=4)])),),
        (light("slow-for-now", light_records(simulate(2, 12, [Delay(1, "forward", 6 * MS)]))),),
        (light("slow", light_records(simulate(2, 12, [Delay(1, "forward", 30 * MS)]))),),
        (light("in-turns", light_records(simulate(4, 12, turns))),),
        (light("many", many), "--top", "3"),
        *((untimed,), (untimed, "--format", "json")),
        *((without_steps,), (full("without-collectives", _without(simulate(2, 4), collectives=True)),)),
        # Of which steps and ranks times are is said where it is assumed.
        *(
            (light("four", light_records(lines)),),
            (full("all", lines),),
            (nsys("four", lines),),
            (nsys("two", lines[:2]),),
        ),
        # Waits may rest on the clocks of several machines.
        (light("gloo-on-one-machine", clocks(of_gloo(light_records(lines)), 1)),),
        (light("gloo-on-two", clocks(of_gloo(light_records(lines)), 2)),),
        (light("nccl-on-four", clocks(light_records(lines), 4)),),
        *((path,) for path in (cut, copied, damaged, renamed, lost)),
        # No ranks to compare.
        *((alone,), (tmp_path / "no-run",), (tmp_path / "no-trace",)),
        *((tmp_path / name,) for name in ("twice", "jobs", "empty", "half")),
    ]
    limits = ("--max-wait", "10%", "--max-skew", "10%")
    two, four = full("of-two", simulate(2, 3)), full("of-four", simulate(4, 3))
    later, before = full("later", simulate(2, 3, late)), light("before", light_records(simulate(3, 3, late)))
    after = light("after", light_records(simulate(3, 3)))
    others: list[tuple[str | Path, ...]] = [
        *(("check", path, *limits) for path in (skewed, untimed, without_steps, alone)),
        ("check", skewed, "--max-wait", "60%", "--max-skew", "60%"),
        ("check", skewed, *limits, "--format", "csv"),
        *(("compare", later, two, "--force"), ("compare", two, four, "--force")),
        # Light records alone are compared too, but have no kernels.
        *(("compare", before, after, "--format", "csv"), ("compare", before, after, "--by", "kernel")),
        # What reads all ranks says how to read the others of a damaged one.
        *(("kernels", damaged), ("kernels", damaged, "--rank", "1")),
        ("gather", before, "-o", before / "all"),
        ("gather", tmp_path / "nowhere", "-o", tmp_path / "gathered"),
        ("gather", before / "light.jsonl", "-o", tmp_path / "gathered"),
    ]
    check_transcript("ranks", [*(("ranks", *words) for words in ranks), *others])
    assert names_in(before) == [*(f"light{rank}.jsonl" for rank in ("", ".rank1", ".rank2")), "manifest.json"]
    with pytest.raises(UsageError, match=r"profkit ranks .*renamed$"):
        read_ranks(renamed / "light.rank1.jsonl")


def test_a_rank_that_calls_no_collective_is_no_late_rank(tmp_path: Path) -> None:
    lines = simulate(4, 6, [Delay(1, "data", 20 * MS), Delay(3, "data", 60 * MS)])
    lines[3] = _without(simulate(1, 6, [Delay(0, "data", 60 * MS)]), collectives=True)[0]
    result = read_ranks(write_kineto_run(tmp_path / "run", lines))
    culprit = late_rank(result)
    assert (culprit.rank, culprit.cause) == (1, "data")
    # What the answer to the run says already is not said again beside it.
    verdict = describe_verdict(result)[0]
    assert verdict_beside("A step takes 9 ms.", result) == [verdict]
    assert verdict_beside(f"A step takes 9 ms: r{verdict[1:]}.", result) == []


def test_ranks_whose_groups_share_no_rank_are_compared_within_each_and_a_groups_waits_are_the_mean_ranks() -> None:
    records = light_records(simulate(4, 6, [Delay(1, "data", 20 * MS), Delay(2, "data", 20 * MS)]))
    for dimension, label in (("dp", "dp"), (None, "groups of 2")):
        result = compare_records(
            [with_groups(one, Group(0, "pairs", PAIRS[one.rank // 2], dimension, "nccl")) for one in records]
        )
        (row,) = result.groups
        assert row.group == label
        assert row.waiting_ns / result.step_count == pytest.approx(result.waiting_ns, rel=0.01)
        assert row.waiting_ns / result.step_count == pytest.approx(10 * MS, rel=0.01)
        assert result.waits_ns[:2, 2:].sum() == result.waits_ns[2:, :2].sum() == 0


@pytest.mark.parametrize(
    ("rate", "shown"), [(326.94e9, "326.9"), (1.04e9, "1.0"), (0.93e9, "0.93"), (34.1e6, "0.034"), (51_000, "0.000051")]
)
def test_slow_links_have_a_rate_too(rate: float, shown: str) -> None:
    assert format_gigabytes(rate) == shown


@pytest.mark.parametrize(("node", "cause"), [("Slow", "python"), ("CompiledFunction", "kernels")])
def test_what_a_function_of_python_does_by_itself_is_python_and_what_it_calls_computes(
    tmp_path: Path, node: str, cause: str
) -> None:
    def events(step: int, rank: int) -> list[dict[str, object]]:
        begin, late = step * 80_000, rank * 30_000
        called, end = begin + 22_000 + late, begin + 62_000
        return [
            row("user_annotation", f"step {step}", begin, 75_000),
            row("user_annotation", "backward", begin + 1_000, end - begin),
            row("cpu_op", f"autograd::engine::evaluate_function: {node}Backward", begin + 2_000, 18_000 + late),
            row("cpu_op", f"{node}Backward", begin + 3_000, 16_000 + late),
            row("cpu_op", "aten::mm", begin + 4_000, 10_000),
            row("user_annotation", "gloo:all_reduce", called, end - called, 8),
        ]

    found = late_rank(read_ranks(write_two_hosts(tmp_path, 5, events)))
    assert (found.rank, found.cause, found.phase, found.extra_ns) == (1, cause, "backward", 30 * MS)


def test_a_rank_of_several_groups_is_said_to_be_last_in_all_its_collectives_and_where_others_wait_longest() -> None:
    records = []
    for one in light_records(simulate(4, 8, [Delay(3, "data", 9 * MS)])):
        # Two of three steps reduce over all ranks, the third over two of them.
        steps = [
            replace(step, collectives=replace(step.collectives, group=[int(at % 3 > 0)]))
            for at, step in enumerate(one.steps)
        ]
        groups = Group(0, "tp", PAIRS[one.rank // 2], "tp", "nccl"), Group(1, "dp", (0, 1, 2, 3), "dp", "nccl")
        records.append(with_groups(replace(one, steps=tuple(steps)), *groups))
    text = describe_ranks(compare_records(records))[1]
    assert text.startswith("Rank 3 is late: it arrives last in 100.0% of its collectives in which anybody waits, by ")
    assert text.endswith(" a step; the others wait for it longest in group dp")


def test_the_light_record_says_which_sends_are_an_all_to_all(tmp_path: Path) -> None:
    """In a trace of nsys NCCL's kernels for both are called SendRecv."""
    builder, records = NsysBuilder(), []
    for rank, pid in enumerate((100, 200)):
        steps = []
        for step in range(3):
            start = 1000 * step
            builder.range(f"step {step}", start, start + 990, pid=pid, tid=pid)
            builder.kernel(
                start + 6, 400, name="ncclDevKernel_SendRecv", pid=pid, tid=pid, device=rank, start=start + 10
            )
            calls = Collectives([0], [step], ["all_to_all"], ["float32"], [4096], *([None] for _ in range(5)))
            steps.append(StepRecord(f"step {step}", start, start + 990, collectives=calls))
        records.append(LightRecord(rank, 2, groups=(Group(0, "7", (0, 1), "ep", "nccl"),), steps=tuple(steps)))
    run = write_light_run(tmp_path / "run", records)
    builder.write(run / "trace.sqlite")
    result = read_ranks(run)
    (row,) = result.groups
    assert (row.group, row.kind, row.byte_count, row.wire_ns) == ("ep", "all_to_all", 3 * 4096, 3 * 400)
    assert result.pipelines == ()


# -- recorded on the CPU -------------------------------------------------------------------------------------------


DELAY_MS = 120
"""Longer than what four processes on two cores wait for each other by chance."""

LATE = f"""import time
from torch import distributed, nn

class Late(nn.Linear):
    def forward(self, x):
        time.sleep({DELAY_MS / 1000} if distributed.get_rank() == 2 else 0)
        return super().forward(x)
"""

RANKS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    model = "nn.Sequential(nn.Linear(4, 32), Late(32, 32), nn.Linear(32, 4))"
    script = training_of_ranks(8, before=LATE, model=model)
    steps = ("--kineto", "--warmup", "2", "--steps", "5")
    return forks.record_ranks(tmp_path_factory.mktemp("ranks"), script, RANKS, *steps)


@pytest.mark.slow
def test_a_delay_in_a_forward_is_named_with_its_module_and_by_light_records_alone(
    recorded: Path, tmp_path: Path
) -> None:
    for path in (recorded / "manifest.json", *recorded.glob("light*.jsonl")):
        shutil.copy(path, tmp_path)
    result = read_ranks(recorded)
    found, light = late_rank(result), late_rank(read_ranks(tmp_path))
    assert (found.rank, found.cause, found.phase) == (2, "python", "forward") == (light.rank, light.cause, light.phase)
    assert found.module.endswith("1")
    # How much exactly, and how long the others wait, depends on what else the machine does.
    assert found.extra_ns > DELAY_MS * MS / 2
    assert min(result.ranks, key=lambda one: one.waiting_ns).rank == 2
    assert "rank 2 is late" in said("summary", recorded)


@pytest.mark.slow
def test_steps_in_which_lines_are_looked_for_are_in_no_light_record(recorded: Path) -> None:
    for path in Run(recorded).light_records.values():
        assert [step.name for step in read_light(path).steps] == [f"step {number}" for number in range(7)]


@pytest.mark.parametrize("traced", range(3))
def test_a_trace_of_one_rank_is_compared_with_light_records_of_more_steps(tmp_path: Path, traced: int) -> None:
    lines = simulate(3, 14, [Delay(2, "forward", 9 * MS)])
    run = write_light_run(tmp_path / "run", light_records(lines))
    write_nsys(run / name_of_rank(NSYS_EXPORT, traced), [lines[traced].part(8)])
    result = read_ranks(run)
    found = late_rank(result)
    assert (found.rank, found.cause, found.phase) == (2, "python", "forward")
    assert found.extra_ns == pytest.approx(9 * MS, rel=0.1)
    assert (result.step_count, found.steps) == (6, 5)
    assert [one.rank for one in result.ranks if one.exposed_ns is not None] == [traced]


MESHES = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
shards = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
whole = mesh["dp", "tp"]._flatten("dp_tp")
experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
model = fully_shard(nn.Linear(8, 8), mesh=shards)
plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
mlp = parallelize_module(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), mesh["tp"], plan)
optimizer = torch.optim.SGD([*model.parameters(), *mlp.parameters()], lr=0.01)
sends, receives = ([2, 2], [3, 2]) if dist.get_rank() % 2 else ([1, 3], [1, 2])
for _ in range(6):
    output = mlp(model(torch.randn(4, 8)))
    rows = torch.empty(sum(receives), 8)
    dist.all_to_all_single(rows, output.detach(), receives, sends, group=experts["ep"].get_group())
    output.square().sum().backward()
    dist.all_reduce(torch.ones(3), group=whole.get_group())
    dist.all_reduce(torch.ones(5), group=mesh.get_group("dp"))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_groups_are_named_by_the_dimensions_of_sliced_and_flattened_meshes(tmp_path: Path, forks: Forks) -> None:
    run = forks.record_ranks(tmp_path, MESHES, RANKS, "--kineto", "--warmup", "2", "--steps", "2")
    rows = {(row.group, row.kind): row for row in read_ranks(run).groups}
    sizes = {key: row.rank_count for key, row in rows.items()}
    assert sizes["shard", "all_gather"] == sizes["tp", "all_reduce"] == sizes["ep", "all_to_all"] == 2
    assert sizes["replicate", "all_reduce"] == sizes["dp", "all_reduce"] == 2
    assert sizes["dp_tp", "all_reduce"] == 4
    assert rows["dp", "all_reduce"].byte_count == rows["dp", "all_reduce"].count * 5 * 4
    exchanged = rows["ep", "all_to_all"]
    assert exchanged.byte_count == exchanged.count * 5 * 8 * 4, "the most that a rank receives"
    assert {row.group for row in rows.values()} == {"shard", "replicate", "tp", "ep", "dp", "dp_tp"}
