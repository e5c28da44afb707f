"""How deep the ranges of a model's modules reach where nobody says it: by the model's tree, not by dots in names.

What counts is the block that a model repeats most of its work in (a transformer's layer): it, its parts and their parts
get ranges. A module that is never called, such as a ``ModuleList``, is no level. Ranges cost time, so that a level with
too many of them is left out as a whole, and so is what lies below it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from profkit.run.manifest import RangesLeftOut

RANGES_A_PASS = 2000
"""How many ranges a forward and a backward pass of one model may open, each module counted once in both."""

_LEVELS_BELOW_BLOCK = 2
_LEVELS_WITHOUT_BLOCK = 3
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.|\._orig_mod$")
_NUMBERED = re.compile(r"(.*?)\d+")


@dataclass(frozen=True)
class Reach:
    """The dotted names of the modules that get a range, and what was left out because it would be too much."""

    paths: frozenset[str]
    left_out: RangesLeftOut | None


def reach_by_tree(model: nn.Module) -> Reach:
    """Return which of the model's modules get a range, without the model itself, which has no dotted name."""
    # Of a part that was compiled by itself the eager module stays, not its wrapper.
    modules = {plain_name(path): module for path, module in model.named_modules() if path}
    levels = _levels(modules)
    deepest = wanted = _wanted_level(modules, levels)
    count = Counter(levels[path] for path, module in modules.items() if _is_called(module))
    while deepest and 2 * sum(number for level, number in count.items() if level <= deepest) > RANGES_A_PASS:
        deepest -= 1
    missing = [path for path in modules if deepest < levels[path] <= wanted and _is_called(modules[path])]
    left_out = RangesLeftOut(len(missing), max(map(_parts, missing))) if missing else None
    return Reach(frozenset(path for path in modules if levels[path] <= deepest), left_out)


def plain_name(name: str) -> str:
    """Return a module's or parameter's dotted name without what ``torch.compile`` of a part adds to it."""
    return _COMPILED.sub("", name) if "_orig_mod" in name else name


def _levels(modules: dict[str, nn.Module]) -> dict[str, int]:
    """Return how many modules are called on the way from the model to each one, itself included."""
    levels = {"": 0}
    for path, module in modules.items():
        levels[path] = levels[_parent(path)] + _is_called(module)
    return levels


def _wanted_level(modules: dict[str, nn.Module], levels: dict[str, int]) -> int:
    """Return the level of the parts of the parts of the block that repeats most modules."""
    sizes = Counter(around for path in modules for around in _path_and_around(path))
    repeated: dict[tuple[str, str, type], list[str]] = defaultdict(list)
    for path, module in modules.items():
        numbered = _NUMBERED.fullmatch(path.rpartition(".")[2])
        if numbered is not None:
            repeated[_parent(path), numbered[1], type(module)].append(path)
    blocks = [paths for paths in repeated.values() if len(paths) > 1]
    if not blocks:
        return _LEVELS_WITHOUT_BLOCK
    most = max(blocks, key=lambda paths: sum(sizes[path] for path in paths))
    return levels[most[0]] + _LEVELS_BELOW_BLOCK


def _is_called(module: nn.Module) -> bool:
    # The class of a scripted module refuses to show its forward.
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def _path_and_around(path: str) -> Iterator[str]:
    while path:
        yield path
        path = _parent(path)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _parts(path: str) -> int:
    return path.count(".") + 1
