"""Who is late and why: delays that were put into simulated ranks are found by rank, cause, phase and size."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profkit.analysis.ranks.comparison import RanksResult, compare_ranks
from profkit.analysis.ranks.culprit import Verdict
from profkit.analysis.ranks.light_costs import host_factor
from profkit.analysis.ranks.own_time import CAUSES, Account, ReducedRank, divide_own_time
from profkit.analysis.ranks.reduce import reduce_columns, reduce_ranks
from profkit.errors import TraceError
from profkit.joining import find_sources, read_ranks, reduce_source
from profkit.reading import open_capture, open_trace
from profkit.report.commands.ranks import build_ranks_document, describe_ranks
from profkit.report.page.page import render_report
from profkit.run.directory import LIGHT, LINES, Run, name_of_rank
from profkit.run.light_columns import read_light_columns
from profkit.run.light_record import Group, LightRecord, StepRecord
from profkit.run.lines import LineSteps, LineTime, RunLines, write_lines
from tests.kineto_builder import row
from tests.nsys_builder import NsysBuilder
from tests.rank_builder import (
    BYTES,
    MS,
    PLACES,
    UNTIMED,
    WIRE_NS,
    Delay,
    compare_records,
    in_each_step,
    late_rank,
    light_records,
    of_gloo,
    read_reduced,
    reduce_record,
    said,
    simulate,
    with_another_call,
    write_kineto_run,
    write_light_run,
    write_nsys,
    write_two_hosts,
)

pytestmark = pytest.mark.usefixtures("read_here")

RECORDED = Path(__file__).parent / "light_records"
"""Some steps of two ranks on 2 × H200, a sleep injected into rank 1 as the name says; those that are untimed from NCCL
without TORCH_NCCL_ENABLE_TIMING. There 30 ms were injected; hosts of waiting ranks, which stand in a full queue, leave
a few of them open. On one GPU two ranks shared it (`late_program`)."""
REDUCED = Path(__file__).parent / "reduced_ranks"
"""The like by full traces: what each rank handed over."""

CAUSE = {
    "data": ("data", "data", ""),
    "forward": ("python", "forward", "layers.1"),
    "backward": ("python", "backward", "layers.1"),
    "optimizer": ("python", "optimizer", ""),
    "kernels": ("kernels", "forward", "layers.1"),
    "launch": ("launch", "forward", "layers.1"),
}


def _assert_found(result: RanksResult, rank: int, place: str, time_ns: int, *, with_module: bool = True) -> None:
    found = late_rank(result)
    cause, phase, module = CAUSE[place]
    if not with_module:
        # A light record cannot tell Python from launches, and knows no modules.
        cause, module = "python" if cause == "launch" else cause, ""
    assert (found.rank, found.cause, found.phase, found.module) == (rank, cause, phase, module)
    assert found.late_ns == pytest.approx(time_ns, rel=0.02)
    assert found.extra_ns == pytest.approx(time_ns, rel=0.02)
    assert found.share == 1.0


def _untimed(records: list[LightRecord], *, is_at_end: bool, launch_wait_ns: int = 0) -> list[LightRecord]:
    """Return the records as NCCL leaves them if nobody asks it for times; rank 2's GPU waits for its host so long.

    ``is_at_end``: the collectives are all-reduces at the end of a backward pass, else all-gathers within a phase.
    """

    def without_times(step: StepRecord, rank: int) -> StepRecord:
        calls = step.collectives
        (length,) = (end - start for start, end in zip(calls.start_ns, calls.end_ns, strict=True))  # type: ignore[operator]
        kinds = calls.kind if is_at_end else ["all_gather"]
        # A pass ends on the GPU when what it waits for has ended.
        on_gpu = tuple(
            (name, start, end + length * (is_at_end and name == "backward")) for name, start, end in step.gpu_phases
        )
        waited_ns = 20_000 + (launch_wait_ns if rank == 2 else 0)
        calls = replace(calls, kind=kinds, exposed_ns=[length if is_at_end else None], **UNTIMED)
        return replace(step, collectives=calls, gpu_phases=on_gpu, launch_wait_ns=waited_ns)

    return [replace(one, steps=tuple(without_times(step, one.rank) for step in one.steps)) for one in records]


@pytest.mark.parametrize("place", PLACES)
def test_a_delay_is_named_whatever_recorded_it(tmp_path: Path, place: str) -> None:
    """nsys; torch.profiler, whose ranks' clocks differ; light records, also without times of NCCL's collectives."""
    trace = write_nsys(tmp_path / "trace.sqlite", simulate(3, delays=[Delay(1, place, 30 * MS)]))
    _assert_found(read_ranks(trace), 1, place, 30 * MS)
    run = write_kineto_run(tmp_path / "run", simulate(2, delays=[Delay(1, place, 12 * MS)]), shift_ns=-(10**9))
    _assert_found(read_ranks(run), 1, place, 12 * MS)
    records = light_records(simulate(4, delays=[Delay(2, place, 8 * MS)]))
    _assert_found(compare_records(records), 2, place, 8 * MS, with_module=False)
    untimed = compare_records(_untimed(records, is_at_end=True))
    _assert_found(untimed, 2, place, 8 * MS, with_module=False)
    assert [row.bus_bandwidth for row in untimed.groups] == [None]
    # How long the others waited counts, though nobody knows when; the last optimizer comes after all collectives.
    waited = 8 * (4 if place == "optimizer" else 5)
    assert [round(time / MS) for time in untimed.waits_ns[:, 2].tolist()] == [waited, waited, 0, waited]


def test_a_host_that_keeps_its_gpu_waiting_between_phases_is_named_where_nobody_timed_collectives(
    tmp_path: Path,
) -> None:
    records = light_records(simulate(4, delays=[Delay(2, "data", 8 * MS)]))
    records = _untimed(records, is_at_end=False, launch_wait_ns=8 * MS)
    found = late_rank(compare_records(records))
    assert (found.rank, found.cause, found.phase, found.share, found.late_ns) == (2, "data", "data", None, 8 * MS)
    text = said("ranks", write_light_run(tmp_path / "run", records))
    assert "Rank 2 is late: its host is at least 8.000 ms a step behind those of the others, which wait" in text


def test_nobody_waits_for_the_last_rank_of_a_broadcast() -> None:
    records = light_records(simulate(3, delays=[Delay(1, "data", 9 * MS)]))
    for record in records:
        for step in record.steps:
            step.collectives.kind[:] = ["broadcast"]
    result = compare_records(records)
    assert not result.waits_ns.any()
    assert [row.waiting_ns for row in result.groups] == [0]
    assert result.verdict.most_rank is None


def test_a_host_that_was_late_in_too_few_steps_is_named_without_a_verdict() -> None:
    """On 2 x H200 a delay of 30 ms showed in 7 of 9 steps of a program; in two the start and end of a recording did."""
    records = _untimed(light_records(simulate(2)), is_at_end=False)
    few = replace(
        compare_records(records),
        verdict=Verdict(None, 1, 29 * MS, doubt="untimed", turns={0: 2, 1: 7}),
    )
    assert "rank 1's host was late by 29.00 ms in 7 of the steps, which may be chance" in " ".join(describe_ranks(few))


def test_when_hosts_called_nccl_says_nothing_about_who_waited() -> None:
    """Hosts run ahead of their GPUs, each as far as it likes; gloo's keep their hosts."""
    records = _untimed(light_records(simulate(2)), is_at_end=False)
    early = replace(records[0], clock_base_ns=records[0].clock_base_ns - 50 * MS)
    assert compare_records([early, records[1]]).waiting_ns == 0
    gloo = of_gloo(records)
    late = replace(gloo[1], clock_base_ns=20 * MS)
    assert compare_records([gloo[0], late]).waiting_ns == pytest.approx(10 * MS, rel=0.01)


def test_nobody_is_named_where_nobody_is_late(tmp_path: Path, captures: Path) -> None:
    lines = simulate(4)
    records = light_records(lines)
    for result in (
        read_ranks(write_nsys(tmp_path / "trace.sqlite", lines)),
        read_ranks(write_kineto_run(tmp_path / "run", lines)),
        compare_records(records),
        compare_records(_untimed(records, is_at_end=True)),
    ):
        assert (result.verdict.culprit, result.verdict.doubt) == (None, None)
        assert result.verdict.most_rank is not None
        assert result.verdict.most_ns < 50_000
    real = read_ranks(captures / "ddp.nsys2025.sqlite").verdict
    assert (real.culprit, real.most_rank) == (None, 1)


NAMED = {
    "ddp-data": ("data", "data", 30),
    "ddp-forward": ("python", "forward", 30),
    "ddp-backward": ("python", "backward", 30),
    "fsdp2-before-forward": ("python", "before forward", 5),
    "tp-before-forward": ("python", "before forward", 5),
    # Rank 0 waits for the collective of its forward while its GPU is in the loss.
    "tp-waits-in-loss": ("python", "before forward", 5),
    # A heavy kernel in one block, and what rank 0 did next to collectives that waited for it.
    "full-fsdp2-kernels": ("kernels", "forward", 29),
    # Rank 0 launches all of FSDP2's small kernels too, while its GPU waits for rank 1.
    "full-fsdp2-host-paced": ("python", "forward", 30),
    "untimed-fsdp2-data": ("data", "data", 30),
    "untimed-fsdp2-forward": ("python", "forward", 30),
    "untimed-fsdp2-backward": ("python", "backward", 30),
    "untimed-fsdp2-optimizer": ("python", "optimizer", 30),
    "untimed-ddp-data": ("data", "data", 30),
    "untimed-ddp-forward": ("python", "forward", 30),
    "untimed-ddp-backward": ("python", "backward", 35),
    "untimed-ddp-optimizer": ("python", "optimizer", 30),
    "untimed-ddp-after-optimizer": ("python", "before data", 30),
    # Rank 0's host ends each optimizer when its GPU gets there: both hosts seem to take as long.
    "one-gpu-ddp-optimizer": ("python", "optimizer", 30),
    # A heavy kernel keeps rank 1's own host in its optimizer, and rank 0's waits for rank 1 in its own.
    "one-gpu-ddp-kernels": ("kernels", "forward", 25),
    "one-gpu-ddp-kernels-nsys": ("kernels", "forward", 25),
    # By full traces beside light records that hold the steps after them too: the other host takes as long in all,
    # since it is held up elsewhere, and no profiler is blamed.
    "both-one-gpu-ddp-forward": ("python", "forward", 30),
    "both-one-gpu-ddp-optimizer": ("python", "optimizer", 30),
}
NOBODY = {
    "ddp-none": None,
    "untimed-ddp-none": None,
    "untimed-fsdp2-none": "untimed",
    "one-gpu-ddp-none": "untimed",
    "full-ddp-none": None,
    "full-ddp-launches": "launches",
    "full-tp-none": "launches",
    # Rank 1 launches its backward pass by 18 ms later in recorded steps; in the others both take as long.
    "both-one-gpu-ddp-none": "profiler",
}


@pytest.mark.parametrize("name", [*NAMED, *NOBODY])
def test_real_records_of_two_ranks_name_what_was_injected_and_else_nobody(name: str) -> None:
    verdict = _compare_recorded(name).verdict
    if name in NOBODY:
        assert (verdict.culprit, verdict.doubt) == (None, NOBODY[name])
        return
    (cause, phase, extra_ms), found = NAMED[name], verdict.culprit
    assert (found.rank, found.cause, found.phase) == (1, cause, phase)
    assert found.extra_ns == pytest.approx(extra_ms * MS, rel=0.1 if "both" in name else 0.2)
    assert found.gain_ns <= found.extra_ns or "both" not in name


def _compare_recorded(name: str) -> RanksResult:
    kind, _, rest = name.partition("-")
    if kind not in ("full", "both"):
        return read_ranks(RECORDED / name)
    traced = [read_reduced(REDUCED / rest, rank) for rank in range(2)]
    if kind == "both":
        light = [read_light_columns(RECORDED / rest / name_of_rank(LIGHT, rank)) for rank in range(2)]
        traced = [replace(rank, light=reduce_columns(light[at])) for at, rank in enumerate(traced)]
    return compare_ranks(traced)


def test_the_gain_is_what_the_same_program_gained_without_the_delay() -> None:
    beside = _compare_recorded("full-ddp-optimizer")  # kernels next to waiting collectives hide the delay
    found = late_rank(beside)
    assert (found.rank, found.cause, found.phase) == (1, "python", "before optimizer")
    # 30 ms were injected, half of them while the GPU had work left.
    assert found.extra_ns == pytest.approx(30 * MS, rel=0.03)
    assert found.idle_ns < 20 * MS
    # Without a delay the same program took 75 ms a step.
    assert beside.step_ns - found.gain_ns == pytest.approx(75 * MS, rel=0.05)
    heavy = _compare_recorded("full-fsdp2-kernels")  # 172 ms a step, and 143.5 ms without the kernel
    assert heavy.step_ns - late_rank(heavy).gain_ns == pytest.approx(143.5 * MS, rel=0.02)


def test_a_delay_that_the_gpu_hides_in_later_steps_is_late_in_the_steps_before() -> None:
    found = late_rank(read_ranks(RECORDED / "ddp-data-hidden-later"))
    assert (found.rank, found.cause, found.late_steps, found.steps) == (1, "data", 17, 25)
    assert found.extra_ns == pytest.approx(30 * MS, rel=0.02)


def test_a_rank_that_is_late_once_is_not_named_nor_one_that_is_late_for_no_reason_that_was_recorded(
    tmp_path: Path,
) -> None:
    once = simulate(3, 12, [Delay(1, "forward", 20 * MS, every=12)])
    assert compare_records(light_records(once)).verdict.culprit is None
    # What the phases took is lost, the times of the collectives are not.
    records = light_records(simulate(4, 8, [Delay(2, "forward", 8 * MS)]))
    blind = [in_each_step(one, phases=(), gpu_phases=()) for one in records]
    verdict = compare_records(blind).verdict
    assert (verdict.culprit, verdict.most_rank, verdict.doubt) == (None, 2, "unexplained")
    text = said("ranks", write_light_run(tmp_path / "run", blind))
    assert "Rank 2 is late by 8." in text
    assert "and why is not known" in text


def test_a_lower_clock_is_named_where_kernels_are_slower() -> None:
    records = light_records(simulate(3, delays=[Delay(0, "kernels", 8 * MS)]))
    slow = in_each_step(records[0], sm_mhz=1200, throttle=("power cap",))
    result = compare_records([slow, *records[1:]])
    assert (late_rank(result).rank, late_rank(result).cause) == (0, "clock")


def test_own_time_and_communication_sum_up_to_the_step_of_every_rank(tmp_path: Path) -> None:
    result = read_ranks(write_nsys(tmp_path / "trace.sqlite", simulate(3, delays=[Delay(1, "data", 30 * MS)])))
    for one in result.ranks:
        assert one.exposed_ns is not None
        assert sum(one.parts.values()) + one.exposed_ns == one.step_ns
    # The same time passes on all of them between two collectives that end together.
    assert len({one.step_ns for one in result.ranks}) == 1


def test_a_copy_counts_where_it_was_launched_though_the_host_is_elsewhere_by_then(tmp_path: Path) -> None:
    builder = NsysBuilder(("forward", 0, 1_000))
    builder.copy(500, 5_000, start=800)
    builder.copy(1_200, 300, start=7_000)
    builder.range("backward", 1_500, 9_000)
    builder.kernel(2_000, 400, start=6_000)
    attribution = open_trace(builder.write(tmp_path / "trace.sqlite")).attribution
    own, _ = divide_own_time(attribution)
    places = [own.places[number] for number in own.place.tolist()]
    times = (own.end_ns - own.start_ns).tolist()
    copies = {
        place: time for place, cause, time in zip(places, own.cause, times, strict=True) if CAUSES[cause] == "copy"
    }
    assert copies == {("forward", ""): 5_000, ("before backward", ""): 300}


def test_time_that_is_waited_in_two_collectives_at_once_counts_once(tmp_path: Path) -> None:
    # gloo runs the reductions of two buckets at the same time.
    def events(step: int, rank: int) -> list[dict[str, object]]:
        begin, late = step * 60_000, rank * 20_000
        return [
            row("user_annotation", f"step {step}", begin, 55_000),
            row("cpu_op", "aten::mm", begin + 1_000, 4_000),
            row("user_annotation", "gloo:all_reduce", begin + 10_000 + late, 21_000 - late, 8),
            row("user_annotation", "gloo:all_reduce", begin + 15_000 + late, 21_000 - late, 9),
        ]

    result = read_ranks(write_two_hosts(tmp_path, 3, events))

    assert result.waits_ns.tolist() == [[0, 3 * 25 * MS], [0, 0]]
    assert sum(row.waiting_ns for row in result.groups) == 3 * 20 * MS
    text = said("ranks", tmp_path)
    assert "waiting in collectives: 12.50 ms" in text
    assert "counts once what is waited in two at once" in text


def test_bandwidth_counts_from_the_last_arrival(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", simulate(4, delays=[Delay(1, "data", 30 * MS)]))
    (row,) = read_ranks(run).groups
    assert (row.count, row.kind, row.dtype, row.rank_count) == (5, "all_reduce", "float32", 4)
    assert row.byte_count == 5 * BYTES
    assert row.wire_ns == 5 * WIRE_NS
    assert row.algorithm_bandwidth == pytest.approx(BYTES / WIRE_NS * 1e9)
    assert row.bus_bandwidth == pytest.approx(BYTES / WIRE_NS * 1e9 * 1.5)


def test_neither_the_order_of_records_nor_the_epoch_of_their_clocks_matters() -> None:
    records = light_records(simulate(8, delays=[Delay(5, "data", 9 * MS)]))
    by_epoch = [replace(one, clock_base_ns=1_795_381_706_870_080_786 + one.rank) for one in records]
    forth, back = compare_records(records), compare_records(records[::-1])
    assert (forth.ranks, forth.groups, forth.verdict.turns) == (back.ranks, back.groups, back.verdict.turns)
    assert compare_records(by_epoch).ranks == forth.ranks


def test_a_lost_rank_and_a_cut_file_are_named_and_the_others_compared(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", simulate(6, delays=[Delay(1, "data", 20 * MS)]))
    (run / "trace.rank3.json.gz").unlink()
    cut = run / "trace.rank4.json.gz"
    cut.write_bytes(cut.read_bytes()[:-200])
    result = read_ranks(run)
    assert sorted(result.lost) == [3, 4]
    assert "no record" in result.lost[3]
    assert "trace.rank4.json.gz" in result.lost[4]
    assert [one.rank for one in result.ranks] == [0, 1, 2, 5]
    _assert_found(result, 1, "data", 20 * MS)


def test_a_light_record_that_was_cut_makes_no_wait_per_step_shorter(tmp_path: Path) -> None:
    records = light_records(simulate(4, 10, [Delay(1, "data", 9 * MS)]))
    # Ranks 0 and 1 have a group of their own, in which nothing is lost.
    for at in (0, 1):
        groups = (*records[at].groups, Group(1, "pair", (0, 1)))
        records[at] = with_another_call(replace(records[at], groups=groups), group=[0, 1])
    whole = compare_records(records)
    run = write_light_run(tmp_path / "run", [*records[:3], replace(records[3], steps=records[3].steps[:6])])
    with (run / "light.rank3.jsonl").open("a") as cut:
        cut.write('{"kind":"steps","name":["step 6')
    result = read_ranks(run)
    assert (whole.step_count, result.step_count, result.recorded_step_count) == (10, 6, 10)
    for before, after in zip(whole.ranks, result.ranks, strict=True):
        assert after.waiting_ns == pytest.approx(before.waiting_ns, rel=0.01)
    assert {row.count / result.step_count for row in result.groups} == {1.0}
    _assert_found(result, 1, "data", 9 * MS, with_module=False)
    assert "collectives are those of 6 of 10 steps" in said("ranks", run)


@pytest.mark.parametrize("recorded", [(0, 2), (2,), (1, 3)])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_recorded_in_full_are_compared_with_light_records_in_the_same_steps(
    backend: str, recorded: tuple[int, ...]
) -> None:
    lines = simulate(4, steps=14, delays=[Delay(1, "data", 20 * MS)])
    # A light record of gloo says when hosts called: their clocks are those of one machine.
    light = [replace(one, clock_base_ns=0) for one in light_records(lines)]
    full = [_record_in_full(one) for one in (of_gloo(light, is_timed=True) if backend == "gloo" else light)]
    light = of_gloo(light) if backend == "gloo" else light
    result = compare_ranks([full[rank] if rank in recorded else reduce_record(light[rank]) for rank in range(4)])
    culprit = late_rank(result)
    assert (culprit.rank, culprit.cause) == (1, "data")
    assert culprit.late_ns == pytest.approx(20 * MS, rel=0.02)
    assert result.step_count == 3
    assert [round(wait / 3 / MS) for wait in result.waits_ns[:, 1].tolist()] == [20, 0, 20, 20]


def _record_in_full(record: LightRecord) -> ReducedRank:
    """Return a rank whose trace has three of these steps: it waits for data, computes for 24 ms and reduces."""
    steps = record.steps[5:8]
    parts = ("data", "data", ""), ("kernels", "backward", "")
    times = [[end - start, 24 * MS] for step in steps[1:] for name, start, end in step.phases if name == "data"]
    exposed = [
        end - start for step in steps[1:] for start, end in [(*step.collectives.start_ns, *step.collectives.end_ns)]
    ]
    exact = Account(parts, np.array(times, dtype=np.float64), np.array(exposed, dtype=np.float64), is_exact=True)
    return replace(reduce_record(replace(record, source="kineto", steps=steps)), exact=exact)


def test_nodes_in_directories_of_their_own_are_read_as_one_run(tmp_path: Path) -> None:
    records = light_records(simulate(4, delays=[Delay(3, "data", 9 * MS)]))
    for node in (0, 1):
        write_light_run(tmp_path / f"node{node}", [replace(one, node=1 - node) for one in records[2 * node :][:2]])
    result = read_ranks(tmp_path)  # torchrun numbered the machines the other way round
    assert [(one.rank, one.node) for one in result.ranks] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    _assert_found(result, 3, "data", 9 * MS, with_module=False)


def test_the_number_of_workers_does_not_change_a_byte(tmp_path: Path) -> None:
    run = write_kineto_run(tmp_path / "run", simulate(3, 3, [Delay(2, "forward", 9 * MS)]))
    one, two = (build_ranks_document(read_ranks(run, workers=workers), "run").data for workers in (1, 2))
    assert one == two
    assert one["culprit"]["rank"] == 2


def test_a_worker_gets_a_path_and_hands_back_columns_in_place_of_collectives(tmp_path: Path) -> None:
    lines = simulate(2, 20)
    run = write_light_run(write_kineto_run(tmp_path / "run", lines), light_records(lines))
    for source in find_sources(run):
        assert len(pickle.dumps(source)) < 1000
        for rank in reduce_source(source).ranks:
            assert len(rank.calls) == 20
            assert not rank.record.steps


def test_a_record_that_names_more_ranks_than_any_job_has_is_refused() -> None:
    records = light_records(simulate(2, 2))
    with pytest.raises(TraceError, match="not compared"):
        compare_records([records[0], replace(records[1], world_size=10**15)])


_MORE_WORK = [Delay(1, "kernels", 9 * MS)]
_SLOW_LAUNCHES = [Delay(rank, "launch", 9 * MS) for rank in (0, 2, 3)]


def _with_untimed_gather(record: LightRecord) -> LightRecord:
    """Return the record with one more collective in each step, of which the call alone is known."""
    twice = with_another_call(record, kind=["all_reduce", "all_gather"], sequence=[0, 1])
    steps = []
    for number, step in enumerate(twice.steps):
        calls = step.collectives
        columns = {"start_ns": [calls.start_ns[0], None], "end_ns": [calls.end_ns[0], None]}
        sequence = [2 * number, 2 * number + 1]
        steps.append(replace(step, collectives=replace(calls, **columns, sequence=sequence)))  # type: ignore[arg-type]
    return replace(twice, steps=tuple(steps))


def _record_some(
    folder: Path, recorded: Sequence[Delay], unrecorded: Sequence[Delay], *, is_timed: bool = True
) -> list[ReducedRank]:
    """Return four ranks with traces of four of 24 steps, and light records of all, each with delays of its own."""
    records = light_records(simulate(4, 24, unrecorded))
    run = write_light_run(folder, records if is_timed else [*map(_with_untimed_gather, records)])
    light = {rank: read_light_columns(path) for rank, path in Run(run).light_records.items()}
    lines = [line.part(10, 14) for line in simulate(4, 24, recorded)]
    return reduce_ranks(open_trace(write_nsys(folder / "trace.sqlite", lines)), light)


@pytest.mark.parametrize(
    ("recorded", "unrecorded", "is_named"),
    [
        ([*_MORE_WORK, *_SLOW_LAUNCHES], _MORE_WORK, True),
        # Nobody waits for it without a profiler either.
        ([*_MORE_WORK, *_SLOW_LAUNCHES], [], False),
        # They wait, but not for its kernels, or for these the lesser part.
        (_SLOW_LAUNCHES, [Delay(1, "forward", 9 * MS)], False),
        ([Delay(1, "kernels", 4 * MS), *_SLOW_LAUNCHES], [Delay(1, "forward", 9 * MS)], False),
        # They wait for another one.
        ([*_MORE_WORK, *_SLOW_LAUNCHES], [Delay(2, "forward", 9 * MS)], False),
    ],
)
def test_a_rank_that_computes_more_is_named_by_steps_without_the_profiler_that_hides_it(
    tmp_path: Path, recorded: list[Delay], unrecorded: list[Delay], is_named: bool
) -> None:
    ranks = _record_some(tmp_path / "run", recorded, unrecorded)
    assert compare_ranks(replace(rank, light=None) for rank in ranks).verdict.culprit is None
    result = compare_ranks(ranks)
    if not is_named:
        assert result.verdict.culprit is None
        return
    culprit = late_rank(result)
    assert (culprit.rank, culprit.cause, culprit.phase, culprit.module) == (1, "kernels", "forward", "layers.1")
    assert culprit.late_ns == pytest.approx(9 * MS, rel=0.02)
    assert culprit.extra_ns == pytest.approx(9 * MS, rel=0.02)
    assert culprit.steps == 18
    assert culprit.unrecorded_ns == pytest.approx(35 * MS, rel=0.05)
    assert describe_ranks(result)[-1] == (
        "These times are of steps without a profiler; figures below are of those with one, whose hosts are too slow to"
        " show this"
    )


def test_where_waits_without_a_profiler_are_not_known_kernels_name_nobody(tmp_path: Path) -> None:
    ranks = _record_some(tmp_path / "run", [*_MORE_WORK, *_SLOW_LAUNCHES], _MORE_WORK, is_timed=False)
    assert compare_ranks(ranks).verdict.culprit is None
    ranks = _record_some(tmp_path / "other", [*_MORE_WORK, *_SLOW_LAUNCHES], _MORE_WORK)
    ranks[3] = replace(ranks[3], light=None)
    assert compare_ranks(ranks).verdict.culprit is None


@pytest.mark.parametrize(("share", "is_named"), [(0.29, False), (0.6, True)])
def test_kernels_that_a_waiting_collective_slows_are_no_more_work(tmp_path: Path, share: float, is_named: bool) -> None:
    """Rank 1 waits for the others where it was recorded, and its kernels run beside that by so much longer."""
    slow = [Delay(rank, "launch", 20 * MS) for rank in (0, 2, 3)]
    ranks = _record_some(tmp_path / "run", slow, [Delay(1, "forward", 5 * MS)])
    exact = ranks[1].exact
    assert exact is not None
    kernels = next(at for at, part in enumerate(exact.parts) if part[0] == "kernels")
    times_ns = exact.times_ns.copy()
    times_ns[:, kernels] += share * 20 * MS
    ranks[1] = replace(ranks[1], exact=replace(exact, times_ns=times_ns, exposed_ns=np.zeros(len(exact))))
    culprit = compare_ranks(ranks).verdict.culprit
    assert (culprit is not None) == is_named
    if culprit is not None:
        assert culprit.extra_ns == pytest.approx(5 * MS, rel=0.02), "no more than the others wait"


def test_hosts_are_as_much_slower_with_a_profiler_as_the_median_ranks_phases_say() -> None:
    """All take 4 ms of Python in a forward pass; in two of 24 steps, which were recorded, 8 ms, rank 3 24 ms."""
    always = [Delay(rank, "forward", 4 * MS) for rank in range(4)]
    recorded = [Delay(rank, "forward", (4 + 16 * (rank == 3)) * MS, every=12, first=11) for rank in range(4)]
    light = [reduce_record(one).steps for one in light_records(simulate(4, 24, [*always, *recorded]))]
    assert host_factor(light, {"step 11", "step 23"}) == pytest.approx(0.5, abs=0.01)
    assert host_factor(light, {"step 24"}) is None
    assert host_factor(light, set(light[0].names)) is None


def _between_phases(time_ns: int, **changes: Any) -> LineTime:
    line = LineTime("/me/train.py", 7, "main", "log", None, "main", 50, time_ns, 1, 0.0)
    return replace(line, **changes)


@pytest.mark.parametrize(
    ("lines", "within_ns", "is_named"),
    [
        ([[], [_between_phases(20 * MS)], []], 0, True),
        ([[], [_between_phases(11 * MS)], []], 0, True),
        ([[], [_between_phases(9 * MS)], []], 0, False),
        # The other ranks' Python takes as long without a profiler; what is known of one of them is not enough.
        ([[_between_phases(15 * MS)], [_between_phases(20 * MS)], [_between_phases(15 * MS)]], 0, False),
        ([[], [_between_phases(20 * MS)], None], 0, False),
        ([[], None, []], 0, False),
        # Lines of phases, of other threads and that wait for the GPU do not tell.
        ([[], [_between_phases(20 * MS, phase="forward")], []], 0, False),
        ([[], [_between_phases(20 * MS, thread="worker")], []], 0, False),
        ([[], [_between_phases(20 * MS, waits=1.0, waiting_ns=15 * MS)], []], 0, False),
        # Nor do any if most of what takes longer is within phases.
        ([[], [_between_phases(20 * MS)], []], 18 * MS, True),
        ([[], [_between_phases(40 * MS)], []], 25 * MS, False),
    ],
)
def test_lines_of_source_tell_a_ranks_own_python_between_phases_from_the_profilers(
    tmp_path: Path, lines: list[list[LineTime] | None], within_ns: int, is_named: bool
) -> None:
    delays = [Delay(1, "data", 20 * MS), Delay(1, "forward", within_ns), Delay(1, "launch", 16 * MS)]
    timelines = simulate(3, 2, delays)
    late = timelines[1]
    late.ranges = [(name, start, end - 20 * MS * (name == "data")) for name, start, end in late.ranges]
    run = write_kineto_run(tmp_path / "run", timelines)
    for rank, found in enumerate(lines):
        if found is not None:
            write_lines(run / name_of_rank(LINES, rank), RunLines(LineSteps(({"step_ns": 60 * MS},)), tuple(found)))
    verdict = read_ranks(run).verdict
    assert verdict.doubt == (None if is_named else "launches")
    if is_named:
        assert verdict.culprit is not None
        assert (verdict.culprit.rank, verdict.culprit.cause) == (1, "python")
        assert within_ns or verdict.culprit.phase == "before forward"


def test_the_report_says_who_is_late_and_which_ranks_cannot_be_read(tmp_path: Path) -> None:
    trace = write_nsys(tmp_path / "trace.sqlite", simulate(3, 3, [Delay(1, "forward", 20 * MS)]))
    assert "Rank 1 is late" in _section_of_ranks(trace)
    assert not _section_of_ranks(write_nsys(tmp_path / "one.sqlite", simulate(1, 3)))
    # A damaged light record leaves the rest.
    run = write_kineto_run(tmp_path / "run", simulate(2, 3))
    (run / "light.rank2.jsonl").write_text("{}\n{}\n")
    damaged = _section_of_ranks(run)
    assert '<p class="note">rank 2: ' in damaged
    assert "light.rank2.jsonl:1: not a line of a light record" in damaged


def _section_of_ranks(path: Path) -> str:
    return render_report(open_capture(path)).partition('<section id="ranks"')[2].partition("</section>")[0]


def test_a_report_shows_the_most_unusual_of_many_ranks(tmp_path: Path) -> None:
    records = light_records(simulate(40, 4, [Delay(31, "data", 9 * MS)]))
    section = _section_of_ranks(write_light_run(tmp_path / "run", records[:7] + records[8:]))
    assert '<td data-value="31"' in section
    assert "23 more ranks" in section
    assert "rank 7: it left no record" in section


def test_an_operator_that_waits_for_a_collective_does_not_compute(tmp_path: Path) -> None:
    # As FSDP2 does on a CPU: the operator that gathers the weights returns when all ranks are there.
    def events(step: int, rank: int) -> list[dict[str, object]]:
        begin = step * 60_000
        called, end = begin + 2_000 + rank * 30_000, begin + 34_000
        return [
            row("user_annotation", f"step {step}", begin, 55_000),
            row("user_annotation", "forward", begin + 1_000, 50_000),
            row("cpu_op", "c10d::_allgather_base_", called, end - called),
            row("user_annotation", "gloo:all_gather", called + 100, end - called - 100, 8),
            row("cpu_op", "aten::mm", end + 1_000, 10_000),
        ]

    result = read_ranks(write_two_hosts(tmp_path, 4, events))

    assert [one.parts["kernels"] for one in result.ranks] == [10 * MS, 10 * MS]
    found = late_rank(result)
    assert (found.rank, found.cause, found.phase, found.late_ns) == (1, "python", "forward", 30 * MS)


@pytest.mark.parametrize("is_light", [True, False])
def test_a_rank_that_is_slow_everywhere_has_all_of_its_extra_time_in_no_one_phase(
    tmp_path: Path, is_light: bool
) -> None:
    delays = [Delay(1, place, 9 * MS) for place in ("forward", "backward", "optimizer")]
    lines = simulate(4, 12, delays)
    path = tmp_path / "run"
    run = write_light_run(path, light_records(lines)) if is_light else write_kineto_run(path, lines)
    culprit = late_rank(read_ranks(run))
    assert (culprit.rank, culprit.cause, culprit.phase, culprit.module) == (1, "python", "", "")
    assert culprit.extra_ns == pytest.approx(27 * MS, rel=0.01)
