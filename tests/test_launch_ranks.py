"""Several processes of one target: the command that starts them, and what is left of those that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profkit.errors import UsageError
from profkit.launch.directory import make_run_directory
from profkit.launch.ranks import (
    build_rank_argv,
    explain_failure,
    join_results,
    node_suffix,
    take_failures,
    take_results,
)

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["python", "train.py", "--lr", "1"], ["python", *LAUNCHER, "train.py", "--lr", "1"]),
        (["/usr/bin/python3.12", "-m", "pkg.train", "-m"], ["/usr/bin/python3.12", *LAUNCHER, "-m", "pkg.train", "-m"]),
        (["python", "-O", "-X", "dev", "a.py"], ["python", "-O", "-X", "dev", *LAUNCHER, "a.py"]),
    ],
)
def test_torchs_launcher_starts_scripts_and_modules(words: list[str], argv: list[str]) -> None:
    assert build_rank_argv(words, 2) == argv


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torchrun", "train.py"], "torchrun starts its processes itself"),
        (["/opt/bin/accelerate", "launch", "train.py"], "accelerate starts its processes itself"),
        (["python", "-m", "torch.distributed.run", "train.py"], r"torch\.distributed\.run starts its processes itself"),
        (["bash", "train.sh"], "starts Python scripts and modules"),
        (["python", "-c", "pass"], "starts Python scripts and modules"),
        (["python"], "starts Python scripts and modules"),
    ],
)
def test_what_cannot_be_started_as_ranks_is_refused_in_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        build_rank_argv(words, 2)
    assert str(refused.value).startswith("--nproc-per-node 2: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "suffix"),
    [
        ({}, ""),
        ({"NODE_RANK": "1"}, "-node1"),
        ({"GROUP_RANK": "0", "NNODES": "2"}, "-node0"),
        ({"NODE_RANK": "0", "NNODES": "1"}, ""),
        ({"NODE_RANK": "head"}, ""),
    ],
)
def test_the_runs_of_a_jobs_machines_have_names_of_their_own(environment: dict[str, str], suffix: str) -> None:
    assert node_suffix(environment) == suffix


def test_two_machines_that_share_a_disk_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for node in ("0", "1"):
        monkeypatch.setenv("NODE_RANK", node)
        made.append(make_run_directory(tmp_path / "run", "train"))
        (made[-1] / "manifest.json").touch()
    assert [path.name for path in made] == ["run-node0", "run-node1"]


def test_every_ranks_result_is_kept_and_the_firsts_counts(tmp_path: Path) -> None:
    each = {"local_rank": 0, "pid": 7, "device": "cpu", "gpu": None, "steps": []}
    for name, loss in (("worker.json", 0.5), ("worker.rank1.json", 0.25), ("worker.rank10.json", 0.125)):
        (tmp_path / name).write_text(json.dumps({**each, "losses": [loss]}))
    joined = join_results(take_results(tmp_path / "worker.json"))
    assert joined["losses"] == [0.5]
    assert [(one["process"], one["losses"]) for one in joined["processes"]] == [
        ("rank0", [0.5]),
        ("rank1", [0.25]),
        ("rank10", [0.125]),
    ]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "worker.json").write_text('{"losses": [1.0]}')
    assert "processes" not in join_results(take_results(tmp_path / "worker.json"))


def test_a_failure_names_its_rank_where_there_are_several() -> None:
    assert explain_failure([]) is None
    assert explain_failure([{"rank": 0, "error": "full"}]) == "full"
    assert explain_failure([{"rank": 0, "losses": []}, {"rank": 1, "error": "full"}]) == "rank 1: full"


def test_failures_are_told_once_and_cleared_away(tmp_path: Path) -> None:
    for rank in (10, 2):
        (tmp_path / f"failed-rank{rank}.json").write_text(json.dumps({"rank": rank, "error": f"ValueError: {rank}"}))
    (tmp_path / "partial.meeting-arrived-0").touch()
    assert take_failures(tmp_path) == ["rank 2 failed: ValueError: 2", "rank 10 failed: ValueError: 10"]
    assert list(tmp_path.iterdir()) == []
