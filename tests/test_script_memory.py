"""``profkit run --memory`` or ``--oom -- COMMAND`` on a CUDA of paper: real processes, torch's own lazy initialisation.

The scripts run as forks of a process that has imported torch. Memory may run out in a recorded step or after them all.

What only a GPU can show is in tests/test_run_script_gpu.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from profkit.capture import is_out_of_memory
from profkit.launch.passes import Outcome, command_passes
from profkit.run.manifest import Process, ProcessMemory
from profkit.run.owners import Owners, read_owners
from profkit.run.recording import Failure, MemoryOptions, Order
from tests.doubts import without_doubts
from tests.forked_scripts import Forks
from tests.in_process import ended, manifest_of, names_in, run_command

TRAIN = """
import os, sys
import torch
from torch import nn
from tests import paper_cuda

with open("times_run", "a") as file:
    file.write("x")
how = sys.argv[1:]
if "no cuda" not in how:
    paper_cuda.install()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
if "little room" in how:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
if "no cuda" not in how:
    torch.cuda.init()
    if "its own" in how:
        torch.cuda.memory._record_memory_history(max_entries=9)
    if "alone" in how:
        sys.exit(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for number in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    if (number == 2 and "exhaust" in how) or (number == 4 and "dies" in how):
        torch.cuda.exhaust()
    if (number == 2 and "retry" in how) or (number == 4 and "survives" in how):
        try:
            torch.cuda.exhaust()
        except torch.OutOfMemoryError:
            print("smaller")
    if (number == 1 and "reset" in how) or "dies" in how:
        torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    print(number, loss.item().hex(), flush=True)
    if number == 1 and "interrupt" in how:
        import signal
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()
if "fork" in how and not os.fork():
    sys.exit(0)
if "calls" in how:
    print(paper_cuda.CALLS)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have profkit find the GPU of paper."""
    monkeypatch.setattr("profkit.cli.run.may_use_cuda", lambda _: True)


def _command(*arguments: str) -> list[str]:
    head = [sys.executable, "-P", "-m", "profkit", "run", "-o", "run", "--warmup", "1", "--steps", "2"]
    return [*head, *arguments]


@pytest.fixture
def run(place: Path, forks: Forks) -> Run:
    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        if "profkit" not in arguments:
            return forks.run(arguments, place)
        here = arguments[arguments.index("profkit") + 1 :]
        return forks.run_profkit(*here, cwd=place, **variables)

    return call


@pytest.fixture
def recorded(run: Run) -> Run:
    """Return a function that runs the script with ``--memory-only``, or with the options before ``--``, to its end."""

    def call(*words: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        options, how = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else ((), words)
        options = options or ("--memory-only",)
        return ended(run(*_command(*options, "--", sys.executable, "train.py", *how), **variables), status)

    return call


def _ledger(place: Path) -> Owners:
    return read_owners(place / "run" / "ledger.jsonl")


def test_a_script_is_recorded_from_the_first_use_of_cuda_to_its_last_measured_step(
    place: Path, run: Run, recorded: Run
) -> None:
    plain = run(sys.executable, "train.py")
    done = recorded("calls")
    assert done.stdout.startswith(plain.stdout), "the losses are the same to the bit"
    assert names_in(place / "run") == ["ledger.jsonl", "manifest.json", "snapshot.pickle"]
    calls = json.loads(done.stdout.splitlines()[5].replace("'", '"'))
    assert calls[:2] == ["init", "record all"]
    assert calls[-1] == "snapshot", "and goes on: an allocation may fail later"
    ledger = _ledger(place)
    assert [one.name for one in ledger.steps] == ["step 0", "step 1", "step 2"], "three of five"
    assert [one.moment for one in ledger.figures] == ["step 0", "step 1", "step 2", "dump"]
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    by_role = {role: [(one.name, one.step) for one in ledger.owned if one.role == role] for role in _roles(ledger)}
    assert sorted(by_role["parameter"]) == [(name, 0) for name in names]
    assert sorted(by_role["gradient"]) == sorted((name, step) for name in names for step in range(3))
    assert {name for name, _ in by_role["optimizer_state"]} >= {"0.weight.exp_avg", "2.bias.exp_avg_sq"}
    assert [step for _, step in by_role["input"]] == [0, 1, 2]
    manifest = manifest_of(place / "run")
    assert (manifest["status"], manifest["exit_status"], manifest["profiler"]) == ("complete", 0, None)
    assert len(manifest["memory"]["steps"]) == 2
    assert manifest["attached"] is None
    shown = run_command("memory", place / "run").stdout
    assert "PyTorch's own peaks, recorded by the run, agree to the byte" in " ".join(shown.split())
    assert done.stdout.rstrip().endswith("profkit memory run --timeline memory.html")


def _roles(ledger: Owners) -> set[str]:
    return {one.role for one in ledger.owned}


def test_options_reach_the_recording(place: Path, recorded: Run) -> None:
    recorded("--memory-only", "--memory-stacks", "all", "--memory-entries", "7", "--")
    memory = manifest_of(place / "run")["memory"]
    assert (memory["stacks"], memory["max_entries"]) == ("all", 7)
    assert "saved" in _roles(_ledger(place))


def test_without_ranges_the_owners_are_known_all_the_same(place: Path, recorded: Run) -> None:
    done = recorded("--memory-only", "--no-annotate", "--", "calls")
    assert "metadata" not in done.stdout.splitlines()[5]
    assert {"parameter", "gradient", "optimizer_state"} <= _roles(_ledger(place))


def test_with_a_trace_the_command_runs_twice_and_says_so(place: Path, recorded: Run) -> None:
    done = recorded("--memory", "--")
    assert (place / "times_run").read_text() == "xx"
    assert names_in(place / "run") == [
        "ledger.jsonl",
        "lines.jsonl",
        "manifest.json",
        "snapshot.pickle",
        "trace.json.gz",
        "work.json",
    ]
    assert done.stderr.splitlines()[0] == (
        "profkit: the command runs twice, because recording the allocator slows steps: first for the allocator, "
        "then for torch.profiler (--memory-only: only the first)"
    )
    manifest = manifest_of(place / "run")
    assert len(manifest["memory"]["steps"]) == len(manifest["profiled"]["steps"]) == 2
    assert manifest["profiler"] == "torch.profiler"
    for said in ("\nSTEP ", "\nMEMORY  peak ", "profkit ranges run", "profkit memory run"):
        assert said in done.stdout


@pytest.mark.parametrize("option", ["--memory", "--memory-only"])
def test_out_of_memory_keeps_status_and_snapshot_and_ends_it(place: Path, run: Run, recorded: Run, option: str) -> None:
    done = recorded(option, "--", "exhaust", status=1)
    assert "torch.OutOfMemoryError" in done.stderr
    assert "what was recorded up to then is kept" in done.stderr
    assert (place / "times_run").read_text() == "x", "not run for the trace"
    assert names_in(place / "run") == ["ledger.jsonl", "manifest.json", "snapshot.pickle"]
    manifest = manifest_of(place / "run")
    assert (manifest["status"], manifest["exit_status"]) == ("failed", 1)
    assert manifest["reason"].startswith("OutOfMemoryError: CUDA out of memory.")
    ledger = _ledger(place)
    assert [one.name for one in ledger.steps] == ["step 0", "step 1"]
    assert ledger.figures[-1].moment == "out of memory", "what was freed on the way out is not in it"
    assert sum(one.role == "gradient" for one in ledger.owned) == 3 * 4, "those of the third step too"
    shown = run(sys.executable, "-m", "profkit", "memory", "run", "--format", "json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["oom"] is not None


def test_an_error_that_the_script_survives_disturbs_nothing(place: Path, run: Run, recorded: Run) -> None:
    plain = run(sys.executable, "train.py", "retry")
    done = recorded("retry")
    assert done.stdout.startswith(plain.stdout)
    assert "smaller" in plain.stdout
    assert [one.moment for one in _ledger(place).figures][-3:] == ["out of memory", "step 2", "dump"]
    assert manifest_of(place / "run")["status"] == "complete"


def test_a_recording_that_fails_leaves_the_script_alone(place: Path, run: Run, recorded: Run) -> None:
    plain = run(sys.executable, "train.py", "retry")
    done = recorded("retry", PAPER_FULL_DISK="1")
    assert done.stdout == plain.stdout
    assert done.stderr == "profkit: no memory was recorded: No space left on device\n"
    assert names_in(place / "run") == ["manifest.json"]


def test_a_ledger_that_finds_no_room_leaves_the_script_alone(place: Path, recorded: Run) -> None:
    done = recorded("little room")
    assert done.stdout.count("0x") == 5, "to its end"
    assert done.stderr == "profkit: no memory was recorded: File too large\n"
    assert names_in(place / "run") == ["manifest.json"]


@pytest.mark.parametrize("option", ["--memory", "--memory-only"])
def test_a_script_without_cuda_has_its_trace_and_no_snapshot(place: Path, recorded: Run, option: str) -> None:
    done = recorded(option, "--", "no cuda")
    why = "no memory was recorded: no process of the target used a CUDA GPU"
    assert why in done.stderr
    assert without_doubts(done.stderr).count("\n") == (2 if option == "--memory" else 1)
    if option == "--memory":
        assert names_in(place / "run") == ["lines.jsonl", "manifest.json", "trace.json.gz", "work.json"]
        assert "\nSTEP " in done.stdout
    else:
        assert names_in(place / "run") == ["manifest.json"]
        assert manifest_of(place / "run")["reason"].startswith(why)


@pytest.mark.parametrize("option", [(), ("--oom",)])
def test_on_a_machine_without_a_gpu_the_command_runs_once_for_its_trace(
    place: Path, recorded: Run, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    monkeypatch.setattr("profkit.cli.run.may_use_cuda", lambda _: False)
    done = recorded("--memory", *option, "--", "no cuda")
    assert done.stderr.startswith("profkit: no memory was recorded: no GPU was found here")
    assert (place / "times_run").read_text() == "x"
    assert names_in(place / "run") == ["lines.jsonl", "manifest.json", "trace.json.gz", "work.json"]


def test_steps_out_of_reach_are_found_out_the_first_time(place: Path, recorded: Run) -> None:
    done = recorded("--memory", "--warmup", "9", "--")
    assert "it made 5 steps, too few for --warmup 9; it runs again with --warmup 2 --steps 2" in done.stderr
    assert (place / "times_run").read_text() == "xx", "once for the allocator, once for the trace"
    assert names_in(place / "run") == ["ledger.jsonl", "manifest.json", "snapshot.pickle", "trace.json.gz", "work.json"]
    assert "profkit memory run" in done.stdout


def test_a_script_without_a_step_is_recorded_to_its_end(place: Path, recorded: Run) -> None:
    recorded("alone")
    assert names_in(place / "run") == ["ledger.jsonl", "manifest.json", "snapshot.pickle"]


def test_a_reset_of_the_peaks_by_the_script_is_made_up_for(place: Path, recorded: Run) -> None:
    done = recorded("reset", "calls")
    assert "'reset'" in done.stdout
    figures = _ledger(place).figures
    assert "before the script reset the peaks" in [one.moment for one in figures]
    assert figures[-1].allocated_peak_bytes < figures[0].allocated_peak_bytes
    shown = run_command("memory", place / "run").stdout
    assert "PyTorch's own peaks, recorded by the run, agree to the byte" in " ".join(shown.split())


def test_a_script_that_records_the_allocator_itself_keeps_its_recording(recorded: Run) -> None:
    done = recorded("its own", "calls")
    assert "'record None'" not in done.stdout
    assert "the script switches the allocator's recording on or off itself" in done.stderr


def test_a_forked_child_leaves_the_files_alone(place: Path, recorded: Run) -> None:
    recorded("--memory-only", "--steps", "9", "--", "fork")
    assert names_in(place / "run") == ["ledger.jsonl", "manifest.json", "snapshot.pickle"]
    assert len(manifest_of(place / "run")["memory"]["processes"]) == 1


def test_ranks_have_a_snapshot_each(place: Path, run: Run) -> None:
    target = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py")
    done = run(*_command("--memory-only", "--", sys.executable, *target))
    assert done.returncode == 0, done.stderr
    ranked = ["ledger.jsonl", "ledger.rank1.jsonl", "manifest.json", "snapshot.pickle", "snapshot.rank1.pickle"]
    assert names_in(place / "run") == ranked
    highest = run(sys.executable, "-m", "profkit", "memory", "run")
    assert highest.stdout.startswith("snapshot.rank1.pickle, device 0")
    assert "rank 1 of 2, the one with the highest peak; --rank for another" in highest.stderr
    assert "agree to the byte" in highest.stdout
    first = run(sys.executable, "-m", "profkit", "memory", "run", "--rank", "0")
    assert first.stdout.startswith("snapshot.pickle, device 0")
    assert "rank" not in first.stderr
    absent = run(sys.executable, "-m", "profkit", "memory", "run", "--rank", "2")
    assert absent.returncode == 2
    assert absent.stderr == "profkit: no snapshot of rank 2: this run holds rank 0, 1\n"


def test_ctrl_c_keeps_what_was_recorded_until_then(place: Path, forks: Forks) -> None:
    done = forks.run(_command("--memory-only", "--steps", "9", "--", sys.executable, "train.py", "interrupt"), place)
    assert done.returncode == 130
    last = "profkit: interrupted; run is marked failed and keeps snapshot.pickle"
    assert done.stderr.splitlines()[-1] == last
    assert names_in(place / "run") == ["ledger.jsonl", "manifest.json", "snapshot.pickle"]


# -- memory that runs out after the recorded steps --------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--oom", "--memory-only"])
def test_a_command_that_dies_after_the_recorded_steps_is_explained(place: Path, recorded: Run, option: str) -> None:
    done = recorded(option, "--", "dies", status=1)
    assert "Out of memory 1 time, last at" in done.stdout
    assert "asked for 99.00 MiB (103,809,024 B)" in done.stdout
    assert "When the allocation failed, " in done.stdout
    last = done.stderr.splitlines()[-2:]
    assert last[0].startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert last[1].endswith("failed with exit status 1; what was recorded up to then is kept: profkit memory run")
    assert names_in(place / "run") == ["ledger.jsonl", "manifest.json", "snapshot.pickle"]
    ledger = _ledger(place)
    roles = {one.role for one in ledger.owned if one.time_us > ledger.figures[-2].time_us}
    assert roles >= ({"parameter", "gradient", "optimizer_state"} if option == "--oom" else {"gradient"})
    assert ledger.figures[-1].moment == "out of memory"
    manifest = manifest_of(place / "run")
    assert (manifest["status"], manifest["profiler"]) == ("failed", None)
    assert manifest["memory"]["processes"][0]["memory"]["failed_allocations"] == 1


def test_a_command_that_never_runs_out_leaves_the_manifest_alone(place: Path, run: Run, recorded: Run) -> None:
    plain = run(sys.executable, "train.py")
    done = recorded("--oom", "--")
    assert (done.stdout, done.stderr) == (plain.stdout, ""), "the losses are the same to the bit"
    assert names_in(place / "run") == ["manifest.json"]


def test_a_failed_allocation_that_the_command_survives_is_said_in_one_line(place: Path, recorded: Run) -> None:
    done = recorded("--oom", "--", "survives")
    assert done.stderr == (
        "profkit: 1 allocation failed and the target went on; profkit memory run says why the last failed\n"
    )
    assert "Out of memory 1 time" in run_command("memory", place / "run").stdout


def test_watching_goes_along_with_the_trace_unless_the_allocator_has_a_pass_of_its_own() -> None:
    for allocator, with_memory, with_trace, expected in (
        (MemoryOptions(), False, False, [("oom", True)]),
        (MemoryOptions(), False, True, [("nsys", True)]),
        (MemoryOptions(), True, True, [("memory", True), ("nsys", False)]),
        (None, False, True, [("nsys", False)]),
    ):
        order = Order("", "nsys", 5, 3)
        found = command_passes(["train"], order, allocator, with_memory=with_memory, with_trace=with_trace)
        assert [(one.order.recorder, one.order.memory is not None) for one in found] == expected


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
    order = Order("", "oom", 5, 3, memory=MemoryOptions())
    outcome = Outcome(order, status, processes, tuple(failures), None)
    failed: Any = outcome.out_of_memory
    assert (failed.count, failed.rank, failed.is_fatal) == (2, 1, is_fatal)
    assert Outcome(order, 1, processes[:1], (), None).out_of_memory is None
