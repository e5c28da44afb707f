"""The work of CUDA graphs: a replay does what was captured, under the modules that the same step has eagerly."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.forked_scripts import Forks

Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(forks: Forks) -> Run:
    return cache(lambda way: forks.printed_json(Path(__file__).parent / "graphed_work.py", way))


def _rows(found: dict[str, Any], *left_out: str) -> dict[str, dict[str, Any]]:
    rows = {}
    for row in found["rows"]:
        rows["/".join(row["path"])] = {key: value for key, value in row.items() if key not in ("path", *left_out)}
    return rows


def test_a_replay_of_a_whole_step_does_the_work_of_the_eager_step_module_by_module(run: Run) -> None:
    eager, whole = run("eager"), run("whole")
    assert _rows(whole) == _rows(eager)
    assert whole["model_flops"] == eager["model_flops"] > 0
    assert (whole["missing"], whole["has_failed"]) == ([], False)
    assert whole["loss"] == eager["loss"]


def test_modules_captured_by_themselves_do_their_work_under_the_names_that_they_have_in_the_model(run: Run) -> None:
    # Memory of its own is copied to and kept by each graph: its bytes are others.
    assert _rows(run("modules"), "least_bytes") == _rows(run("eager"), "least_bytes")
    assert run("modules")["missing"] == []


def test_the_ranges_of_a_module_captured_by_itself_are_written_down_as_they_were_and_as_they_are_in_the_model(
    run: Run,
) -> None:
    paths = [{"/".join(path) for path in graph} for graph in run("modules")["graphs"]]
    parts = ("narrow", "norm", "wide")
    assert paths[0] == {"forward/Block 0", *(f"forward/Block 0/{part}" for part in parts)}
    assert paths[3] == {"backward/Block 0", *(f"backward/Block 0/{part}" for part in parts)}
    assert paths[4] == paths[7] == {"", *(f"1.{part}" for part in parts)}
    assert paths[5] == paths[6] == {"", *(f"2.{part}" for part in parts)}


def test_what_was_captured_unseen_is_said_to_be_missing(run: Run) -> None:
    assert run("unseen")["missing"] == ["replayed CUDA graphs"]
