"""Compiled programs with and without profkit: the same code, caches, losses, graphs; every launch has its module.

Real ones, by Inductor's C++ kernels. The cache of the second program has the first one's kernels, which take seconds to
compile, and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from profkit.names import LaunchPlace, read_launch_range
from profkit.run.compiled_code import CompiledGraph, read_compiled_code
from tests.forked_scripts import Forks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
COMPILED = ("whole", "twin", "in place", "blocks", "function", "given", "nested", "breaks", "checkpointed", "dynamic")


class Programs(NamedTuple):
    plain: dict[str, Any]
    hooked: dict[str, Any]
    warm: dict[str, Any]
    graphs: tuple[CompiledGraph, ...]
    caches: tuple[Path, Path]


def _run(forks: Forks, cache: Path, *arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "generated_workloads.py"), *map(str, arguments)]
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(cache)}), TemporaryDirectory() as place:
        done = forks.check(command, Path(place))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Programs:
    folder = tmp_path_factory.mktemp("generated")
    first, second = folder / "plain", folder / "hooked"
    plain = _run(forks, first)
    shutil.copytree(first, second, ignore=shutil.ignore_patterns("*.py", "fxgraph", "aotautograd"))
    hooked = _run(forks, second, "hooked", folder / "compiled.jsonl")
    warm = _run(forks, second, "whole", "twin", "hooked", folder / "warm.jsonl")
    return Programs(plain, hooked, warm, read_compiled_code(folder / "compiled.jsonl").graphs, (first, second))


def test_code_from_a_cache_that_was_filled_without_profkit_has_lines_and_a_reason(
    programs: Programs, forks: Forks, tmp_path: Path
) -> None:
    assert programs.hooked["failure"] is programs.warm["failure"] is None
    shutil.copytree(programs.caches[0], tmp_path / "cache")
    found = _run(forks, tmp_path / "cache", "in place", "hooked", tmp_path / "compiled.jsonl")
    assert found["failure"].startswith("2 of 2 compiled graphs came from Inductor's cache, which was filled without")
    assert found["in place"]["losses"] == programs.plain["in place"]["losses"]
    launches = [launch for graph in read_compiled_code(tmp_path / "compiled.jsonl").graphs for launch in graph.launches]
    assert launches
    assert not any(launch.modules for launch in launches)
    assert all(line.startswith("generated_workloads.py:") for launch in launches for line in launch.lines)
    assert sum(map(bool, (launch.lines for launch in launches))) > len(launches) / 2


def _places(case: dict[str, Any]) -> list[LaunchPlace]:
    found = (read_launch_range(stack[-1]) for stack in case["ranges"])
    return [place for place in found if place is not None]


def test_a_cache_that_was_moved_keeps_its_modules(programs: Programs, forks: Forks, tmp_path: Path) -> None:
    shutil.copytree(programs.caches[1], tmp_path / "cache")
    found = _run(forks, tmp_path / "cache", "in place", "hooked", tmp_path / "compiled.jsonl")
    assert found["failure"] is None
    assert _places(found["in place"]) == _places(programs.hooked["in place"])


@pytest.mark.parametrize("case", ["eager", *COMPILED])
def test_a_watched_program_computes_and_compiles_the_same(programs: Programs, case: str) -> None:
    for what in ("losses", "dynamo"):
        assert programs.hooked[case][what] == programs.plain[case][what]


def test_generated_files_and_cache_keys_are_the_same(programs: Programs) -> None:
    def content(cache: Path) -> dict[str, bytes]:
        return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("c*.py")}

    def keys(cache: Path) -> set[str]:
        return {str(path.relative_to(cache).parent) for path in (cache / "fxgraph").rglob("*") if path.is_file()}

    plain, hooked = map(content, programs.caches)
    assert len(plain) > len(COMPILED)
    assert hooked == plain
    assert keys(programs.caches[0]) == keys(programs.caches[1]) != set()


def _modules(case: dict[str, Any]) -> set[tuple[str, ...]]:
    """Return the paths of modules of an eager program, whatever phase they are in."""
    stacks = (stack[stack.index("model") :] for stack in case["ranges"] if "model" in stack)
    return {tuple(stack) for stack in stacks}


@pytest.mark.parametrize("case", COMPILED)
def test_launches_stand_where_the_eager_program_would_make_them(programs: Programs, case: str) -> None:
    eager = _modules(programs.hooked["eager"])
    as_twin = {"layers": "h", "out": "head"}
    found = set()
    for place in _places(programs.hooked[case]):
        path = tuple(name if name == "model" else _renamed(name, as_twin) for name in place.path)
        if path in ((), ("optimizer",)):
            continue
        assert path in eager, place
        assert all(
            (*path, _renamed(name, as_twin)) in eager or _renamed(name, as_twin) in path for name in place.shared
        )
        found.add(path)
    leaves = {path for path in eager if len(path) == 3}
    assert leaves <= found, "each linear layer launches something"


def _renamed(name: str, names: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return names.get(first, first) + dot + rest


@pytest.mark.parametrize("case", COMPILED)
def test_launches_lie_in_the_phase_that_their_code_is_of_and_hardly_one_has_no_module(
    programs: Programs, case: str
) -> None:
    places = _places(programs.hooked[case])
    without = [place for place in places if not place.path]
    # The gradient of what the function itself does after the model.
    assert len(without) <= (1 if case == "function" else 0)
    assert len(places) >= 17
    is_backward = {graph.id: graph.is_backward for graph in programs.graphs}
    for stack in programs.hooked[case]["ranges"]:
        place = read_launch_range(stack[-1])
        if place is not None and place.path != ("optimizer",):
            assert ("backward" if is_backward[place.graph] else "forward") in stack, stack


def test_a_compiled_optimizer_is_its_launches_module_and_a_warm_cache_tells_the_same(programs: Programs) -> None:
    assert [place.path for place in _places(programs.hooked["whole"])].count(("optimizer",)) == 1
    for case in ("whole", "twin"):
        assert _places(programs.warm[case]) == _places(programs.hooked[case])
        assert programs.warm[case]["losses"] == programs.plain[case]["losses"]


def test_what_is_written_of_a_launch_is_its_module_line_and_operators(programs: Programs) -> None:
    for graph in programs.graphs:
        assert graph.launches
        if graph.name.startswith("Model.forward"):
            externs = [launch for launch in graph.launches if launch.is_extern]
            assert all(len(launch.modules) == 1 for launch in externs)
            assert all("generated_workloads.py:" in line for launch in graph.launches for line in launch.lines)
            assert all(launch.lines and launch.operators for launch in graph.launches)
    products = {launch.operators for graph in programs.graphs for launch in graph.launches if launch.is_extern}
    assert {("aten.mm",), ("aten.addmm",)} <= products
