"""What records the steps of a process: torch.profiler into a Chrome trace, or Nsight Systems around the process.

One nsys watches all ranks of a machine, and starts and stops for all of them when one of them says so. The others must
not have begun their step by then, nor still be in it; they meet through files in the run's directory, so that the trace
shows no collective of profkit's own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import gzip
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from inspect import signature
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from profkit.files import whole_file
from profkit.run.recording import RANK_NSYS, meeting_file

_PATIENCE_S = 10.0
_POLL_S = 0.001
_CHUNK_BYTES = 1024**2
_TAIL_BYTES = 64 * 1024
_FULL_BYTES = 1024**2

# nsys reaches the other processes in its own time: on an H200 1.2 ms after cudaProfilerStart had returned in the first,
# another's range that was already open was lost.
_SETTLING_S = 0.2


class ScriptsProfiler:
    """Knows when the script's own torch.profiler runs: a process has one Kineto, and the script's goes first."""

    def __init__(self) -> None:
        """Watch every profiler of this process from now on."""
        self.before_start: Callable[[], None] | None = None
        """Called once, before the script starts one."""
        self._running: set[int] = set()
        self._is_ours = False
        kind = torch.autograd.profiler.profile
        prepare, leave = kind._prepare_trace, kind.__exit__

        @functools.wraps(prepare)
        def prepared(profiler: Any) -> None:
            if not self._is_ours:
                self._running.add(id(profiler))
                tell, self.before_start = self.before_start, None
                if tell is not None:
                    tell()
            prepare(profiler)

        @functools.wraps(leave)
        def left(profiler: Any, *error: Any) -> Any:
            self._running.discard(id(profiler))
            return leave(profiler, *error)

        kind._prepare_trace, kind.__exit__ = prepared, left

    @property
    def runs(self) -> bool:
        """Whether one of the script's records now, or warms up to it."""
        return bool(self._running)

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Take what starts within the block for a profiler of profkit's."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False


@contextmanager
def recorded_by_kineto(path: Path, device: torch.device, scripts: ScriptsProfiler | None = None) -> Iterator[None]:
    """Record the block, and write the gzipped Chrome trace to ``path``, whole or not at all, when it has gone well."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    # Torch 2.11 warns without this (there is only one cycle); torch 2.4 does not know it.
    options: dict[str, Any] = {"acc_events": True} if "acc_events" in signature(profile).parameters else {}
    profiler = profile(activities=activities, experimental_config=_of_all_threads(device), **options)
    with nullcontext() if scripts is None else scripts.ours():
        profiler.start()
    process = os.getpid()
    os.register_at_fork(after_in_child=_end_without_cpp)
    try:
        yield
    finally:
        if os.getpid() == process:  # a fork of the program drops its copy of this
            profiler.stop()
    _export(profiler, path)


def _of_all_threads(device: torch.device) -> Any:
    """Return what has Kineto record threads that the program starts by itself too; None before torch can.

    None on a CPU: there the threads of torch's own pool compute within an operator that waits for them, so that their
    time would count twice.
    """
    if device.type != "cuda":
        return None
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def _end_without_cpp() -> None:
    """Have this fork end right after Python has: C++ would wait for ever for Kineto's threads, which no fork has."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # glibc's alone
        libc.on_exit(libc._exit, None)  # which gets the exit status


def _export(profiler: profile, path: Path) -> None:
    """Write the trace; torch's own way with ``.gz`` goes through TMPDIR, and is silent if that is full."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    # Kineto writes the path into the trace without escaping it, and takes none that is not UTF-8. Other ranks write
    # into the same folder at the same time.
    plain = Path(f"/proc/self/fd/{folder}/partial.{path.name}.json")
    try:
        profiler.export_chrome_trace(str(plain))
        if not _is_whole(plain):
            raise _why_not_whole(plain, path)
        with whole_file(path) as partial, plain.open("rb") as source, gzip.open(partial, "wb") as target:
            _copy_with_name(source, target, str(plain), path.name)
    finally:
        for left in (plain, Path(f"{plain}.tmp")):  # the second is Kineto's own, half written
            left.unlink(missing_ok=True)
        os.close(folder)


def _why_not_whole(plain: Path, path: Path) -> OSError:
    """Return why Kineto, which says nothing, left no whole trace."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if not path.parent.is_dir():
        number = errno.ENOENT
    elif shutil.disk_usage(path.parent).free < _FULL_BYTES:
        number = errno.ENOSPC
    elif limit != resource.RLIM_INFINITY and (plain.stat().st_size if plain.exists() else 0) >= limit - _TAIL_BYTES:
        number = errno.EFBIG
    else:
        return OSError(errno.EIO, "torch.profiler wrote no whole trace, and does not say why", str(path))
    return OSError(number, os.strerror(number), str(path.parent))


class SupportsWrite(Protocol):
    """A file that bytes can be written to."""

    def write(self, data: bytes, /) -> int:
        """Write the bytes."""


def _copy_with_name(source: BinaryIO, target: SupportsWrite, path: str, name: str) -> None:
    """Copy the trace, and name it by ``name``: Kineto ends it with the whole ``path``, and traces are shared."""
    end = max(0, source.seek(0, os.SEEK_END) - _TAIL_BYTES)
    source.seek(0)
    while source.tell() < end:
        target.write(source.read(min(_CHUNK_BYTES, end - source.tell())))
    old, new = (json.dumps(text)[1:-1].encode() for text in (path, name))
    target.write(source.read().replace(old, new))


def _is_whole(trace: Path) -> bool:
    """Return whether a JSON object was written to its end."""
    if not trace.exists() or not trace.stat().st_size:
        return False
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")


@contextmanager
def recorded_by_nsys(run: Path, device: torch.device) -> Iterator[None]:
    """Have nsys capture the block through CUDA's profiler API, on all ranks of this machine once all have come to it.

    Without CUDA there is no such API, and nsys captures the processes from start to end.
    """
    ranks = LocalRanks(run)
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    ranks.meet("arrived")
    if ranks.number == 0:
        torch.cuda.profiler.start()
    try:
        if ranks.meet("started") and ranks.count > 1:
            time.sleep(_SETTLING_S)
        yield
    finally:
        torch.cuda.synchronize(device)
        ranks.meet("done")
        if ranks.number == 0:
            torch.cuda.profiler.stop()
        ranks.meet("stopped")


@contextmanager
def recorded_by_own_nsys(run: Path, device: torch.device) -> Iterator[None]:
    """Have the Nsight Systems of this rank's own capture the block; no other rank is waited for."""
    (run / f"{os.environ[RANK_NSYS]}.recorded").touch()
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()


def number_in_environment(variable: str) -> int | None:
    """Return the whole number that a variable holds; None if it is not set, or holds something else."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


class LocalRanks:
    """This machine's ranks as the launcher numbered them, and this process among them."""

    def __init__(self, run: Path) -> None:
        self.number = number_in_environment("LOCAL_RANK") or 0
        self.count = number_in_environment("LOCAL_WORLD_SIZE") or 1
        self._run = run

    def meet(self, occasion: str, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until every rank of this machine has come here; False if one did not come in time."""
        if self.count == 1:
            return True
        meeting_file(self._run, occasion, self.number).touch()
        awaited = [meeting_file(self._run, occasion, number) for number in range(self.count)]
        deadline = time.monotonic() + patience_s
        while not all(path.exists() for path in awaited):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def agree(self, occasion: str, number: int, patience_s: float = _PATIENCE_S) -> int:
        """Return the largest number that a rank of this machine came here with; 0 if one did not come in time."""
        if self.count == 1:
            return number
        mine = meeting_file(self._run, occasion, self.number)
        written = mine.with_name(f"{mine.name}.new")
        written.write_text(str(number), encoding="ascii")
        written.replace(mine)  # whoever sees the file sees the number
        if not self.meet(occasion, patience_s):
            return 0
        files = [meeting_file(self._run, occasion, rank) for rank in range(self.count)]
        return max(int(file.read_text(encoding="ascii")) for file in files)
