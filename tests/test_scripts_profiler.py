"""A script that uses torch.profiler itself keeps every event of it: profkit records outside of it, or says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.forked_scripts import Forks
from tests.in_process import manifest_of

SCRIPT = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile, schedule

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trace(profiler):
    print("EVENTS", len(profiler.events()))


before, within, after = map(int, sys.argv[1:])
if before < 0:
    with profile(schedule=schedule(wait=within, warmup=1, active=2, repeat=1), on_trace_ready=trace) as profiler:
        for _ in range(after):
            step()
            profiler.step()
else:
    for _ in range(before):
        step()
    with profile() as profiler:
        for _ in range(within):
            step()
    trace(profiler)
    for _ in range(after):
        step()
"""


@pytest.mark.parametrize(
    ("steps", "said", "recorded"),
    [
        ((0, 12, 0), "nothing was recorded: the script's own torch.profiler ran in the steps to record", 0),
        ((0, 8, 6), "", 3),
        ((0, 3, 8), "", 3),
        ((7, 4, 3), "the recording is not whole: the script's own torch.profiler ran in the steps to record", 2),
        ((-1, 6, 14), "the recording is not whole: the script's own torch.profiler ran in the steps to record", 1),
    ],
    ids=["in all steps", "until after the warm-up", "within the warm-up", "from a recorded step on", "by a schedule"],
)
def test_a_scripts_own_profiler_keeps_its_events(
    forks: Forks, tmp_path: Path, steps: tuple[int, int, int], said: str, recorded: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), *map(str, steps)]
    plain = forks.run(words, tmp_path)
    done = forks.run_profkit("run", "-o", "run", "--warmup", "5", "--", *words, cwd=tmp_path)
    assert plain.stdout.startswith("EVENTS ")
    assert done.stdout.splitlines()[0] == plain.stdout.strip()
    assert said in done.stderr
    assert ("torch.profiler" in done.stderr) == bool(said)
    assert done.returncode == 0
    assert (tmp_path / "run" / "trace.json.gz").exists() == bool(recorded)
    if recorded:
        assert _recorded_steps(tmp_path) == recorded


def _recorded_steps(place: Path) -> int:
    return len(manifest_of(place / "run")["profiled"]["steps"])


def test_lines_of_the_scripts_own_profiler_are_printed_as_without_profkit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('KINETO_LOG_LEVEL' in os.environ)\n" + SCRIPT)
    words = [sys.executable, "train.py", "9", "1", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    plain, done = (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        for command in (words, [sys.executable, "-m", "profkit", "run", "-o", "run", "--warmup", "5", "--", *words])
    )
    assert done.stdout.startswith("False\n")
    assert _recorded_steps(tmp_path) == 3, "recorded before the script's profiler began"
    printed = [[line for line in one.stderr.splitlines() if ".cpp:" in line] for one in (plain, done)]
    assert len(printed[1]) == len(printed[0])
