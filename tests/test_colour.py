"""Colour on a terminal: none in pipes, files or with NO_COLOR, and red for what is wrong alone."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from profkit.analysis.compare.budgets import Budgets, check_budgets
from profkit.cli.outputs import _colour, has_colours
from profkit.reading import open_capture
from profkit.report.commands.compare import build_check_document
from profkit.report.document import render
from tests.conftest import ROOT

TRACE = ROOT / "traces" / "small-train.nsys2025.sqlite"
_CODES = re.compile(r"\x1b\[[0-9;]*m")
RED = "\x1b[31m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_without_no_color_has_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colours(Terminal())
    assert not has_colours(io.StringIO())
    assert not has_colours(None)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours(Terminal())


def test_red_is_the_row_of_a_broken_budget_and_nothing_else() -> None:
    budgets = Budgets(max_idle=0.5, max_shares=(("category:gemm", 0.9),))
    document = build_check_document(check_budgets(open_capture(TRACE), budgets))
    plain, coloured = render(document, "table"), render(document, "table", paint=_colour)
    assert _CODES.sub("", coloured) == plain
    red = [line for line in coloured.splitlines() if RED in line]
    assert [_CODES.sub("", line).split()[:2] for line in red] == [["BROKEN", "max-idle"]]


def shown_on_a_terminal(*arguments: str | Path, **environment: str) -> str:
    """Return what a command prints on a terminal of its own."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "profkit", *map(str, arguments)]
    env = {**os.environ, "TERM": "xterm", **environment}
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, cwd=ROOT, env=env) as process:
        os.close(follower)
        found = b""
        while True:
            try:
                found += (part := os.read(leader, 65536))
            except OSError:  # the terminal's last user has gone
                break
            if not part:
                break
    os.close(leader)
    assert process.returncode == 0
    return found.decode()


def test_a_terminal_shows_what_a_pipe_gets_in_colour(oddly_named: Path) -> None:
    coloured = shown_on_a_terminal("kernels", oddly_named, NO_COLOR="")
    plain = shown_on_a_terminal("kernels", oddly_named, NO_COLOR="1")
    assert "\x1b[1m" in coloured
    assert "\x1b" not in plain
    assert _CODES.sub("", coloured) == plain
    assert "k␛[31m" in coloured
    assert RED not in coloured
