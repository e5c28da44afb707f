"""What a module is called, its dotted name in the model that the script calls, and whether it gets a range.

How deep ranges reach where nobody says it follows from the model's tree, not from dots in names: what counts is the
block that a model repeats most of its work in (a transformer's layer): it, its parts and their parts get ranges. A
module that is never called, such as a ``ModuleList``, is no level. Ranges cost time, so that a level with too many of
them is left out as a whole, and so is what lies below it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn

from profkit.run.manifest import RangesLeftOut
from profkit.run.recording import BY_TREE

ROOT = "model"

# Modules that only pass a call on to the one that they hold; their names would stand before every other.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def unwrap(root: nn.Module) -> nn.Module:
    while True:
        kind: Any = type(root)
        holder = _holder(kind)
        held = None if holder is None else getattr(root, holder, None)
        if not isinstance(held, nn.Module):  # also somebody's own class by that name
            return root
        root = held


@functools.lru_cache
def _holder(kind: type[nn.Module]) -> str | None:
    return next((_WRAPPERS[one.__name__] for one in kind.__mro__ if one.__name__ in _WRAPPERS), None)


class Part:
    """A module of a model that the script calls: its dotted ``name``, and ``range``, that of its range or None.

    ``owner`` is what its memory is called: the name or, where another module may have the same, that behind the model's
    and a slash. ``path_range`` is its range, or that of the wrapper around a part that was compiled by itself: code
    that was compiled of both calls the part alone.
    """

    __slots__ = ("is_known", "name", "owner", "path_range", "range", "reference")

    def __init__(
        self,
        name: str,
        owner: str | None,
        range_: str | None,
        path_range: str | None,
        reference: ref[nn.Module] | None,
    ) -> None:
        self.name = name
        self.owner = owner
        self.range = range_
        self.path_range = path_range
        self.reference = reference
        self.is_known = False
        """Whether somebody has looked at the conditions of its calls."""


UNNAMED = Part("", None, None, None, None)
"""In the place of a module's part, where no known model has the module."""
UNNAMED.is_known = True


class ModuleNames:
    """Names modules as ``named_modules`` of the outermost module does, wrappers' own prefixes left out.

    A part that was compiled by itself, and all below it, have the names that they would have in the eager model.

    It holds no module alive. A module keeps its name until a model that contains it is called; one that was added to
    a model after the first call has none.
    """

    def __init__(self, depth: int | None) -> None:
        self._depth = depth
        self.left_out: RangesLeftOut | None = None
        """What got no range because there would be too many, of the model with the most."""
        self.parts: dict[int, Part] = {}
        """What is known of each module; by its id, which is much faster to look up than a weak reference to it."""
        self._of_wrapped: WeakKeyDictionary[nn.Module, Part] = WeakKeyDictionary()

    def name_root(self, root: nn.Module, name: str = ROOT, models: Iterable[nn.Module] = ()) -> Part:
        """Name a model's modules; where one of the ``models`` has a part of the same name, ranges say whose it is."""
        model = unwrap(root)
        paths = self._paths_with_range(model)
        # Of the wrapped model itself the wrapper has the range.
        children = [(plain_name(path), module) for path, module in model.named_modules() if path]
        named = {path for path, _ in children}
        prefix = f"{name}/" if name in named else prefix_of(root, name)
        whose = ""
        if named and name != ROOT:  # a loss that is made anew in each step has no parts: it is named at once
            others = (plain_name(path) for one in models if one is not model for path, _ in one.named_modules())
            whose = f"{name}." if any(path in named for path in others) else ""
        for path, module in children:
            path_range = whose + path if path in paths else None
            # Of a part that was compiled by itself, the wrapper has the range.
            self._register(module, path, prefix + path, path_range if path in named else None, path_range)
            named.discard(path)
        range_ = None if self._depth is None else name
        part = self._register(root, name, prefix or name, range_, range_)
        if model is not root:
            self.parts.pop(id(model), None)
            self._of_wrapped[model] = part
        return part

    def name_replicas(self, model: nn.Module, replicas: Iterable[nn.Module]) -> None:
        for replica in replicas:
            for module, copy in zip(model.modules(), replica.modules(), strict=True):
                known = self.parts.get(id(module))
                if known is not None:
                    self._register(copy, known.name, known.owner, known.range, known.path_range)

    def part(self, module: nn.Module) -> Part | None:
        """Return what is known of the module, or of the wrapper that stands for it; None if no known model has it."""
        return self.parts.get(id(module)) or self._of_wrapped.get(module)

    def range_of(self, module: nn.Module) -> str | None:
        part = self.part(module)
        return None if part is None else part.range

    def _paths_with_range(self, model: nn.Module) -> frozenset[str]:
        if self._depth == BY_TREE:
            paths, left_out = reach_by_tree(model)
            if left_out is not None and (self.left_out is None or self.left_out.modules < left_out.modules):
                self.left_out = left_out
            return paths
        depth = self._depth or 0
        names = (plain_name(path) for path, _ in model.named_modules())
        return frozenset(name for name in names if name.count(".") < depth)

    def _register(
        self, module: nn.Module, name: str, owner: str | None, range_: str | None, path_range: str | None
    ) -> Part:
        key, parts = id(module), self.parts
        part = Part(name, owner, range_, path_range, ref(module, lambda _: parts.pop(key, None)))
        parts[key] = part
        return part


def prefix_of(root: nn.Module, name: str) -> str:
    """Return what stands before the names in a model that is called ``name``: nothing for the only or first model."""
    return f"{name}/" if name != ROOT and any(True for _ in root.parameters()) else ""


class Roots:
    """The models that a script calls, wrappers taken off; of one that holds another, the one that holds it.

    It holds none of them alive.
    """

    def __init__(self) -> None:
        self._roots: list[ref[nn.Module]] = []
        self._parts: WeakSet[nn.Module] = WeakSet()
        self._prefixes: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    def of(self, module: nn.Module) -> nn.Module | None:
        """Return the model that a call of ``module`` is a call of; None if it is a part of one."""
        model = unwrap(module)
        if model not in self._parts:
            parts = WeakSet(model.modules())
            self._roots = [one for one in self._roots if (held := one()) is not None and held not in parts]
            self._roots.append(ref(model))
            self._parts.update(parts)
        return model if any(one() is model for one in self._roots) else None

    def list(self) -> list[nn.Module]:
        return [model for one in self._roots if (model := one()) is not None]

    def name(self, model: nn.Module, name: str) -> None:
        self._prefixes.setdefault(model, prefix_of(model, name))

    def prefix(self, model: nn.Module) -> str:
        """Return what stands before the names in a model: nothing unless there are several."""
        return self._prefixes.get(model, "")

    def parameter_names(self) -> dict[Tensor, str]:
        """Return the dotted name of every parameter of the models, the first where a model has it twice."""
        models = [(model, self.prefix(model)) for model in self.list()]
        return {one: prefix + plain_name(name) for model, prefix in models for name, one in model.named_parameters()}


RANGES_A_PASS = 2000
"""How many ranges a forward and a backward pass of one model may open, each module counted once in both."""

_LEVELS_BELOW_BLOCK = 2
_LEVELS_WITHOUT_BLOCK = 3
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.|\._orig_mod$")
_NUMBERED = re.compile(r"(.*?)\d+")


def reach_by_tree(model: nn.Module) -> tuple[frozenset[str], RangesLeftOut | None]:
    """Return which of the model's modules get a range, and what was left out because it would be too much.

    The model itself, which has no dotted name, is not among them.
    """
    # Of a part that was compiled by itself the eager module stays, not its wrapper.
    modules = {plain_name(path): module for path, module in model.named_modules() if path}
    levels = _levels(modules)
    deepest = wanted = _wanted_level(modules, levels)
    count = Counter(levels[path] for path, module in modules.items() if _is_called(module))
    while deepest and 2 * sum(number for level, number in count.items() if level <= deepest) > RANGES_A_PASS:
        deepest -= 1
    missing = [path for path in modules if deepest < levels[path] <= wanted and _is_called(modules[path])]
    left_out = RangesLeftOut(len(missing), max(map(_parts, missing))) if missing else None
    return frozenset(path for path in modules if levels[path] <= deepest), left_out


def plain_name(name: str) -> str:
    """Return a module's or parameter's dotted name without what ``torch.compile`` of a part adds to it."""
    return _COMPILED.sub("", name) if "_orig_mod" in name else name


def _levels(modules: dict[str, nn.Module]) -> dict[str, int]:
    levels = {"": 0}
    for path, module in modules.items():
        levels[path] = levels[_parent(path)] + _is_called(module)
    return levels


def _wanted_level(modules: dict[str, nn.Module], levels: dict[str, int]) -> int:
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
