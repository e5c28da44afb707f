"""One run from start to end: the directory, the passes over the target, the manifest."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from profkit.errors import RunError, ToolError
from profkit.files import clear_partial_files
from profkit.launch.another_try import AnotherTry, find_another_try, own_cache_folder, why_not_twice
from profkit.launch.gpu_state import GpuWatch
from profkit.launch.manifest import begin_manifest, utc_now, warn_of_run, with_outcome
from profkit.launch.nsys import Nsys
from profkit.launch.nsys_session import RAW_SUFFIX, RECORDING, lost_events, record_in_nsys, run_ranks_in_nsys
from profkit.launch.passes import (
    LOSSES,
    Outcome,
    OutOfMemory,
    Pass,
    Target,
    are_left_out,
    shortfalls,
    why_no_process,
    why_no_step,
    why_nothing,
)
from profkit.launch.processes import Stopped, run_child, uninterrupted
from profkit.run.compiled_code import read_compiled_code
from profkit.run.directory import COMPILED, MANIFEST, NSYS_EXPORT, NSYS_REPORT, WORK, Run, make_run_directory
from profkit.run.job import find_job
from profkit.run.manifest import Manifest, RangesLeftOut, write_manifest
from profkit.run.recording import (
    PARTIAL,
    VARIABLE,
    Failure,
    Order,
    take_attached,
    take_failures,
    take_processes,
    take_refused,
)
from profkit.run.records import decode, read_json

Progress = Callable[[str], AbstractContextManager[object]]

_CHILD = Path(__file__).parent.parent / "capture" / "child"
_STDIN = 0
_INTERRUPTED = 130
_TOO_LONG_S = 600
"""A command that took longer is not run again unasked."""
_MOST_RANKS_NAMED = 4
_CAPTURES = ("trace.*", "snapshot.*")
_OF_MEMORY = ("snapshot*.pickle", "ledger*.jsonl")
_COMPILED = COMPILED.replace(".", "*.")

_DOING = {
    "memory": "recording the allocator",
    "oom": "watching for allocations that fail",
    "none": "timing the steps without a profiler",
    "kineto": "recording the steps with torch.profiler",
    "nsys": RECORDING,
}


@dataclass(frozen=True)
class Recorded:
    """A finished run: its directory, the target's exit status, and what was recorded.

    ``reason`` says why the last pass recorded nothing, None if it did record. ``has_kernels`` is False where the
    recorder sees none: Nsight Systems without CUDA. ``out_of_memory``: allocations that failed in the last pass.
    ``complete_steps`` is how many steps the trace holds whole. ``failed_ranks`` says what ended the first rank that
    failed and which others failed then; empty if none did or there are no ranks.
    """

    run: Path
    exit_status: int
    reason: str | None = None
    has_trace: bool = False
    has_kernels: bool = False
    has_snapshot: bool = False
    out_of_memory: OutOfMemory | None = None
    complete_steps: int = 0
    failed_ranks: str = ""
    step: str | None = None
    """What a step is, in the words of ``--step-on``, where profkit found it out."""
    step_names: tuple[str, ...] = ()
    left_out: RangesLeftOut | None = None
    warnings: tuple[str, ...] = ()


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
    say: Callable[[str], None],
    secret_names: tuple[str, ...] = (),
) -> Recorded:
    """Make the target's passes, in their order, into a new run directory, as long as all goes well.

    A command reads our standard input each time: a file from the same place, a pipe only once. However it ends, what
    was recorded by then is kept, and the manifest says how it ended: ``incomplete`` until the end, then ``complete``,
    or ``failed`` with the target's exit status and the reason.

    Args:
        command: profkit's own command line, for the manifest.
        progress: makes a context manager that shows what is being done.
        say: shows a line between two passes.
        secret_names: options with such names have their values left out of the manifest.

    Raises:
        RunError: the directory cannot be made.
        ToolError: nsys or its importer failed.
    """
    job = find_job(os.environ, target.argv)
    run = make_run_directory(output, target.name, job)
    manifest = replace(begin_manifest(target, nsys, command, secret_names), job=job)
    _keep_manifest(run, manifest, is_first=True)
    conditions, input_start = GpuWatch(os.environ), _input_position()
    reads_once = input_start is None and not os.isatty(_STDIN)
    recording = _Recording(run, target, nsys, progress, is_alone=job is None, reads_once=reads_once)
    try:
        passes, tried = list(target.passes), None
        while passes:
            if recording.done and target.reads_input and input_start is not None:
                os.lseek(_STDIN, input_start, os.SEEK_SET)
            one = passes.pop(0)
            outcome = recording.make_pass(one)
            manifest = with_outcome(manifest, outcome)
            if tried is not None and outcome.exit_status != 0:
                say(f"{target.name}: {tried.why_failed}")
            again = recording.another_try()
            against = None if again is None else recording.why_not(again)
            if again is not None and against is not None:
                recording.decline(again.why_not(against), say)
                again = None
            if again is not None:
                recording.clear(again)
                tried = again
                passes = [again.adjust(each) for each in (*([one] if recording.makes_anew(again) else []), *passes)]
            elif not outcome.may_go_on:
                break
            if again is not None and passes:
                say(f"{target.name}: {again.why}")
                manifest = replace(manifest, workload=again.describe(manifest.workload))
    except BaseException as error:
        take_failures(run)
        # What was recorded before stays: an interrupted script may have been through its recorded steps for hours.
        _give_up(run, replace(manifest, processes=take_processes(run)), error)
        raise
    conditions.close()
    manifest = replace(manifest, gpus=conditions.gpus)
    return recording.conclude(manifest, conditions.warnings(recording.done[-1].processes))


def build_environment(environment: Mapping[str, str], order: Order) -> dict[str, str]:
    """Return an environment in which every Python process attaches profkit once it has imported torch."""
    paths = [str(_CHILD), *filter(None, [environment.get("PYTHONPATH")])]
    return {
        # torch would otherwise print lines of its own profiler's to standard error
        "KINETO_LOG_LEVEL": "99",
        **environment,
        "PYTHONPATH": os.pathsep.join(paths),
        VARIABLE: order.to_json(),
    }


def may_use_cuda(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether a process would find an NVIDIA GPU here; the launcher itself never loads torch."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    return not hidden and any(root.glob("dev/nvidia[0-9]*"))


class _Recording:
    """The passes over a target, into the run directory ``run``."""

    def __init__(
        self, run: Path, target: Target, nsys: Nsys | None, progress: Progress, *, is_alone: bool, reads_once: bool
    ) -> None:
        self._run = run
        self._target = target
        self._nsys = nsys
        self._progress = progress
        self._is_alone = is_alone
        self._reads_once = reads_once
        self.done: list[Outcome] = []
        self._made_anew: list[Outcome] = []
        self._took_s = 0.0
        self._has_own_caches = False
        self._may_not_compile = False
        self._compiled_before: dict[Path, int] = {}
        self._lost: list[str] = []
        """Which ranks' reports of the last pass could not be collected, and why."""

    def make_pass(self, one: Pass) -> Outcome:
        """Run the target once."""
        order = replace(one.order, run=str(self._run.resolve()))
        words = [word.replace("{run}", order.run) for word in one.argv]
        environment = build_environment({**os.environ, **one.environment}, order)
        self._has_own_caches = bool(one.environment)
        self._compiled_before = {path: path.stat().st_size for path in self._run.glob(_COMPILED)}
        began = monotonic()
        if order.recorder == "nsys" and self._nsys is not None and order.ranks is not None:
            status, self._lost = run_ranks_in_nsys(
                words, environment, self._nsys, uses_cuda=self._uses_cuda(), progress=self._progress
            )
        elif order.recorder == "nsys" and self._nsys is not None:
            status = record_in_nsys(
                self._run,
                words,
                environment,
                self._nsys,
                uses_cuda=self._uses_cuda(),
                reads_input=self._target.reads_input,
                progress=self._progress,
            )
        elif self._target.reads_input:
            status = run_child(words, environment, reads_input=True)
        else:
            with self._progress(_DOING[order.recorder]):
                status = run_child(words, environment)
        self._took_s = monotonic() - began
        processes = take_processes(self._run)
        reason = why_nothing(self._run, processes, order)
        attached, refused = take_attached(self._run), take_refused(self._run)
        if reason is not None and not processes:
            reason = why_no_process(*attached, status, refused) or reason
        outcome = Outcome(order, status, processes, take_failures(self._run), _take_losses(self._run), reason)
        self.done.append(outcome)
        return outcome

    def another_try(self) -> AnotherTry | None:
        """Return how to make the last pass anew; None if that is not worth it."""
        last = self.done[-1]
        own_cache = None if self._has_own_caches or self._may_not_compile else own_cache_folder()
        again = find_another_try(last, own_cache, self._took_s)
        earlier = [one for one in self.done[:-1] if one.order.recorder == last.order.recorder]
        # Too few steps are a reason that says what to change; the modules that a recording lacks give no reason.
        is_refused = self._why_not_by_itself() is not None and (again is None or not again.caches)
        return None if earlier or is_refused else again

    def _why_not_by_itself(self) -> str | None:
        if self._took_s > _TOO_LONG_S:
            return f"it took longer than {_TOO_LONG_S // 60} minutes"
        return "it reads a pipe" if self._reads_once else None

    def makes_anew(self, again: AnotherTry) -> bool:
        """Return whether the last pass is made anew, not only those that follow.

        The allocator was recorded up to the script's end: what it lacks another run lacks too, but for modules.
        """
        return bool(again.caches) or self.done[-1].order.recorder != "memory"

    def why_not(self, again: AnotherTry) -> str | None:
        """Return what speaks against the run that ``again`` would add, in a clause; None if nothing does."""
        if not self.makes_anew(again):
            return None
        if not self._is_alone:
            return "the job's other machines do not run it again"
        return self._why_not_by_itself() or why_not_twice(self._target.argv, self._run / MANIFEST, self._run)

    def decline(self, why: str, say: Callable[[str], None]) -> None:
        """Have the run end with ``why`` it is not made anew; if the last pass recorded something, say it now."""
        last, self._may_not_compile = self.done[-1], True
        if last.reason is None:
            say(f"{self._target.name}: {why}")
        else:
            self.done[-1] = replace(last, reason=f"nothing was recorded: {why}")

    def clear(self, again: AnotherTry) -> None:
        """Remove what the last pass recorded, if it is made anew."""
        if not self.makes_anew(again):
            return
        self._made_anew.append(self.done[-1])
        recorded = _OF_MEMORY if self.done[-1].order.recorder == "memory" else ("trace.*", WORK)
        for path in [path for pattern in recorded for path in self._run.glob(pattern)]:
            path.unlink()
        for path in self._run.glob(_COMPILED):
            os.truncate(path, self._compiled_before.get(path, 0))

    def conclude(self, manifest: Manifest, disturbed: list[str]) -> Recorded:
        """Write the last manifest and return what there is to say; ``disturbed`` is what happened to the GPUs."""
        last = self.done[-1]
        has_failed = last.exit_status != 0
        counted = [one for one in self.done if all(one is not other for other in self._made_anew)]
        reason = last.reason
        if reason is None and not has_failed and len(counted) < len(self._target.passes):
            reason = why_no_step(last.processes, last.order)
        if has_failed:
            reason = last.what_failed or reason
        # Of a job's runs, many hold light records alone where --ranks chooses some ranks.
        judged = [one for one in counted if self._is_alone or not are_left_out(one.processes)]
        missing = [text for one in judged for text in shortfalls(one, is_last=one is last)]
        ranks = [(f"rank {one.rank}", one.error) for one in last.failures if has_failed and one.rank is not None]
        warnings = (
            *lost_events(self._run),
            *self._lost,
            *missing,
            *(f"{one[0]} failed: {one[1]}" for one in ranks),
            *disturbed,
            *warn_of_run(manifest, knows_compilations=_knows_compilations(self._run)),
        )
        manifest = replace(manifest, warnings=warnings)
        if reason is not None or has_failed:
            why = reason or last.what_failed or f"exit status {last.exit_status}"
            _mark_failed(self._run, replace(manifest, status="failed", reason=why))
        else:
            _keep_manifest(self._run, replace(manifest, status="complete"))
        has_trace = last.order.recorder in ("kineto", "nsys") and last.reason is None and bool(Run(self._run).traces)
        first = last.processes[0] if last.processes else None
        return Recorded(
            self._run,
            last.exit_status,
            reason,
            has_trace=has_trace,
            has_kernels=has_trace and self._sees_kernels(last),
            has_snapshot=bool(Run(self._run).snapshots),
            out_of_memory=last.out_of_memory,
            complete_steps=len(last.processes[0].profiled) if last.processes else 0,
            failed_ranks=_describe_failures(last.failures) if has_failed else "",
            step=first.step if first is not None and has_trace else None,
            step_names=first.step_names if first is not None else (),
            left_out=first.left_out if first is not None and has_trace else None,
            warnings=warnings,
        )

    def _sees_kernels(self, outcome: Outcome) -> bool:
        if self._nsys is None:
            return True
        return outcome.processes[0].device == "cuda" and "cuda" in self._nsys.options.traces

    def _uses_cuda(self) -> bool:
        """Return whether the target will use CUDA: an earlier pass has shown it, else what is on this machine."""
        shown = [one.processes[0].device for one in self.done if one.processes]
        return shown[0] == "cuda" if shown else may_use_cuda(os.environ)


def _describe_failures(failures: Sequence[Failure]) -> str:
    """Return what ended the first rank that failed, and which others failed after it: often because it was gone."""
    ranks = [one for one in failures if one.rank is not None]
    if not ranks:
        return ""
    first, *others = ranks
    then = ", ".join(f"rank {one.rank}" for one in others[:_MOST_RANKS_NAMED])
    more = f" and {len(others) - _MOST_RANKS_NAMED:,} more" if len(others) > _MOST_RANKS_NAMED else ""
    return f"rank {first.rank}: {first.error}" + (f"; then also {then}{more}" if others else "")


def _input_position() -> int | None:
    """Return how far our standard input has been read if it can be read again, None of a pipe or a terminal."""
    try:
        return os.lseek(_STDIN, 0, os.SEEK_CUR)
    except OSError:
        return None


def _take_losses(run: Path) -> tuple[float, ...]:
    path = run / LOSSES
    if not path.exists():
        return ()
    losses: tuple[float, ...] = decode(tuple[float, ...], read_json(path))
    path.unlink()
    return losses


def _give_up(run: Path, manifest: Manifest, error: BaseException) -> None:
    """Mark a run that did not finish."""
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
            _clear_unexported(run)
        _mark_failed(run, manifest)
    if interrupted:
        kept = ", ".join(sorted(path.name for pattern in _CAPTURES for path in run.glob(pattern)))
        error.add_note(f"{run} is marked failed and keeps {kept or 'no capture'}")


def _clear_unexported(run: Path) -> None:
    """Remove files that nsys was still writing: how much of the capture they hold is unknown."""
    if not (run / NSYS_EXPORT).exists():
        for left in (run / NSYS_REPORT, (run / NSYS_REPORT).with_suffix(RAW_SUFFIX)):
            left.unlink(missing_ok=True)


def _knows_compilations(run: Path) -> bool:
    with suppress(RunError):  # a full disk may have left half a line
        return bool(read_compiled_code(run / COMPILED).compilations)
    return False


def _mark_failed(run: Path, manifest: Manifest) -> None:
    """Write the last manifest of a run that failed, and clear away what was half written."""
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
