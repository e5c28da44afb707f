"""How tests measure the cells of a recipe without a process for each, of which `test_grid.py` is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recipes.common import command, grid


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure here: the server of the cells' processes would import torch once more."""

    def call(function: Callable[..., Any], *arguments: object, limit_s: float | None = None) -> Any:
        return function(*arguments)

    for module in (command, grid):
        monkeypatch.setattr(module, "run_isolated", call)
