"""A directory of results: what it accepts and refuses, and what its manifest says of each run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from profkit.errors import RunError, UsageError
from recipes.common import store as stores
from recipes.common.store import Store, open_store

MACHINE = {
    "device": "cpu",
    "gpu": None,
    "torch": "2.13.0",
    "cuda": None,
    "float32_matmul_precision": "highest",
    "cuda_matmul_allow_tf32": False,
    "cudnn_allow_tf32": True,
}


def _open(directory: Path, machine: dict[str, object] = MACHINE, *, recipe: str = "r", restart: bool = False) -> Store:
    return open_store(directory, recipe, ["a"], machine, restart=restart)


def test_rows_are_found_again_and_replaced(tmp_path: Path) -> None:
    store = _open(tmp_path)
    store.add({"a": 1, "status": "not run"})
    store.add({"a": 2, "status": "ok", "b": 0.1})
    store.add({"a": 1, "status": "ok"})
    again = _open(tmp_path)
    assert again.rows == [{"a": 1, "status": "ok"}, {"a": 2, "status": "ok", "b": 0.1}]
    assert again.find({"a": 2, "more": 3}) == {"a": 2, "status": "ok", "b": 0.1}
    assert again.find({"a": 3}) is None
    assert [len(json.loads((tmp_path / "manifest.json").read_text())["runs"])] == [2]


def test_another_machines_results_are_not_added_to(tmp_path: Path) -> None:
    _open(tmp_path).add({"a": 1, "status": "ok"})
    with pytest.raises(UsageError, match=r"results with torch 2\.13\.0, here it is 2\.14\.0; .*--restart"):
        _open(tmp_path, {**MACHINE, "torch": "2.14.0"})
    with pytest.raises(UsageError, match="holds results of r;"):
        _open(tmp_path, recipe="s")
    assert _open(tmp_path, {**MACHINE, "torch": "2.14.0"}, restart=True).rows == []


@pytest.mark.parametrize("content", ["[]", "{", "{}"])
def test_a_manifest_of_another_program_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RunError, match=r"manifest\.json: not written by a recipe"):
        _open(tmp_path)


@pytest.mark.parametrize("content", ['{"a": 1, "stat', "1", '{"status": "ok"}', '{"a": 1}'])
def test_a_row_of_another_program_is_refused(tmp_path: Path, content: str) -> None:
    _open(tmp_path)
    (tmp_path / "cells.jsonl").write_text(content)
    with pytest.raises(RunError, match=r"cells\.jsonl: not written by a recipe"):
        _open(tmp_path)


def _manifest(tmp_path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((tmp_path / "manifest.json").read_text())
    return manifest


def _run(tmp_path: Path) -> dict[str, object]:
    run: dict[str, object] = _manifest(tmp_path)["runs"][-1]
    return run


def _revisions(tmp_path: Path) -> list[object]:
    manifest = _manifest(tmp_path)
    assert "git_revision" not in manifest
    return [run["git_revision"] for run in manifest["runs"]]


def test_each_run_keeps_its_own_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for revision in ("aaa", "bbb+", None):
        monkeypatch.setattr(stores, "git_revision", lambda revision=revision: revision)
        _open(tmp_path).finish("complete")
    assert _revisions(tmp_path) == ["aaa", "bbb+", None]
    monkeypatch.setattr(stores, "git_revision", lambda: "ccc")
    _open(tmp_path, restart=True)
    assert _revisions(tmp_path) == ["ccc"]


def test_a_run_notes_cpus_load_and_visible_gpus_without_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([(45.126, 44.0, 40.0), (3.5, 20.0, 30.0)])
    monkeypatch.setattr(os, "getloadavg", lambda: next(loads))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5, 7}, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-0a1b2c3d-aa11-bb22,MIG-GPU-0a1b-2c/3/4")
    _open(tmp_path).finish("complete")
    run = _run(tmp_path)
    assert (run["cpus"], run["load_average_at_start"]) == (3, [45.13, 44.0, 40.0])
    assert run["load_average_at_end"] == [3.5, 20.0, 30.0]
    assert run["cuda_visible_devices"] == "2,GPU-…,MIG-GPU-…/3/4"


def test_an_unknown_load_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _open(tmp_path)
    assert _run(tmp_path)["load_average_at_start"] is None
    assert "cuda_visible_devices" not in _run(tmp_path)
