"""What records the steps that are asked for: torch.profiler or Nsight Systems, as the order says, or nothing.

One nsys watches all ranks of a machine, and starts and stops for all of them when one of them says so. The others must
not have begun their step by then, nor still be in it; they meet through files in the run's directory, so that the trace
shows no collective of profkit's own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from profkit.capture import describe_error
from profkit.capture.flight_recorder import knows_collectives, logged_collectives, several_ranks
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.range_log import LiveLog, collections_as_ranges
from profkit.capture.patches import call_first, patch
from profkit.capture.steps.times import wait_for_device
from profkit.run.directory import KINETO_TRACE, name_of_rank
from profkit.run.range_log import finish_trace, log_beside, plain_beside, write_range_log
from profkit.run.recording import LocalRanks, Order

_TAIL_BYTES = 64 * 1024
_FULL_BYTES = 1024**2
_TORCH_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_KINETO_LEVEL = "_ZN9libkineto6Logger14severityLevel_E"
_SILENT = 99
_WRITTEN = "written."


class ScriptsProfiler:
    """Knows when the script's own torch.profiler runs: a process has one Kineto, and the script's goes first."""

    def __init__(self) -> None:
        """Watch every profiler of this process from now on."""
        self.before_start: Callable[[], None] | None = None
        """Called once, before the script starts one."""
        self._running: set[int] = set()
        self._is_ours = False
        patch("torch.autograd.profiler.profile._prepare_trace", call_first(self._starts))
        patch("torch.autograd.profiler.profile.__exit__", call_first(self._ends))

    def _starts(self, profiler: Any, *_: Any, **__: Any) -> None:
        if not self._is_ours:
            self._running.add(id(profiler))
            tell, self.before_start = self.before_start, None
            if tell is not None:
                tell()

    def _ends(self, profiler: Any, *_: Any, **__: Any) -> None:
        self._running.discard(id(profiler))

    @property
    def runs(self) -> bool:
        """Whether one of the script's records now, or warms up to it."""
        return bool(self._running)

    @contextmanager
    def ours(self) -> Iterator[None]:
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False


def warmed_up_profiler(device: torch.device, scripts: ScriptsProfiler | None, log: LiveLog | None) -> profile:
    """Return a profiler that traces from now on and keeps nothing before it is started.

    A program's first step under CUPTI takes up to twice as long as those after it. For ``scripts`` and ``log`` see
    `recorded_by_kineto`.
    """
    activities = [ProfilerActivity.CUDA] if log is not None else _ACTIVITIES[device.type]
    # Torch 2.11 warns without this (there is only one cycle); torch 2.4 does not know it.
    options: dict[str, Any] = {"acc_events": True} if "acc_events" in signature(profile).parameters else {}
    profiler = profile(activities=activities, experimental_config=_options(device, log), **options)
    with nullcontext() if scripts is None else scripts.ours():
        profiler.prepare_trace()
    return profiler


def drop_profiler(profiler: profile) -> None:
    with _kineto_silent():
        profiler.start_trace()
        profiler.profiler.acc_events = False
        profiler.stop()


@contextmanager
def recorded_by_kineto(
    path: Path,
    device: torch.device,
    scripts: ScriptsProfiler | None = None,
    log: LiveLog | None = None,
    warmed_up: profile | None = None,
) -> Iterator[None]:
    """Record the block, and write the gzipped Chrome trace to ``path``, whole or not at all, when it has gone well.

    Args:
        scripts: knows the script's own profilers.
        log: the log of ranges, if CUDA's activities alone are recorded. Then the trace and the log are left for
            `profkit.run.range_log.finish_trace`, so that the program does not wait until they are joined and zipped.
        warmed_up: what `warmed_up_profiler` returned for the same arguments, if it was called.
    """
    profiler = warmed_up or warmed_up_profiler(device, scripts, log)
    with _kineto_silent():
        profiler.start_trace()
    # Otherwise stopping it makes an object of Python's of each event, for a second or more; nobody asks for these.
    profiler.profiler.acc_events = False
    thread, ending = threading.get_ident(), _Ending(profiler, log)
    if not _is_of_all_threads(device, log):
        _of_thread.end = _End(ending.stop_with_thread)
    _have_forks_end_without_cpp()
    if log is not None:
        log.read_clock()
    try:
        yield
    finally:
        is_elsewhere = threading.get_ident() != thread and not _is_of_all_threads(device, log)
        # Another thread may have the number of one that has ended.
        is_gone = is_elsewhere or ending.has_lost_thread
        ending.stop()
        _of_thread.__dict__.pop("end", None)
    if is_gone:
        raise OSError(errno.ESRCH, _THREAD_ENDED)  # to export what it does not hold would end the program
    _export(profiler, path)
    if log is None:
        finish_trace(path)
    else:
        write_range_log(log_beside(path), log.content())


_of_thread = threading.local()
"""What is in it goes when its thread ends, on that thread."""


class _Ending:
    """Stops torch.profiler, once: at the latest when the thread that started it ends.

    On another thread torch finds nothing to stop, and frees what that thread's end has freed, or is about to: of some
    hundred programs one ended with SIGSEGV.
    """

    def __init__(self, profiler: profile, log: LiveLog | None) -> None:
        self._profiler: profile | None = profiler
        self._log, self._process = log, os.getpid()
        self.has_lost_thread = False
        """Whether the thread has ended."""

    def stop_with_thread(self) -> None:
        self.has_lost_thread = self._profiler is not None
        self.stop()

    def stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None or os.getpid() != self._process:  # a fork of the program drops its copy of this
            return
        if self._log is not None:
            self._log.read_clock()
        else:
            _wait_for_gloo()
        with _kineto_silent(), _detached_afterwards(self._log):
            profiler.stop()


class _End:
    """Does what is to be done when the only reference to it goes."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def __del__(self) -> None:
        self._do()


_GLOO = "pt_gloo_runloop"
_LOOKS = 1000
_LOOK_S = 0.001


def _wait_for_gloo() -> None:
    """Wait until gloo's threads rest, at most for `_LOOKS` looks.

    Who waits for a collective goes on before gloo's thread has noted its end in the record, and may keep the
    interpreter's lock from it. To stop torch.profiler frees the record: the note would be written into what is freed,
    and the program would end in malloc. A thread rests that sleeps, and was not awake since the look before.
    """
    before: list[list[str]] = []
    for _ in range(_LOOKS):
        now = list(_thread_states(_GLOO))
        if now == before and all("S (sleeping)" in lines[0] for lines in now):
            return
        before = now
        time.sleep(_LOOK_S)  # without the interpreter's lock


def _thread_states(name: str) -> Iterator[list[str]]:
    """Yield what Linux says of each thread of this name: its state, and how often it fell asleep or was put aside."""
    for path in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # it has ended
            lines = path.read_text().splitlines()
            if lines[0].split()[-1] == name:
                yield [line for line in lines if line.startswith("State") or "ctxt_switches" in line]


_THREAD_ENDED = "the thread that made the steps ended while they were recorded: lower --warmup or --steps"


def _is_of_all_threads(device: torch.device, log: LiveLog | None) -> bool:
    """Return whether torch.profiler is the whole process's; else what it holds is the thread's that started it."""
    return device.type == "cuda" and log is None


_ACTIVITIES = {
    "cpu": [ProfilerActivity.CPU],
    "cuda": [ProfilerActivity.CPU, ProfilerActivity.CUDA],
}


@contextmanager
def _kineto_silent() -> Iterator[None]:
    """A variable of C++'s says how much Kineto prints. `prepare_trace` sets it; it is put back for the script."""
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(_TORCH_LIBRARY)), _KINETO_LEVEL)
    except (OSError, ValueError):  # another build of torch: its lines show
        yield
        return
    before, level.value = level.value, _SILENT
    try:
        yield
    finally:
        level.value = before


def _options(device: torch.device, log: LiveLog | None) -> Any:
    """Return what Kineto is to record beyond its default; None before torch can.

    With a log of ranges: what each wait for the GPU waits for, which costs no time that could be measured. Else the
    operators of threads that the program starts by itself; but not on a CPU, where the threads of torch's own pool
    compute within an operator that waits for them, so that their time would count twice.
    """
    if device.type != "cuda":
        return None
    option = "profile_all_threads" if log is None else "enable_cuda_sync_events"
    try:
        return torch._C._profiler._ExperimentalConfig(**{option: True})
    except TypeError:
        return None


_DETACH = "TEARDOWN_CUPTI"


@contextmanager
def _detached_afterwards(log: LiveLog | None) -> Iterator[None]:
    """Have Kineto detach CUPTI when the recording ends within the block: else all later calls of CUDA are slow.

    Not where CUDA graphs were captured, which Kineto's detaching does not go well with, and not against the script's
    own choice.
    """
    if log is None or log.saw_cuda_graphs or _DETACH in os.environ:
        yield
        return
    os.environ[_DETACH] = "1"
    try:
        yield
    finally:
        del os.environ[_DETACH]


@functools.cache
def _have_forks_end_without_cpp() -> None:
    os.register_at_fork(after_in_child=_end_without_cpp)


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
    plain = Path(f"/proc/self/fd/{folder}/{_WRITTEN}{plain_beside(path).name}")
    try:
        with _kineto_silent():  # that the disk is full is said below
            profiler.export_chrome_trace(str(plain))
        if not _is_whole(plain):
            raise _why_not_whole(plain, path)
        _name_after(plain, path)
        plain.replace(plain_beside(path))
    finally:
        for left in (plain, Path(f"{plain}.tmp")):  # the second is Kineto's own, half written
            left.unlink(missing_ok=True)
        os.close(folder)


def _why_not_whole(plain: Path, path: Path) -> OSError:
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


def _name_after(plain: Path, path: Path) -> None:
    """Have the trace call itself by the name of ``path``: Kineto ends it with where it wrote, and traces are shared."""
    old, new = (json.dumps(text)[1:-1].encode() for text in (str(plain), path.name))
    with plain.open("r+b") as file:
        end = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(end)
        tail = file.read().replace(old, new)
        file.seek(end)
        file.write(tail)
        file.truncate()


def _is_whole(trace: Path) -> bool:
    if not trace.exists() or not trace.stat().st_size:
        return False
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")


# nsys reaches the other processes in its own time: on an H200 1.2 ms after cudaProfilerStart had returned in the first,
# another's range that was already open was lost.
_SETTLING_S = 0.2


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


class StepsRecorder:
    """Starts and stops what records this process, and the hooks' ranges with it.

    Args:
        records_memory: whether the allocator's history is kept at the same time.
    """

    def __init__(self, order: Order, hooks: Hooks, *, records_memory: bool) -> None:
        self._order = order
        self._run = Path(order.run)
        self._hooks = hooks
        self._records_memory = records_memory
        self._recording: ExitStack | None = None
        self._warmed_up: profile | None = None
        self._scripts_profiler = ScriptsProfiler() if order.recorder == "kineto" else None

    @property
    def is_on(self) -> bool:
        return self._recording is not None

    @property
    def is_warming_up(self) -> bool:
        """Whether torch.profiler slows the step that runs, and keeps nothing of it."""
        return self._warmed_up is not None

    @property
    def meets_the_scripts(self) -> bool:
        """Whether the script's own torch.profiler runs, where a process has only one."""
        return self._scripts_profiler is not None and self._scripts_profiler.runs

    def may_warm_up(self) -> bool:
        """Return whether torch.profiler is to warm up in the step before the recorded ones.

        Not where chosen ranks alone are recorded: one rank's slower step would be taken for a late rank.
        """
        return self._order.ranks is None and not self.meets_the_scripts and self._may_log()

    def warm_up(self) -> None:
        """Have torch.profiler trace from now on, and keep nothing before `start`."""
        assert self._scripts_profiler is not None
        self._warmed_up = warmed_up_profiler(torch.device("cuda"), self._scripts_profiler, self._hooks.log)
        self._scripts_profiler.before_start = self._drop_profiler

    def start(self, rank: int | None, make_way: Callable[[], None]) -> None:
        """Record from now on.

        Args:
                make_way: is called before the script starts a torch.profiler of its own.
        """
        wait_for_device()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        log = self._hooks.log if self._may_log() else None
        if log is None:
            self._drop_profiler()
        elif self._order.annotate:
            self._hooks.prepare()
        self._recording = ExitStack()
        if self._scripts_profiler is not None:
            path = self._run / name_of_rank(KINETO_TRACE, rank or 0)
            warmed_up, self._warmed_up = self._warmed_up, None
            self._recording.enter_context(recorded_by_kineto(path, device, self._scripts_profiler, log, warmed_up))
            self._scripts_profiler.before_start = make_way
        elif self._order.recorder == "nsys":
            self._recording.enter_context(recorded_by_nsys(self._run, device))
        if log is not None:
            self._hooks.start_log()
        if self._order.annotate and self._order.recorder != "memory":
            self._hooks.start()
            self._recording.enter_context(collections_as_ranges(log))

    def stop(self) -> str | None:
        if self._scripts_profiler is not None:
            self._scripts_profiler.before_start = None
        self._drop_profiler()
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        log = self._hooks.log
        log.saw_cuda_graphs = self._hooks.steps.has_captured
        try:
            if several_ranks() and self._order.recorder == "kineto":
                log.collectives = logged_collectives(log.began_ns)
            recording.close()
        except Exception as error:  # a full disk, say: the target trains on, and the launcher reports it
            return describe_error(error)
        return None

    def forget(self) -> None:
        self._recording = self._warmed_up = None

    def _may_log(self) -> bool:
        """Not on a CPU, whose operators are what is measured; nor where ranges must be in the allocator's history too,
        or where CPU operators alone know the names and sizes of collectives.
        """
        needs_operators = self._order.operators or self._records_memory or not torch.cuda.is_initialized()
        if self._scripts_profiler is None or needs_operators:
            return False
        return not several_ranks() or knows_collectives()

    def _drop_profiler(self) -> None:
        profiler, self._warmed_up = self._warmed_up, None
        if profiler is not None:
            drop_profiler(profiler)
