"""Result files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

_MODE = 0o666


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one; a pipe or device is written to as it is.

    Raises:
        OSError: it cannot be written; ``filename`` is ``path``.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    # A link is followed: the file that it names is replaced, not the link.
    target = path.resolve()
    partial = target.with_name(f".profkit-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        try:
            with partial.open("xb") as file:
                file.write(data)
            partial.chmod(_mode_of(target))
            # Only what was written to its end, and closed without an error, takes the place of the old file.
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def _mode_of(path: Path) -> int:
    """Return the mode to give a file: the one it has, else what the process's umask leaves."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return _MODE & ~mask
