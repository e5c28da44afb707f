"""Recorded owners name allocations, and the allocator's own peaks check the replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profkit import read_snapshot
from profkit.analysis.memory.recorded import find_capacity
from profkit.errors import SnapshotError
from profkit.report.commands.memory import build_memory_document
from profkit.report.document import render
from profkit.run.directory import OWNERS
from tests.allocator_reference import MIB
from tests.memory_captures import Training


def test_recorded_owners_name_the_allocations_and_the_allocators_peaks_agree(tmp_path: Path) -> None:
    result = read_snapshot(Training().write_run(tmp_path)).memory()
    rows = {row.category: row for row in result.composition.by_category}
    assert set(rows["parameters"].evidence) == set(rows["gradients"].evidence) == {"identity"}
    owners = {row.owner for row in read_snapshot(tmp_path).memory(stack="w1").composition.largest}
    assert owners == {"w1"}
    assert result.allocator_check is not None
    assert result.allocator_check.agrees
    assert result.allocator_check.unmatched_entries == 0


def test_the_run_records_the_earlier_peak_and_the_capacity(tmp_path: Path) -> None:
    training = Training()
    training.allocator.max_entries = 60
    training.step(3, False)
    training.ledger.append({**training.figures(), "moment": "start", "allocated_peak_bytes": 777})
    opened = read_snapshot(training.write_run(tmp_path))
    check = opened.memory().allocator_check
    assert check is not None
    assert check.agrees
    assert check.earlier_peak_bytes == 777
    shown = render(build_memory_document(opened.memory()), "table")
    assert "Before recording began PyTorch's own peak was 777 B" in shown
    assert find_capacity(opened.device().recorded, 0) == 2**34


@pytest.mark.parametrize(("more", "agrees"), [(512, True), (-512, False)])
def test_a_peak_from_before_the_recording_proves_only_that_none_was_higher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, agrees: bool
) -> None:
    training = Training()
    training.allocator.max_entries = 60
    training.step(3, False)
    figures = training.figures()
    figures["allocated_peak_bytes"] += more
    training.ledger.append({**figures, "moment": "start"})
    monkeypatch.setattr(training, "figures", lambda: figures)
    result = read_snapshot(training.write_run(tmp_path)).memory()
    assert result.allocator_check is not None
    assert (result.allocator_check.agrees, result.allocator_check.is_from_before) == (agrees, True)
    shown = render(build_memory_document(result), "table")
    assert "agree to the byte" not in shown
    assert ("ledger-disagrees" in {finding.code for finding in result.warnings}) == (not agrees)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"kind": "header", "version": 99}', "newer profkit"),
        ('{"kind": "owned"}', ":1: not a line"),
        ("[1]", ":1: not a line"),
        ("nonsense", ":1: not a line"),
    ],
)
def test_a_damaged_file_of_owners_is_refused(tmp_path: Path, line: str, says: str) -> None:
    run = Training().write_run(tmp_path)
    (run / OWNERS).write_text(f'{line}\n{{"kind": "later"}}\n')
    with pytest.raises(SnapshotError, match=says):
        read_snapshot(run)


def test_a_file_of_owners_cut_off_in_its_last_line_is_read(tmp_path: Path) -> None:
    run = Training().write_run(tmp_path)
    (run / OWNERS).write_text((run / OWNERS).read_text()[:-30])
    assert read_snapshot(run).memory().allocator_check is None


def test_peaks_that_differ_from_the_allocators_own_fail_the_account(tmp_path: Path) -> None:
    run = Training().write_run(tmp_path)
    lines = (run / OWNERS).read_text().splitlines()
    figures = json.loads(lines[-1])
    figures["allocated_peak_bytes"] += 512
    stray = {**json.loads(lines[1]), "address": 5}
    (run / OWNERS).write_text("\n".join([*lines[:-1], json.dumps(stray), json.dumps(figures)]))
    result = read_snapshot(run).memory()
    assert result.allocator_check is not None
    assert result.allocator_check.allocated_difference_bytes == -512
    assert {"ledger-disagrees", "ledger-unmatched"} <= {warning.code for warning in result.warnings}


def test_an_entry_of_a_tensor_without_bytes_is_no_missing_allocation(tmp_path: Path) -> None:
    run = Training().write_run(tmp_path)
    lines = (run / OWNERS).read_text().splitlines()
    (run / OWNERS).write_text("\n".join([*lines, json.dumps({**json.loads(lines[1]), "address": 0, "bytes": 0})]))
    check = read_snapshot(run).memory().allocator_check
    assert check is not None
    assert check.unmatched_entries == 0


def test_a_gradient_bucket_bears_the_names_of_all_its_gradients(tmp_path: Path) -> None:
    training = Training(steps=1)
    names = ["conv1.weight", *(f"layer{n}.conv.weight" for n in range(60)), "fc.bias"]
    gradients = [line for line in training.ledger if line.get("role") == "gradient"]
    training.ledger = [line for line in training.ledger if line not in gradients[:1]]
    training.ledger += [{**gradients[0], "name": name} for name in names]
    owners = {row.owner for row in read_snapshot(training.write_run(tmp_path)).memory().composition.largest}
    assert "gradient bucket: conv1.weight … fc.bias (62 gradients)" in owners
    assert "conv1.weight" not in owners


def test_tied_weights_are_named_both_and_a_gradient_noted_at_every_step_once(tmp_path: Path) -> None:
    training = Training(steps=1)
    tied = next(line for line in training.ledger if line.get("role") == "parameter")
    training.ledger += [{**tied, "name": "head.weight"}, {**tied, "name": "head.weight", "step": 1}]
    training.ledger += [{**line, "step": 1} for line in training.ledger if line.get("role") == "gradient"]
    owners = {row.owner for row in read_snapshot(training.write_run(tmp_path)).memory().composition.largest}
    assert {"shared storage: w0, head.weight (2 parameters)", "w1"} <= owners
    assert not any("gradient" in (owner or "") for owner in owners)


def test_a_tensor_that_several_modules_saved_is_one_activation(tmp_path: Path) -> None:
    training = Training(steps=1)
    saved = training.malloc(50 * MIB, "forward", ("saved", ""))
    training.ledger += [{**training.ledger[-1], "name": name} for name in ("h.0.ln", "h.0.attn")]
    assert saved
    (largest, *_) = read_snapshot(training.write_run(tmp_path)).memory().composition.largest
    assert (largest.category, largest.owner) == ("activations", "h.0.ln")


def test_tensors_that_the_run_could_not_find_are_said(tmp_path: Path) -> None:
    training = Training()
    training.ledger.append({"kind": "unread", "time_us": 5, "step": 0, "saved_tensors": 3})
    result = read_snapshot(training.write_run(tmp_path)).memory()
    assert "3 tensors kept for backward could not be found" in render(build_memory_document(result), "table")
    assert result.to_dict()["ledger"]["unread_saved_tensors"] == 3
