"""A real browser for the pages, without a network: a request, an error or a warning on the console fails the test.

``python -m tests.browser .github/page.png`` makes the README's picture: the first screen of a run in ``traces/``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profkit.reading import open_capture
from profkit.report.page.page import render_first_screen, write_page

FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
PICTURED = Path(__file__).parents[1] / "traces" / "blocks" / "eager"


@contextmanager
def start_browser() -> Iterator[Any]:
    """Start Chromium; `open_page` opens a page in it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = os.environ.get("PROFKIT_CHROMIUM", "/usr/bin/chromium")
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield chromium
        chromium.close()


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


def draw_first_screen(browser: Any, target: Path) -> None:
    """Write a picture of the first screen of `PICTURED`, as high as it is."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_page(page, render_first_screen(open_capture(PICTURED)))
        with open_page(browser, page, width=1100, is_folded=True) as tab:
            height = tab.locator("footer").bounding_box()["y"]
            tab.screenshot(path=str(target), clip={"x": 0, "y": 0, "width": 1100, "height": height})


if __name__ == "__main__":
    with start_browser() as started:
        draw_first_screen(started, Path(sys.argv[1]))
