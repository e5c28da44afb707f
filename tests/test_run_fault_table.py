"""The table of what may go wrong around `profkit run`, row by row: streams, paths, disks, moments, children.

Each row is a fact about the script first: its status and its output are as without profkit. Then: the true reason is
said in one line, no process is left, and what was recorded is kept or said to be lost. What fails in profkit's own code
is in test_run_faults.py, and how signals reach a child in test_launch_processes.py.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.forked_scripts import Forks
from tests.in_process import manifest_of, names_in, run_command
from tests.launched import NEEDS_PROC, is_alive, processes_in, start_launcher, wait_until
from tests.training_scripts import training

QUIET = training(10)
SAYS = training(10, "print(loss.item().hex(), flush=True)")

TRACE = ["manifest.json", "trace.json.gz"]
COUNTED = [*TRACE, "work.json"]
ALL = ["lines.jsonl", *COUNTED]
NOTHING = ["manifest.json"]
SHORT = ["--warmup", "2", "--steps", "2"]


def _words(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "profkit", "run", "-o", "run", *SHORT, *arguments]


# Streams: which of them are on a full disk, the script, its status, what the run keeps, and what is said.

FULL = {
    "output": ("stdout", QUIET, 0, ALL, "the result could not be printed: No space left"),
    "errors": ("stderr", QUIET, 0, ALL, ""),
    "the script's output": ("stdout", SAYS, 1, NOTHING, "OSError: [Errno 28] No space left on device"),
}


def _check_end(place: Path, errors: str, status: int, kept: list[str], said: str) -> None:
    assert names_in(place / "run") == kept
    assert said in errors
    assert "Traceback" not in errors or "Errno 28" in said
    manifest = manifest_of(place / "run")
    assert (manifest["status"], manifest["exit_status"]) == ("failed" if status else "complete", status)


@pytest.mark.parametrize("row", FULL)
def test_a_stream_on_a_full_disk_changes_no_status(forks: Forks, tmp_path: Path, row: str) -> None:
    stream, script, status, kept, said = FULL[row]
    (tmp_path / "train.py").write_text(script)
    done = forks.run(_words("--", sys.executable, "train.py"), tmp_path, full=stream)
    assert done.returncode == status
    _check_end(tmp_path, done.stderr, status, kept, said)


# What the shell does with the streams of a process of its own, the script, and its status.

STREAMS = {
    "all three closed": ("CMD <&- >&- 2>&-", QUIET, 0),
    "nobody reads, and a status of its own": ("CMD 2>&1 | true; exit ${PIPESTATUS[0]}", QUIET + "exit(7)", 7),
}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow) if row.startswith("nobody") else row for row in STREAMS]
)
def test_a_stream_that_cannot_be_used_changes_no_status(tmp_path: Path, row: str) -> None:
    shell, script, status = STREAMS[row]
    (tmp_path / "train.py").write_text(script)
    line = shell.replace("CMD", shlex.join(_words("--", sys.executable, "train.py")))
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status
    _check_end(tmp_path, done.stderr, status, ALL, "")


OWN_STREAMS = {
    "closes the three": "import os\nfor number in range(3): os.close(number)",
    "closes all that it did not open": "import os\nos.closerange(3, 1000)",
    "has none, as under pythonw": "import sys\nsys.stdin = sys.stdout = sys.stderr = None",
    "has one that raises, and writes what is not UTF-8": "import sys, types\n"
    "sys.stderr = types.SimpleNamespace(flush=list)\n"
    "sys.stdout.buffer.write(b'\\xff\\xfe\\x1b[2J')\nsys.stdout.flush()",
    "lets no file grow": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))",
    "lets files grow to less than a trace": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2)",
    "opens no more files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (7, 7))",
    "goes elsewhere, where new files are unreadable, with odd numbers of ranks": "import os\nos.chdir('/')\n"
    "os.umask(0o777)\nos.environ.update(RANK='x', LOCAL_RANK='-1', LOCAL_WORLD_SIZE='0')",
    "ends without Python's own end": "import atexit, os\natexit.register(os._exit, 0)",
}
LOST = {"lets no file grow", "lets files grow to less than a trace", "opens no more files"}


@pytest.mark.parametrize("row", OWN_STREAMS)
def test_what_a_script_does_to_its_own_process_is_as_without_profkit(forks: Forks, tmp_path: Path, row: str) -> None:
    losses = QUIET.replace("optimizer.step()", "optimizer.step(); losses.append(loss.item().hex())")
    (tmp_path / "train.py").write_text(
        f"import os\nfolder = os.getcwd()\nlosses = []\n{OWN_STREAMS[row]}\n{losses}\n"
        "open(folder + '/losses', 'w').write(losses[-1][:8])"
    )
    words = [sys.executable, str(tmp_path / "train.py")]
    forks.check(words, tmp_path)
    expected = (tmp_path / "losses").read_text()
    done = forks.run_profkit("run", "-o", "run", *SHORT, "--", *words, cwd=tmp_path)
    assert manifest_of(tmp_path / "run")["exit_status"] == 0, done.stderr
    assert (tmp_path / "losses").read_text() == expected
    assert not any(line.startswith("Traceback") for line in done.stderr.splitlines())
    if row in LOST:
        assert done.returncode == 0
        assert "nothing was recorded" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        # Where Python does not come to its end, the lines of the steps until then are lost.
        assert names_in(tmp_path / "run") == (COUNTED if row.startswith("ends") else ALL)


FORKS = """
def end_of_fork():
    child = os.fork()
    if child == 0:
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_fork_of_the_script_ends_with_its_own_status_while_it_is_recorded_and_after(tmp_path: Path) -> None:
    """C++'s end of such a process waits for Kineto's threads, which are not in it: also without profkit."""
    at_step = "number in (2, 9) and end_of_fork()"
    (tmp_path / "train.py").write_text(f"import os, sys\n{FORKS}{training(10, at_step)}")
    words = _words("--", sys.executable, "train.py")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5\n5\n")
    assert names_in(tmp_path / "run") == ALL


# Paths: a run's directory with any name is whole, and the command that is printed reads it; or it is refused at once.

NAMES = {
    "all that a shell or a terminal obeys": "r\"'\x1b\n{run}q%p",
    "what is not UTF-8": os.fsdecode(b"r\xffq"),
    "a leading dash": "-q",
    "a blank": " ",
    "255 letters": "a" * 255,
    "folders that are not there": "a/" * 100 + "b",
    "a link to a folder": "link",
}


@pytest.mark.parametrize("row", NAMES)
def test_a_run_in_a_directory_with_any_name_is_whole(forks: Forks, tmp_path: Path, row: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "train.py").write_text(SAYS)
    words = [sys.executable, str(tmp_path / "train.py")]
    done = forks.check_profkit("run", f"-o{NAMES[row]}", *SHORT, "--", *words, cwd=tmp_path)
    events = json.loads(gzip.decompress((tmp_path / NAMES[row] / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {"step 2", "step 3"} <= {event["name"] for event in events if event.get("cat") == "user_annotation"}
    typed = subprocess.run(
        ["bash", "-c", "printf '%s' " + done.stdout.rpartition("profkit ranges ")[2].strip()],
        capture_output=True,
        check=True,
    )
    assert (tmp_path / os.fsdecode(typed.stdout)).samefile(tmp_path / NAMES[row])
    assert not any(sign in done.stdout for sign in "\x1b\udcff")


REFUSED = {
    "a file": ("file", "exists and is not a directory"),
    "in a file": ("file/run", "Not a directory"),
    "a pipe": ("pipe", "exists and is not a directory"),
    "a device": ("/dev/null", "exists and is not a directory"),
    "a link to nothing": ("nowhere", "exists and is not a directory"),
    "links in a circle": ("circle/run", "Too many levels of symbolic links"),
    "256 letters": ("a" * 256, "File name too long"),
    "a run": ("other", "exists and is not empty"),
    "a folder that nothing can be made in": ("/proc/self/run", "No such file or directory"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_a_directory_that_cannot_be_used_is_refused_before_the_script_starts(
    forks: Forks, tmp_path: Path, row: str
) -> None:
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("{}")
    (tmp_path / "train.py").write_text("open('started', 'w')")
    before = names_in(tmp_path)
    name, said = REFUSED[row]
    done = forks.run_profkit("run", "-o", name, "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert said in line
    assert names_in(tmp_path) == before


# Disks: what happens to the disk with the run's directory, at which step of the script.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty file system of 256 kB, which takes the rights of root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


FILL = "number == AT and open('disk/fill', 'wb').write(b'x' * 220_000); print(loss.item().hex(), flush=True)"


@pytest.mark.parametrize(("at", "is_kept"), [(0, False), (2, False), (5, True)])
def test_a_disk_that_fills_up_stops_no_script(
    forks: Forks, tmp_path: Path, small_disk: Path, at: int, is_kept: bool
) -> None:
    script = training(10, FILL.replace("AT", str(at)))
    (tmp_path / "train.py").write_text(script)
    words = [sys.executable, str(tmp_path / "train.py")]
    done = forks.run_profkit("run", "-o", str(small_disk / "run"), *SHORT, "--", *words, cwd=tmp_path)
    assert len([line for line in done.stdout.splitlines() if line.startswith("-0x")]) == 10
    assert "Traceback" not in done.stderr
    files = set(names_in(small_disk / "run"))
    assert files == set(ALL) if is_kept else set(NOTHING) <= files <= set(ALL) - {"trace.json.gz"}
    assert done.returncode == 0
    assert ("No space left on device" in done.stderr) != is_kept
    assert "training step" not in done.stderr


# Moments: what ends `profkit run`, and when; its status, what it says last, and what it keeps. The script sends the
# signal itself.

MOMENTS = """
import os, signal, sys
def at(moment):
    if moment == sys.argv[1]:
        os.kill(os.getppid(), signal.Signals[sys.argv[2]])
        while True:
            signal.pause()
at("before torch")
import torch
from profkit.capture import recorder
export = recorder._export
def exports(*arguments):
    at("while the trace is written")
    export(*arguments)
recorder._export = exports
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[1] == "while workers load data":
    data, recorded = iter(torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=2, num_workers=2)), sys.argv[1]
else:
    data, recorded = iter([torch.ones(2, 4)] * 9), "while a step is recorded"
# In the first of the recorded steps: whether more are recorded, for a queue that was full, depends on the machine.
MOMENTS = ["", "in the warm-up", recorded, "", "", "after the recording"]
for number in range(2 if sys.argv[1] == "in the second run" else 6):
    model(next(data)).sum().backward()
    optimizer.step()
    at(MOMENTS[number])
if os.path.exists(".again"):
    at("in the second run")
os.makedirs(".again", exist_ok=True)
"""

ENDS = [
    ("before torch", "SIGTERM", 143, "keeps no capture", NOTHING),
    ("in the warm-up", "SIGHUP", 129, "keeps no capture", NOTHING),
    ("while a step is recorded", "SIGINT", 130, "keeps trace.json.gz", TRACE),
    ("while a step is recorded", "SIGTERM", 143, "keeps no capture", NOTHING),
    ("while the trace is written", "SIGINT", 130, "keeps no capture", NOTHING),
    ("while the trace is written", "SIGQUIT", 131, "keeps no capture", NOTHING),
    ("while workers load data", "SIGINT", 130, "keeps trace.json.gz", TRACE),
    ("while workers load data", "SIGTERM", 143, "keeps no capture", NOTHING),
    ("after the recording", "SIGTERM", 143, "keeps trace.json.gz", COUNTED),
    ("after the recording", "SIGINT", 130, "keeps trace.json.gz", ALL),
    ("in the second run", "SIGINT", 130, "keeps trace.json.gz", TRACE),
]


WHOLE = {("before torch", "SIGTERM"), ("while workers load data", "SIGINT")}
"""What runs in processes of its own from the start; the others are forks that have torch."""


def _run(forks: Forks, place: Path, moment: str, number: str) -> tuple[int, list[str]]:
    """Return the status of a `profkit run` that gets a signal, and the lines of its standard error."""
    (place / "train.py").write_text(MOMENTS)
    words = _words("--", sys.executable, "train.py", moment, number)
    if (moment, number) in WHOLE:
        done = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False)
    else:
        done = forks.run(words, place)
    return done.returncode, done.stderr.splitlines()


@NEEDS_PROC
@pytest.mark.parametrize(("moment", "number", "status", "said", "kept"), ENDS)
def test_a_signal_at_any_moment_leaves_no_process_and_says_what_is_kept(
    forks: Forks, tmp_path: Path, moment: str, number: str, status: int, said: str, kept: list[str]
) -> None:
    returned, errors = _run(forks, tmp_path, moment, number)
    how = "interrupted" if number == "SIGINT" else f"ended by {number}"
    assert returned == status
    assert errors[-1] == f"profkit: {how}; run is marked failed and {said}"
    assert ("KeyboardInterrupt" in errors) == (number == "SIGINT"), "Ctrl-C reaches the script as Ctrl-C"
    assert names_in(tmp_path / "run") == kept
    manifest = manifest_of(tmp_path / "run")
    assert (manifest["status"], manifest["reason"], manifest["exit_status"]) == ("failed", how, status)
    assert not processes_in(tmp_path)


@NEEDS_PROC
@pytest.mark.parametrize(
    ("moment", "there"), [("in the warm-up", ""), ("after the recording", "trace.json.gz")], ids=["before", "after"]
)
def test_after_a_kill_of_profkit_the_script_ends_and_the_next_command_says_what_is_there(
    forks: Forks, tmp_path: Path, moment: str, there: str
) -> None:
    assert _run(forks, tmp_path, moment, "SIGKILL")[0] == 128 + signal.SIGKILL
    wait_until(lambda: not processes_in(tmp_path))
    for command in ("kernels", "ranges"):
        done = run_command(command, tmp_path / "run")
        how = "its `profkit run` was killed, or has not ended yet"
        if there:
            assert done.returncode == 0, done.stderr
            expected = f"warning: {tmp_path / 'run'}: it holds what was written by then ({there}): {how}"
        else:
            assert done.returncode == 1
            expected = f"profkit: {tmp_path / 'run'}: this run holds no trace: {how}"
        (line,) = [line for line in done.stderr.splitlines() if line.startswith(expected)]
        assert line.endswith(
            f"; once it has ended, `rm {tmp_path / 'run'}/partial.*` removes what it left half written"
        )


# Children: what a script may start, each of which leaves its pid; and what ends the launcher.

CHILDREN = {
    "workers of a pool": "import multiprocessing\n"
    "[multiprocessing.get_context('fork').Process(target=wait).start() for _ in range(2)]",
    "a shell and its child": "subprocess.Popen(['sh', '-c', f'{sys.executable} -c \"{code}\" & wait'])",
    "one in a session of its own": "start(start_new_session=True)",
    "one that ignores SIGTERM and SIGINT": "start(preexec_fn=ignore)",
    "one without the mark": "start(env={})",
    "one without the mark in a session of its own": "start(env={}, start_new_session=True)",
    "an orphan in a session of its own": "os.fork() or (start(start_new_session=True), os._exit(0))",
    "an orphan without the mark": "os.fork() or (start(env={}), os._exit(0))",
    "a launcher of ranks in sessions of their own": "os.fork() or (start(start_new_session=True), "
    "start(start_new_session=True, env={}), wait())",
}
FAMILY = """
import os, signal, subprocess, sys
place, code = sys.argv[1], "import os, signal; open(os.path.join({place!r}, str(os.getpid())), 'w'); signal.pause()"
code = code.format(place=place)
def ignore():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
def start(**options):
    return subprocess.Popen([sys.executable, "-c", code], **options)
def wait():
    open(os.path.join(place, str(os.getpid())), "w")
    while True:
        signal.pause()
START
wait()
"""
MEMBERS = {"workers of a pool": 2, "a launcher of ranks in sessions of their own": 3}


@NEEDS_PROC
@pytest.mark.parametrize(
    ("number", "rows"),
    [*(("SIGKILL", [row]) for row in CHILDREN), ("SIGINT", list(CHILDREN)), ("SIGTERM", list(CHILDREN))],
)
def test_no_child_of_any_kind_is_left(tmp_path: Path, number: str, rows: list[str]) -> None:
    code = FAMILY.replace("START", "\n".join(CHILDREN[row] for row in rows))
    launcher = start_launcher(code, str(tmp_path), patience_s=0.2)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 1 + sum(MEMBERS.get(row, 1) for row in rows))
    started = [int(path.name) for path in tmp_path.iterdir()]
    launcher.send_signal(signal.Signals[number])
    launcher.communicate(timeout=60)
    if number == "SIGKILL":
        wait_until(lambda: not any(map(is_alive, started)))
    assert not any(map(is_alive, started))
