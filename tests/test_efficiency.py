"""The analysis of `profkit efficiency`: rows, verdicts, FLOPs of ranges, MFU."""

from __future__ import annotations

import gzip
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.efficiency.work import RunFacts
from profkit.analysis.summarize import summarize_capture
from profkit.errors import TraceError, UsageError
from profkit.reading import open_capture
from profkit.report.commands.efficiency import limit_words
from profkit.report.document import UNKNOWN
from profkit.run.work import FUSED, RunWork
from tests.conftest import ROOT
from tests.efficiency_runs import (
    MOVER,
    SMALL,
    make_ceilings,
    make_timed_run,
    notes_of,
    rows_by_path,
    two_steps_work,
    write_two_steps,
)
from tests.nsys_builder import NsysBuilder

KINETO = ROOT / "traces" / "small-train.kineto.json.gz"


def test_a_run_gives_every_range_its_work_by_its_path(tmp_path: Path) -> None:
    result = read_trace(make_timed_run(tmp_path)).efficiency()
    rows = rows_by_path(result)
    step, layers = rows["step *"], rows["step */forward/layer *"]
    assert (step.flops, step.least_bytes, step.needed_flops) == (2 * 9_100, 1_000, 2 * 9_099)
    assert (layers.instances, layers.flops, layers.other_flops, layers.least_bytes) == (4, 5_000, 40, 320)
    assert layers.busy_ns == 320
    assert layers.flops_per_s == pytest.approx(5_000 / 320e-9)
    assert layers.ceiling_share == pytest.approx(5_000 / 320 / 1_000)
    assert layers.bytes_per_s == pytest.approx(320 / 320e-9)
    assert layers.intensity == pytest.approx(5_040 / 320)
    assert (result.work_source, result.dtype, result.model_flops) == ("formula", "bf16", 9_000)
    numbered = rows_by_path(read_trace(tmp_path).efficiency(numbered=True))
    assert numbered["step 1/forward/layer 1"].flops == 1_500


def test_a_scripts_ranges_around_its_steps_do_not_hide_their_work(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("epoch 0", 0, 1_000)
    builder.range("step 0", 10, 900)
    builder.range("forward", 20, 800)
    builder.kernel(30, 100)
    run = make_timed_run(tmp_path)
    (run / "trace.sqlite").unlink()
    builder.write(run / "trace.sqlite")
    rows = rows_by_path(read_trace(run).efficiency())
    assert {path: row.flops for path, row in rows.items()} == {
        "epoch 0": None,
        "epoch 0/step 0": 9_100,
        "epoch 0/step 0/forward": 3_000,
    }


def test_mfu_and_hfu_use_unprofiled_time_and_the_datasheets_peak(tmp_path: Path) -> None:
    result = read_trace(make_timed_run(tmp_path)).efficiency()
    rows = rows_by_path(result)
    assert (result.model_flops, result.hardware_flops) == (9_000, 9_100)
    assert result.mfu == rows["step *"].mfu == pytest.approx(9_000 / (800e-9 * 989.5e12))
    assert result.hfu == rows["step *"].hfu == pytest.approx(9_100 / (800e-9 * 989.5e12))
    assert rows["step */forward"].hfu is None
    assert (result.peaks.source, result.peaks.flops_per_s) == ("measured", {"bf16": 1e12})


def test_mfu_of_one_process_on_several_gpus_is_of_all_of_them(tmp_path: Path) -> None:
    run = make_timed_run(tmp_path)
    with sqlite3.connect(run / "trace.sqlite") as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = correlationId % 2")
    result = read_trace(run).efficiency()
    assert {step.device for step in result.steps} == {0, 1}
    assert result.mfu == rows_by_path(result)["step *"].mfu == pytest.approx(9_000 / (800e-9 * 2 * 989.5e12))


def test_a_dtype_or_ceilings_that_contradict_the_run_are_refused(tmp_path: Path) -> None:
    run = make_timed_run(tmp_path)
    assert read_trace(run).efficiency(dtype="bf16").mfu == read_trace(run).efficiency().mfu is not None
    with pytest.raises(UsageError, match="matrix products in bf16, not in fp32"):
        read_trace(run).efficiency(dtype="fp32")
    (tmp_path / "c.json").write_text(json.dumps(make_ceilings("NVIDIA A100-SXM4-40GB")))
    with pytest.raises(UsageError, match="A100-SXM4-40GB, the capture on NVIDIA H200"):
        read_trace(write_two_steps(tmp_path / "t.sqlite")).efficiency(ceilings=tmp_path / "c.json")


def test_a_trace_without_a_run_takes_flops_from_payloads_and_leaves_the_rest_unknown(tmp_path: Path) -> None:
    result = read_trace(write_two_steps(tmp_path / "t.sqlite")).efficiency()
    rows = rows_by_path(result)
    assert (rows["step */forward/layer *"].flops, rows["step *"].flops) == (5_000, None)
    assert (result.work_source, result.model_flops, result.mfu, result.dtype) == ("payload", 9_000, None, None)
    assert rows["step */forward"].ceiling_share is None
    given = rows_by_path(read_trace(tmp_path / "t.sqlite").efficiency(dtype="bf16"))
    assert given["step */forward"].ceiling_share == pytest.approx(6_000 / 989.5e3 / 320)
    assert rows["step */forward"].least_bytes is rows["step */forward"].bytes_per_s is None


def test_payloads_of_other_domains_or_with_fractions_are_not_flops(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.domain(3, "theirs")
    builder.range("a", 0, 10, domain=3, int64Value=5)
    builder.range("b", 20, 30, doubleValue=5.0)
    for launch in (1, 21):
        builder.kernel(launch, 5)
    result = read_trace(builder.write(tmp_path / "t.sqlite")).efficiency()
    assert [row.flops for row in result.ranges] == [None, None]
    assert result.work_source is None


@pytest.mark.parametrize(("kernel", "at_peak_ns"), [("gemm", 3.0), (MOVER, None)])
def test_memory_bandwidth_is_explained_and_the_peak_only_where_it_limits_a_range(
    tmp_path: Path, kernel: str, at_peak_ns: float | None
) -> None:
    """Forward: 3,000 FLOPs at 1 TFLOP/s, 200 B at 500 GB/s, twice in 320 ns busy; it holds layers, each with its own.

    Of a range that moves data, the bytes that one kernel for all of it would move are no rate of its kernels.
    """
    result = read_trace(make_timed_run(tmp_path, kernel=kernel)).efficiency()
    forward = rows_by_path(result)["step */forward"]
    assert forward.verdict == ("memory-bound" if kernel == MOVER else "compute-bound")
    assert forward.roof_share == (None if at_peak_ns is None else pytest.approx(2 * at_peak_ns / 320))
    assert (f"{UNKNOWN}: the range moves data and holds others" in notes_of(result)) == (kernel == MOVER)
    assert ("\nmemory bandwidth: " in notes_of(result)) == (kernel == MOVER)


def test_ceilings_of_another_gpu_of_the_same_name_give_a_warning(tmp_path: Path) -> None:
    run, ours, theirs = make_timed_run(tmp_path), "GPU-78dab136-d5bd", "GPU-8443b058-24ca"
    manifest, ceilings = (json.loads((run / name).read_text()) for name in ("manifest.json", "ceilings.json"))
    for used, measured, count in ((ours, theirs, 1), (ours, ours, 0), (None, theirs, 0), (ours, None, 0)):
        manifest["conditions"] = {"gpu_uuid": used}
        ceilings["device"]["uuid"] = measured
        (run / "manifest.json").write_text(json.dumps(manifest))
        (run / "ceilings.json").write_text(json.dumps(ceilings))
        found = [one.message for one in read_trace(run).efficiency().warnings if one.code == "other-gpu"]
        assert found == ["the ceilings were measured on another NVIDIA H200 (GPU-8443b058) than the run's"] * count
    (run / "measured.json").write_text(json.dumps(make_ceilings()))
    assert not read_trace(run).efficiency(ceilings=run / "measured.json").warnings


@pytest.mark.parametrize(
    ("flops", "footer", "said"),
    [
        ({"bf16": 9_100}, "of 989.5 TFLOP/s bf16 or", "bf16 peak"),
        ({"bf16": 4_550, "fp32": 4_550}, "of 989.5 TFLOP/s bf16, 67.00 TFLOP/s fp32 or", "bf16 and fp32 peaks"),
        ({"bf16": 9_099, "fp32": 1}, "of 989.5 TFLOP/s bf16, 67.00 TFLOP/s fp32 or", "bf16 peak"),
    ],
)
def test_a_share_of_peak_says_the_peak_of_each_type_of_products(
    tmp_path: Path, flops: dict[str, int], footer: str, said: str
) -> None:
    """TF32 may be on in convolutions and off in other products: each is a share of its own peak."""
    run = make_timed_run(tmp_path, ceilings=False)
    work = two_steps_work()
    work["ranges"][0]["flops_by_dtype"] = flops
    (run / "work.json").write_text(json.dumps(work))
    assert footer in notes_of(read_trace(run).efficiency())
    summary = summarize_capture(open_capture(run))
    assert summary.work is not None
    assert summary.work.peak_name == said


def test_float32_products_with_high_precision_are_tf32(tmp_path: Path) -> None:
    run = make_timed_run(tmp_path, work=False)
    manifest = json.loads((run / "manifest.json").read_text())
    for dtype, precision, expected in (("fp32", "highest", "fp32"), ("fp32", "high", "tf32"), ("bf16", "high", "bf16")):
        manifest |= {"workload": {"dtype": dtype}, "float32_matmul_precision": precision}
        (run / "manifest.json").write_text(json.dumps(manifest))
        assert read_trace(run).efficiency().dtype == expected


def test_steps_of_several_contexts_keep_their_own_flops_and_times(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for number, (context, flops) in enumerate(((128, 3_000), (256, 9_000))):
        at = 10_000 * number
        builder.range(f"context {context}", at, at + 1_000)
        builder.range("step 0", at + 1, at + 901)
        builder.range("forward", at + 1, at + 901, int64Value=flops)
        builder.kernel(at + 10, 500)
    make_timed_run(tmp_path, work=False)
    (tmp_path / "trace.sqlite").unlink()
    builder.write(tmp_path / "trace.sqlite")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["clean"]["steps"] = [{"step_ns": 600, "context": 128}, {"step_ns": 700, "context": 256}]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    result = read_trace(tmp_path).efficiency(numbered=True)
    rows = rows_by_path(result)
    assert rows["context 128/step 0"].mfu == pytest.approx(3_000 / (600e-9 * 989.5e12))
    assert rows["context 256/step 0"].mfu == pytest.approx(9_000 / (700e-9 * 989.5e12))
    assert result.mfu is result.model_flops is None
    folded = rows_by_path(read_trace(tmp_path).efficiency())
    assert [row.mfu for row in folded.values()] == [None] * len(folded)


def test_one_call_launches_all_kernels_of_a_graph(captures: Path) -> None:
    path = captures / "graph_nodes.nsys2023.sqlite"
    rows = rows_by_path(read_trace(path).efficiency())
    connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    kernels = "SELECT correlationId, globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL"
    (launches,) = connection.execute(f"SELECT count(*) FROM (SELECT DISTINCT * FROM ({kernels}))").fetchone()
    connection.close()
    assert rows["step *"].launch_count == launches < rows["step *"].kernel_count == 2_308


def test_a_real_trace_is_launch_bound_by_its_largest_part() -> None:
    rows = rows_by_path(read_trace(SMALL).efficiency(dtype="fp32"))
    assert {path: row.verdict for path, row in rows.items() if path.count("/") < 2} == {
        "step *": "launch-bound",
        "step */forward": "launch-bound",
        "step */loss": "launch-bound",
        "step */backward": "launch-bound",
        "step */optimizer": "memory-bound",
    }
    assert rows["step */forward"].flops == 2 * 257_320_550_400


def test_a_graph_traced_whole_is_one_launch_that_computes(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("step 0", 0, 1_000)
    builder.graph(100, 200, 800)
    (row,) = read_trace(builder.write(tmp_path / "t.sqlite")).efficiency().ranges
    assert (row.launch_count, row.busy_ns, row.kernel_count) == (1, 600, 1)
    assert (row.gpu.span_ns, row.gpu.computing_ns, row.gpu.launching_ns) == (1000, 600, 1)


def test_the_idle_time_of_a_kineto_trace_equals_that_of_its_raw_events() -> None:
    """Every step waits for the device, and one stream runs one thing at a time: idle is wall less all that ran."""
    events = json.loads(gzip.decompress(KINETO.read_bytes()))["traceEvents"]
    timed = [(e, round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in events if e.get("ph") == "X"]
    steps = {e["name"]: (at, at + long) for e, at, long in timed if e.get("cat") == "user_annotation"}
    for step in read_trace(KINETO).efficiency().steps:
        start, end = steps[step.name]
        ran = [
            long
            for e, at, long in timed
            if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and start <= at and at + long <= end
        ]
        # Times of the file are rounded to a nanosecond apart from their durations.
        assert step.gpu.idle_ns == pytest.approx(end - start - sum(ran), abs=2 * len(ran))
        assert step.gpu.span_ns == step.wall_ns


def test_one_rank_has_the_same_gpu_time_alone_and_among_all(captures: Path) -> None:
    steps = read_trace(captures / "ddp.nsys2025.sqlite", rank=1).efficiency().steps
    assert [(step.rank, step.device, step.waiting_ns) for step in steps] == [(1, 1, None)] * 2
    both = read_trace(captures / "ddp.nsys2025.sqlite").efficiency().steps
    assert [step.gpu for step in steps] == [step.gpu for step in both if step.rank == 1]


def test_step_count_is_known_if_all_ranges_lie_in_measured_steps(captures: Path) -> None:
    opened = read_trace(SMALL)
    assert opened.efficiency().step_count == 2
    assert opened.efficiency("forward").step_count == 2
    assert opened.efficiency("step 1").step_count == 1
    assert opened.efficiency(numbered=True).step_count is None
    ddp = read_trace(captures / "ddp.nsys2025.sqlite")
    assert ddp.efficiency().step_count is None, "NCCL opens ranges outside the steps"
    assert ddp.efficiency("step *").step_count == 2, "of both ranks"
    two = read_trace(captures / "two_gpus.nsys2025.sqlite")
    assert two.efficiency("step *").step_count == 2, "ranges on autograd threads included"


def test_a_step_within_a_step_is_part_of_the_outer_one(tmp_path: Path) -> None:
    """A program opens `step` and a recorder `step N` around it: two steps, with the work and the FLOPs of two."""
    builder = NsysBuilder()
    for step in (0, 1):
        at = 10_000 * step
        builder.range(f"step {step}", at, at + 1_000)
        builder.range("step", at + 10, at + 900)
        builder.range("forward", at + 20, at + 300, int64Value=3_000)
        builder.kernel(at + 30, 50)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    result = opened.efficiency()
    assert (len(result.steps), result.step_count, result.model_flops) == (2, 2, 3_000)
    assert opened.self_check.findings == ()


def test_a_range_that_mostly_waits_names_the_rank_that_it_waits_for(captures: Path) -> None:
    """Rank 1 arrives last: rank 0 waits for 51.6 of the 60.6 ms that both spend in all-reduces of the steps."""
    opened = read_trace(captures / "ddp.nsys2025.sqlite")
    row = rows_by_path(opened.efficiency("step *"))["step */backward/ncclAllReduce"]
    waited_ns = sum(step.waiting_ns or 0 for step in opened.efficiency().steps)
    assert (row.verdict, row.waiting_for) == ("communication-bound", 1)
    assert waited_ns > row.busy_ns / 2
    alone = opened.of_rank(0).efficiency("step *")
    assert {row.waiting_for for row in alone.ranges} == {None}, "one rank does not know"


@pytest.mark.parametrize(
    ("name", "thread", "loading_ns", "words"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 7, 900_000, "data loading"),
        ("data loading", 7, 900_000, "data loading"),
        ("prepare the batch", 7, 0, "Python"),
        ("enumerate(DataLoader)#worker", 8, 0, "Python"),
    ],
)
def test_idle_time_in_a_data_loaders_range_is_data_loading(
    tmp_path: Path, name: str, thread: int, loading_ns: int, words: str
) -> None:
    """A step of 1 ms, of which the first 0.9 ms pass before its first CUDA call; a worker's thread launches nothing."""
    builder = NsysBuilder()
    builder.range("step 0", 0, 1_000_000, tid=7)
    builder.range(name, 0, 900_000, tid=thread)
    builder.kernel(900_000, 90_000, start=900_010, tid=7)
    result = read_trace(builder.write(tmp_path / "t.sqlite")).efficiency()
    row = rows_by_path(result)["step 0"]
    assert (row.verdict, row.data_loading_ns) == ("host-bound", loading_ns)
    assert limit_words(row) == words


def test_without_gpu_work_there_is_no_efficiency() -> None:
    for name in ("tiny-train-cpu.kineto.json.gz", "tiny-train-cpu.nsys2023.sqlite"):
        with pytest.raises(TraceError, match="recorded no GPU"):
            read_trace(ROOT / "traces" / name).efficiency()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 200), st.integers(0, 1)), min_size=1, max_size=8))
def test_the_parts_of_every_row_sum(tmp_path_factory: pytest.TempPathFactory, some: list[tuple[int, int, int]]) -> None:
    builder = NsysBuilder()
    builder.range("step 0", 0, 500)
    builder.range("forward", 100, 300)
    builder.range("step 1", 500, 950)
    for launch, duration, device in some:
        builder.kernel(launch, duration, device=device)
    result = read_trace(builder.write(tmp_path_factory.mktemp("t") / "t.sqlite")).efficiency()
    for parts in (result.capture, *(row.gpu for row in result.ranges if row.gpu is not None)):
        assert parts.busy_ns + parts.idle_ns == parts.span_ns
        assert min(vars(parts).values()) >= 0
    steps = [row for row in result.ranges if row.name == "step *"]
    # Windows overlap where kernels run at once; in the row the common time counts once.
    assert steps[0].gpu is None or steps[0].gpu.span_ns <= sum(step.gpu.span_ns for step in result.steps)


def test_what_is_not_counted_is_said_and_fused_kernels_of_compiled_code_in_a_line_of_their_own() -> None:
    work = RunWork(1, "counted", "bf16", (), 0, (FUSED, "triton::f"))
    facts = RunFacts(None, None, work, None, None, None, None)
    assert {one.code: one.message for one in facts.find_doubts()} == {
        "uncounted-fused": "of fused kernels of compiled code only matrix products are counted: their other work and "
        "their bytes are unknown, so their rates and % of peak are too low",
        "uncounted": "operators without a FLOP formula, counted as no work: triton::f",
    }
    assert not [*replace(facts, work=replace(work, missing=())).find_doubts()]
