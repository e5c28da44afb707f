"""One run from start to end: the directory, the passes over the target, the manifest."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, time
from typing import Any

from profkit.errors import RunError, ToolError
from profkit.files import PARTIAL, clear_partial_files, user_cache
from profkit.launch.gpu_state import Gpu, read_gpus, warn_of_gpus
from profkit.launch.manifest import begin_manifest, utc_now, warn_of_run, with_outcome
from profkit.launch.nsys import Nsys, NsysSession, clear_unexported, lost_events, open_log, open_session
from profkit.launch.passes import (
    AnotherTry,
    Outcome,
    Pass,
    Target,
    are_left_out,
    find_another_try,
    shortfalls,
    why_no_process,
    why_no_step,
    why_not_twice,
    why_nothing,
)
from profkit.launch.processes import Stopped, run_child, uninterrupted
from profkit.run.compiled_code import KNOWN_CODE, read_compiled_code
from profkit.run.directory import (
    COMPILED,
    KINETO_TRACE,
    MANIFEST,
    NSYS_REPORT,
    WORK,
    Run,
    make_run_directory,
    name_of_rank,
)
from profkit.run.job import find_job
from profkit.run.manifest import Manifest, Process, write_manifest
from profkit.run.range_log import finish_traces
from profkit.run.recording import VARIABLE, Order, has_recorded, take_attached, take_failures, take_processes

Progress = Callable[[str], AbstractContextManager[object]]
Say = Callable[[str], None]

_CHILD = Path(__file__).parent.parent / "capture" / "child"
_STDIN = 0
_INTERRUPTED = 130
_TOO_LONG_S = 600
"""A command that took longer is not run again unasked."""
_CAPTURES = ("trace.*", "snapshot.*")
_COMPILED = COMPILED.replace(".", "*.")

_FOLLOWS_COMPILED_CODE = ("kineto", "nsys", "memory")
_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_MOST_CACHED_BYTES = 5 * 2**30
_IN_USE_S = 24 * 3600
"""A cache of which a file was read or written since may be a running program's."""

_DOING = {
    "memory": "recording the allocator",
    "oom": "watching for allocations that fail",
    "none": "timing the steps without a profiler",
    "kineto": "recording the steps with torch.profiler",
    "nsys": "recording the steps with Nsight Systems",
}
_EXPORTING = "exporting what Nsight Systems recorded"


@dataclass(frozen=True)
class Recorded:
    """A finished run: its directory, how its last pass ended, and what was recorded.

    ``reason`` says why the last pass recorded nothing, None if it did record. ``has_kernels`` is False where the
    recorder sees none: Nsight Systems without CUDA.
    """

    run: Path
    outcome: Outcome
    reason: str | None = None
    has_trace: bool = False
    has_kernels: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        return self.outcome.exit_status

    @property
    def has_snapshot(self) -> bool:
        return bool(Run(self.run).snapshots)

    @property
    def process(self) -> Process:
        """The process of the last pass that counts: the first rank's; an empty record if none left word."""
        return next(iter(self.outcome.processes), Process())


def require_torch() -> None:
    """Raise `ToolError` unless torch is installed; it is not imported."""
    if find_spec("torch") is None:
        raise ToolError("torch is not installed here: pip install 'profkit[cpu]', or the CUDA build for your driver")


def record_run(
    target: Target,
    nsys: Nsys | None,
    output: Path | None,
    *,
    command: list[str],
    progress: Progress,
    say: Say,
    secret_names: tuple[str, ...] = (),
) -> Recorded:
    """Make the target's passes, in their order, into a new run directory, as long as all goes well.

    A command reads our standard input each time: a file from the same place, a pipe only once. However it ends, what
    was recorded by then is kept, and the manifest says how it ended: ``incomplete`` until the end, then ``complete``,
    or ``failed`` with the target's exit status and the reason.

    Args:
        command: profkit's own command line, for the manifest.
        progress: makes a context manager that shows what is being done.
        secret_names: options with such names have their values left out of the manifest.

    Raises:
        RunError: the directory cannot be made.
        ToolError: nsys or its importer failed.
    """
    job = find_job(os.environ, target.argv)
    run = make_run_directory(output, target.name, job)
    manifest = replace(begin_manifest(target, nsys, command, secret_names), job=job)
    _keep_manifest(run, manifest, is_first=True)
    gpus_before = read_gpus()
    recording = _Recording(target, nsys, run, manifest, progress, say)
    try:
        recording.make_passes()
    except BaseException as error:
        take_failures(run)
        with uninterrupted(), suppress(RunError):  # on a full disk what went wrong first is what a person must know
            finish_traces(run)
        # What was recorded before stays: an interrupted script may have been through its recorded steps for hours.
        _give_up(run, replace(recording.manifest, processes=take_processes(run)), error)
        raise
    return recording.conclude(gpus_before, read_gpus())


def build_environment(environment: Mapping[str, str], order: Order) -> dict[str, str]:
    """Return an environment in which every Python process attaches profkit once it has imported torch."""
    paths = [str(_CHILD), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: order.to_json()}


def own_compiler_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which Inductor uses a cache of profkit's own, where a person has not chosen one.

    Code from a cache that was filled without profkit says nothing of its modules.
    """
    if _COMPILER_CACHE in environment:
        return {}
    folder = user_cache(KNOWN_CODE, "inductor")
    with suppress(OSError):
        if _is_outgrown(folder):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
    return {_COMPILER_CACHE: str(folder)} if os.access(folder, os.W_OK | os.X_OK) else {}


def _is_outgrown(folder: Path) -> bool:
    """A cache is removed as a whole or not at all: Inductor's entries name one another."""
    files = [path.lstat() for path in folder.rglob("*") if path.is_file()]
    last_used_s = max((max(file.st_atime, file.st_mtime) for file in files), default=0)
    return sum(file.st_size for file in files) > _MOST_CACHED_BYTES and time() - last_used_s > _IN_USE_S


_GPU_FILES = ("nvidia[0-9]*", "nvhost-gpu", "dxg")
"""What there is in /dev with an NVIDIA GPU: of a card, of a Jetson, in Windows' Linux."""


def may_use_cuda(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether a process would find an NVIDIA GPU here; the launcher itself never loads torch."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    return not hidden and any(any(root.glob(f"dev/{name}")) for name in _GPU_FILES)


def _input_position() -> int | None:
    try:
        return os.lseek(_STDIN, 0, os.SEEK_CUR)
    except OSError:
        return None


@dataclass
class _Recording:
    target: Target
    nsys: Nsys | None
    run: Path
    manifest: Manifest
    progress: Progress
    say: Say
    _input_start: int | None = field(default_factory=_input_position)
    _done: list[Outcome] = field(default_factory=list)
    _made_anew: list[Outcome] = field(default_factory=list)
    _took_s: float = 0.0
    _compiled_before: dict[Path, int] = field(default_factory=dict)

    def make_passes(self) -> None:
        passes, tried = list(self.target.passes), None
        while passes:
            last = passes.pop(0)
            outcome = self._make_pass(last)
            self.manifest = with_outcome(self.manifest, outcome)
            if tried is not None and outcome.exit_status != 0:
                self._say(tried.why_failed)
            again = self._another_try()
            if again is not None:
                tried = again
                left = (*([last] if self._makes_anew else []), *passes)
                passes = [replace(each, order=replace(each.order, **again.changed)) for each in left]
                if passes:
                    self._say(again.why)
                    self.manifest = replace(self.manifest, workload=replace(self.manifest.workload, **again.changed))
            elif not outcome.may_go_on:
                break

    def _say(self, line: str) -> None:
        self.say(f"{self.target.name}: {line}")

    def conclude(self, gpus_before: Sequence[Gpu], gpus_after: Sequence[Gpu]) -> Recorded:
        last = self._done[-1]
        has_failed = last.exit_status != 0
        counted = [outcome for outcome in self._done if all(outcome is not other for other in self._made_anew)]
        reason = last.reason
        if has_failed:
            reason = last.failed_ranks or next((failure.error for failure in last.failures), reason)
        elif reason is None and len(counted) < len(self.target.passes):
            reason = why_no_step(last.processes, last.order)
        disturbed = warn_of_gpus(gpus_before, gpus_after, last.processes)
        warnings = (*self._what_lacks(counted), *disturbed, *self._doubts())
        manifest = replace(self.manifest, warnings=warnings)
        if reason is not None or has_failed:
            why = reason or f"exit status {last.exit_status}"
            _mark_failed(self.run, replace(manifest, status="failed", reason=why))
        else:
            _keep_manifest(self.run, replace(manifest, status="complete"))
        has_trace = last.order.recorder in ("kineto", "nsys") and last.reason is None and bool(Run(self.run).traces)
        has_kernels = has_trace and (self.nsys is None or last.processes[0].device == "cuda")
        return Recorded(self.run, last, reason, has_trace=has_trace, has_kernels=has_kernels, warnings=warnings)

    def _what_lacks(self, counted: Sequence[Outcome]) -> list[str]:
        last = self._done[-1]
        # Of a job's runs, many hold light records alone where --ranks chooses some ranks.
        is_alone = self.manifest.job is None
        judged = [outcome for outcome in counted if is_alone or not are_left_out(outcome.processes)]
        missing = [text for outcome in judged for text in shortfalls(outcome, is_last=outcome is last)]
        return [*lost_events(self.run), *missing]

    def _doubts(self) -> list[str]:
        knows_compilations = False
        with suppress(RunError):  # a full disk may have left half a line
            knows_compilations = bool(read_compiled_code(self.run / COMPILED).compilations)
        return warn_of_run(self.manifest, knows_compilations=knows_compilations)

    def _make_pass(self, planned: Pass) -> Outcome:
        if self._done and self.target.reads_input and self._input_start is not None:
            os.lseek(_STDIN, self._input_start, os.SEEK_SET)
        order = replace(planned.order, run=str(self.run.resolve()))
        words = list(planned.argv)
        caches = own_compiler_cache(os.environ) if order.recorder in _FOLLOWS_COMPILED_CODE else {}
        environment = build_environment({**os.environ, **caches}, order)
        self._compiled_before = {path: path.stat().st_size for path in self.run.glob(_COMPILED)}
        began = monotonic()
        if order.recorder == "nsys" and self.nsys is not None:
            status = self._run_in_nsys(words, environment, self.nsys)
        else:
            with self._shown(_DOING[order.recorder]):
                status = run_child(words, environment, reads_input=self.target.reads_input)
        self._took_s = monotonic() - began
        refused = finish_traces(self.run)
        processes = tuple(_with_refusal(process, refused) for process in take_processes(self.run))
        reason = why_nothing(self.run, processes, order)
        attached = take_attached(self.run)
        if reason is not None and not processes:
            reason = why_no_process(self.run, attached, status) or reason
        outcome = Outcome(order, status, processes, take_failures(self.run), reason)
        self._done.append(outcome)
        return outcome

    def _run_in_nsys(self, words: list[str], environment: Mapping[str, str], nsys: Nsys) -> int:
        run = self.run
        with (
            open_log(run) as log,
            open_session(nsys, run / NSYS_REPORT, log, uses_cuda=self._uses_cuda()) as session,
        ):
            try:
                with self._shown(_DOING["nsys"]):
                    status = session.start(words, environment, reads_input=self.target.reads_input)
            except KeyboardInterrupt:
                # The target has ended, and nsys with it: it may have been through its recorded steps for hours.
                with uninterrupted(), suppress(ToolError):
                    self._collect(session)
                raise
            self._collect(session)
        return status

    def _collect(self, session: NsysSession) -> None:
        if has_recorded(self.run):
            with self.progress(_EXPORTING):
                session.collect()

    def _shown(self, doing: str) -> AbstractContextManager[object]:
        """Show what is done, unless the target may read from the terminal meanwhile."""
        return nullcontext() if self.target.reads_input else self.progress(doing)

    def _another_try(self) -> AnotherTry | None:
        """Return how to make the last pass anew, having removed what it recorded; None if that is not done."""
        last = self._done[-1]
        again = find_another_try(last)
        has_tried = any(outcome.order.recorder == last.order.recorder for outcome in self._done[:-1])
        reads_pipe = self._input_start is None and not os.isatty(_STDIN)
        if again is None or has_tried or reads_pipe or self._took_s > _TOO_LONG_S:
            return None
        if self._makes_anew:
            against: str | None = "the job's other machines do not run it again"
            if self.manifest.job is None:
                against = why_not_twice(self.target.argv, self.run / MANIFEST, self.run)
            if against is not None:
                self._decline(again.why_not(against))
                return None
            self._clear_last()
        return again

    @property
    def _makes_anew(self) -> bool:
        """The allocator was recorded up to the script's end: what it lacks another run lacks too."""
        return self._done[-1].order.recorder != "memory"

    def _decline(self, why: str) -> None:
        """Have the run end with ``why`` it is not made anew; if the last pass recorded something, say it now."""
        last = self._done[-1]
        if last.reason is None:
            self._say(why)
        else:
            self._done[-1] = replace(last, reason=f"nothing was recorded: {why}")

    def _clear_last(self) -> None:
        self._made_anew.append(self._done[-1])
        for path in [*self.run.glob("trace.*"), *self.run.glob(WORK)]:
            path.unlink()
        for path in self.run.glob(_COMPILED):
            os.truncate(path, self._compiled_before.get(path, 0))

    def _uses_cuda(self) -> bool:
        shown = [outcome.processes[0].device for outcome in self._done if outcome.processes]
        return shown[0] == "cuda" if shown else may_use_cuda(os.environ)


def _with_refusal(process: Process, refused: Mapping[str, str]) -> Process:
    why = refused.get(name_of_rank(KINETO_TRACE, process.rank or 0))
    return process if why is None else replace(process, failure=f"torch.profiler's trace was refused: {why}")


def _give_up(run: Path, manifest: Manifest, error: BaseException) -> None:
    interrupted = isinstance(error, KeyboardInterrupt | Stopped)
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    manifest = replace(manifest, status="failed", reason=reason, finished_utc=utc_now())
    with uninterrupted():
        if interrupted:
            status: Any = _INTERRUPTED
            if isinstance(error, Stopped):
                status = error.code
                reason = f"ended by {signal.Signals(error.number).name}"
                error.add_note(reason)
            manifest = replace(manifest, exit_status=status, reason=reason)
            clear_unexported(run)
        _mark_failed(run, manifest)
    if interrupted:
        kept = ", ".join(sorted(path.name for pattern in _CAPTURES for path in run.glob(pattern)))
        error.add_note(f"{run} is marked failed and keeps {kept or 'no capture'}")


def _mark_failed(run: Path, manifest: Manifest) -> None:
    for partial in run.glob(f"{PARTIAL}*"):
        partial.unlink()
    clear_partial_files(run)
    # On a full disk the manifest stays what it was, `incomplete`: what went wrong first is what a person must know.
    with suppress(RunError):
        _keep_manifest(run, manifest)


def _keep_manifest(run: Path, manifest: Manifest, *, is_first: bool = False) -> None:
    try:
        write_manifest(run / MANIFEST, manifest, is_first=is_first)
    except FileExistsError:
        raise RunError(f"{run}: another run that began at the same time has it; name a new directory with -o") from None
    except OSError as error:
        raise RunError(
            f"{run / MANIFEST}: {error.strerror}; free some space, or name another directory with -o"
        ) from None
