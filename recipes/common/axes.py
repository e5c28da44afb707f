"""An axis of a grid on the command line: values in rising order, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


class Numbers(click.ParamType):
    """``256,1024,4096``: whole numbers of ``least`` and more, rising."""

    name = "N,N,…"

    def __init__(self, least: int = 1) -> None:
        self._least = least
        self._bound = f"above {least - 1}" if least else "from 0"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) >= self._least for part in parts):
            self.fail(f"{value}: not whole numbers {self._bound} with commas between them", param, ctx)
        numbers = tuple(int(part) for part in parts)
        if list(numbers) != sorted(set(numbers)):
            rising = ",".join(map(str, sorted(set(numbers))))
            self.fail(f"{value}: list each value once, in rising order: {rising}", param, ctx)
        return numbers


class Names(click.ParamType):
    """``eager,compiled``: some of the names that there are, each once."""

    name = "NAME,…"

    def __init__(self, choices: Sequence[str]) -> None:
        self._choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in str(value).split(","))
        for name in names:
            if name not in self._choices:
                self.fail(f"{name}: there are {', '.join(self._choices)}", param, ctx)
        if len(set(names)) < len(names):
            self.fail(f"{value}: list each value once: {','.join(dict.fromkeys(names))}", param, ctx)
        return names
