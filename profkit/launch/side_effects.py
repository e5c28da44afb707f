"""What a program changed while it ran, as far as that shows in its folders: one that did is not run twice unasked."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_MOST_ENTRIES = 50_000
"""This many are looked at in a fraction of a second on a local disk."""


class _TooManyFiles(Exception):
    """There are more files than are looked at."""


def why_not_twice(words: Sequence[str], since: Path, run: Path) -> str | None:
    """Return in a clause what speaks against running a command a second time; None if it changed nothing that is seen.

    A command that adds to a file, resumes from its own checkpoint or refuses an output that is there does other things
    the second time. So each file counts that was written after the file ``since`` in the working directory or a folder
    that the command names, with all below it. Not counted are ``run``, hidden folders, caches (also of compiled
    code) and the files that our own standard streams are. What is written elsewhere, or sent over a network, is not
    seen.
    """
    try:
        began_ns = since.stat().st_mtime_ns
        passed_over = {_identity(run.stat()), *_streams(), *_compiler_caches()}
        for path, status in _files(_folders(words), passed_over):
            if status.st_mtime_ns > began_ns:
                return f"it wrote {os.path.relpath(path)}"
    except OSError:
        return "it took its run's directory away"
    except _TooManyFiles:
        return f"its folders hold too many files to see whether it wrote one (over {_MOST_ENTRIES:,})"
    return None


def _folders(words: Sequence[str]) -> list[Path]:
    """Return the working directory and the folders that the arguments name, none of which lies in another."""
    found = {Path.cwd()}
    for word in words[1:]:
        path = Path(word.rpartition("=")[2]).absolute()
        try:
            found.update(one for one in (path, path.parent) if one.is_dir() and one != Path("/"))
        except OSError:  # a word that can be no path
            continue
    outer: list[Path] = []
    for folder in sorted(found):
        if not any(folder.is_relative_to(one) for one in outer):
            outer.append(folder)
    return outer


def _files(folders: Iterable[Path], passed_over: set[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files in the folders and below, those that lie high first."""
    waiting, count = deque(str(folder) for folder in folders), 0
    while waiting:
        try:
            entries = list(os.scandir(waiting.popleft()))
        except OSError:
            continue
        count += len(entries)
        if count > _MOST_ENTRIES:
            raise _TooManyFiles
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # it is gone by now
                continue
            if _identity(status) in passed_over:
                continue
            if stat.S_ISREG(status.st_mode):
                yield entry.path, status
            elif stat.S_ISDIR(status.st_mode) and not entry.name.startswith(_HIDDEN) and entry.name not in _CACHES:
                waiting.append(entry.path)


_CACHES = frozenset({"__pycache__", "site-packages"})
_HIDDEN = (".", "torchinductor_")
"""How the names of folders begin that are passed over: hidden ones, and Inductor's cache where nobody chose a place."""


def _compiler_caches() -> Iterator[tuple[int, int]]:
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        with suppress(KeyError, OSError):
            yield _identity(os.stat(os.environ[variable]))


def _streams() -> Iterator[tuple[int, int]]:
    for number in range(3):
        try:
            yield _identity(os.fstat(number))
        except OSError:  # it is closed
            continue


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
