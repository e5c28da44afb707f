"""What memory_questions says of rows that are made up so that each sentence has something to get wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from recipes.model_memory.answers import (
    answer_checkpoints,
    answer_growth,
    answer_padding,
    answer_peaks,
    answer_predicted,
    answer_saved,
    phase_of,
)
from recipes.model_memory.contents import group_alike
from recipes.model_memory.repeating import tell_command
from recipes.model_memory.report import add_columns, report

GIB = 2**30


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


def _not_run(**changed: Any) -> dict[str, Any]:
    row = _row(**changed)
    measured = [key for key in row if key.startswith(("requested", "allocated", "reserved", "difference", "replay"))]
    return {key: value for key, value in row.items() if key not in measured} | {"status": "not run"}


def _usual(*rows: dict[str, Any]) -> str:
    return next(line for line in answer_predicted(rows) if line.startswith("The usual sum"))


def test_the_usual_sums_extremes_are_by_share_and_of_what_was_measured() -> None:
    """-9 GiB of 60 is less of it than -5 of 10; -9 of 10 was not run."""
    rows = [
        _row(peak=60 * GIB, added_up_bytes=51 * GIB),
        _row(peak=10 * GIB, added_up_bytes=5 * GIB, passes="forward"),
        _row(peak=20 * GIB, added_up_bytes=21 * GIB, context=128),
        _not_run(peak=10 * GIB, added_up_bytes=1 * GIB, context=256),
    ]
    assert _usual(*rows).startswith(
        "The usual sum is off by -50.0% (2.7B, context 512, forward, fp32) to +5.0% (2.7B, context 128, train, fp32) "
        "of the requested peak, over 3 rows without checkpoints"
    )
    assert "With checkpoints" not in _usual(*rows)


def test_the_usual_sum_of_checkpoints_is_told_apart() -> None:
    rows = [
        _row(peak=10 * GIB, added_up_bytes=11 * GIB),
        _row(peak=10 * GIB, added_up_bytes=4 * GIB, checkpoint_layers=8),
    ]
    said = _usual(*rows)
    assert "off by +10.0% (2.7B, context 512, train, fp32) of the requested peak, over 1 rows" in said
    assert said.endswith(
        "With checkpoints, over 1 rows, by -60.0% (2.7B, context 512, train, fp32, a checkpoint every 8 layers)."
    )


def test_where_no_peak_was_measured_the_usual_sum_is_held_against_the_predicted() -> None:
    on_cpu = _not_run(peak=10 * GIB, added_up_bytes=12 * GIB) | {"status": "ok"}
    assert "off by +20.0% (2.7B, context 512, train, fp32) of the predicted peak" in _usual(on_cpu)
    assert not list(answer_predicted([_not_run()]))


def test_bf16_is_told_with_what_is_reserved_and_the_copies_at_the_peak_itself() -> None:
    """After backward the copies are gone; in forward alone they are there at the peak."""
    train = _row(dtype="bf16", reserved_peak_bytes=80 * GIB)
    assert train["predicted_phase"] == "optimizer"
    fp32 = _row(reserved_peak_bytes=64 * GIB)
    said = next(line for line in answer_peaks([fp32, train]) if "bf16 autocast" in line)
    assert (
        "-2.9%, reserved 80.00 GiB against 64.00 GiB, +25.0%. At its predicted peak, in optimizer, there are no copies"
        in said
    )
    pair = [_row(dtype=dtype, passes="forward") for dtype in ("fp32", "bf16")]
    said = next(line for line in answer_peaks(pair) if "bf16 autocast" in line)
    assert "At its predicted peak, in forward, 6.091 GiB are copies of the weights in bf16" in said


def test_the_optimizers_temporaries_are_explained_where_the_peak_is_its() -> None:
    of_optimizer = _row(context=128)
    assert of_optimizer["predicted_phase"] == "optimizer"
    said = list(answer_peaks([of_optimizer, _row()]))
    assert said[1].startswith(
        "Without checkpoints 1 of 2 measured peaks are the optimizer's, as predicted. There 12.69 GiB of 63.54 GiB"
    )
    assert "square roots of all second moments at once" in said[1]
    assert not any("square roots" in line for line in answer_peaks([_row()]))


def test_growth_is_of_requested_bytes_for_padding_differs() -> None:
    short = _row(context=128, peak=8 * GIB, allocated_peak_bytes=10 * GIB, phase="optimizer")
    long = _row(context=512, peak=9 * GIB, allocated_peak_bytes=9 * GIB + 2**20, phase="backward")
    assert list(answer_growth([long, short])) == [
        "2.7B, train, fp32: 8.000 GiB requested at the peak in optimizer at context 128, 9.000 GiB in backward at "
        "context 512: 1.125 times as much for 4 times the context."
    ]
    assert "1.000 MiB to 2.000 GiB at these 2 peaks" in answer_padding([short, long])


def test_a_peak_above_all_phases_is_in_the_making_of_the_model() -> None:
    row = _row(phase="forward")
    assert phase_of(row) == "forward"
    assert phase_of({**row, "requested_peak_bytes": row["requested_peak_bytes"] + 1}) == "the making of the model"


def test_checkpoints_that_tie_are_named_together_and_what_was_not_run_changes_nothing() -> None:
    """The allocated peak is lowest at 4: it is requested bytes that count."""
    tied = [
        _row(checkpoint_layers=layers, peak=6 * GIB, allocated_peak_bytes=7 * GIB - layers, phase="optimizer")
        for layers in (1, 2, 4)
    ]
    group = [_row(peak=8 * GIB, phase="backward"), *tied, _not_run(checkpoint_layers=8, peak=5 * GIB)]
    (said,) = answer_checkpoints(group)
    assert said.startswith(
        "2.7B, context 512, train, fp32: 8.000 GiB requested (measured) at the peak without checkpoints, in backward; "
        "6.000 GiB at the lowest with them, -25.0%, the same for one every 1, 2 and 4 layers, for the peak falls in "
        "optimizer there."
    )
    assert said.endswith("Not measured: 8 layers.")
    (alone,) = answer_checkpoints([group[0], _row(checkpoint_layers=1, peak=4 * GIB, phase="backward")])
    assert "4.000 GiB at the lowest with them, -50.0%, one every layer, in backward." in alone


def test_checkpoints_of_which_none_was_measured_are_told_as_predicted() -> None:
    group = [_not_run(peak=8 * GIB, phase="backward"), _not_run(checkpoint_layers=4, peak=6 * GIB, phase="backward")]
    (said,) = answer_checkpoints(group)
    assert "8.000 GiB requested (predicted)" in said
    assert "one every 4 layers, in backward" in said
    assert "Not measured" not in said
    assert not list(answer_checkpoints(group[:1]))


def test_what_is_kept_is_told_where_it_is_not_as_predicted() -> None:
    rows = [
        _row(saved_bytes=100, predicted_saved_bytes=100),
        _row(saved_bytes=100, predicted_saved_bytes=90, context=128),
    ]
    assert answer_saved(rows[:1]).endswith("to the byte in 1 of 1 rows.")
    assert answer_saved(rows).endswith(
        "in 1 of 2 rows; most off is 2.7B, context 128, train, fp32, by 10 B, +10.00% of what was counted."
    )


def test_large_allocations_alike_are_one_row_with_their_count() -> None:
    block = {"bytes": 2**27, "category": "activations", "phase": "forward", "owner": None, "label": "a.py:1 f"}
    weight = {**block, "category": "parameters", "phase": None, "owner": "w1"}
    rows = group_alike([block, weight, {**block, "label": "b.py:2 g"}, block, {**weight, "owner": "w2"}])
    assert [(row["size"], row["count"], row["label"], row["owner"]) for row in rows] == [
        ("128.0 MiB", 2, "a.py:1 f", None),
        ("128.0 MiB", 2, "a.py:1 f", "w1 and 1 more"),
        ("128.0 MiB", 1, "b.py:2 g", None),
    ]


def test_phases_are_shown_where_they_are_off_and_counted_where_not() -> None:
    row = _row()
    assert "all 1 measured ones are the predicted ones to the byte (1 of backward)" in report([row], {}).markdown
    row["requested_phases"][0]["difference_bytes"] = -512
    text = report([row], {}).markdown
    assert "1 phase of 1 measured have another peak than predicted, in bytes:" in text
    assert re.search(r"\| backward \| \d+ \| \d+ \| -512 \|", text)
    assert not re.search(r"\| optimizer \| \d+ \|", text)


def test_tables_have_units_and_no_raw_bytes() -> None:
    text = report([_row(), _row(checkpoint_layers=1), _not_run(checkpoint_layers=2)], {}).markdown
    assert not re.search(r"\b\d{7,}\b", text)
    assert "| usual sum |" in text
    assert "Requested is what the program asks the allocator for. Allocated is requested and the allocator's" in text
    assert "| 2 | — | optimizer, predicted | 63.60 GiB | — | — | 458.1 MiB | not run |" in text


def test_the_bars_say_that_they_are_of_requested_bytes() -> None:
    title: Any = report([_row()], {}).pictures["peaks.png"].get_suptitle()
    assert "bytes requested at the peak" in title


@pytest.mark.parametrize(
    ("rows", "recorded", "said"),
    [
        ([_row()], True, "--checkpoint-layers 0 --batch 4 -o again --keep-captures captures`, then `profkit memory "
         "captures/2.7B-512-train-fp32`. `again"),
        ([_row(), _row(context=128)], False, "--context CONTEXT --passes train --dtype fp32 --checkpoint-layers 0 "
         "--batch 4 -o again`; `CONTEXT` as the sentence or row says. `again"),
        ([_row(), _row(checkpoint_layers=2)], True, "--checkpoint-layers CHECKPOINT_LAYERS --batch 4 -o again "
         "--keep-captures captures`, then `profkit memory captures/2.7B-512-train-fp32-checkpointCHECKPOINT_LAYERS"
         "`; `CHECKPOINT_LAYERS` as the sentence or row says; without checkpoints `0`, and no "
         "`-checkpointCHECKPOINT_LAYERS`. `again"),
        ([_row(), _row(batch=8)], True, "`BATCH` as the sentence or row says; no `-batchBATCH` for 4. `again"),
    ],
)  # fmt: skip
def test_the_command_has_what_all_rows_share(rows: list[dict[str, Any]], recorded: bool, said: str) -> None:
    assert said in tell_command(rows, recorded=recorded)
