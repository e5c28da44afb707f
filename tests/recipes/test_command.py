"""What a directory of results says: the report before the table, few columns for people, all of them in the CSV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipes.common.command import write_results
from recipes.common.recipe import Recipe
from recipes.common.store import open_store
from tests.recipes.counting import RECIPE
from tests.recipes.test_store import MACHINE

CELLS = [{"number": 2, "how": "well"}, {"number": 3, "how": "well"}]


def _write(directory: Path, recipe: Recipe) -> tuple[str, str]:
    store = open_store(directory, recipe.name, recipe.cell_keys, MACHINE, restart=False)
    store.add({**CELLS[0], "square": 4, "status": "ok"})
    write_results(recipe, CELLS, store, MACHINE)
    return (directory / "counting.md").read_text(), (directory / "counting.csv").read_text()


def test_people_get_the_report_first_and_then_the_brief_columns(tmp_path: Path) -> None:
    markdown, csv = _write(tmp_path, replace(RECIPE, brief=frozenset({"number", "square"})))
    assert markdown.startswith(
        "# counting\n\nDoes it count?\n\ncpu, torch 2.13.0\n\nmeasured: 1\n\n## All cells\n\n2 cells"
    )
    assert "The other 2 columns are in [counting.csv](counting.csv).\n\n| number | square |\n" in markdown
    assert markdown.endswith("| 2 | 4 |\n| 3 | — |\n")
    assert csv.splitlines() == ["number,how,square,status", "2,well,4,ok", "3,well,,not run"]


def test_a_recipe_with_few_columns_shows_them_all(tmp_path: Path) -> None:
    markdown, _ = _write(tmp_path, RECIPE)
    assert "| number | how | square | status |" in markdown
    assert "counting.csv" not in markdown
