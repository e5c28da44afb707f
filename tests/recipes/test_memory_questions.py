"""Memory of a model: the cells, a recorded cell read back, what a block saves, and the report."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from profkit.errors import UsageError
from profkit.models.options import PRESETS
from recipes.memory_questions import main, predict
from recipes.model_memory import measure
from recipes.model_memory.cells import GRIDS, build_cells, name_of, work_of
from recipes.model_memory.measure import Part, compare_phases, count_saved, group_parts, measure_cell, read_recorded
from recipes.model_memory.predict import describe_prediction, predict_memory
from recipes.model_memory.report import add_columns, phase_of, report
from recipes.whole_model import training
from recipes.whole_model.cells import Work
from tests.conftest import ROOT

TRACE = ROOT / "traces" / "small-train.snapshot.pickle.gz"
SMALL = Work("small", 256)
"""What TRACE recorded, on an H200."""
BATCH, CONTEXT = 2, 24
GIB = 2**30


def _cell(**changed: Any) -> dict[str, Any]:
    setting = {"size": "tiny", "context": 48, "passes": "train", "dtype": "fp32", "checkpoint_layers": 0, "batch": 2}
    return {**setting, **changed}


def test_no_checkpoint_has_more_layers_than_the_model() -> None:
    cells = build_cells({**GRIDS["reports"], "size": ("tiny", "small"), "checkpoint_layers": (0, 1, 2, 12, 13)}, 4)
    layers = {size: {cell["checkpoint_layers"] for cell in cells if cell["size"] == size} for size in ("tiny", "small")}
    assert layers == {"tiny": {0, 1, 2}, "small": {0, 1, 2, 12}}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let `profkit run` leave a real recording of the small model, and return the commands that were run."""
    commands: list[list[str]] = []

    def profkit(*words: str) -> None:
        commands.append(list(words))
        if words[0] == "run":
            run = Path(words[words.index("-o") + 1])
            run.mkdir(parents=True)
            shutil.copy(TRACE, run / "snapshot.pickle.gz")
            Path(json.loads(words[-1])["result"]).write_text("null")
        else:
            Path(words[-1]).write_bytes(b"PNG")

    monkeypatch.setattr(measure, "_profkit", profkit)
    monkeypatch.setattr(measure, "read_recorded", lambda run, work: read_recorded(run / "snapshot.pickle.gz", work))
    monkeypatch.setattr(measure, "_count", lambda _training: {"saved_bytes": 7})
    return commands


def test_a_recorded_cell_has_the_predicted_peaks_to_the_byte(recorded: list[list[str]], tmp_path: Path) -> None:
    cell = _cell(size="small", context=256, batch=4)
    row: dict[str, Any] = measure_cell(cell, "cuda", {name_of(cell): tmp_path / "timeline.png"})
    assert (row["status"], row["saved_bytes"], row["timeline"]) == ("ok", 7, "timeline.png")
    assert row["requested_peak_bytes"] == predict_memory(SMALL).peak.bytes
    assert [phase["difference_bytes"] for phase in row["requested_phases"]] == [0, 0, 0, 0]
    assert (row["requested_phase"], row["difference_bytes"]) == ("backward", 0)
    run, memory = recorded
    assert run[:2] == ["run", "--memory-only"]
    assert Work(
        **{key: value for key, value in json.loads(run[-1]).items() if key not in ("device", "steps", "result")}
    )
    assert memory[-2:] == ["--timeline", str(tmp_path / "timeline.png")]


def test_a_recorded_step_that_runs_out_of_memory_names_the_phase(
    recorded: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    del recorded
    shortage = {"phase": "backward", "requested_bytes": 2 << 30, "free_bytes": 1}
    monkeypatch.setattr(measure, "_profkit", lambda *words: Path(json.loads(words[-1])["result"]).write_text(
        json.dumps(shortage)))  # fmt: skip
    row = measure_cell(_cell(), "cuda", {})
    assert (row["status"], row["requested_bytes"]) == ("OOM(backward)", 2 << 30)
    assert "allocated_peak_bytes" not in row


@pytest.mark.parametrize(
    ("phase", "owner", "name"),
    [("model", torch, "randint"), ("backward", torch.Tensor, "backward"), ("optimizer", torch.optim.AdamW, "step")],
)
def test_the_recorded_script_leaves_the_phase_in_which_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, owner: Any, name: str
) -> None:
    def short(*_arguments: Any, **_named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    result = tmp_path / "result.json"
    setting = json.dumps({"size": "tiny", "context": 16, "device": "cpu", "steps": 2, "result": str(result)})
    training.main(setting)
    assert json.loads(result.read_text()) is None
    monkeypatch.setattr(owner, name, short)
    training.main(setting)
    found = json.loads(result.read_text())
    assert (found["phase"], found["requested_bytes"]) == (phase, 2 << 30)


def test_outside_cuda_only_a_forward_pass_must_fit() -> None:
    """With checkpoints nothing runs there."""
    train = _cell(context=256, batch=4)
    on_cpu, on_cuda = predict(train, "cpu"), predict(train, "cuda")
    kept = measure_cell(train, "cpu", {})["saved_bytes"]
    assert 4 * PRESETS["tiny"].parameter_count + int(str(kept)) < on_cpu < on_cuda / 1.4
    assert measure_cell(_cell(checkpoint_layers=1), "cpu", {}) == {"status": "ok"}


def test_outside_cuda_a_cell_has_no_peaks() -> None:
    row = measure_cell(_cell(), "cpu", {})
    assert not {"allocated_peak_bytes", "largest", "difference_bytes"} & row.keys()
    assert row["residual_bytes"] == 2 * 48 * 128 * 4


def test_the_peaks_of_a_real_snapshot_are_those_the_allocator_reported() -> None:
    """The allocator itself reported the peaks (traces/README.md)."""
    row: dict[str, Any] = read_recorded(TRACE, SMALL)
    assert (row["allocated_peak_bytes"], row["reserved_peak_bytes"]) == (3_276_553_216, 3_462_397_952)
    assert (row["peak_phase"], row["is_exact"], row["replay_difference_bytes"]) == ("backward", True, None)
    assert row["phase_peaks"].keys() == {"forward", "loss", "backward", "optimizer"}
    first = row["largest"][0]
    assert (first["bytes"], first["category"], first["phase"]) == (41_943_040, "activations", "forward")
    assert first["label"].startswith("transformer.py:")


def test_the_difference_is_between_the_two_peaks_whatever_their_phases() -> None:
    predicted = {peak.phase: peak.bytes for peak in predict_memory(SMALL).peaks}
    row: dict[str, Any] = compare_phases({**predicted, "optimizer": predicted["backward"] + 10}, SMALL)
    assert (row["requested_phase"], row["difference_bytes"]) == ("optimizer", 10)
    assert row["requested_phases"][-1]["difference_bytes"] == predicted["backward"] + 10 - predicted["optimizer"]


@pytest.mark.parametrize("asked", [["--checkpoint-layers", "3"], ["--checkpoint-layers", "1", "--passes", "forward"]])
def test_checkpoints_of_no_cell_are_refused(asked: list[str]) -> None:
    done = CliRunner().invoke(main, ["--device", "cpu", *asked])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(f"--checkpoint-layers {asked[1]}: no cell has it")


def _row(**changed: Any) -> dict[str, Any]:
    """Return a row as measured, with what arithmetic says of it; ``peak`` is the predicted and the measured one."""
    cell = {"size": "2.7B", "context": 512, "passes": "train", "dtype": "fp32", "checkpoint_layers": 0, "batch": 4}
    row: dict[str, Any] = {
        **cell,
        "device": "cuda",
        "status": "ok",
        **{key: changed[key] for key in cell & changed.keys()},
    }
    add_columns([row])
    peak = changed.pop("peak", row["predicted_peak_bytes"])
    phase = changed.pop("phase", row["predicted_phase"])
    measured = {"phase": phase, "requested_bytes": peak, "predicted_bytes": peak, "difference_bytes": 0}
    row |= {"requested_peak_bytes": peak, "predicted_peak_bytes": peak, "difference_bytes": 0}
    row |= {"allocated_peak_bytes": peak + 2**20, "reserved_peak_bytes": peak + GIB, "replay_difference_bytes": 0}
    row |= {"peak_phase": phase, "requested_phase": phase, "requested_phases": [measured], "predicted_phase": phase}
    return row | changed


def test_a_difference_from_the_prediction_and_a_warning_are_shown() -> None:
    row = _row()
    text = report([row], {}).markdown
    assert "1 of 1 measured peaks of phases are the predicted ones to the byte." in text
    assert "1 of 1 replayed peaks are `torch.cuda.max_memory_allocated()` to the byte." in text
    row["requested_phases"][0]["difference_bytes"] = -512
    row |= {"replay_difference_bytes": 512, "warnings": ["the peak is a bound"]}
    text = report([row], {}).markdown
    assert "0 of 1 measured peaks of phases" in text
    assert "0 of 1 replayed peaks" in text
    assert re.search(r"\| backward \| \d+ \| \d+ \| -512 \|", text)
    assert not re.search(r"\| optimizer \| \d+ \|", text)
    assert "- the peak is a bound (1 of 1 rows)" in text


def test_a_peak_before_the_first_phase_is_shown_as_such() -> None:
    row = _row()
    row |= {"peak_phase": None, "requested_peak_bytes": row["requested_peak_bytes"] + 1}
    assert phase_of(row) == "the making of the model"
    text = report([row], {}).markdown
    assert "GiB, the making of the model |" in text
    assert "None |" not in text


def test_a_block_saves_what_a_hand_calculation_says() -> None:
    """In fp32: ten tensors of the stream, five of the inner width, exponentials and weights of the scores; small ones.

    The stream's: the input, both norms' scaled and output, rotated query and key, values by head, mixed values, the
    stream after attention. The inner width's: gate, sigmoid, their product, w3's output, w2's input.
    """
    row: dict[str, Any] = measure_cell(_cell(context=CONTEXT), "cpu", {})
    preset, rows = PRESETS["tiny"], BATCH * CONTEXT
    scores = BATCH * preset.num_heads * CONTEXT**2
    large = 10 * rows * preset.d_model + 5 * rows * preset.d_ff + 2 * scores
    small = scores // CONTEXT + 2 * rows  # the sums of the exponentials, 1 / root mean square
    mask_bytes = CONTEXT**2
    assert row["saved_bytes_by_block"] == [4 * (large + small) + mask_bytes] * preset.num_layers
    assert sum(part["bytes"] for part in row["saved_parts"]) == row["saved_block_bytes"]
    first = row["saved_parts"][0]
    assert (first["made_by"], first["saved_in"], first["count"]) == ("mm", "ffn", 2)
    assert first["bytes"] == 2 * 4 * rows * preset.d_ff
    assert (row["residual_shape"], row["residual_dtype"]) == ([BATCH, CONTEXT, preset.d_model], "float32")


@pytest.mark.parametrize("passes", ["forward", "forward-backward", "train"])
def test_saved_bytes_are_the_predicted_ones(passes: str) -> None:
    cell = _cell(passes=passes, context=CONTEXT)
    counted = measure_cell(cell, "cpu", {})["saved_bytes"]
    assert counted == describe_prediction(work_of(cell), "cpu")["predicted_saved_bytes"]
    assert (counted == 0) == (passes == "forward")


def test_autocast_copies_of_the_weights_are_saved() -> None:
    row: dict[str, Any] = measure_cell(_cell(dtype="bf16", context=CONTEXT), "cpu", {})
    preset = PRESETS["tiny"]
    weights = {part["bytes"]: part for part in row["saved_parts"] if part["made_by"] == "cast of a weight"}
    of_ffn = 2 * preset.d_model * preset.d_ff
    assert weights[of_ffn]["dtype"] == "bfloat16"
    assert weights[of_ffn]["saved_in"].startswith("ffn.w")
    assert row["residual_dtype"] == "float32"


class Twice(nn.Module):
    """Saves one storage twice, by a view too, a parameter, and what its input already is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(hidden)
        return (powers @ self.weight) * powers.T.T


def test_a_storage_counts_once_where_it_is_saved_first() -> None:
    blocks = nn.ModuleList([Twice(), Twice()])
    given = torch.ones(3, 3)

    def forward() -> torch.Tensor:
        result = given
        for block in blocks:
            result = block(result)
        return torch.exp(result)

    saved = count_saved(blocks, blocks, [given], forward)
    first, second = saved.blocks
    # The first block's exponentials take no gradient; its product is kept by the multiplication.
    assert [part.made_by for part in first.parts] == ["without a gradient"]
    assert [part.made_by for part in second.parts] == ["exp", "mm"]
    assert (first.bytes, second.bytes, saved.outside_bytes) == (36, 72, 36)
    assert saved.bytes == 36 * 4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in blocks.modules())


def test_equal_parts_are_grouped_and_add_up() -> None:
    parts = [Part("exp", "attention", (size, size), "float32", 4 * size**2) for size in range(1, 9)]
    lines: list[dict[str, Any]] = group_parts([*parts, parts[6], parts[7]])
    assert [line["count"] for line in lines] == [2, 2, 1, 1, 1, 3]
    assert sum(line["bytes"] for line in lines) == sum(part.bytes for part in (*parts, *parts[6:]))
    assert lines[-1]["made_by"] is None
    assert group_parts(parts[:1])[0]["count"] == 1
