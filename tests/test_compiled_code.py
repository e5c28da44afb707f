"""The file of a run that says where its compiled code comes from, and the ranges that lead there."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit.errors import RunError
from profkit.names import LaunchPlace, graph_range, launch_range, read_graph_range, read_launch_range
from profkit.run import compiled_code
from profkit.run.compiled_code import (
    CapturedGraph,
    CompiledCode,
    CompiledGraph,
    Launch,
    NodeRun,
    append_records,
    read_compiled_code,
)
from profkit.run.manifest import Manifest, write_manifest
from tests.in_process import run_command

LAUNCH = Launch(
    123, "triton_poi_fused_gelu_3", False, ("h.0.mlp",), ("model.py:87 forward",), ("aten.gelu",), (118,), 7
)
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
    folder = tmp_path / "run"
    folder.mkdir()
    trace = Path(__file__).parent.parent / "traces" / "small-train.kineto.json.gz"
    (folder / "trace.json.gz").write_bytes(trace.read_bytes())
    write_manifest(folder / "manifest.json", Manifest(status="complete"))
    append_records(folder / "compiled.jsonl", [GRAPH])
    read: list[Path] = []

    def counted(path: Path) -> CompiledCode:
        read.append(path)
        return read_compiled_code(path)

    monkeypatch.setattr(compiled_code, "read_compiled_code", counted)
    assert run_command(command, folder, "-o", tmp_path / "out.html").returncode == 0
    assert read == [folder / "compiled.jsonl"]
