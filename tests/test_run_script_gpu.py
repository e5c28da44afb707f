"""On a GPU: ``profkit run --memory -- COMMAND`` on scripts that know nothing of profkit, by real processes.

``pytest -m gpu tests/test_run_script_gpu.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from profkit import read_snapshot
from profkit.analysis.memory.opened_snapshot import MemoryResult, OpenedSnapshot
from profkit.analysis.memory.places import NO_MODULE_KNOWN
from tests.in_process import manifest_of

pytestmark = pytest.mark.gpu


TRAIN = """
import sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy

how = sys.argv[1:]
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(1024, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1024)

    def forward(self, x):
        y = self.down(self.relu(self.up(x)))
        y += x
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1024, 1024)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(1024, 1000)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model().cuda()
if "compiled" in how:
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for number in range(6):
    rows = 2048
    if number == 2 and "exhaust" in how:
        hog = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 26), dtype=torch.uint8, device="cuda")
        model(torch.randn(1 << 17, 1024, device="cuda"))
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled="autocast" in how):
        logits = model(torch.randn(rows, 1024, device="cuda"))
        loss = cross_entropy(logits, torch.randint(1000, (rows,), device="cuda"))
    loss.backward()
    optimizer.step()
    print(number, loss.item().hex(), flush=True)
    if number == 5:
        print("requested", torch.cuda.memory_stats()["requested_bytes.all.peak"], flush=True)
        with open("peaks", "w") as file:
            # Another process may differ in these: which of two free blocks is taken goes by the driver's addresses.
            file.write(f"{torch.cuda.max_memory_allocated()} {torch.cuda.max_memory_reserved()}")
"""

DDP = """
import os
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(inplace=True), nn.Linear(8192, 2048)).cuda()
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for number in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(512 * (1 + rank), 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    if number == 3:
        torch.cuda.synchronize()
        with open(f"peak{rank}", "w") as file:
            file.write(str(torch.cuda.max_memory_allocated()))
    if rank == 0:
        print(number, loss.item().hex(), flush=True)
distributed.destroy_process_group()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ddp.py").write_text(DDP)
    return tmp_path


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(place: Path) -> Run:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, check=False, cwd=place, env=environment
        )
        (place / "stderr.txt").write_text(done.stderr)
        (place / "stdout.txt").write_text(done.stdout)
        return done

    return call


def _profkit(*options: str) -> tuple[str, ...]:
    """Four steps: one before the measured ones, three of them; the script makes six."""
    return ("-P", "-m", "profkit", "run", "-o", "run", "--warmup", "1", "--steps", "3", *options, "--", sys.executable)


def _open(place: Path, rank: int | None = None) -> tuple[OpenedSnapshot, MemoryResult]:
    opened = read_snapshot(place / "run", rank=rank)
    return opened, opened.memory()


def _assert_exact(result: MemoryResult) -> None:
    assert result.totals.exact, result.warnings
    assert result.history.complete, "recorded from the very first allocation"
    assert result.allocator_check is not None
    assert result.allocator_check.agrees, result.allocator_check
    assert result.allocator_check.unmatched_entries == 0, "every owner that was written down was found"
    at, peak = result.composition, result.totals.allocated_peak_bytes
    assert sum(row.bytes for row in at.by_category) == sum(row.bytes for row in at.by_phase) == peak
    assert sum(row.own_bytes for row in at.by_module) == peak


def _assert_modules_are_known(result: MemoryResult) -> None:
    unknown = sum(row.bytes for row in result.composition.by_module if row.name == NO_MODULE_KNOWN)
    peak = result.totals.allocated_peak_bytes
    assert unknown < 0.05 * peak, "everything else has a module, or is outside them all"


@pytest.mark.parametrize("how", ["plain", "autocast", "compiled"])
def test_memory_only_is_exact_and_changes_no_loss(place: Path, run: Run, how: str) -> None:
    if how == "compiled":
        # The first run compiles and the later ones load from Inductor's cache: only those are held against each other.
        run("train.py", how)
    plain = run("train.py", how)
    assert plain.returncode == 0, plain.stderr
    done = run(*_profkit("--memory-only"), "train.py", how)
    assert done.returncode == 0, done.stderr
    assert done.stdout[: len(plain.stdout)] == plain.stdout, "losses to the bit, requested bytes to the byte"
    _, requested = next(line for line in plain.stdout.splitlines() if line.startswith("requested")).split()
    opened, result = _open(place)
    _assert_exact(result)
    _assert_modules_are_known(result)
    totals = result.totals
    assert totals.requested_peak_bytes == int(requested)
    own = tuple(map(int, (place / "peaks").read_text().split()))
    assert (totals.allocated_peak_bytes, totals.reserved_peak_bytes) == own
    assert {phase.name for phase in result.phases} >= {"forward", "backward", "optimizer"}
    assert [step.name for step in opened.device().timeline.steps] == ["step 0", "step 1", "step 2", "step 3"]
    # Activations are known while backward has not begun; each gradient is once its backward has ended.
    for moment, categories in (("forward", ("parameters", "activations")), ("optimizer", ("gradients",))):
        composition = opened.memory(at=f"phase:{moment}").composition
        by_category = {row.category: row for row in composition.by_category}
        for category in (*categories, "optimizer state"):
            assert by_category[category].evidence.get("identity", 0) > 0.9 * by_category[category].bytes, category
    assert result.composition.evidence["none"] < 0.05 * result.totals.allocated_peak_bytes


@pytest.mark.parametrize("recorder", ["--kineto", "--nsys"])
def test_memory_and_a_trace_are_two_passes(place: Path, run: Run, recorder: str) -> None:
    plain = run("train.py", "plain")
    # Two steps before the measured ones: the first is never timed.
    done = run(*_profkit("--memory", recorder, "--warmup", "2"), "train.py", "plain")
    if recorder == "--nsys" and "there is no Nsight Systems here" in done.stderr:
        pytest.skip("no nsys")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(plain.stdout + plain.stdout), "twice, to its end, with the same losses"
    assert "the command runs twice" in done.stderr
    _assert_exact(_open(place)[1])
    kernels = run("-m", "profkit", "kernels", "run", "--range", "backward", "--format", "json")
    assert json.loads(kernels.stdout)["measure"] == "gpu-kernel"


def test_out_of_memory_in_the_third_step(place: Path, run: Run) -> None:
    done = run(*_profkit("--memory"), "train.py", "exhaust")
    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stderr
    assert "what was recorded up to then is kept" in done.stderr
    manifest = manifest_of(place / "run")
    assert (manifest["status"], manifest["exit_status"]) == ("failed", 1)
    assert not list((place / "run").glob("trace*")), "the second pass was not made"
    _, result = _open(place)
    _assert_exact(result)
    assert result.oom is not None
    assert result.oom.count >= 1
    assert result.oom.cause in {"capacity", "outsized", "fragmentation", "outside"}
    told = run("-m", "profkit", "memory", "run")
    assert told.returncode == 0
    assert "Out of memory" in told.stdout


def test_two_ranks_have_a_snapshot_each_and_a_gpu_each(place: Path, run: Run) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "ddp.py")
    plain = run(*launcher)
    assert plain.returncode == 0, plain.stderr
    target = ("-m", "profkit", "run", "-o", "run", "--warmup", "1", "--steps", "2", "--memory-only")
    done = run("-P", *target, "--", sys.executable, *launcher)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "0x" in line][:4] == plain.stdout.splitlines()
    peaks = [int((place / f"peak{rank}").read_text()) for rank in range(2)]
    for rank in range(2):
        opened, result = _open(place, rank)
        _assert_exact(result)
        assert list(opened.devices) == [rank], "no rank left anything on the other's GPU"
        assert result.totals.allocated_peak_bytes == peaks[rank]
    assert _open(place)[1].totals.allocated_peak_bytes == max(peaks)
