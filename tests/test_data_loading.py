"""Waiting for data: the range around every batch of a DataLoader, and its time without a profiler."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402
from torch.utils.data import dataloader as torchs  # noqa: E402

from profkit.capture.steps import times  # noqa: E402
from profkit.capture.steps.data_loading import DataLoading  # noqa: E402
from profkit.capture.steps.times import PhaseClock  # noqa: E402
from tests.forked_scripts import Forks  # noqa: E402
from tests.in_process import manifest_of, run_command  # noqa: E402

ROOT = Path(__file__).parent.parent

SLOW = """
import sys
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __init__(self, features):
        self.features = features

    def __len__(self):
        return 12

    @torch.no_grad()
    def __getitem__(self, index):
        time.sleep(0.002)
        return self.features(torch.full((8,), float(index))), torch.ones(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    workers = int(sys.argv[1])
    features = nn.Linear(8, 8) if workers else nn.Identity().forward  # calls of modules may be steps
    loader = DataLoader(Slow(features), batch_size=2, num_workers=workers, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
    for epoch in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            print(loss.item().hex(), flush=True)
"""


class Three(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise ValueError("a bad sample")
        return index


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(2))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a watcher of this process's data loaders is called for; torch is as before afterwards."""
    found: list[str] = []
    for owner, name in ((torchs.DataLoader, "__iter__"), (torchs._BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    DataLoading(lambda: found.append("begins"), lambda: found.append("ends")).install()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_every_batch_and_the_end_of_the_epoch_are_waited_for(events: list[str], workers: int) -> None:
    assert [int(one) for one in DataLoader(Endless(), batch_size=None, num_workers=workers)] == [0, 1]
    assert events == ["begins", "ends"] * 4, "the iterator, two batches, and that there are no more"


def test_an_error_of_the_dataset_reaches_the_script_and_ends_the_wait(events: list[str]) -> None:
    loader = iter(DataLoader(Three(), batch_size=2))
    assert next(loader).tolist() == [0, 1]
    with pytest.raises(ValueError, match="a bad sample"):
        next(loader)
    assert events == ["begins", "ends"] * 3


def test_waiting_for_data_is_timed_by_the_host_also_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1_000, 5))
    monkeypatch.setattr(times, "perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    clock = PhaseClock()
    clock.start()
    for _ in range(2):
        clock.begin("data")
        clock.end()
    assert times.sum_times(clock.take()) == {"data_ns": 10}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_recorded_step_begins_with_its_wait_for_data(forks: Forks, tmp_path: Path, workers: str) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    words = ("--warmup", "3", "--steps", "4", "--", sys.executable, "train.py", workers)
    done = forks.run_profkit("run", "-o", "run", *words, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    spans = {name: _spans(events, name) for name in ("data", "step 3", "step 4", "forward")}
    for name in ("step 3", "step 4"):
        ((begins, ends),) = spans[name]
        inside = [span for span in spans["data"] if begins <= span[0] and span[1] <= ends]
        forward = next(span for span in spans["forward"] if begins <= span[0] <= ends)
        assert len(inside) == 1, name
        assert inside[0][1] <= forward[0]
    manifest = manifest_of(tmp_path / "run")
    assert len(manifest["processes"]) == 1, "a worker trains nothing"
    for part in ("attached", "profiled"):
        for step in manifest[part]["steps"]:
            assert next(iter(step)) == "data_ns"
            assert 0 < step["data_ns"] < step["step_ns"]
    table = run_command("kernels", tmp_path / "run").stdout.partition("time of")[2].splitlines()
    assert [line.split()[0] for line in table[2:7]] == ["data", "forward", "loss", "backward", "optimizer"]


def _spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    mine = [one for one in events if one.get("cat") == "user_annotation" and one["name"] == name]
    return sorted((one["ts"], one["ts"] + one["dur"]) for one in mine)
