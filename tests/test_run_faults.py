"""What goes wrong around a script, or in it: it ends as it would alone, and profkit says what was kept and why."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from profkit.launch.passes import why_no_process
from profkit.run.recording import Attached, leave_attached, leave_ended, leave_unsaved, take_attached
from tests.forked_scripts import Forks
from tests.in_process import manifest_of
from tests.training_scripts import training

ENDS = """
print(loss.item())
sys.stdout.flush()
if sys.argv[1] == "exit":
    os._exit(3)
if sys.argv[1].startswith("SIG"):
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
"""
TRAIN = training(
    "int(sys.argv[2])",
    "if sys.argv[1] == 'unlink': shutil.rmtree('run', ignore_errors=True)",
    before="import os, shutil, signal, sys",
    after=ENDS,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("SIGKILL", 137, "nothing was recorded: a process was ended by SIGKILL before it could save its recording"),
        ("SIGSEGV", 139, "nothing was recorded: a process was ended by SIGSEGV before it could save its recording"),
        ("exit", 3, "nothing was recorded: a process ended without Python's own end (os._exit, or a crash)"),
    ],
)
def test_the_reason_is_how_the_process_ended(forks: Forks, place: Path, how: str, status: int, reason: str) -> None:
    words = ("run", "-o", "run", "--warmup", "5", "--", sys.executable, str(place / "train.py"), how, "3")
    done = forks.run_profkit(*words, cwd=place)
    assert done.returncode == status
    manifest = manifest_of(place / "run")
    assert manifest["reason"].startswith(reason)
    assert not (place / "run" / "trace.json.gz").exists()
    assert not list((place / "run").glob("partial.*"))


def test_a_run_directory_that_is_removed_does_not_stop_the_script(forks: Forks, place: Path) -> None:
    words = [sys.executable, str(place / "train.py"), "unlink", "12"]
    plain = forks.run(words, place)
    done = forks.run_profkit("run", "-o", "run", "--warmup", "5", "--", *words, cwd=place)
    assert done.stdout.startswith(plain.stdout)
    assert "Traceback" not in done.stderr
    assert "No such file or directory" in done.stderr
    assert "space" not in done.stderr


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_a_python_that_keeps_profkit_out_is_named_as_the_reason(place: Path, flag: str) -> None:
    (place / "own.py").write_text(
        "print(1)"
    )  # whether it imports torch does not matter, and importing it takes seconds
    command = [sys.executable, "-m", "profkit", "run", "-o", "run", "--", sys.executable, flag, "own.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "profkit got into no Python process that imports torch; python -I, -E and -S and a cleared" in done.stderr


def test_a_module_of_the_scripts_own_that_is_called_profkit_is_left_alone(place: Path) -> None:
    (place / "profkit.py").write_text("print('own')")
    (place / "torch.py").write_text("")  # the real one takes seconds to import, and is not reached
    (place / "own.py").write_text("import torch, profkit")
    folder = Path(__file__).parent.parent / "profkit" / "capture" / "child"
    environment = {**os.environ, "PYTHONPATH": str(folder), "PROFKIT_ATTACH": "{}"}
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "own\n")
    assert done.stderr.startswith("profkit: nothing is recorded in ")
    assert done.stderr.strip().endswith("profkit.py has its name")


def test_the_reason_is_what_kept_profkit_out_of_the_process(place: Path) -> None:
    (place / "profkit.py").write_text("")
    (place / "torch.py").write_text("")
    (place / "own.py").write_text("import torch")
    command = [sys.executable, "-P", "-m", "profkit", "run", "-o", "run", "--", sys.executable, "own.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    reason = f"in {sys.executable}, because {place / 'profkit.py'} has its name"
    assert done.stderr.splitlines() == [
        f"profkit: nothing is recorded {reason}",
        f"profkit: nothing was recorded {reason}",
    ]
    assert [path.name for path in (place / "run").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("attached", "unended", "status", "said"),
    [
        (0, 0, 0, "no Python process"),
        (2, 0, 0, None),
        (2, 1, 0, "os._exit"),
        (1, 1, 137, "SIGKILL"),
        (1, 1, 255, "crash"),
    ],
)
def test_why_no_process_left_word(attached: int, unended: int, status: int, said: str | None) -> None:
    found = why_no_process(Path("run"), Attached(attached, unended), status)
    assert found is None if said is None else said in (found or "")


def test_a_full_disk_is_the_reason_and_no_missing_step(tmp_path: Path) -> None:
    leave_attached(tmp_path, 7)
    leave_unsaved(tmp_path, 7, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    leave_ended(tmp_path, 7)
    attached = take_attached(tmp_path)
    assert attached == Attached(1, unsaved="No space left on device")
    assert why_no_process(tmp_path, attached, 0) == (
        f"nothing was recorded: {tmp_path} could not be written to (No space left on device); free some space, or name "
        "another directory with -o"
    )
    assert list(tmp_path.iterdir()) == []


BREAKING = """
import importlib, sys
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

place, name, after = sys.argv[1], sys.argv[2], int(sys.argv[3])
if place != "-":
    owner = importlib.import_module("profkit.capture." + place)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    plain, calls = getattr(owner, last), [0]
    def breaks(*args, **kwargs):
        calls[0] += 1
        if calls[0] > after:
            raise TypeError("broken on purpose")
        return plain(*args, **kwargs)
    setattr(owner, last, breaks)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(20, 4), batch_size=2):
    hidden = checkpoint(model[1], model(batch), use_reentrant=False)
    penalty = torch.autograd.grad(hidden.sum(), model.parameters(), create_graph=True)[0].sum()
    (torch.nn.functional.mse_loss(hidden, batch) + penalty).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(penalty.item().hex(), flush=True)
"""

BREAKABLE = [
    ("hooks.open_ranges", "OpenRanges.open"),
    ("hooks.open_ranges", "OpenRanges.close"),
    ("hooks.open_ranges", "OpenRanges.enter_backward_of"),
    ("hooks.open_ranges", "OpenRanges.interrupt_backward"),
    ("hooks.open_ranges", "OpenRanges.close_all"),
    ("hooks.backward_nodes", "Carrier.mark_nodes"),
    ("hooks.hooks", "at_graph_end"),
    ("steps.times", "PhaseClock.begin"),
    ("steps.times", "PhaseClock.take"),
    ("steps.times", "StepCollector.step_ended"),
    ("steps.policy", "StepPolicy.call_begins"),
    ("steps.policy", "StepPolicy.call_ends"),
    ("steps.policy", "StepPolicy.backward_ends"),
    ("steps.policy", "StepPolicy.optimizer_ends"),
    ("steps.data_loading", "DataLoading.step_ended"),
    ("steps.data_loading", "QueueDrain.plan"),
    ("session", "Session.boundary"),
    ("session", "Session._begin_recording"),
    ("session", "Session._finish"),
    ("session", "Session._describe"),
    ("session", "Session.end"),
    ("session", "read_conditions"),
    ("recorder", "_export"),
]


@pytest.fixture(scope="module")
def unbroken(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("plain")
    (place / "train.py").write_text(BREAKING)
    return forks.run([sys.executable, str(place / "train.py"), "-", "-", "0"], place).stdout


@pytest.mark.parametrize(
    ("where", "name", "after"),
    [(*one, 0) for one in BREAKABLE] + [(*one, 17) for one in BREAKABLE[:4]],
    ids=[".".join(one) for one in BREAKABLE] + [f"{'.'.join(one)} later" for one in BREAKABLE[:4]],
)
def test_what_fails_in_profkit_never_reaches_the_script(
    forks: Forks, tmp_path: Path, unbroken: str, where: str, name: str, after: int
) -> None:
    (tmp_path / "train.py").write_text(BREAKING)
    words = [sys.executable, str(tmp_path / "train.py"), where, name, str(after)]
    done = forks.run_profkit("run", "-o", "run", "--warmup", "2", "--steps", "3", "--", *words, cwd=tmp_path)
    manifest = manifest_of(tmp_path / "run")
    assert manifest["exit_status"] == 0, done.stderr
    assert done.stdout.startswith(unbroken)
    assert "Traceback" not in done.stderr
    assert len(unbroken.splitlines()) == 10


FAILS = """
if number + 1 == int(sys.argv[2]):
    if sys.argv[1] == "raise":
        raise ValueError("the data are bad")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("no more data" if sys.argv[1] == "message" else 7)
"""

NOTHING = "nothing was recorded; see run/manifest.json"
RANGES = "steps were recorded and are kept: profkit ranges run"
COUNTED = "; --no-flops leaves out the step that it failed in, whose work profkit counts"


@pytest.mark.parametrize(
    ("how", "fails_at", "error", "status", "kept"),
    [
        ("raise", 1, ["ValueError: the data are bad"], "1", NOTHING),
        ("raise", 4, ["ValueError: the data are bad"], "1", f"2 of 3 {RANGES}"),
        ("raise", 5, ["ValueError: the data are bad"], "1", f"3 of 3 {RANGES}{COUNTED}"),
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
    (tmp_path / "train.py").write_text(training(9, FAILS, before="import os, signal, sys"))
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
    assert (tmp_path / "run" / "work.json").exists() == (fails_at == 7), "its counted step is the sixth"
    if how == "raise":
        assert manifest["reason"] == error[0]
