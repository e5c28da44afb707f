"""`profkit.record` and `profkit.open` in the cells of a notebook, run by a real Jupyter kernel."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")

pytestmark = pytest.mark.slow

MODEL = """
import json
import time
import torch
from torch import nn
import profkit

model = nn.Sequential(nn.Linear(32, 32), nn.GELU())
optimizer = torch.optim.AdamW(model.parameters())

def load():
    time.sleep(0.004)
    return torch.ones(8, 32)
"""
RECORD = """
with profkit.record(steps=2, warmup=5, path="first") as run:
    for number in range(60):
        batch = load()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
run
"""
FAILS = """
with profkit.record(steps=2, warmup=2, path="failed") as failed:
    for number in range(4):
        model(torch.ones(8, 32)).sum().backward()
        optimizer.step()
    raise ValueError("bad data")
"""
AGAIN = """
with profkit.record(steps=2, warmup=2, lines=False, path="again") as again:
    for number in range(4):
        model(torch.ones(8, 32)).sum().backward()
        optimizer.step()
"""
ASK = """
from profkit.capture import patches
print(json.dumps({
    "patched": [name for name in patches.REASONS if patches.is_patched(name)],
    "steps": [profkit.open(name).kernels("optimizer").instances for name in ("first", "failed", "again")],
    "lines": [[line.file, line.line, line.function] for line in run.lines().lines],
    "target": profkit.open("first").summary().document.data["head"]["command"],
}))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    book = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(code)
            for code in (MODEL, RECORD, FAILS, AGAIN, ASK, "again.kernels()", "again.check(max_step_ms=1000)")
        ]
    )
    place = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(book, timeout=300, allow_errors=True, resources={"metadata": {"path": str(place)}})
    client.execute()
    return [cell["outputs"] for cell in book.cells]


def test_a_recording_shows_itself_as_the_first_screen_and_as_text(outputs: list[list[Any]]) -> None:
    (shown,) = outputs[1]
    assert shown["data"]["text/html"].startswith("<iframe srcdoc=")
    assert "profkit summary" in shown["data"]["text/html"]
    assert "Recording(" in shown["data"]["text/plain"]


def test_an_exception_in_a_cell_is_the_cells_own_and_the_next_cell_records(outputs: list[list[Any]]) -> None:
    (error,) = [output for output in outputs[2] if output["output_type"] == "error"]
    assert (error["ename"], error["evalue"]) == ("ValueError", "bad data")
    assert outputs[3] == []
    found = json.loads("".join(output["text"] for output in outputs[4]))
    assert found["patched"] == []
    assert found["steps"] == [2, 2, 2]
    assert found["target"] == ["notebook"]


def test_lines_of_cells_are_named_by_the_cells_number(outputs: list[list[Any]]) -> None:
    found = json.loads("".join(output["text"] for output in outputs[4]))
    assert ["In[1]", 11, "load"] in found["lines"]


@pytest.mark.parametrize("cell", [5, 6])
def test_a_result_shows_its_table(outputs: list[list[Any]], cell: int) -> None:
    (shown,) = outputs[cell]
    assert "<table" in shown["data"]["text/html"]
