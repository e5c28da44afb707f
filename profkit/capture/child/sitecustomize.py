"""Python runs this at the start of each process that ``profkit run`` starts, and of each that those start.

The launcher puts this folder first on PYTHONPATH. It loads nothing until torch is imported, then attaches profkit, and
it hands over to the ``sitecustomize`` that it stands in for.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any


class _TorchWatcher:
    """A finder that finds what the others find, and has profkit attached once torch has been imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        # A spec may also be looked for without an import, to see whether torch is there.
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, self)
        return spec


def _run_after(loader: Any, watcher: _TorchWatcher) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        if watcher in sys.meta_path:
            sys.meta_path.remove(watcher)
            _attach()

    loader.exec_module = exec_module


def _attach() -> None:
    try:
        from profkit.capture.attach import attach
    except ModuleNotFoundError as error:
        # The script's Python is another one than the launcher's; the script is to run all the same.
        sys.stderr.write(f"profkit: nothing is recorded in {sys.executable}, which has no {error.name}\n")
        return
    attach()


def _hand_over(folder: str) -> None:
    """Take this folder off the path, and run the ``sitecustomize`` that comes after it, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != folder]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if "PROFKIT_ATTACH" in os.environ:
    sys.meta_path.insert(0, _TorchWatcher())
_hand_over(os.path.dirname(os.path.realpath(__file__)))
