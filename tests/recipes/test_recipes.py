"""Every recipe: it imports profkit's public face, has a quick --help and a line in the README."""

from __future__ import annotations

import ast
import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import profkit
from recipes import (
    attention_sweep,
    autocast_dtypes,
    compile_speedup,
    end_to_end,
    memory_questions,
    mixed_precision_accumulation,
    nsight_questions,
)
from recipes.attention import cells as attention
from recipes.common.recipe import Cell, Recipe
from recipes.compilation import cells as compilation
from recipes.model_memory import cells as model_memory
from recipes.nsight import cells as nsight
from recipes.whole_model import cells as whole_model
from tests.conftest import ROOT

RECIPES = ROOT / "recipes"
SCRIPTS = sorted(path for path in RECIPES.glob("*.py") if path.name != "__init__.py")
SOURCES = sorted(RECIPES.rglob("*.py"))


def _imported(path: Path) -> list[tuple[str, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return found


# profkit's public face, as recipes use it: the names of the root, and modules of plain names, errors and the model.
PUBLIC = {"profkit", "profkit.errors", "profkit.files", "profkit.names", "profkit.models.options"}
PUBLIC |= {"profkit.models.transformer"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(RECIPES)))
def test_a_recipe_imports_only_profkits_public_face(path: Path) -> None:
    for module, name in _imported(path):
        if module.split(".")[0] == "profkit":
            assert module in PUBLIC, f"{path}: {module}"
            assert module != "profkit" or name in profkit.__all__, f"{path}: {name}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help_shows_the_question_and_loads_no_torch(path: Path) -> None:
    code = (
        f"import sys, runpy\nsys.argv = ['x', '--help']\n"
        f"try:\n    runpy.run_module('recipes.{path.stem}', run_name='__main__')\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    question = ast.get_docstring(ast.parse(path.read_text()))
    assert question.splitlines()[0].endswith("?")
    assert question.split()[0] in done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_functions_that_a_recipe_imports_late_exist(path: Path) -> None:
    for module, name in re.findall(r'late\("([\w.]+):(\w+)"\)', path.read_text()):
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_readme_has_a_line_for_it(path: Path) -> None:
    assert f"| `{path.stem}` |" in (RECIPES / "README.md").read_text()


NOT_RUN: dict[str, tuple[Recipe, Sequence[Cell], str]] = {
    "accumulation": (mixed_precision_accumulation.RECIPE, mixed_precision_accumulation.CELLS, ""),
    "attention": (attention_sweep.RECIPE, attention.build_cells(attention.GRIDS["reports"], 3), "Not projected"),
    "autocast": (autocast_dtypes.RECIPE, autocast_dtypes.CELLS, ""),
    "compiling": (
        compile_speedup.RECIPE,
        compilation.build_cells(compilation.of_reports(), 10),
        "No pair was measured.",
    ),
    "memory": (
        memory_questions.RECIPE,
        model_memory.build_cells(model_memory.GRIDS["reports"], 4),
        "No peak was measured",
    ),
    "nsight": (nsight_questions.RECIPE, nsight.build_cells(["small"], [128], 4, 3, nsight.NSYS), "Not measured."),
    "whole step": (end_to_end.RECIPE, whole_model.build_cells(whole_model.of_reports(), 4, 10), "not run (5 cells)."),
}
"""Each recipe with the cells of its report, and what the report says if none of them ran."""


@pytest.mark.parametrize("name", NOT_RUN)
def test_a_report_of_cells_that_did_not_run_says_so(name: str) -> None:
    recipe, cells, said = NOT_RUN[name]
    rows = [{**cell, "status": "not run", "device": "cuda"} for cell in cells if set(cell) == set(recipe.cell_keys)]
    if recipe.derive is not None:
        recipe.derive(rows)
    assert said in recipe.report(rows, {"device": "cuda", "free_bytes": None}).markdown


RUNS: dict[str, tuple[Any, str, dict[str, str], tuple[str, ...]]] = {
    "attention_sweep": (
        attention_sweep,
        "--seq-len 64,4194304 --implementation written --passes 2",
        {"backward_peak_MiB": ""},
        ("times.png", "memory.png"),
    ),
    "end_to_end": (
        end_to_end,
        "--context 16,1048576 --mode eager --dtype fp32 --passes train --warmup 0 --steps 3",
        {"peak_MiB": "", "warmup": "0"},
        ("times.png", "warmup.png"),
    ),
    "memory_questions": (
        memory_questions,
        "--context 16,1048576 --passes train --dtype fp32 --checkpoint-layers 1",
        {"peak_GiB": "", "difference_bytes": ""},
        ("peaks.png", "checkpoints.png"),
    ),
}
"""Recipes with what they are asked, some cells of the row that fits, and their pictures."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_cpu_measures_what_fits_and_refuses_what_does_not(name: str, tmp_path: Path) -> None:
    recipe, asked, cells, pictures = RUNS[name]
    command = ["--device", "cpu", "-o", str(tmp_path), *asked.split()]
    assert recipe.main.main(command, standalone_mode=False) == 0
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        measured, *_, too_large = csv.DictReader(file)
    assert list(measured) == list(recipe.RECIPE.columns)
    assert measured.items() >= {"status": "ok", **cells}.items()
    assert too_large["status"] == "not run"
    assert too_large["reason"].startswith("predicted ")
    raw = map(json.loads, (tmp_path / "cells.jsonl").read_text().splitlines())
    (cell,) = [row for row in raw if row["status"] == "ok"]
    assert {key: str(cell[key]) for key in recipe.RECIPE.cell_keys} == {
        key: measured[key] for key in recipe.RECIPE.cell_keys
    }
    for made in (*pictures, "manifest.json", f"{name}.md"):
        assert (tmp_path / made).stat().st_size > 0


@pytest.mark.parametrize(
    ("recipe", "key", "kept"),
    [
        (attention_sweep.RECIPE, "implementation", ["written"]),
        (compile_speedup.RECIPE, "mode", ["eager"]),
        (end_to_end.RECIPE, "mode", ["eager"]),
    ],
)
def test_a_lower_bound_is_not_shown_as_a_peak(recipe: Recipe, key: str, kept: list[str]) -> None:
    cells = next(cells for one, cells, _ in NOT_RUN.values() if one is recipe)
    rows = [
        {**cells[0], key: way, "status": "not run", "predicted_peak_bytes": 7} for way in (*kept, "compiled", "sdpa")
    ]
    recipe.derive(rows)
    assert [row["predicted_peak_bytes"] for row in rows][:2] == [7, None]
