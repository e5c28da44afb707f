"""What may become of a mutant, and what may not.

Every command ends with exit 0, or with 1, 2 or 3 and one line that begins with ``profkit:``; within its limits of time
and memory; without a traceback, an internal error, a warning of Python's, or a control character anywhere. JSON is
JSON, and what it says adds up: with the sum that plain SQL gives, and within itself.
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.child import ChildError, run_in_child
from tests.conftest import call_main
from tests.fuzz.mutants import CLASSES, OUTPUT, Mutant, make

CPU_SECONDS = 20
MEMORY_BYTES = 2**31

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_WARNING = re.compile(r"\w*Warning: .*")
# SQLite takes a text for larger than any number, and for 0 when it subtracts.
_SUM = "SELECT coalesce(sum(end - start), 0) FROM {} WHERE end >= start AND typeof(end) != 'text'"
_COUNTED = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE")

_NEVER_NEGATIVE = ("_ns", "bytes", "count", "share")
_MOMENTS = ("first_ns", "start_ns", "end_ns")
"""When something was, on a clock that may begin anywhere."""

Task = tuple[str, int]


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: ``read`` or ``refused``, or what went wrong with which command."""

    outcome: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.outcome not in ("read", "refused")


@cache
def warm_up(folder: Path) -> None:
    """Load what the commands load, so that no child has to: each class's own command, and each of the others once."""
    done: set[tuple[str, ...]] = set()
    for maker, fixed, others in CLASSES.values():
        path = maker(Random(0), folder)
        for command in (fixed, *(other for other in others if tuple(other) not in done)):
            places = {"FILE": str(path), "OUT": str(folder / OUTPUT)}
            call_main([places.get(part, part) for part in command])
        done |= set(map(tuple, others))


def judge(kind: str, seed: int, folder: Path) -> Verdict:
    """Make a mutant, read it in a child process, and say what became of it."""
    warm_up(folder)
    mutant = make(kind, seed, folder)
    try:
        return run_in_child(lambda: _read(mutant), cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES)
    except ChildError as error:
        lines = str(error).strip().splitlines()
        what = "stopped" if lines[-1].startswith("the child ended") else "raised"
        return Verdict(what, f"{lines[-1]}\n{error}")


def judge_all(tasks: Sequence[Task], folder: Path) -> list[tuple[Task, Verdict]]:
    """Judge some mutants, each a class and a seed: in one child, and each in its own if that one fails."""
    warm_up(folder)
    try:
        verdicts = run_in_child(
            lambda: [_read(make(kind, seed, folder)) for kind, seed in tasks],
            cpu_seconds=CPU_SECONDS,
            memory_bytes=MEMORY_BYTES,
        )
    except ChildError:
        verdicts = [judge(kind, seed, folder) for kind, seed in tasks]
    return list(zip(tasks, verdicts, strict=True))


def _read(mutant: Mutant) -> Verdict:
    codes = set()
    for command in mutant.commands:
        done = call_main(command)
        verdict = _judge_command(done)
        if verdict is None and done.returncode == 0 and command[0] == "scrub":
            verdict = _judge_copy(mutant.commands[0][0], mutant.path, Path(command[-1]))
        if verdict is None and done.returncode == 0 and "json" in command:
            verdict = _judge_figures(command[0], mutant.path, json.loads(done.stdout, parse_constant=_refuse))
        if verdict is not None:
            said = f"profkit {' '.join(command)} → {done.returncode}\n{done.stderr[-500:]}"
            return Verdict(verdict.outcome, f"{verdict.detail}\n{said}")
        codes.add(done.returncode)
    return Verdict("read" if codes & {0, 3} else "refused")


def _judge_command(done: subprocess.CompletedProcess[str]) -> Verdict | None:
    last = done.stderr.strip().splitlines()[-1:] or [""]
    problems = {
        "traceback": "Traceback" in done.stderr,
        "internal error": "internal error" in done.stderr,
        "out of memory": "out of memory" in last[0],
        "python warning": _WARNING.search(done.stderr) is not None,
        "odd exit": done.returncode not in (0, 1, 2, 3),
        "no line": done.returncode in (1, 2) and not last[0].startswith("profkit: "),
        # CSV is for programs, and carries every name as it is.
        "control character": _CONTROL.search(done.stderr) or ("csv" not in done.args and _CONTROL.search(done.stdout)),
    }
    found = next((what for what, is_so in problems.items() if is_so), None)
    return None if found is None else Verdict(found, last[0])


def _judge_copy(command: str, path: Path, copied: Path) -> Verdict | None:
    """Return what is wrong with a shared copy: it must give the same numbers as what it was made of.

    What lies in a run and is no file is not in its copy.
    """
    if path.is_dir() and any(entry.is_symlink() or not entry.is_file() for entry in path.iterdir()):
        return None
    before, after = (call_main([command, str(place), "--format", "json"]) for place in (path, copied))
    if before.returncode != after.returncode:
        return Verdict("copy refused", after.stderr)
    if before.returncode != 0:
        return None
    figures = [sorted(_numbers(json.loads(done.stdout)), key=repr) for done in (before, after)]
    different = [pair for pair in zip(*figures, strict=False) if pair[0] != pair[1]]
    return Verdict("copy differs", str(different[:3])) if different or len(figures[0]) != len(figures[1]) else None


def _judge_figures(command: str, path: Path, content: dict[str, Any]) -> Verdict | None:
    if command != "compare":
        figures = [(key, value) for key, value in _numbers(content) if key not in _MOMENTS]
        negative = [key for key, value in figures if value < 0 and key.endswith(_NEVER_NEGATIVE)]
        if negative:
            return Verdict("negative figure", ", ".join(negative[:5]))
    if command == "kernels" and path.suffix == ".sqlite":
        total, expected = content["ledger"]["total_ns"], _sum_by_sql(path)
        if expected is not None and total != expected:
            return Verdict("wrong sum", f"kernels add up to {total}, by SQL to {expected}")
    if command == "memory" and "peak" in content:
        return _judge_memory(content)
    return None


def _judge_memory(content: dict[str, Any]) -> Verdict | None:
    peak = content["allocated"]["peak_bytes"]
    for part in ("by_category", "by_stack"):
        total = sum(row["bytes"] for row in content["peak"][part])
        if content["peak"][part] and total not in (peak, content["peak"].get("selected_bytes", peak)):
            return Verdict("wrong sum", f"{part} adds up to {total}, the peak is {peak}")
    total, expected = sum(content["peak"]["evidence"].values()), content["peak"]["allocated_bytes"]
    if total != expected:
        return Verdict("wrong sum", f"the evidence adds up to {total}, allocated are {expected}")
    return None


def _numbers(content: Any, key: str = "") -> list[tuple[str, float]]:
    if isinstance(content, dict):
        return [found for name, value in content.items() for found in _numbers(value, name)]
    if isinstance(content, list):
        return [found for value in content for found in _numbers(value, key)]
    return [(key, content)] if isinstance(content, int | float) and not isinstance(content, bool) else []


def _sum_by_sql(path: Path) -> int | None:
    """Return the time of all kernels and graphs; None if SQLite cannot say."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            there = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            sums = [database.execute(_SUM.format(table)).fetchone()[0] for table in _COUNTED if table in there]
    except sqlite3.Error:
        return None
    return sum(sums) if all(isinstance(one, int) for one in sums) else None


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} in JSON")
