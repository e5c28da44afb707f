"""What torch.compile does while a script runs: when it compiles, why again, how long, and where graphs break.

Read from Dynamo's own records (``CompilationMetrics``, ``graph_break_reasons``), which it keeps whatever its settings:
no setting is changed and nothing is logged. They are looked at where a step ends and where a compilation begins or
ends; Dynamo keeps the last 64 compilations, so that none is missed. While steps are recorded a range lies around each
compilation, and around each choice among configurations of a Triton kernel.

What torch gives: from 2.4 on compilations with their times, failures and graph breaks; the reason of a compilation
that was made again since 2.7. Where a record is missing, its field is None.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, get_ident
from types import FrameType
from typing import Any, Literal

import torch
from torch._guards import CompileContext

from profkit.annotation import Range
from profkit.capture import describe_error, say
from profkit.capture.patches import Function, is_patched, outside_dynamo, patch
from profkit.names import COMPILING
from profkit.run.compiled_code import Compilation, GraphBreak, append_records

_DYNAMO = "torch._dynamo"
_AUTOTUNING = "torch._inductor.runtime.triton_heuristics.CachingAutotuner.autotune_to_one_config"
_EXPLANATION = "  Explanation: "
_HINT = "  Hint: "
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
"""The rest of a function after a graph break."""
_NS_PER_US = 1000
_NS_PER_S = 10**9


class CompilationRecorder:
    """Writes what torch.compile does to a run's file. A failure ends that with a line, and never the script."""

    def __init__(self, path: Path, is_recording: Callable[[], bool]) -> None:
        self._path = path
        self._is_recording = is_recording
        self._step: tuple[int | None, bool] = (None, False)
        self._last: Any = None
        self._breaks_seen = 0
        self._count = 0
        self._lines: dict[str, str] = {}
        self._open: dict[int, list[Range]] = {}
        self._lock = Lock()
        self._has_failed = False

    def step_begins(self, number: int | None, *, is_recorded: bool) -> None:
        """Note what was compiled in the step before; what follows is of step ``number``."""
        self.look()
        self._step = (number, is_recorded)
        self._watch()

    def recording_ends(self) -> None:
        """Note what was compiled in the last recorded step; what follows is in no step of the trace."""
        self.look()
        self._step = (self._step[0], False)

    def stop(self) -> None:
        handler = _callback_handler()
        with suppress(ValueError, AttributeError):  # `torch._dynamo.reset` has forgotten them
            handler.remove_start_callback(self._begins)
            handler.remove_end_callback(self._ends)

    def look(self) -> None:
        if not self._has_failed and _DYNAMO in sys.modules:
            outside_dynamo(self._look)

    def _look(self) -> None:
        try:
            with self._lock:
                records: list[Compilation | GraphBreak] = [*self._new_breaks(), *self._new_compilations()]
            if records:
                append_records(self._path, records)
        except Exception as error:
            self._has_failed = True
            say(f"what torch.compile does is not recorded from here on ({describe_error(error)})")

    def _watch(self) -> None:
        """Open a range around each compilation from now on; `torch._dynamo.reset` forgets who asked for that."""
        handler = _callback_handler()
        with suppress(Exception):
            if handler is not None and self._begins not in handler.start_callbacks:
                handler.register_start_callback(self._begins)
                handler.register_end_callback(self._ends)
            self._watch_autotuning()

    def _watch_autotuning(self) -> None:
        def wrap(plain: Function) -> Function:
            def choosing(tuner: Any, *args: Any, **kwargs: Any) -> Any:
                kernel = getattr(getattr(tuner, "fn", None), "__name__", None) or "a Triton kernel"
                self._open_range(f"{COMPILING}: choosing among configurations of {kernel}")
                try:
                    return plain(tuner, *args, **kwargs)
                finally:
                    self._close_range()

            return choosing

        if not is_patched(_AUTOTUNING):
            patch(_AUTOTUNING, wrap, stays=True)

    def _begins(self, *given: Any) -> None:
        self.look()
        # A CUDA graph is recorded by running what was compiled before.
        if self._is_recording() and "CUDAGRAPH" not in str(getattr(next(iter(given), None), "callback_trigger", "")):
            self._open_range(_describe_running(sys._getframe()))

    def _ends(self, *_: Any) -> None:
        self._close_range()
        self.look()

    def _open_range(self, name: str) -> None:
        if not self._is_recording() or self._has_failed:
            return
        with suppress(Exception):
            # Not `annotate`, which does nothing while Dynamo works.
            opened = Range(name, None)
            opened.__enter__()
            self._open.setdefault(get_ident(), []).append(opened)

    def _close_range(self) -> None:
        with suppress(Exception):
            stack = self._open.get(get_ident())
            if stack:
                stack.pop().__exit__(None, None, None)

    def _new_compilations(self) -> list[Compilation]:
        get = getattr(sys.modules.get(f"{_DYNAMO}.utils"), "get_compilation_metrics", None)
        records: list[Any] = [] if get is None else list(get())
        new: list[Any] = []
        for record in reversed(records):
            if record is self._last:
                break
            new.append(record)
        self._last = records[-1] if records else self._last
        return [self._compilation(record) for record in reversed(new)]

    def _compilation(self, record: Any) -> Compilation:
        def known(name: str) -> Any:
            return getattr(record, name, None)

        compile_id = _text(known("compile_id"))
        what: Literal["forward", "backward", "at run time"] = "forward"
        if known("is_runtime"):
            what = "at run time"
        elif known("is_forward") is False or type(record).__name__.startswith("Bwd"):
            what = "backward"
        line = failed = None
        if known("co_filename"):
            line = program_line(known("co_filename"), known("co_firstlineno"), known("co_name"))
        function = (compile_id or "").partition("/")[0].rpartition("!")[2]
        if line is not None:
            self._lines[function] = line
        elif what == "forward":  # beyond the limit Dynamo says only which function it was
            line = self._lines.get(function)
        if known("fail_user_frame_filename"):
            failed = program_line(known("fail_user_frame_filename"), known("fail_user_frame_lineno"), None)
        failure = _text(known("fail_reason")) or _text(known("fail_type"))
        attempt = (compile_id or "").partition("/")[2].partition("_")[0]
        is_again = attempt not in ("", "0") if compile_id is not None else bool(known("cache_size"))
        return Compilation(
            id=self._next_id(),
            pid=os.getpid(),
            what=what,
            line=line,
            step=self._step[0],
            is_recorded=self._step[1],
            is_again=is_again,
            duration_ns=_duration_ns(record),
            reason=_reason(_text(known("recompile_reason"))),
            failure=None if failure is None else failure.splitlines()[0],
            failed_line=failed,
            cudagraphs_skipped=_text(known("cudagraph_skip_reason")),
        )

    def _new_breaks(self) -> list[GraphBreak]:
        reasons: Sequence[Any] = getattr(sys.modules.get(f"{_DYNAMO}.utils"), "graph_break_reasons", ())
        if len(reasons) < self._breaks_seen:  # torch._dynamo.reset
            self._breaks_seen = 0
        new = list(reasons[self._breaks_seen :])
        self._breaks_seen += len(new)
        places: dict[tuple[str, tuple[str, ...]], GraphBreak] = {}
        for break_ in new:
            lines = tuple(program_line(at.filename, at.lineno, at.name) for at in reversed(break_.user_stack))
            text = str(break_.reason).strip() or "unknown"
            reason = text.splitlines()[0]
            # Dynamo begins a function anew after each break, and meets those before it again.
            if (reason, lines) not in places:
                places[reason, lines] = GraphBreak(
                    id=self._next_id(),
                    pid=os.getpid(),
                    reason=reason,
                    explanation=_part(text, _EXPLANATION),
                    hint=_part(text, _HINT),
                    lines=lines,
                    step=self._step[0],
                    is_recorded=self._step[1],
                )
        return list(places.values())

    def _next_id(self) -> str:
        self._count += 1
        return f"{os.getpid()}-{self._count}"


def program_line(file: str, line: int | str | None, function: str | None) -> str:
    """Return ``file:line function``, the file as it lies below the working directory, else by its own name."""
    with suppress(OSError):
        file = file.removeprefix(f"{Path.cwd()}/")
    if file.startswith("/"):
        file = file.rpartition("-packages/")[2] if "-packages/" in file else Path(file).name
    resumed = _RESUMED.fullmatch(function or "")
    function = resumed[1] if resumed else function
    return f"{file}:{line}" + (f" {function}" if function else "")


def _describe_running(frame: FrameType | None) -> str:
    while frame is not None:
        if frame.f_globals.get("__name__") == f"{_DYNAMO}.convert_frame" and "code" in frame.f_locals:
            code = frame.f_locals["code"]
            resumed = _RESUMED.fullmatch(code.co_name)
            name = resumed[1] if resumed else code.co_qualname
            return f"{COMPILING} {name.rpartition('<locals>.')[2]}"
        frame = frame.f_back
    return f"{COMPILING} backward"


def _duration_ns(record: Any) -> int | None:
    start, end = (getattr(record, name, None) for name in ("start_time_us", "end_time_us"))
    if start and end:
        return int(end - start) * _NS_PER_US
    seconds = getattr(record, "entire_frame_compile_time_s", None)
    if seconds is None:  # torch before 2.6 says of a backward pass what Inductor took
        seconds = getattr(record, "inductor_compile_time_s", None)
    return None if seconds is None else int(seconds * _NS_PER_S)


def _callback_handler() -> Any:
    return getattr(sys.modules.get(f"{_DYNAMO}.callback"), "callback_handler", None)


def _reason(text: str | None) -> str | None:
    if text is None or text.startswith("Unable to find"):
        return None
    first = text.strip().splitlines()[0]
    head, colon, rest = first.partition(": ")
    return rest if colon and head.replace("/", "").isdigit() else first


def _part(text: str, head: str) -> str | None:
    return next((line.removeprefix(head).strip() for line in text.splitlines() if line.startswith(head)), None)


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def is_compiling() -> bool:
    """Return whether Dynamo traces on this thread, or what it made is being compiled: that takes gradients of fakes."""
    return torch.compiler.is_compiling() or CompileContext.try_get() is not None
