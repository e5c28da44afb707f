"""Hooks at rest: the program's steps, its results and the phases of steps that are kept are the same as without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from profkit.run.directory import Run
from profkit.run.light_columns import read_light
from tests.forked_scripts import Forks

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "resting_workloads.py"
NEVER = ("in a module", "in backward", "after that")
"""Nothing else would show the end of a step that an optimizer makes within a backward pass."""


@pytest.fixture(scope="module")
def awake(forks: Forks) -> dict[str, Any]:
    return forks.printed_json(SCRIPT)


@pytest.fixture(scope="module")
def resting(forks: Forks) -> dict[str, Any]:
    return forks.printed_json(SCRIPT, "resting")


def test_the_hooks_rest_in_all_steps_that_nobody_keeps(resting: dict[str, Any]) -> None:
    for way, seen in resting.items():
        wanted = [] if way in NEVER else [number for number in seen["begun"][:-1] if number % 3]
        assert [number for number in seen["rested"] if number in seen["begun"]] == wanted, way
        assert len(seen["begun"]) >= 11


@pytest.mark.parametrize("what", ["begun", "phases", "losses"])
def test_what_is_seen_is_the_same_as_by_hooks_that_never_rest(
    what: str, awake: dict[str, Any], resting: dict[str, Any]
) -> None:
    assert not any(seen["rested"] for seen in awake.values())
    assert {way: seen[what] for way, seen in resting.items()} == {way: seen[what] for way, seen in awake.items()}


PROGRAM = """
import torch
from torch import distributed, nn
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.ones(548, 4), batch_size=1):
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
del model  # or torch may wait, with the GIL, for gloo's thread, which waits for the GIL
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_wakes_for_each_row_of_its_light_record(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("--kineto", "--ranks", "7", "--steps", "2", "--nproc-per-node", "2")
    forks.check_profkit("run", "-o", "run", *options, "--", sys.executable, "train.py", cwd=tmp_path)
    records = [read_light(path)[1] for path in Run(tmp_path / "run").light_records.values()]
    assert len(records) == 2
    for record in records:
        assert [step.name for step in record.steps] == [f"step {at}" for at in (*range(128), *range(512, 544))]
        for step in record.steps[1:]:
            assert [phase for phase, _, _ in step.phases] == ["data", "forward", "loss", "backward", "optimizer"]
            assert step.collectives.kind[-1:] == ["all_reduce"]
