"""Captures into CUDA graphs: every node with the ranges open when it was made, and the work that a replay does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.forked_scripts import Forks

SCRIPT = Path(__file__).parent / "captured_graphs.py"


@pytest.fixture(scope="module")
def found(forks: Forks) -> dict[str, Any]:
    return forks.printed_json(SCRIPT)


def test_each_node_is_written_down_with_the_ranges_of_its_capture_and_a_replay_names_the_graph(
    found: dict[str, Any],
) -> None:
    (graph,) = found["graphs"]
    runs = [(run["count"], run["kind"], "/".join(run["ranges"])) for run in graph["runs"]]
    assert runs == [
        (1, "fill", "forward/model/0"),
        (1, "kernel", "forward/model/0"),
        (1, "fill", "forward/model/1/1.0"),
        (1, "kernel", "forward/model/1/1.0"),
        (2, "kernel", "backward/model/1/1.0"),
        (2, "kernel", "backward/model/0"),
        (1, "kernel", "optimizer"),
    ]
    assert (found["before"], found["was_recording"], found["has_failed"]) == ([], False, False)
    within_steps = [name for name in found["replays"] if not name.startswith("step ")]
    assert within_steps == [f"CUDA graph {graph['id']}", *["replayed"] * 3]


def test_a_capture_computes_what_it_would_without_profkit(forks: Forks, found: dict[str, Any]) -> None:
    plain = forks.printed_json(SCRIPT, "plain")
    assert plain["graphs"] == []
    assert found["losses"] == plain["losses"]
    assert len(set(plain["losses"])) == 3


@pytest.mark.gpu
def test_the_driver_says_how_many_nodes_a_capture_has_and_what_they_are() -> None:
    import torch

    from profkit.capture.hooks.graph_nodes import Driver

    driver, x = Driver(), torch.zeros(10, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        assert driver.count(stream) == 0
        x.add_(1)
        x.sin_()
        assert driver.count(stream) == 2
        y = x.clone()
        assert driver.kinds(stream) == (["kernel", "kernel", "copy"], True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.cos_()
        x.cos_()
        torch.cuda.current_stream().wait_stream(side)
        assert driver.kinds(stream) == (["kernel", "kernel", "copy", "kernel", "kernel"], False)
    assert driver.count(stream) is None
    assert driver.kinds(stream) == ([], False)


Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(forks: Forks) -> Run:
    return cache(lambda way: forks.printed_json(Path(__file__).parent / "graphed_work.py", way))


def _rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {}
    for row in found["rows"]:
        rows["/".join(row["path"])] = {key: value for key, value in row.items() if key != "path"}
    return rows


def test_a_replay_of_a_whole_step_does_the_work_of_the_eager_step_module_by_module(run: Run) -> None:
    eager, whole = run("eager"), run("whole")
    assert _rows(whole) == _rows(eager)
    assert whole["model_flops"] == eager["model_flops"] > 0
    assert (whole["missing"], whole["has_failed"]) == ([], False)
    assert whole["loss"] == eager["loss"]


def test_what_was_captured_unseen_is_said_to_be_missing(run: Run) -> None:
    assert run("unseen")["missing"] == ["replayed CUDA graphs"]
