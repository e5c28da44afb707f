"""What a module is called: its dotted name in the model that the script calls."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

ROOT = "model"

# Modules that only pass a call on to the one that they hold; their names would stand before every other.
_WRAPPERS = {
    "DataParallel": "module.",
    "DistributedDataParallel": "module.",
    "FullyShardedDataParallel": "_fsdp_wrapped_module.",
    "OptimizedModule": "_orig_mod.",
}


class ModuleNames:
    """Names modules as ``named_modules`` of the outermost module does, wrappers' own prefixes left out.

    It holds no module alive. A module keeps its name until a model that contains it is called; one that was added to
    a model after the first call has none.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._names: WeakKeyDictionary[nn.Module, tuple[str, int]] = WeakKeyDictionary()

    def name_root(self, root: nn.Module, name: str = ROOT) -> None:
        """Take ``root`` as an outermost module and call it ``name``, unless it has a name already."""
        if root in self._names:
            return
        prefix, within = _WRAPPERS.get(type(root).__name__, ""), ""
        for path, module in root.named_modules():
            if prefix and f"{path}." == within + prefix:
                within += prefix
                prefix = _WRAPPERS.get(type(module).__name__, "")
                continue  # the wrapper has its range already
            own = path.removeprefix(within)
            self._names[module] = (own, own.count(".") + 1)
        self._names[root] = (name, 0)

    def range_name(self, module: nn.Module) -> str | None:
        """Return the name of the module's range, or None if it has none: deeper than wanted, or in no known model."""
        name, depth = self._names.get(module, ("", self._depth + 1))
        return name if depth <= self._depth else None
