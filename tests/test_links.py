"""The links between GPUs: how they are described, how collectives were measured, and what a run is held against."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from profkit.cli import cli
from profkit.errors import RunError
from profkit.joining import read_ranks
from profkit.report.ceilings import build_ceilings_document
from profkit.report.document import Lines, render
from profkit.report.rank_comparison import build_ranks_document
from profkit.run.ceilings import read_ceilings
from profkit.run.light_record import LightRecord
from profkit.run.links import CollectiveTime, GpuLink, MeasuredLinks, bus_factor, describe_links
from tests.rank_builder import BYTES, WIRE_NS, light_records, simulate, write_light_run, write_nsys
from tests.test_ceilings import CEILINGS

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
    assert "a group with ranks on several machines" in _said(run)


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


def test_processes_on_the_cpu_are_measured_with_gloo(profkit: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "ceilings.json"
    done = profkit("ceilings", "--device", "cpu", "--ranks", "2", "-o", file)
    assert done.returncode == 0, done.stderr
    ceilings = read_ceilings(file)
    assert ceilings.links is not None
    assert (ceilings.links.backend, ceilings.links.ranks, ceilings.links.links) == ("gloo", 2, ())
    for kind in ("all_reduce", "all_gather"):
        sizes = [one.bytes for one in ceilings.links.of_kind(kind)]
        assert sizes[0] == 1024
        assert sizes == [1024 * 4**at for at in range(len(sizes))]
    assert done.stdout == render(build_ceilings_document(ceilings), "table") + "\n"
    assert "Collectives between 2 processes" in done.stdout


@pytest.mark.gpu
def test_the_links_of_gpus_are_measured_with_nccl() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from profkit.launch.ceilings import measure_links

    links = measure_links(2, "cuda")
    assert links.backend == "nccl"
    assert {one.kind for one in links.times} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    times = [one.time_ns for one in links.of_kind("all_reduce")]
    assert times[-1] > 10 * times[0]
    assert len(links.links) == 1
    said = links.links[0].bytes_per_s
    assert said is None or 0.3 < links.bus_bandwidth(links.best) / said < 1.05
