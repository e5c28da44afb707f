"""The results that are kept, and what recipes/README.md says of them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from recipes.common.recipe import NOT_RUN

RECIPES = Path(__file__).parents[2] / "recipes"
KEPT = sorted(path for path in (RECIPES / "results").iterdir() if path.is_dir())
_PNG = b"\x89PNG\r\n\x1a\n"
_MEASURED = re.compile(r"_(ms|MiB|GiB|us)$|^(speedup|mfu|tokens_per_s)$|peak_bytes$")
_FORESEEN = re.compile("^predicted_")


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / f"{folder.name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+\.\d+(?![\dB])", text)


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_a_manifest_says_on_what_and_how(folder: Path) -> None:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    assert manifest["recipe"] == folder.name
    machine = manifest["machine"]
    for fact in ("gpu", "driver", "torch", "cuda", "float32_matmul_precision", "cudnn_allow_tf32"):
        assert machine[fact] is not None, fact
    for run in manifest["runs"]:
        assert run["command"][:3] == ["python", "-m", f"recipes.{folder.name}"]
        assert run["started_utc"]
        # Older ones have one for all of their runs.
        assert run.get("git_revision", manifest.get("git_revision"))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_table_cells_and_pictures_belong_together(folder: Path) -> None:
    cells = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    rows = _rows(folder)
    assert sum(row["status"] == "ok" for row in rows) == sum(cell["status"] == "ok" for cell in cells) > 0
    for row in rows:
        if row["status"] == NOT_RUN:
            told = {key: value for key, value in row.items() if _MEASURED.search(key) and not _FORESEEN.search(key)}
            assert not any(told.values()), "what was not measured is empty"
    markdown = (folder / f"{folder.name}.md").read_text(encoding="utf-8")
    for shown in re.findall(r"\]\(([^)]+\.png)\)", markdown):
        assert (folder / shown).exists()
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(_PNG)
        assert f"({picture.name})" in markdown, "a picture that nothing shows"


def _headlines() -> list[tuple[str, str]]:
    """Return each table under "Measured on an H200", with the recipe whose numbers it shows."""
    text = (RECIPES / "README.md").read_text(encoding="utf-8").split("## Measured on an H200\n")[1]
    text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    sections = re.findall(r"^### (\w+)[^\n]*\n(.*?)(?=^### |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    tables = [(name, "\n".join(re.findall(r"^\|.*$", body, flags=re.MULTILINE))) for name, body in sections]
    return [(name, table) for name, table in tables if table]


@pytest.mark.parametrize(("name", "table"), _headlines(), ids=lambda value: value if "|" not in value else "")
def test_headlines_are_the_results_own_numbers(name: str, table: str) -> None:
    values = [float(value) for row in _rows(RECIPES / "results" / name) for value in row.values() if _is_number(value)]
    for number in _numbers(table):
        digits = len(number.partition(".")[2])
        assert any(f"{value:.{digits}f}" == number for value in values), number


def test_what_two_write_ups_printed_is_made_of_what_was_measured_here() -> None:
    """One's maximum is forward's, a workspace and a result more; the other's backward holds what a pass keeps twice."""
    here = {tuple(row[key] for key in _ATTENTION): row for row in _rows(RECIPES / "results" / "attention_sweep")}
    short, doubled = (_published(f"attention_{name}.csv") for name in ("clean", "forward_inside"))
    assert (len(short), len(doubled)) == (20, 40)
    for row in short:
        own, result = _memory(here[row["d_model"], row["seq_len"], "written"])
        assert own["saved_activations_MiB"] == pytest.approx(float(row["saved_MiB"]), rel=5e-6)
        maximum = own["forward_peak_MiB"] + own["backward_workspace_MiB"] + result
        assert maximum == pytest.approx(float(row["peak_MiB"]), rel=5e-6, abs=_SCALARS_MIB)
    for row in doubled:
        implementation = "compiled" if row["compile"] == "True" else "written"
        own, result = _memory(here[row["d_model"], row["seq_len"], implementation])
        assert own["saved_activations_MiB"] == pytest.approx(float(row["saved_activations_MiB"]), rel=5e-6)
        workspaces = own["mem_after_inputs_MiB"] - 4 * result + own["backward_workspace_MiB"]
        alone = own["backward_peak_MiB"] - workspaces + float(row["mem_after_inputs_MiB"]) - 4 * result
        twice = alone + own["saved_activations_MiB"]
        assert twice == pytest.approx(float(row["backward_peak_MiB"]), rel=5e-6, abs=_SCALARS_MIB)


_SCALARS_MIB = 0.002
"""What the scalars of a loss may take, in blocks of 512 B."""

_ATTENTION = ("d_model", "seq_len", "implementation")


def _published(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / "tables" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _memory(row: dict[str, str]) -> tuple[dict[str, float], float]:
    """Return a row's MiB, with the workspace of the thread that runs backward, and the MiB of one result."""
    memory = {key: float(value) for key, value in row.items() if key.endswith("_MiB") and value}
    result = 8 * int(row["seq_len"]) * int(row["d_model"]) * 4 / 2**20
    between = memory["mem_before_backward_MiB"] - memory["mem_after_inputs_MiB"]
    return memory | {"backward_workspace_MiB": between - memory["saved_activations_MiB"] - result}, result


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text) is not None


def test_pictures_of_the_readme_are_there() -> None:
    pictures = re.findall(r"\]\((results/[^)]+)\)", (RECIPES / "README.md").read_text(encoding="utf-8"))
    assert pictures
    assert all((RECIPES / picture).exists() for picture in pictures)
