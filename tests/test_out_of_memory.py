"""A command that runs out of memory: ``profkit run`` says why, whenever it happens. On a CUDA of paper.

What only a GPU can show is in tests/test_run_script_gpu.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from profkit.capture.errors import is_out_of_memory
from profkit.launch.passes import Outcome, command_passes
from profkit.run.manifest import Process, ProcessMemory
from profkit.run.owners import read_owners
from profkit.run.recording import Failure, MemoryOptions, Order
from tests.forked_scripts import Forks
from tests.in_process import ended, manifest_of, names_in, run_profkit

# The recorded steps are 1 and 2; memory runs out in step 4, when nothing is recorded any more.
TRAIN = """
import sys
import torch
from torch import nn
from tests import paper_cuda

how = sys.argv[1:]
paper_cuda.install()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
torch.cuda.init()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for number in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    if number == 4 and "dies" in how:
        torch.cuda.exhaust()
    if number == 4 and "survives" in how:
        try:
            torch.cuda.exhaust()
        except torch.OutOfMemoryError:
            pass
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    print(number, loss.item().hex(), flush=True)
"""

Recorded = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def recorded(tmp_path: Path, forks: Forks) -> Recorded:
    """Return a function that runs the script with one option."""
    (tmp_path / "train.py").write_text(TRAIN)

    def call(option: str, *how: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        words = ["run", "-o", "run", "--warmup", "1", "--steps", "2", option, "--", sys.executable, "train.py", *how]
        return ended(forks.run_profkit(*words, cwd=tmp_path), status)

    return call


@pytest.mark.parametrize("option", ["--oom", "--memory-only"])
def test_a_command_that_dies_after_the_recorded_steps_is_explained(
    tmp_path: Path, recorded: Recorded, option: str
) -> None:
    done = recorded(option, "dies", status=1)
    assert "Out of memory 1 time, last at" in done.stdout
    assert "asked for 99.00 MiB (103,809,024 B)" in done.stdout
    assert "When the allocation failed, " in done.stdout
    last = done.stderr.splitlines()[-2:]
    assert last[0].startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert last[1].endswith("failed with exit status 1; what was recorded up to then is kept: profkit memory run")
    assert names_in(tmp_path / "run") == ["ledger.jsonl", "manifest.json", "snapshot.pickle"]
    ledger = read_owners(tmp_path / "run" / "ledger.jsonl")
    roles = {one.role for one in ledger.owned if one.time_us > ledger.figures[-2].time_us}
    assert roles >= ({"parameter", "gradient", "optimizer_state"} if option == "--oom" else {"gradient"})
    assert ledger.figures[-1].moment == "out of memory"
    manifest = manifest_of(tmp_path / "run")
    assert (manifest["status"], manifest["profiler"]) == ("failed", None)
    assert manifest["memory"]["processes"][0]["memory"]["failed_allocations"] == 1


def test_a_command_that_never_runs_out_leaves_the_manifest_alone(
    tmp_path: Path, forks: Forks, recorded: Recorded
) -> None:
    plain = forks.run([sys.executable, "train.py"], tmp_path)
    done = recorded("--oom")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == plain.stdout, "the losses are the same to the bit"
    assert names_in(tmp_path / "run") == ["manifest.json"]


def test_a_failed_allocation_that_the_command_survives_is_said_in_one_line(tmp_path: Path, recorded: Recorded) -> None:
    done = recorded("--oom", "survives")
    assert done.stderr == (
        "profkit: 1 allocation failed and the target went on; profkit memory run says why the last failed\n"
    )
    assert "Out of memory 1 time" in run_profkit("memory", "run", cwd=tmp_path).stdout


def _orders(allocator: MemoryOptions | None, **passes: bool) -> list[tuple[str, bool]]:
    found = command_passes(["train"], Order("", "nsys", 5, 3), allocator, **passes)
    return [(one.order.recorder, one.order.memory is not None) for one in found]


def test_watching_alone_records_nothing_else() -> None:
    assert _orders(MemoryOptions(), with_memory=False, with_trace=False) == [("oom", True)]


def test_watching_goes_along_with_the_trace_unless_the_allocator_has_a_pass_of_its_own() -> None:
    assert _orders(MemoryOptions(), with_memory=False, with_trace=True) == [("nsys", True)]
    assert _orders(MemoryOptions(), with_memory=True, with_trace=True) == [("memory", True), ("nsys", False)]
    assert _orders(None, with_memory=False, with_trace=True) == [("nsys", False)]


def _wrapped(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except type(error) as cause:
            raise RuntimeError("training failed") from cause
    except RuntimeError as wrapped:
        return wrapped


def test_a_failed_allocation_is_known_behind_an_error_of_the_scripts_own() -> None:
    assert is_out_of_memory(_wrapped(torch.OutOfMemoryError("CUDA out of memory.")))
    assert not is_out_of_memory(_wrapped(ValueError("a bad batch")))
    assert not is_out_of_memory(None)


@pytest.mark.parametrize(
    ("status", "failures", "is_fatal"),
    [
        (1, [Failure("OutOfMemoryError: …", 1, out_of_memory=True), Failure("ChildFailedError: …")], True),
        (1, [], True),  # it printed the error itself
        (1, [Failure("ValueError: a bad batch")], False),
        (0, [], False),
    ],
)
def test_an_allocation_that_failed_is_fatal_where_the_command_ended_with_it(
    status: int, failures: list[Failure], is_fatal: bool
) -> None:
    memory = [ProcessMemory(), ProcessMemory("snapshot.rank1.pickle", failed_allocations=2, is_of_failure=True)]
    processes = tuple(Process(rank=rank, memory=one) for rank, one in enumerate(memory))
    outcome = Outcome(_order(), status, processes, tuple(failures), None)
    failed: Any = outcome.out_of_memory
    assert (failed.count, failed.rank, failed.is_fatal) == (2, 1, is_fatal)
    assert Outcome(_order(), 1, processes[:1], (), None).out_of_memory is None


def _order() -> Order:
    return Order("", "oom", 5, 3, memory=MemoryOptions())
