"""A run of somebody's own command, unedited: profkit attaches itself inside, where torch is imported."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from profkit.launch.script_passes import Pass, shortfalls, why_no_step, why_nothing
from profkit.launch.targets import command_name
from profkit.models.attachment import COMPLETE, CUT_SHORT, NOT_REACHED, RESULT_GLOB, VARIABLE, Attachment
from profkit.run_directory import LOG, NSYS_REPORT, holds_snapshot

_CHILD = Path(__file__).parent.parent / "capture" / "child"

_STDIN = 0

_TIMES = ("attached", "profiled", "during")

# nsys writes its own lines to the standard streams; the command's go where the launcher's go.
_REDIRECTED = "import os, sys; os.dup2({0}, 1); os.dup2({1}, 2); os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class RecordedScript:
    """A command that came to its end: where the run is, the command's own status, and what was recorded of it.

    ``reason`` says why what was asked for last was not recorded, None if it was.
    """

    run: Path
    exit_status: int
    reason: str | None
    has_trace: bool
    has_kernels: bool
    has_snapshot: bool
    warnings: tuple[str, ...]


def record_script(
    words: Sequence[str],
    wanted: Sequence[Attachment],
    nsys: Nsys | None,
    output: Path | None,
    *,
    command: list[str],
    progress: Progress,
) -> RecordedScript:
    """Run the command ``words`` with profkit attached into a new run directory; see `Attachment` for what is recorded.

    It is run once for each of ``wanted``, in that order, as long as all goes well, and reads our standard input each
    time: a file from the same place, a pipe only once. Whatever its end, what was recorded
    by then is kept, and the manifest says how it ended.

    Args:
        wanted: their ``run`` is set here.
        command: profkit's own command line, for the manifest.

    Raises:
        RunError: the directory cannot be made.
        ToolError: nsys or its importer failed.
    """
    run = make_run_directory(output, command_name(words))
    manifest = _begin_manifest(run, words, wanted, nsys, command)
    done: list[Pass] = []
    conditions, input_start = Conditions(os.environ), _input_position()
    try:
        for one in wanted:
            if done and not done[-1].may_go_on:
                break
            if done and input_start is not None:
                os.lseek(_STDIN, input_start, os.SEEK_SET)
            done.append(_make_pass(run, words, one, nsys, progress))
            manifest = _told_by(done[-1], manifest)
    except BaseException as error:
        take_failures(run)
        # What was recorded before stays: an interrupted script may have been through its recorded steps for hours.
        give_up(run, {**manifest, "processes": _take_results(run)}, error)
        raise
    failures, last = take_failures(run), done[-1]
    conditions.close()
    happened = (*(failures if last.exit_status else ()), *conditions.warnings(last.processes))
    return _conclude(run, {**manifest, **conditions.to_dict()}, done, wanted, happened)


def _input_position() -> int | None:
    """Return how far our standard input has been read if it can be read again, None of a pipe or a terminal."""
    try:
        return os.lseek(_STDIN, 0, os.SEEK_CUR)
    except OSError:
        return None


def _begin_manifest(
    run: Path, words: Sequence[str], wanted: Sequence[Attachment], nsys: Nsys | None, command: list[str]
) -> dict[str, Any]:
    last = wanted[-1]
    manifest = first_manifest(last, " ".join(words), nsys, command)
    for what in ("run", "memory"):  # where the directory lay is no part of what was run; memory has its own part
        del manifest["workload"][what]
    manifest["argv"] = list(words)
    if last.recorder == "memory":
        manifest["profiler"] = None
    write_manifest(run, manifest)
    return manifest


def _make_pass(run: Path, words: Sequence[str], wanted: Attachment, nsys: Nsys | None, progress: Progress) -> Pass:
    wanted = replace(wanted, run=str(run.resolve()))
    if wanted.recorder == "nsys" and nsys is not None:
        status = _run_in_nsys(run, words, wanted, nsys, progress)
    else:
        status = run_child(words, build_environment(os.environ, wanted), reads_input=True)
    processes = _take_results(run)
    return Pass(wanted, status, processes, why_nothing(run, processes, wanted))


def _told_by(one: Pass, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with what a pass found; what the allocator's pass found stands apart."""
    told = script_manifest(manifest, one.processes, one.exit_status)
    if one.wanted.memory is None:
        return told
    timed = [(told.pop(part, None) or {}).get("steps", []) for part in ("attached", "profiled")]
    processes = [{key: one[key] for key in one if key not in _TIMES} for one in told.pop("processes")]
    return {**told, "memory": {**asdict(one.wanted.memory), "steps": timed[1], "processes": processes}}


def _conclude(
    run: Path, manifest: dict[str, Any], done: list[Pass], wanted: Sequence[Attachment], happened: Sequence[str]
) -> RecordedScript:
    """Write the last manifest and return what there is to say; ``happened`` is what the launcher saw go wrong."""
    last = done[-1]
    reason = last.reason
    if reason is None and last.exit_status == 0 and len(done) < len(wanted):
        reason = why_no_step(last.processes, last.wanted)
    missing = [text for one in done for text in shortfalls(one, is_last=one is last)]
    warnings = (*lossy_warnings(run), *missing, *happened, *warn_of_run(manifest))
    finished = {**manifest, "warnings": warnings}
    if reason is not None or last.exit_status != 0:
        mark_failed(run, {**finished, "status": "failed", "reason": reason or f"exit status {last.exit_status}"})
    else:
        write_manifest(run, {**finished, "status": "complete"})
    has_trace = last.wanted.memory is None and last.reason is None
    has_kernels = has_trace and (last.wanted.recorder != "nsys" or last.processes[0]["device"] == "cuda")
    return RecordedScript(run, last.exit_status, reason, has_trace, has_kernels, holds_snapshot(run), warnings)


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
        environment = {**build_environment(os.environ, wanted), "TMPDIR": scratch}
        status = run_in_nsys(argv, environment, log, outputs, reads_input=True)
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
