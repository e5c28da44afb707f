"""How `profkit efficiency` prints its result: the tables, the verdicts with their evidence, and the roofline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from profkit import read_trace
from profkit.analysis.efficiency.limits import MOVERS, Roofline, Verdict, build_roofline, judge
from profkit.analysis.efficiency.summary import EfficiencyResult, count_launches
from profkit.analysis.efficiency.work import Amount, Peaks
from profkit.analysis.kernels.categories import CATEGORIES
from profkit.analysis.time_account.account import recorded_idle, unprofiled_idle
from profkit.analysis.time_account.gpu_time import DataWait, GpuParts
from profkit.analysis.tree.range_tree import build_nodes
from profkit.errors import TraceError
from profkit.report.commands.efficiency import build_efficiency_document
from profkit.report.document import Lines
from profkit.report.plots import plot_roofline, rate_of
from tests.efficiency_runs import SMALL, make_small_run
from tests.golden import check_transcript
from tests.in_process import manifest_of, run_command
from tests.nsys_builder import NsysBuilder

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
        builder.range(f"step {step}", at, at + 10_000_000)
        builder.range("forward", at, at + 6_000_000)
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


def test_where_no_step_was_counted_the_table_and_the_summary_say_why(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    for name in ("work.json", "trace.sqlite"):
        (run / name).unlink()
    shutil.copyfile(
        SMALL.with_name("small-train.kineto.json.gz"), run / "trace.json.gz"
    )  # whose ranges have no payload
    reason = "compiled code needs --flops"
    manifest = manifest_of(run)
    (run / "manifest.json").write_text(json.dumps(manifest | {"processes": [{"uncounted": reason}]}))
    assert f"FLOPs and % of peak are unknown: {reason}." in " ".join(run_command("efficiency", run).stdout.split())
    assert f"of kernel time (% of peak: {reason})" in " ".join(run_command("summary", run).stdout.split())
    (run / "manifest.json").write_text(json.dumps(manifest))
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


def test_every_point_lies_at_its_figures_and_under_the_measured_roof(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = _draw(make_small_run(tmp_path), drawn)
    (axes,) = figure.axes
    rows = read_trace(tmp_path).efficiency().ranges
    expected = {(row.intensity, rate_of(row) / 1e12) for row in rows}
    points = {tuple(point) for one in axes.collections for point in one.get_offsets().tolist()}
    assert len(rows) == len(points) == 12
    for point, range_point in zip(sorted(points), sorted(expected), strict=True):
        assert point == pytest.approx(range_point)
    assert {line.get_linestyle() for line in axes.lines} == {"-"}
    assert axes.lines[0].get_ydata()[-1] == 50
    assert axes.lines[0].get_xdata()[1] == pytest.approx(50 / 4)
    assert "peaks measured" in _texts(figure)


def test_every_point_has_a_number_whose_name_stands_beside(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = _draw(make_small_run(tmp_path), drawn)
    (axes,) = figure.axes
    names = dict(line.split("  ", 1) for line in axes.texts[-1].get_text().splitlines())
    rows = {rate_of(row) / 1e12: row.name for row in read_trace(tmp_path).efficiency().ranges}
    numbers = {
        text.get_text(): rows[text.xy[1]] for text in axes.texts if isinstance(text, Annotation) and text.xy[1] in rows
    }
    assert numbers == names
    assert len(names) == 12


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
    manifest = json.loads((run / "manifest.json").read_text()) | {"gpu": "a GPU of no datasheet"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    opened = read_trace(run)
    with pytest.raises(TraceError, match=r"the GPU's peaks are unknown.*`profkit ceilings`"):
        plot_roofline(opened.efficiency(), tmp_path / "r.png")


def test_the_command_writes_a_png(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    done = run_command("efficiency", run, "--numbered", "--plot", tmp_path / "r.png")
    assert done.returncode == 0
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)
    assert run_command("efficiency", run, "--plot", tmp_path / "r.pdf").returncode == 2
    assert run_command("efficiency", run, "--plot", run / "work.json").returncode == 2


def _texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.axes[0].texts)


def test_phases_have_shapes_and_areas_grow_with_time(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = _draw(make_small_run(tmp_path), drawn)
    (axes,) = figure.axes
    rows = {rate_of(row) / 1e12: row for row in read_trace(tmp_path).efficiency().ranges}
    longest = max(row.busy_ns for row in rows.values())
    shapes: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for one in axes.collections:
        for (_, rate), area in zip(one.get_offsets().tolist(), one.get_sizes().tolist(), strict=True):
            row = rows[rate]
            assert area == pytest.approx(max(420 * row.busy_ns / longest, 18))
            for phase, found in shapes.items():
                if phase in row.path.split("/"):
                    found.add(len(one.get_paths()[0].vertices))
    assert len(shapes["forward"]) == len(shapes["backward"]) == 1
    assert shapes["forward"] != shapes["backward"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"forward", "backward", "optimizer"} < set(legend)
    assert legend[-1].startswith("area: GPU time, the largest ")
