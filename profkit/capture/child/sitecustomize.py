"""Python runs this at the start of each process that ``profkit run`` starts, and of each that those start.

The launcher puts this folder first on PYTHONPATH. It loads nothing until torch is imported, then attaches profkit, and
it runs the ``sitecustomize`` whose place it takes.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _TorchWatcher:
    """A finder that finds what the others find, and attaches profkit once torch has been imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        # Somebody may also look for a spec without an import, to see whether torch is there.
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
    """Attach profkit; whatever stands in the way is said in a line, and the script runs all the same."""
    spec = PathFinder.find_spec("profkit", sys.path)
    try:
        if spec is not None and not spec.submodule_search_locations:
            raise ImportError(f"{spec.origin} has its name")
        from profkit.capture import describe_error
        from profkit.capture.session import attach
    except Exception as error:
        # The script's Python is not the launcher's, for example.
        name = getattr(error, "name", None)
        why = f"which has no {name}" if isinstance(error, ModuleNotFoundError) and name else f"because {error}"
        _say_why_not(f"in {sys.executable}, {why}")
        return
    try:
        attach()
    except Exception as error:
        _say_why_not(f"in process {os.getpid()}: {describe_error(error)}")


def _say_why_not(where: str) -> None:
    """Say it here, and leave it for the launcher, as `profkit.run.recording` reads it."""
    # Standard error may be closed, None or full, and whatever is raised here would be raised by the `import torch`.
    with suppress(Exception):
        sys.stderr.write(f"profkit: nothing is recorded {where}\n")
    with suppress(Exception):
        import json  # most processes get in

        name = os.path.join(json.loads(os.environ["PROFKIT_ATTACH"])["run"], f"partial.refused-{os.getpid()}")
        with open(name, "w", encoding="utf-8", errors="replace") as file:
            file.write(where)


def _run_the_next_one(folder: str) -> None:
    """Take this folder off the path, and run the ``sitecustomize`` that comes after it, if there is one, in here."""
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != folder]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        globals()["__file__"] = spec.origin
        spec.loader.exec_module(sys.modules[__name__])


if "PROFKIT_ATTACH" in os.environ:
    sys.meta_path.insert(0, _TorchWatcher())
_run_the_next_one(os.path.dirname(os.path.realpath(__file__)))
