"""Fixtures shared by the tests: where real captures lie, and how to run the command line."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from profkit import annotation, reading
from profkit.analysis.causes import advice
from profkit.cli import main
from profkit.snapshot import reader, unpickler
from tests.browser import start_browser
from tests.captures import CAPTURES
from tests.nsys_builder import NsysBuilder
from tests.observed_ranges import NvtxEvent

if TYPE_CHECKING:
    from profkit.analysis.causes.advice import AdviceResult
    from profkit.analysis.opened import OpenedCapture
    from profkit.analysis.summary import Summary
    from profkit.run.directory import Run
    from tests.forked_scripts import Forks

ROOT = Path(__file__).parent.parent

pytest_plugins = ["tests.workers"]

# All that tests start imports profkit and the tests from here.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# A screen's width is each test's own affair.
os.environ.pop("COLUMNS", None)
# Two workers share two cores: further threads of torch's would wait for one another, and longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor would compile a test of each kind of vector instructions for every new cache folder, and kernels with them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Whoever starts the tests in the background leaves these ignored, and so would every process that a test starts.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector what all tests share: torch, pandas and the tests themselves, a million objects.

    They live to the end, and each of its passes would go through them again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        # What tests remember of captures and import later lives on as well: fewer passes go through all of it.
        gc.set_threshold(*gc.get_threshold()[:2], 100)
        gc.enable()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Yield what runs scripts as forks of one process that has imported torch: a test's script starts in no time."""
    pytest.importorskip("torch")
    from tests.forked_scripts import Forks  # it imports torch, which most tests do without

    made = Forks()
    yield made
    made.close()


@pytest.fixture(scope="session")
def captures() -> Path:
    """Return the folder of captures that are too large for the repository; tests that need them skip without it."""
    if not CAPTURES.is_dir():
        pytest.skip(f"the large captures are not here ({CAPTURES}); set PROFKIT_CAPTURES")
    return CAPTURES


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two steps of forward and backward, the latter on an autograd thread."""
    gemm = "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_ffma_execute_kernel__5x_cublas"
    add = (
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>,"
        " std::array<char *, (unsigned long)3>>(int, T2, T3)"
    )
    builder = NsysBuilder()
    builder.name_thread("pt_autograd_0", 101)
    for step in range(2):
        base = 200_000 * step
        builder.ranges((f"step {step}", base, base + 190_000), ("forward", base + 1000, base + 50_000))
        builder.kernel(base + 2000, 3000, name=gemm, start=base + 3000)
        builder.range("backward", base + 60_000, base + 140_000)
        builder.kernel(base + 61_000, 1250, name=add, start=base + 62_000)
        for launch in (70_000, 80_000):
            builder.kernel(base + launch, 2500, name=gemm, tid=101, start=base + launch + 1000)
    return builder.write(tmp_path_factory.mktemp("trace") / "t.sqlite")


@pytest.fixture(scope="session")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a capture with two GPUs, a warm-up, and a range in a domain of its own."""
    builder = NsysBuilder()
    builder.domain(3, "NCCL")
    builder.ranges(("Warmup", 0, 900), ("forward", 100, 500))
    builder.kernel(200, 50, device=0)
    builder.range("forward", 1000, 1500)
    builder.kernel(1100, 70, device=0)
    builder.kernel(1200, 30, device=1, name="all_reduce")
    builder.range("all_reduce", 1190, 1300, domain=3)
    return builder.write(tmp_path_factory.mktemp("two") / "t.sqlite")


@pytest.fixture
def oddly_named(tmp_path: Path) -> Path:
    """Return a capture whose names hold a formula, an escape sequence, line breaks and Chinese."""
    builder = NsysBuilder(("forward\x1b[2J\nx", 0, 100))
    for name in ("$x$ \\frac{", "k\x1b[31m<float>\nrm -rf", "注意力", "_private"):
        builder.kernel(10, 5, name=name)
    return builder.write(tmp_path / "odd.sqlite")


_REHEARSED = mock.patch.object(unpickler, "_REHEARSED_BYTES", unpickler._REHEARSED_BYTES)


@pytest.fixture(scope="session", autouse=True)
def no_rehearsal() -> Iterator[None]:
    """Read each snapshot once: the child that reads it first is a fork, which of a process as large as this is slow."""
    with mock.patch.object(unpickler, "_REHEARSED_BYTES", -1):
        yield


@pytest.fixture(scope="module")
def rehearsal(no_rehearsal: None) -> Iterator[None]:
    """Read snapshots as profkit does, for tests of those that are made to harm."""
    with _REHEARSED:
        yield


ANALYZERS = (
    *("export", "kernels", "ranges", "efficiency", "memory", "compare", "check", "scrub", "help"),
    *("summary", "ranks", "whatif", "report", "doctor"),
)
"""Commands that read files, print and end: they need no process of their own."""


@pytest.fixture(scope="module")
def read_once() -> Iterator[None]:
    """Whoever opens a capture again gets what was read and found of it first, which nothing changes."""
    with (
        mock.patch("profkit.reading.read_trace_file", _READ["trace"]),
        mock.patch("profkit.snapshot.reader.read_snapshot", _READ["snapshot"]),
        mock.patch("profkit.reading._open_trace", _OPENED["trace"]),
        mock.patch("profkit.reading._open_snapshot", _OPENED["snapshot"]),
        mock.patch("profkit.analysis.causes.advice._find_tries", _found_tries),
    ):
        yield


_REMEMBERED = 32
"""As many captures as there are in ``traces/`` and beside it: several files of tests go through all of them."""


def _remember(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    @lru_cache(maxsize=_REMEMBERED)
    def read_file(path: Path, changed_ns: int, size: int) -> Any:
        return read(path)

    def read_or_remember(path: Path) -> Any:
        if not path.is_file() or path.suffix == ".nsys-rep":
            return read(path)
        state = path.stat()
        return replace(read_file(path.resolve(), state.st_mtime_ns, state.st_size), path=str(path))

    return read_or_remember


def _reopen(open_anew: Callable[..., Any]) -> Callable[..., Any]:
    opened: dict[Any, Any] = {}

    def open_or_remember(path: Path, run: Run | None, **how: Any) -> Any:
        files = [path, *([] if run is None else run.path.iterdir())]
        if not all(map(os.path.exists, files)) or path.suffix == ".nsys-rep":
            return open_anew(path, run, **how)
        state = frozenset((file.resolve(), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
        return _look_up(opened, (str(path), state, str(how)), lambda: open_anew(path, run, **how))

    return open_or_remember


def _look_up(known: dict[Any, Any], key: Any, find: Callable[[], Any]) -> Any:
    if key not in known:
        found = find()
        if len(known) >= _REMEMBERED:
            del known[next(iter(known))]
        known[key] = found
    return known[key]


_READ = {"trace": _remember(reading.read_trace_file), "snapshot": _remember(reader.read_snapshot)}
_OPENED = {"trace": _reopen(reading._open_trace), "snapshot": _reopen(reading._open_snapshot)}
_TRIES: dict[Any, Any] = {}
_find_tries = advice._find_tries


def _found_tries(capture: OpenedCapture, summary: Summary) -> AdviceResult:
    # What was opened is kept with them, so that no other object gets its number.
    key = (str(capture.path), id(capture.trace), id(capture.snapshot))
    known, _, found = _look_up(_TRIES, key, lambda: (summary, capture, _find_tries(capture, summary)))
    return found if known == summary else _find_tries(capture, summary)  # type: ignore[no-any-return]


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the files of several ranks in this process: a worker takes half a second to begin."""
    monkeypatch.setattr("profkit.joining.os.sched_getaffinity", lambda _process: {0})


@pytest.fixture
def nvtx_events(monkeypatch: pytest.MonkeyPatch) -> list[NvtxEvent]:
    """NVTX replaced by a list of what was pushed and popped."""
    events: list[NvtxEvent] = []

    class Marker:
        def __init__(self, message: str, payload: int | None = None) -> None:
            self.message, self.payload = message, payload

        def __enter__(self) -> None:
            events.append(("push", self.message, self.payload))

        def __exit__(self, *exc: object) -> None:
            events.append(("pop", self.message))

    # Decorators made their markers when their modules were imported: the class is replaced that makes them anew.
    monkeypatch.setattr(annotation.nvtx, "annotate", Marker)
    return events


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved, as Matplotlib has them."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **named: Any) -> None:
        saved.append(figure)
        save(figure, *arguments, **named)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


@pytest.fixture(scope="session")
def profkit() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command line: in this process if possible, which takes a tenth of the time."""

    def run(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        argv = [str(argument) for argument in arguments]
        if argv and argv[0] in ANALYZERS and options.keys() <= {"env", "cwd"}:
            with chdir(options.get("cwd", ".")):  # type: ignore[arg-type]
                return call_main(argv, options.get("env"))  # type: ignore[arg-type]
        command = [sys.executable, "-m", "profkit", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)  # type: ignore[call-overload, no-any-return]

    return run


def call_main(argv: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Call the command line in this process; the result is what a process of its own would have left."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with (
        redirect_stdout(streams[0]),
        redirect_stderr(streams[1]),
        mock.patch.dict(os.environ, env or {}, clear=env is not None),
        pytest.raises(SystemExit) as caught,
    ):
        main(argv)
    code = caught.value.code
    out, err = (stream.buffer.getvalue().decode().replace("\r\n", "\n") for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(argv, code if isinstance(code, int) else int(code is not None), out, err)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium; `tests.browser.open_page` opens a page in it, without a network."""
    pytest.importorskip("playwright.sync_api")
    with start_browser() as chromium:
        yield chromium
