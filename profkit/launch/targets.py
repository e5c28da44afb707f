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
    """Return the kind of a target; a single word that is neither a callable nor a program is taken as a model.

    Raises:
        UsageError: a script without the Python that runs it, or further words after a built-in model or a callable.
    """
    first, *more = words
    if first.endswith(".py") and shutil.which(first) is None:
        raise UsageError(f"put python before it: profkit run -- python {' '.join(words)}")
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


_OWN_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_WITH_VALUE = ("-X", "-W")

_HOW = "give it to {0} itself: profkit run -- {0} … , and leave --nproc-per-node out"


def build_rank_argv(words: Sequence[str], count: int) -> list[str]:
    """Return the command that starts ``python train.py …`` or ``python -m pkg …`` as ``count`` ranks of one machine.

    torch's own launcher does it, in the Python that the command names.

    Raises:
        UsageError: the command starts its ranks itself, or is none that starts a Python script or module.
    """
    program, *rest = words
    name = Path(program).name
    if name in _OWN_LAUNCHERS:
        raise UsageError(f"--nproc-per-node {count}: {name} starts its processes itself; {_HOW.format(name)}")
    at = 0
    while at < len(rest) and rest[at].startswith("-") and rest[at] not in ("-m", "-c", "-"):
        at += 2 if rest[at] in _WITH_VALUE else 1
    flags, target = rest[:at], rest[at:]
    if not name.startswith("python") or not target or target[0] in ("-c", "-"):
        raise UsageError(
            f"--nproc-per-node {count}: only starts Python scripts and modules: profkit run --nproc-per-node {count} "
            "-- python train.py, or -- python -m package.module"
        )
    if target[0] == "-m" and target[1:2] and target[1] in _LAUNCHER_MODULES:
        raise UsageError(f"--nproc-per-node {count}: {target[1]} starts its processes itself; {_HOW.format(target[1])}")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [program, *flags, *launcher, *target]
