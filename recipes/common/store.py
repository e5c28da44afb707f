"""The results of a grid on disk: complete after every cell, however the run ends, and continued by the next run."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from profkit import __version__
from profkit.errors import RunError, UsageError
from profkit.files import write_whole
from recipes.common.recipe import Row, identify

CELLS = "cells.jsonl"
MANIFEST = "manifest.json"

# Results of machines that differ in one of these do not belong in one table.
_MUST_AGREE = (
    *("device", "gpu", "torch", "cuda"),
    *("float32_matmul_precision", "cuda_matmul_allow_tf32", "cudnn_allow_tf32"),
)


class Store:
    """The rows of one directory by cell, in the order in which they were measured."""

    def __init__(self, directory: Path, keys: Sequence[str], rows: Sequence[Row], manifest: dict[str, Any]) -> None:
        self.directory = directory
        self._keys = keys
        self._rows = {identify(row, keys): row for row in rows}
        self._manifest = manifest

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def find(self, cell: Mapping[str, object]) -> Row | None:
        """Return the row of a cell, or None."""
        return self._rows.get(identify(cell, self._keys))

    def add(self, row: Row) -> None:
        """Keep a row, replacing an older one of its cell, and write all rows."""
        self._rows[identify(row, self._keys)] = row
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in self._rows.values()]
        write_whole(self.directory / CELLS, "".join(lines).encode())

    def finish(self, state: str) -> None:
        """Write into the manifest how this run of the recipe ended."""
        self._manifest["runs"][-1] |= {"finished_utc": _now(), "state": state, "load_average_at_end": _load_average()}
        _write_manifest(self.directory, self._manifest)


def open_store(
    directory: Path, recipe: str, keys: Sequence[str], machine: Mapping[str, object], *, restart: bool
) -> Store:
    """Return a recipe's results in ``directory``, ready for more, and note this run with its revision in the manifest.

    Args:
        restart: begin anew; the old rows are discarded when the first new one is written.

    Raises:
        UsageError: it holds results of another recipe or machine.
        RunError: its files cannot be read.
    """
    directory.mkdir(parents=True, exist_ok=True)
    before = None if restart else _read_manifest(directory)
    if before is not None:
        _require_the_same(directory, before, recipe, machine)
    command = ["python", "-m", f"recipes.{recipe}", *sys.argv[1:]]
    run = {"command": command, "started_utc": _now(), "git_revision": git_revision(), **_surroundings()}
    versions = {"profkit": __version__, "python": platform.python_version()}
    manifest = {
        "recipe": recipe,
        "machine": {**machine, "driver": _driver_version()},
        "versions": versions,
        "runs": [*([] if before is None else before["runs"]), run],
    }
    store = Store(directory, keys, [] if before is None else _read_rows(directory / CELLS, keys), manifest)
    _write_manifest(directory, manifest)
    return store


def _surroundings() -> dict[str, object]:
    """Return what else times depend on: visible GPUs if set, usable CPUs, the host's load over 1, 5 and 15 minutes."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # Results are shared: they do not identify the device.
    gpus = {} if seen is None else {"cuda_visible_devices": re.sub(r"((?:MIG-)?GPU|MIG)-[0-9a-fA-F-]+", r"\1-…", seen)}
    return {**gpus, "cpus": cpus, "load_average_at_start": _load_average()}


def _load_average() -> list[float] | None:
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except (OSError, AttributeError):
        return None  # Not every system keeps one.


def _require_the_same(directory: Path, before: Mapping[str, Any], recipe: str, machine: Mapping[str, object]) -> None:
    if before["recipe"] != recipe:
        raise UsageError(f"{directory}: holds results of {before['recipe']}; name another directory with -o")
    for fact in _MUST_AGREE:
        there = before["machine"].get(fact)
        if there != machine.get(fact):
            raise UsageError(
                f"{directory}: holds results with {fact} {there}, here it is {machine.get(fact)}; "
                "name another directory with -o, or begin anew with --restart"
            )


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    path = directory / MANIFEST
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        _refuse(path)
    if not isinstance(manifest, dict) or not {"recipe", "machine", "runs"} <= manifest.keys():
        _refuse(path)
    return manifest


def _read_rows(path: Path, keys: Sequence[str]) -> list[Row]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except ValueError:
        _refuse(path)
    if not all(isinstance(row, dict) and {"status", *keys} <= row.keys() for row in rows):
        _refuse(path)
    return rows


def _refuse(path: Path) -> NoReturn:
    raise RunError(f"{path}: not written by a recipe; name another directory with -o, or begin anew with --restart")


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    write_whole(directory / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_revision() -> str | None:
    """Return the revision checked out in the working directory, with ``+`` if files differ; None without git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return None if found is None else found[0]
