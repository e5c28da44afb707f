"""The links between GPUs: how they are described, how collectives were measured, and what a run is held against."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from profkit.cli import cli
from profkit.errors import RunError
from profkit.joining import read_ranks
from profkit.reading import open_capture
from profkit.report.commands.ceilings import build_ceilings_document
from profkit.report.commands.rank_comparison import build_ranks_document
from profkit.report.document import Lines, render
from profkit.report.page.page import render_report
from profkit.run.ceilings import read_ceilings
from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord
from profkit.run.links import CollectiveTime, GpuLink, MeasuredLinks, bus_factor, describe_links
from tests.launched import started
from tests.rank_builder import BYTES, MS, WIRE_NS, compare_records, light_records, simulate, write_light_run, write_nsys
from tests.test_ceilings import CEILINGS

# `profkit` that finds in no time what its own device can do; tests/test_ceilings.py measures that in full.
DEVICE = {
    **{key: CEILINGS[key] for key in ("torch", "gemm", "copy")},
    "device": {"name": "a CPU", "uuid": None, "clock_mhz": None, "clock_max_mhz": None},
    "gpu_count": 0,
}
LINKS_ALONE = f"""
from profkit.cli import main
from profkit.launch import ceilings
measure = ceilings._measure
def measured(module, *arguments, **options):
    return {DEVICE!r} if module == "profkit.capture.ceilings" else measure(module, *arguments, **options)
ceilings._measure = measured
main()
"""

NVLINK = GpuLink((0, 1), "nvlink", 18, 4, 478_116_000_000)


def _measured(*times: tuple[str, int, int], ranks: int = 2) -> MeasuredLinks:
    return MeasuredLinks("nccl", ranks, tuple(CollectiveTime(*one) for one in times), (NVLINK,))


SWEEP = (("all_reduce", 2**10, 10_000), ("all_reduce", 2**20, 20_000), ("all_reduce", 2**30, 3_000_000))


def test_links_of_one_kind_are_said_once_and_others_with_their_gpus() -> None:
    far = GpuLink((0, 2), "system", 16, 5, 63_015_384_616)
    assert describe_links([NVLINK, replace(NVLINK, gpus=(2, 3))]) == "18 × NVLink 4 (478 GB/s each way)"
    assert describe_links([NVLINK, far]) == (
        "0–1: 18 × NVLink 4 (478 GB/s each way);"
        " 0–2: PCIe and the link between two CPUs, PCIe 5.0 x16 (63 GB/s each way)"
    )
    assert describe_links([]) == ""


def test_between_two_sizes_time_grows_with_bytes_and_beyond_them_the_rate_holds() -> None:
    links = _measured(*SWEEP)
    assert links.time_of("all_reduce", 1) == 10_000
    assert links.time_of("all_reduce", 2**20) == 20_000
    assert links.time_of("all_reduce", (2**20 + 2**30) / 2) == pytest.approx(1_510_000)
    assert links.time_of("all_reduce", 2**31) == pytest.approx(6_000_000)
    assert links.time_of("broadcast", 2**20) is None


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    links = _measured(*SWEEP, ranks=4)
    assert links.best == CollectiveTime("all_reduce", 2**30, 3_000_000)
    assert links.bus_bandwidth(links.best) == pytest.approx(2**30 / 0.003 * 2 * 3 / 4)
    assert bus_factor("all_gather", 4) == bus_factor("all_to_all", 4) == 3 / 4
    assert bus_factor("broadcast", 4) == 1


def _run(folder: Path, records: list[LightRecord], links: MeasuredLinks | None) -> Path:
    run = write_light_run(folder, records)
    if links is not None:
        times = [vars(one) for one in links.times]
        content = CEILINGS | {"links": {"backend": "nccl", "ranks": links.ranks, "times": times, "links": []}}
        (run / "ceilings.json").write_text(json.dumps(content))
    return run


def _network(ranks: int, machines: int, time_ns: int) -> dict[str, Any]:
    times = [{"kind": "all_reduce", "bytes": size, "time_ns": at} for size, at in ((2**10, 9), (BYTES, time_ns))]
    return {"backend": "nccl", "ranks": ranks, "machines": machines, "times": times}


def _said(run: Path) -> str:
    done = CliRunner().invoke(cli, ["ranks", str(run)])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_collective_is_held_against_the_measured_one_of_its_size(tmp_path: Path) -> None:
    links = _measured(("all_reduce", 2**10, 9_000), ("all_reduce", BYTES, WIRE_NS // 2))
    run = _run(tmp_path / "run", light_records(simulate(2, 3)), links)
    (row,) = read_ranks(run).groups
    assert row.measured_ns == row.count * WIRE_NS // 2
    assert row.wire_ns is not None
    assert row.measured_share == pytest.approx(row.count * WIRE_NS / 2 / row.wire_ns)
    assert row.limited_by == "bandwidth"
    said = _said(run)
    assert "of measured: 100 % is the bus bandwidth of a collective of the same size with nothing else running" in said
    assert (
        f"the highest that `profkit ceilings` measured: all_reduce of 95.37 MiB, {BYTES / WIRE_NS * 2:.1f} GB/s" in said
    )
    assert "latency" not in said
    page = render_report(open_capture(run))
    assert "of measured: 100 %" in page
    assert "was not measured" not in page


def test_of_more_ranks_than_were_measured_the_bus_bandwidth_is_held_to_be_the_same(tmp_path: Path) -> None:
    links = _measured(("all_reduce", 2**10, 9_000), ("all_reduce", BYTES, WIRE_NS))
    run = _run(tmp_path / "run", light_records(simulate(4, 3)), links)
    (row,) = read_ranks(run).groups
    assert row.measured_ns == round(row.count * WIRE_NS * (2 * 3 / 4) / (2 * 1 / 2))


def test_small_collectives_are_limited_by_latency(tmp_path: Path) -> None:
    links = _measured(("all_reduce", 2**10, WIRE_NS * 9 // 10), ("all_reduce", BYTES, WIRE_NS))
    run = _run(tmp_path / "run", light_records(simulate(2, 3)), links)
    (row,) = read_ranks(run).groups
    assert row.limited_by == "latency"
    assert "all_reduce of dp is limited by latency, not by the links" in _said(run)


def test_ranks_on_several_machines_are_not_held_against_the_links_of_one(tmp_path: Path) -> None:
    records = [replace(record, node=record.rank) for record in light_records(simulate(2, 3))]
    run = _run(tmp_path / "run", records, _measured(*SWEEP))
    (row,) = read_ranks(run).groups
    assert (row.measured_ns, row.measured_share, row.limited_by) == (None, None, None)
    assert f"started by the job's launcher, `profkit ceilings -o {run}` measures the network" in _said(run)


@pytest.mark.parametrize(("per_machine", "time_ns"), [(1, WIRE_NS // 2), (2, WIRE_NS // 4)])
def test_ranks_on_several_machines_are_held_against_the_network(tmp_path: Path, per_machine: int, time_ns: int) -> None:
    """Against what was measured with one rank, or with several, on each of two machines."""
    records = [replace(record, node=record.rank // per_machine) for record in light_records(simulate(4, 3))]
    run = _run(tmp_path / "run", records, None)
    network = [_network(8, 2, WIRE_NS // 4), _network(2, 2, WIRE_NS // 2)]
    (run / "ceilings.json").write_text(json.dumps(CEILINGS | {"network": network}))
    (row,) = read_ranks(run).groups
    used = network[per_machine == 1]
    factor = bus_factor("all_reduce", 4) / bus_factor("all_reduce", used["ranks"])
    assert row.measured_ns == round(row.count * time_ns * factor)
    said = _said(run)
    assert "between 2 machines, one rank on each in a group, the highest measured: all_reduce of 95.37 MiB" in said
    assert "between 2 machines, 4 ranks on each in a group" in said
    assert "was not measured" not in said


def test_the_network_of_a_job_lies_beside_its_runs_or_in_a_file_that_is_named(tmp_path: Path) -> None:
    for record in light_records(simulate(2, 3)):
        write_light_run(tmp_path / "job" / f"node{record.rank}", [replace(record, node=record.rank)])
    links = {"backend": "nccl", "ranks": 2, "times": _network(2, 1, 9)["times"]}
    (tmp_path / "job" / "node1" / "ceilings.json").write_text(json.dumps(CEILINGS | {"links": links}))
    assert read_ranks(tmp_path / "job").groups[0].measured_share is None
    other = tmp_path / "other.json"
    other.write_text(json.dumps(CEILINGS | {"network": [_network(2, 2, WIRE_NS)]}))
    assert read_ranks(tmp_path / "job", ceilings=other).groups[0].measured_share == pytest.approx(1, rel=0.01)
    (tmp_path / "job" / "ceilings.json").write_text(other.read_text())
    result = read_ranks(tmp_path / "job")
    assert result.groups[0].measured_share == pytest.approx(1, rel=0.01)
    assert result.measured is not None, "what a run knows of the links stays"
    with pytest.raises(RunError, match=r"none.json: no such file"):
        read_ranks(tmp_path / "job", ceilings=tmp_path / "none.json")
    done = CliRunner().invoke(cli, ["ranks", str(tmp_path / "job"), "--ceilings", str(other), "--format", "json"])
    assert json.loads(done.stdout)["links"]["network"][0]["machines"] == 2


def _sending(rank: int, ranks: int, sends_ns: int, node: int = 0) -> LightRecord:
    """Return a stage of a pipeline: in each of three steps two sends to each neighbour, and what they send back."""
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < ranks]
    calls = [(kind, sends_ns if kind == "send" else 7) for _ in neighbours for kind in ("send", "recv") * 2]
    count = len(calls)
    columns = Collectives(
        [0] * count,
        [],
        [kind for kind, _ in calls],
        ["float32"] * count,
        [BYTES] * count,
        list(range(count)),
        [0] * count,
        [time_ns for _, time_ns in calls],
        [0] * count,
        [None] * count,
    )
    numbered = [replace(columns, sequence=list(range(at * count, (at + 1) * count))) for at in range(3)]
    steps = tuple(
        StepRecord(f"step {at}", at * MS, (at + 1) * MS, collectives=mine) for at, mine in enumerate(numbered)
    )
    return LightRecord(rank, ranks, node, 0, groups=(Group(0, "7", tuple(range(ranks)), "pp", "nccl"),), steps=steps)


def test_what_stages_send_is_counted_at_each_sender_and_held_against_a_measured_send(tmp_path: Path) -> None:
    """Of four stages the inner ones send twice as much: their calls have no numbers in common with the outer ones'."""
    links = _measured(("all_reduce", 2**10, 9), ("send", 2**10, 9), ("send", BYTES, WIRE_NS), ranks=8)
    run = _run(tmp_path / "run", [_sending(rank, 4, 2 * WIRE_NS) for rank in range(4)], links)
    sent, received = read_ranks(run).groups
    assert (sent.kind, received.kind) == ("send", "recv")
    assert sent.count == received.count == 3 * 2 * (1 + 2 + 2 + 1)
    assert sent.byte_count == received.byte_count == sent.count * BYTES
    assert sent.wire_ns == sent.count * 2 * WIRE_NS
    assert sent.bus_bandwidth == sent.algorithm_bandwidth == pytest.approx(BYTES / (2 * WIRE_NS) * 1e9)
    assert sent.measured_share == pytest.approx(0.5)
    assert (received.wire_ns, received.measured_share) == (None, None)


def _reducing(record: LightRecord) -> LightRecord:
    """Return the record with an all-reduce at the end of each step."""
    steps = []
    for step in record.steps:
        both = {name: [*column, column[0]] for name, column in vars(step.collectives).items()}
        both["kind"][-1] = "all_reduce"
        steps.append(replace(step, collectives=Collectives(**both)))
    return replace(record, steps=tuple(steps))


def test_a_group_that_sends_and_reduces_counts_both(tmp_path: Path) -> None:
    """NCCL numbers both from 1, each for itself."""
    records = [_reducing(_sending(rank, 2, WIRE_NS)) for rank in range(2)]
    kinds = {row.kind: row.count for row in read_ranks(_run(tmp_path / "run", records, None)).groups}
    assert kinds == {"all_reduce": 3, "send": 12, "recv": 12}


def test_of_a_record_that_was_cut_only_what_was_sent_in_the_steps_that_all_have_counts() -> None:
    whole, cut = (_reducing(_sending(rank, 2, WIRE_NS)) for rank in range(2))
    result = compare_records([whole, replace(cut, steps=cut.steps[:2])])
    assert result.step_count == 2
    assert {row.kind: row.count for row in result.groups} == {"all_reduce": 2, "send": 8, "recv": 8}


def test_where_one_rank_was_recorded_in_full_only_what_the_others_sent_in_its_steps_counts() -> None:
    full, light = (_sending(rank, 2, WIRE_NS) for rank in range(2))
    full = replace(full, source="kineto", steps=full.steps[1:2])
    assert {row.kind: row.count for row in compare_records([full, light]).groups} == {"send": 4, "recv": 4}


def test_without_a_measurement_the_command_that_makes_one_is_named_with_the_links(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", light_records(simulate(2, 3)), None)
    link = {"gpus": [0, 1], "way": "nvlink", "count": 18, "version": 4, "bytes_per_s": 478_116_000_000}
    (run / "manifest.json").write_text(json.dumps({"status": "complete", "gpus": {"links": [link]}}))
    assert read_ranks(run).links == (NVLINK,)
    said = _said(run)
    links = "how fast the links between the GPUs are (18 × NVLink 4 (478 GB/s each way)) was not measured"
    assert f"{links}: `profkit ceilings -o {run}` there" in said
    assert "of measured" not in said


def test_nobody_is_told_to_write_a_measurement_over_a_trace(tmp_path: Path) -> None:
    trace = write_nsys(tmp_path / "a.sqlite", simulate(2, 3))
    result = replace(read_ranks(trace), links=(NVLINK,))
    (row,) = result.groups
    result = replace(result, groups=(replace(row, bus_bandwidth=1e9),))
    lines = [
        line
        for part in build_ranks_document(result, str(trace)).parts
        if isinstance(part, Lines)
        for line in part.lines
    ]
    assert "not measured: `profkit ceilings` shows it" in " ".join(lines)


@pytest.mark.parametrize(
    "links",
    [
        {"backend": "nccl", "ranks": 2, "machines": 3, "times": [{"kind": "all_reduce", "bytes": 8, "time_ns": 8}]},
        {"backend": "nccl", "ranks": 1, "times": [{"kind": "all_reduce", "bytes": 8, "time_ns": 8}]},
        {"backend": "nccl", "ranks": 2, "times": [{"kind": "all_gather", "bytes": 8, "time_ns": 8}]},
        {"backend": "nccl", "ranks": 2, "times": [{"kind": "all_reduce", "bytes": 0, "time_ns": 8}]},
        {"backend": "nccl", "ranks": 2, "times": [{"kind": "all_reduce", "bytes": 8, "time_ns": "8"}]},
    ],
)
def test_impossible_measurements_are_refused(tmp_path: Path, links: dict[str, Any]) -> None:
    (tmp_path / "ceilings.json").write_text(json.dumps(CEILINGS | {"links": links}))
    with pytest.raises(RunError, match="links"):
        read_ceilings(tmp_path / "ceilings.json")


def test_processes_on_the_cpu_are_measured_with_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "ceilings.json"
    words = [sys.executable, "-c", LINKS_ALONE, "ceilings", "--device", "cpu", "--ranks", "2", "-o", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ceilings = read_ceilings(file)
    assert ceilings.links is not None
    assert (ceilings.links.backend, ceilings.links.ranks, ceilings.links.links) == ("gloo", 2, ())
    for kind in ("all_reduce", "all_gather", "broadcast", "send"):
        sizes = [one.bytes for one in ceilings.links.of_kind(kind)]
        assert sizes[0] == 1024
        assert sizes == [1024 * 4**at for at in range(len(sizes))]
    assert done.stdout == render(build_ceilings_document(ceilings), "table") + "\n"
    assert "Collectives between 2 processes" in done.stdout


def test_the_groups_of_a_job_are_those_within_machines_all_ranks_and_one_of_each_machine() -> None:
    pytest.importorskip("torch")
    from profkit.capture.link_times import group_shapes

    assert group_shapes(["a", "a"]) == [[[0, 1]]]
    assert group_shapes(["a", "b", "c"]) == [[[0, 1, 2]]]
    assert group_shapes(["a", "a", "b", "b"]) == [[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 2], [1, 3]]]
    assert group_shapes(["a", "b", "b"]) == [[[1, 2]], [[0, 1, 2]], [[0, 1]]]


def test_ranks_that_a_launcher_started_measure_the_network_together(tmp_path: Path) -> None:
    """Two machines are played by two numbers of nodes, on one rank each."""
    pytest.importorskip("torch")
    file = tmp_path / "ceilings.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    argv = [sys.executable, "-c", LINKS_ALONE, "ceilings", "--device", "cpu", "-o", str(file)]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(started(argv, env={**shared, "RANK": str(rank), "GROUP_RANK": str(rank)}))
            for rank in range(2)
        ]
        said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    ceilings = read_ceilings(file)
    assert ceilings.links is None
    (network,) = ceilings.network
    assert (network.backend, network.ranks, network.machines, network.per_machine) == ("gloo", 2, 2, 1)
    assert {one.kind for one in network.times} == {"all_reduce", "all_gather", "broadcast", "send"}
    assert said[0][0] == render(build_ceilings_document(ceilings), "table") + "\n"
    assert "Collectives between 2 processes on 2 machines" in said[0][0]
    assert said[1][0] == "", "one rank says what all of them measured"


def test_a_rank_that_cannot_find_the_others_says_what_to_set(profkit: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    done = profkit("ceilings", env={**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "MASTER_ADDR": ""})
    assert done.returncode == 1
    assert "rank 1 of 2: MASTER_ADDR is not set" in done.stderr
    done = profkit("ceilings", "--ranks", "2", env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert "--ranks starts processes, and a launcher started this one" in done.stderr


@pytest.mark.gpu
def test_the_links_of_gpus_are_measured_with_nccl() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from profkit.launch.ceilings import measure_links

    links = measure_links(2, "cuda")
    assert links.backend == "nccl"
    assert {one.kind for one in links.times} == {
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"),
    }
    times = [one.time_ns for one in links.of_kind("all_reduce")]
    assert times[-1] > 10 * times[0]
    assert len(links.links) == 1
    said = links.links[0].bytes_per_s
    assert said is None or 0.3 < links.bus_bandwidth(links.best) / said < 1.05
