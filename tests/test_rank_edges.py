"""Several ranks of which something is missing or odd, and four that were recorded on the CPU with gloo."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from profkit.cli import cli
from profkit.errors import UsageError
from profkit.joining import read_ranks
from profkit.report.commands.ranks import describe_ranks
from profkit.report.units import format_gigabytes
from profkit.run.directory import NSYS_EXPORT, Run, name_of_rank
from profkit.run.light_columns import read_light
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord
from tests.in_process import names_in, run_command
from tests.kineto_builder import row
from tests.nsys_builder import NsysBuilder
from tests.rank_builder import (
    MS,
    NCCL,
    Delay,
    Timeline,
    compare_records,
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
from tests.training_scripts import training_of_ranks

if TYPE_CHECKING:
    from tests.forked_scripts import Forks


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


def test_ranks_whose_steps_nobody_recorded_are_shown_over_the_whole_recording(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", _without(simulate(2, 4, [Delay(1, "data", 9 * MS)]), steps=True))
    text = said("ranks", run)
    assert "2 ranks, no recorded steps: times are those of the whole recording; waiting in collectives: 18." in text
    assert "Who is late is unknown: no step was recorded" in text
    assert "per step" not in text
    budget = CliRunner().invoke(cli, ["check", str(run), "--max-wait", "5%"])
    assert "NOT JUDGED (counts as failed): no step was recorded" in budget.stdout


def test_full_traces_without_collectives_add_up_and_are_called_full(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", _without(simulate(2, 4), collectives=True))
    result = read_ranks(run, workers=1)
    assert result.is_exact
    for one in result.ranks:
        assert sum(one.parts.values()) == one.step_ns
        assert one.parts["kernels"] == pytest.approx(25 * MS, rel=0.01)
    assert "step = computing + copying + data" in said("ranks", run)


def test_a_rank_that_calls_no_collective_is_no_late_rank(tmp_path: Path) -> None:
    lines = simulate(4, 6, [Delay(1, "data", 20 * MS), Delay(3, "data", 60 * MS)])
    lines[3] = _without(simulate(1, 6, [Delay(0, "data", 60 * MS)]), collectives=True)[0]
    culprit = late_rank(read_ranks(write_kineto_run(tmp_path / "run", lines), workers=1))
    assert (culprit.rank, culprit.cause) == (1, "data")


@pytest.mark.parametrize(("nodes", "backend"), [(1, "gloo"), (2, "gloo"), (4, "nccl")])
def test_waits_that_rest_on_the_clocks_of_several_machines_are_said_to(
    tmp_path: Path, nodes: int, backend: str
) -> None:
    records = light_records(simulate(4, 6))
    records = of_gloo(records) if backend == "gloo" else records
    ahead = [replace(one, node=one.rank % nodes, clock_base_ns=one.rank % nodes * 50 * MS) for one in records]
    result = compare_records(ahead)
    assert result.by_clocks == ((nodes, backend) == (2, "gloo"))
    text = said("ranks", write_light_run(tmp_path / "run", ahead))
    assert ("a rank whose clock is ahead looks late" in text) == result.by_clocks


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


def test_a_trace_under_another_ranks_name_is_named_with_whose_it_is(tmp_path: Path) -> None:
    lines = simulate(3, 4)
    run = write_light_run(write_kineto_run(tmp_path / "run", lines), light_records(lines))
    shutil.copy(run / "trace.rank1.json.gz", run / "trace.rank2.json.gz")
    result = read_ranks(run, workers=1)
    assert [one.source for one in result.ranks] == ["kineto", "kineto", "light"]
    path = run / "trace.rank2.json.gz"
    assert result.lost[2] == (
        f"{path}: holds rank 1, not 2: a copy, or renamed; its light record stands in for the trace"
    )
    text = said("ranks", run)
    assert "communication not hidden behind computing" in text
    assert "(of 2 ranks recorded in full)" in text


def test_what_reads_all_ranks_says_how_to_read_the_others_of_a_damaged_one(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", simulate(3, 4))
    damaged = run / "trace.rank2.json.gz"
    damaged.write_bytes(b"")
    done = CliRunner().invoke(cli, ["kernels", str(run)])
    assert str(done.exception) == (
        f"{damaged}: the file is empty; --rank N reads another rank by itself, and profkit ranks {run} compares the"
        " others"
    )
    assert CliRunner().invoke(cli, ["kernels", str(run), "--rank", "1"]).exit_code == 0
    assert read_ranks(run, workers=1).lost == {2: f"{damaged}: the file is empty"}, "no light record stands in"


@pytest.mark.parametrize(
    ("rate", "shown"), [(326.94e9, "326.9"), (1.04e9, "1.0"), (0.93e9, "0.93"), (34.1e6, "0.034"), (51_000, "0.000051")]
)
def test_slow_links_have_a_rate_too(rate: float, shown: str) -> None:
    assert format_gigabytes(rate) == shown


def test_a_record_that_was_cut_is_named_and_its_unknown_waits_do_not_count(tmp_path: Path) -> None:
    records = light_records(simulate(4, 14, [Delay(1, "data", 9 * MS)]))
    records[2] = replace(records[2], steps=records[2].steps[:1])
    run = write_light_run(tmp_path / "run", records)
    with (run / "light.rank2.jsonl").open("a") as cut:
        cut.write('{"kind":"steps","name":["step 1')
    text = said("ranks", run)
    assert "warning: rank 2: the record holds 1 step, others up to 14; too few to compare" in text
    result = read_ranks(run, workers=1)
    assert [one.waiting_ns is None for one in result.ranks] == [False, False, True, False]
    (row,) = result.groups
    assert row.waiting_ns / result.step_count == pytest.approx(result.waiting_ns, rel=0.001)
    assert late_rank(result).rank == 1


def test_runs_of_different_jobs_are_not_compared_as_one(tmp_path: Path) -> None:
    records = light_records(simulate(4, 4))
    for node in (0, 1):
        run = write_light_run(tmp_path / f"node{node}", records[2 * node :][:2])
        job = {"id": f"job {node}", "count": 2, "number": node, "unit": "node"}
        (run / "manifest.json").write_text(json.dumps({"status": "complete", "job": job}))
    with pytest.raises(
        UsageError, match="holds runs of different jobs: job 0 and job 1; compare them: profkit compare"
    ):
        read_ranks(tmp_path)


def test_gather_refuses_to_copy_a_run_into_itself_and_what_is_no_directory(tmp_path: Path) -> None:
    run = write_light_run(tmp_path / "run", light_records(simulate(2, 2)))

    def refusal(source: Path, output: Path) -> str:
        return str(CliRunner().invoke(cli, ["gather", str(source), "-o", str(output)]).exception)

    assert refusal(run, run / "all").startswith(f"{run / 'all'}: lies within {run}, ")
    assert names_in(run) == ["light.jsonl", "light.rank1.jsonl", "manifest.json"]
    assert "no such directory" in refusal(tmp_path / "nowhere", tmp_path / "all")
    assert "a file; name the directory of a run" in refusal(run / "light.jsonl", tmp_path / "all")


def test_the_late_rank_heads_the_ranks_also_where_the_hosts_of_the_others_wait(tmp_path: Path) -> None:
    # The hosts of the ranks that wait are held up before their optimizer: all do as much between two steps.
    run = write_light_run(tmp_path / "run", light_records(simulate(40, 6, [Delay(31, "data", 9 * MS)])))
    shown = run_command("ranks", run, "--top", "3").stdout.partition("the most unusual first")[2].splitlines()
    assert shown[3].split()[0] == "31"


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

    found = late_rank(read_ranks(write_two_hosts(tmp_path, 5, events), workers=1))
    assert (found.rank, found.cause, found.phase, found.extra_ns) == (1, cause, "backward", 30 * MS)


def test_runs_of_different_numbers_of_ranks_say_so_in_each_group(tmp_path: Path) -> None:
    runs = [str(write_kineto_run(tmp_path / str(count), simulate(count, 3))) for count in (2, 4)]
    shown = CliRunner().invoke(cli, ["compare", *runs, "--force"]).stdout
    assert "all ranks (2)  all_reduce" in shown
    assert "all ranks (4)  all_reduce" in shown


def test_of_which_steps_and_ranks_times_are_is_said_where_it_is_assumed(tmp_path: Path) -> None:
    lines = simulate(4, 4)
    light = said("ranks", write_light_run(tmp_path / "light", light_records(lines)))
    full = said("ranks", write_kineto_run(tmp_path / "full", lines))
    assert "to that of the next, without the first step" in full
    assert "without the first step" not in light
    alone = said("ranks", write_nsys(tmp_path / "trace.sqlite", lines))
    assert "which ranks share the collectives of stream 7 is not recorded: all 4 are assumed to" in alone
    assert "is not recorded" not in said("ranks", write_nsys(tmp_path / "two.sqlite", simulate(2, 4)))
    assert "is not recorded" not in light


def test_many_lost_ranks_are_named_in_one_line(tmp_path: Path) -> None:
    records = light_records(simulate(40, 3))
    run = write_light_run(tmp_path / "run", [one for one in records if one.rank not in {3, *range(8, 30)}])
    done = run_command("ranks", run, "--format", "json")
    assert "warning: ranks 3, 8-29: it left no record" in done.stderr
    assert len(json.loads(done.stdout)["lost"]) == 23


def test_where_ranks_take_turns_nobody_is_said_to_cost_nothing(tmp_path: Path) -> None:
    delays = [Delay(rank, "forward", 6 * MS, every=4, first=rank) for rank in range(4)]
    text = said("ranks", write_light_run(tmp_path / "run", light_records(simulate(4, 12, delays))))
    assert "No rank is late: none costs the others any time in the median step; a rank is called late from 5.0%" in text
    assert "costs the others most, 0 ns" not in text


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
    assert found.extra_ns == pytest.approx(DELAY_MS * MS, rel=0.35)
    assert [one.rank for one in result.ranks if one.waiting_ns < DELAY_MS * MS / 2] == [2]
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
