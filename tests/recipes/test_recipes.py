"""Every recipe: it imports profkit's public face, has a quick --help, runs, and gives its kept results to the byte."""

from __future__ import annotations

import ast
import json
import re
import statistics
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
from recipes.common import command
from recipes.common.command import write_results
from recipes.common.recipe import NOT_RUN, Cell, Recipe
from recipes.common.store import Store
from recipes.common.tables import Table, csv_text, markdown, screen, select, show_bytes, show_digits, show_share
from recipes.compilation import cells as compilation
from recipes.model_memory import cells as model_memory
from recipes.nsight import cells as nsight
from recipes.whole_model import cells as whole_model
from tests.conftest import ROOT
from tests.in_process import csv_rows, manifest_of

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
PUBLIC = {"profkit", "profkit.errors", "profkit.files", "profkit.names", "profkit.models"}
PUBLIC |= {"profkit.models.transformer"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(RECIPES)))
def test_a_recipe_imports_only_profkits_public_face(path: Path) -> None:
    for module, name in _imported(path):
        if module.split(".")[0] == "profkit":
            assert module in PUBLIC, f"{path}: {module}"
            assert module != "profkit" or name in profkit.__all__, f"{path}: {name}"


def test_help_shows_the_question_and_loads_no_torch_and_the_readme_has_a_line() -> None:
    """In one process for all of them, as most of what they load they share."""
    names = [path.stem for path in SCRIPTS]
    code = (
        "import contextlib, io, json, runpy, sys\nsys.argv = ['x', '--help']\nshown = {}\n"
        f"for name in {names!r}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        runpy.run_module(f'recipes.{name}', run_name='__main__')\n"
        "    shown[name] = out.getvalue()\n"
        "    assert 'torch' not in sys.modules, name\n"
        "print(json.dumps(shown))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    for path in SCRIPTS:
        question = ast.get_docstring(ast.parse(path.read_text()))
        assert question.splitlines()[0].endswith("?")
        assert question.split()[0] in shown[path.stem]
        assert f"| `{path.stem}` |" in (RECIPES / "README.md").read_text()
        for module, name in re.findall(r'late\("([\w.]+):(\w+)"\)', path.read_text()):
            assert callable(getattr(import_module(module), name)), "what it imports late"


UNMEASURED: dict[str, tuple[Recipe, Sequence[Cell], str]] = {
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


@pytest.mark.parametrize("name", UNMEASURED)
def test_a_report_of_cells_that_did_not_run_says_so(name: str) -> None:
    recipe, cells, said = UNMEASURED[name]
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


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_cpu_measures_what_fits_and_refuses_what_does_not(name: str, tmp_path: Path) -> None:
    recipe, asked, cells, pictures = RUNS[name]
    command = ["--device", "cpu", "-o", str(tmp_path), *asked.split()]
    assert recipe.main.main(command, standalone_mode=False) == 0
    measured, *_, too_large = csv_rows(tmp_path / f"{name}.csv")
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
    cells = next(cells for one, cells, _ in UNMEASURED.values() if one is recipe)
    rows = [
        {**cells[0], key: way, "status": "not run", "predicted_peak_bytes": 7} for way in (*kept, "compiled", "sdpa")
    ]
    recipe.derive(rows)
    assert [row["predicted_peak_bytes"] for row in rows][:2] == [7, None]


# -- the committed results -----------------------------------------------------------------------------------------


PREDICTIONS = RECIPES / "results" / "predictions"
KEPT = sorted(path for path in (RECIPES / "results").iterdir() if (RECIPES / f"{path.name}.py").exists())
"""The results of recipes; the other folders hold what profkit was held against."""
GRIDS = {
    "attention_sweep": attention.build_cells(attention.GRIDS["reports"], 100),
    "compile_speedup": compilation.build_cells(compilation.of_reports(), 10),
    "end_to_end": whole_model.build_cells(whole_model.of_reports(), 4, 10),
    "memory_questions": model_memory.build_cells(model_memory.GRIDS["reports"], 4),
    "nsight_questions": nsight.build_cells(*nsight.GRIDS["reports"], 4, 3, nsight.NSYS),
}
MEASURED_AGAIN = {"attention_sweep", "end_to_end"}
"""Results of which some cells were measured again, after all others."""
_PNG = b"\x89PNG\r\n\x1a\n"
_MEASURED = re.compile(r"_(ms|MiB|GiB|us)$|^(speedup|mfu|tokens_per_s)$|peak_bytes$")
_FORESEEN = re.compile("^predicted_")


def _rows(folder: Path) -> list[dict[str, str]]:
    return csv_rows(folder / f"{folder.name}.csv")


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_a_manifest_names_the_machine_and_every_command(folder: Path) -> None:
    manifest: dict[str, Any] = manifest_of(folder)
    assert manifest["recipe"] == folder.name
    machine = manifest["machine"]
    for fact in ("gpu", "driver", "torch", "cuda", "float32_matmul_precision", "cudnn_allow_tf32"):
        assert machine[fact] is not None, fact
    for run in manifest["runs"]:
        assert run["command"][:3] == ["python", "-m", f"recipes.{folder.name}"]
        assert run["started_utc"]
        assert run["git_revision"]


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_table_cells_and_pictures_belong_together(folder: Path) -> None:
    cells = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    rows = _rows(folder)
    assert sum(row["status"] == "ok" for row in rows) == sum(cell["status"] == "ok" for cell in cells) > 0
    for row in rows:
        if row["status"] == NOT_RUN:
            found = {key: value for key, value in row.items() if _MEASURED.search(key) and not _FORESEEN.search(key)}
            assert not any(found.values()), "a value that was not measured is empty"
    markdown = (folder / f"{folder.name}.md").read_text(encoding="utf-8")
    for shown in re.findall(r"\]\(([^)]+\.png)\)", markdown):
        assert (folder / shown).exists()
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(_PNG)
        assert f"({picture.name})" in markdown, "a picture that nothing shows"


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_the_rows_that_were_measured_give_the_kept_report_to_the_byte(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every table, remark and derived column of each recipe, from real rows of an H200."""
    monkeypatch.setattr(command, "png_bytes", lambda _figure: _PNG)
    recipe = import_module(f"recipes.{folder.name}").RECIPE
    manifest = manifest_of(folder)
    rows = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    by_text = {tuple(str(row[key]) for key in recipe.cell_keys): row for row in rows}
    cells = []
    for shown in _rows(folder):
        texts = tuple(shown[key] or "None" for key in recipe.cell_keys)
        row = by_text.get(texts, {key: int(shown[key]) if shown[key].isdigit() else shown[key] for key in shown})
        cells.append({key: row[key] for key in recipe.cell_keys})
    if folder.name in GRIDS:
        measured = [{key: row[key] for key in recipe.cell_keys} for row in rows]
        in_order = [cell for cell in GRIDS[folder.name] if cell in measured]
        assert in_order == measured or folder.name in MEASURED_AGAIN
        assert sorted(GRIDS[folder.name], key=str) == sorted(cells, key=str)
    write_results(recipe, cells, Store(tmp_path, recipe.cell_keys, rows, manifest), manifest["machine"])
    for ending in ("md", "csv"):
        made, kept = ((place / f"{folder.name}.{ending}").read_bytes() for place in (tmp_path, folder))
        assert made == kept


def test_the_pictures_of_the_readme_exist() -> None:
    pictures = re.findall(r"\]\((results/[^)]+)\)", (RECIPES / "README.md").read_text(encoding="utf-8"))
    assert pictures
    assert all((RECIPES / picture).exists() for picture in pictures)


@pytest.mark.parametrize(
    "folder", [PREDICTIONS, PREDICTIONS / "second", PREDICTIONS / "third"], ids=["first", "second", "third"]
)
def test_a_table_of_predictions_holds_every_answer_and_counts_those_that_held(folder: Path) -> None:
    intervals, truth = (json.loads((folder / name).read_text()) for name in ("intervals.json", "truth.json"))
    answers = intervals["answers"] if isinstance(intervals, dict) else intervals
    inside = 0
    for answer in answers:
        turns = truth["times"][f"{answer['program']}|{answer.get('by_hand', '+'.join(answer['edits']))}"]
        later = [turn["step_ns"] for turn in turns][truth["first_dropped"] :]
        after = answer["time"]["after_ns"]
        if answer["time"]["refusal"] is None:
            inside += after["low"] <= statistics.median(later) <= after["high"]
    text = (folder / "predictions.md").read_text(encoding="utf-8")
    assert f"The true step lies inside {inside} of {len(answers)} intervals" in text
    assert all(f"| {answer['program']} | `{' '.join(answer['edits'])}` |" in text for answer in answers)


# -- tables --------------------------------------------------------------------------------------------------------


def test_a_missing_value_is_a_dash_for_people_and_empty_in_csv() -> None:
    table = select([{"a": 0.0, "b": None}, {"a": 1 / 3}], ["a", "b"])
    assert csv_text(table).splitlines() == ["a,b", "0.0,", "0.3333333333333333,"]
    assert markdown(table).splitlines()[2:] == ["| 0 | — |", "| 0.333333 | — |"]
    assert screen(table).splitlines() == ["       a  b", "────────  ─", "       0  —", "0.333333  —"]


def test_numbers_sizes_and_shares_keep_the_digits_that_say_something() -> None:
    assert select([{"a": 10.000133514404297}], ["a"], exact={"a"}).cells == [["10.000133514404297"]]
    assert [show_digits(value, 4) for value in (9999.4, 9999.6, -9999.6)] == ["9999", "10000", "-10000"]
    assert [show_share(value) for value in (None, 0.0, 0.0004, 0.123)] == [None, "0.0%", "<0.1%", "12.3%"]
    sizes = {None: None, 0: "0 B", 999: "999 B", 1000: "0.977 KiB", 2**20: "1.000 MiB", 14_483_456_000: "13.49 GiB"}
    assert {size: show_bytes(size) for size in sizes} == sizes


def test_numbers_are_aligned_to_the_right_and_names_are_escaped() -> None:
    table = Table(["kernel", "share"], [["f<float>", None], ["_g_", "≤96%"]])
    assert markdown(table).splitlines()[1:] == ["|---|---:|", "| f\\<float> | — |", "| \\_g\\_ | ≤96% |"]
