"""On a GPU: what limits a loop that waits for its data, and one that does not, under both recorders.

``pytest -m gpu tests/test_data_loading_gpu.py``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from profkit import read_trace
from profkit.report.commands.steps import limit_words
from profkit.run.directory import Run
from tests.efficiency_runs import rows_by_path
from tests.in_process import check_profkit

pytestmark = pytest.mark.gpu


TRAIN = """
import sys
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

workers, seconds = int(sys.argv[1]), float(sys.argv[2])


class Images(Dataset):
    def __len__(self):
        return 6400

    def __getitem__(self, index):
        time.sleep(seconds / 64)
        return torch.ones(1024), torch.ones(1024)


model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number, (x, y) in enumerate(DataLoader(Images(), batch_size=64, num_workers=workers, pin_memory=True)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
    optimizer.step()
    if number == 60:
        break
"""

RECORDERS = [
    pytest.param("--nsys", marks=pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not here")),
    "--kineto",
]


def _record(place: Path, recorder: str, *arguments: str) -> Path:
    (place / "train.py").write_text(TRAIN)
    words = ("--", sys.executable, "train.py", *arguments)
    check_profkit("run", "-o", "run", recorder, "--steps", "8", *words, cwd=place)
    return place / "run"


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("workers", [0, 2, 8])
def test_a_loop_that_waits_for_data_is_limited_by_it(tmp_path: Path, recorder: str, workers: int) -> None:
    """The loader makes a batch in 48 ms whatever its workers, of which eight deliver in bursts."""
    run = _record(tmp_path, recorder, str(workers), str(0.048 * max(workers, 1)))
    result = read_trace(run).efficiency()
    assert len(result.steps) == 8
    assert limit_words(rows_by_path(result)["step *"]) == "data loading"
    assert sum(step.data_wait_ns for step in result.steps) > sum(step.wall_ns for step in result.steps) / 2
    loading = Run(run).manifest.loading
    assert (loading is None) == (workers == 0)
    assert loading is None or loading.drained_steps == loading.needed_steps <= 2 * workers


@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_loop_whose_data_are_ready_leaves_nothing_out(tmp_path: Path, recorder: str) -> None:
    run = _record(tmp_path, recorder, "4", "0")
    loading = Run(run).manifest.loading
    assert loading is not None
    assert loading.drained_steps == 0
    assert limit_words(rows_by_path(read_trace(run).efficiency())["step *"]) != "data loading"
