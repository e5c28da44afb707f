"""An Nsight Systems around each rank that ``--ranks`` chooses: each rank starts its own, here reports are collected.

One around all ranks of a machine would record the others too. It is the same where all ranks of a machine are chosen,
since that is only known once they run. The rank's own side is `profkit.capture.own_nsys`.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from profkit.errors import ToolError
from profkit.launch.family import Family
from profkit.launch.nsys import Nsys, build_nsys_argv
from profkit.launch.nsys_run import EXPORTING, RAW_SUFFIX, collect_report, private, require_room
from profkit.launch.processes import PATIENCE_S, folder_of, run_child, uninterrupted
from profkit.run.directory import LOG, NSYS_REPORT, name_of_rank
from profkit.run.recording import (
    RANK_NSYS,
    VARIABLE,
    Order,
    RankNsys,
    RankReport,
    find_rank_reports,
)

_POLL_S = 0.02
_UNREAD = "unread.nsys-rep"


def run_ranks_in_nsys(
    words: Sequence[str],
    environment: Mapping[str, str],
    nsys: Nsys,
    *,
    uses_cuda: bool,
    progress: Callable[[str], AbstractContextManager[object]],
) -> tuple[int, list[str]]:
    """Run a target whose chosen ranks start an Nsight Systems each.

    Return its exit status, and a line for each rank that recorded but whose report could not be collected.

    Args:
        words: the target's command.
        environment: its environment, with profkit's order.
        nsys: which one, and what it is to record.
        uses_cuda: whether the ranks will use CUDA.
        progress: shows what is done while nothing else is seen.

    Raises:
        ToolError: there is no room for nsys, or no rank's report could be collected.
    """
    order = Order.from_environment(environment)
    run = Path(order.run)
    require_room(run)
    with (
        open(run / LOG, "w+b", opener=private) as log,
        tempfile.TemporaryDirectory(prefix="profkit-", ignore_cleanup_errors=True) as scratch,
    ):
        argv = build_nsys_argv(nsys, Path("{report}"), [], cuda=uses_cuda, temporary=tempfile.gettempdir())
        ordered = replace(order, rank_nsys=RankNsys(tuple(argv), scratch, os.getpid()))
        try:
            status = run_child(
                words, {**environment, VARIABLE: ordered.to_json()}, reads_input=True, tool=folder_of(nsys.path)
            )
        except KeyboardInterrupt:
            # The ranks have ended, and their nsys with them: they may have been through their recorded steps for hours.
            with uninterrupted(), suppress(ToolError), progress(EXPORTING):
                _collect(run, nsys, log)
            raise
        with progress(EXPORTING):
            return status, _collect(run, nsys, log)


def _collect(run: Path, nsys: Nsys, log: IO[bytes]) -> list[str]:
    """Export the reports of ranks that recorded, and remove what the others left; of a restarted rank the last counts.

    Return a line for each rank whose report could not be collected.

    Raises:
        ToolError: that is so for all ranks that recorded.
    """
    found = find_rank_reports(run)
    recorded = {report.rank: report for report in found if report.recorded.exists()}
    errors: dict[int, ToolError] = {}
    for rank, report in sorted(recorded.items()):
        try:
            _await_end(report, folder_of(nsys.path))
            final = run / name_of_rank(NSYS_REPORT, rank)
            for left in (report.path, report.path.with_suffix(RAW_SUFFIX)):
                if left.exists():
                    left.replace(final.with_suffix(left.suffix))
            collect_report(final, nsys, log)
        except ToolError as error:
            errors[rank] = error
    for path in [path for report in found for path in run.glob(f"{report.path.stem}.*")]:
        path.unlink()
    if errors and len(errors) == len(recorded):
        raise next(iter(errors.values()))
    return [f"rank {rank}: {error}{_put_aside(run, rank)}" for rank, error in errors.items()]


def _put_aside(run: Path, rank: int) -> str:
    """Rename a report that could not be exported, so that the others are read without it; return what to say of it."""
    report = run / name_of_rank(NSYS_REPORT, rank)
    if not report.exists():
        return ""
    kept = report.replace(run / name_of_rank(_UNREAD, rank))
    return f"; the report is kept as {kept.name}, and the other ranks' are read without it"


def _await_end(report: RankReport, tool: Path) -> None:
    """Wait until a rank's nsys has written its report.

    A launcher that ends a rank's first process by SIGKILL wants its program to end, which lives on under nsys.

    Raises:
        ToolError: the rank was left running, as by a script that does not wait for what it starts.
    """
    under_nsys = Family(report.path.stem, None, RANK_NSYS)
    if _runs(report.starter, VARIABLE):
        raise ToolError("it ran on when the command had ended, so nothing of it was kept")
    under_nsys.send(signal.SIGKILL, but=tool)
    deadline = time.monotonic() + PATIENCE_S
    while under_nsys.members() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    under_nsys.end()


def _runs(pid: int, variable: str) -> bool:
    """Return whether a process runs, and has this variable: the number may be another's by now."""
    try:
        return f"{variable}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
