"""One run from start to end: the directory, the unprofiled twin, the profiled run, the manifest."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from profkit.errors import RunError, ToolError
from profkit.launch.conditions import Conditions, warn_of_run
from profkit.launch.directory import make_run_directory, write_json, write_manifest
from profkit.launch.export import export_to
from profkit.launch.importer import import_raw
from profkit.launch.manifest import failed_manifest, first_manifest, last_manifest
from profkit.launch.nsys import Nsys, build_nsys_argv
from profkit.launch.nsys_run import is_full, require_room, run_in_nsys
from profkit.launch.processes import run_child, uninterrupted
from profkit.launch.ranks import explain_failure, join_results, take_results
from profkit.models.memory import predict_memory
from profkit.models.step_work import model_work
from profkit.models.workload import CallableWorkload, MemoryOptions, MemoryOrder, Order, Workload
from profkit.names import context_range
from profkit.run_directory import KINETO_TRACE, LEDGER, LOG, NSYS_EXPORT, NSYS_REPORT, PREDICTED, SNAPSHOT, WORK

Progress = Callable[[str], AbstractContextManager[object]]
AnyWorkload = Workload | CallableWorkload

_RESULT = "worker.json"
_RESULTS = "worker*.json"
_INTERRUPTED = 130
_CAPTURES = ("trace.*", "snapshot.*")

# nsys says this and exits 0: seen when its CUPTI is older than the driver.
_LOSSY = b"Errors occurred while processing the raw events"


@dataclass(frozen=True)
class Recorded:
    """A run that came to its end: where it is, the target's own exit status, and what to know before reading it.

    ``has_kernels`` is False when the recorder sees none: Nsight Systems without CUDA, or a target that failed.
    ``has_snapshot`` says that the allocator's history is there, also that of a target that ran out of memory.
    """

    run: Path
    exit_status: int
    has_kernels: bool = False
    has_snapshot: bool = False
    warnings: tuple[str, ...] = ()


class _TargetFailed(Exception):
    def __init__(self, exit_status: int, reason: str | None) -> None:
        self.exit_status = exit_status
        self.reason = reason


def require_torch() -> None:
    """Raise `ToolError` unless torch is installed; it is not imported."""
    if find_spec("torch") is None:
        raise ToolError("torch is not installed here: pip install 'profkit[cpu]', or the CUDA build for your driver")


def record_run(
    workload: AnyWorkload,
    nsys: Nsys | None,
    output: Path | None,
    command: list[str],
    progress: Progress,
    *,
    memory: MemoryOptions | None = None,
) -> Recorded:
    """Run ``workload`` unprofiled, then under nsys or (``nsys`` None) torch.profiler, into a new run directory.

    With ``memory`` the allocator is recorded too, in a process of its own, for recording slows the host. It goes first,
    so that a workload that does not fit leaves its snapshot.

    The manifest says ``incomplete`` until the end, then ``complete``, or ``failed`` with the target's exit status or
    the reason.

    Args:
        command: the command line, for the manifest.
        progress: makes a context manager that shows what is being done.

    Raises:
        RunError: the directory cannot be made.
        ToolError: nsys or its importer failed.
    """
    run = make_run_directory(output, workload.target.replace(":", "-"))
    manifest = first_manifest(workload, workload.target, nsys, command)
    write_manifest(run, manifest)
    conditions = Conditions(os.environ)
    try:
        if memory is not None and isinstance(workload, Workload):
            write_json(run / PREDICTED, predict_memory(workload).to_dict())
        remembered = None if memory is None else _record_memory(run, workload, memory, progress)
        with progress("timing the steps without a profiler"):
            clean = _run_worker(Order(workload, "none", str(run / _RESULT)))
        # The launcher cannot see the GPU (that takes torch); the twin has told.
        workload = replace(workload, device=clean["device"])
        if isinstance(workload, Workload):
            _write_work(run, workload, clean)
        profiled = (
            _record_kineto(run, workload, progress) if nsys is None else _record_nsys(run, workload, nsys, progress)
        )
        if profiled["work"] is not None:
            write_json(run / WORK, profiled["work"])
    except _TargetFailed as failure:
        mark_failed(run, {**failed_manifest(manifest, failure.reason), "exit_status": failure.exit_status})
        return Recorded(run, failure.exit_status, has_snapshot=(run / SNAPSHOT).exists())
    except BaseException as error:
        give_up(run, manifest, error)
        raise
    conditions.close()
    finished = {**last_manifest(manifest, clean, profiled), **conditions.to_dict()}
    warnings = (*_warnings(run, workload), *warn_of_run(finished), *conditions.warnings([clean, profiled]))
    finished["warnings"] = warnings
    if remembered is not None:
        finished["memory"] = {"steps": remembered["steps"], "losses": remembered["losses"], **asdict(memory)}  # type: ignore[arg-type]
    write_manifest(run, finished)
    has_kernels = nsys is None or (workload.device == "cuda" and "cuda" in nsys.options.traces)
    return Recorded(run, 0, has_kernels, remembered is not None, warnings)


def _write_work(run: Path, workload: Workload, measured: dict[str, Any]) -> None:
    """Write what arithmetic says of a built-in model's ranges, now that it is known where the model runs."""
    each: dict[tuple[str, ...], Workload] = {
        (context_range(one.context),) if workload.contexts else (): one for one in workload.with_each_context()
    }
    write_json(run / WORK, model_work(each, tf32=uses_tf32(measured)))


def uses_tf32(measured: dict[str, Any]) -> bool:
    """Return whether fp32 products were done in TF32, by a worker's account of itself."""
    conditions = measured["conditions"]
    precision = conditions["cuda_matmul_fp32_precision"]
    if precision is None:  # before torch 2.9
        precision = "ieee" if conditions["float32_matmul_precision"] == "highest" else "tf32"
    return bool(measured["device"] == "cuda" and precision == "tf32")


def give_up(run: Path, manifest: dict[str, Any], error: BaseException) -> None:
    """Mark a run that did not come to its end."""
    interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
    content = failed_manifest(manifest, "interrupted" if interrupted else str(error))
    with uninterrupted():
        if interrupted:
            content["exit_status"] = error.code if isinstance(error, SystemExit) else _INTERRUPTED
            _clear_unexported(run)
        mark_failed(run, content)
    if interrupted:
        kept = ", ".join(sorted(path.name for pattern in _CAPTURES for path in run.glob(pattern)))
        error.add_note(f"{run} is marked failed and keeps {kept or 'no capture'}")


def _clear_unexported(run: Path) -> None:
    """Remove what nsys was interrupted at: nobody can say how much of the capture it holds."""
    if not (run / NSYS_EXPORT).exists():
        for left in (run / NSYS_REPORT, (run / NSYS_REPORT).with_suffix(".qdstrm")):
            left.unlink(missing_ok=True)


def mark_failed(run: Path, manifest: dict[str, Any]) -> None:
    """Write the last manifest of a run that failed, and clear away what was half written."""
    for partial in (*run.glob("partial.*"), *run.glob(_RESULTS)):
        partial.unlink()
    # On a full disk the manifest stays what it was, `incomplete`: what went wrong first is what has to be told.
    with suppress(OSError, RunError):
        write_manifest(run, manifest)


def _record_memory(run: Path, workload: AnyWorkload, options: MemoryOptions, progress: Progress) -> dict[str, Any]:
    memory = MemoryOrder(str(run / SNAPSHOT), str(run / LEDGER), **asdict(options))
    with progress("recording the allocator"):
        return _run_worker(Order(workload, "memory", str(run / _RESULT), memory=memory))


def _record_kineto(run: Path, workload: AnyWorkload, progress: Progress) -> dict[str, Any]:
    with progress("recording the steps with torch.profiler"):
        return _run_worker(Order(workload, "kineto", str(run / _RESULT), str(run / KINETO_TRACE)))


def _record_nsys(run: Path, workload: AnyWorkload, nsys: Nsys, progress: Progress) -> dict[str, Any]:
    report = run / NSYS_REPORT
    require_room(run)
    with (
        (run / LOG).open("w+b") as log,
        own_outputs() as outputs,
        # Interrupted, nsys leaves its raw data behind, which can be gigabytes.
        tempfile.TemporaryDirectory(prefix="profkit-", ignore_cleanup_errors=True) as scratch,
    ):
        order = Order(workload, "nsys", str(run / _RESULT), output_fds=outputs)
        argv = build_nsys_argv(
            nsys,
            report.with_suffix(""),
            _worker_argv(order),
            cuda=workload.device == "cuda",
            temporary=tempfile.gettempdir(),
        )
        with progress("recording the steps with Nsight Systems"):
            result = _run(argv, order, {"TMPDIR": scratch}, log)
        with progress("exporting what Nsight Systems recorded"):
            collect_report(run, nsys, log)
    return result


def collect_report(run: Path, nsys: Nsys, log: IO[bytes]) -> None:
    """Export the report that nsys left in ``run``, imported first if it came out raw.

    The report is deleted then if it is not to be kept.

    Raises:
        ToolError: there is none, or it could not be imported or exported.
    """
    report = run / NSYS_REPORT
    raw = report.with_suffix(".qdstrm")
    if raw.exists() and not report.exists():
        import_raw(raw, report, nsys.path, log)
    if not report.exists():
        if is_full(run):
            raise ToolError(
                f"{run}: the disk is full, and nsys left no report; free some space, or name another with -o"
            )
        raise ToolError(f"{nsys.path} left no report; what it said is in {log.name}")
    export_to(nsys, report, run / NSYS_EXPORT, log)
    if not nsys.options.keep_report:
        report.unlink()


def _worker_argv(order: Order) -> list[str]:
    # -P: a file in the working directory must not stand in for a module of the same name.
    what = "worker" if order.workload.ranks == 1 else "rank_launcher"
    return [sys.executable, "-P", "-m", f"profkit.capture.{what}", order.to_json()]


def _run_worker(order: Order) -> dict[str, Any]:
    return _run(_worker_argv(order), order, {})


def _run(argv: list[str], order: Order, variables: dict[str, str], log: IO[bytes] | None = None) -> dict[str, Any]:
    """Run ``argv``, a worker or a profiler around it, with ``variables`` set, and return what the worker found out."""
    # torch would otherwise print lines of its own profiler's to standard error.
    environment = {**os.environ, "KINETO_LOG_LEVEL": "99", **variables}
    fds = order.output_fds or ()
    status = run_child(argv, environment) if log is None else run_in_nsys(argv, environment, log, fds)
    results = take_results(Path(order.result_path))
    if status != 0:
        raise _TargetFailed(status, explain_failure(results))
    return join_results(results)


def _warnings(run: Path, workload: AnyWorkload) -> tuple[str, ...]:
    warnings = lossy_warnings(run)
    if isinstance(workload, Workload) and workload.compile_mode != "none":
        warnings.append("compiled code carries no ranges: the phases are there, layers and attention are not")
    return tuple(warnings)


def lossy_warnings(run: Path) -> list[str]:
    """Return what is to be said if nsys lost events, by its own log."""
    log = run / LOG
    if not log.exists() or _LOSSY not in log.read_bytes():
        return []
    return [f"nsys lost events ({log}); its version may be too old for the driver: the capture is lossy"]


@contextmanager
def own_outputs() -> Iterator[tuple[int, int]]:
    """Yield copies of our standard output and error, for a child whose own two belong to a profiler."""
    copies = os.dup(1), os.dup(2)
    try:
        yield copies
    finally:
        for copy in copies:
            os.close(copy)
