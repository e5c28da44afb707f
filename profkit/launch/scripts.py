"""A run of somebody's own command, unedited: profkit attaches itself inside, where torch is imported."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profkit.launch.conditions import Conditions, warn_of_run
from profkit.launch.directory import make_run_directory, write_manifest
from profkit.launch.manifest import first_manifest, script_manifest
from profkit.launch.nsys import Nsys, build_nsys_argv
from profkit.launch.nsys_run import require_room, run_in_nsys
from profkit.launch.processes import run_child
from profkit.launch.ranks import take_failures
from profkit.launch.record import Progress, collect_report, give_up, lossy_warnings, mark_failed, own_outputs
from profkit.launch.targets import command_name
from profkit.models.attachment import COMPLETE, CUT_SHORT, NOT_REACHED, RESULT_GLOB, VARIABLE, Attachment
from profkit.run_directory import KINETO_TRACE, LOG, NSYS_EXPORT, NSYS_REPORT, rank_traces

_CHILD = Path(__file__).parent.parent / "capture" / "child"

# nsys writes its own lines to the standard streams; the command's go where the launcher's go.
_REDIRECTED = "import os, sys; os.dup2({0}, 1); os.dup2({1}, 2); os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class RecordedScript:
    """A command that came to its end: where the run is, the command's own status, and what was recorded of it.

    ``reason`` says why nothing was recorded, None if something was.
    """

    run: Path
    exit_status: int
    reason: str | None
    has_kernels: bool
    warnings: tuple[str, ...]


def record_script(
    words: Sequence[str],
    wanted: Attachment,
    nsys: Nsys | None,
    output: Path | None,
    *,
    command: list[str],
    progress: Progress,
) -> RecordedScript:
    """Run the command ``words`` with profkit attached into a new run directory; see `Attachment` for what is recorded.

    Whatever the command's end, what was recorded by then is kept, and the manifest says how it ended.

    Args:
        wanted: its ``run`` is set here.
        command: profkit's own command line, for the manifest.

    Raises:
        RunError: the directory cannot be made.
        ToolError: nsys or its importer failed.
    """
    run = make_run_directory(output, command_name(words))
    wanted = replace(wanted, run=str(run.resolve()))
    manifest = first_manifest(wanted, " ".join(words), nsys, command)
    del manifest["workload"]["run"]  # where the directory lay is no part of what was run
    manifest["argv"] = list(words)
    write_manifest(run, manifest)
    conditions = Conditions(os.environ)
    try:
        status = (
            run_child(words, build_environment(os.environ, wanted))
            if nsys is None
            else _run_in_nsys(run, words, wanted, nsys, progress)
        )
    except BaseException as error:
        take_failures(run)
        # What was recorded before stays: an interrupted script may have been through its recorded steps for hours.
        give_up(run, {**manifest, "processes": _take_results(run)}, error)
        raise
    processes, failures = _take_results(run), take_failures(run)
    has_trace = bool(rank_traces(run)) or (run / (KINETO_TRACE if nsys is None else NSYS_EXPORT)).exists()
    reason = _why_nothing(processes, wanted, has_trace)
    conditions.close()
    finished = {**script_manifest(manifest, processes, status), **conditions.to_dict()}
    doubts = (*warn_of_run(finished), *conditions.warnings(processes))
    warnings = (*lossy_warnings(run), *_shortfalls(processes, wanted), *(failures if status else ()), *doubts)
    finished["warnings"] = warnings
    if reason is not None or status != 0:
        mark_failed(run, {**finished, "status": "failed", "reason": reason or f"exit status {status}"})
    else:
        write_manifest(run, finished)
    has_kernels = reason is None and (nsys is None or processes[0]["device"] == "cuda")
    return RecordedScript(run, status, reason, has_kernels, warnings)


def build_environment(environment: Mapping[str, str], wanted: Attachment) -> dict[str, str]:
    """Return the environment in which every Python that starts attaches profkit once it has imported torch."""
    paths = [str(_CHILD), *filter(None, [environment.get("PYTHONPATH")])]
    return {
        # torch would otherwise print lines of its own profiler's to standard error
        "KINETO_LOG_LEVEL": "99",
        **environment,
        "PYTHONPATH": os.pathsep.join(paths),
        VARIABLE: wanted.to_json(),
    }


def may_use_cuda(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether a process would find an NVIDIA GPU here; the launcher itself never loads torch."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    return not hidden and any(root.glob("dev/nvidia[0-9]*"))


def _run_in_nsys(run: Path, words: Sequence[str], wanted: Attachment, nsys: Nsys, progress: Progress) -> int:
    report = run / NSYS_REPORT
    require_room(run)
    with (
        (run / LOG).open("w+b") as log,
        own_outputs() as outputs,
        # Interrupted, nsys leaves its raw data behind, which can be gigabytes.
        tempfile.TemporaryDirectory(prefix="profkit-", ignore_cleanup_errors=True) as scratch,
    ):
        argv = build_nsys_argv(
            nsys,
            report.with_suffix(""),
            [sys.executable, "-I", "-S", "-c", _REDIRECTED.format(*outputs), *words],
            cuda=may_use_cuda(os.environ),
            temporary=tempfile.gettempdir(),
        )
        status = run_in_nsys(argv, {**build_environment(os.environ, wanted), "TMPDIR": scratch}, log, outputs)
        if any(run.glob(RESULT_GLOB)):
            with progress("exporting what Nsight Systems recorded"):
                collect_report(run, nsys, log)
    return status


def _take_results(run: Path) -> list[dict[str, Any]]:
    """Return what the command's processes left, the one that counts first: the first rank, or who recorded most."""
    found = []
    for path in sorted(run.glob(RESULT_GLOB)):
        found.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    order = [COMPLETE, CUT_SHORT, NOT_REACHED]
    return sorted(found, key=lambda one: (one["rank"] is None, one["rank"], order.index(one["state"])))


def _why_nothing(processes: list[dict[str, Any]], wanted: Attachment, has_trace: bool) -> str | None:
    if not processes:
        return (
            "nothing was recorded: no training step was seen (no optimizer's step, no call of a module) in a Python "
            "that has torch and profkit"
        )
    if processes[0]["state"] == NOT_REACHED:
        seen = processes[0]["steps_seen"]
        return (
            f"nothing was recorded: the script made {seen} steps, and recording was to begin after "
            f"{wanted.warmup_steps}; lower --warmup"
        )
    return None if has_trace else "nothing was recorded: the recorder left no trace"


def _shortfalls(processes: list[dict[str, Any]], wanted: Attachment) -> list[str]:
    if not processes or processes[0]["state"] != CUT_SHORT:
        return []
    whole = len(processes[0]["profiled"])
    return [f"the script ended while it was recorded: {whole} whole steps of the {wanted.steps} that were wanted"]
