"""What limits a step, as `profkit efficiency` and `profkit summary` print it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profkit import read_trace
from profkit.report.document import FORMATS
from tests.efficiency_runs import SMALL
from tests.in_process import run_command

KINETO = SMALL.with_name("small-train.kineto.json.gz")


@pytest.mark.parametrize("path", [SMALL, KINETO], ids=lambda path: path.name)
def test_shares_add_up_to_the_replayed_step(path: Path) -> None:
    limits = json.loads(run_command("efficiency", path, "--format", "json").stdout)["step_limits"]
    assert limits["refusal"] is None
    assert sum(limits["limited_by"].values()) == limits["step_ns"]
    assert sum(sum(causes.values()) for causes in limits["by_phase"].values()) == limits["step_ns"]
    assert set(limits["by_phase"]) >= {"forward", "backward", "optimizer"}
    assert abs(limits["replay"]["error"]) <= 0.005
    summary = json.loads(run_command("summary", path, "--format", "json").stdout)
    assert summary["step_limits"] == limits


def test_the_sentence_stands_in_efficiency_and_in_summary_with_its_proof_once() -> None:
    limits = read_trace(SMALL).step_replay.limits()
    share = limits.limited_by["python"] / limits.step_ns
    sentence = f"Python between CUDA calls {share:.1%}, CUDA calls"
    text = " ".join(run_command("efficiency", SMALL).stdout.split())
    assert f"The step is limited by {sentence}" in text
    assert "Step replay: 107.8 ms replayed for 107.8 ms recorded" in text
    assert sentence in " ".join(run_command("summary", SMALL).stdout.split())


@pytest.mark.parametrize("style", FORMATS)
def test_every_format_holds_it(style: str) -> None:
    done = run_command("efficiency", SMALL, "--format", style)
    assert done.returncode == 0
    assert ("optimizer kernels" in done.stdout) == (style not in ("csv", "json"))


def test_of_several_ranks_one_is_taken(captures: Path) -> None:
    path = captures / "ddp.nsys2025.sqlite"
    assert "several processes were recorded" in run_command("efficiency", path).stdout.replace("\n  ", " ")
    for rank in ("0", "1"):
        limits = json.loads(run_command("efficiency", path, "--rank", rank, "--format", "json").stdout)["step_limits"]
        assert limits["refusal"] is None
        assert sum(limits["limited_by"].values()) == limits["step_ns"] > 0


def test_a_capture_without_steps_or_with_losses_says_why_nothing_is_known(captures: Path) -> None:
    for name, why in (("hooks.nsys2025.sqlite", "holds no recorded step"), ("lossy.nsys2023.sqlite", "self-check")):
        limits = json.loads(run_command("efficiency", captures / name, "--format", "json").stdout)["step_limits"]
        assert why in limits["refusal"]
        assert (limits["step_ns"], limits["limited_by"]) == (0, {})
