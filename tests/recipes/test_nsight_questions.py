"""The answers against what the commands in them print, of a real GPU capture; failing captures; all of it on a CPU."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from matplotlib.collections import LineCollection, PathCollection

from profkit import read_trace
from profkit.errors import RunError, ToolError, UsageError
from recipes import nsight_questions
from recipes.nsight import capture, measure
from recipes.nsight.attention import answer_attention, compare_attention
from recipes.nsight.cells import GRIDS, INFERENCE, KINETO, NSYS, TRAIN, build_cells
from recipes.nsight.other_kernels import answer_others, choose_forwards
from recipes.nsight.pictures import choose_contexts, draw_ratios, rank_categories
from recipes.nsight.read import read_kernels, read_row
from recipes.nsight.report import QUESTIONS, report
from recipes.nsight.shares import answer_shares, change_shares, compare_shares, share_without_optimizer
from recipes.nsight.times import answer_times, compare_times, tell_times
from recipes.nsight.top_kernels import answer_top, name_top
from recipes.nsight.words import Answer, pair_rows
from tests.conftest import ROOT
from tests.efficiency_runs import make_small_run

TINY_NSYS = ROOT / "traces" / "tiny-train-cpu.nsys2023.sqlite"
MS = 1_000_000
CELL = {"size": "small", "context": 256, "passes": TRAIN, "batch": 4, "steps": 2, "profiler": NSYS}


def _write_times(run: Path) -> None:
    """Add to a run's manifest what the recipe reads of it: times of the two recorded steps and of three others."""
    clean = [{"forward_ns": forward * MS, "backward_ns": 50 * MS, "step_ns": 90 * MS} for forward in (20, 25, 40)]
    profiled = [{"forward_ns": 37 * MS, "backward_ns": 62 * MS, "step_ns": 105 * MS}] * 2
    path = run / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {"status": "complete"}
    manifest |= {"clean": {"steps": clean}, "profiled": {"steps": profiled}, "versions": {}, "warnings": []}
    path.write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("results") / "captures" / "small"
    run.mkdir(parents=True)
    _write_times(make_small_run(run))
    return run


@pytest.fixture(scope="module")
def small_row(small_run: Path) -> dict[str, Any]:
    return {**CELL, "status": "ok", "made_by": "profkit run", **read_row(read_trace(small_run), small_run, None)}


def _commands(answer: Answer) -> list[list[str]]:
    """Return the words of an answer's commands, for the one capture that there is."""
    return [
        shlex.split(each.replace("CAPTURE", "captures/small"))[1:]
        for each in answer.commands
        if each.startswith("profkit ")
    ]


@pytest.fixture
def ask(small_run: Path) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Return what a command of a sentence says, run in the directory of results, as it is meant."""

    def run(words: Sequence[str]) -> dict[str, Any]:
        command = [sys.executable, "-m", "profkit", *words, "--format", "json"]
        done = subprocess.run(
            command, cwd=small_run.parent.parent, capture_output=True, text=True, check=True, env=_environment()
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_kernels_of_a_gpu_are_those_that_the_commands_print(small_row: dict[str, Any], ask: Callable) -> None:
    forward, both = (ask(words) for words in _commands(answer_top([small_row])))
    first, first_of_both = forward["kernels"][0], both["kernels"][0]
    assert forward["kernel_time_ns"] == 17_849_383  # as traces/README.md has it
    assert both["kernel_time_ns"] == 59_325_701 - 5_662_929  # all of the capture but the optimizer
    assert (small_row["top_share"], small_row["top_calls"]) == (first["share"], first["count"] / 2)
    assert small_row["both_top_calls"] == first_of_both["count"] / 2
    assert small_row["same_kernel"] is (first["name"] == first_of_both["name"])
    sentence = name_top(small_row)
    assert f"5.092 ms of 8.925 ms a forward ({first['share']:.1%} of the kernel time" in sentence
    assert "84 calls a forward" in sentence
    assert first["count"] == 168


def test_the_kernels_beside_products_are_those_that_the_commands_print(
    small_row: dict[str, Any], ask: Callable
) -> None:
    answer = answer_others([small_row])
    categories, kernels = (ask(words) for words in _commands(answer))
    shares = {each["name"]: each["share"] for each in categories["kernels"]}
    elementwise, reduction, copies = (f"{shares[name]:.1%}" for name in ("elementwise", "reduction", "copy/cast"))
    assert answer.short[0] == (
        f"Matrix products have {shares['gemm']:.1%} (small, context 256) of forward's kernel time; beside them "
        f"elementwise has {elementwise} (small, context 256), reduction has {reduction} (small, context 256), copy"
        f"/cast has {copies} (small, context 256)."
    )
    assert answer.short[1].startswith(
        "The kernel with the most time beside products is, of 1 cell: "
        "`elementwise_kernel<BinaryFunctor,float,MulFunctor>` in 1, up to 4.8% (small, context 256, 146 calls)"
    )
    assert f"| small | 256 | {shares['gemm']:.1%} | {elementwise} | {reduction} | {copies} |" in answer.blocks[1]
    others = [each for each in kernels["kernels"] if each["category"] != "gemm" and each["share"] >= 0.01]
    lines = answer.blocks[2].splitlines()[2:]
    assert [line.split(" | ")[3] for line in lines] == [f"{each['share']:.1%}" for each in others]


def test_what_reads_alike_is_added_up(small_row: dict[str, Any]) -> None:
    line = {"category": "reduction", "per_instance_count": 3.0, "total_ns": 1}
    alike = [
        {**line, "name": f"void reduce_kernel<(int){number}, float>(T1)", "share": share}
        for number, share in ((512, 0.2), (128, 0.1))
    ]
    row = {**small_row, "forward": {**small_row["forward"], "rows": [*small_row["forward"]["rows"][:1], *alike]}}
    assert (
        "| reduce_kernel\\<float> | reduction | 1 | 30.0% | small, context 256 | 6 |" in answer_others([row]).blocks[2]
    )


def test_forward_by_category_is_inferences_where_trainings_was_not_kept(small_row: dict[str, Any]) -> None:
    """Rows of earlier captures have no categories of training's forward."""
    old = {key: value for key, value in small_row.items() if key != "forward_categories"}
    inference = {**old, "passes": INFERENCE, "step": small_row["forward_categories"]}
    assert choose_forwards([old, inference]) == [inference]
    assert choose_forwards([small_row, inference]) == [small_row]
    assert not answer_others([old]).short
    assert answer_others([old, inference]).short == answer_others([small_row]).short


def test_kernels_are_counted_beside_the_products_that_they_compute(small_row: dict[str, Any]) -> None:
    said = answer_top([small_row]).blocks[-1]
    assert "1.11 (small, context 256: 121 for 109) kernels of category gemm" in said  # 12 × 9 + 1 products


@pytest.mark.parametrize(
    ("name", "total_ns"), [("small.nsys2023.sqlite", 17_272_595), ("small.nsys2025.sqlite", 17_223_554)]
)
def test_forward_of_other_captures_is_what_is_known_of_them(captures: Path, name: str, total_ns: int) -> None:
    found: dict[str, Any] = read_kernels(read_trace(captures / name), None)
    assert (found["forward"]["total_ns"], found["forward"]["count"]) == (total_ns, 980)
    assert found["forward_kernel_ms"] == total_ns / 2e6


def test_attention_is_what_the_command_prints(small_row: dict[str, Any], ask: Callable) -> None:
    answer = answer_attention([small_row])
    (words,) = _commands(answer)
    scores, softmax, values = ask(words)["parts"][:3]
    for column, part in (("scores", scores), ("softmax", softmax), ("values", values)):
        assert small_row[f"{column}_us"] == part["kernel_time_ns"] / 24 / 1e3
        assert small_row[f"{column}_flops"] == part["operations"] / 24
    said = compare_attention(small_row)
    assert "`computing softmax` takes 48.69 µs of kernel time" in said
    assert "2.13 times the time of the scores, for 1/25.8 of their FLOPs" in said
    assert answer.short[0].startswith("A softmax takes 2.13 (small, context 256) times as long as the scores before it")
    assert small_row["softmax_flops"] == 5 * 4 * 12 * 256**2  # 5 an element of the scores, as the text says
    assert small_row["scores_flops"] - small_row["values_flops"] == 4 * 12 * 256**2  # the division
    for part in ("5 an element for softmax", "1 an element for the division", "category softmax is the loss's"):
        assert part in answer.blocks[0]


def test_times_are_those_that_the_commands_print(small_row: dict[str, Any], ask: Callable) -> None:
    for phase, words in zip(("forward", "backward"), _commands(answer_times([small_row])), strict=True):
        steps = ask(words)["per_instance"]
        recorded = sum(step["wall_ns"] for step in steps) / 2e6
        kernels = sum(step["kernel_time_ns"] for step in steps) / 2e6
        assert small_row[f"{phase}_recorded_ms"] == recorded
        assert small_row[f"{phase}_kernel_ms"] == kernels
        ratio = compare_times(small_row, phase)
        clean = {"forward": 25, "backward": 50}[phase]
        assert (ratio.value, ratio.busy) == (pytest.approx(recorded / clean), pytest.approx(kernels / clean))
    said = tell_times(compare_times(small_row, "forward"))
    assert (
        "37.48 ms by Nsight Systems (wall time of the range, median of 2 steps, 35.83 ms to 39.13 ms), 37.00 ms" in said
    )
    assert "25.00 ms by Python's clock without a profiler (median of 3 steps, 20.00 ms to 40.00 ms)" in said
    assert said.endswith("1.50 times that; its kernels take 8.925 ms.")


def _timed(row: dict[str, Any], recorded: Sequence[float], clean: Sequence[float], **more: object) -> dict[str, Any]:
    """Return a row of inference with some times of forward, in ms."""
    return {
        **{key: value for key, value in row.items() if not key.startswith("backward_")},
        **{"passes": INFERENCE, "forward_ratio": median(recorded) / median(clean)},
        **{"forward_recorded_ms": median(recorded), "forward_clean_ms": median(clean)},
        **{"forward_python_ms": median(recorded), "forward_recorded_samples_ms": list(recorded)},
        **{"forward_clean_samples_ms": list(clean), **more},
    }


@pytest.mark.parametrize(
    ("recorded", "clean", "kernel_ms", "cell"),
    [
        ((104, 104, 104), (100, 101, 99), 99, "1.04 (99%)"),
        ((131, 118, 131), (64, 65, 66), 59, r"2.02 (91%)‡"),  # launches bound the recorded steps alone
        ((52, 49, 55), (66, 66, 66), 31, r"0.79 (47%)\*"),
        ((87, 146, 142), (125, 125, 125), 60, r"1.14 (48%)\*†"),
        ((100, 100, 100), (85, 100, 106), 90, "1.00 (90%)†"),
        ((100, 100, 100), (100, 100, 100), None, "1.00 (—)"),
    ],
)
def test_a_ratio_shows_what_there_is_to_doubt_about_it(
    small_row: dict[str, Any], recorded: Sequence[float], clean: Sequence[float], kernel_ms: float | None, cell: str
) -> None:
    row = _timed(small_row, recorded, clean, forward_kernel_ms=kernel_ms)
    answer = answer_times([row])
    assert answer.blocks[1].splitlines()[-1] == f"| inference, forward | 256 | {cell} |"
    known = _timed(small_row, (10, 10), (10, 10), forward_kernel_ms=9, context=8)
    said = " ".join(answer_times([row, known]).short)
    assert ("; of 1 the kernel time is not known)" in said) is (kernel_ms is None)


def _old(row: dict[str, Any], recorded: float = 62.0, clean: float = 50.0, **more: object) -> dict[str, Any]:
    """Return a row of training of an earlier version, without backward's kernel time, with some times of backward."""
    return {
        **{key: value for key, value in row.items() if key != "backward_kernel_ms"},
        **{"backward_ratio": recorded / clean, "backward_recorded_ms": recorded, "backward_clean_ms": clean},
        **{"backward_recorded_samples_ms": [recorded] * 3, "backward_clean_samples_ms": [clean] * 3, **more},
    }


def test_backwards_kernel_time_is_at_most_what_is_left_without_forward(
    small_row: dict[str, Any], ask: Callable
) -> None:
    old = _old(small_row)
    ratio = compare_times(old, "backward")
    assert ratio.kernels_ms == pytest.approx((53_662_772 - 17_849_383) / 2e6)  # as the commands below print them
    assert (ratio.busy, ratio.busy_recorded) == pytest.approx((ratio.kernels_ms / 50, ratio.kernels_ms / 62))
    own = compare_times(small_row, "backward")
    assert (ratio.holds_loss, own.holds_loss) == (True, False)
    forward, _, both, loss = (
        sum(step["kernel_time_ns"] for step in ask(words)["per_instance"]) / 2e6
        for words in (
            *_commands(answer_times([old])),
            shlex.split("kernels captures/small --range 'step */loss' --per-instance"),
        )
    )
    assert ratio.kernels_ms == pytest.approx(both - forward)
    assert own.kernels_ms == pytest.approx(ratio.kernels_ms - loss)
    assert 0 < loss < 0.1
    assert tell_times(ratio).endswith("; its kernels and the loss's take 17.91 ms.")
    assert tell_times(own).endswith("; its kernels take 17.86 ms.")


@pytest.mark.parametrize(
    "missing",
    [{"forward_backward": None}, {"forward_kernel_ms": None}, {"forward_backward": {"instances": 0, "total_ns": 9}}],
)
def test_backwards_kernel_time_is_not_known_where_a_part_is_missing(
    small_row: dict[str, Any], missing: dict[str, Any]
) -> None:
    row = _old(small_row, **missing)
    ratio = compare_times(row, "backward")
    assert (ratio.kernels_ms, ratio.busy, ratio.is_unknown, ratio.is_doubtful) == (None, None, True, False)
    answer = answer_times([row])
    assert answer.blocks[1].splitlines()[-1] == "| training, backward | 256 | 1.24 (—) |"
    assert "≤" not in "".join(answer.blocks)
    assert "--exclude" not in " ".join(answer.commands)
    operators = compare_times({**_old(small_row), "measure": "cpu-operator"}, "backward")
    assert (operators.kernels_ms, operators.holds_loss, operators.is_unknown) == (None, False, False)


def test_backward_is_marked_counted_and_drawn_by_the_kernel_time_with_the_loss(small_row: dict[str, Any]) -> None:
    rows = [
        _old(small_row, *times, context=context)
        for context, times in ((128, (40.0, 30.0)), (256, (25.0, 20.0)), (512, (20.0, 19.0)))
    ]
    answer = answer_times(rows)
    assert [line.split(" | ")[2] for line in answer.blocks[1].splitlines()[-3:]] == [
        r"1.33 (≤60%)\* |",
        "1.25 (≤90%)‡ |",
        "1.05 (≤94%) |",
    ]
    assert "it holds the loss's few kernels, so backward's own fill that much at most" in answer.blocks[0]
    last, slowed = answer.short[2:4]
    aside = "(1 of 6 ratios, 1 of them of backward, whose kernel time holds the loss's)"
    assert f"they are 1.05 (small, context 512) {aside}." in last
    assert f"they are 1.25 (small, context 256) {aside}: while recording" in slowed
    (points,) = [one for one in draw_ratios(rows).axes[1].collections if isinstance(one, PathCollection)]
    white = [bool((colour == 1).all()) for colour in points.get_facecolor()]
    assert white == [True, True, False]


def test_inference_is_summed_up_with_what_its_ratios_rest_on(small_row: dict[str, Any]) -> None:
    rows = [
        _timed(small_row, (101, 101, 101), (100, 100, 100), forward_kernel_ms=98, context=1024),
        _timed(small_row, (131, 118, 131), (65, 65, 65), forward_kernel_ms=59),
        _timed(small_row, (52, 49, 55), (66, 66, 66), forward_kernel_ms=31, context=128),
    ]
    short = answer_times(rows).short
    assert short[1] == (
        "Recorded times over unprofiled ones are 0.79 (small, context 128) to 2.02 (small, context 256) in `forward` "
        "of inference."
    )
    assert short[2].startswith("Where kernels have 85% or more of both, and samples range over no more than 20% of")
    assert short[2].endswith("they are 1.01 (small, context 1024) (1 of 3 ratios).")
    assert "unprofiled time alone they are 2.02 (small, context 256) (1 of 3 ratios)" in short[3]


def test_forward_that_takes_another_time_in_training_than_in_inference_is_listed(small_row: dict[str, Any]) -> None:
    inference = _timed(small_row, (25, 25, 25), (12, 12.5, 13))
    answer = answer_times([small_row, inference])
    assert answer.short[-1].startswith(
        "Without a profiler `forward` of training and of inference differ by more than 20% in 1"
    )
    assert answer.blocks[-1].endswith("small, context 256: 25.00 ms against 12.50 ms.")
    others = ({"forward_clean_ms": 24.0}, {"forward_kernel_ms": 99.0})  # as long, or by other kernels
    for other in others:
        assert "differ by more" not in " ".join(answer_times([small_row, {**inference, **other}]).short)


def test_the_picture_has_each_samples_range(small_row: dict[str, Any]) -> None:
    figure = draw_ratios([small_row, _timed(small_row, (90, 100, 130), (80, 100, 110))])
    assert [panel.get_title() for panel in figure.axes] == [
        "forward, training",
        "backward, training",
        "forward, inference",
    ]
    (bar,) = [one for one in figure.axes[2].collections if isinstance(one, LineCollection)]
    assert [float(value) for _, value in bar.get_segments()[0]] == pytest.approx([90 / 110, 130 / 80])


def test_the_times_of_pythons_clock_are_those_that_the_command_prints(
    small_run: Path, small_row: dict[str, Any]
) -> None:
    template = answer_times([small_row]).commands[-1]
    command = template.removeprefix('python -c "').removesuffix('"').replace("CAPTURE", "captures/small")
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=small_run.parent.parent, capture_output=True, text=True, check=True, env=_environment(),
    )  # fmt: skip
    assert done.stdout.split() == [
        *("phase", "clean_median", "profiled_median"),
        *("0", "forward", "25000000.0", "37000000.0"),
        *("1", "backward", "50000000.0", "62000000.0"),
        *("2", "step", "90000000.0", "105000000.0"),
    ]


def test_a_template_stands_for_the_commands_of_all_cells(small_row: dict[str, Any]) -> None:
    rows = []
    for size, context in (("small", 128), ("xl", 1024)):
        here = {**small_row["forward"], "range": f"context {context}/step */forward"}
        made_by = f"profkit run --context 128,1024 --passes train model.{size} -o captures/{size}-train-nsys"
        cell = {"size": size, "context": context, "capture": f"captures/{size}-train-nsys", "made_by": made_by}
        rows.append({**small_row, **cell, "forward": here})
    assert answer_times(rows).commands == [
        "profkit kernels CAPTURE --range 'context CONTEXT/step */forward' --per-instance --top 1",
        "profkit kernels CAPTURE --range 'context CONTEXT/step */backward' --per-instance --top 1",
        "python -c \"import profkit; print(profkit.read_step_times('CAPTURE').to_pandas()"
        ".query('context == CONTEXT')[['phase', 'clean_median', 'profiled_median']])\"",
    ]
    text = report(rows, {}).markdown
    assert "profkit run --context 128,1024 --passes PASSES model.SIZE -o captures/SIZE-PASSES-nsys\n" in text
    assert "xl-train" not in text


def test_a_forward_kernel_that_is_overtaken_is_told_with_its_place(small_row: dict[str, Any]) -> None:
    other = {**small_row["forward_backward"]["rows"][1], "name": "wgrad_kernel", "share": 0.3}
    both = {**small_row["forward_backward"], "rows": [other], "forwards_top": {"place": 2, "share": 0.198}, "tied": 2}
    said = name_top({**small_row, "same_kernel": False, "forward_backward": both})
    assert "it is another: `wgrad_kernel`" in said
    assert "30.0% of the kernel time under `step *` without `optimizer`" in said
    assert "has 19.8% there, place 2." in said
    assert "(with as much time: 1 more)" in said
    assert (
        "30.0% against 19.8% |" in answer_top([{**small_row, "same_kernel": False, "forward_backward": both}]).blocks[1]
    )


def test_a_lead_of_less_than_a_percentage_point_is_a_near_tie(small_row: dict[str, Any]) -> None:
    other = {**small_row["forward_backward"]["rows"][0], "name": "wgrad_kernel", "share": 0.216}
    both = {**small_row["forward_backward"], "rows": [other], "forwards_top": {"place": 2, "share": 0.2151}}
    row = {**small_row, "same_kernel": False, "forward_backward": both}
    assert name_top(row).endswith("has 21.5% there, place 2, a near tie.")
    answer = answer_top([row, {**small_row, "context": 512}])
    assert "leads in 1 of 2 cells; in 1 of the 1 others it is behind by less than 1 percentage point" in answer.short[0]
    assert "| 21.6% against 21.5%, near tie |" in answer.blocks[1]


def test_kernels_that_read_alike_are_told_in_full(small_row: dict[str, Any]) -> None:
    first, second = (f"sm80_xmma_gemm_stage{number}_execute" for number in (3, 4))
    line = small_row["forward"]["rows"][0]
    forward = {**small_row["forward"], "rows": [{**line, "name": first}]}
    both = {**small_row["forward_backward"], "rows": [{**line, "name": second}]}
    said = name_top({**small_row, "same_kernel": False, "forward": forward, "forward_backward": both})
    assert f"`{first}` has the most kernel time of forward" in said
    assert f"it is another: `{second}`" in said


def _inference(row: dict[str, Any], **shares: float) -> dict[str, Any]:
    lines = [
        {"name": name, "share": share, "total_ns": share * row["step"]["total_ns"]} for name, share in shares.items()
    ]
    step = {**row["step"], "rows": lines}
    return {**row, "passes": INFERENCE, "step": step, "gemm_step_share": shares["gemm"]}


def test_shares_are_compared_in_percentage_points(small_row: dict[str, Any]) -> None:
    training = _inference(small_row, gemm=0.6, optimizer=0.2, elementwise=0.15, reduction=0.05) | {"passes": TRAIN}
    inference = _inference(small_row, gemm=0.7, elementwise=0.2, softmax=0.0602, reduction=0.0498)
    assert pair_rows([training, inference, {**inference, "context": 128}]) == [(inference, training)]
    expected = {"optimizer": 20, "elementwise": -5, "softmax": -6.02, "gemm": -10, "reduction": 0.02}
    assert dict(change_shares(inference, training)) == pytest.approx(expected)
    said = compare_shares(inference, training)
    assert "have 70.0% of the kernel time of an inference" in said
    assert "and 60.0% of that of a training step" in said
    assert "-10.0 percentage points. Grew: optimizer +20.0; shrank: softmax -6.0, elementwise -5.0. Without" in said
    assert rank_categories([(inference, training)]) == ["gemm", "softmax", "elementwise", "reduction", "optimizer"]
    small = _inference(small_row, gemm=0.995, softmax=0.005)
    assert rank_categories([(small, small)]) == ["gemm"]
    assert "less in 1 of 1 cell, by 10.0" in answer_shares([inference, training]).short[0]


def test_without_the_optimizer_products_have_the_share_that_they_have_in_inference(
    small_row: dict[str, Any], ask: Callable
) -> None:
    inference = _inference(small_row, gemm=0.79)
    answer = answer_shares([inference, small_row])
    step, rest = (ask(words) for words in _commands(answer))
    assert step["by"] == rest["by"] == "category"
    assert {row["name"]: row["share"] for row in small_row["step"]["rows"]} == {
        row["name"]: row["share"] for row in step["kernels"]
    }
    assert small_row["gemm_step_share"] == step["kernels"][0]["share"]
    share = share_without_optimizer(small_row)
    assert share == pytest.approx(rest["kernels"][0]["share"])
    assert answer.short[1] == (
        f"Without the optimizer, which has {5_662_929 / 59_325_701:.1%} (small, context 256) of a step, their share is "
        f"that of inference within {abs(share - 0.79) * 100:.1f} percentage points in every cell (small, context 256: "
        f"{share:.1%} against 79.0%)."
    )


def test_a_capture_that_fails_its_self_check_answers_nothing(small_run: Path, tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    _write_times(run)
    (run / "log.txt").write_text("Errors occurred while processing the raw events\n")
    row = {**CELL, "made_by": "profkit run", **read_row(read_trace(run), run, None)}
    assert str(row["status"]).startswith("failed(self-check: the profiler's log says")
    assert not {"forward", "forward_ratio", "softmax_us"} & row.keys()
    assert "- small" not in report([row], {}).markdown


def test_ranges_alone_answer_for_times_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "trace.sqlite").write_bytes(TINY_NSYS.read_bytes())
    _write_times(tmp_path)
    row = {**CELL, "status": "ok", "made_by": "profkit run", **read_row(read_trace(tmp_path), tmp_path, None)}
    assert row["forward_recorded_ms"] > 0
    assert row["reason"] == "the profiler saw no GPU work: there are times of ranges alone"
    answers = {letter: answer([row]) for letter, (_, answer) in QUESTIONS.items()}
    assert answers.pop("a").commands[0] == "profkit ranges CAPTURE --numbered"
    assert not any(answer.short for answer in answers.values())
    report([row], {})


def test_what_does_not_fit_after_all_is_left_out_and_the_rest_recorded(
    monkeypatch: pytest.MonkeyPatch, small_run: Path
) -> None:
    tried: list[tuple[int, ...]] = []

    def record(_cell: object, contexts: Sequence[int], *_rest: object) -> Path:
        tried.append(tuple(contexts))
        if 512 in contexts:
            raise capture.MemoryFull("the GPU's memory is full (2.00 GiB more did not fit)")
        return small_run

    monkeypatch.setattr(measure, "record", record)
    cells = build_cells(["small"], [256, 512], 4, 2, NSYS)[:2]
    fits, does_not = measure.measure_cells(cells, "cuda", small_run.parent)
    assert tried == [(256, 512), (256,)]
    assert (fits["status"], does_not["status"]) == ("ok", "OOM(step)")
    assert does_not["reason"] == "the GPU's memory is full (2.00 GiB more did not fit)"
    assert fits["top_calls"] == 84
    assert fits["made_by"] == (
        "profkit run --nsys --no-keep-report --context 256 --device cuda --passes train --batch 4 --steps 2 model.small"
        " -o captures/small"
    )


@pytest.mark.parametrize(
    ("reason", "error"), [("the memory is full; try", capture.MemoryFull), ("nsys left no report", RunError)]
)
def test_a_failed_run_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, error: type[Exception]
) -> None:
    def fail(argv: Sequence[str], *_rest: object) -> int:
        run = Path(argv[argv.index("-o") + 1])
        run.mkdir(parents=True)
        (run / "manifest.json").write_text(json.dumps({"status": "failed", "reason": reason}))
        return 1

    monkeypatch.setattr(capture, "run_child", fail)
    for _ in range(2):  # the second time in the place of what the first one left
        with pytest.raises(error, match=reason):
            capture.record(CELL, [256], "cuda", tmp_path)


def test_the_most_telling_cells_come_first() -> None:
    sizes, contexts = GRIDS["reports"]
    cells = build_cells(sizes, contexts, 4, 3, NSYS)
    assert len(cells) == 5 * 4 * 2
    captures = list(dict.fromkeys((cell["size"], cell["passes"]) for cell in cells))
    assert captures[:3] == [("small", TRAIN), ("small", INFERENCE), ("medium", TRAIN)]
    assert captures[-1] == ("2.7B", INFERENCE)


def test_the_profiler_is_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose = nsight_questions.choose_profiler
    monkeypatch.setattr(nsight_questions, "find_nsys", lambda _environment: None)
    assert (choose(None, "cuda"), choose(None, "cpu")) == (KINETO, KINETO)
    assert "nsys is not here: torch.profiler records instead" in capsys.readouterr().err
    with pytest.raises(ToolError, match="--profiler nsys: nsys is not here"):
        choose(NSYS, "cuda")
    with pytest.raises(UsageError, match="--device mps: neither"):
        choose(None, "mps")
    monkeypatch.setattr(nsight_questions, "find_nsys", lambda _environment: object())
    assert (choose(None, "cuda"), choose(NSYS, "cpu"), choose(KINETO, "cuda")) == (NSYS, NSYS, KINETO)


def test_pictures_are_of_the_shortest_and_the_longest_context_that_most_have() -> None:
    assert choose_contexts([64, 128, 256, 512, 128, 256, 512, 128, 256]) == [128, 256]
    assert choose_contexts([128]) == [128]
    assert choose_contexts([]) == []


def test_a_report_of_nothing_measured() -> None:
    cells = build_cells(["small"], [128], 4, 3, NSYS)
    said = report([{**cell, "status": "not run"} for cell in cells], {})
    assert said.markdown.count("Not measured.") == 6
    assert "| 128 |" not in said.markdown
    assert said.pictures.keys() == {"ratios.png", "shares.png"}


def test_what_a_capture_warns_of_is_told_once_with_its_name(small_row: dict[str, Any]) -> None:
    nothing = "## What the captures warn of\n\nNothing. Times that are uneven within one phase are marked in (a)."
    assert report([small_row], {}).markdown.endswith(nothing)
    doubted = {**small_row, "recorder_warnings": ["the times vary widely"], "self_check_warnings": ["2 late kernels"]}
    text = report([doubted, {**doubted, "context": 512}], {}).markdown
    assert text.endswith("- `captures/small`: the times vary widely\n- `captures/small`: 2 late kernels")


def test_the_tables_show_what_a_cell_without_an_answer_is(small_row: dict[str, Any]) -> None:
    failed = {**CELL, "context": 512, "status": "failed(self-check: events are missing)"}
    other = {**small_row, "batch": 8, "top_calls": 99.0}
    text = report([small_row, failed, other], {}).markdown
    assert "## In short: batch 4, 2 steps recorded by Nsight Systems" in text
    assert "| 256 | 1.50 (36%)\\*† |\n| training, forward | 512 | failed(self-check: events are missing) |" in text
    assert "1.50 (small, context 256) in `forward` of training" in text
    assert "1 cell of another batch, steps or profiler: see the CSV." in text
    assert "99" not in text.split("## (b)")[1].split("## (c)")[0]


def test_the_answers_come_first_and_the_pictures_next(small_row: dict[str, Any]) -> None:
    text = report([small_row, _inference(small_row, gemm=0.79)], {}).markdown
    marks = ["## In short", "![", "(ratios.png)", "(shares.png)", *(f"## ({letter})" for letter in "abcde"), "## What"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert text.count("profkit kernels ") == 8
    assert max(map(len, text.splitlines())) < 700


def _run(directory: Path, *arguments: str) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "recipes.nsight_questions", "--device", "cpu", "-o", str(directory)]
    done = subprocess.run(
        [*command, "--batch", "2", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    with (directory / "nsight_questions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_recipe_on_a_cpu(tmp_path: Path) -> None:
    first = _run(tmp_path / "out", "--context", "8,16")
    assert [(row["context"], row["passes"], row["status"]) for row in first] == [
        (context, passes, "ok") for context in ("8", "16") for passes in ("train", "forward")
    ]
    assert {row["profiler"] for row in first} == {"kineto"}
    assert {row["top_calls"] for row in first} == {"15.0"}  # by hand: seven products a layer, two layers, the head
    assert {row["softmax_flops"] for row in first} == {"2560", "10240"}
    text = (tmp_path / "out" / "nsight_questions.md").read_text()
    assert "`aten::mm` has the most operator time of forward" in text
    assert "kernel time" not in text
    told = "\n".join(line for line in text.splitlines() if not line.startswith(("What does", "## ", "profkit ", "| ")))
    assert "kernel" not in told
    assert text.count("| tiny | 8 | ") == 6  # in (b) to (e), and two among all cells
    captures = sorted(path.name for path in (tmp_path / "out" / "captures").iterdir())
    assert captures == ["tiny-forward-kineto-2x8-16-2steps", "tiny-train-kineto-2x8-16-2steps"]

    again = _run(tmp_path / "out", "--context", "8,12,16")
    assert [row for row in again if row["context"] != "12"] == first
    assert len(list((tmp_path / "out" / "captures").iterdir())) == 4
    raw = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert {row["forward"]["range"] for row in raw if row["context"] == 12} == {"step */forward"}
    assert {row["forward"]["range"] for row in raw if row["context"] == 8} == {"context 8/step */forward"}
    assert {row["softmax_instances"] for row in raw} == {2 * 2}  # layers and steps of its own context


@pytest.mark.nsys
def test_the_recipe_under_nsys_on_a_cpu(tmp_path: Path) -> None:
    rows = _run(tmp_path / "out", "--context", "8,16", "--profiler", "nsys")
    assert {(row["profiler"], row["status"]) for row in rows} == {("nsys", "ok")}
    assert all(float(row["forward_recorded_ms"]) > 0 for row in rows)
    assert {row["top_kernel"] for row in rows} == {""}
    assert (
        "by Nsight Systems (wall time of the range, median of 2 steps, "
        in (tmp_path / "out" / "nsight_questions.md").read_text()
    )
    assert not list((tmp_path / "out").rglob("*.nsys-rep"))
