"""A script that fails: its own error is the last line but one, and profkit's line says what was kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.forked_scripts import Forks
from tests.in_process import manifest_of

TRAIN = """
import os
import signal
import sys
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
how, fails_at = sys.argv[1], int(sys.argv[2])
for number in range(9):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    if number == fails_at:
        if how == "raise":
            raise ValueError("the data are bad")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit("no more data" if how == "message" else 7)
    optimizer.step()
"""

NOTHING = "nothing was recorded; see run/manifest.json"
RANGES = "steps were recorded and are kept: profkit ranges run"


@pytest.mark.parametrize(
    ("how", "fails_at", "error", "status", "kept"),
    [
        ("raise", 1, ["ValueError: the data are bad"], "1", NOTHING),
        ("raise", 4, ["ValueError: the data are bad"], "1", f"2 of 3 {RANGES}"),
        ("raise", 7, ["ValueError: the data are bad"], "1", f"3 of 3 {RANGES}"),
        ("message", 4, ["no more data"], "1", f"2 of 3 {RANGES}"),
        ("status", 7, [], "7", f"3 of 3 {RANGES}"),
        # torch.profiler keeps its events in the process until it stops.
        ("kill", 4, [], "137 (killed: perhaps the memory was full)", NOTHING),
        ("kill", 7, [], "137 (killed: perhaps the memory was full)", f"3 of 3 {RANGES}"),
    ],
)
def test_the_scripts_own_error_is_the_last_line_but_one(
    forks: Forks, tmp_path: Path, how: str, fails_at: int, error: list[str], status: str, kept: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = [sys.executable, "train.py", how, str(fails_at)]
    done = forks.run_profkit("run", "-o", "run", "--warmup", "2", "--steps", "3", "--", *words, cwd=tmp_path)
    assert done.returncode == int(status.split(maxsplit=1)[0])
    *above, own, last = ["", "", *done.stderr.splitlines()]
    assert last == f"profkit: {sys.executable} failed with exit status {status}; {kept}"
    assert [own] == (error or [""])
    assert all(not line.startswith("profkit") for line in above)
    assert done.stdout == "", "profkit's line is the last one"
    manifest = manifest_of(tmp_path / "run")
    assert manifest["status"] == "failed"
    assert (tmp_path / "run" / "trace.json.gz").exists() == (kept != NOTHING)
    if how == "raise":
        assert manifest["reason"] == error[0]
