"""What can be run: today the built-in models, ``model.NAME``."""

from __future__ import annotations

import difflib

from profkit.errors import UsageError
from profkit.models.presets import PRESETS

PREFIX = "model."


def parse_target(text: str) -> str:
    """Return the preset that ``model.NAME`` names.

    Raises:
        UsageError: no such preset (the nearest are named), or something that is no built-in model.
    """
    known = [PREFIX + name for name in PRESETS]
    if text in known:
        return text.removeprefix(PREFIX)
    if not text.startswith(PREFIX) and PREFIX + text not in known:
        raise UsageError(f"{text}: only built-in models can be run: {', '.join(known)}")
    nearest = difflib.get_close_matches(PREFIX + text.removeprefix(PREFIX), known, n=2)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"there are {', '.join(known)}"
    raise UsageError(f"{text}: no such model; {hint}")
