"""Predicted memory beside measured: exact where they agree, and named, with its sign, where they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profkit.analysis.memory.opened_snapshot import read_snapshot
from profkit.errors import RunError
from profkit.models.memory import StepAccount, predict_memory
from profkit.models.memory_tape import Block as Told
from profkit.models.workload import Workload
from profkit.run_directory import PREDICTED
from recipes.model_memory.compared import PhaseComparison, PredictedMemory, compare_prediction, read_prediction
from tests.allocator_reference import Block
from tests.memory_captures import Training

TINY = Workload("tiny", dtype="bf16", batch=2, context=48, warmup_steps=1, steps=1)
WORKSPACE_BYTES = 2**25

Edit = Callable[[Told], int | None]

ROLES = {"parameters": "parameter", "optimizer state": "optimizer_state", "buffers": "buffer", "inputs": "input"}
STACKS = {"parameters": "model", "optimizer state": "state", "buffers": "model", "inputs": "data"}


def as_told(block: Told) -> int | None:
    return block.bytes


def without_logits(block: Told) -> int | None:
    return None if block.name == "logits" else block.bytes


class Played(Training):
    """A step of a built-in model as its own prediction has it, played to the reference allocator.

    Args:
        edits: for each time that it is played, how many bytes a block takes instead; None leaves it out.
    """

    def __init__(self, workload: Workload, *edits: Edit) -> None:
        super().__init__(steps=0)
        self.ledger = self.ledger[:1]
        left = self.weights
        for edit in edits or (as_told,):
            for block in left:
                self.allocator.free(block)
            left = self._play(workload, edit)

    def _play(self, workload: Workload, edit: Edit) -> list[Block]:
        tape = StepAccount(workload, WORKSPACE_BYTES).tape
        starts = {start: (name, number) for number, (name, start) in enumerate(tape.phases)}
        live: dict[Told, Block] = {}
        open_phase = None
        for place, (sign, block) in enumerate(tape.events):
            if place in starts:
                open_phase = self._turn(open_phase, starts[place][0])
            size = edit(block)
            if size is None:
                continue
            if sign < 0:
                self.allocator.free(live.pop(block))
                continue
            role = ROLES.get(block.category)
            owner = (role, block.name) if role else ("gradient", block.name) if block.category == "gradients" else None
            stack = STACKS.get(block.category, "backward" if open_phase == "backward" else "forward")
            live[block] = self.malloc(size, stack, owner)
        self._turn(open_phase, None)
        return list(live.values())

    def _turn(self, before: str | None, after: str | None) -> str | None:
        if before not in (None, "before"):
            self.mark("END", str(before))
        if after not in (None, "before"):
            self.mark("START", str(after))
        return after

    def compare(self, folder: Path, workload: Workload) -> PredictedMemory:
        self.write_run(folder)
        (folder / PREDICTED).write_text(json.dumps(predict_memory(workload).to_dict()))
        prediction = read_prediction(folder / PREDICTED)
        assert prediction is not None
        result = compare_prediction(prediction, read_snapshot(folder).device())
        assert result is not None
        return result


class Replicated(Played):
    """The same in one of several ranks: DistributedDataParallel has made its buckets."""

    bucket_bytes = 25 * 2**20

    def _play(self, workload: Workload, edit: Edit) -> list[Block]:
        self.malloc(self.bucket_bytes, "bucket")
        return super()._play(workload, edit)


def phase_of(result: PredictedMemory, name: str) -> PhaseComparison:
    return next(phase for phase in result.phases if phase.name == name)


def test_a_run_as_predicted_leaves_nothing_unexplained(tmp_path: Path) -> None:
    result = Played(TINY).compare(tmp_path, TINY)
    assert [phase.name for phase in result.phases] == ["forward", "loss", "backward", "optimizer"]
    for phase in result.phases:
        assert phase.difference_bytes == phase.unexplained_bytes == 0
        assert phase.measured_bytes == phase.predicted_bytes == sum(line.bytes for line in phase.lines)
        assert phase.allocated_bytes == phase.measured_bytes + phase.padding_bytes
        assert phase.padding_bytes > 0
        assert sum(row.measured_bytes for row in phase.categories) == phase.measured_bytes
    assert result.peak_phase == result.predicted_peak_phase


@pytest.mark.parametrize("edits", [(without_logits, as_told), (as_told, without_logits)])
def test_of_several_steps_the_highest_counts(tmp_path: Path, edits: tuple[Edit, ...]) -> None:
    for phase in Played(TINY, *edits).compare(tmp_path, TINY).phases:
        assert phase.difference_bytes == phase.unexplained_bytes == 0


def test_the_same_bytes_under_another_name_are_explained(tmp_path: Path) -> None:
    """Stacks do not show autocast's copies of weights: by their lifetimes they count as activations."""
    forward = phase_of(Played(TINY).compare(tmp_path, TINY), "forward")
    rows = {row.category: row for row in forward.categories}
    copies, activations = rows["autocast copies"], rows["activations"]
    assert copies.predicted_bytes
    assert copies.measured_bytes == 0
    assert copies.explanation == f"{copies.predicted_bytes:,} B counted as activations"
    assert f"{copies.predicted_bytes:,} B predicted as autocast copies" in activations.explanation
    assert copies.unexplained_bytes == activations.unexplained_bytes == 0


@pytest.mark.parametrize("change", [+4096, -4096, None])
def test_bytes_that_one_side_alone_has_are_unexplained_with_their_sign(tmp_path: Path, change: int | None) -> None:
    def edit(block: Told) -> int | None:
        if block.name != "logits":
            return block.bytes
        return None if change is None else block.bytes + change

    logits = 2 * 48 * 10_000 * 2
    forward = phase_of(Played(TINY, edit).compare(tmp_path, TINY), "loss")
    expected = -logits if change is None else change
    assert forward.difference_bytes == forward.unexplained_bytes == expected
    row = next(row for row in forward.categories if row.category == "activations")
    assert row.unexplained_bytes == expected
    assert row.explanation.endswith("unexplained")


def test_another_workspace_is_named(tmp_path: Path) -> None:
    """Before Hopper cuBLAS is given 8,519,680 B."""
    small = 8_519_680
    played = Played(TINY, lambda block: small if block.category == "workspace" else block.bytes)
    result = played.compare(tmp_path, TINY)
    forward = phase_of(result, "forward")
    row = next(row for row in forward.categories if row.category == "workspace")
    assert row.difference_bytes == 2 * (small - WORKSPACE_BYTES)
    assert "another workspace" in row.explanation
    assert forward.unexplained_bytes == 0


def test_what_several_ranks_exchange_is_named(tmp_path: Path) -> None:
    for phase in Replicated(TINY).compare(tmp_path, replace(TINY, ranks=2)).phases:
        (row,) = [row for row in phase.categories if row.category == "communication"]
        assert row.measured_bytes == row.difference_bytes == phase.difference_bytes == Replicated.bucket_bytes
        assert "buckets" in row.explanation
        assert phase.unexplained_bytes == 0


def test_of_compiled_code_no_total_is_claimed(tmp_path: Path) -> None:
    compiled = replace(TINY, compile_mode="default")
    result = Played(TINY).compare(tmp_path, compiled)
    for phase in result.phases:
        assert phase.predicted_bytes is None
        assert phase.difference_bytes is None
        rows = {row.category: row for row in phase.categories}
        assert rows["activations"].predicted_bytes is None
        assert rows["parameters"].difference_bytes == rows["optimizer state"].difference_bytes == 0
    assert result.predicted_peak_phase is None


def test_a_run_without_a_prediction_has_none(tmp_path: Path) -> None:
    Training().write_run(tmp_path)
    assert read_prediction(tmp_path / PREDICTED) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "{",
        lambda content: "[]",
        lambda content: json.dumps({**content, "version": 99}),
        lambda content: json.dumps({**content, "phases": [{}]}),
        lambda content: json.dumps({**content, "lengths": 3}),
        lambda content: json.dumps({**content, "saved": [{**content["saved"][0], "count": 0}]}),
    ],
)
def test_a_damaged_prediction_is_refused_in_one_line(tmp_path: Path, damage: Callable[[dict[str, Any]], str]) -> None:
    path = tmp_path / PREDICTED
    path.write_text(damage(predict_memory(TINY).to_dict()))
    with pytest.raises(RunError) as raised:
        read_prediction(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
