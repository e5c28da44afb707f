"""The file of a run that says where its compiled code comes from, and the ranges that lead there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import time
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from profkit import read_trace
from profkit.errors import RunError
from profkit.launch.passes import why_not_twice
from profkit.launch.record import own_compiler_cache
from profkit.names import LaunchPlace, graph_range, launch_range, read_graph_range, read_launch_range
from profkit.run import compiled_code
from profkit.run.compiled_code import (
    KNOWN_CODE,
    CapturedGraph,
    CompiledCode,
    CompiledGraph,
    Launch,
    NodeRun,
    append_records,
    read_compiled_code,
)
from profkit.run.manifest import read_manifest
from tests.in_process import check_command, run_command
from tests.run_builder import start_run
from tests.training_scripts import training

LAUNCH = Launch(123, "triton_poi_fused_gelu_3", False, ("h.0.mlp",), ("model.py:87 forward",), ("aten.gelu",), 7)
GRAPH = CompiledGraph("3f9a1c22e0", "cxyz", "2.11.0", "Model.forward model.py:20", False, (LAUNCH,))


def test_graphs_are_read_as_they_were_written_each_once(tmp_path: Path) -> None:
    path = tmp_path / "compiled.jsonl"
    assert read_compiled_code(path).graphs == ()
    append_records(path, [GRAPH])
    append_records(path, [GRAPH])
    assert read_compiled_code(path).graphs == (GRAPH,)


def test_a_last_line_that_was_cut_off_is_left_out_and_another_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "compiled.jsonl"
    append_records(path, [GRAPH])
    whole = path.read_text()
    path.write_text(whole + '{"kind": "of another version"}\n' + whole[:40])
    assert read_compiled_code(path).graphs == (GRAPH,)
    path.write_text(whole[:40] + "\n" + whole)
    with pytest.raises(RunError, match=r"compiled\.jsonl:1: not a line about compiled code"):
        read_compiled_code(path)


@pytest.mark.parametrize(
    "place",
    [
        LaunchPlace("3f9a1c22e0", 12),
        LaunchPlace("3f9a1c22e0", 12, ("model",)),
        LaunchPlace("3f9a1c22e0", 12, ("model", "h.0", "h.0.mlp")),
        LaunchPlace("3f9a1c22e0", 12, ("model", "h.0"), ("h.0.ln_2", "h.0.mlp")),
        LaunchPlace("3f9a1c22e0", 12, (), ("h.0", "h.1")),
        LaunchPlace("3f9a1c22e0", 12, ("model", "a / b", "/", "x/y", "50%2F", "größe")),
        LaunchPlace("3f9a1c22e0", 12, ("model", "shared: q"), ("p + q", "+", "shared: q")),
        LaunchPlace("3f9a1c22e0", 12, ("model", "shared: q")),
    ],
)
def test_the_name_of_a_launchs_range_says_its_place(place: LaunchPlace) -> None:
    assert read_launch_range(launch_range(place)) == place
    assert launch_range(place).isascii()


@pytest.mark.parametrize(
    "name", ["compiled", "compiled code", "compiled 1:2", "compiled 3f9a1c22e0:b", "compiled :1", "step 3", ""]
)
def test_other_ranges_are_no_launches(name: str) -> None:
    assert read_launch_range(name) is None


def test_captured_graphs_stand_in_the_same_file_and_equal_ones_have_one_id(tmp_path: Path) -> None:
    path = tmp_path / "compiled.jsonl"
    runs = (NodeRun(2, "kernel", ("forward", "model")), NodeRun(1, "fill"))
    one, other = CapturedGraph.of(runs), CapturedGraph.of(runs[:1])
    append_records(path, [one, GRAPH, other, CapturedGraph.of(runs)])
    assert read_compiled_code(path).captured == (one, other)
    assert read_compiled_code(path).graphs == (GRAPH,)
    assert one.id != other.id


def test_a_graph_of_impossible_size_is_refused() -> None:
    for run in (NodeRun(-1, "kernel"), NodeRun(2**40, "kernel"), NodeRun(1, "kernel", ("x",) * 2**23)):
        with pytest.raises(ValueError, match="a CUDA graph"):
            CapturedGraph("0123456789", (run,))


def test_the_range_around_a_replay_leads_to_the_graph_that_was_captured() -> None:
    graph = CapturedGraph.of([NodeRun(2, "kernel")], is_chain=True)
    assert read_graph_range(graph_range(graph.id)) == graph.id
    assert graph.id != CapturedGraph.of([NodeRun(2, "kernel")]).id
    assert read_graph_range("CUDA graph 12") is None
    assert read_graph_range("step 3") is None


@pytest.mark.parametrize("command", ["summary", "report"])
def test_a_command_reads_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    folder = start_run(tmp_path / "run")
    trace = Path(__file__).parent.parent / "traces" / "tiny-train-cpu.kineto.json.gz"
    (folder / "trace.json.gz").write_bytes(trace.read_bytes())
    append_records(folder / "compiled.jsonl", [GRAPH])
    read: list[Path] = []

    def counted(path: Path) -> CompiledCode:
        read.append(path)
        return read_compiled_code(path)

    monkeypatch.setattr(compiled_code, "read_compiled_code", counted)
    check_command(command, folder, "-o", tmp_path / "out.html")
    assert read == [folder / "compiled.jsonl"]


# -- code that a run without profkit left in a cache -----------------------------------------------------------------


if TYPE_CHECKING:
    from tests.forked_scripts import Forks

MODEL = "nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))"
SCRIPT = training(6, model=f"torch.compile({MODEL})", batch="torch.ones(2, 8)")


def test_a_cache_that_a_person_chose_is_used() -> None:
    assert own_compiler_cache({"TORCHINDUCTOR_CACHE_DIR": "mine"}) == {}


def test_without_a_place_for_it_there_is_no_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert own_compiler_cache({}) == {}


@pytest.mark.parametrize("folder", ["cache", "torchinductor_me"])
def test_the_programs_own_compiler_cache_is_no_file_that_it_wrote(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    since = tmp_path / "run" / "manifest.json"
    since.write_text("")
    os.utime(since, (1, 1))
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "code.py").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "cache")
    assert why_not_twice(["python"], since, tmp_path / "run") is None


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("most_bytes", "age_s", "is_kept"), [(15, 90_000, False), (16, 90_000, True), (15, 80_000, True)]
)
def test_profkits_own_cache_is_begun_anew_once_it_is_too_large_and_was_not_used_for_a_day(
    most_bytes: int, age_s: int, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profkit.launch.record._MOST_CACHED_BYTES", most_bytes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = tmp_path / "profkit" / KNOWN_CODE / "inductor"
    files = [own / "ab" / name for name in ("kernel.so", "code.py")]
    files[0].parent.mkdir(parents=True)
    for number, path in enumerate(files):
        path.write_bytes(b"8 bytes.")
        os.utime(path, (time() - age_s - 1_000 * number,) * 2)
    assert own_compiler_cache({}) == {"TORCHINDUCTOR_CACHE_DIR": str(own)}
    assert [path.exists() for path in files] == [is_kept] * 2
    assert own.is_dir()


@pytest.mark.slow
def test_a_program_whose_code_is_in_the_users_cache_gets_its_modules(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    users, command = tmp_path / "users", (sys.executable, "train.py")
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(users)}):
        forks.check(command, tmp_path)
    before = _content(users)
    words = ("run", "--kineto", "--warmup", "2", "--steps", "2", "-o")
    forks.check_profkit(*words, "own", "--", *command, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "home"))
    assert (tmp_path / "home" / "profkit" / KNOWN_CODE / "inductor").is_dir()
    assert _content(users) == before
    shown = run_command("ranges", tmp_path / "own")
    assert "not all kernels of compiled code" not in shown.stderr
    paths = [row.path for row in read_trace(tmp_path / "own").ranges().ranges]
    for phase in ("forward", "backward"):
        assert any(f"{phase}/model/" in path for path in paths), paths
    chosen = {"TORCHINDUCTOR_CACHE_DIR": str(users), "XDG_CACHE_HOME": str(tmp_path / "other home")}
    forks.check_profkit(*words, "chosen", "--", *command, cwd=tmp_path, **chosen)
    (process,) = read_manifest(tmp_path / "chosen" / "manifest.json").processes
    assert process.compiled_failure is not None
    assert "2 of 2 compiled graphs came from Inductor's cache" in process.compiled_failure
