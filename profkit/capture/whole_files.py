"""What a recording process leaves for the launcher: each file appears whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def partial_of(path: Path) -> Path:
    """Return where a file is written before it takes its name."""
    return path.with_name(f"partial.{path.name}")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` to ``path``.

    Raises:
        OSError: it cannot be written.
    """
    partial = partial_of(path)
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)
