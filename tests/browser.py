"""A real browser for the pages, without a network: a request, an error or a warning on the console fails the test."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def open_page(
    browser: Any,
    file: Path,
    *,
    width: int = 1400,
    height: int = 900,
    scheme: str = "light",
    scripts: bool = True,
    is_folded: bool = False,
) -> Any:
    """Open a page, and its sections, and yield its tab; on leaving, fail if it asked for anything or complained."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, offline=True, java_script_enabled=scripts
    )
    tab = context.new_page()
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("request", lambda one: problems.append(one.url) if not one.url.startswith("file:") else None)
    tab.goto(file.as_uri())
    if not is_folded:
        tab.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    if scripts:
        tab.wait_for_function("window.profkit")
        tab.evaluate("Promise.all(profkit.started)")
    yield tab
    assert problems == []
    context.close()


def read_table(tab: Any, name: str) -> list[dict[str, str]]:
    """Return the exact values of a table of the page, a row each, by the keys of its columns."""
    script = """(name) => {
        const table = document.querySelector(`table[data-table="${name}"]`);
        const keys = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.key);
        return [...table.tBodies[0].rows].map((row) => Object.fromEntries(
            [...row.cells].map((cell, at) => [keys[at], cell.dataset.value])));
    }"""
    rows: list[dict[str, str]] = tab.evaluate(script, name)
    return rows
