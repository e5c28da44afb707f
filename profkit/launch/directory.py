"""Making a run directory, and writing into it so that nothing looks whole before it is."""

from __future__ import annotations

import itertools
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profkit.errors import RunError
from profkit.run.directory import node_suffix
from profkit.run_directory import MANIFEST

DEFAULT_PARENT = Path("runs")


def make_run_directory(output: Path | None, target: str) -> Path:
    """Make the directory of a new run and return it: ``output``, or ``runs/<UTC time>-<target>``.

    In a job of several machines each makes its own, ``-node0``, ``-node1``, … at the end of the name. An existing
    ``output`` is taken only if it is an empty directory; a run is never overwritten.

    Raises:
        RunError: ``output`` is taken, or the directory cannot be made.
    """
    node = node_suffix(os.environ)
    try:
        if output is None:
            return _make_default(target + node)
        output = Path(f"{output}{node}")
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise RunError(f"{output}: exists and is not empty; name a new directory with -o, or remove this one")
        if not os.access(output, os.W_OK):
            raise RunError(f"{output}: no permission to write; name another directory with -o")
    except FileExistsError:
        raise RunError(f"{output}: exists and is no directory; name a new directory with -o") from None
    except OSError as error:
        raise RunError(f"{error.filename or output}: {error.strerror}; name another directory with -o") from None
    return output


def _make_default(target: str) -> Path:
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    DEFAULT_PARENT.mkdir(exist_ok=True)
    for attempt in itertools.count(1):
        path = DEFAULT_PARENT / (f"{started}-{target}" if attempt == 1 else f"{started}-{target}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON to ``path`` at once: a reader sees the old file or the new one, never a part."""
    partial = path.with_name(f"partial.{path.name}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # A full disk is told without saying where.
        raise RunError(f"{path}: {error.strerror}; free some space, or name another directory with -o") from None
    os.replace(partial, path)


def write_manifest(run: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of ``run``."""
    write_json(run / MANIFEST, manifest)
