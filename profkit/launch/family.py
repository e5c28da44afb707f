"""A child process and all that it started: found, asked to end, and forced to.

nsys puts its agent and the target into sessions of their own, torchrun its workers, and a script may clear the
environment of what it starts, so no single sign is enough. A process belongs to the family if it carries the mark in
its environment, or is in the child's session, or descends from a process that is. This needs Linux's /proc. What has
left the session, cleared its environment and lost its parent is a daemon that wants to live on, and does: to have Linux
give such orphans to us (PR_SET_CHILD_SUBREAPER) would change what every orphan of the script sees as its parent.

Run as a program (``python -I -S family.py MARK PID``) it is the guard of a launcher: it reads standard input, and ends
the family if that closes before a word has come, which is what happens when the launcher is killed. It imports nothing
of profkit, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "PROFKIT_CHILD"
"""The variable whose value marks all that one child starts."""

GRACE_S = 5.0
"""How long a process may take to end after SIGTERM, before SIGKILL."""

DONE = b"done"
"""What the launcher writes to its guard when the child has ended."""

_POLL_S = 0.02


@dataclass(frozen=True)
class Family:
    """The child ``pid`` (None: its start was interrupted), which leads a session, and what has the mark in
    ``variable``.
    """

    mark: str
    pid: int | None
    variable: str = MARK

    def members(self) -> set[int]:
        parents, members = {}, set()
        wanted = f"{self.variable}={self.mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                # The name may hold spaces and parentheses; then state, parent, group, session.
                state, parent, _group, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if state in "ZX":
                    continue
                process = int(folder.name)
                parents[process] = int(parent)
                if self.pid in (process, int(session)) or wanted in (folder / "environ").read_bytes().split(b"\0"):
                    members.add(process)
            except OSError:  # it has ended by now, or is another user's
                continue
        grown = True
        while grown:
            children = {process for process, parent in parents.items() if parent in members} - members
            members |= children
            grown = bool(children)
        return members - {os.getpid()}

    def send(self, number: int, *, but: Path | None = None) -> None:
        """Send the signal to every member, except those whose executable lies in the folder ``but``."""
        _send((process for process in self.members() if but is None or not _lies_in(process, but)), number)

    def send_to_first(self, number: int, *, but: Path | None) -> None:
        """Send the signal to the child, or to what it started first if its executable lies in the folder ``but``."""
        if but is None:
            _send(filter(None, [self.pid]), number)
            return
        own = {process for process in self.members() if not _lies_in(process, but)}
        _send((process for process in own if _parent_of(process) not in own), number)

    def end(self, *, look: Callable[[], object] = lambda: None, looks: int = 1) -> None:
        """Ask every member to end, force what is left after `GRACE_S`, and return when none is left.

        Args:
            look: called between looks; it reaps the child.
            looks: how often to find nothing before believing it; right after exec Linux shows an empty environment.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            asked: set[int] = set()
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline:
                look()
                members = self.members()
                # Once: a script's own handler must not run again and again. Parents, which are older, come first: one
                # that sees its loader's worker end takes that for a failure, and goes on as after one.
                _send(sorted(members - asked), number)
                asked |= members
                if not members:
                    looks -= 1
                    if looks <= 0:
                        return
                time.sleep(_POLL_S)


def _send(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _lies_in(process: int, folder: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{process}/exe")).is_relative_to(folder)
    except OSError:
        return False


def _parent_of(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    mark, pid = sys.argv[1:]
    if os.read(0, len(DONE)) != DONE:
        Family(mark, int(pid)).end()


if __name__ == "__main__":
    main()
