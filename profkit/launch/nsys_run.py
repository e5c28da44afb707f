"""nsys at work: the room that it needs, and what it means when it ends in another way than its target."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from profkit.errors import ToolError
from profkit.launch.processes import run_tool

NO_ROOM_BYTES = 100 * 1024**2
"""With less than this nothing is recorded: where its TMPDIR is full, nsys 2023.4.4 waits for ever."""

_FULL_BYTES = 1024**2
# nsys says this when it does not understand its own command line; the target has not been started then.
_REFUSED = re.compile(rb"\A\s*([^\n]+)\n.*^usage: nsys", re.MULTILINE | re.DOTALL)


def require_room(run: Path) -> None:
    """Raise `ToolError` unless there is room for a capture, and for what nsys collects meanwhile."""
    places = ((run, "name another with -o"), (Path(tempfile.gettempdir()), "point TMPDIR to another disk"))
    for folder, cure in places:
        free = shutil.disk_usage(folder).free
        if free < NO_ROOM_BYTES:
            left = f"{free / 1024**2:.1f} MiB are free and nsys wants {NO_ROOM_BYTES // 1024**2}"
            raise ToolError(f"{folder}: the disk is full: {left}; free some space, or {cure}")


def is_full(folder: Path) -> bool:
    """Return whether the disk is as good as full: what was written to it last may be cut off."""
    return shutil.disk_usage(folder).free < _FULL_BYTES


def run_in_nsys(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    pass_fds: Sequence[int] = (),
    *,
    reads_input: bool = False,
) -> int:
    """Run nsys around its target to the end and return the target's exit status.

    nsys hands its standard input on to the target: an empty one, or ours if the target ``reads_input``.

    Raises:
        ToolError: nsys was killed, or it did not understand how it was called.
    """
    said_from = log.tell()
    status = run_tool(argv, environment, log, pass_fds, reads_input=reads_input)
    if status != 0:
        log.seek(said_from)
        refused = _REFUSED.match(log.read())
        if refused:
            raise ToolError(f"{argv[0]} did not start the target: {refused[1].decode(errors='replace').strip()}")
    return status
