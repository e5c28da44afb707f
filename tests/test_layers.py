"""Imports point down only, and the heavy packages stay out of the commands that do not need them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import pytest

from profkit.cli import _COMMANDS

PACKAGE = Path(__file__).parent.parent / "profkit"

# Who may import whom; the design's arrows. Each layer may also import itself.
BASE = {"errors", "files", "names", "run", "text_kinds", "version"}
ALLOWED = {
    "errors": set(),
    "version": set(),
    "names": set(),
    "files": set(),
    "annotation": set(),
    "text_kinds": {"names"},
    "run": {"errors", "files", "names", "text_kinds"},
    "models": {"errors", "names", "annotation"},
    "capture": {"models", "annotation", *BASE},
    "launch": {"models", *BASE},
    "trace": BASE,
    "snapshot": BASE,
    "allocator": {"snapshot", *BASE},
    "analysis": {"allocator", "trace", "snapshot", *BASE},
    "reading": {"analysis", "allocator", "trace", "snapshot", "launch", *BASE},
    "joining": {"reading", "analysis", *BASE},
    "sharing": {"reading", "analysis", "trace", "snapshot", *BASE},
    "report": {"analysis", "reading", "joining", "sharing", "allocator", "trace", "snapshot", *BASE},
    "cli": {
        "report",
        "reading",
        "joining",
        "sharing",
        "analysis",
        "trace",
        "snapshot",
        "launch",
        "models",
        *BASE,
    },
    "asking": {"report", "reading", "joining", "analysis", *BASE},
    "recording": {"asking", "report", "capture", "launch", *BASE},
    "__main__": {"cli"},
    "__init__": {"report", "analysis", "annotation", "asking", "reading", "recording", "version"},
}


def _layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def _import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of a file, at its top or within a function; `typing` alone is no exception."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def _imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in _import_nodes(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        else:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or ""))
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_imports_point_down() -> None:
    wrong = []
    for path in SOURCES:
        layer = _layer(path)
        assert layer in ALLOWED, f"{layer} is no room of the house"
        modules = [(line, module) for line, module in _imports(path) if module.split(".")[0] == "profkit"]
        assert "profkit" not in [module for _, module in modules], f"{path} imports the package root from inside"
        targets = [(line, module.split(".")[1]) for line, module in modules]
        wrong += [(str(path), *target) for target in targets if target[1] not in {layer, *ALLOWED[layer]}]
    assert not wrong


def test_only_the_capture_wing_names_torch() -> None:
    analysis = [path for path in SOURCES if _layer(path) not in {"capture", "models"}]
    assert not [str(path) for path in analysis for _, module in _imports(path) if module.split(".")[0] == "torch"]


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(path: Path, known: Container[str]) -> Iterator[str]:
    """Yield the package's modules that one imports."""
    for node in _import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {_module_name(path): path for path in SOURCES}
    imports = {name: set(_imported_modules(path, modules)) & modules.keys() for name, path in modules.items()}
    assert sum(map(len, imports.values())) > len(modules)
    # What imports none of those that are left cannot be part of a circle.
    left = dict(imports)
    while done := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in done:
            del left[name]
    assert not left, {name: sorted(targets & left.keys()) for name, targets in left.items()}


# Files of analysis → the rooms and the modules beside them that they may not import.
CLOSED = {
    "memory/*.py": {"self_check", "efficiency", "compare", "opened", "placing"},
    "self_check.py": {"memory", "efficiency", "compare", "opened"},
    "efficiency/*.py": {"memory", "compare", "opened"},
}


def test_rooms_of_analysis_keep_apart() -> None:
    for files, closed in CLOSED.items():
        paths = sorted((PACKAGE / "analysis").glob(files))
        assert len(paths) > files.count("*")
        parts = [module.split(".") for path in paths for _, module in _imports(path)]
        assert not closed & {part[2] for part in parts if part[:2] == ["profkit", "analysis"] and part[2:]}, files


def _loaded_by(*commands: list[str]) -> set[str]:
    """Return what a process has loaded that carried out all of these."""
    code = (
        "import sys\nfrom profkit.cli import main\n"
        f"for words in {commands!r}:\n"
        "    try:\n        main(words)\n"
        "    except SystemExit as done:\n        assert not done.code, done.code\n"
        "sys.stderr.write('LOADED ' + ' '.join(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.rpartition("LOADED ")[2].split())


def test_help_loads_nothing_heavy() -> None:
    assert not _loaded_by(["--help"]) & {"pandas", "torch", "numpy", "matplotlib", "sqlite_utils", "rich"}
    assert not _loaded_by(["doctor"]) & {"pandas", "torch", "numpy", "nvtx"}


TRACES = PACKAGE.parent / "traces"


@pytest.mark.parametrize(
    ("command", "also_unwanted"),
    [
        (
            ["kernels", str(TRACES / "small-train.nsys2025.sqlite"), "--range", "forward"],
            {"rich", "platformdirs", "statistics", "importlib.metadata", "numpy.ma"},
        ),
        (
            ["efficiency", str(TRACES / "small-train.nsys2025.sqlite")],
            {
                "numpy.ma",
                "profkit.run.manifest",
                "profkit.run.edits",
                "profkit.run.light_record",
                "profkit.trace.kineto",
            },
        ),
        (
            ["summary", str(TRACES / "small-train.nsys2025.sqlite")],
            {"multiprocessing", "concurrent.futures", "profkit.report.commands.ranks"},
        ),
        (["memory", str(TRACES / "small-train.snapshot.pickle.gz")], set()),
    ],
)
def test_an_analysis_loads_neither_torch_nor_pandas(command: list[str], also_unwanted: set[str]) -> None:
    # sqlite-utils loads pandas wherever that is installed.
    assert not _loaded_by(command) & {"pandas", "torch", "matplotlib", "sqlite_utils", *also_unwanted}


def test_the_help_of_commands_loads_no_torch_and_no_pandas() -> None:
    assert not _loaded_by(*([command, "--help"] for command in _COMMANDS)) & {"pandas", "torch", "matplotlib"}


def test_the_public_names_are_what_they_say() -> None:
    import profkit

    homes = {"open": "open_any", "read_snapshot": "open_snapshot", "read_trace": "open_trace"}
    for name in set(profkit.__all__) - {"__version__"}:
        assert getattr(profkit, name).__name__ == homes.get(name, name)
    assert set(dir(profkit)) == set(profkit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'profile'"):
        _ = profkit.profile  # type: ignore[attr-defined]
