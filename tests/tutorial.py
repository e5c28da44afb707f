"""The tutorial in ``profkit help start``: its program, its commands and its changes of the program, in their order.

``python -m tests.tutorial RUNS`` puts the output of each command into it. RUNS holds the runs that the tutorial makes,
as a machine with a GPU made them: commands that record are not run.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Literal, NamedTuple

import profkit
from tests.conftest import call_main

GUIDE = Path(profkit.__file__).parent / "guides" / "start.md"
_BLOCK = re.compile(r"```(python|console|diff)\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"^\$ profkit (.*?)(?: \| head -(\d+))?$", re.MULTILINE)


class Part(NamedTuple):
    """A program, a change of it, or the words of a command after ``profkit``."""

    kind: Literal["program", "change", "command"]
    text: str


def read_parts() -> Iterator[Part]:
    """Yield the tutorial's parts in their order."""
    for kind, text in _BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        if kind == "python":
            yield Part("program", text)
        elif kind == "diff":
            yield Part("change", text)
        else:
            yield from (Part("command", words) for words, _ in _COMMAND.findall(text))


def change(program: str, diff: str) -> str:
    """Return a program with the lines that begin with ``-`` replaced by those that begin with ``+``."""
    removed, added = ("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+")
    assert program.count(removed) == 1, removed
    return program.replace(removed, added)


def _with_output(block: str) -> str:
    shown = []
    for match in _COMMAND.finditer(block):
        words, lines = match.groups()
        output = "" if words.startswith("run ") else call_main(shlex.split(words)).stdout
        shown.append(f"{match.group()}\n" + "".join(output.splitlines(keepends=True)[: int(lines) if lines else None]))
    return "".join(shown)


def main() -> None:
    """Write the tutorial with the outputs of today."""
    text = GUIDE.read_text(encoding="utf-8")
    with chdir(sys.argv[1]):
        text = re.sub(r"(?<=```console\n).*?(?=```)", lambda block: _with_output(block.group()), text, flags=re.DOTALL)
    GUIDE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
