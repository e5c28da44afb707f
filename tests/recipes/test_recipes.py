"""Every recipe: it imports profkit's public face, has a quick --help and a line in the README."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import profkit
from recipes import autocast_dtypes, mixed_precision_accumulation
from recipes.common.recipe import Recipe
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
    assert question is not None
    assert question.splitlines()[0].endswith("?")
    assert question.split()[0] in done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_functions_that_a_recipe_imports_late_exist(path: Path) -> None:
    for module, name in re.findall(r'late\("([\w.]+):(\w+)"\)', path.read_text()):
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_readme_has_a_line_for_it(path: Path) -> None:
    assert f"| `{path.stem}` |" in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize("recipe", [autocast_dtypes.RECIPE, mixed_precision_accumulation.RECIPE])
def test_a_report_of_cells_that_did_not_run_is_made(recipe: Recipe) -> None:
    rows = [{**cell, "status": "not run"} for cell in autocast_dtypes.CELLS + mixed_precision_accumulation.CELLS
            if set(cell) == set(recipe.cell_keys)]  # fmt: skip
    recipe.report(rows, {"device": "cpu"})
