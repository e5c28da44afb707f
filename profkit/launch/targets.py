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
    name = text.removeprefix(PREFIX)
    if text.startswith(PREFIX) and name in PRESETS:
        return name
    known = ", ".join(PREFIX + preset for preset in PRESETS)
    if not text.startswith(PREFIX) and name not in PRESETS:
        raise UsageError(f"{text}: only built-in models can be run: {known}")
    by_folded_name = {preset.casefold(): preset for preset in PRESETS}
    nearest = difflib.get_close_matches(name.casefold(), by_folded_name, n=1)
    hint = f"did you mean {PREFIX}{by_folded_name[nearest[0]]}?" if nearest else f"there are {known}"
    raise UsageError(f"{text}: no such model; {hint}")
