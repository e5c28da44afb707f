"""`profkit efficiency`: rows, verdicts, FLOPs of ranges, MFU, its tables and the roofline."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from profkit import read_trace
from profkit.analysis.efficiency import Amount, Peaks, RunFacts
from profkit.analysis.efficiency.limits import MOVERS, Roofline, Verdict, build_roofline, judge
from profkit.analysis.efficiency.summary import EfficiencyResult, count_launches
from profkit.analysis.kernels import CATEGORIES
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.time_account.account import recorded_idle, unprofiled_idle
from profkit.analysis.time_account.gpu_time import DataWait, GpuParts
from profkit.analysis.tree.range_tree import build_nodes
from profkit.errors import TraceError, UsageError
from profkit.reading import open_capture
from profkit.report.commands.efficiency import build_efficiency_document
from profkit.report.commands.steps import limit_words
from profkit.report.document import Lines
from profkit.report.plots import plot_roofline, rate_of
from profkit.run.work import FUSED, RunWork
from tests.conftest import ROOT
from tests.efficiency_runs import (
    MOVER,
    SMALL,
    change_manifest,
    make_ceilings,
    make_small_run,
    make_timed_run,
    notes_of,
    rows_by_path,
    two_steps_work,
    write_two_steps,
)
from tests.golden import check_transcript
from tests.in_process import check_command, run_command
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


def test_needed_flops_that_an_older_file_lacks_are_unknown_and_the_rest_is_known(tmp_path: Path) -> None:
    run = make_timed_run(tmp_path)
    work = two_steps_work()
    del work["ranges"][3]["needed_flops"]
    (run / "work.json").write_text(json.dumps(work))
    rows = rows_by_path(read_trace(run).efficiency())
    assert (rows["step */forward/layer *"].flops, rows["step */forward/layer *"].needed_flops) == (5_000, None)
    assert rows["step */forward"].needed_flops == 2 * 2_999


def test_a_scripts_ranges_around_its_steps_do_not_hide_their_work(tmp_path: Path) -> None:
    builder = NsysBuilder(("epoch 0", 0, 1_000), ("step 0", 10, 900), ("forward", 20, 800))
    builder.kernel(30, 100)
    rows = rows_by_path(read_trace(make_timed_run(tmp_path, builder)).efficiency())
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
def test_the_peak_of_memory_is_no_roof_of_a_range_that_holds_others(
    tmp_path: Path, kernel: str, at_peak_ns: float | None
) -> None:
    """Forward: 3,000 FLOPs at 1 TFLOP/s, 200 B at 500 GB/s, twice in 320 ns busy; it holds layers, each with its own.

    Of a range that moves data, the bytes that one kernel for all of it would move are no rate of its kernels.
    """
    result = read_trace(make_timed_run(tmp_path, kernel=kernel)).efficiency()
    forward = rows_by_path(result)["step */forward"]
    assert forward.verdict == ("memory-bound" if kernel == MOVER else "compute-bound")
    assert forward.roof_share == (None if at_peak_ns is None else pytest.approx(2 * at_peak_ns / 320))


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
    for dtype, precision, expected in (("fp32", "highest", "fp32"), ("fp32", "high", "tf32"), ("bf16", "high", "bf16")):
        change_manifest(run, workload={"dtype": dtype}, conditions={"float32_matmul_precision": precision})
        assert read_trace(run).efficiency().dtype == expected


def test_steps_of_several_contexts_keep_their_own_flops_and_times(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for number, (context, flops) in enumerate(((128, 3_000), (256, 9_000))):
        at = 10_000 * number
        builder.ranges((f"context {context}", at, at + 1_000), ("step 0", at + 1, at + 901))
        builder.range("forward", at + 1, at + 901, int64Value=flops)
        builder.kernel(at + 10, 500)
    make_timed_run(tmp_path, builder, work=False)
    change_manifest(tmp_path, clean={"steps": [{"step_ns": 600, "context": 128}, {"step_ns": 700, "context": 256}]})
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


def test_a_graph_traced_whole_is_one_launch_that_computes(tmp_path: Path) -> None:
    builder = NsysBuilder(("step 0", 0, 1_000))
    builder.graph(100, 200, 800)
    (row,) = read_trace(builder.write(tmp_path / "t.sqlite")).efficiency().ranges
    assert (row.launch_count, row.busy_ns, row.kernel_count) == (1, 600, 1)
    assert (row.gpu.span_ns, row.gpu.computing_ns, row.gpu.launching_ns) == (1000, 600, 1)


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
        builder.ranges((f"step {step}", at, at + 1_000), ("step", at + 10, at + 900))
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
    assert [limit_words(row, late) for late in (1, 0, None)] == ["waiting for rank 1", *["waiting for other ranks"] * 2]


def test_no_range_names_a_rank_of_which_nobody_can_tell_whether_it_is_late(captures: Path) -> None:
    said = run_command("efficiency", captures / "ddp.nsys2025.sqlite").stdout
    assert "Whether a rank is late cannot be told: rank 1 costs the others most" in said
    assert "waiting for other ranks" in " ".join(said.split())
    assert "waiting for rank" not in said


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
    builder = NsysBuilder(("step 0", 0, 500), ("forward", 100, 300), ("step 1", 500, 950))
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


# -- how it is printed -----------------------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("read_once")


def test_each_way_of_asking_prints_what_it_did() -> None:
    """People read averages per step, or totals; a screen of 80 columns holds the tables; CSV and JSON hold all."""
    calls = [
        *((), ("--totals",), ("--range", "atention")),
        *(("--range", "attention", "--format", style) for style in ("csv", "markdown")),
        ("--range", "forward/layer */ffn", "--format", "json"),
    ]
    check_transcript("efficiency", [("efficiency", SMALL, *words) for words in calls])


def test_the_table_of_ranks_fits_a_screen_and_a_failed_capture_says_so_first(captures: Path) -> None:
    lines = run_command("efficiency", captures / "ddp.nsys2025.sqlite", "--range", "step *").stdout.splitlines()
    tables = [line for line in lines if line.startswith(("─", "step", " "))]
    assert len(tables) > 10
    assert max(map(len, tables)) <= 80
    done = run_command("efficiency", captures / "lossy.nsys2023.sqlite", "--strict")
    assert done.returncode == 3
    assert done.stdout.startswith("SELF-CHECK FAILED")


def _measure(folder: Path, range: str | None = None, *, numbered: bool = False) -> EfficiencyResult:
    """Two steps of 10 ms: in layer 0 the GPU is idle while the host launches, in the optimizer outside CUDA."""
    builder = NsysBuilder()
    for step in (0, 1):
        at = 100_000_000 * step
        builder.ranges((f"step {step}", at, at + 10_000_000), ("forward", at, at + 6_000_000))
        builder.range("layer 0", at, at + 3_000_000)
        builder.call(at, name="cudaMalloc_v3020", duration=1_150_000 + 50_000 * step)
        builder.kernel(at + 1_210_000 + 50_000 * step, 1_700_000, start=at + 1_300_000)
        builder.range("layer 1", at + 3_000_000, at + 6_000_000)
        builder.kernel(at + 3_010_000, 2_950_000, start=at + 3_020_000)
        builder.range("optimizer", at + 6_000_000, at + 10_000_000)
        builder.kernel(at + 6_010_000, 2_200_000, start=at + 6_020_000)
        builder.kernel(at + 9_900_000, 90_000, start=at + 9_910_000)
    trace = builder.write(folder / f"{range}.sqlite")
    return read_trace(trace).efficiency(range, numbered=numbered)


def test_the_longest_wait_is_named_first_and_ranges_within_a_named_one_are_left_out(tmp_path: Path) -> None:
    result = _measure(tmp_path)
    shares = {row.name: row.launching_share for row in result.ranges}
    assert shares["layer *"] == pytest.approx(0.206, abs=0.001), "forward, which lies around it, is named"
    assert _also_idle(result) == ["optimizer 42.7% (Python), forward 20.6% (kernel launches)"]


@pytest.mark.parametrize(
    ("range", "said"),
    [
        ("layer 0", ["step 1/forward/layer 0 42.0% (kernel launches), step 0/forward/layer 0 40.3% (kernel launches)"]),
        ("step 1", ["optimizer 42.7% (Python), forward 21.0% (kernel launches)"]),
        ("layer 1", []),  # nothing waits
    ],
)
def test_ranges_of_one_name_are_named_by_the_shortest_path_that_no_other_has(
    tmp_path: Path, range: str, said: list[str]
) -> None:
    assert _also_idle(_measure(tmp_path, range, numbered=True)) == said


def _also_idle(result: EfficiencyResult) -> list[str]:
    """Return the line on host waits, if there is one, without its first words."""
    notes = build_efficiency_document(result, ()).parts[-1]
    assert isinstance(notes, Lines)
    start = "Also idle for more than 20 % for one reason: "
    return [line.removeprefix(start) for line in notes.lines if line.startswith(start)]


def test_operators_without_a_formula_are_named_where_flops_are_and_no_care_of_the_summary(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    work = json.loads((run / "work.json").read_text())
    (run / "work.json").write_text(json.dumps(work | {"missing": ["aten::leaky_relu"]}))
    assert "counted as no work: aten::leaky_relu" in run_command("efficiency", run).stderr
    assert "leaky_relu" not in run_command("summary", run, "--all").stdout


def test_where_no_step_was_counted_the_table_and_the_summary_say_why(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    for name in ("work.json", "trace.sqlite"):
        (run / name).unlink()
    builder = NsysBuilder()
    builder.add("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
    for step in (0, 1):
        builder.range(f"step {step}", 1_000 * step, 1_000 * step + 900)
        builder.kernel(1_000 * step + 10, 800, name="ampere_sgemm_64x32_nt")
    builder.write(run / "trace.sqlite")
    reason = "compiled code needs --flops"
    change_manifest(run, processes=[{"uncounted": reason}])
    assert f"FLOPs and % of peak are unknown: {reason}." in " ".join(run_command("efficiency", run).stdout.split())
    assert f"of kernel time (% of peak: {reason})" in " ".join(run_command("summary", run).stdout.split())
    change_manifest(run, processes=[])
    shown = " ".join(run_command("efficiency", run).stdout.split())
    assert "this run counted none; `profkit run` does so unless --no-flops is given." in shown
    assert "% of peak" not in run_command("summary", run).stdout, "of an older run the summary says nothing"


# -- verdicts --------------------------------------------------------------------------------------------------------


PEAKS = Peaks("measured", "H200", {"fp32": 50e12, "bf16": 700e12}, 4e12)
KNOWN = Roofline(20.0, 10.0)
_MOVER = "void at::native::vectorized_elementwise_kernel<4, MulFunctor>(int)"


def _parts(**given: int) -> GpuParts:
    names = [name for name in GpuParts.__dataclass_fields__ if name != "span_ns"]
    parts = {name: given.get(name, 0) for name in names}
    return GpuParts(span_ns=sum(v for name, v in parts.items() if not name.startswith("overlapped")), **parts)


def _judge(parts: GpuParts | None, roofline: Roofline = KNOWN, *, factor: float | None = None, **more: Any) -> Verdict:
    idle = None if parts is None else recorded_idle(parts, DataWait())
    if parts is not None and factor is not None:
        idle = unprofiled_idle(parts, DataWait(), round(parts.idle_ns * factor))
    return judge(parts, idle, 100, roofline, **{"only_communicates": False, **more})


@pytest.mark.parametrize(
    ("parts", "roofline", "word"),
    [
        (_parts(computing_ns=40, launching_ns=60), KNOWN, "launch-bound"),
        (_parts(computing_ns=40, launching_ns=25, outside_cuda_ns=35), KNOWN, "compute-bound"),
        (_parts(computing_ns=40, outside_cuda_ns=30, synchronising_ns=30), KNOWN, "host-bound"),
        (_parts(computing_ns=40, exposed_communication_ns=60), KNOWN, "communication-bound"),
        (_parts(computing_ns=40, exposed_copy_ns=60), KNOWN, "memory-bound"),
        (_parts(computing_ns=100), Roofline(10.0, 20.0), "memory-bound"),
        (_parts(computing_ns=100), Roofline(50.0, None), "compute-bound"),
        (_parts(computing_ns=100), Roofline(49.0, None), None),
        (_parts(computing_ns=100), Roofline(None, 90.0), None),
        (_parts(), KNOWN, None),
        (None, KNOWN, None),
    ],
)
def test_the_largest_part_of_the_time_decides(parts: GpuParts | None, roofline: Roofline, word: str | None) -> None:
    assert _judge(parts, roofline).word == word


def test_idle_time_is_scaled_to_unprofiled_time_and_communication_alone_judged_as_such() -> None:
    assert _judge(_parts(computing_ns=40, launching_ns=60), factor=0.5).word == "compute-bound"
    others_compute = _parts(computing_ns=80, exposed_communication_ns=20)
    assert _judge(others_compute, only_communicates=True).word == "communication-bound"


@pytest.mark.parametrize(("share", "word"), [(0.5, "compute-bound"), (0.51, "memory-bound")])
def test_a_range_with_mostly_data_moving_kernels_is_memory_bound(share: float, word: str) -> None:
    parts = _parts(computing_ns=100)
    assert _judge(parts, mover_share=share).word == word
    unknown = Roofline(None, 90.0)
    assert _judge(parts, unknown, mover_share=share).word == (word if word == "memory-bound" else None)


def test_kernels_count_as_movers_by_their_names(tmp_path: Path) -> None:
    """Most FLOPs at the peak, and 60 of 100 ns in an elementwise kernel."""
    assert MOVERS.issubset(CATEGORIES)
    assert not MOVERS & {"gemm", "attention", "communication", "graph", "other"}
    builder = NsysBuilder()
    builder.range("a", 0, 1_000, int64Value=10**9)
    builder.kernel(10, 40, name="ampere_sgemm_64x32_nt", start=20)
    builder.kernel(11, 60, name=_MOVER, start=60)
    attribution = read_trace(builder.write(tmp_path / "t.sqlite")).attribution
    nodes = build_nodes(attribution, numbered=True)
    _, own_ns, moving_ns = count_launches(attribution, nodes, np.arange(1))
    assert (own_ns.tolist(), moving_ns.tolist()) == ([100], [60])


def test_other_operations_count_at_the_peak_of_fp32() -> None:
    amount = Amount(flops=1_400, other_flops=500, least_bytes=8_000, flops_by_dtype={"bf16": 1_400})
    assert build_roofline(amount, PEAKS) == Roofline(pytest.approx(1_400 / 700e3 + 500 / 50e3), pytest.approx(2.0))
    assert build_roofline(Amount(flops=1, flops_by_dtype={"fp8": 1}), PEAKS).compute_ns is None
    assert build_roofline(amount, None) == Roofline(None, None)


# -- the roofline ----------------------------------------------------------------------------------------------------


PNG = b"\x89PNG\r\n\x1a\n"


def _draw(run: Path, drawn: list[Figure]) -> Figure:
    opened = read_trace(run)
    plot_roofline(opened.efficiency(), run / "r.png")
    figure: Figure = drawn[-1]
    return figure


def test_every_point_lies_at_its_figures_under_the_measured_roof_with_a_number_whose_name_stands_beside(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    """Phases have shapes, and areas grow with the time."""
    figure = _draw(make_small_run(tmp_path), drawn)
    (axes,) = figure.axes
    rows = {(row.intensity, rate_of(row) / 1e12): row for row in read_trace(tmp_path).efficiency().ranges}
    points = {tuple(point) for one in axes.collections for point in one.get_offsets().tolist()}
    assert len(rows) == len(points) == 12
    for point, range_point in zip(sorted(points), sorted(rows), strict=True):
        assert point == pytest.approx(range_point)
    assert {line.get_linestyle() for line in axes.lines} == {"-"}
    assert axes.lines[0].get_ydata()[-1] == 50
    assert axes.lines[0].get_xdata()[1] == pytest.approx(50 / 4)
    assert "peaks measured" in _texts(figure)

    by_rate = {rate: row for (_, rate), row in rows.items()}
    notes = [text for text in axes.texts if isinstance(text, Annotation) and text.xy[1] in by_rate]
    names = dict(line.split("  ", 1) for line in axes.texts[-1].get_text().splitlines())
    assert {text.get_text(): by_rate[text.xy[1]].name for text in notes} == names
    assert len(names) == 12

    longest = max(row.busy_ns for row in by_rate.values())
    shapes: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for one in axes.collections:
        for (_, rate), area in zip(one.get_offsets().tolist(), one.get_sizes().tolist(), strict=True):
            row = by_rate[rate]
            assert area == pytest.approx(max(420 * row.busy_ns / longest, 18))
            for phase, found in shapes.items():
                if phase in row.path.split("/"):
                    found.add(len(one.get_paths()[0].vertices))
    assert len(shapes["forward"]) == len(shapes["backward"]) == 1
    assert shapes["forward"] != shapes["backward"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"forward", "backward", "optimizer"} < set(legend)
    assert legend[-1].startswith("area: GPU time, the largest ")


def test_roofs_of_the_datasheet_are_dashed_and_say_so_and_close_ones_share_a_label(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    figure = _draw(make_small_run(tmp_path, ceilings=False), drawn)
    assert {line.get_linestyle() for line in figure.axes[0].lines} == {"--"}
    assert "peaks from the datasheet" in _texts(figure)
    assert "bf16 989.5, fp16 989.5 TFLOP/s" in _texts(figure)


def test_a_trace_without_known_bytes_is_refused(tmp_path: Path) -> None:
    opened = read_trace(SMALL)
    with pytest.raises(TraceError, match=r"FLOPs and least bytes of its ranges are unknown.*`profkit run` counts them"):
        plot_roofline(opened.efficiency(dtype="fp32"), tmp_path / "r.png")
    run = make_small_run(tmp_path, ceilings=False)
    change_manifest(run, gpu="a GPU of no datasheet")
    opened = read_trace(run)
    with pytest.raises(TraceError, match=r"the GPU's peaks are unknown.*`profkit ceilings`"):
        plot_roofline(opened.efficiency(), tmp_path / "r.png")


def test_the_command_writes_a_png(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    check_command("efficiency", run, "--numbered", "--plot", tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)
    assert run_command("efficiency", run, "--plot", tmp_path / "r.pdf").returncode == 2
    assert run_command("efficiency", run, "--plot", run / "work.json").returncode == 2


def _texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.axes[0].texts)
