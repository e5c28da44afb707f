"""An Nsight Systems of a rank's own: the rank starts itself again under one before its first line has run.

torch's launchers know a rank by its process, end it by a signal, and wait for its status. So that process stays, and
does nothing but pass on signals and the status; the program runs below ``nsys profile``. This loads no torch.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from profkit.run.directory import LOG
from profkit.run.job import RankChoice, local_rank_number, rank_of_command
from profkit.run.recording import NSYS_STARTS, RANK_NSYS, Order, RankNsys, RankReport, behind_nsys, rank_report

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_TO_ALL = (signal.SIGINT, signal.SIGTERM)
_WITHOUT_DUMP = (0, 0)


def run_under_own_nsys(environment: Mapping[str, str] = os.environ) -> None:
    """Run this program anew under an Nsight Systems of its own and end as it did, if its rank is to be recorded so.

    Return where it is not: no rank, one left out by ``--ranks``, a launcher of ranks, a process within a recorded one;
    or nsys did not start the program.
    """
    order = Order.from_environment(environment)
    words = [sys.executable, *sys.orig_argv[1:]]
    nsys, rank = order.rank_nsys, rank_of_command(environment, words)
    if nsys is None or order.ranks is None or rank is None or RANK_NSYS in environment or not sys.executable:
        return
    if RankChoice.parse(order.ranks).includes(rank, local_rank_number(environment)) is not False:
        status = _run(nsys, rank_report(Path(order.run), rank, os.getpid()), words, environment)
        if status is not None:
            _end(status)


def _run(nsys: RankNsys, report: RankReport, words: Sequence[str], environment: Mapping[str, str]) -> int | None:
    scratch = Path(nsys.scratch, report.path.stem)
    scratch.mkdir(parents=True, exist_ok=True)
    outputs = os.dup(1), os.dup(2)
    for output in outputs:
        os.set_inheritable(output, True)
    argv = [*nsys.fill(str(report.path.with_suffix(""))), *behind_nsys(words, outputs, report.pid)]
    variables = {**environment, RANK_NSYS: report.path.stem, "TMPDIR": str(scratch)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    try:
        with open(report.path.with_name(LOG), "ab") as log:
            for _ in range(NSYS_STARTS):
                child = subprocess.Popen(
                    argv,
                    env=variables,
                    stdout=log,
                    stderr=log,
                    close_fds=False,
                    # What ends this process's group must reach the program through us, and nsys not at all.
                    start_new_session=True,
                    preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),  # noqa: PLW1509 - no thread
                )
                status = _wait(child, report.pid, nsys.launcher)
                if status is not None:
                    return status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for output in outputs:
            os.close(output)
    return None


def _wait(child: subprocess.Popen[bytes], pid_file: Path, launcher: int) -> int | None:
    """Wait until nsys has ended, and pass on to its program what signals come.

    Those with which profkit itself ends a target go to every process, to the program too. Return nsys's status, None if
    it ended before the program began, and by itself.
    """
    came = None
    while child.poll() is None:
        signalled = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if signalled.si_signo == signal.SIGCHLD:
            continue
        came = signalled.si_signo
        if signalled.si_pid == launcher and came in _TO_ALL:
            continue
        with suppress(ProcessLookupError):
            try:
                os.kill(int(pid_file.read_text(encoding="ascii")), came)
            except (FileNotFoundError, ValueError):  # nsys has not started the program
                child.send_signal(came)
    if pid_file.exists():
        return child.returncode
    return None if came is None else 128 + came


def _end(status: int) -> None:
    """End this process with a status, as a shell gives it: by the same signal if one ended the program."""
    number = status - 128 if status > 128 else -status
    if 0 < number < signal.NSIG and number in set(signal.Signals):
        resource.setrlimit(resource.RLIMIT_CORE, _WITHOUT_DUMP)
        with suppress(OSError):  # SIGKILL has no handler to take back
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(status)
