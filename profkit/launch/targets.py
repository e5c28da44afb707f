"""What can be run: built-in models, ``model.NAME``; callables that return a step, ``package.module:name``; commands."""

from __future__ import annotations

import difflib
import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from profkit.errors import UsageError
from profkit.models.presets import PRESETS
from profkit.run.manifest import Kind

PREFIX = "model."

_CALLABLE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


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
        raise UsageError(
            f"{text}: only built-in models can be run: {known}; your own: profkit run -- python {text}, or "
            "package.module:name, a callable that returns a step"
        )
    by_folded_name = {preset.casefold(): preset for preset in PRESETS}
    nearest = difflib.get_close_matches(name.casefold(), by_folded_name, n=1)
    hint = f"did you mean {PREFIX}{by_folded_name[nearest[0]]}?" if nearest else f"there are {known}"
    raise UsageError(f"{text}: no such model; {hint}")


def target_kind(words: Sequence[str]) -> Kind:
    """Return what a target is; one word that is no callable and no program's name is meant as a model.

    Raises:
        UsageError: further words after a built-in model or a callable, which take options only.
    """
    first, *more = words
    kind: Kind = "command" if more or (first not in PRESETS and shutil.which(first) is not None) else "model"
    if _CALLABLE.fullmatch(first):
        kind = "callable"
    elif first.startswith(PREFIX):
        kind = "model"
    if more and kind != "command":
        what = "a built-in model" if kind == "model" else "a callable"
        raise UsageError(f"{' '.join(more)}: {what} takes options only")
    return kind


def command_name(words: Sequence[str]) -> str:
    """Return a short name for a command's runs: that of its script or module, else of its program."""
    name = Path(words[0]).name
    for before, word in itertools.pairwise(words):
        if word.endswith(".py") or before == "-m":
            name = Path(word).name.removesuffix(".py")
            break
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "command"
