"""What can be run: the built-in models, ``model.NAME``, and any command that starts Python."""

from __future__ import annotations

import difflib
import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

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
        raise UsageError(f"{text}: only built-in models can be run: {known}; your own: profkit run -- python {text}")
    by_folded_name = {preset.casefold(): preset for preset in PRESETS}
    nearest = difflib.get_close_matches(name.casefold(), by_folded_name, n=1)
    hint = f"did you mean {PREFIX}{by_folded_name[nearest[0]]}?" if nearest else f"there are {known}"
    raise UsageError(f"{text}: no such model; {hint}")


def is_command(words: Sequence[str]) -> bool:
    """Return whether the target is a command to run, and no built-in model: more than one word, or a program's name."""
    if words[0].startswith(PREFIX):
        if len(words) > 1:
            raise UsageError(f"{' '.join(words[1:])}: a built-in model takes options only")
        return False
    return len(words) > 1 or (words[0] not in PRESETS and shutil.which(words[0]) is not None)


def command_name(words: Sequence[str]) -> str:
    """Return a short name for a command's runs: that of its script or module, else of its program."""
    name = Path(words[0]).name
    for before, word in itertools.pairwise(words):
        if word.endswith(".py") or before == "-m":
            name = Path(word).name.removesuffix(".py")
            break
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "command"
