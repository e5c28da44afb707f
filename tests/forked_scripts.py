"""Runs Python scripts as forks of one process that has imported torch: what a start of torch costs is paid once.

`Forks` is the tests' end. As a script this file is the other end: it reads one job a line and answers with the exit
status. A job is ``python SCRIPT`` or ``python -m MODULE``, alone or as the ranks of torch's launcher. A fork attaches
profkit as a new process does once it has imported torch, and ends as Python ends a script; one that used a GPU leaves
its peak memory in ``.forked/peak.txt``, which is no file of the script's own. Where the module is profkit, what it
starts is a fork of it in turn.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from argparse import REMAINDER, ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
import torch._dynamo

from profkit.capture.session import attach
from profkit.launch import processes
from profkit.run.recording import VARIABLE
from tests.in_process import ended, run_profkit

ROOT = Path(__file__).parent.parent
_PATIENCE_S = 300
_LAUNCHER = "torch.distributed.run"


class Forks:
    """The process that is forked; close it at the end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.forked_scripts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "KINETO_LOG_LEVEL": "99"},
        )

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def run(
        self, words: Sequence[str], cwd: Path, *, reads: Path = Path(os.devnull), offset: int = 0, full: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run ``words`` (``python SCRIPT ARGUMENT…``, or torchrun as a module) in ``cwd`` without profkit.

        Its standard input is the file ``reads``, from an offset; the stream ``full`` (``stdout`` or ``stderr``) goes to
        a disk that is full, and nothing is read of it.
        """
        files = {name: cwd / f"{name}.txt" for name in ("stdout", "stderr")}
        for path in files.values():
            path.write_text("")
        outputs = [Path("/dev/full") if name == full else path for name, path in files.items()]
        status = self._start(words, os.environ, cwd, outputs, reads=str(reads), offset=offset)
        said = (path.read_text(errors="replace") for path in files.values())
        return subprocess.CompletedProcess(list(words), status, *said)

    def printed_json(self, script: Path, *arguments: str, warnings: str = "default") -> dict[str, Any]:
        """Return the JSON that a script of the tests prints."""
        with tempfile.TemporaryDirectory() as place:
            done = self.run([sys.executable, "-W", warnings, str(script), *arguments], Path(place))
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def run_profkit(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``profkit ARGUMENTS`` as `tests.in_process.run_profkit` does, with the target as a fork."""

        def start(words: Sequence[str], environment: Mapping[str, str], output: Any = None, **_: Any) -> int:
            # Without a file, wherever our own two standard streams go just now.
            ours = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
            outputs = ours if output is None else [output.name] * 2
            return self._start(words, environment, cwd, list(map(Path, outputs)))

        with (
            mock.patch("profkit.launch.record.run_child", start),
            mock.patch("profkit.launch.gpu_state.run_child", start),
            mock.patch("profkit.launch.trials.run_child", start),
        ):
            return run_profkit(*arguments, cwd=cwd, **variables)

    def check(self, words: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Do as `run`, with what must end well."""
        return ended(self.run(words, cwd))

    def check_profkit(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Do as `run_profkit`, with what must end well."""
        return ended(self.run_profkit(*arguments, cwd=cwd, **variables))

    def record_ranks(self, folder: Path, script: str, count: int, *options: str) -> Path:
        """Record a script of so many ranks in ``folder``; return the run."""
        (folder / "train.py").write_text(script)
        words = ("run", "-o", "run", "--nproc-per-node", str(count), *options, "--", sys.executable, "train.py")
        self.check_profkit(*words, cwd=folder)
        return folder / "run"

    def _start(
        self, words: Sequence[str], environment: Mapping[str, str], cwd: Path, outputs: Sequence[Path], **more: Any
    ) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"words": list(words), "environment": dict(environment), "cwd": str(cwd), **more}
        self._process.stdin.write(json.dumps({**job, "outputs": [str(path) for path in outputs]}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _serve() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a script that collects garbage need not look at all of torch
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in jobs:
        job = json.loads(line)
        _import_compiler_for(job)
        _end_nothing_of_torchs()
        statuses = _run_job(job)
        status = next((one for one in statuses if one), 0)
        answers.write(f"{status if status >= 0 else 128 - status}\n")
        answers.flush()


def _import_compiler_for(job: dict[str, Any]) -> None:
    """Import what a script that compiles imports first of all, so that its fork and later ones need not.

    Not where there is a GPU: the import asks CUDA for it, which no fork could use afterwards.
    """
    if torch.cuda.device_count():
        return
    scripts = [Path(job["cwd"], word) for word in job["words"] if word.endswith(".py")]
    if any(script.is_file() and "torch.compile" in script.read_text() for script in scripts):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torch._inductor.cudagraph_trees")


def _end_nothing_of_torchs() -> None:
    """Leave what torch does at Python's end, which takes longer than a script of the tests, out of those of its forks.

    What a script registers itself is run there.
    """
    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def _run_job(job: dict[str, Any]) -> list[int]:
    """Run a job to its end; return the exit status of each of its processes, -n if signal n ended it."""
    words = job["words"][1:]
    if _LAUNCHER not in words:
        return _wait_for([_fork(job, words, {})])
    at = words.index(_LAUNCHER)
    _, number, *target = (word for word in words[at + 1 :] if word != "--standalone")
    count, words = int(number), [*words[: at - 1], *target]
    address, store = _fork_store()
    statuses = _wait_for([_fork(job, words, address | _numbers_of_rank(rank, count)) for rank in range(count)])
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return statuses


def _wait_for(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _fork_store() -> tuple[dict[str, str], int]:
    """Start the store at which the ranks meet, which outlives them as torchrun's does; return its address and pid."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, f"{store.port}\n".encode())
        signal.pause()
    os.close(write)
    with os.fdopen(read) as said:
        port = said.readline().strip()
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}, child


def _numbers_of_rank(rank: int, count: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return dict.fromkeys(names[0], str(rank)) | dict.fromkeys(names[1], str(count))


def _fork(job: dict[str, Any], words: list[str], variables: dict[str, str]) -> int:
    child = os.fork()
    if child == 0:
        if "reads" in job:
            _open_as(0, job["reads"], os.O_RDONLY)
        if job.get("offset"):
            os.lseek(0, job["offset"], os.SEEK_SET)
        _become(words, {**job["environment"], **variables}, job["cwd"], job["outputs"])
    return child


def _open_as(number: int, path: str, how: int) -> None:
    opened = os.open(path, how)
    os.dup2(opened, number)
    os.close(opened)


def _become(words: list[str], environment: dict[str, str], cwd: str, outputs: list[str]) -> NoReturn:
    """Be a new process in which Python runs ``words``, from its start to its end."""
    signal.alarm(_PATIENCE_S)
    for number, path in enumerate(outputs, start=1):
        _open_as(number, path, os.O_WRONLY | os.O_APPEND)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    options = ArgumentParser()
    options.add_argument("-P", dest="is_safe", action="store_true")
    options.add_argument("-W", dest="warnings")
    options.add_argument("-m", dest="is_module", action="store_true")
    options.add_argument("argv", nargs=REMAINDER)
    asked = options.parse_args(words)
    sys.argv, script = asked.argv, asked.argv[0]
    if not asked.is_safe:
        sys.path.insert(0, cwd if asked.is_module else str(Path(script).resolve().parent))
    status = 0
    try:
        if asked.warnings is not None:
            warnings.simplefilter(asked.warnings)
        if VARIABLE in environment:
            attach()
        # Kept to the end: a process group that goes with the script's globals may wait for its own thread (torch 2.13,
        # ProcessGroupGloo::runLoop asks for the lock that the thread which joins it holds).
        if script == "profkit":
            _fork_targets()
        if asked.is_module:
            _kept = runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            _kept = runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exception(error)
        status = 1
    if torch.cuda.is_initialized():
        Path(".forked").mkdir(exist_ok=True)
        Path(".forked/peak.txt").write_text(str(torch.cuda.max_memory_allocated()))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # a script may have closed it, or set it to None
            stream.flush()
    os._exit(status)


def _fork_targets() -> None:
    """Have profkit's launcher start what it runs as forks of this process; its guards stay processes of their own."""

    def start(words: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        if env is not None and words[0] == sys.executable:
            options["preexec_fn"] = partial(_become_at_exec, words[1:], env)
        return subprocess.Popen(words, env=env, **options)

    processes.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})  # type: ignore[assignment]


def _become_at_exec(words: list[str], environment: dict[str, str]) -> NoReturn:
    """Be the new process in place of the one that `subprocess.Popen` is about to begin."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # among them is what tells Popen that the new process has begun
    _become(words, environment, os.getcwd(), [])


if __name__ == "__main__":
    _serve()
