"""One rule says what lies under a range: every command, asked for any path of the tree, gives one figure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from profkit import read_trace
from profkit.analysis.causes.advice import AdviceResult
from profkit.analysis.compare import has_measured_steps, sample_steps
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import Attribution, attribute_work
from profkit.analysis.time_account import measured_ranges
from profkit.analysis.tree import select_ranges
from profkit.analysis.tree.modules import PASSES, time_kernels_by_module
from profkit.cli import cli
from profkit.names import WARMUP
from profkit.reading import open_capture
from profkit.report.page.step import build_dots
from profkit.run.manifest import Manifest
from tests.captures import CAPTURES
from tests.in_process import printed, run_command
from tests.run_builder import start_run
from tests.test_compiled_ranges import whole_run
from tests.test_time_account import count_idle_slowly

pytestmark = pytest.mark.usefixtures("read_once")


@pytest.fixture(autouse=True, scope="module")
def without_advice() -> Iterator[None]:
    """What to try is no figure of a capture, and to find it takes most of a command's time."""
    with mock.patch("profkit.analysis.causes.advice._find_tries", return_value=AdviceResult()):
        yield


TRACES = sorted(
    path
    for folder in (Path(__file__).parent.parent / "traces", CAPTURES)
    if folder.is_dir()
    for path in folder.iterdir()
    if path.name.endswith((".sqlite", ".kineto.json.gz"))
)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_path_of_the_tree_gives_one_figure(path: Path) -> None:
    opened = read_trace(path)
    if not len(opened.trace.work):
        pytest.skip("no kernels to place")  # NVTX alone
    for numbered in (True, False):
        tree = opened.ranges(numbered=numbered).ranges
        of_path: Counter[str] = Counter()
        for row in tree:
            of_path[row.path] += row.kernel_time_ns
        same_path = Counter(row.path for row in tree)  # ranges of two domains may share one
        efficiency: dict[str, Any] = {}
        if opened.trace.measure == "gpu-kernel":
            efficiency = {row.path: row for row in opened.efficiency(numbered=numbered).ranges}
        for row in tree:
            asked = opened.kernels(f"/{row.path}")
            assert asked.total_ns == of_path[row.path], row.path
            assert sum(line.total_ns for line in asked.kernels) == asked.total_ns
            if same_path[row.path] == 1:
                assert (asked.kernel_count + asked.graph_count, asked.busy_ns) == (row.kernel_count, row.busy_ns)
                assert asked.wall_ns == row.wall_ns
                same = efficiency.get(row.path, row)
                assert (same.kernel_time_ns, same.busy_ns) == (asked.total_ns, asked.busy_ns)
        _check_samples(opened, {row.path for row in tree})


def _check_samples(opened: OpenedTrace, paths: set[str]) -> None:
    """Compare what `check --max-share` and `compare --range` sum with the rows in the steps and under the range."""
    attribution = opened.attribution
    if not has_measured_steps(attribution):
        return
    whole = sample_steps(attribution)
    for path in sorted(paths)[:12]:
        samples = sample_steps(attribution, f"/{path}")
        under = attribution.work.under(select_ranges(attribution, f"/{path}")).rows
        in_steps = samples.total_ns + samples.left_out_ns
        assert in_steps == attribution.ledger.total_ns
        assert samples.total_ns <= int(attribution.trace.work.duration_ns[under].sum())
        assert samples.total_ns <= whole.total_ns or samples.size != whole.size


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_the_rows_under_a_range_equal_those_of_a_slow_account(path: Path) -> None:
    """Row by row in Python: a range holds what was launched while it was open on the row's thread or its host's."""
    opened = read_trace(path)
    attribution = attribute_work(opened.trace)
    trace, placed = attribution.trace, attribution.work
    work, ranges = trace.work, trace.ranges
    if not len(work) or not len(ranges):
        return
    rng = np.random.default_rng(0)
    some = rng.choice(len(ranges), size=min(40, len(ranges)), replace=False)
    for index in some.tolist():
        expected = set()
        if attribution.is_mirror[index]:
            number, end = (int(edge[0]) for edge in attribution.mirrors.span(np.array([index])))
            of_row = attribution.mirrors.of_row
            expected = {row for row in range(len(work)) if number <= of_row[row] < end}
        else:
            threads = {int(ranges.thread[index]), int(ranges.end_thread[index])}
            inside = (work.launch_ns >= ranges.start_ns[index]) & (work.launch_ns < ranges.end_ns[index])
            for row in np.flatnonzero(inside).tolist():
                if int(work.launch_thread[row]) in threads or int(placed.host_thread[row]) in threads:
                    expected.add(row)
        found = placed.under(np.array([index]))
        assert set(found.rows.tolist()) == expected
        assert len(found.rows) == len(expected)
        assert placed.count(np.array([index])).tolist() == [len(expected)]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_all_commands_print_one_kernel_time(path: Path) -> None:
    """Of the capture, of its measured steps, and of each phase, in steps: summary, kernels, ranges, compare, check."""
    whole = _printed("kernels", path)
    ranges, summary = _printed("ranges", path), _printed("summary", path)
    compared = _printed("compare", path, path, "--force")["time"]
    assert whole["kernel_time_ns"] + whole["graph_time_ns"] == ranges["total_ns"] == summary["ledger"]["total_ns"]
    assert whole["ledger"] == summary["ledger"]
    in_steps = compared["kernel_time"]["before_ns"]
    assert compared["busy"]["before_ns"] <= whole["busy_ns"]
    assert in_steps + compared["left_out_ns"][0] == ranges["total_ns"]
    if compared["unit"] == "step":
        assert in_steps == summary["work"]["kernel_time_ns"]
        if not compared["left_out_ns"][0]:
            assert compared["busy"]["before_ns"] == _printed("kernels", path, "--range", "step *")["busy_ns"]
    assert sum(line["change"]["before_ns"] for line in compared["by_phase"]) == in_steps
    for name in ("forward", "backward", "optimizer"):
        lines = [line["change"]["before_ns"] for line in compared["by_phase"] if line["name"] == name]
        if lines:
            (budget,) = _printed("check", path, "--max-share", f"range:{name}=100%")["lines"]
            assert budget["measured"] == lines[0] / in_steps or not budget["judged"]
        if lines and not compared["left_out_ns"][0]:
            asked = _printed("kernels", path, "--range", name)
            assert asked["kernel_time_ns"] + asked["graph_time_ns"] == lines[0]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_all_commands_print_one_time_of_each_module(path: Path) -> None:
    modules = _printed("summary", path)["modules"]
    whole = {row["module"]: sum(row[part] for part in PASSES) for row in modules}
    itself = {row["module"]: sum(row["itself"].values()) for row in modules}
    opened = read_trace(path)
    without = ["--exclude", WARMUP] if WARMUP in opened.trace.names else []
    of_kernels = _printed("kernels", path, "--by", "module", *without)["kernels"]
    own = {row["name"]: row["total_ns"] for row in of_kernels if not row["name"].startswith("(")}
    assert own == {name: ns for name, ns in itself.items() if ns}
    found = time_kernels_by_module(opened.attribution, set(whole))
    for row in modules:
        kernels = found.get(row["module"], {}).values()
        assert [sum(getattr(kernel, part) for kernel in kernels) for part in PASSES] == [row[part] for part in PASSES]
        assert all(kernel.count > 0 for kernel in kernels)
    compared = _printed("compare", path, path, "--force")
    if compared["time"]["left_out_ns"][0] or compared["modules"] is None:
        return
    rows = {row["module"]: row["change"]["before_ns"] for row in compared["modules"]["modules"]}
    assert {name: ns for name, ns in rows.items() if not name.startswith("(")} == {
        name: ns for name, ns in whole.items() if ns
    }


@cache
def _printed(*arguments: object) -> Any:
    """Return what a command prints as JSON; skips where the capture has no kernels to speak of."""
    done = CliRunner().invoke(cli, [*map(str, arguments), "--format", "json"])
    if "recorded no GPU kernels" in str(done.exception):
        pytest.skip("no kernels to place")
    assert done.stdout, done.exception
    return json.loads(done.stdout)


def test_modules_of_compiled_code_give_one_figure_too(tmp_path: Path) -> None:
    path = whole_run(tmp_path)
    test_every_path_of_the_tree_gives_one_figure(path)
    test_the_rows_under_a_range_equal_those_of_a_slow_account(path)


def _check_steps_and_idle_time(path: Path) -> None:
    """Compare the step time and the idle share that each command prints, and both with the account."""
    capture = open_capture(path)
    account, summary, efficiency = capture.trace.account, printed("summary", path), printed("efficiency", path)
    checked = json.loads(run_command("check", path, "--max-idle", "50%", "--format", "json").stdout)["lines"][0]
    idle = account.idle_time()
    assert efficiency["idle_share"] == account.sum_parts()[0].idle_share
    assert efficiency["clean_idle_share"] == (idle.share if idle.is_unprofiled else None)
    assert summary["gpu"]["idle_share"] == idle.share
    assert checked["measured"] == idle.share or not checked["judged"], (
        "a capture with a failed self-check is not judged"
    )
    assert summary["gpu"]["parts"]["idle_ns"] == sum(step["gpu"]["idle_ns"] for step in efficiency["steps"])
    assert summary["step_count"] == len(efficiency["steps"]) == len(account)
    steps = [row for row in efficiency["ranges"] if row["name"] in ("step", "step *")]
    if len(steps) == 1 and idle.is_unprofiled:
        assert steps[0]["clean_idle_share"] == pytest.approx(idle.share)
    for step in summary["steps"]:
        assert step["recorded_ns"] == account.recorded_step_ns(step["context"])
        assert step["unprofiled_ns"] == account.step_ns(step["context"])
    (headline,) = printed("compare", path, path, "--force")["headlines"]
    (step,) = summary["steps"]
    assert headline["before_ns"] == round(step["unprofiled_ns"] or step["recorded_ns"]), headline["what"]
    assert capture.trace.account.steps.tolist() == measured_ranges(capture.trace.attribution)["step"].tolist()


TIMED = ("small-train.nsys", "small.kineto", "checkpointed", "two_gpus")
STEPPED = [path for path in TRACES if path.name.startswith(("small", "checkpointed", "ddp", "hooks", "two", "graph"))]


@pytest.mark.parametrize("path", STEPPED, ids=lambda path: path.name)
def test_steps_and_idle_time_are_one_figure_everywhere_and_equal_a_slow_account(path: Path, tmp_path: Path) -> None:
    """As recorded, and of some in runs whose unprofiled steps were shorter and longer than the recorded ones."""
    opened = read_trace(path)
    if not len(opened.account):
        pytest.skip("no steps on a GPU")
    parts = opened.account.sum_parts()[0]
    assert count_idle_slowly(opened)[:2] == (parts.span_ns, parts.idle_ns)
    _check_steps_and_idle_time(path)
    recorded_ns = round(opened.account.recorded_step_ns() or 0)
    for number, factor in enumerate((0.9, 2.5) if path.name.startswith(TIMED) else ()):
        step_ns, wait_ns = round(recorded_ns * factor), recorded_ns // 100
        times = {"steps": [{"step_ns": step_ns + wait, "data_ns": wait} for wait in (0, wait_ns, 2 * wait_ns)]}
        run = start_run(tmp_path / f"{number}", device="cuda", attached=times)
        (run / ("trace.sqlite" if path.suffix == ".sqlite" else "trace.json.gz")).symlink_to(path)
        timed = read_trace(run)
        idle = timed.account.idle_time()
        assert count_idle_slowly(timed)[2:] == (idle.span_ns, idle.idle_ns)
        _check_steps_and_idle_time(run)


def _busy_slowly(attribution: Attribution, rows: set[int]) -> int:
    """Return the time in which one of the operators ran itself, moment by moment between all beginnings and ends."""
    work, busy_ns = attribution.trace.work, 0
    for thread in set(work.launch_thread.tolist()):
        mine = np.flatnonzero(work.launch_thread == thread)
        edges = np.unique(np.concatenate([work.start_ns[mine], work.end_ns[mine]]))
        for begin, end in pairwise(edges.tolist()):
            running = mine[(work.start_ns[mine] <= begin) & (work.end_ns[mine] >= end)].tolist()
            innermost = max(running, key=lambda row: (work.start_ns[row], -work.end_ns[row], row), default=-1)
            busy_ns += end - begin if innermost in rows else 0
    return busy_ns


def test_operators_under_a_range_are_busy_for_no_longer_than_their_self_time() -> None:
    """An operator that began in one module may hold those of the next one: only its own time is its module's."""
    opened = read_trace(Path(__file__).parent.parent / "traces" / "tiny-train-cpu.kineto.json.gz")
    tree = opened.ranges(numbered=False).ranges
    assert all(row.busy_ns <= row.kernel_time_ns for row in tree)
    for row in [row for row in tree if row.path.startswith("step */backward")][:3]:
        members = select_ranges(opened.attribution, f"/{row.path}")
        rows = set(opened.attribution.work.under(members).rows.tolist())
        assert row.busy_ns == _busy_slowly(opened.attribution, rows)
        assert opened.kernels(f"/{row.path}").busy_ns == row.busy_ns


def test_figures_of_several_ranks_say_whether_they_are_of_one_or_of_all() -> None:
    path = next((path for path in TRACES if path.name == "ddp.nsys2025.sqlite"), None)
    if path is None:
        pytest.skip("ddp.nsys2025.sqlite is not here")
    said = {name: " ".join(run_command(name, path).stdout.split()) for name in ("summary", "efficiency", "kernels")}
    assert "matmul 50.0% of 46.81 ms of kernel time per GPU" in said["summary"]
    assert "2 steps on 2 GPUs" in said["efficiency"]
    assert "Phases of 2 ranks together, per step (2 steps)" in said["kernels"]
    opened = read_trace(path)
    (dots,) = build_dots(opened.account, Manifest())
    assert dots["words"] == "2 steps, 43.63 ms to 45.84 ms"
    ranks = " ".join(run_command("ranks", path).stdout.split())
    assert "2 steps of 44.73 ms as recorded; on average over ranks, communication not hidden" in ranks
