"""The commands that show an answer's figures, for one row, and as templates for all of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from profkit.names import FORWARD, context_range
from recipes.nsight.words import Measured


def show_kernels(row: Measured, table: Mapping[str, Any], *more: str) -> str:
    """Return the command that prints a table of kernels."""
    words = ["profkit", "kernels", row["capture"], "--range", table["range"]]
    words += ["--exclude", table["exclude"]] if table["exclude"] else []
    return shlex.join([*words, *more])


def show_walls(row: Measured, phase: str) -> str:
    """Return the command that prints how long a phase's range was open in each step, and its kernel time."""
    if not row.get("forward"):
        return shlex.join(["profkit", "ranges", row["capture"], "--numbered"])
    phases = {**row["forward"], "range": row["forward"]["range"].removesuffix(FORWARD) + phase}
    return show_kernels(row, phases, "--per-instance", "--top", "1")


def show_clock(row: Measured) -> str:
    """Return the command that prints the medians of Python's clock, in ns, without a profiler and with it."""
    here = f".query('context == {row['context']}')" if _is_of_several(row) else ""
    columns = "[['phase', 'clean_median', 'profiled_median']]"
    return f'python -c "import profkit; print(profkit.read_step_times({row["capture"]!r}).to_pandas(){here}{columns})"'


def show_attention(row: Measured) -> str:
    """Return the command that prints the parts of attention."""
    within = row["attention"]["range"]
    return shlex.join(
        ["profkit", "efficiency", row["capture"], "--attention", *(["--range", within] if within else [])]
    )


def find_templates(rows: Iterable[Measured], build: Callable[[Measured], Sequence[str]]) -> list[str]:
    """Return the commands of rows with CAPTURE and CONTEXT in the place of what differs; mostly they are one."""
    found: dict[str, None] = {}
    for row in rows:
        for command in build(row):
            text = command.replace(row["capture"], "CAPTURE").replace(context_range(row["context"]), "context CONTEXT")
            found[text.replace(f"context == {row['context']}'", "context == CONTEXT'")] = None
    return list(found)


def find_origins(rows: Iterable[Measured]) -> list[str]:
    """Return the commands that made the captures, with SIZE and PASSES in the place of what differs."""
    found: dict[str, None] = {}
    for row in rows:
        size, passes = row["size"], row["passes"]
        text = row["made_by"].replace(f"/{size}-{passes}-", "/SIZE-PASSES-").replace(f"model.{size}", "model.SIZE")
        found[text.replace(f"--passes {passes}", "--passes PASSES")] = None
    return list(found)


def _is_of_several(row: Measured) -> bool:
    """Return whether a row's capture has other contexts too, each under a range and a name of its own."""
    _, _, contexts = str(row["made_by"]).partition("--context ")
    return "," in contexts.partition(" ")[0]
