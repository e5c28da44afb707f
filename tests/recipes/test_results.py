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


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text) is not None


def test_pictures_of_the_readme_are_there() -> None:
    pictures = re.findall(r"\]\((results/[^)]+)\)", (RECIPES / "README.md").read_text(encoding="utf-8"))
    assert pictures
    assert all((RECIPES / picture).exists() for picture in pictures)
