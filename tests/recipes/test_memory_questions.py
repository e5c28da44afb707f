"""Its cells, a recorded cell with a played allocator, real snapshots read, what is said, and the command on a CPU."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import profkit
from profkit.capture import recorded_training
from profkit.capture.owners import OwnerLedger
from profkit.errors import RunError, UsageError
from profkit.models.presets import PRESETS
from profkit.run_directory import LEDGER, SNAPSHOT
from recipes.memory_questions import RECIPE, main
from recipes.model_memory import measure
from recipes.model_memory.cells import (
    GRIDS,
    KEYS,
    Files,
    build_cells,
    choose_timelines,
    describe_cell,
    name_of,
    workload_of,
)
from recipes.model_memory.predicted import needed_bytes
from recipes.model_memory.recorded import describe_memory, draw_recorded, read_recorded
from recipes.model_memory.report import add_columns, report
from tests.captures import capture
from tests.conftest import ROOT
from tests.recipes.test_memory_predicted import Played, without_logits

TRACE = ROOT / "traces" / "small-train.snapshot.pickle.gz"


def _cell(**changed: Any) -> dict[str, Any]:
    setting = {"size": "tiny", "context": 48, "passes": "train", "dtype": "fp32", "checkpoint_layers": 0, "batch": 2}
    return {**setting, **changed}


def test_the_reports_grid() -> None:
    cells = build_cells(GRIDS["reports"], 4)
    assert len({name_of(cell) for cell in cells}) == len(cells) == 3 * 3 * 2 + 2 * 6
    assert {cell["size"] for cell in cells} == {"2.7B"}
    assert name_of(cells[0]) == "2.7B-512-train-fp32"
    assert {cell["context"] for cell in cells if cell["checkpoint_layers"]} == {512}
    assert [name_of(cell) for cell in choose_timelines(cells)] == ["2.7B-512-forward-fp32", "2.7B-512-train-fp32"]
    assert name_of(cells[-1]) == "2.7B-512-train-fp32-checkpoint32"


def test_a_name_tells_a_cell_from_all_others() -> None:
    cells = [cell for batch in (4, 8) for cell in build_cells(GRIDS["reports"], batch)]
    for name in (name_of, describe_cell):
        assert len(set(map(name, cells))) == len(cells)
    assert describe_cell(cells[6]) == "2.7B, context 512, forward-backward, fp32, a checkpoint every layer"


def test_no_checkpoint_has_more_layers_than_there_are() -> None:
    cells = build_cells({**GRIDS["reports"], "size": ("tiny", "small"), "checkpoint_layers": (0, 1, 2, 12, 13)}, 4)
    layers = {size: {cell["checkpoint_layers"] for cell in cells if cell["size"] == size} for size in ("tiny", "small")}
    assert layers == {"tiny": {0, 1, 2}, "small": {0, 1, 2, 12}}


class Left(Played):
    """A played step, and what it leaves where a recording would."""

    def leave(self, snapshot: Path, ledger: Path, folder: Path) -> None:
        folder.mkdir()
        self.write_run(folder)
        shutil.copy(folder / SNAPSHOT, snapshot)
        shutil.copy(folder / LEDGER, ledger)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Let a CPU be recorded: its steps run, and a played allocator's history of the same cell is left."""
    playing: dict[str, Any] = {"edits": ()}

    @contextmanager
    def recorded(snapshot: Path, ledger: Path, device: Any, *, stacks: str, max_entries: int) -> Iterator[OwnerLedger]:
        assert (stacks, max_entries) == ("python", 1_000_000)
        assert device == torch.device("cpu")
        owners = OwnerLedger(ledger, None, 0, None)
        try:
            yield owners
        finally:
            owners.close()
        Left(playing["workload"], *playing["edits"]).leave(snapshot, ledger, tmp_path / "played")

    monkeypatch.setattr(measure, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(recorded_training, "recorded_memory", recorded)
    return playing


@pytest.mark.parametrize(
    "changed", [{}, {"passes": "forward"}, {"dtype": "bf16", "passes": "forward-backward"}, {"checkpoint_layers": 1}]
)
def test_a_recorded_cell(played: dict[str, Any], tmp_path: Path, changed: dict[str, Any]) -> None:
    cell = _cell(**changed)
    played["workload"] = workload_of(cell)
    files = Files({name_of(cell): tmp_path / "timeline.png"}, tmp_path / "captures")
    row: dict[str, Any] = measure.measure_cell(cell, "cpu", files)
    assert row["status"] == "ok"
    assert row["replay_difference_bytes"] == row["difference_bytes"] == 0
    assert row["requested_peak_bytes"] == max(phase["predicted_bytes"] for phase in row["requested_phases"])
    assert sum(row["by_category"].values()) == row["allocated_peak_bytes"] == max(row["phase_peaks"].values())
    assert row["peak_phase"] == max(row["phase_peaks"], key=lambda phase: row["phase_peaks"][phase])
    assert len(row["largest"]) == 10
    assert row["largest"][0]["bytes"] == max(one["bytes"] for one in row["largest"])
    assert ("saved_bytes" in row) == (not cell["checkpoint_layers"])
    assert (tmp_path / row["timeline"]).read_bytes().startswith(b"\x89PNG")
    kept = profkit.read_snapshot(tmp_path / "captures" / name_of(cell)).memory()
    assert kept.totals.allocated_peak_bytes == row["allocated_peak_bytes"]
    with pytest.raises(RunError, match="exists and is not empty; name another directory with --keep-captures"):
        measure.measure_cell(cell, "cpu", files)


def test_what_an_interrupted_recording_kept_gives_way_to_the_next(played: dict[str, Any], tmp_path: Path) -> None:
    cell = _cell()
    played["workload"] = workload_of(cell)
    left = tmp_path / "captures" / name_of(cell)
    left.mkdir(parents=True)
    (left / "manifest.json").write_text('{"status": "incomplete"}')
    (left / "partial.snapshot.pickle").write_text("")
    assert measure.measure_cell(cell, "cpu", Files({}, tmp_path / "captures"))["status"] == "ok"
    assert not (left / "partial.snapshot.pickle").exists()
    assert json.loads((left / "manifest.json").read_text())["status"] == "complete"


def test_a_difference_from_the_prediction_has_its_sign(played: dict[str, Any]) -> None:
    cell = _cell()
    played |= {"workload": workload_of(cell), "edits": (without_logits, without_logits)}
    row = measure.measure_cell(cell, "cpu", Files())
    assert row["difference_bytes"] == -2 * 48 * 10_000 * 4


def _short(*_arguments: Any, **_named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")


@pytest.mark.parametrize(
    ("phase", "owner", "name"),
    [("model", torch, "randint"), ("backward", torch.Tensor, "backward"), ("optimizer", torch.optim.AdamW, "step")],
)
def test_running_out_of_memory_is_told_with_its_phase(
    played: dict[str, Any], monkeypatch: pytest.MonkeyPatch, phase: str, owner: Any, name: str
) -> None:
    played["workload"] = workload_of(_cell())
    monkeypatch.setattr(owner, name, _short)
    row = measure.measure_cell(_cell(), "cpu", Files())
    assert (row["status"], row["requested_bytes"]) == (f"OOM({phase})", 2 << 30)
    assert "allocated_peak_bytes" not in row


def test_what_does_not_fit_is_judged_by_what_runs() -> None:
    """Elsewhere than on CUDA one forward pass, and with checkpoints nothing."""
    train = _cell(context=256, batch=4)
    on_cpu, on_cuda = needed_bytes(train, "cpu"), needed_bytes(train, "cuda")
    kept = measure.measure_cell(train, "cpu", Files())["saved_bytes"]
    assert 4 * PRESETS["tiny"].parameter_count + int(str(kept)) < on_cpu < on_cuda / 1.4
    assert measure.measure_cell(_cell(checkpoint_layers=1), "cpu", Files()) == {"status": "ok"}


def test_without_a_recorder_nothing_is_told_of_peaks() -> None:
    row = measure.measure_cell(_cell(), "cpu", Files())
    assert not {"allocated_peak_bytes", "largest", "difference_bytes"} & row.keys()
    assert row["residual_bytes"] == 2 * 48 * 128 * 4


def test_a_real_snapshot() -> None:
    """The allocator itself reported the peaks (traces/README.md)."""
    row: dict[str, Any] = read_recorded(TRACE)
    assert (row["allocated_peak_bytes"], row["reserved_peak_bytes"]) == (3_276_553_216, 3_462_397_952)
    assert (row["peak_phase"], row["is_exact"], row["replay_difference_bytes"]) == ("backward", True, None)
    assert row["phase_peaks"].keys() == {"forward", "loss", "backward", "optimizer"}
    first = row["largest"][0]
    assert (first["bytes"], first["category"], first["phase"]) == (41_943_040, "activations", "forward")
    assert first["stack"][0].startswith("transformer.py:")
    assert not any("/" in frame for one in (*row["largest"], *row["stacks"]) for frame in one["stack"])
    assert "difference_bytes" not in row


@pytest.mark.parametrize("name", ["midrun", "expandable"])
def test_real_snapshots_with_the_allocators_own_peaks(name: str) -> None:
    row = read_recorded(capture(f"{name}.pickle"))
    said = json.loads(capture(f"{name}.stats.json").read_text())
    assert row["allocated_peak_bytes"] == said["allocated_bytes.all.peak"]
    assert row["requested_peak_bytes"] == said["requested_bytes.all.peak"]


def test_a_timeline_is_named_after_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda _axes, text, **_named: titles.append(text))
    draw_recorded(TRACE, tmp_path / "timeline.png", "small, context 256, train, fp32")
    assert titles[0].startswith("small, context 256, train, fp32, device 0: allocated peak 3.052 GiB")


def _rows(tmp_path: Path, *cells: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of some cells as played, with all columns, as on CUDA."""
    rows = []
    for cell in cells:
        folder = tmp_path / name_of(cell)
        folder.mkdir()
        Played(workload_of(cell)).compare(folder, workload_of(cell))
        counted = {} if cell["checkpoint_layers"] else measure.measure_cell(cell, "cpu", Files())
        rows.append({**cell, **counted, **read_recorded(folder), "device": "cuda", "status": "ok"})
    add_columns(rows)
    return rows


def test_each_sentence_has_its_number_and_its_command(tmp_path: Path) -> None:
    both = {"passes": "forward-backward", "context": 96}
    cells = [
        *(_cell(), _cell(context=24), _cell(dtype="bf16"), _cell(**both), _cell(checkpoint_layers=1, **both)),
        _cell(checkpoint_layers=2, **both),
    ]
    rows = _rows(tmp_path, *cells)
    text = report(rows, {}).markdown
    low, high = rows[1]["requested_peak_bytes"], rows[0]["requested_peak_bytes"]
    assert f"at context 48: {high / low:.3f} times as much for 2 times the context" in text
    assert "tiny, train, context 48, peak under bf16 autocast against fp32: allocated " in text
    assert "batch × context × d_model × width = 2 × 48 × 128 × 4 B = 49,152 B = 48.00 KiB" in text
    assert "Of 6 measured peaks 6 were predicted to the byte" in text
    assert "`torch.cuda.max_memory_allocated()` to the byte in 6 of 6 rows" in text
    assert re.search(
        r"at the peak without checkpoints, in \w+; [\d.]+ MiB at the lowest with them, -[\d.]+%, one every", text
    )
    assert text.count("python -m recipes.memory_questions") == 1
    assert (
        "`python -m recipes.memory_questions --device cuda --size tiny --context CONTEXT --passes PASSES --dtype DTYPE "
        "--checkpoint-layers CHECKPOINT_LAYERS --batch 2 -o again --keep-captures captures`, then `profkit memory "
        "captures/tiny-CONTEXT-PASSES-DTYPE-checkpointCHECKPOINT_LAYERS-batch2`"
    ) in text
    assert (
        "all 21 measured ones are the predicted ones to the byte (6 of forward, 6 of loss, 6 of backward, 3 of " in text
    )


def test_a_wrong_prediction_is_told(tmp_path: Path) -> None:
    rows = _rows(tmp_path, _cell())
    rows[0] |= {"difference_bytes": -4096, "replay_difference_bytes": 512, "warnings": ["the peak is a bound"]}
    text = report(rows, {}).markdown
    assert "Of 1 measured peaks 0 were predicted to the byte" in text
    assert "the largest difference is -4,096 B" in text
    assert "to the byte in 0 of 1 rows" in text
    assert "- the peak is a bound (1 of 1 rows)" in text


def test_the_sum_of_all_kinds_is_not_the_peak() -> None:
    rows = [{**cell, "device": "cuda", "status": "not run"} for cell in build_cells(GRIDS["reports"], 4)]
    add_columns(rows)
    row = rows[0]
    weights = 4 * PRESETS["2.7B"].parameter_count
    assert row["added_up_bytes"] == 4 * weights + row["predicted_saved_bytes"]
    assert row["predicted_peak_bytes"] == max(phase["bytes"] for phase in row["predicted_phases"])
    assert row["predicted_peak_bytes"] < row["added_up_bytes"]


def test_the_difference_is_that_of_the_two_peaks_whatever_their_phases(tmp_path: Path) -> None:
    compared = Played(workload_of(_cell())).compare(tmp_path, workload_of(_cell()))
    backward = next(phase for phase in compared.phases if phase.name == "backward")
    optimizer = replace(backward, name="optimizer", measured_bytes=backward.measured_bytes + 10, predicted_bytes=1)
    moved = replace(compared, phases=(backward, optimizer))
    row = describe_memory(profkit.read_snapshot(tmp_path).memory(), moved)
    assert (row["requested_phase"], row["difference_bytes"]) == ("optimizer", 10)


def test_a_peak_before_the_first_phase_is_called_so(tmp_path: Path) -> None:
    rows = _rows(tmp_path, _cell(), _cell(context=24))
    for row in rows:
        row |= {"peak_phase": None, "requested_peak_bytes": row["requested_peak_bytes"] + 1}
    text = report(rows, {}).markdown
    assert text.count("in the making of the model at context") == 2
    assert text.count("| 24 | 1") == text.count("MiB, the making of the model |") - 1 == 1
    assert "in None" not in text


@pytest.mark.parametrize("asked", [["--checkpoint-layers", "3"], ["--checkpoint-layers", "1", "--passes", "forward"]])
def test_checkpoints_that_nothing_has_are_refused(asked: list[str]) -> None:
    done = CliRunner().invoke(main, ["--device", "cpu", *asked])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(f"--checkpoint-layers {asked[1]}: nothing has it")


def test_a_report_of_nothing_measured() -> None:
    rows = [{**cell, "device": "cuda", "status": "not run"} for cell in build_cells(GRIDS["reports"], 4)]
    add_columns(rows)
    said = report(rows, {})
    assert "No peak was measured" in said.markdown
    assert said.pictures.keys() == {"peaks.png", "checkpoints.png"}
    assert "measured peaks" not in said.markdown


def test_the_recipe_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "recipes.memory_questions", "--device", "cpu", "-o", str(out)]
    command += ["--context", "16,1048576", "--passes", "forward,train", "--dtype", "fp32", "--checkpoint-layers", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    with (out / "memory_questions.csv").open(newline="") as file:
        rows = {(row["context"], row["passes"], row["checkpoint_layers"]): row for row in csv.DictReader(file)}
    measured, too_large = rows["16", "train", "0"], rows["1048576", "train", "1"]
    assert list(measured) == list(RECIPE.columns)
    assert (measured["status"], measured["peak_GiB"], measured["difference_bytes"]) == ("ok", "", "")
    assert measured["saved_bytes"] == measured["predicted_saved_bytes"]
    assert rows["16", "forward", "0"]["saved_bytes"] == "0"
    assert too_large["status"] == "not run"
    assert too_large["reason"].startswith("predicted ")
    assert int(too_large["predicted_peak_bytes"]) > 2**40
    cells = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    assert all(set(KEYS) <= cell.keys() for cell in cells)
    for name in ("peaks.png", "checkpoints.png", "manifest.json", "memory_questions.md"):
        assert (out / name).stat().st_size > 0
