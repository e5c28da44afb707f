"""Run directories of tests begin here: a folder with a manifest, beside which a test puts what its run left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profkit.run.directory import MANIFEST


def start_run(folder: Path, **facts: Any) -> Path:
    """Make a run whose manifest says that it is complete, and these; or have one that is there already say them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps({"status": "complete", **facts}))
    return folder
